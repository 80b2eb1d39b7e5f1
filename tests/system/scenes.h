/*
 * scenes: tests that mostly wait (for a heart that beats no more, say), played side by side, each
 * in a process of its own.
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

/* Plays them all, a few at a time, and says how many have failed. `points` are the points' names.
 */
int scenes_play(const scene_kind *kinds, size_t count, const char *const *points);

#define SCENES_ENDPOINT 128

/* Any free port of an address that only this scene uses: after a trainer was killed, the port can
 * be bound again. */
void scenes_endpoint(char endpoint[SCENES_ENDPOINT]);

#endif
