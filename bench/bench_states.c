/* bench_states: device, offloader, window and streams are opened in this order and closed in
 * reverse. */
#include "bench_states.h"

#include <stdlib.h>
#include <string.h>

#include "bench_case.h"
#include "cli.h"

struct bench_batch {
    const bench_slice *slices;
    uint32_t count;
    uint32_t step;
};

static refit_status no_memory(refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the benchmark itself");
}

/* ---- which tensors are the states of one weight ---- */

static const char *const kinds[BENCH_STATES_MOST] = {".exp_avg", ".exp_avg_sq", ".master"};

/* The length of the name in front of the kind; 0: it is not of this kind. */
static size_t stem_of(const char *name, const char *kind)
{
    size_t length = strlen(name), end = strlen(kind);
    return length > end && strcmp(name + length - end, kind) == 0 ? length - end : 0;
}

/* How many tensors from `first` on are the states of one weight. */
static uint32_t states_from(const bench_list *list, uint32_t first)
{
    const bench_tensor *tensor = &list->all[first];
    size_t stem = stem_of(tensor->name, kinds[0]);
    uint32_t count = 1;
    while (stem != 0 && count < BENCH_STATES_MOST && first + count < list->count) {
        const bench_tensor *next = tensor + count;
        if (stem_of(next->name, kinds[count]) != stem || next->bytes != tensor->bytes ||
            strncmp(next->name, tensor->name, stem) != 0)
            break;
        count++;
    }
    return count;
}

static refit_status find_parameters(bench_states *it, refit_error *error)
{
    uint64_t elements = 0;
    it->parameters = calloc(it->list->count, sizeof *it->parameters);
    if (it->parameters == NULL) return no_memory(error);
    for (uint32_t first = 0; first < it->list->count;) {
        bench_parameter *parameter = &it->parameters[it->parameter_count++];
        *parameter = (bench_parameter){.tensor = first,
                                       .state_count = states_from(it->list, first),
                                       .bytes = it->list->all[first].bytes,
                                       .elements = elements};
        uint64_t room = (parameter->bytes + 511) / 512 * 512;
        if (room * parameter->state_count > it->largest)
            it->largest = room * parameter->state_count;
        elements += room / sizeof(float);
        first += parameter->state_count;
    }
    return REFIT_OK;
}

/* ---- memory, and what is in it ---- */

static void fill(float *values, uint64_t count, float base, float spread)
{
    uint64_t random = count;
    for (uint64_t i = 0; i < count; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        values[i] = base + spread * (float)(int32_t)(random >> 32) / 2147483648.0f;
    }
}

static uint64_t element_count(const bench_states *it)
{
    const bench_parameter *last = &it->parameters[it->parameter_count - 1];
    return last->elements + (last->bytes + 511) / 512 * 512 / sizeof(float);
}

/* What the arithmetic reads and writes besides the states. */
static refit_status take_weights(bench_states *it, refit_error *error)
{
    refit_device_info info = {.size = sizeof info};
    BENCH_TRY(refit_device_describe(it->device, &info, error));
    it->arithmetic = info.host_addressable != 0 && strcmp(info.kind, "host") == 0;
    if (!it->arithmetic) return refit_memory_alloc(it->device, it->largest, &it->scratch, error);
    const uint64_t count = element_count(it), bytes = count * sizeof(float);
    void *memory;
    BENCH_TRY(refit_memory_alloc(it->device, bytes, &memory, error));
    it->gradients = memory;
    fill(it->gradients, count, 0.0f, 1e-3f);
    for (uint32_t copy = 0; copy < BENCH_COPIES; copy++) {
        BENCH_TRY(refit_memory_alloc(it->device, bytes, &memory, error));
        it->weights[copy] = memory;
        fill(it->weights[copy], count, 0.0f, 0.02f);
    }
    return REFIT_OK;
}

/* The second moment is a square, and so is never negative. */
static refit_status fill_image(bench_states *it, refit_error *error)
{
    for (uint32_t i = 0; i < it->list->count; i++) {
        void *bytes;
        uint64_t count;
        BENCH_TRY(refit_window_host(it->window, i, &bytes, &count, error));
        it->image[i] = bytes;
        bool second = stem_of(it->list->all[i].name, kinds[1]) != 0;
        fill(bytes, count / sizeof(float), second ? 2e-6f : 0.0f, second ? 1e-6f : 1e-3f);
    }
    return REFIT_OK;
}

static refit_status add_regions(bench_states *it, refit_error *error)
{
    for (uint32_t i = 0; i < it->list->count; i++) {
        refit_region_id id;
        refit_region_desc region = {.size = sizeof region,
                                    .name = it->list->all[i].name,
                                    .bytes = it->list->all[i].bytes,
                                    .policy = REFIT_KEEP,
                                    .home = REFIT_HOME_HOST};
        BENCH_TRY(refit_offloader_add(it->offloader, &region, &id, error));
    }
    BENCH_TRY(refit_offloader_seal(it->offloader, error));
    return refit_window_open(it->offloader, &it->window, error);
}

refit_status bench_states_open(bench_states *it, const bench_options *options,
                               const bench_list *list, refit_error *error)
{
    *it = (bench_states){.list = list,
                         .image = calloc(list->count, sizeof(char *)),
                         .resident = calloc(list->count, sizeof(char *))};
    if (it->image == NULL || it->resident == NULL) return no_memory(error);
    BENCH_TRY(find_parameters(it, error));
    BENCH_TRY(refit_device_open(options->device, &options->config, &it->device, error));
    BENCH_TRY(take_weights(it, error));
    BENCH_TRY(refit_offloader_open(it->device, &options->config, &it->offloader, error));
    BENCH_TRY(add_regions(it, error));
    BENCH_TRY(fill_image(it, error));
    BENCH_TRY(refit_stream_open(it->device, &it->work, error));
    BENCH_TRY(refit_stream_open(it->device, &it->in, error));
    return refit_stream_open(it->device, &it->out, error);
}

refit_status bench_states_settle(bench_states *it, refit_error *error)
{
    for (uint32_t i = 0; i < it->list->count; i++) {
        void *memory;
        uint64_t bytes = it->list->all[i].bytes;
        if (it->resident[i] != NULL) continue;
        BENCH_TRY(refit_memory_alloc(it->device, bytes, &memory, error));
        it->resident[i] = memory;
        BENCH_TRY(
            refit_stream_copy(it->device, REFIT_STREAM_NONE, memory, it->image[i], bytes, error));
    }
    return REFIT_OK;
}

static refit_status close_stream(bench_states *it, refit_stream_ref stream, refit_error *error)
{
    return stream.native == NULL ? REFIT_OK : refit_stream_close(it->device, stream, error);
}

static refit_status close_device(bench_states *it, refit_error *error)
{
    if (it->device == NULL) return REFIT_OK;
    BENCH_TRY(close_stream(it, it->work, error));
    BENCH_TRY(close_stream(it, it->in, error));
    BENCH_TRY(close_stream(it, it->out, error));
    BENCH_TRY(refit_window_close(it->window, error));
    BENCH_TRY(refit_offloader_close(it->offloader, error));
    for (uint32_t i = 0; i < it->list->count; i++)
        BENCH_TRY(refit_memory_free(it->device, it->resident[i], error));
    for (uint32_t copy = 0; copy < BENCH_COPIES; copy++)
        BENCH_TRY(refit_memory_free(it->device, it->weights[copy], error));
    BENCH_TRY(refit_memory_free(it->device, it->gradients, error));
    BENCH_TRY(refit_memory_free(it->device, it->scratch, error));
    return refit_device_close(it->device, error);
}

refit_status bench_states_close(bench_states *it, refit_error *error)
{
    refit_status status = close_device(it, error);
    free(it->parameters);
    free(it->image);
    free(it->resident);
    free(it->batches);
    *it = (bench_states){0};
    return status;
}

uint64_t bench_states_used(const bench_states *it)
{
    refit_device_info info = {.size = sizeof info};
    refit_error error;
    return refit_device_describe(it->device, &info, &error) == REFIT_OK ? info.used_bytes : 0;
}

/* ---- the arithmetic ---- */

bench_slice bench_states_slice(const bench_states *it, const bench_parameter *of, uint64_t offset,
                               uint64_t bytes, uint32_t copy)
{
    bench_slice slice = {.state_count = of->state_count, .elements = bytes / sizeof(float)};
    if (!it->arithmetic) return slice;
    uint64_t at = of->elements + offset / sizeof(float);
    slice.gradient = it->gradients + at;
    slice.weight = it->weights[copy] + at;
    if (of->state_count == BENCH_STATES_MOST) slice.weight = (uint16_t *)it->weights[copy] + at;
    return slice;
}

bool bench_states_batches(bench_states *it, uint32_t most)
{
    it->batches = calloc(most, sizeof *it->batches);
    return it->batches != NULL;
}

void bench_states_begin(bench_states *it, uint32_t copy)
{
    it->batch_count = 0;
    it->steps[copy]++;
}

static void run_batch(void *user)
{
    const struct bench_batch *batch = user;
    bench_adamw_step(batch->step, batch->slices, batch->count);
}

/* Each state takes the bytes of the one behind it, the last those of the first. */
static refit_status rotate(bench_states *it, const bench_slice *slice, refit_error *error)
{
    float *const *states = slice->states;
    const uint32_t last = slice->state_count - 1;
    const uint64_t bytes = slice->elements * sizeof(float);
    if (bytes == 0) return REFIT_OK;
    BENCH_TRY(refit_stream_copy(it->device, it->work, it->scratch, states[0], bytes, error));
    for (uint32_t i = 0; i < last; i++)
        BENCH_TRY(refit_stream_copy(it->device, it->work, states[i], states[i + 1], bytes, error));
    if (last == 0) return REFIT_OK;
    return refit_stream_copy(it->device, it->work, states[last], it->scratch, bytes, error);
}

refit_status bench_states_queue(bench_states *it, uint32_t copy, const bench_slice *slices,
                                uint32_t count, refit_error *error)
{
    for (uint32_t i = 0; i < count && !it->arithmetic; i++)
        BENCH_TRY(rotate(it, &slices[i], error));
    if (!it->arithmetic) return REFIT_OK;
    struct bench_batch *batch = &it->batches[it->batch_count++];
    *batch = (struct bench_batch){.slices = slices, .count = count, .step = it->steps[copy]};
    return refit_stream_call(it->device, it->work, run_batch, batch, error);
}

/* ---- do both hold the same? ---- */

static refit_status compare_tensor(const bench_states *it, uint32_t at, char *read,
                                   refit_error *error)
{
    const bench_tensor *tensor = &it->list->all[at];
    BENCH_TRY(refit_stream_copy(it->device, REFIT_STREAM_NONE, read, it->resident[at],
                                tensor->bytes, error));
    if (memcmp(read, it->image[at], tensor->bytes) == 0) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_CORRUPT, 0,
                      "%s on the host is not what the same steps make of it on the device",
                      tensor->name);
}

static refit_status compare(const bench_states *it, refit_error *error)
{
    char *read = malloc(it->largest);
    refit_status status = REFIT_OK;
    if (read == NULL) return no_memory(error);
    for (uint32_t i = 0; status == REFIT_OK && i < it->list->count; i++)
        status = compare_tensor(it, i, read, error);
    free(read);
    if (status != REFIT_OK || !it->arithmetic) return status;
    if (memcmp(it->weights[0], it->weights[1], element_count(it) * sizeof(float)) == 0)
        return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_CORRUPT, 0, "the weights are not those of a resident step");
}

refit_status bench_states_check(bench_states *it, const bench_slice *slices, refit_error *error)
{
    while (it->steps[BENCH_ON_DEVICE] < it->steps[BENCH_IN_IMAGE]) {
        bench_states_begin(it, BENCH_ON_DEVICE);
        BENCH_TRY(bench_states_queue(it, BENCH_ON_DEVICE, slices, it->parameter_count, error));
        BENCH_TRY(refit_stream_wait(it->device, it->work, BENCH_WAIT_MS, error));
    }
    return compare(it, error);
}
