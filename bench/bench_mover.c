/*
 * bench_mover: on a GPU, the ceiling and five ways that trainers use today, each on raw driver
 * calls and in its simplest correct form, without a framework's own cost on top. What they need of
 * the host they take the first time they need it.
 */
#include "bench_mover.h"

#include <stdlib.h>

#include "cli.h"

static const uint64_t large_bytes = UINT64_C(4) << 30;

/* The driver refused something. */
static refit_status refused(const bench_mover *it, refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(it->cuda));
}

#define NEED(it, call)                                                                             \
    do {                                                                                           \
        if (!(call)) return refused((it), error);                                                  \
    } while (0)

static uint64_t bytes_of(const bench_mover *it, uint32_t at)
{
    return it->list->all[at].bytes;
}

/* ---- one large pinned copy ---- */

static refit_status large_move(bench_mover *it, bool out, refit_error *error)
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
    bench_mover *it = self;
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
    bench_mover *it = self;
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
    bench_mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (!it->given) NEED(it, it->device[i] = bench_cuda_alloc(it->cuda, bytes_of(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->device[i], it->host[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        free(it->host[i]);
        it->host[i] = NULL;
    }
    return REFIT_OK;
}

static void pageable_drop(bench_mover *it)
{
    for (uint32_t i = 0; i < it->list->count; i++) {
        free(it->host[i]);
        if (!it->given && it->device[i] != NULL) bench_cuda_free(it->cuda, it->device[i]);
    }
}

/* ---- per-tensor pinned, and coalesced ---- */

static refit_status pinned_out(void *self, refit_error *error)
{
    bench_mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (it->host[i] == NULL) NEED(it, it->host[i] = bench_cuda_pin(it->cuda, bytes_of(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->host[i], it->device[i], bytes_of(it, i)));
    }
    NEED(it, bench_cuda_wait(it->cuda));
    return REFIT_OK;
}

static refit_status pinned_back(void *self, refit_error *error)
{
    bench_mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++)
        NEED(it, bench_cuda_copy(it->cuda, it->device[i], it->host[i], bytes_of(it, i)));
    NEED(it, bench_cuda_wait(it->cuda));
    return REFIT_OK;
}

static uint64_t places(bench_mover *it)
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
    bench_mover *it = self;
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
    bench_mover *it = self;
    BENCH_TRY(pinned_back(self, error));
    NEED(it, bench_cuda_wait_device(it->cuda));
    return REFIT_OK;
}

static void pinned_drop(bench_mover *it)
{
    for (uint32_t i = 0; it->buffer == NULL && i < it->list->count; i++)
        if (it->host[i] != NULL) bench_cuda_unpin(it->cuda, it->host[i]);
    if (it->buffer != NULL) bench_cuda_unpin(it->cuda, it->buffer);
    if (it->large != NULL) bench_cuda_free(it->cuda, it->large);
}

/* ---- each saved and restored by itself ---- */

uint64_t bench_mapped_bytes(const bench_mover *it, uint32_t at)
{
    uint64_t granule = bench_cuda_granule(it->cuda);
    return (bytes_of(it, at) + granule - 1) / granule * granule;
}

static refit_status save_out(void *self, refit_error *error)
{
    bench_mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        if (it->host[i] == NULL) NEED(it, it->host[i] = bench_cuda_pin(it->cuda, bytes_of(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->host[i], it->device[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        NEED(it, bench_cuda_unmap(it->cuda, it->device[i], bench_mapped_bytes(it, i)));
    }
    return REFIT_OK;
}

static refit_status save_back(void *self, refit_error *error)
{
    bench_mover *it = self;
    for (uint32_t i = 0; i < it->list->count; i++) {
        NEED(it, bench_cuda_map(it->cuda, it->device[i], bench_mapped_bytes(it, i)));
        NEED(it, bench_cuda_copy(it->cuda, it->device[i], it->host[i], bytes_of(it, i)));
        NEED(it, bench_cuda_wait(it->cuda));
        if (it->retained) continue;
        NEED(it, bench_cuda_unpin(it->cuda, it->host[i]));
        it->host[i] = NULL;
    }
    return REFIT_OK;
}

static void save_drop(bench_mover *it)
{
    pinned_drop(it);
    for (uint32_t i = 0; i < it->list->count && it->device[i] != NULL; i++) {
        bench_cuda_unmap(it->cuda, it->device[i], bench_mapped_bytes(it, i));
        bench_cuda_unreserve(it->cuda, it->device[i], bench_mapped_bytes(it, i));
    }
}

const bench_way bench_ways[BENCH_WAYS] = {
    {"one large pinned copy", large_out, large_back, pinned_drop, BENCH_NO_MEMORY, BENCH_NO_MEMORY,
     false, false},
    {"per-tensor pageable", pageable_out, pageable_back, pageable_drop, BENCH_GIVEN,
     BENCH_ALLOCATED, false, false},
    {"per-tensor pinned", pinned_out, pinned_back, pinned_drop, BENCH_GIVEN, BENCH_NOT_RUN, true,
     true},
    {"coalesced", coalesced_out, coalesced_back, pinned_drop, BENCH_GIVEN, BENCH_NOT_RUN, true,
     false},
    {"save each", save_out, save_back, save_drop, BENCH_NOT_RUN, BENCH_MAPPED, false, true},
    {"save each, retained", save_out, save_back, save_drop, BENCH_NOT_RUN, BENCH_MAPPED, true,
     true},
};
