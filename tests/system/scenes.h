/*
 * scenes: tests that mostly wait (until a peer counts as lost), all at once, each in a process of
 * its own.
 */
#ifndef SCENES_H
#define SCENES_H

#include <stdbool.h>
#include <stddef.h>

/* A scene that is played once for each point from `first` up to `end`. */
typedef struct scene_kind {
    const char *name;
    void (*play)(unsigned at, bool shm, unsigned slots);
    bool shm;
    unsigned slots;
    unsigned first;
    unsigned end;
} scene_kind;

/* Plays them all and says how many have failed. `points` are the points' names. */
int scenes_play(const scene_kind *kinds, size_t count, const char *const *points);

#endif
