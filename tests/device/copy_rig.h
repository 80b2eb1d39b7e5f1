/*
 * Batches on the CUDA device with the fake driver: memory on the device, pinned memory on the host,
 * and a list of copies between them, with bytes on both sides that no copy may touch.
 */
#ifndef COPY_RIG_H
#define COPY_RIG_H

#include "tests/device/cuda_case.h"

#define RIG_BATCH 16384u

typedef struct copy_rig {
    refit_device *device;
    refit_stream_ref stream;
    char *host;   /* pinned in one registration */
    char *memory; /* on the device */
    uint64_t bytes;
    rft_copy *out;  /* device to host */
    rft_copy *back; /* the same copies, the other way */
    uint32_t count;
    uint32_t slack; /* of each */
    refit_error error;
} copy_rig;

/* Its end closes the rig, if it was opened; warnings are heard. */
extern copy_rig rig;

int rig_case_begin(void **state);
int rig_case_end(void **state);

#define RIG_TEST(name) TEST_WITH(name, rig_case_begin, rig_case_end)

/* Opens the device with `settings` ("offload.batch=3", …, NULL) and `bytes` on each side. */
void rig_open(uint64_t bytes, const char *const *settings);
void rig_close(void);

/* For the next of several rounds of a test: all is closed, checked and as new. */
void rig_case_again(void);

/* `count` copies of known memory, each of `size` bytes: on the host `host_gap` bytes lie between
 * two, of which `slack` are padding; on the device `memory_gap`. */
void rig_lay(uint32_t count, uint64_t size, uint64_t host_gap, uint32_t slack, uint64_t memory_gap);

/* Part `i` of `parts` of the copies, on a stream of its own that the caller opens and closes. */
copy_rig rig_part(uint32_t i, uint32_t parts);

/* New bytes at the sources, marks everywhere else. */
void rig_fill(bool out, unsigned seed);

/* The bytes of all copies are where they belong, and nothing but padding has changed. */
void rig_check(bool out, unsigned seed);

/* All copies, in batches of RIG_BATCH. */
refit_status rig_put(copy_rig *part, bool out, rft_copy_order order);
void rig_wait(copy_rig *part);

/* Out and back again, filled, waited for and checked. */
void rig_round(unsigned seed);

uint64_t rig_small_bytes(void);

#endif
