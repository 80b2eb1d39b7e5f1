/*
 * bench_baseline_cuda: the baselines on a GPU, each on raw driver calls and in its simplest correct
 * form, without a framework's own cost on top. They take memory of the host at first use.
 *
 *   one large pinned copy     as many bytes between two large buffers: the ceiling
 *   per-tensor pageable       .to("cpu"): fresh memory and a blocking copy for every tensor
 *   per-tensor pinned         a page-locked buffer for every tensor, kept; one wait for all
 *   coalesced                 one page-locked buffer, kept, and still a copy for every tensor;
 *                             the whole device is waited for (NeMo-RL's pull request 2248)
 *   save each                 memory mapped at addresses that stay: page-lock, copy and wait,
 *                             unmap, one tensor after the other, and the reverse
 *                             (torch_memory_saver's way)
 *   save each, retained       the same, the page-locked buffers kept
 */
#include <stdlib.h>

#include "bench.h"
#include "bench_baseline.h"
#include "bench_cuda.h"
#include "cli.h"

typedef struct mover {
    bench_cuda *cuda;
    const bench_list *list;
    void **device;  /* of each tensor */
    void **host;    /* of each tensor; NULL: not taken */
    char *buffer;   /* one for all */
    char *large;    /* device memory of the ceiling */
    uint64_t bytes; /* of buffer and large */
    bool given;     /* the device memory is refit's, and stays */
    bool retained;  /* page-locked memory is kept */
    void (*drop)(struct mover *it);
} mover;

/* Where a way's device memory comes from. */
typedef enum memory_kind {
    NOT_RUN,
    NO_MEMORY, /* it takes what it needs */
    GIVEN,     /* refit's tensors */
    ALLOCATED, /* an allocation each */
    MAPPED,    /* an address that stays, and memory mapped to it, each */
} memory_kind;

typedef struct gpu_way {
    const char *name;
    bench_move out; /* of a mover */
    bench_move back;
    void (*drop)(mover *it);
    memory_kind stays;   /* where refit keeps the device memory */
    memory_kind reclaim; /* where it gives it back */
    bool retained;
    bool pins_each; /* a page-locked allocation for every tensor */
} gpu_way;

enum { WAYS = 6 };

static const uint64_t large_bytes = UINT64_C(4) << 30;

/* The driver refused something. */
static refit_status refused(const mover *it, refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(it->cuda));
}

#define NEED(it, call)                                                                             \
    do {                                                                                           \
        if (!(call)) return refused((it), error);                                                  \
    } while (0)

static uint64_t bytes_of(const mover *it, uint32_t at)
{
    return it->list->all[at].bytes;
}

/* ---- one large pinned copy ---- */

static refit_status large_move(mover *it, bool out, refit_error *error)
{
    for (uint64_t done = 0, part; done < it->list->bytes; done += part) {
        part = it->list->bytes - done < it->bytes ? it->list->bytes - done : it->bytes;
        NEED(it, bench_cuda_copy(it->cuda, out ? it->buffer : it->large,
                                 out ? it->large : it->buffer, part));
    }
    NEED(it, bench_cuda_wait(it->cuda));
    return REFIT_OK;
}

static refit_status large_out(void *self, refit_error *error)
{
    mover *it = self;
    it->bytes = it->list->bytes < large_bytes ? it->list->bytes : large_bytes;
    if (it->buffer == NULL) {
        NEED(it, it->large = bench_cuda_alloc(it->cuda, it->bytes));
        NEED(it, bench_cuda_fill(it->cuda, it->large, 0x5A, it->bytes));
        NEED(it, it->buffer = bench_cuda_pin(it->cuda, it->bytes));
    }
    return large_move(it, true, error);
}

static refit_status large_back(void *self, refit_error *error)
{
    return large_move(self, false, error);
}

/* ---- per-tensor pageable ---- */

static refit_status pageable_out(void *self, refit_error *error)
{
    mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        it->host[i] = malloc(bytes_of(it, i));
        if (it->host[i] == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory");
        NEED(it, bench_cuda_copy(it->cuda, it->host[i], it->device[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        if (it->given) continue;
        NEED(it, bench_cuda_free(it->cuda, it->device[i]));
        it->device[i] = NULL;
    }
    return REFIT_OK;
}

static refit_status pageable_back(void *self, refit_error *error)
{
    mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (!it->given) NEED(it, it->device[i] = bench_cuda_alloc(it->cuda, bytes_of(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->device[i], it->host[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        free(it->host[i]);
        it->host[i] = NULL;
    }
    return REFIT_OK;
}

static void pageable_drop(mover *it)
{
    for (uint32_t i = 0; i < it->list->count; i++) {
        free(it->host[i]);
        if (!it->given && it->device[i] != NULL) bench_cuda_free(it->cuda, it->device[i]);
    }
}

/* ---- per-tensor pinned, and coalesced ---- */

static refit_status pinned_out(void *self, refit_error *error)
{
    mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (it->host[i] == NULL) NEED(it, it->host[i] = bench_cuda_pin(it->cuda, bytes_of(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->host[i], it->device[i], bytes_of(it, i)));
    }
    NEED(it, bench_cuda_wait(it->cuda));
    return REFIT_OK;
}

static refit_status pinned_back(void *self, refit_error *error)
{
    mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++)
        NEED(it, bench_cuda_copy(it->cuda, it->device[i], it->host[i], bytes_of(it, i)));
    NEED(it, bench_cuda_wait(it->cuda));
    return REFIT_OK;
}

static uint64_t places(mover *it)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (it->buffer != NULL) it->host[i] = it->buffer + at;
        at += (bytes_of(it, i) + 511) / 512 * 512;
    }
    return at;
}

static refit_status coalesced_out(void *self, refit_error *error)
{
    mover *it = self;
    if (it->buffer == NULL) {
        NEED(it, it->buffer = bench_cuda_pin(it->cuda, places(it)));
        places(it);
    }
    BENCH_TRY(pinned_out(self, error));
    NEED(it, bench_cuda_wait_device(it->cuda));
    return REFIT_OK;
}

static refit_status coalesced_back(void *self, refit_error *error)
{
    mover *it = self;
    BENCH_TRY(pinned_back(self, error));
    NEED(it, bench_cuda_wait_device(it->cuda));
    return REFIT_OK;
}

static void pinned_drop(mover *it)
{
    for (uint32_t i = 0; it->buffer == NULL && i < it->list->count; i++)
        if (it->host[i] != NULL) bench_cuda_unpin(it->cuda, it->host[i]);
    if (it->buffer != NULL) bench_cuda_unpin(it->cuda, it->buffer);
    if (it->large != NULL) bench_cuda_free(it->cuda, it->large);
}

/* ---- each saved and restored by itself ---- */

/* The bytes of a tensor in mapped memory. */
static uint64_t mapped_bytes(const mover *it, uint32_t at)
{
    uint64_t granule = bench_cuda_granule(it->cuda);
    return (bytes_of(it, at) + granule - 1) / granule * granule;
}

static refit_status save_out(void *self, refit_error *error)
{
    mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (it->host[i] == NULL) NEED(it, it->host[i] = bench_cuda_pin(it->cuda, bytes_of(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->host[i], it->device[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        NEED(it, bench_cuda_unmap(it->cuda, it->device[i], mapped_bytes(it, i)));
    }
    return REFIT_OK;
}

static refit_status save_back(void *self, refit_error *error)
{
    mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        NEED(it, bench_cuda_map(it->cuda, it->device[i], mapped_bytes(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->device[i], it->host[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        if (it->retained) continue;
        NEED(it, bench_cuda_unpin(it->cuda, it->host[i]));
        it->host[i] = NULL;
    }
    return REFIT_OK;
}

static void save_drop(mover *it)
{
    pinned_drop(it);
    for (uint32_t i = 0; i < it->list->count && it->device[i] != NULL; i++) {
        bench_cuda_unmap(it->cuda, it->device[i], mapped_bytes(it, i));
        bench_cuda_unreserve(it->cuda, it->device[i], mapped_bytes(it, i));
    }
}

static const gpu_way known_ways[WAYS] = {
    {"one large pinned copy", large_out, large_back, pinned_drop, NO_MEMORY, NO_MEMORY, false,
     false},
    {"per-tensor pageable", pageable_out, pageable_back, pageable_drop, GIVEN, ALLOCATED, false,
     false},
    {"per-tensor pinned", pinned_out, pinned_back, pinned_drop, GIVEN, NOT_RUN, true, true},
    {"coalesced", coalesced_out, coalesced_back, pinned_drop, GIVEN, NOT_RUN, true, false},
    {"save each", save_out, save_back, save_drop, NOT_RUN, MAPPED, false, true},
    {"save each, retained", save_out, save_back, save_drop, NOT_RUN, MAPPED, true, true},
};

/* ---- Which of them run beside a case of refit, and the device memory that they move ---- */

enum { PINNED_EACH_MOST = 10000 }; /* a call of the driver for every tensor would take minutes */

static bool take_one(mover *it, uint32_t at, memory_kind kind)
{
    uint64_t bytes = it->list->all[at].bytes;
    if (kind == MAPPED) {
        it->device[at] = bench_cuda_reserve(it->cuda, mapped_bytes(it, at));
        if (it->device[at] == NULL) return false;
        if (!bench_cuda_map(it->cuda, it->device[at], mapped_bytes(it, at))) return false;
    } else {
        it->device[at] = bench_cuda_alloc(it->cuda, bytes);
    }
    return it->device[at] != NULL && bench_cuda_fill(it->cuda, it->device[at], 0x5A, bytes);
}

static bool take_memory(mover *it, const bench_case *tested, memory_kind kind)
{
    it->given = kind == GIVEN;
    for (uint32_t i = 0; i < it->list->count && kind != NO_MEMORY; i++) {
        if (it->given) it->device[i] = tested->memory[i];
        if (!it->given && !take_one(it, i, kind)) return false;
    }
    return bench_cuda_wait(it->cuda);
}

static void close_mover(void *self)
{
    mover *it = self;
    if (it->host != NULL && it->device != NULL) it->drop(it);
    free(it->host);
    free(it->device);
    free(it);
}

static refit_status add_baseline(bench_baselines *baselines, const bench_case *tested,
                                 const gpu_way *way, memory_kind kind, refit_error *error)
{
    mover *it = calloc(1, sizeof *it);
    if (it == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a baseline");
    it->cuda = baselines->cuda;
    it->list = tested->list;
    it->retained = way->retained;
    it->drop = way->drop;
    it->host = calloc(tested->list->count, sizeof *it->host);
    it->device = calloc(tested->list->count, sizeof *it->device);
    bench_baseline *baseline = &baselines->all[baselines->count++];
    *baseline = (bench_baseline){
        .name = way->name, .self = it, .out = way->out, .back = way->back, .close = close_mover};
    if (it->host == NULL || it->device == NULL)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a baseline");
    if (take_memory(it, tested, kind)) return REFIT_OK;
    cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(baselines->cuda));
    bench_baseline_fails(baselines, baseline, error);
    return REFIT_OK;
}

refit_status bench_baselines_on_cuda(bench_baselines *baselines, const bench_case *tested,
                                     refit_error *error)
{
    baselines->ceiling = "cuMemcpyAsync";
    for (uint32_t i = 0; i < WAYS; i++) {
        const gpu_way *way = &known_ways[i];
        memory_kind kind = tested->arena != NULL ? way->reclaim : way->stays;
        if (kind == NOT_RUN) continue;
        if (way->pins_each && tested->list->count > PINNED_EACH_MOST) continue;
        BENCH_TRY(add_baseline(baselines, tested, way, kind, error));
    }
    return REFIT_OK;
}
