/*
 * slow_link: a network namespace for the workers, connected only by a pair of virtual cables
 * that the kernel's token buckets keep slow, as a link between hosts is. Needs root, ip and tc.
 */
#ifndef CHAOS_SLOW_LINK_H
#define CHAOS_SLOW_LINK_H

#include <stdbool.h>

typedef struct slow_link {
    char space[32];   /* the namespace's name; empty: not open */
    char address[32]; /* of this end, as those in the namespace reach it */
} slow_link;

/* `rate` as tc takes it ("300mbit"). False: the machine does not allow it. */
bool slow_link_open(slow_link *link, const char *rate);
void slow_link_close(slow_link *link);

/* This process, which has one thread, goes into the namespace. */
bool slow_link_enter(const slow_link *link);

#endif
