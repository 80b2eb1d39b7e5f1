/*
 * What every test of the offloader stands on: a device that can be told to fail, an offloader, and
 * a handful of regions with random bytes of which a copy is kept, so that after any adventure it
 * can be said whether they are back.
 *
 *     rig on;
 *     rig_open(&on, RIG_HOOKS, NULL);             regions are there, sealed
 *     ... offload, restore, fail ...
 *     rig_check_bytes(&on);                       bit for bit
 *     rig_close(&on);
 */
#ifndef OFFLOAD_RIG_H
#define OFFLOAD_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <refit.h>

#include "tests/support/faulty_device.h"
#include "tests/support/test_device.h"

#define RIG_REGIONS 12
#define RIG_GROUPS  4
#define RIG_EXTRA   4
#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

/* What gives the regions' memory back and takes it again. */
typedef enum rig_memory {
    RIG_BOUND, /* nothing: it stays */
    RIG_HOOKS,
    RIG_ARENA,
} rig_memory;

typedef struct rig_region {
    refit_region_id id;
    void *memory; /* NULL while the hooks have given it back */
    uint64_t bytes;
    refit_policy policy;
    uint32_t group;
    unsigned char *expected;
} rig_region;

typedef struct rig {
    refit_device *device;
    refit_device *plain; /* the one in it, for the test's own copies */
    refit_arena *arena;
    refit_config config;
    refit_offloader *offloader;
    rig_region regions[RIG_REGIONS];
    void *extra[RIG_EXTRA]; /* of rig_extra */
    uint64_t random;
    uint32_t releases; /* calls of the hooks so far */
    uint32_t acquires;
    uint32_t fail_release; /* the call that fails; 0: none */
    uint32_t fail_acquire;
    refit_error error;
} rig;

/* `settings`: "key=value" strings, ended by NULL; may itself be NULL. The offloader is sealed. */
void rig_open(rig *on, rig_memory memory, const char *const *settings);

/* The same, not sealed. */
void rig_open_unsealed(rig *on, rig_memory memory, const char *const *settings);

/* Closes all; lets a stopped device go first. */
void rig_close(rig *on);

/* Device memory besides; rig_close frees it. */
void *rig_extra(rig *on, uint64_t bytes);

/* New random bytes on the device and in the copies. All regions are bound. */
void rig_fill(rig *on);

/* KEEP regions hold what was filled in, ZERO ones zeroes if they have been away (`zeroed`), else
 * what was filled in too. */
void rig_check_bytes(rig *on, bool zeroed);

/* One region holds what was filled in. */
void rig_check(rig *on, uint32_t at);

/* Only what KEEP regions hold. */
void rig_check_kept(rig *on);

/* Out and back, to the end. */
void rig_offload(rig *on);
void rig_restore(rig *on);

refit_offloader_state rig_state(rig *on);
refit_region_info rig_region_info(rig *on, refit_region_id region);
uint64_t rig_device_used(rig *on);
refit_stats rig_stats(rig *on);

/* What KEEP regions hold in all, and all of them. */
uint64_t rig_kept_bytes(const rig *on);
uint64_t rig_all_bytes(const rig *on);

#endif
