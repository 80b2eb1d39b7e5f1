/*
 * What every test of the offloader stands on: a device that can be told to fail, an offloader, and
 * a handful of regions with random bytes of which a copy is kept, so that after any adventure it
 * can be said whether they are back.
 *
 *     rig *on = open_scene(&(opening){.memory = RIG_HOOKS});    regions are there, sealed
 *     ... offload, restore, fail ...
 *     rig_check_bytes(on, true);                              bit for bit
 *     close_scene(on);
 *
 * SCENE(name, .memory = RIG_HOOKS) is a test `on` such a rig.
 */
#ifndef OFFLOAD_RIG_H
#define OFFLOAD_RIG_H

#include "tests/offload/offload.h"

#define RIG_REGIONS 12
#define RIG_GROUPS  4
#define RIG_EXTRA   4
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

struct scene {
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
};

typedef struct scene rig;

/* How a test's rig is. */
struct opening {
    rig_memory memory;
    const char *const *settings; /* more of them, as set_each takes them */
    bool unsealed;
    bool all_kept; /* else one region is discarded, and one zeroed */
    bool reuse;    /* those that are kept leave without a copy where they have not changed */
};

/* Adds one more region. */
refit_region_id rig_add(rig *on, const char *name, void *memory, uint64_t bytes);

/* More device memory, which close_scene frees. */
void *rig_extra(rig *on, uint64_t bytes);

/* New random bytes on the device and in the copies. All regions are bound. */
void rig_fill(rig *on);

/* New bytes in one region. */
void rig_change(rig *on, uint32_t at);

/* KEEP regions hold what was filled in, ZERO ones zeroes if they have been away (`zeroed`), else
 * what was filled in too. */
void rig_check_bytes(rig *on, bool zeroed);

/* One region holds what was filled in. */
void rig_check(rig *on, uint32_t at);

/* Only what KEEP regions hold. */
void rig_check_kept(rig *on);

/* The calls. */
refit_status seal(rig *on);
refit_status unseal(rig *on);
refit_status trim(rig *on);
refit_status clear(rig *on);
refit_status offload(rig *on);
refit_status restore(rig *on);
refit_status finish(rig *on);
refit_status bind_region(rig *on, refit_region_id region, void *memory);
refit_status unbind_region(rig *on, refit_region_id region);

/* Takes and frees a read lock. */
refit_status try_read_lock(rig *on);

/* Out and back, to the end. */
void rig_offload(rig *on);
void rig_restore(rig *on);

/* With offload.verify: changes a byte of region 3 on the device, or changes it back, once the
 * copies under way are over and before digests are taken: as a copy that went wrong would leave it.
 */
void rig_flip(rig *on, uint64_t at);

/* With offload.verify: an offload that is refused for that. */
void rig_fail_offload(rig *on);

/* Starts one of them. */
refit_future *rig_start(rig *on, bool back);

/* Both, after which every byte is back. */
void rig_cycle(rig *on);

/* Frees the device memory of a region; takes other, which is not bound yet. */
void rig_free(rig *on, refit_region_id region);
void *rig_take(rig *on, refit_region_id region);

refit_offloader_state rig_state(rig *on);
refit_region_info rig_region_info(rig *on, refit_region_id region);
refit_stats rig_stats(rig *on);

/* What KEEP regions hold in all, and all of them. */
uint64_t rig_kept_bytes(const rig *on);
uint64_t rig_all_bytes(const rig *on);

#endif
