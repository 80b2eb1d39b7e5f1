/*
 * bench_updates: synthetic bf16 weights before and after an optimizer step, of any density.
 *
 * Weights are about normal. Each has an fp32 master that lies anywhere in the cell of numbers that
 * round to it, and the master takes a step like Adam's: about normal, of a scale that belongs to
 * its row and column. The weights whose masters leave their cells change; the learning rate is
 * chosen to give the density asked for.
 */
#ifndef BENCH_UPDATES_H
#define BENCH_UPDATES_H

#include <stddef.h>
#include <stdint.h>

/* Fills both with `count` weights, in rows of 4096. `density`: the share that changes, above 0;
 * from 1 on all do. The same arguments give the same weights. Returns the density that came of it.
 */
double bench_updates_make(uint64_t seed, double density, uint16_t *before, uint16_t *after,
                          size_t count);

#endif
