/* Host arena: exact size, page-locked or said not to be, and nothing held after a failure. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/host_arena.h"
#include "memory/procfile.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

#define ITEMS 6

typedef struct fixture {
    refit_device *device;
    refit_config config;
    rft_layout layout; /* three slabs */
    rft_host_arena *arena;
} fixture;

static fixture all;

static rft_layout lay_out(uint64_t item_bytes, uint64_t slab_bytes)
{
    rft_layout_item items[ITEMS];
    rft_layout layout;
    for (uint32_t i = 0; i < ITEMS; i++)
        items[i] = (rft_layout_item){item_bytes, i, 0, 0, 0};
    assert_ok(rft_layout_open(&layout, items, ITEMS, 512, slab_bytes, NULL));
    return layout;
}

static int set_up(void **state)
{
    memset(&all, 0, sizeof all);
    assert_ok(faulty_device_open("host", &all.device, NULL));
    refit_config_init(&all.config, sizeof all.config);
    all.config.offload_budget_bytes = 8 * MIB;
    all.layout = lay_out(100 * KIB + 4, 256 * KIB);
    assert_int_equal(all.layout.slab_count, 3);
    return 0;
}

static int tear_down(void **state)
{
    rft_host_arena_close(all.arena);
    rft_layout_close(&all.layout);
    return refit_device_close(all.device, NULL) == REFIT_OK ? 0 : -1;
}

#define IMAGE_TEST(name) TEST_WITH(name, set_up, tear_down)

static refit_status open_arena(refit_error *error)
{
    rft_host_arena *arena;
    assert_ok(rft_host_arena_open(all.device, &all.layout, &all.config, &arena, error));
    assert_int_equal(rft_host_arena_wait(arena, 0, error), REFIT_ERR_TIMEOUT);
    refit_status status = rft_host_arena_take(arena, error);
    assert_int_equal(rft_host_arena_wait(arena, 0, NULL), status);
    assert_int_equal(rft_host_arena_has_failed(arena), status != REFIT_OK);
    if (status == REFIT_OK) {
        all.arena = arena;
    } else {
        assert_int_equal(rft_host_arena_describe(arena).bytes, 0);
        rft_host_arena_close(arena);
    }
    return status;
}

IMAGE_TEST(image_is_taken_to_the_page)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    assert_ok(open_arena(NULL));
    rft_host_arena_info info = rft_host_arena_describe(all.arena);
    assert_true(info.bytes >= all.layout.image_bytes);
    assert_true(info.bytes - all.layout.image_bytes < page);
    assert_int_equal(info.bytes, info.pinned_bytes + info.pageable_bytes);
    assert_int_equal(info.bytes, info.taken_bytes);
    assert_int_equal(info.bytes, info.ready_bytes);
    assert_true(info.seconds > 0);
    memset(rft_host_arena_base(all.arena), 0x5a, info.bytes);
}

IMAGE_TEST(required_lock_that_fails_is_an_error_and_rolls_back)
{
    all.config.offload_pin = REFIT_PIN_REQUIRE;
    for (uint32_t nth = 1; nth <= 3; nth++) {
        refit_error error;
        faulty_device_fail(all.device, FAULTY_HOST_PIN, nth, REFIT_ERR_PIN);
        assert_int_equal(open_arena(&error), REFIT_ERR_PIN);
        assert_null(all.arena);
        assert_int_equal(error.status, REFIT_ERR_PIN);
        char slab[32];
        snprintf(slab, sizeof slab, "slab %u of 3", nth);
        assert_non_null(strstr(error.text, slab));
        faulty_device_reset(all.device);
    }
    refit_status status = open_arena(NULL); /* as the process's own limit allows */
    if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_PIN);
    if (status == REFIT_OK) assert_int_equal(rft_host_arena_describe(all.arena).pageable_bytes, 0);
}

IMAGE_TEST(preferred_lock_that_fails_leaves_all_pageable_and_says_so)
{
    all.config.offload_pin = REFIT_PIN_PREFER;
    faulty_device_fail(all.device, FAULTY_HOST_PIN, 2, REFIT_ERR_PIN);
    assert_ok(open_arena(NULL));
    rft_host_arena_info info = rft_host_arena_describe(all.arena);
    assert_int_equal(info.pinned_bytes, 0);
    assert_int_equal(info.pageable_bytes, info.bytes);
}

IMAGE_TEST(automatic_lock_is_preferred_where_the_device_does_without)
{
    all.config.offload_pin = REFIT_PIN_AUTO;
    faulty_device_fail(all.device, FAULTY_HOST_PIN, 1, REFIT_ERR_PIN);
    assert_ok(open_arena(NULL));
    assert_int_equal(rft_host_arena_describe(all.arena).pinned_bytes, 0);
}

IMAGE_TEST(lock_that_is_off_is_not_tried)
{
    all.config.offload_pin = REFIT_PIN_OFF;
    assert_ok(open_arena(NULL));
    assert_int_equal(faulty_device_calls(all.device, FAULTY_HOST_PIN), 0);
}

static uint64_t locked_kib(void)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t kib;
    assert_true(rft_procfile_read("/proc/self/status", text, sizeof text));
    assert_true(rft_procfile_find(text, "VmLck", &kib));
    return kib;
}

/* The sanitizers swallow mlock. */
static bool is_mlock_real(void)
{
    static char page[4096];
    uint64_t before = locked_kib();
    if (mlock(page, sizeof page) != 0) return false;
    bool counted = locked_kib() > before;
    munlock(page, sizeof page);
    return counted;
}

/* Counted by the kernel: every slab is locked, and none stays so. */
IMAGE_TEST(locks_are_given_back)
{
    if (!is_mlock_real()) skip();
    uint64_t before = locked_kib();
    assert_ok(open_arena(NULL));
    rft_host_arena_info info = rft_host_arena_describe(all.arena);
    assert_int_equal(locked_kib() - before, info.pinned_bytes / KIB);
    rft_host_arena_close(all.arena);
    all.arena = NULL;
    assert_int_equal(locked_kib(), before);
    all.config.offload_pin = REFIT_PIN_PREFER;
    faulty_device_fail(all.device, FAULTY_HOST_PIN, 3, REFIT_ERR_PIN);
    assert_ok(open_arena(NULL));
    assert_int_equal(locked_kib(), before);
}

IMAGE_TEST(image_beyond_the_budget_is_refused_with_the_numbers)
{
    refit_error error;
    all.config.offload_budget_bytes = 500 * KIB;
    assert_int_equal(open_arena(&error), REFIT_ERR_BUDGET);
    assert_null(all.arena);
    assert_non_null(strstr(error.text, "512000"));
    assert_non_null(strstr(error.text, "offload.budget_bytes"));
}

IMAGE_TEST(image_beyond_all_addresses_is_refused)
{
    const rft_layout monster = {UINT64_MAX, UINT64_MAX, NULL, 0};
    assert_int_equal(rft_host_arena_open(all.device, &monster, &all.config, &all.arena, NULL),
                     REFIT_ERR_LIMIT);
    assert_null(all.arena);
}

IMAGE_TEST(image_of_no_bytes_takes_nothing)
{
    const rft_layout nothing = {0, 0, NULL, 0};
    assert_ok(rft_host_arena_open(all.device, &nothing, &all.config, &all.arena, NULL));
    assert_ok(rft_host_arena_take(all.arena, NULL));
    assert_null(rft_host_arena_base(all.arena));
    assert_int_equal(rft_host_arena_describe(all.arena).bytes, 0);
    assert_true(rft_host_arena_fits(all.arena, &nothing));
    assert_false(rft_host_arena_fits(all.arena, &all.layout));
}

IMAGE_TEST(arena_fits_what_lies_inside_its_slabs)
{
    assert_ok(open_arena(NULL));
    assert_true(rft_host_arena_fits(all.arena, &all.layout));
    rft_layout other = lay_out(80 * KIB, 256 * KIB);
    bool smaller_fits = rft_host_arena_fits(all.arena, &other);
    rft_layout_close(&other);
    other = lay_out(80 * KIB, 512 * KIB); /* a slab would lie in two registrations */
    bool longer_slab_fits = rft_host_arena_fits(all.arena, &other);
    rft_layout_close(&other);
    other = lay_out(120 * KIB, 256 * KIB);
    bool larger_fits = rft_host_arena_fits(all.arena, &other);
    rft_layout_close(&other);
    assert_true(smaller_fits);
    assert_false(longer_slab_fits);
    assert_false(larger_fits);
}

IMAGE_TEST(device_cannot_be_closed_under_it)
{
    assert_ok(open_arena(NULL));
    assert_int_equal(refit_device_close(all.device, NULL), REFIT_ERR_BUSY);
}

/* Read through the kernel: what is not mapped is an error there, not a signal. */
static bool reads_mark(const char *at, char mark)
{
    char byte = 0;
    int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    bool read_it = memory >= 0 && pread(memory, &byte, 1, (off_t)(uintptr_t)at) == 1;
    close(memory);
    return read_it && byte == mark;
}

/* ---- Children. Each speaks by its exit status: 0 says that all is as it should be. */

/* Reads, and writes: 'm' becomes 'n' in this process alone. */
static int use_mark(char *at)
{
    if (!reads_mark(at, 'm')) return 1;
    *at = 'n';
    return reads_mark(at, 'n') ? 0 : 2;
}

IMAGE_TEST(forked_child_reads_it_and_writes_a_copy_of_its_own)
{
    assert_ok(open_arena(NULL));
    char *end = rft_host_arena_base(all.arena) + rft_host_arena_describe(all.arena).bytes - 1;
    rft_host_arena_base(all.arena)[0] = *end = 'm';
    pid_t child = fork();
    if (child == 0) _exit(use_mark(rft_host_arena_base(all.arena)) + use_mark(end));
    assert_child_succeeds(child);
    assert_int_equal(rft_host_arena_base(all.arena)[0], 'm');
    assert_int_equal(*end, 'm');
}

/* What the child has is what there is when it looks. */
IMAGE_TEST(forked_child_sees_what_is_written_later)
{
    int to_child[2];
    char byte = 0;
    assert_ok(open_arena(NULL));
    assert_int_equal(pipe(to_child), 0);
    pid_t child = fork();
    if (child == 0) {
        bool told = read(to_child[0], &byte, 1) == 1;
        _exit(told && reads_mark(rft_host_arena_base(all.arena), 'm') ? 0 : 1);
    }
    rft_host_arena_base(all.arena)[0] = 'm';
    assert_int_equal(write(to_child[1], &byte, 1), 1);
    assert_child_succeeds(child);
    close(to_child[0]);
    close(to_child[1]);
}

/* The physical page stays: a device that page-locked it goes on with it. Written by a bare system
 * call: what a sanitizer notes of other writes is memory that a fork does copy. */
IMAGE_TEST(writes_after_a_fork_copy_no_page)
{
    struct rusage before, after;
    int held[2];
    char byte;
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    assert_ok(open_arena(NULL));
    char *base = rft_host_arena_base(all.arena);
    uint64_t bytes = rft_host_arena_describe(all.arena).bytes;
    assert_int_equal(pipe(held), 0);
    pid_t child = fork();
    if (child == 0) {
        close(held[1]);
        _exit(read(held[0], &byte, 1) == 0 ? 0 : 1);
    }
    assert_int_equal(getrusage(RUSAGE_SELF, &before), 0);
    assert_int_equal(syscall(SYS_read, zeros, base, bytes), bytes);
    assert_int_equal(getrusage(RUSAGE_SELF, &after), 0);
    close(zeros);
    close(held[0]);
    close(held[1]);
    assert_child_succeeds(child);
    /* The stack may be copied. */
    assert_true(after.ru_minflt - before.ru_minflt < (long)(bytes / 4096 / 2));
}

IMAGE_TEST(child_of_a_child_reads_it)
{
    assert_ok(open_arena(NULL));
    rft_host_arena_base(all.arena)[0] = 'm';
    pid_t child = fork();
    if (child == 0) {
        pid_t second = fork();
        if (second == 0) _exit(use_mark(rft_host_arena_base(all.arena)));
        int status = 1;
        _exit(waitpid(second, &status, 0) == second && status == 0 ? 0 : 1);
    }
    assert_child_succeeds(child);
}

/* Nor does a descriptor stay that would keep the memory. */
IMAGE_TEST(forked_child_has_nothing_of_a_closed_one)
{
    struct stat file;
    int next = dup(0);
    close(next);
    assert_ok(open_arena(NULL));
    char *base = rft_host_arena_base(all.arena);
    base[0] = 'm';
    assert_int_equal(fstat(next, &file), 0);
    rft_host_arena_close(all.arena);
    all.arena = NULL;
    assert_int_equal(fstat(next, &file), -1);
    pid_t child = fork();
    if (child == 0) _exit(reads_mark(base, 'm') ? 1 : 0);
    assert_child_succeeds(child);
}

/* A descriptor of the map is none of the child's. */
IMAGE_TEST(forked_child_has_no_descriptor_of_it)
{
    struct stat file;
    int next = dup(0);
    close(next);
    assert_ok(open_arena(NULL));
    pid_t child = fork();
    if (child == 0) _exit(fstat(next, &file) == 0 ? 1 : 0);
    assert_child_succeeds(child);
}

static void open_hidden(void)
{
    assert_ok(rft_host_arena_open(all.device, &all.layout, &all.config, &all.arena, NULL));
    rft_host_arena_hide(all.arena);
    assert_ok(rft_host_arena_take(all.arena, NULL));
}

IMAGE_TEST(forked_child_does_not_have_what_is_hidden)
{
    open_hidden();
    char *base = rft_host_arena_base(all.arena);
    base[0] = 'm';
    assert_true(reads_mark(base, 'm'));
    pid_t child = fork();
    if (child == 0) _exit(reads_mark(base, 'm') ? 1 : 0);
    assert_child_succeeds(child);
}

/* A file that is longer than the limit allows would be a signal. */
IMAGE_TEST(limit_on_files_leaves_it_private)
{
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 100 * KIB;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    refit_status status = open_arena(NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_ok(status);
    memset(rft_host_arena_base(all.arena), 0x5a, rft_host_arena_describe(all.arena).bytes);
}

TEST(every_failed_allocation_is_an_error)
{
    for (uint64_t nth = 1;; nth++) {
        rft_layout_item item = {MIB, 0, 0, 0, 0};
        refit_config config;
        refit_device *device = NULL;
        rft_layout layout = {0, 0, NULL, 0};
        rft_host_arena *arena = NULL;
        refit_config_init(&config, sizeof config);
        failing_alloc_begin(nth);
        refit_status status = refit_device_open("host", &config, &device, NULL);
        if (status == REFIT_OK) status = rft_layout_open(&layout, &item, 1, 512, MIB, NULL);
        if (status == REFIT_OK)
            status = rft_host_arena_open(device, &layout, &config, &arena, NULL);
        if (status == REFIT_OK) status = rft_host_arena_take(arena, NULL);
        rft_host_arena_close(arena);
        rft_layout_close(&layout);
        assert_ok(refit_device_close(device, NULL));
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("host_arena");
}
