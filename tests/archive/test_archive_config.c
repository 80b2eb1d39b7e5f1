/*
 * A refit_config of a program that was compiled against a shorter one: what is after its end is
 * not looked at, and has the defaults. Here nothing is after its end but a page that must not be
 * touched.
 */
#include <sys/mman.h>
#include <unistd.h>

#include "archive_rig.h"

#define SMALLEST offsetof(refit_config, offload_slab_bytes)

typedef struct guarded {
    unsigned char *pages;
    size_t room; /* in front of the page that must not be touched */
    size_t page;
} guarded;

static guarded guarded_open(void)
{
    guarded memory = {.page = (size_t)sysconf(_SC_PAGESIZE)};
    memory.room = (sizeof(refit_config) / memory.page + 1) * memory.page;
    memory.pages = mmap(NULL, memory.room + memory.page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory.pages != MAP_FAILED);
    assert_int_equal(mprotect(memory.pages + memory.room, memory.page, PROT_NONE), 0);
    return memory;
}

static void guarded_close(guarded *memory)
{
    assert_int_equal(munmap(memory->pages, memory->room + memory->page), 0);
}

/* The beginning of a config, right in front of that page. */
static refit_config *shortened(const guarded *memory, const refit_config *config, size_t size)
{
    unsigned char *at = memory->pages + memory->room - size;
    memcpy(at, config, size);
    memcpy(at, &size, sizeof size); /* .size, which comes first */
    return (refit_config *)(void *)at;
}

RIG_TEST(a_shorter_config_opens_archives_and_files)
{
    char path[160];
    refit_archive *archive;
    refit_snapshot *snapshot;
    guarded memory = guarded_open();
    rig_open_with(rig, 10, 2);
    (void)snprintf(path, sizeof path, "%s", rig_path(rig, 1));
    rig_close_archive(rig);
    for (size_t size = SMALLEST; size <= sizeof(refit_config); size += 8) {
        const refit_config *config = shortened(&memory, &rig->config, size);
        assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, config, &archive, NULL));
        refit_archive_close(archive);
        assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, config, &archive, NULL));
        refit_archive_close(archive);
        assert_ok(refit_snapshot_open(path, config, &snapshot, NULL));
        refit_snapshot_close(snapshot);
    }
    guarded_close(&memory);
}

RIG_TEST(what_a_shorter_config_has_counts_and_the_rest_is_default)
{
    refit_archive *archive;
    guarded memory = guarded_open();
    char path[160];
    rig_open_with(rig, 10, 1);
    (void)snprintf(path, sizeof path, "%s", rig_path(rig, 0));
    rig->config.limits_tensors = 3;
    const refit_config *config =
        shortened(&memory, &rig->config, offsetof(refit_config, limits_message_bytes));
    refit_snapshot *snapshot;
    assert_int_equal(refit_snapshot_open(path, config, &snapshot, NULL), REFIT_ERR_LIMIT);
    refit_archive_close(rig->archive);
    rig->config.limits_tensors = 1000;
    rig->config.archive_anchor_every = 1; /* which the shortened one does not have */
    config = shortened(&memory, &rig->config, offsetof(refit_config, archive_anchor_every) / 8 * 8);
    assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, config, &archive, NULL));
    rig->archive = archive;
    rig_keep(rig, RIG_EPOCH, 2);
    assert_int_equal(rig_info(rig, 1).base, 1);
    guarded_close(&memory);
}

RIG_TEST(a_config_that_was_never_initialised_is_refused)
{
    refit_archive *archive;
    refit_snapshot *snapshot;
    rig_open_with(rig, 10, 1);
    refit_config config = {.size = SMALLEST - 1};
    assert_invalid(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &config, &archive, NULL));
    assert_invalid(refit_snapshot_open(rig_path(rig, 0), &config, &snapshot, NULL));
}

int main(void)
{
    return test_run("archive_config");
}
