/*
 * bench pin: the first use of the host memory, beside a baseline for the same bytes: on the host
 * one thread that touches ordinary pages and locks them, on a GPU one call of cuMemHostAlloc, as
 * frameworks do.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "bench_cuda.h"
#include "cli.h"

/* COPIES: the arena, or its baseline; nothing touches the states. */
enum { ROUNDS = 5, WAIT_MS = 600000, COPIES = 1 };
static const uint64_t host_bytes = UINT64_C(2000000000);
static const uint64_t cuda_bytes = UINT64_C(4) << 30;

typedef struct pin_bench {
    const bench_options *options;
    uint64_t bytes;
    refit_device *device;
    void *states;     /* on the device */
    bench_cuda *cuda; /* NULL: on the host */
    bench_series ours;
    bench_series baseline;
    refit_stats stats; /* of the last round */
    bool locked;       /* the host's baseline could lock its pages */
} pin_bench;

/* One thread, one byte per page, one mlock; the limit may not allow it. */
static refit_status touch_and_lock(pin_bench *it, uint32_t round, refit_error *error)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    double start = bench_now();
    char *memory =
        mmap(NULL, it->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a baseline");
    (void)madvise(memory, it->bytes, MADV_NOHUGEPAGE);
    for (size_t at = 0; at < it->bytes; at += page)
        ((volatile char *)memory)[at] = 0;
    it->locked = mlock(memory, it->bytes) == 0;
    bench_add(&it->baseline, round, bench_now() - start);
    munmap(memory, it->bytes);
    return REFIT_OK;
}

static refit_status host_alloc(pin_bench *it, uint32_t round, refit_error *error)
{
    double start = bench_now();
    void *memory = bench_cuda_pin(it->cuda, it->bytes);
    bench_add(&it->baseline, round, bench_now() - start);
    if (memory != NULL && bench_cuda_unpin(it->cuda, memory)) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_PIN, 0, "%s", bench_cuda_why(it->cuda));
}

static refit_status time_seal(pin_bench *it, refit_offloader *offloader, uint32_t round,
                              refit_error *error)
{
    refit_region_id id;
    const refit_region_desc region = {
        .size = sizeof region, .name = "states", .memory = it->states, .bytes = it->bytes};
    BENCH_TRY(refit_offloader_add(offloader, &region, &id, error));
    double start = bench_now();
    BENCH_TRY(refit_offloader_seal(offloader, error));
    BENCH_TRY(refit_offloader_prepare(offloader, WAIT_MS, error));
    bench_add(&it->ours, round, bench_now() - start);
    refit_stats_init(&it->stats, sizeof it->stats);
    return refit_offloader_stats(offloader, &it->stats, error);
}

/* From an offloader's point of view: nothing there, then an arena ready for DMA. */
static refit_status first_use(pin_bench *it, uint32_t round, refit_error *error)
{
    refit_offloader *offloader;
    refit_error closing;
    BENCH_TRY(refit_offloader_open(it->device, &it->options->config, &offloader, error));
    refit_status status = time_seal(it, offloader, round, error);
    refit_status closed = refit_offloader_close(offloader, status == REFIT_OK ? error : &closing);
    return status != REFIT_OK ? status : closed;
}

static refit_status run_rounds(pin_bench *it, refit_error *error)
{
    uint32_t rounds = it->options->rounds > 0 ? it->options->rounds : ROUNDS;
    for (uint32_t i = 0; i <= rounds; i++) {
        BENCH_TRY(it->cuda != NULL ? host_alloc(it, i, error) : touch_and_lock(it, i, error));
        BENCH_TRY(first_use(it, i, error));
    }
    return REFIT_OK;
}

static void report(const pin_bench *it)
{
    json_t *object = json_pack(
        "{s:s, s:I, s:f, s:f, s:f, s:I, s:b}", "bench", "pin", "bytes", (json_int_t)it->bytes,
        "seconds_median", bench_median(&it->ours), "seconds_p95", bench_p95(&it->ours), "gbps",
        bench_gbps(it->bytes, &it->ours), "pinned_bytes", (json_int_t)it->stats.host_pinned_bytes,
        "huge_pages", it->stats.host_huge_pages != 0);
    json_t *baseline =
        it->cuda != NULL
            ? json_pack("{s:f, s:f, s:f}", "host_alloc_seconds_median", bench_median(&it->baseline),
                        "host_alloc_gbps", bench_gbps(it->bytes, &it->baseline),
                        "speedup_over_host_alloc", bench_ratio(&it->baseline, &it->ours))
            : json_pack("{s:f, s:f, s:f, s:b}", "one_thread_seconds_median",
                        bench_median(&it->baseline), "one_thread_gbps",
                        bench_gbps(it->bytes, &it->baseline), "speedup_over_one_thread",
                        bench_ratio(&it->baseline, &it->ours), "one_thread_locked", it->locked);
    bench_extend(object, baseline);
    bench_device(object, it->options, it->device);
    bench_machine(object);
    bench_print(it->options, object);
}

static refit_status open_bench(pin_bench *it, refit_error *error)
{
    char why[160];
    int ordinal = bench_cuda_ordinal(it->options->device);
    BENCH_TRY(refit_device_open(it->options->device, &it->options->config, &it->device, error));
    BENCH_TRY(refit_memory_alloc(it->device, it->bytes, &it->states, error));
    if (ordinal < 0) return REFIT_OK;
    it->cuda = bench_cuda_open(ordinal, why, sizeof why);
    return it->cuda != NULL ? REFIT_OK : cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", why);
}

static refit_status close_bench(pin_bench *it, refit_error *error)
{
    bench_cuda_close(it->cuda);
    if (it->states != NULL) BENCH_TRY(refit_memory_free(it->device, it->states, error));
    return refit_device_close(it->device, error);
}

int bench_pin(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    refit_error closing;
    pin_bench it = {.options = options};
    bool on_gpu = bench_cuda_ordinal(options->device) >= 0;
    it.bytes = bench_memory_for(options->bytes ? options->bytes
                                : on_gpu       ? cuda_bytes
                                               : host_bytes,
                                COPIES);
    refit_status status = open_bench(&it, &error);
    if (status == REFIT_OK) status = run_rounds(&it, &error);
    if (status == REFIT_OK) report(&it);
    refit_status closed = close_bench(&it, status == REFIT_OK ? &error : &closing);
    return status == REFIT_OK && closed == REFIT_OK ? 0 : cli_complain_error(&error);
}
