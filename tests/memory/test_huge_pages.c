/* Huge pages of the sizes that kernels have: 2 MiB, and with larger base pages more; and memory
 * that children can read in them. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/fork_map.h"
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
    bool asked = rft_huge_pages_ask(base, bytes, wanted, false);
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

/* ---- Shared memory that is put into huge pages, by MADV_COLLAPSE */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE  (2 * MIB)
#define IMAGE (16 * HUGE + MIB)

/* What the kernel says to MADV_COLLAPSE: its own answer, or one of the test's, without a change. */
typedef enum answer { OWN, DONE, REFUSED, DONE_ONCE } answer;

static struct {
    answer answer;
    uint32_t calls;
    uint64_t longest;                  /* bytes of one */
    uint64_t singles;                  /* pages that were touched alone */
    uint64_t places[IMAGE / HUGE + 1]; /* where in a huge page they lie */
} asked;

int __real_madvise(void *at, size_t bytes, int advice);
int __wrap_madvise(void *at, size_t bytes, int advice);

static int answer_collapse(void)
{
    bool refused = asked.answer == REFUSED || (asked.answer == DONE_ONCE && asked.calls > 1);
    errno = asked.answer == REFUSED ? EINVAL : ENOMEM;
    return refused ? -1 : 0;
}

/* The tests touch by one thread. */
int __wrap_madvise(void *at, size_t bytes, int advice)
{
    if (advice == MADV_POPULATE_WRITE && bytes == (size_t)sysconf(_SC_PAGESIZE) &&
        asked.singles < COUNT_OF(asked.places))
        asked.places[asked.singles++] = (uintptr_t)at % HUGE;
    if (advice != MADV_COLLAPSE) return __real_madvise(at, bytes, advice);
    asked.calls++;
    if (bytes > asked.longest) asked.longest = bytes;
    return asked.answer == OWN ? __real_madvise(at, bytes, advice) : answer_collapse();
}

/* Of the mappings that begin in [base, base + bytes): what this process has in huge pages. */
static uint64_t huge_bytes(const char *base, uint64_t bytes)
{
    char line[256];
    uint64_t kib, sum = 0;
    unsigned long from, to;
    bool within = false;
    FILE *maps = fopen("/proc/self/smaps", "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            within = from >= (uintptr_t)base && from < (uintptr_t)base + bytes;
        bool huge = sscanf(line, "AnonHugePages: %" SCNu64, &kib) == 1 ||
                    sscanf(line, "ShmemPmdMapped: %" SCNu64, &kib) == 1;
        if (within && huge) sum += kib * KIB;
    }
    fclose(maps);
    return sum;
}

/* Without the library: does this machine put IMAGE bytes of shared memory into huge pages? */
static bool kernel_collapses(void)
{
    char *mapped = mmap(NULL, IMAGE + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(mapped, MAP_FAILED);
    char *base = mapped + (-(uintptr_t)mapped & (HUGE - 1));
    int fd = rft_memory_file(IMAGE);
    assert_true(fd >= 0);
    void *shared = mmap(base, IMAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    assert_ptr_equal(shared, base);
    for (uint64_t at = 0; at < IMAGE; at += HUGE)
        base[at] = 1;
    bool can = __real_madvise(base, IMAGE, MADV_COLLAPSE) == 0 &&
               huge_bytes(base, IMAGE) == IMAGE / HUGE * HUGE;
    close(fd);
    assert_int_equal(munmap(mapped, IMAGE + HUGE), 0);
    return can;
}

typedef struct shared_image {
    refit_device *device;
    rft_layout layout;
    refit_config config;
    rft_host_arena *arena;
    char *base; /* of the arena */
} shared_image;

static shared_image image;

static int open_image(void **state)
{
    rft_layout_item item = {IMAGE, 0, 0, 0, 0};
    memset(&asked, 0, sizeof asked);
    memset(&image, 0, sizeof image);
    told = NULL;
    refit_config_init(&image.config, sizeof image.config);
    image.config.offload_budget_bytes = 2 * IMAGE;
    image.config.offload_pin = REFIT_PIN_OFF;
    image.config.offload_touch_threads = 1;
    image.config.offload_huge_pages = REFIT_HUGE_PAGES_ALWAYS; /* no probe */
    assert_ok(faulty_device_open("host", &image.device, NULL));
    assert_ok(rft_layout_open(&image.layout, &item, 1, 512, 64 * MIB, NULL));
    return 0;
}

static int close_image(void **state)
{
    rft_host_arena_close(image.arena);
    rft_layout_close(&image.layout);
    return refit_device_close(image.device, NULL) == REFIT_OK ? 0 : -1;
}

#define IMAGE_TEST(name) TEST_WITH(name, open_image, close_image)

/* Whether huge pages were asked for. All of it has memory in any case, of zeros. */
static bool take_image(void)
{
    unsigned char there = 0;
    assert_ok(rft_host_arena_open(image.device, &image.layout, &image.config, &image.arena, NULL));
    assert_ok(rft_host_arena_take(image.arena, NULL));
    image.base = rft_host_arena_base(image.arena);
    for (uint64_t at = 0; at < IMAGE; at += 4 * KIB) {
        assert_int_equal(mincore(image.base + at, 1, &there), 0);
        assert_int_equal(there & 1, 1);
        assert_int_equal(image.base[at], 0);
    }
    return rft_host_arena_describe(image.arena).huge_pages;
}

/* Through the kernel: what is not mapped is an error there, not a signal. */
static bool reads_mark(const char *at)
{
    char byte = 0;
    int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    bool marked = pread(memory, &byte, 1, (off_t)(uintptr_t)at) == 1 && byte == 'm';
    close(memory);
    return marked;
}

/* In each huge page, and after the last; what a child writes there is its own. */
static bool child_reads_all(void)
{
    int status = -1;
    for (uint64_t at = 0; at < IMAGE; at += HUGE)
        image.base[at] = 'm';
    pid_t child = fork();
    if (child == 0) {
        bool read_all = true;
        for (uint64_t at = 0; at < IMAGE && read_all; at += HUGE) {
            read_all = reads_mark(image.base + at);
            if (read_all) image.base[at] = 'n';
        }
        _exit(read_all ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    for (uint64_t at = 0; at < IMAGE; at += HUGE)
        assert_int_equal(image.base[at], 'm');
    return status == 0;
}

IMAGE_TEST(memory_that_children_read_lies_in_huge_pages)
{
    if (!kernel_collapses()) {
        print_message("this kernel puts no shared memory into huge pages: MADV_COLLAPSE\n");
        skip();
    }
    assert_true(take_image());
    uint64_t huge = huge_bytes(image.base, IMAGE);
    assert_in_range(huge, IMAGE / 2, IMAGE); /* the kernel may have none left for some */
    assert_true(child_reads_all());
    assert_int_equal(huge_bytes(image.base, IMAGE), huge);
}

/* Interleaved memory lies on the nodes by the numbers of its pages. */
IMAGE_TEST(huge_pages_are_not_all_begun_at_the_same_place)
{
    asked.answer = DONE;
    assert_true(take_image());
    assert_true(asked.singles > IMAGE / HUGE / 2);
    for (uint64_t i = 2; i < asked.singles; i++) /* after that of the trial */
        assert_int_not_equal(asked.places[i], asked.places[i - 1]);
}

IMAGE_TEST(a_kernel_that_collapses_nothing_is_asked_once)
{
    asked.answer = REFUSED;
    (void)take_image(); /* insists, and gets private memory */
    assert_int_equal(asked.calls, 1);
    assert_false(child_reads_all());
    rft_host_arena_close(image.arena);
    image.config.offload_huge_pages = REFIT_HUGE_PAGES_AUTO;
    assert_false(take_image());
    assert_int_equal(asked.calls, 2);
    assert_true(child_reads_all());
}

IMAGE_TEST(what_is_not_collapsed_is_touched)
{
    asked.answer = DONE_ONCE;
    assert_true(take_image());
    assert_true(asked.calls > 2);
    assert_true(child_reads_all());
}

IMAGE_TEST(huge_pages_that_are_not_wanted_are_not_made)
{
    image.config.offload_huge_pages = REFIT_HUGE_PAGES_NEVER;
    assert_false(take_image());
    assert_int_equal(asked.calls, 0);
    assert_int_equal(huge_bytes(image.base, IMAGE), 0);
}

/* With larger base pages a huge one is larger than what is touched at a time else. */
IMAGE_TEST(a_chunk_is_no_less_than_a_huge_page)
{
    told = "33554432\n";
    asked.answer = DONE;
    assert_true(take_image());
    assert_int_equal(asked.longest, 32 * MIB);
}

int main(void)
{
    return test_run("huge_pages");
}
