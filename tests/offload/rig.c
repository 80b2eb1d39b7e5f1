/* The offloader's test rig. */
#include "tests/offload/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

static uint64_t next_random(rig *on)
{
    on->random ^= on->random << 13;
    on->random ^= on->random >> 7;
    on->random ^= on->random << 17;
    return on->random;
}

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

static void set_up_config(rig *on, const char *const *settings)
{
    refit_config_init(&on->config, sizeof on->config);
    assert_ok(refit_config_set(&on->config, "offload.piece_bytes", "64KiB", NULL));
    assert_ok(refit_config_set(&on->config, "offload.slab_bytes", "512KiB", NULL));
    assert_ok(refit_config_set(&on->config, "offload.batch", "3", NULL));
    assert_ok(refit_config_set(&on->config, "offload.timeout_ms", "20s", NULL));
    /* This test does not wait for other tests that run at the same time. */
    assert_ok(refit_config_set(&on->config, "offload.take_turns", "false", NULL));
    for (; settings != NULL && *settings != NULL; settings++) {
        char key[64];
        const char *equals = strchr(*settings, '=');
        assert_non_null(equals);
        size_t length = (size_t)(equals - *settings);
        assert_true(length < sizeof key);
        memcpy(key, *settings, length);
        key[length] = '\0';
        assert_ok(refit_config_set(&on->config, key, equals + 1, NULL));
    }
}

/* Sizes that are neither pages nor multiples of 8, one larger than a slab, two that are neighbours.
 */
static const uint64_t sizes[RIG_REGIONS] = {512,   4096, 100001, 300000, 1,     65536,
                                            65536, 4099, 600000, 8192,   33333, 20480};

static refit_policy policy_of(uint32_t at)
{
    if (at == 5) return REFIT_DISCARD;
    return at == 9 ? REFIT_ZERO : REFIT_KEEP;
}

static void add_region(rig *on, rig_memory memory, uint32_t at)
{
    rig_region *region = &on->regions[at];
    region->bytes = sizes[at];
    region->policy = policy_of(at);
    region->group = at % RIG_GROUPS;
    region->expected = malloc(region->bytes);
    assert_non_null(region->expected);
    if (memory == RIG_ARENA) {
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
                              .priority = (int32_t)(region->group) * -10};
    assert_ok(refit_offloader_add(on->offloader, &desc, &region->id, &on->error));
    assert_int_equal(region->id, at);
}

void rig_open_unsealed(rig *on, rig_memory memory, const char *const *settings)
{
    memset(on, 0, sizeof *on);
    on->random = UINT64_C(0x9E3779B97F4A7C15);
    set_up_config(on, settings);
    assert_ok(faulty_device_open(test_device_spec("host:capacity=64MiB"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    if (memory == RIG_ARENA) {
        assert_ok(refit_arena_open(on->device, UINT64_C(32) << 20, &on->arena, &on->error));
    }
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        add_region(on, memory, at);
    }
    if (memory == RIG_HOOKS) {
        refit_memory_hooks hooks = {sizeof hooks, release_memory, acquire_memory, on};
        assert_ok(refit_offloader_set_memory(on->offloader, &hooks, &on->error));
    }
    rig_fill(on);
}

void rig_open(rig *on, rig_memory memory, const char *const *settings)
{
    rig_open_unsealed(on, memory, settings);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
}

void rig_close(rig *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    faulty_device_let_pins(on->device);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        if (on->arena == NULL) {
            assert_ok(refit_memory_free(on->device, on->regions[at].memory, &on->error));
        }
        free(on->regions[at].expected);
    }
    for (size_t i = 0; i < RIG_EXTRA; i++) {
        assert_ok(refit_memory_free(on->device, on->extra[i], &on->error));
    }
    assert_ok(refit_arena_close(on->arena, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
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

void rig_fill(rig *on)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        rig_region *region = &on->regions[at];
        for (uint64_t i = 0; i < region->bytes; i += sizeof(uint64_t)) {
            uint64_t word = next_random(on);
            memcpy(region->expected + i, &word, rft_min_u64(sizeof word, region->bytes - i));
        }
        test_write(on->plain, region->memory, region->expected, region->bytes);
    }
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

void rig_offload(rig *on)
{
    assert_ok(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
    assert_ok(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error));
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
}

void rig_restore(rig *on)
{
    assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
    assert_ok(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error));
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
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
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(on->offloader, region, &info, &on->error));
    return info;
}

uint64_t rig_device_used(rig *on)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on->device, &info, &on->error));
    return info.used_bytes;
}

refit_stats rig_stats(rig *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    return stats;
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
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        bytes += on->regions[at].bytes;
    }
    return bytes;
}
