/*
 * bench pin: the first use of the host arena against what one thread needs to touch and lock the
 * same bytes in ordinary pages (what one plain allocation of page-locked memory does).
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "cli.h"

enum { ROUNDS = 5 };
static const uint64_t default_bytes = UINT64_C(2000000000);

/* One thread, one byte per page, one mlock; `*locked` tells whether the limit allowed it. */
static double touch_and_lock(uint64_t bytes, bool *locked)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    double start = bench_now();
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0.0;
    (void)madvise(memory, bytes, MADV_NOHUGEPAGE);
    for (size_t at = 0; at < bytes; at += page)
        ((volatile char *)memory)[at] = 0;
    *locked = mlock(memory, bytes) == 0;
    double seconds = bench_now() - start;
    munmap(memory, bytes);
    return seconds;
}

/* From a sealed offloader's point of view: nothing there, then an arena ready for DMA. */
static refit_status first_use(const bench_options *options, uint64_t bytes, bench_series *series,
                              refit_stats *stats, refit_error *error)
{
    refit_device *device;
    refit_offloader *offloader;
    refit_region_id id;
    refit_region_desc region = {.size = sizeof region, .name = "states", .bytes = bytes};
    refit_status status = refit_device_open("host", &options->config, &device, error);
    if (status != REFIT_OK) return status;
    status = refit_memory_alloc(device, bytes, &region.memory, error);
    if (status == REFIT_OK)
        status = refit_offloader_open(device, &options->config, &offloader, error);
    if (status == REFIT_OK) status = refit_offloader_add(offloader, &region, &id, error);
    double start = bench_now();
    if (status == REFIT_OK) status = refit_offloader_seal(offloader, error);
    bench_add(series, bench_now() - start);
    refit_stats_init(stats, sizeof *stats);
    if (status == REFIT_OK) status = refit_offloader_stats(offloader, stats, error);
    if (status == REFIT_OK) status = refit_offloader_close(offloader, error);
    if (status == REFIT_OK) status = refit_memory_free(device, region.memory, error);
    return status == REFIT_OK ? refit_device_close(device, error) : status;
}

static json_t *describe(uint64_t bytes, const bench_series *ours, const bench_series *plain,
                        bool locked, const refit_stats *stats)
{
    json_t *object = json_pack(
        "{s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:b, s:I, s:b}", "bench", "pin", "bytes",
        (json_int_t)bytes, "seconds_median", bench_median(ours), "seconds_p95", bench_p95(ours),
        "gbps", bench_gbps(bytes, ours), "one_thread_seconds_median", bench_median(plain),
        "one_thread_gbps", bench_gbps(bytes, plain), "speedup_over_one_thread",
        bench_ratio(plain, ours), "one_thread_locked", locked, "pinned_bytes",
        (json_int_t)stats->host_pinned_bytes, "huge_pages", stats->host_huge_pages != 0);
    bench_machine(object);
    return object;
}

int bench_pin(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    refit_stats stats;
    bench_series ours = {0};
    bench_series plain = {0};
    bool locked = false;
    uint64_t bytes = bench_memory(options->bytes ? options->bytes : default_bytes);
    uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    for (uint32_t i = 0; i <= rounds; i++) {
        if (i == 1) ours.count = plain.count = 0; /* a virtual machine fetches its memory once */
        bench_add(&plain, touch_and_lock(bytes, &locked));
        if (first_use(options, bytes, &ours, &stats, &error) != REFIT_OK)
            return cli_complain_error(&error);
    }
    bench_print(options, describe(bytes, &ours, &plain, locked, &stats));
    return 0;
}
