/* The host device alone: threads begin late, pages go back, nothing leaks. */
#include <dirent.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/thread.h"
#include "device/device.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"

static refit_device *device; /* with two copy threads */

static void open_host(uint32_t timeout_ms)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.offload_copy_threads = 3;
    config.offload_timeout_ms = timeout_ms;
    assert_ok(refit_device_open("host", &config, &device, NULL));
}

static int begin(void **state)
{
    open_host(TIMEOUT_MS);
    return 0;
}

static int end(void **state)
{
    return refit_device_close(device, NULL) == REFIT_OK ? 0 : -1;
}

#define HOST_TEST(name) TEST_WITH(name, begin, end)

static bool is_of_refit(const char *task)
{
    char path[300], name[16] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task);
    FILE *file = fopen(path, "r");
    if (file == NULL) return false;
    size_t length = fread(name, 1, sizeof name - 1, file);
    fclose(file);
    return length > 6 && memcmp(name, "refit-", 6) == 0;
}

/* By name: sanitizers have threads of their own. */
static unsigned count_threads(void)
{
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *it = readdir(tasks); it != NULL; it = readdir(tasks))
        count += is_of_refit(it->d_name);
    closedir(tasks);
    return count;
}

HOST_TEST(no_thread_starts_before_it_is_needed)
{
    static char there[4 << 20], back[4 << 20];
    void *memory;
    refit_stream_ref stream;
    assert_ok(refit_memory_alloc(device, 8 * MIB, &memory, NULL));
    assert_ok(refit_stream_copy(device, REFIT_STREAM_NONE, memory, there, 100, NULL));
    assert_int_equal(count_threads(), 0);
    assert_ok(refit_stream_open(device, &stream, NULL));
    assert_int_equal(count_threads(), 1);
    assert_ok(refit_stream_copy(device, REFIT_STREAM_NONE, back, there, sizeof back, NULL));
    assert_int_equal(count_threads(), 3);
    assert_ok(refit_stream_close(device, stream, NULL));
    assert_ok(refit_memory_free(device, memory, NULL));
}

HOST_TEST(large_memory_is_the_host_s_and_goes_back_to_the_system)
{
    unsigned char resident[1];
    refit_device_info info = {.size = sizeof info};
    void *memory;
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_int_equal(info.host_addressable, 1);
    assert_ok(refit_memory_alloc(device, 32 * MIB, &memory, NULL));
    memset(memory, 1, 32 * MIB);
    assert_int_equal(mincore(memory, 1, resident), 0);
    assert_ok(refit_memory_free(device, memory, NULL));
    assert_int_equal(mincore(memory, 1, resident), -1);
}

HOST_TEST(decommitted_pages_are_gone)
{
    unsigned char resident[1];
    uint64_t page;
    void *base;
    assert_ok(rft_device_reserve(device, MIB, &base, &page, NULL));
    assert_ok(rft_device_commit(device, base, MIB, NULL));
    memset(base, 1, MIB);
    assert_ok(rft_device_decommit(device, base, MIB, NULL, NULL));
    assert_int_equal(mincore(base, 1, resident), 0);
    assert_int_equal(resident[0] & 1, 0);
    assert_ok(rft_device_commit(device, base, MIB, NULL));
    assert_int_equal(*(char *)base, 0);
    rft_device_unreserve(device, base, MIB);
}

HOST_TEST(pinning_works_or_says_why_not)
{
    refit_error error = {0};
    void *page = aligned_alloc(4096, 4096);
    refit_status status = rft_device_host_pin(device, page, 4096, false, &error);
    assert_true(status == REFIT_OK || status == REFIT_ERR_PIN);
    if (status == REFIT_OK) rft_device_host_unpin(device, page, 4096);
    assert_invalid(rft_device_host_pin(device, NULL, 4096, false, NULL));
    free(page);
}

HOST_TEST(memory_that_is_not_there_cannot_be_pinned)
{
    /* The second page of the address space is never there. Sanitizers swallow mlock. */
    void *nowhere = (void *)4096;
    if (mlock(nowhere, 4096) == 0) skip();
    refit_error error = {0};
    assert_int_equal(rft_device_host_pin(device, nowhere, 4096, false, &error), REFIT_ERR_PIN);
    assert_int_not_equal(error.subsystem, 0);
    assert_non_null(strstr(error.text, "RLIMIT_MEMLOCK"));
    assert_non_null(strstr(error.text, "offload.pin"));
}

static void wait_for_go(void *user)
{
    (void)sem_wait(user);
}

HOST_TEST(blocking_calls_end_at_their_deadline)
{
    refit_stream_ref stream;
    rft_event *event;
    sem_t go;
    assert_ok(refit_device_close(device, NULL));
    open_host(50);
    assert_int_equal(sem_init(&go, 0, 0), 0);
    assert_ok(refit_stream_open(device, &stream, NULL));
    assert_ok(rft_device_event_open(device, &event, NULL));
    assert_ok(refit_stream_call(device, stream, wait_for_go, &go, NULL));
    assert_ok(rft_device_event_record(device, event, stream, NULL));
    assert_int_equal(rft_device_event_join(device, event, REFIT_STREAM_NONE, NULL),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_stream_close(device, stream, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_device_close(device, NULL), REFIT_ERR_BUSY);
    assert_int_equal(sem_post(&go), 0);
    device->wait_most_ms = TIMEOUT_MS;
    assert_ok(rft_device_event_wait(device, event, TIMEOUT_MS, NULL));
    rft_device_event_close(device, event);
    assert_ok(refit_stream_close(device, stream, NULL));
    (void)sem_destroy(&go);
}

/* Several threads, each with a stream of its own, share the device's copy threads. */
typedef struct worker {
    unsigned char mark;
    bool right;
} worker;

static refit_status copy_rounds(worker *it, refit_stream_ref stream, char *there, char *back,
                                uint64_t bytes)
{
    void *memory;
    RFT_TRY(refit_memory_alloc(device, bytes, &memory, NULL));
    for (unsigned round = 0; round < 10; round++) {
        memset(there, it->mark + (int)round, bytes);
        RFT_TRY(refit_stream_copy(device, stream, memory, there, bytes, NULL));
        RFT_TRY(refit_stream_copy(device, stream, back, memory, bytes, NULL));
        RFT_TRY(refit_stream_wait(device, stream, TIMEOUT_MS, NULL));
        if (memcmp(there, back, bytes) != 0) return REFIT_ERR_CORRUPT;
    }
    return refit_memory_free(device, memory, NULL);
}

static void *work(void *user)
{
    worker *it = user;
    const uint64_t bytes = 2 * MIB + 77;
    refit_stream_ref stream;
    char *there = malloc(bytes), *back = malloc(bytes);
    if (refit_stream_open(device, &stream, NULL) == REFIT_OK) {
        it->right = copy_rounds(it, stream, there, back, bytes) == REFIT_OK;
        it->right &= refit_stream_close(device, stream, NULL) == REFIT_OK;
    }
    free(back);
    free(there);
    return NULL;
}

HOST_TEST(streams_of_many_threads_share_the_pool)
{
    enum { WORKERS = 4 };
    worker workers[WORKERS];
    rft_thread threads[WORKERS];
    for (unsigned i = 0; i < WORKERS; i++) {
        workers[i] = (worker){(unsigned char)(i * 50), false};
        assert_ok(rft_thread_start(&threads[i], "worker", work, &workers[i], NULL));
    }
    for (unsigned i = 0; i < WORKERS; i++)
        rft_thread_join(threads[i]);
    for (unsigned i = 0; i < WORKERS; i++)
        assert_true(workers[i].right);
}

/* All that takes bookkeeping memory, as far as it gets; closes what it opened. */
static refit_status use_arena(void)
{
    void *base;
    uint64_t page;
    RFT_TRY(rft_device_reserve(device, MIB, &base, &page, NULL));
    refit_status status = rft_device_commit(device, base, MIB, NULL);
    if (status == REFIT_OK) status = rft_device_decommit(device, base, page, NULL, NULL);
    rft_device_unreserve(device, base, MIB);
    return status;
}

static refit_status use_memory(void)
{
    enum { COUNT = 100 };
    void *memory[COUNT];
    unsigned taken = 0;
    refit_status status = REFIT_OK;
    while (taken < COUNT && status == REFIT_OK) {
        status = refit_memory_alloc(device, taken == 0 ? 2 * MIB : 600, &memory[taken], NULL);
        taken += status == REFIT_OK;
    }
    while (taken > 0)
        assert_ok(refit_memory_free(device, memory[--taken], NULL));
    return status;
}

static refit_status use_stream(void)
{
    char from = 1, to = 0;
    refit_stream_ref stream;
    RFT_TRY(refit_stream_open(device, &stream, NULL));
    refit_status status = refit_stream_copy(device, stream, &to, &from, 1, NULL);
    if (status == REFIT_OK) status = refit_stream_wait(device, stream, TIMEOUT_MS, NULL);
    assert_ok(refit_stream_close(device, stream, NULL));
    return status;
}

static refit_status use_device(void)
{
    RFT_TRY(refit_device_open("host:capacity=8MiB", NULL, &device, NULL));
    refit_device_info info = {.size = sizeof info};
    refit_status status = use_memory();
    if (status == REFIT_OK) status = use_arena();
    if (status == REFIT_OK) status = use_stream();
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_int_equal(info.used_bytes, 0);
    assert_ok(refit_device_close(device, NULL));
    return status;
}

TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    uint64_t nth = 1;
    for (;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = use_device();
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_in_range(nth, 8, 100);
}

int main(void)
{
    return test_run("host_device");
}
