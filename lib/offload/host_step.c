/*
 * A host step: parameters whose states are in the host image are stepped there by the CPU.
 *
 * Each parameter has the same things done to it in a step, in this order, and a flag for each that
 * is done:
 *
 *     submitted ──copies──► landed ──► stepped ──sending──► returned
 *         └─► summed
 *
 * There is a stream for each direction, with an event after each parameter's copy. Nothing is
 * stepped before its gradient has landed, and arithmetic cannot fail: so a parameter is stepped
 * whole or not at all, and once. A copy back that could not be started leaves its parameter
 * stepped, and the next call starts it. The host's copy of a parameter, which is the source of its
 * copy back, changes in the next run alone, before which begin has seen the copy end.
 *
 * Work for the CPU is cut into chunks of CHUNK elements of one parameter, whatever the threads. The
 * norm's sums are one a chunk. A step gathers chunks, of several parameters if these are small,
 * until they are a batch; the pool does them, and their copies back start. So the copy of one
 * batch goes on while the next is stepped, and the caller's thread alone calls the device.
 *
 * Why not a ring: the norm of all gradients is to be known before the first is stepped, and a
 * gradient that has left a ring would have to come twice.
 *
 * Independent of: what the parameters are for, which other parameters there are.
 */
#include <refit/advanced/host_step.h>

#include <fenv.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/floats.h"
#include "kernels/norm.h"
#include "kernels/optim.h"
#include "memory/budget.h"
#include "memory/numa.h"
#include "offload/offloader.h"
#include "offload/step_threads.h"

#define CHUNK       UINT64_C(16384) /* elements; with all their states they stay in a core's cache */
#define GROUPS_MOST 65536
#define COPIES      64u        /* that are put on a stream at once */
#define NO_ONE      UINT32_MAX /* no parameter */

/* What callers name is what the kernels take. */
_Static_assert((int)REFIT_MASTER_NONE == (int)RFT_OPTIM_NO_MASTER &&
                   (int)REFIT_MASTER_FP32 == (int)RFT_OPTIM_FP32_MASTER &&
                   (int)REFIT_MASTER_REMAINDER == (int)RFT_OPTIM_REMAINDER,
               "refit_master_form is rft_optim_master");
_Static_assert((int)REFIT_ADAM == (int)RFT_OPTIM_ADAM && (int)REFIT_ADAGRAD == (int)RFT_ADAGRAD &&
                   (int)REFIT_SGD == (int)RFT_SGD && (int)REFIT_LION == (int)RFT_LION,
               "refit_optimizer is rft_optim_kind");

typedef enum step_state {
    STEP_IDLE,
    STEP_GATHERING,
    STEP_STEPPING,
    STEP_RETURNING,
} step_state;

/* Bytes of a parameter that come to the host in a step. */
typedef struct step_arrival {
    uint64_t at; /* in the arena */
    uint64_t bytes;
    rft_event *landed; /* after their copy to the host */
    /* This step's. */
    bool asked, has_landed;
} step_arrival;

typedef struct step_parameter {
    refit_host_parameter is; /* its name owned */
    step_arrival gradient;
    step_arrival weights; /* the parameter itself, if it is refreshed */
    bool is_known;        /* the host has all of the parameter, as a load, a refresh or a step has
                             made it */
    uint64_t first_sum;
    rft_event *back; /* after its copy to the device */
    /* This step's. */
    rft_optim_rule rule;
    bool summed, stepped, sending, returned;
    bool send_lost; /* a part of its copy back was not started */
    bool is_listed;
    uint32_t before, after; /* in the list of those that something comes of, or NO_ONE */
} step_parameter;

/* Elements [from, from + count) of a parameter. */
typedef struct step_chunk {
    uint32_t parameter;
    uint32_t count;
    uint64_t from;
} step_chunk;

struct refit_host_step {
    refit_offloader *offloader;
    step_state state;
    bool closing;      /* a close was begun: its streams may be gone */
    bool dropped_read; /* a gradient that does not count may still be read */

    step_parameter *parameters; /* owned */
    uint32_t count;
    uint32_t first, last;      /* of the list: in the order in which they were submitted */
    uint32_t new_from;         /* what has landed since the last on_landed is of parameters ... */
    uint32_t new_to;           /* ... from new_from on and below new_to */
    uint32_t last_sent;        /* the last parameter that was put on `out` */
    rft_optim_options *groups; /* owned; of this step */
    rft_optim_sqrt root;       /* of the steps that begin from now on; NULL: rounded to nearest */
    rft_optim_sqrt_threads root_threads;
    uint32_t group_count; /* that parameters have */

    rft_layout layout;
    rft_host_arena *arena; /* gradients and parameters */
    refit_stream_ref in;   /* to the host */
    refit_stream_ref out;
    rft_event *before;  /* on the caller's stream that copies come after */
    rft_event *drained; /* after all that is on `in` */
    rft_step_threads threads;

    step_chunk *chunks; /* owned; room for all chunks of all parameters */
    uint32_t chunk_count;
    uint64_t queued; /* elements of the chunks */
    uint64_t batch;  /* elements that are stepped before their copies back start */
    double *sums;    /* owned; of squares, one a chunk */
    fenv_t modes;    /* of the thread that called */
    float unscale, clip;

    int64_t began; /* run; 0: not yet */
    int64_t blocked;
    int64_t computed;
    uint32_t finish_calls;        /* of stamp_finish, since open */
    atomic_uint_fast32_t stamped; /* of these, those that were made */
    atomic_int_fast64_t finished; /* when the last was */
    bool finish_is_last;          /* it stands after all copies of this step */
    uint64_t in_bytes;
    uint64_t out_bytes;
};

/* ---- Small things ---------------------------------------------------------------------------- */

static uint32_t timeout_of(const refit_host_step *step)
{
    return step->offloader->config.offload_timeout_ms;
}

static refit_device *device_of(const refit_host_step *step)
{
    return step->offloader->device;
}

/* Of a type that check_kind has seen. */
static rft_float_type float_type(int32_t type)
{
    return type == REFIT_F32 ? RFT_FP32 : type == REFIT_BF16 ? RFT_BF16 : RFT_FP16;
}

static uint64_t bytes_of(int32_t type, uint64_t elements)
{
    return elements * rft_float_bytes(float_type(type));
}

static uint64_t chunks_of(uint64_t elements)
{
    return elements / CHUNK + (elements % CHUNK != 0);
}

static rft_region *region_at(const refit_host_step *step, refit_region_id id)
{
    return &step->offloader->regions.items[id];
}

static char *host_at(const refit_host_step *step, uint64_t offset)
{
    return rft_host_arena_base(step->arena) + offset;
}

/* The regions of a parameter: first its states, then what is beside it. */
static uint32_t regions_of(const refit_host_parameter *parameter, refit_region_id *regions)
{
    uint32_t count = parameter->state_count;
    memcpy(regions, parameter->states, count * sizeof *regions);
    if (parameter->master != REFIT_MASTER_NONE) regions[count++] = parameter->master_region;
    return count;
}

/* Keeps the first failure of several. */
static void keep_first(refit_error *first, refit_status status, const refit_error *said)
{
    if (status == REFIT_OK || first->status != REFIT_OK) return;
    *first = *said;
    first->status = (int32_t)status;
}

/* Counts a call that failed. */
static refit_status account(refit_host_step *step, refit_status status)
{
    if (status != REFIT_OK) step->offloader->cpu.figures.failures++;
    return status;
}

static refit_status answer(refit_host_step *step, const refit_error *first, refit_error *error)
{
    if (first->status != REFIT_OK && error != NULL) *error = *first;
    return account(step, (refit_status)first->status);
}

static refit_status check_usable(const refit_host_step *step, refit_error *error)
{
    RFT_REFUSE_IF(step == NULL, error, REFIT_ERR_INVALID, "there is no host step");
    RFT_REFUSE_IF(step->closing, error, REFIT_ERR_STATE,
                  "the host step is half closed: call refit_host_step_close again");
    return REFIT_OK;
}

static refit_status find_parameter(const refit_host_step *step, uint32_t parameter,
                                   refit_error *error)
{
    RFT_REFUSE_IF(parameter >= step->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no parameter %" PRIu32 ": there are %" PRIu32, parameter, step->count);
    return REFIT_OK;
}

/* ---- What is opened: the list ---------------------------------------------------------------- */

/* The list as the caller gave it, which may have been compiled with a longer struct. */
static refit_status read_parameter(const refit_host_parameter *list, uint32_t at,
                                   refit_host_parameter *parameter, refit_error *error)
{
    size_t size = list->size;
    const refit_host_parameter *given = (const void *)((const char *)list + at * size);
    RFT_REFUSE_IF(size < sizeof *parameter || size % _Alignof(refit_host_parameter) != 0 ||
                      given->size != size,
                  error, REFIT_ERR_INVALID,
                  "refit_host_parameter.size is %zu in parameter %" PRIu32 " of the list and %zu "
                  "in the first: set each to sizeof(refit_host_parameter)",
                  given->size, at, size);
    *parameter = *given;
    RFT_REFUSE_IF(parameter->name == NULL || parameter->memory == NULL, error, REFIT_ERR_INVALID,
                  "parameter %" PRIu32 " of the list has no name or no memory", at);
    return REFIT_OK;
}

static bool is_type(int32_t type)
{
    return type == REFIT_F32 || type == REFIT_BF16 || type == REFIT_F16;
}

static refit_status check_kind(const refit_host_parameter *parameter, refit_error *error)
{
    const char *name = parameter->name;
    RFT_REFUSE_IF(parameter->elements == 0, error, REFIT_ERR_INVALID,
                  "parameter %s has no elements", name);
    RFT_REFUSE_IF(parameter->elements > UINT64_MAX / 16, error, REFIT_ERR_LIMIT,
                  "parameter %s has %" PRIu64 " elements, which no memory holds", name,
                  parameter->elements);
    RFT_REFUSE_IF(!is_type(parameter->type) || !is_type(parameter->gradient_type), error,
                  REFIT_ERR_INVALID,
                  "parameter %s is of type %d and its gradient of type %d: a host step takes fp32, "
                  "bf16 and fp16",
                  name, parameter->type, parameter->gradient_type);
    RFT_REFUSE_IF(parameter->state_count > REFIT_HOST_STATES, error, REFIT_ERR_INVALID,
                  "parameter %s has %" PRIu32 " states, and an optimizer has at most %d", name,
                  parameter->state_count, REFIT_HOST_STATES);
    RFT_REFUSE_IF(parameter->group >= GROUPS_MOST, error, REFIT_ERR_LIMIT,
                  "parameter %s is of group %" PRIu32 ": they are numbered below %d", name,
                  parameter->group, GROUPS_MOST);
    RFT_REFUSE_IF(
        parameter->master < REFIT_MASTER_NONE || parameter->master > REFIT_MASTER_REMAINDER, error,
        REFIT_ERR_INVALID, "parameter %s: master is %d, which is not a refit_master_form", name,
        parameter->master);
    RFT_REFUSE_IF(parameter->master == REFIT_MASTER_FP32 && parameter->type == REFIT_F32, error,
                  REFIT_ERR_INVALID,
                  "parameter %s is fp32 and has masters: step the parameter itself "
                  "(REFIT_MASTER_NONE)",
                  name);
    RFT_REFUSE_IF(parameter->master == REFIT_MASTER_REMAINDER && parameter->type != REFIT_BF16,
                  error, REFIT_ERR_INVALID,
                  "parameter %s has remainders, which only bf16 parameters have", name);
    return REFIT_OK;
}

/* A region that the parameter names; marks it, so that no other does. */
static refit_status claim_region(refit_offloader *offloader, const refit_host_parameter *parameter,
                                 refit_region_id id, uint64_t bytes, refit_error *error)
{
    const rft_region_table *regions = &offloader->regions;
    RFT_REFUSE_IF(id >= regions->count, error, REFIT_ERR_NOT_FOUND,
                  "parameter %s names region %u, and there are %u regions", parameter->name, id,
                  regions->count);
    rft_region *region = &regions->items[id];
    RFT_REFUSE_IF(region->policy != REFIT_KEEP, error, REFIT_ERR_NOT_FOUND,
                  "parameter %s: region %s is not kept, so the image has no bytes of it",
                  parameter->name, region->name);
    RFT_REFUSE_IF(
        region->coded, error, REFIT_ERR_UNSUPPORTED,
        "parameter %s: region %s is in the image as what its weights lack: add it without "
        "weights, or set offload.masters to whole",
        parameter->name, region->name);
    RFT_REFUSE_IF(region->bytes != bytes, error, REFIT_ERR_INVALID,
                  "parameter %s: region %s has %" PRIu64 " bytes, and for %" PRIu64 " elements it "
                  "has to have %" PRIu64,
                  parameter->name, region->name, region->bytes, parameter->elements, bytes);
    RFT_REFUSE_IF(region->on_cpu, error, REFIT_ERR_EXISTS, "parameter %s: region %s is named twice",
                  parameter->name, region->name);
    region->on_cpu = true;
    return REFIT_OK;
}

static refit_status claim_regions(refit_offloader *offloader, const refit_host_parameter *parameter,
                                  refit_error *error)
{
    uint64_t elements = parameter->elements;
    for (uint32_t at = 0; at < parameter->state_count; at++) {
        RFT_TRY(claim_region(offloader, parameter, parameter->states[at], 4 * elements, error));
    }
    if (parameter->master == REFIT_MASTER_NONE) return REFIT_OK;
    uint64_t each = parameter->master == REFIT_MASTER_FP32 ? 4 : 2;
    return claim_region(offloader, parameter, parameter->master_region, each * elements, error);
}

static void release_regions(refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        offloader->regions.items[id].on_cpu = false;
    }
}

static refit_status copy_name(step_parameter *parameter, refit_error *error)
{
    size_t length = strlen(parameter->is.name) + 1;
    char *name = rft_calloc(length, 1);
    RFT_REFUSE_IF(name == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the name of a parameter");
    memcpy(name, parameter->is.name, length);
    parameter->is.name = name;
    return REFIT_OK;
}

static refit_status place(rft_span_tree *tree, const refit_host_step *step, uint32_t at,
                          refit_error *error)
{
    const refit_host_parameter *parameter = &step->parameters[at].is;
    uint64_t bytes = bytes_of(parameter->type, parameter->elements);
    RFT_TRY(rft_device_memory_check(device_of(step), parameter->memory, bytes, NULL, error));
    uint64_t begin = (uintptr_t)parameter->memory;
    uint32_t clash = rft_span_tree_find(tree, begin, bytes);
    RFT_REFUSE_IF(clash != RFT_NO_SPAN, error, REFIT_ERR_EXISTS,
                  "parameters %s and %s overlap on the device", step->parameters[clash].is.name,
                  parameter->name);
    rft_span_tree_insert(tree, at, begin, bytes);
    return REFIT_OK;
}

static refit_status check_overlaps(const refit_host_step *step, refit_error *error)
{
    rft_span_tree tree = {0};
    rft_span_tree_reset(&tree);
    refit_status status = rft_span_tree_reserve(&tree, step->count, error);
    for (uint32_t at = 0; at < step->count && status == REFIT_OK; at++) {
        status = place(&tree, step, at, error);
    }
    rft_span_tree_close(&tree);
    return status;
}

static refit_status take_list(refit_host_step *step, const refit_host_parameter *list,
                              uint32_t count, refit_error *error)
{
    uint64_t chunks = 0;
    step->parameters = rft_calloc(count, sizeof *step->parameters);
    RFT_REFUSE_IF(step->parameters == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for %" PRIu32 " parameters", count);
    for (uint32_t at = 0; at < count; at++) {
        refit_host_parameter given;
        RFT_TRY(read_parameter(list, at, &given, error));
        RFT_TRY(check_kind(&given, error));
        RFT_TRY(claim_regions(step->offloader, &given, error));
        step_parameter *parameter = &step->parameters[at];
        parameter->is = given;
        RFT_TRY(copy_name(parameter, error));
        step->count = at + 1;
        parameter->first_sum = chunks;
        chunks += chunks_of(given.elements);
        if (given.group >= step->group_count) step->group_count = given.group + 1;
    }
    RFT_REFUSE_IF(chunks > UINT32_MAX, error, REFIT_ERR_LIMIT,
                  "a host step takes fewer than %" PRIu64 " elements", UINT32_MAX * CHUNK);
    RFT_TRY(check_overlaps(step, error));
    step->groups = rft_calloc(step->group_count, sizeof *step->groups);
    step->chunks = rft_calloc(chunks, sizeof *step->chunks);
    step->sums = rft_calloc(chunks, sizeof *step->sums);
    RFT_REFUSE_IF(step->groups == NULL || step->chunks == NULL || step->sums == NULL, error,
                  REFIT_ERR_HOST_MEMORY, "no host memory for a host step of %" PRIu64 " chunks",
                  chunks);
    return REFIT_OK;
}

/* ---- What is opened: memory, streams, events, threads ---------------------------------------- */

static refit_status lay_out(refit_host_step *step, rft_layout_item *items, refit_error *error)
{
    const refit_config *config = &step->offloader->config;
    for (uint32_t at = 0; at < step->count; at++) {
        const refit_host_parameter *parameter = &step->parameters[at].is;
        items[2 * at].bytes = bytes_of(parameter->gradient_type, parameter->elements);
        items[2 * at + 1].bytes = bytes_of(parameter->type, parameter->elements);
    }
    RFT_TRY(rft_layout_open(&step->layout, items, 2 * step->count, config->offload_alignment_bytes,
                            config->offload_slab_bytes, error));
    for (uint32_t at = 0; at < step->count; at++) {
        step->parameters[at].gradient.at = items[2 * at].offset;
        step->parameters[at].gradient.bytes = items[2 * at].bytes;
        step->parameters[at].weights.at = items[2 * at + 1].offset;
        step->parameters[at].weights.bytes = items[2 * at + 1].bytes;
    }
    return REFIT_OK;
}

/* The image, which is there, and the arena, which is not yet, share one budget. The arena alone is
 * held against what is free when it is taken. */
static refit_status check_budget(const refit_host_step *step, refit_error *error)
{
    refit_offloader *offloader = step->offloader;
    uint64_t held = rft_image_held(offloader), bytes = rft_host_arena_describe(step->arena).bytes;
    rft_budget budget;
    RFT_TRY(rft_budget_read("", &offloader->config, held, 0, &budget, error));
    uint64_t left = budget.bytes - rft_min_u64(held, budget.bytes);
    RFT_REFUSE_IF(bytes > left, error, REFIT_ERR_BUDGET,
                  "a host step needs %" PRIu64 " bytes of host memory beside the %" PRIu64
                  " of the image, the budget is %" PRIu64
                  " (%s): step fewer parameters on the CPU, raise offload.budget_bytes or "
                  "offload.budget_share, or free memory",
                  bytes, held, budget.bytes, budget.source);
    return REFIT_OK;
}

static refit_status take_memory(refit_host_step *step, refit_error *error)
{
    refit_offloader *offloader = step->offloader;
    RFT_REFUSE_IF(step->count > UINT32_MAX / 2, error, REFIT_ERR_LIMIT,
                  "%" PRIu32 " parameters are too many", step->count);
    rft_layout_item *items = rft_calloc(2 * (size_t)step->count, sizeof *items);
    RFT_REFUSE_IF(items == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the places of %" PRIu32 " parameters", step->count);
    refit_status status = lay_out(step, items, error);
    rft_free(items);
    RFT_TRY(status);
    RFT_TRY(rft_host_arena_open(offloader->device, &step->layout, &offloader->config, &step->arena,
                                error));
    RFT_TRY(check_budget(step, error));
    RFT_TRY(rft_host_arena_take(step->arena, error));
    offloader->cpu.bytes = rft_host_arena_describe(step->arena).bytes;
    return REFIT_OK;
}

static refit_status open_events(refit_host_step *step, refit_error *error)
{
    refit_device *device = device_of(step);
    RFT_TRY(rft_device_event_open(device, &step->before, error));
    RFT_TRY(rft_device_event_open(device, &step->drained, error));
    for (uint32_t at = 0; at < step->count; at++) {
        step_parameter *parameter = &step->parameters[at];
        RFT_TRY(rft_device_event_open(device, &parameter->gradient.landed, error));
        RFT_TRY(rft_device_event_open(device, &parameter->weights.landed, error));
        RFT_TRY(rft_device_event_open(device, &parameter->back, error));
    }
    return REFIT_OK;
}

static uint64_t bytes_of_states(const refit_host_step *step)
{
    refit_region_id regions[REFIT_HOST_STATES + 1];
    uint64_t bytes = 0;
    for (uint32_t at = 0; at < step->count; at++) {
        uint32_t count = regions_of(&step->parameters[at].is, regions);
        for (uint32_t i = 0; i < count; i++) {
            bytes += region_at(step, regions[i])->bytes;
        }
    }
    return bytes;
}

/* Asks for pages of the states at equal distances. */
static void ask_nodes(const refit_host_step *step, rft_numa_votes *votes)
{
    refit_region_id regions[REFIT_HOST_STATES + 1];
    uint64_t distance = bytes_of_states(step) / RFT_NUMA_VOTES + 1, next = 0; /* in the region */
    for (uint32_t at = 0; at < step->count; at++) {
        uint32_t count = regions_of(&step->parameters[at].is, regions);
        for (uint32_t i = 0; i < count; i++) {
            const rft_region *region = region_at(step, regions[i]);
            const char *bytes = rft_image_of(step->offloader, region);
            for (; next < region->bytes; next += distance) {
                rft_numa_vote(votes, bytes + next);
            }
            next -= region->bytes;
        }
    }
}

static refit_status open_threads(refit_host_step *step, refit_error *error)
{
    rft_numa_votes votes = {0};
    ask_nodes(step, &votes);
    return rft_step_threads_open(&step->threads, &step->offloader->config, &votes, "", error);
}

static refit_status open_parts(refit_host_step *step, const refit_host_parameter *list,
                               uint32_t count, refit_error *error)
{
    const refit_config *config = &step->offloader->config;
    uint64_t batch = config->offload_piece_bytes / 4 / CHUNK * CHUNK;
    step->batch = rft_max_u64(batch, CHUNK);
    RFT_TRY(take_list(step, list, count, error));
    RFT_TRY(rft_image_await(step->offloader, timeout_of(step), error));
    RFT_TRY(take_memory(step, error));
    RFT_TRY(open_events(step, error));
    RFT_TRY(open_threads(step, error));
    RFT_TRY(refit_stream_open(device_of(step), &step->in, error));
    return refit_stream_open(device_of(step), &step->out, error);
}

/* Waits for the copies of a stream, by closing it. */
static refit_status close_stream(refit_host_step *step, refit_stream_ref *stream,
                                 refit_error *error)
{
    if (stream->native == NULL) return REFIT_OK;
    RFT_TRY(refit_stream_close(device_of(step), *stream, error));
    *stream = REFIT_STREAM_NONE;
    return REFIT_OK;
}

static void close_events(refit_host_step *step)
{
    refit_device *device = device_of(step);
    rft_device_event_close(device, step->before);
    rft_device_event_close(device, step->drained);
    for (uint32_t at = 0; at < step->count; at++) {
        step_parameter *parameter = &step->parameters[at];
        rft_device_event_close(device, parameter->gradient.landed);
        rft_device_event_close(device, parameter->weights.landed);
        rft_device_event_close(device, parameter->back);
    }
}

/* No copy is under way. */
static void close_parts(refit_host_step *step)
{
    close_events(step);
    rft_step_threads_close(&step->threads);
    rft_host_arena_close(step->arena);
    rft_layout_close(&step->layout);
    for (uint32_t at = 0; at < step->count; at++) {
        rft_free((void *)(uintptr_t)step->parameters[at].is.name);
    }
    release_regions(step->offloader);
    step->offloader->cpu.bytes = 0;
    rft_free(step->parameters);
    rft_free(step->groups);
    rft_free(step->chunks);
    rft_free(step->sums);
    rft_free(step);
}

static refit_status check_state(refit_offloader *offloader, refit_error *error)
{
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_OFFLOADED, error, REFIT_ERR_STATE,
                  "the states are not in the host image: the offloader is %s, not OFFLOADED",
                  refit_offloader_state_name(state));
    RFT_REFUSE_IF(offloader->closing, error, REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    return REFIT_OK;
}

static refit_status check_open(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader->host_step != NULL, error, REFIT_ERR_BUSY,
                  "the offloader has a host step already: close that one first");
    RFT_REFUSE_IF(!offloader->config.use_pinned_optimizer_offload, error, REFIT_ERR_UNSUPPORTED,
                  "a host step needs use_pinned_optimizer_offload: true");
    RFT_TRY(check_state(offloader, error));
    RFT_REFUSE_IF(rft_offloader_is_stepping(offloader, &offloader->windows), error, REFIT_ERR_BUSY,
                  "a step in windows is under way: end it, and call refit_window_wait first");
    return REFIT_OK;
}

/* After an open that failed: nothing was put on a stream that is open. One that does not close
 * keeps its device open, so it is tried again. */
static void abandon_streams(refit_host_step *step)
{
    refit_stream_ref *const streams[] = {&step->in, &step->out};
    for (uint32_t at = 0; at < 2; at++) {
        refit_error error;
        refit_status status = REFIT_ERR_DEVICE;
        for (int tries = 0; tries < 3 && status != REFIT_OK; tries++) {
            status = close_stream(step, streams[at], &error);
        }
        if (status == REFIT_OK) continue;
        rft_log(
            REFIT_LOG_WARNING,
            "a stream of a host step that was not opened stays open, and so does its device: %s",
            error.text);
    }
}

refit_status refit_host_step_open(refit_offloader *offloader,
                                  const refit_host_parameter *parameters, uint32_t count,
                                  refit_host_step **out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || parameters == NULL || count == 0 || out == NULL, error,
                  REFIT_ERR_INVALID,
                  "refit_host_step_open needs an offloader, parameters and a place for the result");
    RFT_TRY(check_open(offloader, error));
    refit_host_step *step = rft_calloc(1, sizeof *step);
    RFT_REFUSE_IF(step == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a host step");
    step->offloader = offloader;
    step->first = step->last = NO_ONE;
    atomic_init(&step->finished, 0);
    atomic_init(&step->stamped, 0);
    refit_status status = open_parts(step, parameters, count, error);
    if (status != REFIT_OK) {
        abandon_streams(step);
        close_parts(step);
        return status;
    }
    offloader->host_step = step;
    *out = step;
    return REFIT_OK;
}

refit_status refit_host_step_close(refit_host_step *step, refit_error *error)
{
    if (step == NULL) return REFIT_OK;
    step->closing = true;
    RFT_TRY(close_stream(step, &step->in, error));
    RFT_TRY(close_stream(step, &step->out, error));
    rft_offloader_release_image(step->offloader, &step->offloader->cpu);
    step->offloader->host_step = NULL;
    close_parts(step);
    return REFIT_OK;
}

refit_status refit_host_step_set_sqrt(refit_host_step *step, refit_sqrt_fn root,
                                      refit_sqrt_threads_fn threads, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(step->state == STEP_GATHERING || step->state == STEP_STEPPING, error,
                  REFIT_ERR_STATE,
                  "a step is under way: call refit_host_step_run or refit_host_step_skip first");
    step->root = root;
    step->root_threads = threads;
    return REFIT_OK;
}

/* ---- Copies ---------------------------------------------------------------------------------- */

/* Between the arena, from byte `at` on, and device memory: cut at the ends of slabs, each of which
 * is page-locked by itself, and at offload.piece_bytes. */
static refit_status copy_range(refit_host_step *step, bool to_host, uint64_t at, char *memory,
                               uint64_t bytes, refit_error *error)
{
    const refit_offloader *offloader = step->offloader;
    rft_copy copies[COPIES];
    uint32_t count = 0, most = rft_offloader_batch_most(offloader);
    if (most > COPIES) most = COPIES;
    while (bytes > 0) {
        const rft_slab *slab = &step->layout.slabs[rft_layout_find(&step->layout, at)];
        uint64_t part = rft_min_u64(bytes, slab->offset + slab->bytes - at);
        part = rft_min_u64(part, offloader->config.offload_piece_bytes);
        char *host = host_at(step, at);
        copies[count++] = (rft_copy){.to = to_host ? host : memory,
                                     .from = to_host ? memory : host,
                                     .bytes = part,
                                     .known_memory = true};
        at += part;
        memory += part;
        bytes -= part;
        if (count < most && bytes > 0) continue;
        RFT_TRY(rft_device_copy_batch(offloader->device, to_host ? step->in : step->out, copies,
                                      count, RFT_COPY_STREAM, error));
        count = 0;
    }
    return REFIT_OK;
}

static refit_status wait_event(refit_host_step *step, rft_event *event, uint32_t timeout_ms,
                               refit_error *error)
{
    int64_t began = rft_now();
    refit_status status = rft_device_event_wait(device_of(step), event, timeout_ms, error);
    if (timeout_ms > 0) step->blocked += rft_now() - began;
    return status;
}

/* Makes `follower` wait for what `stream` has queued. */
static refit_status follow(refit_host_step *step, refit_stream_ref stream,
                           refit_stream_ref follower, refit_error *error)
{
    if (stream.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(device_of(step), step->before, stream, error));
    return rft_device_event_join(device_of(step), step->before, follower, error);
}

/* Waits until nothing that was put on `in` reads device memory any more. */
static refit_status drain_in(refit_host_step *step, refit_error *error)
{
    RFT_TRY(rft_device_event_record(device_of(step), step->drained, step->in, error));
    RFT_TRY(wait_event(step, step->drained, timeout_of(step), error));
    step->dropped_read = false;
    return REFIT_OK;
}

/* ---- Gradients come -------------------------------------------------------------------------- */

static void clear_list(refit_host_step *step)
{
    for (uint32_t at = 0; at < step->count; at++) {
        step->parameters[at].is_listed = false;
    }
    step->first = step->last = NO_ONE;
}

static void unlist(refit_host_step *step, uint32_t number)
{
    step_parameter *it = &step->parameters[number];
    if (!it->is_listed) return;
    *(it->before == NO_ONE ? &step->first : &step->parameters[it->before].after) = it->after;
    *(it->after == NO_ONE ? &step->last : &step->parameters[it->after].before) = it->before;
    it->is_listed = false;
}

/* Puts it after all others, wherever it was. */
static void list_last(refit_host_step *step, uint32_t number)
{
    step_parameter *it = &step->parameters[number];
    unlist(step, number);
    it->before = step->last;
    it->after = NO_ONE;
    *(step->last == NO_ONE ? &step->first : &step->parameters[step->last].after) = number;
    step->last = number;
    it->is_listed = true;
}

static refit_status put_arrival(refit_host_step *step, const step_arrival *arrival,
                                const void *from, refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(follow(step, stream, step->in, error));
    RFT_TRY(copy_range(step, true, arrival->at, (char *)(uintptr_t)from, arrival->bytes, error));
    return rft_device_event_record(device_of(step), arrival->landed, step->in, error);
}

/* After what `stream` has queued. After a failure a part of the copy may be under way. */
static refit_status start_arrival(refit_host_step *step, step_arrival *arrival, const void *from,
                                  refit_stream_ref stream, refit_error *error)
{
    refit_status status = put_arrival(step, arrival, from, stream, error);
    arrival->asked = status == REFIT_OK;
    if (status != REFIT_OK) step->dropped_read = true;
    return account(step, status);
}

static refit_status wait_arrival(refit_host_step *step, step_arrival *arrival, uint32_t timeout_ms,
                                 refit_error *error)
{
    if (!arrival->asked || arrival->has_landed) return REFIT_OK;
    RFT_TRY(wait_event(step, arrival->landed, timeout_ms, error));
    arrival->has_landed = true;
    step->in_bytes += arrival->bytes;
    return REFIT_OK;
}

/* Waits until all that comes of a parameter has landed. */
static refit_status wait_parameter(refit_host_step *step, step_parameter *parameter,
                                   uint32_t timeout_ms, refit_error *error)
{
    int64_t deadline = rft_deadline(timeout_ms);
    RFT_TRY(wait_arrival(step, &parameter->gradient, timeout_ms, error));
    RFT_TRY(wait_arrival(step, &parameter->weights, (uint32_t)rft_ms_until(deadline), error));
    parameter->is_known = parameter->is_known || parameter->weights.has_landed;
    return REFIT_OK;
}

/* What has landed is work for the next on_landed. */
static void mark_landed(refit_host_step *step, uint32_t number)
{
    if (number < step->new_from) step->new_from = number;
    if (number >= step->new_to) step->new_to = number + 1;
}

/* Does what is to be done with what has landed since it was called last. Gradients come in about
 * the order of the parameters, so there is little between the first and the last of these. */
typedef void (*landed_fn)(refit_host_step *step, uint32_t from, uint32_t to, refit_error *first);

static void tell_landed(refit_host_step *step, landed_fn on_landed, refit_error *first)
{
    uint32_t from = step->new_from, to = step->new_to;
    step->new_from = NO_ONE;
    step->new_to = 0;
    if (from < to) on_landed(step, from, to, first);
}

/* Calls `on_landed` whenever gradients have landed, until all have; each is waited for in turn, but
 * only when there is nothing else to do. */
static refit_status gather(refit_host_step *step, landed_fn on_landed, refit_error *error)
{
    refit_error first = {0}, said = {0};
    step->new_from = 0; /* what has landed in a call before */
    step->new_to = step->count;
    uint32_t timeout_ms = 0;
    for (uint32_t at = step->first; at != NO_ONE;) {
        step_parameter *parameter = &step->parameters[at];
        refit_status status = wait_parameter(step, parameter, timeout_ms, &said);
        if (status == REFIT_OK) {
            mark_landed(step, at);
            timeout_ms = 0;
            at = parameter->after;
            continue;
        }
        if (timeout_ms > 0 || status != REFIT_ERR_TIMEOUT) {
            keep_first(&first, status, &said);
            break;
        }
        tell_landed(step, on_landed, &first);
        timeout_ms = timeout_of(step);
    }
    tell_landed(step, on_landed, &first);
    if (first.status == REFIT_OK && step->dropped_read) {
        keep_first(&first, drain_in(step, &said), &said);
    }
    if (error != NULL && first.status != REFIT_OK) *error = first;
    return (refit_status)first.status;
}

/* Cuts a parameter into chunks, after those that there are. */
static void add_chunk(refit_host_step *step, uint32_t number, uint64_t from)
{
    uint64_t left = step->parameters[number].is.elements - from;
    uint32_t count = (uint32_t)rft_min_u64(left, CHUNK);
    step->chunks[step->chunk_count++] =
        (step_chunk){.parameter = number, .count = count, .from = from};
    step->queued += count;
}

/* Does all chunks on the threads of the pool. */
static void do_chunks(refit_host_step *step, rft_pool_item_fn run)
{
    int64_t began = rft_now();
    (void)fegetenv(&step->modes);
    rft_pool_items(&step->threads.pool, step->chunk_count, run, step);
    step->computed += rft_now() - began;
}

/* The pool's threads compute in the modes of the thread that called, or the bits would depend on
 * which of them does a chunk. */
static void take_modes(const refit_host_step *step, uint32_t worker)
{
    if (worker != 0) (void)fesetenv(&step->modes);
}

static void clear_chunks(refit_host_step *step)
{
    step->chunk_count = 0;
    step->queued = 0;
}

/* ---- The norm -------------------------------------------------------------------------------- */

static void sum_chunk(void *user, uint32_t item, uint32_t worker)
{
    refit_host_step *step = user;
    const step_chunk *chunk = &step->chunks[item];
    const step_parameter *parameter = &step->parameters[chunk->parameter];
    int32_t type = parameter->is.gradient_type;
    const char *gradient = host_at(step, parameter->gradient.at + bytes_of(type, chunk->from));
    take_modes(step, worker);
    double sums[CHUNK / RFT_NORM_BLOCK];
    rft_norm_sum(
        &(rft_norm_span){
            .count = chunk->count, .gradient = gradient, .type = float_type(type), .scale = 1},
        sums);
    step->sums[parameter->first_sum + chunk->from / CHUNK] =
        rft_norm_total(sums, rft_norm_blocks(chunk->count));
}

static void sum_landed(refit_host_step *step, uint32_t from, uint32_t to, refit_error *first)
{
    (void)first; /* sums cannot fail */
    clear_chunks(step);
    for (uint32_t at = from; at < to; at++) {
        step_parameter *parameter = &step->parameters[at];
        if (!parameter->gradient.has_landed || parameter->summed) continue;
        parameter->summed = true;
        for (uint64_t begin = 0; begin < parameter->is.elements; begin += CHUNK) {
            add_chunk(step, at, begin);
        }
    }
    do_chunks(step, sum_chunk);
}

static void leave_unsummed(refit_host_step *step, uint32_t from, uint32_t to, refit_error *first)
{
    (void)step, (void)from, (void)to, (void)first; /* only the wait was asked for */
}

refit_status refit_host_step_norm(refit_host_step *step, double *squared, int *found_inf,
                                  refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(
        (squared == NULL) != (found_inf == NULL), error, REFIT_ERR_INVALID,
        "refit_host_step_norm needs places for the sum and for what it found, or neither");
    RFT_REFUSE_IF(
        step->state != STEP_GATHERING, error, REFIT_ERR_STATE,
        "the norm is that of the gradients that were submitted: call refit_host_step_begin "
        "and refit_host_step_gradient first, and refit_host_step_run later");
    if (squared == NULL) return account(step, gather(step, leave_unsummed, error));
    RFT_TRY(account(step, gather(step, sum_landed, error)));
    double sum = 0;
    for (uint32_t at = 0; at < step->count; at++) {
        const step_parameter *parameter = &step->parameters[at];
        if (!parameter->gradient.asked) continue;
        for (uint64_t chunk = 0; chunk < chunks_of(parameter->is.elements); chunk++) {
            sum += step->sums[parameter->first_sum + chunk];
        }
    }
    *squared = sum;
    *found_inf = !isfinite(sum);
    return REFIT_OK;
}

/* ---- Begin, submit, skip --------------------------------------------------------------------- */

/* The regions are those that open has seen. */
static refit_status check_regions(const refit_host_step *step, refit_error *error)
{
    refit_region_id regions[REFIT_HOST_STATES + 1];
    for (uint32_t at = 0; at < step->count; at++) {
        uint32_t count = regions_of(&step->parameters[at].is, regions);
        for (uint32_t i = 0; i < count; i++) {
            RFT_REFUSE_IF(regions[i] >= step->offloader->regions.count ||
                              !region_at(step, regions[i])->on_cpu,
                          error, REFIT_ERR_STATE,
                          "the regions of parameter %s were removed from the offloader: close the "
                          "host step",
                          step->parameters[at].is.name);
        }
    }
    return REFIT_OK;
}

/* `claim`: from now on no read lock begins, and no restore. A read lock may be acquired by any
 * thread. */
static refit_status check_offloader(refit_host_step *step, bool claim, refit_error *error)
{
    refit_offloader *offloader = step->offloader;
    RFT_TRY(check_state(offloader, error));
    RFT_TRY(check_regions(step, error));
    RFT_TRY(rft_image_await(offloader, timeout_of(step), error));
    return claim ? rft_offloader_claim_image(offloader, &offloader->cpu, error) : REFIT_OK;
}

/* One number of a group: from 0 on, and below `end`. */
static refit_status check_number(uint32_t group, const char *name, double number, double end,
                                 refit_error *error)
{
    RFT_REFUSE_IF(!isfinite(number) || number < 0 || number >= end, error, REFIT_ERR_INVALID,
                  "group %" PRIu32 ": %s is %g: it is from 0 on%s", group, name, number,
                  end == 1 ? " and below 1" : "");
    return REFIT_OK;
}

/* Takes what the optimizer knows of the options. PyTorch refuses the same, but for infinities. */
static refit_status take_options(const refit_optimizer_options *given, uint32_t at,
                                 rft_optim_options *options, refit_error *error)
{
    int32_t kind = given->optimizer;
    options->lr = given->lr;
    options->weight_decay = given->weight_decay;
    RFT_TRY(check_number(at, "lr", given->lr, INFINITY, error));
    RFT_TRY(check_number(at, "weight_decay", given->weight_decay, INFINITY, error));
    if (kind == REFIT_ADAM || kind == REFIT_LION) {
        options->beta1 = given->beta1;
        options->beta2 = given->beta2;
        RFT_TRY(check_number(at, "beta1", given->beta1, 1, error));
        RFT_TRY(check_number(at, "beta2", given->beta2, 1, error));
    }
    if (kind == REFIT_ADAM || kind == REFIT_ADAGRAD) {
        options->eps = given->eps;
        RFT_TRY(check_number(at, "eps", given->eps, INFINITY, error));
    }
    if (kind == REFIT_ADAM) {
        options->decoupled = given->decoupled != 0;
        options->amsgrad = given->amsgrad != 0;
    }
    if (kind == REFIT_ADAGRAD) {
        options->lr_decay = given->lr_decay;
        RFT_TRY(check_number(at, "lr_decay", given->lr_decay, INFINITY, error));
    }
    if (kind != REFIT_SGD) return REFIT_OK;
    options->momentum = given->momentum;
    options->dampening = given->dampening;
    options->nesterov = given->nesterov != 0;
    RFT_TRY(check_number(at, "momentum", given->momentum, INFINITY, error));
    RFT_REFUSE_IF(!isfinite(given->dampening) ||
                      (given->nesterov && (given->momentum <= 0 || given->dampening != 0)),
                  error, REFIT_ERR_INVALID,
                  "group %" PRIu32 ": nesterov needs momentum and no dampening, which is finite",
                  at);
    return REFIT_OK;
}

/* The options of a group as the kernel takes them. */
static refit_status read_options(const refit_optimizer_options *list, uint32_t at,
                                 rft_optim_options *options, refit_error *error)
{
    size_t size = list->size;
    const refit_optimizer_options *given = (const void *)((const char *)list + at * size);
    RFT_REFUSE_IF(size < sizeof *given || size % _Alignof(refit_optimizer_options) != 0 ||
                      given->size != size,
                  error, REFIT_ERR_INVALID,
                  "refit_optimizer_options.size is %zu in group %" PRIu32
                  " and %zu in the first: set "
                  "each to sizeof(refit_optimizer_options)",
                  given->size, at, size);
    RFT_REFUSE_IF(given->optimizer < REFIT_ADAM || given->optimizer > REFIT_LION, error,
                  REFIT_ERR_INVALID, "group %" PRIu32 ": there is no optimizer %d", at,
                  given->optimizer);
    *options = (rft_optim_options){.kind = (rft_optim_kind)given->optimizer,
                                   .maximize = given->maximize != 0,
                                   .lr_is_tensor = given->lr_is_tensor != 0};
    return take_options(given, at, options, error);
}

static refit_status take_groups(refit_host_step *step, const refit_optimizer_options *groups,
                                uint32_t count, refit_error *error)
{
    for (uint32_t at = 0; at < count; at++) {
        rft_optim_options options;
        RFT_TRY(read_options(groups, at, &options, error));
        options.root = step->root;
        options.root_threads = step->root_threads;
        if (at < step->group_count) step->groups[at] = options;
    }
    for (uint32_t at = 0; at < step->count; at++) {
        const refit_host_parameter *is = &step->parameters[at].is;
        RFT_REFUSE_IF(is->group >= count, error, REFIT_ERR_INVALID,
                      "parameter %s is of group %" PRIu32 ", and %" PRIu32 " groups were given",
                      is->name, is->group, count);
        size_t states = rft_optim_states(&step->groups[is->group]);
        RFT_REFUSE_IF(states > is->state_count, error, REFIT_ERR_INVALID,
                      "parameter %s has %" PRIu32 " states, and the optimizer of group %" PRIu32
                      " has %zu",
                      is->name, is->state_count, is->group, states);
    }
    return REFIT_OK;
}

static void forget(step_arrival *arrival)
{
    arrival->asked = arrival->has_landed = false;
}

static void forget_gradient(step_parameter *parameter)
{
    forget(&parameter->gradient);
    parameter->summed = false;
}

static void reset_step(refit_host_step *step)
{
    for (uint32_t at = 0; at < step->count; at++) {
        step_parameter *parameter = &step->parameters[at];
        forget_gradient(parameter);
        forget(&parameter->weights);
        parameter->stepped = parameter->sending = parameter->returned = parameter->send_lost =
            false;
    }
    clear_list(step);
    step->began = step->blocked = step->computed = 0;
    step->finish_is_last = false;
    step->in_bytes = step->out_bytes = 0;
}

/* To IDLE, from RETURNING. */
static refit_status settle(refit_host_step *step, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(step->state == STEP_GATHERING || step->state == STEP_STEPPING, error,
                  REFIT_ERR_STATE,
                  "a step is under way: call refit_host_step_run or refit_host_step_skip first");
    return refit_host_step_wait(step, timeout_of(step), error);
}

refit_status refit_host_step_begin(refit_host_step *step, const refit_optimizer_options *groups,
                                   uint32_t count, refit_error *error)
{
    RFT_TRY(settle(step, error));
    RFT_REFUSE_IF(groups == NULL || count == 0, error, REFIT_ERR_INVALID,
                  "refit_host_step_begin needs the options of at least one group");
    RFT_TRY(check_offloader(step, false, error));
    RFT_TRY(take_groups(step, groups, count, error));
    reset_step(step);
    step->state = STEP_GATHERING;
    return REFIT_OK;
}

refit_status refit_host_step_gradient(refit_host_step *step, uint32_t parameter,
                                      const void *gradient, uint64_t number,
                                      refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(step->state != STEP_GATHERING, error, REFIT_ERR_STATE,
                  "gradients are submitted between refit_host_step_begin and refit_host_step_run");
    RFT_TRY(find_parameter(step, parameter, error));
    step_parameter *it = &step->parameters[parameter];
    RFT_REFUSE_IF(number == 0, error, REFIT_ERR_INVALID,
                  "parameter %s: steps are counted from 1 on", it->is.name);
    RFT_TRY(rft_device_memory_check(device_of(step), gradient, it->gradient.bytes, NULL, error));
    /* The copy of a former one is on the same stream, so this one comes after it. */
    forget_gradient(it);
    if (!it->weights.asked) unlist(step, parameter);
    it->rule = rft_optim_rule_at(&step->groups[it->is.group], (double)number);
    RFT_TRY(start_arrival(step, &it->gradient, gradient, stream, error));
    list_last(step, parameter);
    return REFIT_OK;
}

refit_status refit_host_step_drop(refit_host_step *step, uint32_t parameter, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(step->state != STEP_GATHERING, error, REFIT_ERR_STATE,
                  "gradients are dropped between refit_host_step_begin and refit_host_step_run");
    RFT_TRY(find_parameter(step, parameter, error));
    step_parameter *it = &step->parameters[parameter];
    if (it->gradient.asked && !it->gradient.has_landed) step->dropped_read = true;
    forget_gradient(it);
    if (!it->weights.asked) unlist(step, parameter);
    return REFIT_OK;
}

refit_status refit_host_step_refresh(refit_host_step *step, uint32_t parameter,
                                     refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(step->state != STEP_GATHERING, error, REFIT_ERR_STATE,
                  "parameters are refreshed between refit_host_step_begin and refit_host_step_run");
    RFT_TRY(find_parameter(step, parameter, error));
    step_parameter *it = &step->parameters[parameter];
    RFT_REFUSE_IF(it->is.master != REFIT_MASTER_NONE, error, REFIT_ERR_UNSUPPORTED,
                  "parameter %s is what its %s say, not the device: write these by "
                  "refit_host_step_region, or call refit_host_step_load between steps",
                  it->is.name,
                  it->is.master == REFIT_MASTER_FP32 ? "masters" : "bits and remainders");
    /* The host's copy is neither the old parameter nor the new one until all of this has landed. */
    it->is_known = false;
    forget(&it->weights);
    if (!it->gradient.asked) unlist(step, parameter);
    RFT_TRY(start_arrival(step, &it->weights, it->is.memory, stream, error));
    if (!it->is_listed) list_last(step, parameter);
    return REFIT_OK;
}

refit_status refit_host_step_skip(refit_host_step *step, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    if (step->state == STEP_IDLE || step->state == STEP_RETURNING) return REFIT_OK;
    bool any = false;
    refit_status status = drain_in(step, error);
    bool lost = status != REFIT_OK && rft_device_is_lost(device_of(step));
    if (status != REFIT_OK && !lost) return account(step, status);
    for (uint32_t at = 0; at < step->count; at++) {
        step_parameter *parameter = &step->parameters[at];
        any = any || parameter->stepped;
        if (!parameter->stepped) forget_gradient(parameter);
        if (parameter->weights.asked && !lost) parameter->is_known = true;
        forget(&parameter->weights);
    }
    clear_list(step);
    if (!any) step->began = 0;
    rft_offloader_release_image(step->offloader, &step->offloader->cpu);
    step->state = any ? STEP_RETURNING : STEP_IDLE;
    return REFIT_OK;
}

/* ---- Parameters return ----------------------------------------------------------------------- */

static refit_status end_send(refit_host_step *step, uint32_t number, refit_error *error)
{
    step_parameter *parameter = &step->parameters[number];
    RFT_TRY(rft_device_event_record(device_of(step), parameter->back, step->out, error));
    parameter->sending = true;
    step->last_sent = number;
    return REFIT_OK;
}

static refit_status send_range(refit_host_step *step, uint32_t number, uint64_t from,
                               uint64_t count, refit_error *error)
{
    const step_parameter *parameter = &step->parameters[number];
    uint64_t offset = bytes_of(parameter->is.type, from);
    return copy_range(step, false, parameter->weights.at + offset,
                      (char *)parameter->is.memory + offset, bytes_of(parameter->is.type, count),
                      error);
}

/* Copies back that could not be started, or not all of them, start. */
static void send_again(refit_host_step *step, refit_error *first)
{
    refit_error said = {0};
    for (uint32_t at = 0; at < step->count; at++) {
        step_parameter *parameter = &step->parameters[at];
        if (!parameter->stepped || parameter->sending || parameter->returned) continue;
        step->finish_is_last = false;
        refit_status status = send_range(step, at, 0, parameter->is.elements, &said);
        if (status == REFIT_OK) status = end_send(step, at, &said);
        keep_first(first, status, &said);
    }
}

static refit_status wait_return(refit_host_step *step, step_parameter *parameter,
                                uint32_t timeout_ms, refit_error *error)
{
    if (!parameter->sending) return REFIT_OK;
    RFT_TRY(wait_event(step, parameter->back, timeout_ms, error));
    parameter->sending = false;
    parameter->returned = true;
    step->out_bytes += bytes_of(parameter->is.type, parameter->is.elements);
    return REFIT_OK;
}

/* Every parameter is where it should be: the step's figures are known. */
static void tell_figures(refit_host_step *step)
{
    rft_step_figures *steps = &step->offloader->cpu.figures;
    bool stamped = step->finish_is_last && atomic_load(&step->stamped) == step->finish_calls;
    int64_t ended = stamped ? atomic_load(&step->finished) : rft_now();
    steps->count++;
    steps->in_bytes = step->in_bytes;
    steps->out_bytes = step->out_bytes;
    steps->last = ended > step->began ? ended - step->began : 0;
    steps->blocked = step->blocked;
    steps->computed = step->computed;
}

void rft_host_step_stats(const refit_offloader *offloader, refit_stats *stats)
{
    const rft_step_figures *figures = &offloader->cpu.figures;
    stats->host_step_count = figures->count;
    stats->host_step_failures = figures->failures;
    stats->host_step_in_bytes_last = figures->in_bytes;
    stats->host_step_out_bytes_last = figures->out_bytes;
    stats->host_step_seconds_last = rft_seconds(figures->last);
    stats->host_step_blocked_seconds_last = rft_seconds(figures->blocked);
    stats->host_step_compute_seconds_last = rft_seconds(figures->computed);
    stats->host_step_bytes = offloader->cpu.bytes;
}

static bool all_returned(const refit_host_step *step)
{
    for (uint32_t at = 0; at < step->count; at++) {
        if (step->parameters[at].stepped && !step->parameters[at].returned) return false;
    }
    return true;
}

refit_status refit_host_step_wait(refit_host_step *step, uint32_t timeout_ms, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    if (step->state == STEP_IDLE || step->state == STEP_GATHERING) return REFIT_OK;
    int64_t deadline = rft_deadline(timeout_ms);
    refit_error first = {0}, said = {0};
    send_again(step, &first);
    for (uint32_t at = 0; at < step->count; at++) {
        uint32_t left_ms = (uint32_t)rft_ms_until(deadline);
        refit_status status = wait_return(step, &step->parameters[at], left_ms, &said);
        if (status == REFIT_ERR_TIMEOUT && first.status == REFIT_OK) {
            if (error != NULL) *error = said;
            return status;
        }
        keep_first(&first, status, &said);
    }
    if (step->state == STEP_RETURNING && all_returned(step)) {
        if (step->out_bytes != 0) tell_figures(step); /* 0: nothing was stepped */
        step->state = STEP_IDLE;
    }
    return answer(step, &first, error);
}

refit_status refit_host_step_join(refit_host_step *step, uint32_t parameter,
                                  refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(stream.native == NULL, error, REFIT_ERR_INVALID,
                  "the calling thread cannot be made to wait on the device: call "
                  "refit_host_step_wait");
    RFT_REFUSE_IF(step->state == STEP_GATHERING || step->state == STEP_STEPPING, error,
                  REFIT_ERR_STATE,
                  "the parameters have not left yet: call refit_host_step_run first");
    bool each = parameter == REFIT_EACH_PARAMETER, any = false;
    if (!each) RFT_TRY(find_parameter(step, parameter, error));
    uint32_t from = each ? 0 : parameter, to = each ? step->count : parameter + 1;
    for (uint32_t at = from; at < to; at++) {
        const step_parameter *it = &step->parameters[at];
        RFT_REFUSE_IF(it->stepped && !it->sending && !it->returned, error, REFIT_ERR_COPY,
                      "parameter %s is not on its way to the device, since its copy could not be "
                      "started: call refit_host_step_wait",
                      it->is.name);
        any = any || it->sending;
    }
    if (!any) return REFIT_OK;
    /* Copies back are on one stream: after the last, all are over. */
    uint32_t last = each ? step->last_sent : parameter;
    return rft_device_event_join(device_of(step), step->parameters[last].back, stream, error);
}

/* ---- The step -------------------------------------------------------------------------------- */

static void *moved(void *array, uint64_t bytes)
{
    return (char *)array + bytes;
}

static rft_optim_span span_of(const refit_host_step *step, const step_chunk *chunk)
{
    const step_parameter *parameter = &step->parameters[chunk->parameter];
    const refit_host_parameter *is = &parameter->is;
    rft_optim_span span = {.count = chunk->count,
                           .gradient_type = float_type(is->gradient_type),
                           .weights_type = float_type(is->type),
                           .master_form = (rft_optim_master)is->master};
    span.gradient =
        host_at(step, parameter->gradient.at + bytes_of(is->gradient_type, chunk->from));
    span.weights = host_at(step, parameter->weights.at + bytes_of(is->type, chunk->from));
    for (uint32_t at = 0; at < is->state_count; at++) {
        void *state = rft_image_of(step->offloader, region_at(step, is->states[at]));
        span.states[at] = moved(state, 4 * chunk->from);
    }
    if (is->master != REFIT_MASTER_NONE) {
        void *master = rft_image_of(step->offloader, region_at(step, is->master_region));
        uint64_t each = is->master == REFIT_MASTER_FP32 ? 4 : 2;
        span.master = moved(master, each * chunk->from);
    }
    return span;
}

static void step_one(void *user, uint32_t item, uint32_t worker)
{
    refit_host_step *step = user;
    const step_chunk *chunk = &step->chunks[item];
    rft_optim_span span = span_of(step, chunk);
    take_modes(step, worker);
    rft_optim_step(&step->parameters[chunk->parameter].rule, &span);
}

/* Steps the chunks, and starts their copies back. A copy that cannot be started takes nothing away
 * from the step. */
static void step_chunks(refit_host_step *step, refit_error *first)
{
    do_chunks(step, step_one);
    for (uint32_t at = 0; at < step->chunk_count;) {
        uint32_t number = step->chunks[at].parameter;
        step_parameter *parameter = &step->parameters[number];
        uint64_t from = step->chunks[at].from, count = 0;
        for (; at < step->chunk_count && step->chunks[at].parameter == number; at++) {
            count += step->chunks[at].count;
        }
        refit_error said = {0};
        refit_status status = send_range(step, number, from, count, &said);
        if (status != REFIT_OK) parameter->send_lost = true;
        keep_first(first, status, &said);
        if (from + count < parameter->is.elements) continue;
        parameter->stepped = true;
        if (!parameter->send_lost) keep_first(first, end_send(step, number, &said), &said);
    }
    clear_chunks(step);
}

static void mark_rewritten(refit_host_step *step, const refit_host_parameter *is)
{
    refit_region_id regions[REFIT_HOST_STATES + 1];
    uint32_t count = regions_of(is, regions);
    for (uint32_t at = 0; at < count; at++) {
        region_at(step, regions[at])->rewritten = true;
    }
}

static void step_landed(refit_host_step *step, uint32_t from, uint32_t to, refit_error *first)
{
    clear_chunks(step);
    for (uint32_t at = from; at < to; at++) {
        step_parameter *parameter = &step->parameters[at];
        if (!parameter->gradient.has_landed || !parameter->is_known || parameter->stepped) continue;
        parameter->rule.unscale = step->unscale;
        parameter->rule.clip = step->clip;
        mark_rewritten(step, &parameter->is);
        for (uint64_t begin = 0; begin < parameter->is.elements; begin += CHUNK) {
            add_chunk(step, at, begin);
            if (step->queued >= step->batch) step_chunks(step, first);
        }
    }
    step_chunks(step, first);
}

/* On the stream's thread. */
static void stamp_finish(void *user)
{
    refit_host_step *step = user;
    atomic_store(&step->finished, rft_now());
    atomic_fetch_add(&step->stamped, 1);
}

/* Without the call, the time is that at which wait or begin sees the end. */
static void call_at_end(refit_host_step *step)
{
    step->finish_is_last =
        refit_stream_call(device_of(step), step->out, stamp_finish, step, NULL) == REFIT_OK;
    if (step->finish_is_last) step->finish_calls++;
}

static refit_status check_factors(const refit_host_step *step, double unscale, double clip,
                                  refit_error *error)
{
    RFT_REFUSE_IF(!isfinite((float)unscale) || !isfinite((float)clip), error, REFIT_ERR_INVALID,
                  "gradients cannot be multiplied by %g and %g: give finite numbers, or skip the "
                  "step",
                  unscale, clip);
    RFT_REFUSE_IF(step->state == STEP_STEPPING &&
                      (step->unscale != (float)unscale || step->clip != (float)clip),
                  error, REFIT_ERR_INVALID,
                  "a part of the parameters was stepped with the factors %g and %g: give the same",
                  (double)step->unscale, (double)step->clip);
    return REFIT_OK;
}

/* The host has each parameter that is to be stepped, or will have it. */
static refit_status check_known(const refit_host_step *step, refit_error *error)
{
    for (uint32_t at = step->first; at != NO_ONE; at = step->parameters[at].after) {
        const step_parameter *it = &step->parameters[at];
        RFT_REFUSE_IF(!it->is_known && !it->weights.asked, error, REFIT_ERR_STATE,
                      "parameter %s is not on the host: call refit_host_step_refresh, or "
                      "refit_host_step_load between steps",
                      it->is.name);
    }
    return REFIT_OK;
}

static refit_status run(refit_host_step *step, refit_stream_ref stream, refit_error *error)
{
    refit_error first = {0}, said = {0};
    if (step->began == 0) step->began = rft_now();
    refit_status status = follow(step, stream, step->out, &said);
    keep_first(&first, status, &said);
    if (status == REFIT_OK) {
        send_again(step, &first);
        keep_first(&first, gather(step, step_landed, &said), &said);
        call_at_end(step);
    }
    if (error != NULL && first.status != REFIT_OK) *error = first;
    return (refit_status)first.status;
}

refit_status refit_host_step_run(refit_host_step *step, double unscale, double clip,
                                 refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(step->state != STEP_GATHERING && step->state != STEP_STEPPING, error,
                  REFIT_ERR_STATE, "no step is under way: call refit_host_step_begin first");
    RFT_TRY(check_factors(step, unscale, clip, error));
    RFT_TRY(check_known(step, error));
    RFT_TRY(check_offloader(step, true, error));
    step->unscale = (float)unscale;
    step->clip = (float)clip;
    step->state = STEP_STEPPING;
    step->offloader->image_used = true;
    RFT_TRY(account(step, run(step, stream, error)));
    rft_offloader_release_image(step->offloader, &step->offloader->cpu);
    step->state = STEP_RETURNING;
    return REFIT_OK;
}

uint32_t refit_host_step_progress(const refit_host_step *step, uint32_t parameter)
{
    if (step == NULL || parameter >= step->count) return 0;
    const step_parameter *it = &step->parameters[parameter];
    return (it->gradient.asked ? REFIT_PARAMETER_SUBMITTED : 0u) |
           (it->stepped ? REFIT_PARAMETER_STEPPED : 0u) |
           (it->returned ? REFIT_PARAMETER_RETURNED : 0u);
}

/* ---- Between steps --------------------------------------------------------------------------- */

/* Masters that are their parameters, and remainders of such masters. */
static void renew_chunk(void *user, uint32_t item, uint32_t worker)
{
    refit_host_step *step = user;
    const step_chunk *chunk = &step->chunks[item];
    const refit_host_parameter *is = &step->parameters[chunk->parameter].is;
    rft_optim_span span = span_of(step, chunk);
    (void)worker;
    if (is->master == REFIT_MASTER_REMAINDER) {
        memset(span.master, 0, 2 * span.count);
    } else if (is->type == REFIT_BF16) {
        rft_floats_from_bf16(span.master, span.weights, span.count);
    } else {
        rft_floats_from_half(span.master, span.weights, span.count);
    }
}

static void renew_all(refit_host_step *step)
{
    clear_chunks(step);
    for (uint32_t at = 0; at < step->count; at++) {
        const refit_host_parameter *is = &step->parameters[at].is;
        if (is->master == REFIT_MASTER_NONE) continue;
        region_at(step, is->master_region)->rewritten = true;
        for (uint64_t from = 0; from < is->elements; from += CHUNK) {
            add_chunk(step, at, from);
        }
    }
    step->offloader->image_used = true;
    do_chunks(step, renew_chunk);
    clear_chunks(step);
}

static refit_status load_all(refit_host_step *step, refit_stream_ref after, refit_error *error)
{
    RFT_TRY(follow(step, after, step->in, error));
    for (uint32_t at = 0; at < step->count; at++) {
        const step_parameter *parameter = &step->parameters[at];
        RFT_TRY(copy_range(step, true, parameter->weights.at, parameter->is.memory,
                           bytes_of(parameter->is.type, parameter->is.elements), error));
    }
    return drain_in(step, error);
}

static void set_known(refit_host_step *step, bool known)
{
    for (uint32_t at = 0; at < step->count; at++) {
        step->parameters[at].is_known = known;
    }
}

refit_status refit_host_step_load(refit_host_step *step, int renew, refit_stream_ref after,
                                  refit_error *error)
{
    RFT_TRY(settle(step, error));
    RFT_TRY(check_offloader(step, renew != 0, error));
    set_known(step, false);
    refit_status status = load_all(step, after, error);
    if (status == REFIT_OK && renew != 0) renew_all(step);
    rft_offloader_release_image(step->offloader, &step->offloader->cpu);
    set_known(step, status == REFIT_OK);
    return account(step, status);
}

refit_status refit_host_step_parameter(const refit_host_step *step, uint32_t parameter,
                                       const void **bytes, uint64_t *count, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(bytes == NULL || count == NULL, error, REFIT_ERR_INVALID,
                  "refit_host_step_parameter needs places for the bytes and their count");
    RFT_TRY(find_parameter(step, parameter, error));
    const step_parameter *it = &step->parameters[parameter];
    RFT_REFUSE_IF(!it->is_known, error, REFIT_ERR_STATE,
                  "parameter %s is not on the host: call refit_host_step_load, or "
                  "refit_host_step_refresh and refit_host_step_run",
                  it->is.name);
    *bytes = host_at(step, it->weights.at);
    *count = bytes_of(it->is.type, it->is.elements);
    return REFIT_OK;
}

refit_status refit_host_step_region(refit_host_step *step, refit_region_id region, void **bytes,
                                    uint64_t *count, refit_error *error)
{
    RFT_TRY(check_usable(step, error));
    RFT_REFUSE_IF(bytes == NULL || count == NULL, error, REFIT_ERR_INVALID,
                  "refit_host_step_region needs places for the bytes and their count");
    refit_offloader *offloader = step->offloader;
    RFT_REFUSE_IF(region >= offloader->regions.count || !region_at(step, region)->on_cpu, error,
                  REFIT_ERR_NOT_FOUND, "region %u is of no parameter of this host step", region);
    RFT_REFUSE_IF(step->state == STEP_STEPPING, error, REFIT_ERR_STATE,
                  "a part of the parameters was stepped: call refit_host_step_run or "
                  "refit_host_step_skip first");
    RFT_TRY(check_state(offloader, error));
    RFT_TRY(rft_image_await(offloader, timeout_of(step), error));
    rft_lock(&offloader->lock);
    uint32_t read_locks = offloader->read_locks;
    rft_unlock(&offloader->lock);
    RFT_REFUSE_IF(read_locks != 0, error, REFIT_ERR_BUSY,
                  "%u read lock(s) read the host image: release them first", read_locks);
    rft_region *item = region_at(step, region);
    item->rewritten = offloader->image_used = true;
    *bytes = rft_image_of(offloader, item);
    *count = item->bytes;
    return REFIT_OK;
}
