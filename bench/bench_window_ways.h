/*
 * bench_window_ways: how states that live on the host can be stepped on the device, and the limits
 * of the machine beside them: the arithmetic alone, and the copies in each direction alone.
 *
 * All ways but `resident` step the same states, those of the image. A step has ended once every
 * byte is back in it.
 */
#ifndef BENCH_WINDOW_WAYS_H
#define BENCH_WINDOW_WAYS_H

#include "bench_states.h"

/* Bytes of the image that lie together: one copy. */
typedef struct bench_run {
    char *from;
    uint64_t bytes;
} bench_run;

typedef struct bench_ways bench_ways;
typedef struct bench_way bench_way;

/* One way. Its device memory is taken in its first step, and kept. */
struct bench_way {
    const char *name;
    refit_status (*step)(bench_ways *on, bench_way *way, refit_error *error);
    uint32_t slots;      /* how many stretches of device memory it uses */
    uint64_t slot_bytes; /* of each */
    char *memory;
    uint64_t device_bytes;        /* by which refit's device memory has grown in its steps */
    uint64_t in_bytes, out_bytes; /* of the last step */
    uint64_t allocations;         /* of the last step */
    bench_series seconds;
    bench_series waited; /* refit's windows: what the library says that its caller waited */
};

enum {
    BENCH_RESIDENT, /* the arithmetic alone */
    BENCH_WINDOWS,
    BENCH_TWO_WINDOWS,
    BENCH_NO_OVERLAP,
    BENCH_TWO_SLOTS,
    BENCH_WAYS,
};
enum { BENCH_ROW = 3 };

/* What the ways share. */
struct bench_ways {
    bench_states *states;
    uint64_t window_bytes;
    bench_slice *slices;   /* of each parameter, while it is stepped */
    bench_slice *resident; /* of each parameter, on the device */
    bench_slice *portions; /* of parameters: what refit's windows are made of */
    uint32_t *first_part;  /* of each portion */
    uint32_t portion_count;
    refit_window_part *parts;
    uint32_t part_count;
    bench_run *runs;
    uint32_t run_count;
    char *ring;           /* device memory of the copies alone: twice BENCH_ROW windows */
    bench_series in, out; /* copies in alone, copies out alone */
    bench_series both;    /* both at once */
    bench_series at_once; /* both and the arithmetic at once, on states of its own */
    bench_series longest; /* of copies in, copies out and arithmetic alone */
    bench_way all[BENCH_WAYS];
};

/* On failure, too, bench_ways_close gives back what there is. */
refit_status bench_ways_open(bench_ways *on, bench_states *states, const refit_config *config,
                             refit_error *error);
refit_status bench_ways_close(bench_ways *on, refit_error *error);

/* Times one step of a way; round 0 is the cold one. The resident way comes first in it. */
refit_status bench_ways_step(bench_ways *on, uint32_t which, uint32_t round, refit_error *error);

/* Times large copies of all bytes, in one direction, in both at once, and beside the arithmetic;
 * behind the resident step of the same round. */
refit_status bench_ways_copies(bench_ways *on, uint32_t round, refit_error *error);

/* Do the image and the device's states hold the same? See bench_states_check. */
refit_status bench_ways_check(bench_ways *on, refit_error *error);

#endif
