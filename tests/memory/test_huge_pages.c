/* Huge pages of the sizes that kernels have: 2 MiB, and with larger base pages more. */
#include <stdio.h>
#include <sys/mman.h>

#include "memory/host_arena.h"
#include "memory/procfile.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

static const char *told; /* what the kernel says of its huge pages; NULL: there is no such file */
static const char *of_shared[2]; /* which of them shared memory gets: all sizes, and this one */

bool __real_rft_procfile_read(const char *path, char *text, size_t room);
bool __wrap_rft_procfile_read(const char *path, char *text, size_t room);

bool __wrap_rft_procfile_read(const char *path, char *text, size_t room)
{
    bool one_size = strstr(path, "kB/shmem_enabled") != NULL;
    if (one_size || strstr(path, "/shmem_enabled") != NULL) {
        const char *says = of_shared[one_size ? 1 : 0];
        if (says != NULL) snprintf(text, room, "%s", says);
        return says != NULL;
    }
    if (strstr(path, "hpage_pmd_size") == NULL) return __real_rft_procfile_read(path, text, room);
    if (told == NULL) return false;
    snprintf(text, room, "%s", told);
    return true;
}

/* Whether huge pages were asked for in so many bytes of nothing; `*touched`: bytes that have memory
 * now, looked for at every 2 MiB. */
static bool ask(uint64_t bytes, refit_huge_pages wanted, uint64_t *touched)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    assert_ptr_not_equal(base, MAP_FAILED);
    bool asked = rft_huge_pages_ask(base, bytes, wanted);
    *touched = 0;
    for (uint64_t at = 0; at < bytes; at += 2 * MIB) {
        unsigned char there = 0;
        assert_int_equal(mincore(base + at, 1, &there), 0);
        if (there & 1) *touched += 2 * MIB;
    }
    assert_int_equal(munmap(base, bytes), 0);
    return asked;
}

TEST(what_is_too_large_to_probe_is_not_touched)
{
    uint64_t touched;
    told = "536870912\n";
    assert_false(ask(512 * MIB, REFIT_HUGE_PAGES_AUTO, &touched));
    assert_int_equal(touched, 0);
    assert_true(ask(512 * MIB, REFIT_HUGE_PAGES_ALWAYS, &touched));
    assert_int_equal(touched, 0);
}

TEST(less_than_a_huge_page_asks_for_none)
{
    uint64_t touched;
    told = "33554432\n";
    assert_false(ask(30 * MIB, REFIT_HUGE_PAGES_ALWAYS, &touched));
    assert_true(ask(32 * MIB, REFIT_HUGE_PAGES_ALWAYS, &touched));
    assert_false(ask(32 * MIB, REFIT_HUGE_PAGES_NEVER, &touched));
}

TEST(a_probe_takes_whole_huge_pages)
{
    uint64_t touched;
    told = "8388608\n";
    (void)ask(10 * MIB, REFIT_HUGE_PAGES_AUTO, &touched);
    assert_true(touched >= 8 * MIB);
}

TEST(sizes_that_mean_nothing_are_those_of_small_pages)
{
    const char *const texts[] = {NULL, "", "never\n", "3145728\n", "0\n", "4096\n"};
    uint64_t touched;
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        told = texts[i];
        assert_true(ask(2 * MIB, REFIT_HUGE_PAGES_ALWAYS, &touched));
        assert_false(ask(1 * MIB, REFIT_HUGE_PAGES_ALWAYS, &touched));
    }
}

TEST(shared_memory_has_them_where_the_kernel_is_set_up_so)
{
    static const char never[] = "always within_size advise [never] deny force\n";
    static const char advise[] = "always within_size [advise] never deny force\n";
    static const struct {
        const char *all_sizes, *this_size;
        bool shared;
    } rows[] = {
        {NULL, NULL, false},
        {never, NULL, false},
        {advise, NULL, true},
        {"[always] within_size advise never deny force\n", NULL, true},
        {never, "always [inherit] within_size advise never\n", false},
        {advise, "always [inherit] within_size advise never\n", true},
        {never, "always inherit within_size [advise] never\n", true},
        {advise, "always inherit within_size advise [never]\n", false},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        of_shared[0] = rows[i].all_sizes;
        of_shared[1] = rows[i].this_size;
        assert_int_equal(rft_huge_pages_can_be_shared(), rows[i].shared);
    }
    of_shared[0] = of_shared[1] = NULL;
}

/* Several at a time: one alone would begin there by chance. */
TEST(images_begin_where_a_huge_page_does)
{
    refit_device *device;
    rft_layout_item item = {9 * MIB, 0, 0, 0, 0};
    rft_layout layout;
    rft_host_arena *arenas[3];
    refit_config config;
    told = "8388608\n";
    refit_config_init(&config, sizeof config);
    config.offload_budget_bytes = 64 * MIB;
    assert_ok(faulty_device_open("host", &device, NULL));
    assert_ok(rft_layout_open(&layout, &item, 1, 512, 16 * MIB, NULL));
    for (size_t i = 0; i < 3; i++) {
        assert_ok(rft_host_arena_open(device, &layout, &config, &arenas[i], NULL));
        assert_ok(rft_host_arena_take(arenas[i], NULL));
        assert_int_equal((uintptr_t)rft_host_arena_base(arenas[i]) % (8 * MIB), 0);
    }
    for (size_t i = 0; i < 3; i++)
        rft_host_arena_close(arenas[i]);
    rft_layout_close(&layout);
    assert_ok(refit_device_close(device, NULL));
}

int main(void)
{
    return test_run("huge_pages");
}
