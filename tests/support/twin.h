/* twin: this program once more, in a process of its own, which a word tells what to be. It hears
 * the test on its standard input and answers on its standard output. */
#ifndef TWIN_H
#define TWIN_H

#include <stddef.h>
#include <sys/types.h>

typedef struct twin {
    pid_t pid;
    int to;
    int from;
} twin;

/* `program` is argv[0]: under valgrind, /proc/self/exe is another. */
twin twin_start(const char *program, const char *word);
void twin_say(const twin *other, const void *bytes, size_t count);
void twin_hear(const twin *other, void *bytes, size_t count);

/* Ends its input, and waits: what waitpid says of it. */
int twin_leave(const twin *other);
void twin_kill(const twin *other);

#endif
