/* A rank and its cycles. Its states differ from those of every other rank, GPU and cycle. */
#include "rank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fake_cuda.h"
#include "tests/support/seeded.h"

#define ARENA (16u << 20)

static refit_status configure(test_rank *rank, const char *const *settings)
{
    static const char *const always[] = {"offload.timeout_ms=120s", "offload.slab_bytes=1MiB",
                                         "offload.chunk_bytes=2MiB", NULL};
    refit_config_init(&rank->config, sizeof rank->config);
    for (const char *const *list = always; list != NULL; list = list == always ? settings : NULL) {
        for (; *list != NULL; list++) {
            char key[64];
            const char *equals = strchr(*list, '=');
            snprintf(key, sizeof key, "%.*s", (int)(equals - *list), *list);
            RFT_TRY(refit_config_set(&rank->config, key, equals + 1, &rank->error));
        }
    }
    return REFIT_OK;
}

/* ---- Bytes */

static uint64_t seed_of(const test_rank *rank, uint32_t region)
{
    return 1 + region + 16 * (rank->self + NODE_RANKS * ((uint64_t)rank->gpu + 8 * rank->cycles));
}

static void make_bytes(test_rank *rank, uint32_t region)
{
    uint64_t seed = seed_of(rank, region), *words = (uint64_t *)(void *)rank->bytes;
    for (size_t i = 0; i < RANK_REGION / sizeof *words; i++)
        words[i] = seeded_next(&seed);
}

static refit_status fill(test_rank *rank)
{
    for (uint32_t i = 0; i < RANK_REGIONS; i++) {
        make_bytes(rank, i);
        RFT_TRY(refit_stream_copy(rank->device, REFIT_STREAM_NONE, rank->states[i], rank->bytes,
                                  RANK_REGION, &rank->error));
    }
    return refit_stream_copy(rank->device, REFIT_STREAM_NONE, rank->weight, rank->bytes,
                             RANK_WEIGHT, &rank->error);
}

/* Looked up where the fake driver keeps them, not by a copy of the device that is under test. */
refit_status rank_check(test_rank *rank)
{
    for (uint32_t i = 0; i < RANK_REGIONS; i++) {
        const void *found = fake_cuda_bytes((rft_cu_ptr)(uintptr_t)rank->states[i], RANK_REGION);
        make_bytes(rank, i);
        RFT_REFUSE_IF(found == NULL || memcmp(found, rank->bytes, RANK_REGION) != 0, &rank->error,
                      REFIT_ERR_CORRUPT, "state %u of rank %u is not what it was", i, rank->self);
    }
    return REFIT_OK;
}

/* ---- From its beginning to its end */

static refit_status open_states(test_rank *rank)
{
    RFT_TRY(refit_arena_open(rank->device, ARENA, &rank->arena, &rank->error));
    RFT_TRY(refit_offloader_open(rank->device, &rank->config, &rank->offloader, &rank->error));
    for (uint32_t i = 0; i < RANK_REGIONS; i++) {
        char name[32];
        refit_region_id id;
        snprintf(name, sizeof name, "state.%u", i);
        RFT_TRY(refit_arena_alloc(rank->arena, RANK_REGION, &rank->states[i], &rank->error));
        refit_region_desc region = {
            .size = sizeof region, .name = name, .memory = rank->states[i], .bytes = RANK_REGION};
        RFT_TRY(refit_offloader_add(rank->offloader, &region, &id, &rank->error));
    }
    return REFIT_OK;
}

static refit_status open_weights(test_rank *rank)
{
    const refit_tensor tensor = {sizeof tensor, "w",         REFIT_U8,      1,
                                 {RANK_WEIGHT}, RANK_WEIGHT, REFIT_NO_ALIAS};
    RFT_TRY(refit_memory_alloc(rank->device, RANK_WEIGHT, &rank->weight, &rank->error));
    RFT_TRY(
        refit_publisher_open("tcp://127.0.0.1:0", &rank->config, &rank->publisher, &rank->error));
    return refit_publisher_declare(rank->publisher, &tensor, 1, &rank->error);
}

refit_status rank_open(test_rank *rank, test_node *node, unsigned self, int gpu,
                       const char *const *settings)
{
    char spec[16];
    *rank = (test_rank){.gpu = gpu, .node = node, .self = self, .bytes = malloc(RANK_REGION)};
    node_enter(node, self);
    snprintf(spec, sizeof spec, "cuda:%d", gpu);
    if (rank->bytes == NULL) return REFIT_ERR_HOST_MEMORY;
    RFT_TRY(configure(rank, settings));
    RFT_TRY(refit_device_open(spec, &rank->config, &rank->device, &rank->error));
    RFT_TRY(open_states(rank));
    RFT_TRY(open_weights(rank));
    return fill(rank);
}

refit_status rank_seal(test_rank *rank)
{
    node_enter(rank->node, rank->self);
    return refit_controller_open(rank->offloader, rank->publisher, &rank->config, &rank->controller,
                                 &rank->error);
}

static refit_status go_away(test_rank *rank)
{
    uint64_t before = fake_cuda_used(rank->gpu);
    RFT_TRY(refit_controller_offload(rank->controller, REFIT_STREAM_NONE, &rank->error));
    uint64_t after = fake_cuda_used(rank->gpu);
    RFT_REFUSE_IF(before - after != RANK_IMAGE, &rank->error, REFIT_ERR_CORRUPT,
                  "cuda:%d had %llu bytes in use, and %llu with the states away", rank->gpu,
                  (unsigned long long)before, (unsigned long long)after);
    return REFIT_OK;
}

static refit_status publish(test_rank *rank)
{
    const refit_weight weight = {0, rank->weight, RANK_WEIGHT};
    uint64_t before = refit_publisher_version(rank->publisher);
    RFT_TRY(refit_controller_publish(rank->controller, 0, &weight, 1, rank->device,
                                     REFIT_STREAM_NONE, &rank->error));
    RFT_REFUSE_IF(refit_publisher_version(rank->publisher) <= before, &rank->error,
                  REFIT_ERR_CORRUPT, "a cycle published nothing");
    return REFIT_OK;
}

refit_status rank_cycle(test_rank *rank)
{
    node_enter(rank->node, rank->self);
    rank->cycles++;
    RFT_TRY(fill(rank));
    RFT_TRY(go_away(rank));
    RFT_TRY(publish(rank));
    RFT_TRY(refit_controller_restore(rank->controller, REFIT_STREAM_NONE, &rank->error));
    RFT_TRY(refit_controller_wait(rank->controller, REFIT_STREAM_NONE, &rank->error));
    return rank_check(rank);
}

refit_status rank_close(test_rank *rank)
{
    node_enter(rank->node, rank->self);
    refit_controller_close(rank->controller);
    refit_publisher_close(rank->publisher);
    RFT_TRY(refit_offloader_close(rank->offloader, &rank->error));
    RFT_TRY(refit_arena_close(rank->arena, &rank->error));
    RFT_TRY(refit_memory_free(rank->device, rank->weight, &rank->error));
    RFT_TRY(refit_device_close(rank->device, &rank->error));
    free(rank->bytes);
    return REFIT_OK;
}
