/* states: the trainer's device memory, and the regions of it that refit may move. */
#include "states.h"

#include <string.h>

#include "or_die.h"

/* States: 4 x 1.15 MB. Weights: 0.6 MB. Cache: 4.1 MB (engine.h). */
const char states_small_device[] = "host:capacity=6MiB";
const char states_large_device[] = "host:capacity=64MiB";

static float *add_region(train_states *it, const char *name, refit_policy policy)
{
    refit_error error;
    refit_region_id id;
    refit_region_desc region = {.size = sizeof region, .name = name, .policy = policy};
    region.bytes = policy_parameters * sizeof(float);
    or_die(refit_arena_alloc(it->arena, region.bytes, &region.memory, &error), &error);
    or_die(refit_offloader_add(it->offloader, &region, &id, &error), &error);
    return region.memory;
}

void states_open(train_states *out, const char *device, const refit_config *config)
{
    refit_error error;
    uint64_t reservation = 8 * policy_parameters * sizeof(float);
    or_die(refit_device_open(device, config, &out->device, &error), &error);
    or_die(refit_arena_open(out->device, reservation, &out->arena, &error), &error);
    or_die(refit_offloader_open(out->device, config, &out->offloader, &error), &error);
    out->master = add_region(out, "master", REFIT_KEEP);
    out->exp_avg = add_region(out, "exp_avg", REFIT_KEEP);
    out->exp_avg_sq = add_region(out, "exp_avg_sq", REFIT_KEEP);
    out->grads = add_region(out, "grads", REFIT_DISCARD);

    void *weights;
    or_die(refit_memory_alloc(out->device, policy_parameters * sizeof(uint16_t), &weights, &error),
           &error);
    out->weights = weights;
    memset(out->exp_avg, 0, policy_parameters * sizeof(float));
    memset(out->exp_avg_sq, 0, policy_parameters * sizeof(float));
}

void states_close(train_states *it)
{
    refit_error error;
    or_die(refit_offloader_close(it->offloader, &error), &error);
    or_die(refit_arena_close(it->arena, &error), &error);
    or_die(refit_memory_free(it->device, it->weights, &error), &error);
    or_die(refit_device_close(it->device, &error), &error);
}
