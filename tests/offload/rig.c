/* The offloader's test rig. */
#include "tests/offload/rig.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/checked.h"
#include "offload/offloader.h"

static int release_memory(void *user, refit_region_id region, void *memory, uint64_t bytes)
{
    rig *on = user;
    if (++on->releases == on->fail_release) return 17;
    test_fill(on->plain, memory, 0xDD, bytes);
    if (refit_memory_free(on->device, memory, NULL) != REFIT_OK) return 1;
    on->regions[region].memory = NULL;
    return 0;
}

static int acquire_memory(void *user, refit_region_id region, uint64_t bytes, void **memory)
{
    rig *on = user;
    if (++on->acquires == on->fail_acquire) return 18;
    if (refit_memory_alloc(on->device, bytes, memory, NULL) != REFIT_OK) return 1;
    test_fill(on->plain, *memory, 0xEE, bytes);
    on->regions[region].memory = *memory;
    return 0;
}

/* Sizes that are neither pages nor multiples of 8, one larger than a slab, two that are neighbours.
 */
static const uint64_t sizes[RIG_REGIONS] = {512,   4096, 100001, 300000, 1,     65536,
                                            65536, 4099, 600000, 8192,   33333, 20480};

static refit_policy policy_of(const opening *how, uint32_t at)
{
    if (how->all_kept) return REFIT_KEEP;
    if (at == 5) return REFIT_DISCARD;
    return at == 9 ? REFIT_ZERO : REFIT_KEEP;
}

static void add_region(rig *on, const opening *how, uint32_t at)
{
    rig_region *region = &on->regions[at];
    region->bytes = sizes[at];
    region->policy = policy_of(how, at);
    region->group = at % RIG_GROUPS;
    region->expected = malloc(region->bytes);
    assert_non_null(region->expected);
    if (how->memory == RIG_ARENA) {
        assert_ok(refit_arena_alloc(on->arena, region->bytes, &region->memory, &on->error));
    } else {
        assert_ok(refit_memory_alloc(on->device, region->bytes, &region->memory, &on->error));
    }
    char name[32];
    snprintf(name, sizeof name, "state.%u", at);
    refit_region_desc desc = {.size = sizeof desc,
                              .name = name,
                              .memory = region->memory,
                              .bytes = region->bytes,
                              .policy = region->policy,
                              .group = region->group,
                              .priority = (int32_t)(region->group) * -10,
                              .reuse = how->reuse && region->policy == REFIT_KEEP};
    assert_ok(refit_offloader_add(on->offloader, &desc, &region->id, &on->error));
    assert_int_equal(region->id, at);
}

rig *open_scene(const opening *how)
{
    static rig only;
    rig *on = &only;
    static const char *const common[] = {
        "offload.piece_bytes=64KiB", "offload.slab_bytes=512KiB", "offload.batch=3",
        "offload.timeout_ms=20s",
        /* Other tests that run at the same time are not waited for. */
        "offload.take_turns=false", NULL};
    begin_without_blocks();
    *on = (rig){.random = UINT64_C(0x9E3779B97F4A7C15)};
    refit_config_init(&on->config, sizeof on->config);
    set_each(&on->config, common);
    set_each(&on->config, how->settings);
    assert_ok(faulty_device_open(test_device_spec("host:capacity=64MiB"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    if (how->memory == RIG_ARENA) {
        assert_ok(refit_arena_open(on->device, UINT64_C(32) << 20, &on->arena, &on->error));
    }
    for (uint32_t at = 0; at < RIG_REGIONS; at++)
        add_region(on, how, at);
    if (how->memory == RIG_HOOKS) {
        refit_memory_hooks hooks = {sizeof hooks, release_memory, acquire_memory, on};
        assert_ok(refit_offloader_set_memory(on->offloader, &hooks, &on->error));
    }
    rig_fill(on);
    if (!how->unsealed) assert_ok(seal(on));
    return on;
}

void close_scene(rig *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    faulty_device_let_pins(on->device);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        if (on->arena == NULL) rig_free(on, at);
        free(on->regions[at].expected);
    }
    for (size_t i = 0; i < RIG_EXTRA; i++)
        assert_ok(refit_memory_free(on->device, on->extra[i], &on->error));
    assert_ok(refit_arena_close(on->arena, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
    end_without_blocks();
}

refit_region_id rig_add(rig *on, const char *name, void *memory, uint64_t bytes)
{
    refit_region_id id;
    refit_region_desc desc = {.size = sizeof desc, .name = name, .memory = memory, .bytes = bytes};
    assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
    return id;
}

void *rig_extra(rig *on, uint64_t bytes)
{
    size_t at = 0;
    while (on->extra[at] != NULL)
        at++;
    assert_true(at < RIG_EXTRA);
    assert_ok(refit_memory_alloc(on->device, bytes, &on->extra[at], &on->error));
    return on->extra[at];
}

void rig_change(rig *on, uint32_t at)
{
    rig_region *region = &on->regions[at];
    for (uint64_t i = 0; i < region->bytes; i += sizeof(uint64_t)) {
        uint64_t word = seeded_next(&on->random);
        memcpy(region->expected + i, &word, rft_min_u64(sizeof word, region->bytes - i));
    }
    test_write(on->plain, region->memory, region->expected, region->bytes);
}

void rig_fill(rig *on)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++)
        rig_change(on, at);
}

void rig_check(rig *on, uint32_t at)
{
    const rig_region *region = &on->regions[at];
    assert_device_equal(on->plain, region->memory, region->expected, region->bytes);
}

static void check_zeroes(rig *on, const rig_region *region)
{
    unsigned char *zeroes = calloc(1, region->bytes);
    assert_non_null(zeroes);
    assert_device_equal(on->plain, region->memory, zeroes, region->bytes);
    free(zeroes);
}

void rig_check_bytes(rig *on, bool zeroed)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        const rig_region *region = &on->regions[at];
        assert_non_null(region->memory);
        if (zeroed && region->policy == REFIT_ZERO) check_zeroes(on, region);
        if (zeroed && region->policy != REFIT_KEEP) continue;
        rig_check(on, at);
    }
}

refit_status seal(rig *on)
{
    return refit_offloader_seal(on->offloader, &on->error);
}

refit_status unseal(rig *on)
{
    return refit_offloader_unseal(on->offloader, &on->error);
}

refit_status trim(rig *on)
{
    return refit_offloader_trim(on->offloader, &on->error);
}

refit_status clear(rig *on)
{
    return refit_offloader_clear(on->offloader, &on->error);
}

refit_status offload(rig *on)
{
    return refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
}

refit_status restore(rig *on)
{
    return refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
}

refit_status finish(rig *on)
{
    return refit_offloader_wait(on->offloader, TIMEOUT_MS, &on->error);
}

refit_status bind_region(rig *on, refit_region_id region, void *memory)
{
    return refit_offloader_bind(on->offloader, region, memory, &on->error);
}

refit_status unbind_region(rig *on, refit_region_id region)
{
    return refit_offloader_unbind(on->offloader, region, &on->error);
}

refit_status try_read_lock(rig *on)
{
    refit_read_lock *taken = NULL;
    refit_status status = refit_read_lock_acquire(on->offloader, &taken, &on->error);
    refit_read_lock_release(taken);
    return status;
}

refit_future *rig_start(rig *on, bool back)
{
    refit_future *future;
    assert_ok((back ? refit_offloader_restore : refit_offloader_offload)(
        on->offloader, REFIT_STREAM_NONE, &future, &on->error));
    return future;
}

void rig_offload(rig *on)
{
    assert_ok(offload_all(on->offloader, &on->error));
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
}

void rig_restore(rig *on)
{
    assert_ok(restore_all(on->offloader, &on->error));
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
}

void rig_cycle(rig *on)
{
    rig_offload(on);
    rig_restore(on);
    rig_check_bytes(on, true);
}

void rig_flip(rig *on, uint64_t at)
{
    unsigned char byte;
    unsigned char *place = (unsigned char *)on->regions[3].memory + at;
    assert_ok(rft_mover_wait(on->offloader->operation.mover, TIMEOUT_MS, &on->error));
    test_read(on->plain, &byte, place, 1);
    byte ^= 0x10;
    test_write(on->plain, place, &byte, 1);
}

void rig_fail_offload(rig *on)
{
    assert_ok(offload(on));
    rig_flip(on, 0);
    assert_int_equal(finish(on), REFIT_ERR_CORRUPT);
    assert_int_equal(rig_state(on), REFIT_FAILED);
    rig_flip(on, 0);
}

void rig_free(rig *on, refit_region_id region)
{
    assert_ok(refit_memory_free(on->device, on->regions[region].memory, &on->error));
    on->regions[region].memory = NULL;
}

void *rig_take(rig *on, refit_region_id region)
{
    rig_region *it = &on->regions[region];
    assert_ok(refit_memory_alloc(on->device, it->bytes, &it->memory, &on->error));
    return it->memory;
}

void rig_check_kept(rig *on)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        if (on->regions[at].policy == REFIT_KEEP) rig_check(on, at);
    }
}

refit_offloader_state rig_state(rig *on)
{
    return refit_offloader_get_state(on->offloader);
}

refit_region_info rig_region_info(rig *on, refit_region_id region)
{
    return region_of(on->offloader, region);
}

refit_stats rig_stats(rig *on)
{
    return stats_of(on->offloader);
}

uint64_t rig_kept_bytes(const rig *on)
{
    uint64_t bytes = 0;
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        if (on->regions[at].policy == REFIT_KEEP) bytes += on->regions[at].bytes;
    }
    return bytes;
}

uint64_t rig_all_bytes(const rig *on)
{
    uint64_t bytes = 0;
    for (uint32_t at = 0; at < RIG_REGIONS; at++)
        bytes += on->regions[at].bytes;
    return bytes;
}
