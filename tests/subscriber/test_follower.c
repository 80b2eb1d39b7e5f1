/* Following an archive, with the time and the user by hand: which version comes, from which files,
 * and what becomes of files that cannot be used. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "subscriber/follower.h"
#include "tests/archive/archive_rig.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/heard.h"
#include "tests/support/test.h"

/* ---- Calls that fail: the linker puts these before the system's */

static unsigned calls, fatal; /* the n-th fails; 0: none */
static int reason;
static bool lasting; /* and all after it */

static bool is_hit(void)
{
    if (fatal == 0 || ++calls < fatal || (calls > fatal && !lasting)) return false;
    errno = reason;
    return true;
}

ssize_t __real_pread(int file, void *bytes, size_t count, off_t at);
int __real_openat(int folder, const char *name, int flags, unsigned mode);
int __real_open(const char *name, int flags, unsigned mode);
ssize_t __wrap_pread(int file, void *bytes, size_t count, off_t at);
int __wrap_openat(int folder, const char *name, int flags, unsigned mode);
int __wrap_open(const char *name, int flags, unsigned mode);

ssize_t __wrap_pread(int file, void *bytes, size_t count, off_t at)
{
    return is_hit() ? -1 : __real_pread(file, bytes, count, at);
}

int __wrap_openat(int folder, const char *name, int flags, unsigned mode)
{
    return is_hit() ? -1 : __real_openat(folder, name, flags, mode);
}

int __wrap_open(const char *name, int flags, unsigned mode)
{
    return is_hit() ? -1 : __real_open(name, flags, mode);
}

static void fail_from(unsigned nth, int why, bool on)
{
    calls = 0;
    fatal = nth;
    reason = why;
    lasting = on;
}

/* ---- Time that passes while a frame is read */

static int64_t ahead;

int64_t __real_rft_now(void);
int64_t __wrap_rft_now(void);

int64_t __wrap_rft_now(void)
{
    return __real_rft_now() + ahead;
}

#define SMALL 10u     /* elements: files of some hundred bytes */
#define LARGE 200000u /* several frames */

typedef struct scene {
    archive_rig rig;
    rft_mailbox mailbox;
    rft_follower follower;
    int64_t now;
    bool follows;
} scene;

static refit_status try_follow(scene *it, refit_error *error)
{
    RFT_TRY(rft_mailbox_open(&it->mailbox, error));
    refit_status status = rft_follower_open(&it->follower, it->rig.folder, &it->rig.config, "w",
                                            &it->mailbox, it->now, error);
    it->follows = status == REFIT_OK;
    if (status != REFIT_OK) rft_mailbox_close(&it->mailbox);
    return status;
}

static void follow(scene *it)
{
    assert_done(try_follow(it, error));
}

static void leave(scene *it)
{
    if (!it->follows) return;
    rft_follower_close(&it->follower);
    rft_mailbox_close(&it->mailbox);
    it->follows = false;
}

static int setup(void **state)
{
    static scene it;
    memset(&it, 0, sizeof it);
    it.now = rft_now();
    *state = &it;
    return 0;
}

static int teardown(void **state)
{
    scene *it = *state;
    fatal = 0;
    ahead = 0;
    leave(it);
    if (it->rig.root[0] != '\0') rig_close(&it->rig);
    heard_end();
    return 0;
}

#define SCENE(name) TEST_ON(scene *it, name, setup, teardown)

/* It has `versions`, and the follower has not looked yet. */
static void begin(scene *it, uint32_t elements, uint64_t versions)
{
    leave(it);
    rig_open_with(&it->rig, elements, versions);
    follow(it);
}

static void report(scene *it)
{
    (void)rft_mailbox_publish(&it->mailbox, &it->follower.report);
}

/* The folder is looked into once, and all that this brings is done. Returns the steps. */
static uint32_t look(scene *it)
{
    uint32_t steps = 0;
    if (it->follower.next_look > it->now) it->now = it->follower.next_look;
    do {
        rft_follower_tick(&it->follower, it->now);
        steps++;
    } while (it->follower.archive != NULL);
    report(it);
    return steps;
}

static rft_image *take(scene *it)
{
    rft_image *image = NULL;
    assert_done(rft_mailbox_take(&it->mailbox, 0, &image, error));
    return image;
}

static void assert_nothing_new(scene *it, const char *words)
{
    rft_image *image = NULL;
    report(it);
    assert_refused(rft_mailbox_take(&it->mailbox, 0, &image, error), REFIT_ERR_TIMEOUT, words);
    assert_null(image);
}

static void order(scene *it, const rft_image *image, rft_order what)
{
    rft_mailbox_order(&it->mailbox, &what, image->id.version);
    rft_follower_obey(&it->follower, it->now);
    report(it);
}

static void accept(scene *it, const rft_image *image)
{
    order(it, image, (rft_order){.kind = RFT_ORDER_ACCEPT});
}

static void refuse(scene *it, const rft_image *image, bool kept)
{
    order(it, image, (rft_order){.kind = RFT_ORDER_REFUSE, .code = REFIT_ERR_PEER, .kept = kept});
}

static void release(scene *it, const rft_image *image)
{
    order(it, image, (rft_order){.kind = RFT_ORDER_RELEASE});
}

/* To the bit. */
static void assert_is(scene *it, const rft_image *image, uint64_t epoch, uint64_t version)
{
    const rft_manifest *manifest = image->catalog->manifest;
    assert_int_equal(image->id.epoch, epoch);
    assert_int_equal(image->id.version, version);
    assert_int_equal(manifest->count, RIG_TENSORS);
    (void)rig_version(&it->rig, epoch, version);
    for (uint32_t i = 0; i < RIG_TENSORS; i++) {
        if (it->rig.tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        assert_memory_equal(image->view + manifest->tensors[i].offset, it->rig.bytes[i],
                            it->rig.tensors[i].bytes);
    }
}

/* Looks, and takes this version. */
static rft_image *expect(scene *it, uint64_t epoch, uint64_t version)
{
    (void)look(it);
    rft_image *image = take(it);
    assert_is(it, image, epoch, version);
    return image;
}

/* The same, accepted and closed. */
static void apply(scene *it, uint64_t epoch, uint64_t version)
{
    rft_image *image = expect(it, epoch, version);
    accept(it, image);
    release(it, image);
    assert_int_equal(it->follower.report.version, version);
    assert_int_equal(it->follower.report.epoch, epoch);
}

static uint32_t images_in_memory(const scene *it)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++)
        count += it->follower.images.private[i].memory.memory != NULL;
    return count;
}

static void cut(const kept_file *file)
{
    assert_int_equal(truncate(file->path, (off_t)(file->count / 2)), 0);
}

static void flip(const kept_file *file, size_t at)
{
    unsigned char *bytes = malloc(file->count);
    assert_non_null(bytes);
    memcpy(bytes, file->bytes, file->count);
    bytes[at] ^= 0x20;
    rig_store(file->path, bytes, file->count);
    free(bytes);
}

static void widen(archive_rig *rig)
{
    rig->tensors[6].shape[0] /= 2;
    rig->tensors[6].bytes /= 2;
    rig->weights[5].bytes /= 2;
}

/* ---- Which version */

SCENE(the_newest_comes_first_then_each_newer_one)
{
    begin(it, LARGE, 3);
    assert_int_equal(rft_follower_tick_at(&it->follower), it->now);
    apply(it, RIG_EPOCH, 3);
    for (uint64_t version = 4; version <= 12; version++) {
        (void)look(it);
        assert_nothing_new(it, "and it holds version");
        rig_keep(&it->rig, RIG_EPOCH, version);
        apply(it, RIG_EPOCH, version);
    }
    assert_int_equal(it->follower.report.applied, 10);
    assert_int_equal(it->follower.report.aborted, 0);
    assert_int_equal(it->follower.report.path, REFIT_PATH_ARCHIVE);
    assert_int_equal(images_in_memory(it), 2);
}

SCENE(missed_versions_are_passed_over)
{
    begin(it, SMALL, 1);
    apply(it, RIG_EPOCH, 1);
    for (uint64_t version = 2; version <= 11; version++)
        rig_keep(&it->rig, RIG_EPOCH, version);
    apply(it, RIG_EPOCH, 11);
    (void)look(it);
    assert_nothing_new(it, "holds version 11");
    assert_int_equal(it->follower.report.applied, 2);
}

/* What the files of the version bring, and not those back to its anchor. */
SCENE(a_version_is_built_on_the_one_in_memory)
{
    begin(it, LARGE, 2);
    apply(it, RIG_EPOCH, 2);
    uint64_t whole = it->follower.report.bytes_received;
    rig_keep(&it->rig, RIG_EPOCH, 3);
    assert_int_equal(unlink(rig_path(&it->rig, 0)), 0); /* the anchor */
    apply(it, RIG_EPOCH, 3);
    assert_true(it->follower.report.bytes_received - whole < whole / 4);
    begin(it, LARGE, 3);
    assert_int_equal(unlink(rig_path(&it->rig, 0)), 0);
    (void)look(it);
    assert_nothing_new(it, "its file is not there");
}

/* An anchor that is newer than the version in memory needs no other file. */
SCENE(a_newer_anchor_is_enough)
{
    begin(it, SMALL, 2);
    apply(it, RIG_EPOCH, 2);
    for (uint64_t version = 3; version <= 6; version++)
        rig_keep(&it->rig, RIG_EPOCH, version);
    for (uint32_t i = 0; i < 4; i++) /* 1 to 4 */
        assert_int_equal(unlink(rig_path(&it->rig, 0)), 0);
    apply(it, RIG_EPOCH, 6);
}

SCENE(compressed_files_are_followed)
{
    rig_open_packed(&it->rig, LARGE, 3);
    follow(it);
    apply(it, RIG_EPOCH, 3);
    rig_keep(&it->rig, RIG_EPOCH, 4);
    apply(it, RIG_EPOCH, 4);
}

SCENE(frames_of_another_size_follow)
{
    begin(it, LARGE, 2);
    apply(it, RIG_EPOCH, 2);
    it->rig.config.broadcast_frame_bytes = 256 * 1024;
    rig_reopen(&it->rig);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    apply(it, RIG_EPOCH, 3);
    rig_keep(&it->rig, RIG_EPOCH, 4);
    apply(it, RIG_EPOCH, 4);
}

SCENE(a_trainer_that_starts_anew_is_followed)
{
    begin(it, SMALL, 3);
    apply(it, RIG_EPOCH, 3);
    rig_keep(&it->rig, RIG_OTHER, 1);
    apply(it, RIG_OTHER, 1);
    rig_keep(&it->rig, RIG_OTHER, 2);
    apply(it, RIG_OTHER, 2);
    rig_keep(&it->rig, RIG_EPOCH, 4); /* of an earlier run */
    (void)look(it);
    assert_nothing_new(it, "holds version 2");
}

/* Also where what came after it cannot be used. */
SCENE(an_earlier_run_is_not_gone_back_to)
{
    begin(it, SMALL, 3);
    rig_keep(&it->rig, RIG_OTHER, 1);
    apply(it, RIG_OTHER, 1);
    assert_int_equal(unlink(rig_path(&it->rig, 3)), 0);
    rig_keep(&it->rig, RIG_OTHER, 2);
    kept_file second = rig_take_file(&it->rig, 3);
    flip(&second, second.count - 9);
    (void)look(it);
    assert_nothing_new(it, "0002-00000002-");
    rig_put_back(&second);
    apply(it, RIG_OTHER, 2);
}

/* The file of the later run is away for a moment, as after a commit that failed. */
SCENE(an_earlier_run_is_not_gone_back_to_at_once)
{
    begin(it, SMALL, 3);
    rig_keep(&it->rig, RIG_OTHER, 1);
    apply(it, RIG_OTHER, 1);
    kept_file fourth = rig_take_file(&it->rig, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(unlink(fourth.path), 0);
        for (uint32_t j = 0; j < 3; j++) {
            (void)look(it);
            assert_nothing_new(it, "holds version 1");
        }
        rig_store(fourth.path, fourth.bytes, fourth.count);
        (void)look(it);
        assert_nothing_new(it, "holds version 1");
    }
    assert_int_equal(unlink(fourth.path), 0);
    rig_close_archive(&it->rig);
    for (uint32_t i = 0; i < 3; i++)
        (void)look(it);
    apply(it, RIG_EPOCH, 3);
    rig_put_back(&fourth);
    apply(it, RIG_OTHER, 1);
}

/* The user's decisions bring no look that counts for more. */
SCENE(decisions_do_not_make_an_earlier_run_newer)
{
    begin(it, SMALL, 3);
    rig_keep(&it->rig, RIG_OTHER, 1);
    rft_image *image = expect(it, RIG_OTHER, 1);
    assert_int_equal(unlink(rig_path(&it->rig, 3)), 0);
    (void)look(it);
    accept(it, image);
    (void)look(it);
    release(it, image);
    (void)look(it);
    assert_nothing_new(it, "holds version 1");
}

/* An archive that was emptied, and written to by a trainer whose runs begin again. */
SCENE(an_archive_that_begins_again_is_followed)
{
    begin(it, SMALL, 0);
    rig_keep(&it->rig, RIG_EPOCH, 7);
    apply(it, RIG_EPOCH, 7);
    assert_int_equal(unlink(rig_path(&it->rig, 0)), 0);
    (void)look(it);
    rig_reopen(&it->rig);
    rig_keep(&it->rig, RIG_OTHER, 1);
    for (uint32_t i = 0; i < 3; i++)
        (void)look(it);
    apply(it, RIG_OTHER, 1);
    rig_keep(&it->rig, RIG_OTHER, 2);
    apply(it, RIG_OTHER, 2);
}

/* The same path, another archive: it counts runs from 1, too. */
SCENE(an_archive_in_the_place_of_the_first_is_followed)
{
    char command[256];
    begin(it, SMALL, 3);
    apply(it, RIG_EPOCH, 3);
    rig_close_archive(&it->rig);
    (void)snprintf(command, sizeof command, "rm -rf %s", it->rig.folder);
    assert_int_equal(system(command), 0);
    (void)look(it);
    assert_nothing_new(it, "cannot open the folder");
    rig_reopen(&it->rig);
    rig_keep(&it->rig, RIG_OTHER, 1);
    for (uint32_t i = 0; i < 3; i++)
        (void)look(it);
    apply(it, RIG_OTHER, 1);
}

SCENE(other_tensors_take_the_place_of_the_first_ones)
{
    begin(it, LARGE, 2);
    apply(it, RIG_EPOCH, 2);
    uint64_t bytes = it->follower.images.private[0].memory.bytes;
    widen(&it->rig);
    rig_keep(&it->rig, RIG_OTHER, 1);
    apply(it, RIG_OTHER, 1);
    rig_keep(&it->rig, RIG_OTHER, 2);
    apply(it, RIG_OTHER, 2);
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++)
        assert_true(it->follower.images.private[i].memory.bytes < bytes);
}

/* ---- The user */

SCENE(a_version_that_was_not_taken_is_superseded)
{
    begin(it, SMALL, 1);
    (void)look(it);
    rig_keep(&it->rig, RIG_EPOCH, 2);
    (void)look(it);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    apply(it, RIG_EPOCH, 3);
    assert_nothing_new(it, "holds version 3");
}

SCENE(the_next_waits_for_the_decision)
{
    begin(it, LARGE, 1);
    rft_image *first = expect(it, RIG_EPOCH, 1);
    rig_keep(&it->rig, RIG_EPOCH, 2);
    (void)look(it);
    assert_int_equal(it->follower.report.state, RFT_SESSION_STAGED);
    assert_ptr_equal(first->catalog, it->follower.newest->catalog); /* the list is read once */
    assert_nothing_new(it, "none that this worker has not had");
    rig_keep(&it->rig, RIG_EPOCH, 3); /* in the place of 2 */
    (void)look(it);
    assert_int_equal(images_in_memory(it), 2);
    assert_is(it, first, RIG_EPOCH, 1);
    accept(it, first);
    rft_image *third = expect(it, RIG_EPOCH, 3);
    release(it, first);
    accept(it, third);
    rig_keep(&it->rig, RIG_EPOCH, 4); /* while the update of 3 is open */
    (void)look(it);
    rig_keep(&it->rig, RIG_EPOCH, 5); /* in the mailbox is 4: in its place */
    (void)look(it);
    assert_int_equal(it->follower.newest->id.version, 5);
    assert_is(it, third, RIG_EPOCH, 3);
    release(it, third);
    apply(it, RIG_EPOCH, 5);
}

SCENE(what_was_refused_and_not_kept_comes_again)
{
    begin(it, SMALL, 2);
    apply(it, RIG_EPOCH, 2);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    rft_image *image = expect(it, RIG_EPOCH, 3);
    refuse(it, image, false);
    assert_int_equal(it->follower.report.version, 0);
    assert_true(it->follower.next_look > it->now); /* after a pause, as from a trainer */
    rft_image *again = expect(it, RIG_EPOCH, 3);
    assert_ptr_not_equal(again, image); /* the first is still the user's */
    release(it, image);
    accept(it, again);
    release(it, again);
}

SCENE(what_was_refused_and_kept_does_not)
{
    begin(it, SMALL, 2);
    apply(it, RIG_EPOCH, 2);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    rft_image *image = expect(it, RIG_EPOCH, 3);
    refuse(it, image, true);
    release(it, image);
    assert_int_equal(it->follower.report.version, 2);
    (void)look(it);
    assert_nothing_new(it, "none that this worker has not had, and it holds version 2");
    rig_keep(&it->rig, RIG_EPOCH, 4);
    apply(it, RIG_EPOCH, 4);
}

/* It is not offered again where nothing is left to build on. */
SCENE(what_was_refused_and_kept_stays_so)
{
    begin(it, LARGE, 2);
    apply(it, RIG_EPOCH, 2);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    rft_image *image = expect(it, RIG_EPOCH, 3);
    refuse(it, image, true);
    release(it, image);
    widen(&it->rig);
    rig_keep(&it->rig, RIG_OTHER, 1);
    kept_file other = rig_take_file(&it->rig, 3);
    flip(&other, other.count - 9);
    (void)look(it);
    assert_null(it->follower.newest);
    (void)look(it);
    assert_nothing_new(it, "0002-00000001-");
    rig_put_back(&other);
    apply(it, RIG_OTHER, 1);
}

/* The image that the files build on is not trusted more than the files. */
SCENE(bytes_that_the_user_has_changed_are_not_built_on)
{
    begin(it, LARGE, 2);
    rft_image *image = expect(it, RIG_EPOCH, 2);
    accept(it, image);
    const rft_manifest_tensor *tensor = &image->catalog->manifest->tensors[6];
    image->memory.memory[tensor->offset + 7] ^= 1; /* in blocks that stay the same */
    release(it, image);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    apply(it, RIG_EPOCH, 3);
    assert_int_equal(it->follower.report.aborted, 0);
}

/* ---- Files at fault */

SCENE(a_damaged_file_is_passed_over_and_named_once)
{
    begin(it, LARGE, 2);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    kept_file third = rig_take_file(&it->rig, 2);
    flip(&third, third.count - 9);
    heard_begin(REFIT_LOG_WARNING);
    apply(it, RIG_EPOCH, 2);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(look(it), 1); /* it is not read again */
    assert_nothing_new(it, "-00000003-");
    rig_keep(&it->rig, RIG_EPOCH, 4); /* builds on it */
    (void)look(it);
    assert_nothing_new(it, "-00000003-");
    assert_int_equal(heard_count("cannot use a file"), 1);
    assert_int_equal(it->follower.report.aborted, 1);
    rig_keep(&it->rig, RIG_EPOCH, 5); /* an anchor */
    apply(it, RIG_EPOCH, 5);
    (void)look(it);
    assert_nothing_new(it, "holds version 5");
    rig_put_back(&third);
}

/* However many there are: none is read or named again, and none is remembered once it is gone. */
SCENE(many_damaged_files_are_each_named_once)
{
    kept_file files[50];
    const uint32_t count = COUNT_OF(files);
    begin(it, SMALL, count);
    for (uint32_t i = 1; i < count; i++)
        files[i] = rig_take_file(&it->rig, i);
    for (uint32_t i = 1; i < count; i++) {
        flip(&files[i], 20);
        free(files[i].bytes);
    }
    heard_begin(REFIT_LOG_DEBUG);
    apply(it, RIG_EPOCH, 1);
    for (uint32_t i = 0; i < 3; i++)
        (void)look(it);
    assert_nothing_new(it, "-00000050-");
    assert_int_equal(heard_count("cannot use a file"), count - 1);
    assert_int_equal(it->follower.report.aborted, count - 1);
    for (uint32_t i = 1; i < count; i++)
        assert_int_equal(unlink(files[i].path), 0);
    (void)look(it);
    assert_int_equal(it->follower.fault_count, 0);
}

SCENE(a_file_that_is_still_being_copied_is_taken_once_it_is_whole)
{
    begin(it, LARGE, 1);
    kept_file first = rig_take_file(&it->rig, 0);
    cut(&first);
    (void)look(it);
    assert_nothing_new(it, "-00000001-");
    assert_int_equal(truncate(first.path, 0), 0);
    (void)look(it);
    assert_nothing_new(it, "-00000001-");
    rig_put_back(&first);
    apply(it, RIG_EPOCH, 1);
}

/* While 2 waits, 3 was to take its place: 2 is put together once more. */
SCENE(a_version_that_waits_outlives_a_damaged_file)
{
    begin(it, LARGE, 1);
    rft_image *image = expect(it, RIG_EPOCH, 1);
    rig_keep(&it->rig, RIG_EPOCH, 2);
    (void)look(it);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    kept_file third = rig_take_file(&it->rig, 2);
    flip(&third, third.count - 9);
    (void)look(it);
    assert_is(it, image, RIG_EPOCH, 1);
    accept(it, image);
    release(it, image);
    apply(it, RIG_EPOCH, 2);
    rig_put_back(&third);
    apply(it, RIG_EPOCH, 3);
}

/* A file that could not be read costs the version that waits once, and not each time. */
static void fail_while_one_waits(scene *it, bool widened)
{
    const uint64_t epoch = widened ? RIG_OTHER : RIG_EPOCH, next = widened ? 1 : 3;
    bool found = false;
    for (unsigned nth = 1; !found; nth++) {
        begin(it, LARGE, 1);
        rft_image *image = expect(it, RIG_EPOCH, 1);
        rig_keep(&it->rig, RIG_EPOCH, 2);
        (void)look(it);
        const uint64_t whole = it->rig.tensors[6].bytes;
        if (widened) widen(&it->rig);
        rig_keep(&it->rig, epoch, next);
        const uint64_t before = it->follower.report.bytes_received;
        fail_from(nth, EIO, false);
        (void)look(it);
        assert_true(calls >= nth); /* or no call was that of a frame */
        fail_from(0, 0, false);
        found = it->follower.newest->id.version == 2 && /* once more */
                it->follower.report.bytes_received - before > whole;
        if (!found) continue;
        assert_int_equal(look(it), 1);
        assert_int_equal(it->follower.newest->id.version, 2);
        accept(it, image);
        release(it, image);
        apply(it, epoch, next);
    }
}

SCENE(a_version_that_waits_is_not_given_up_for_a_file_that_failed)
{
    fail_while_one_waits(it, false);
}

SCENE(a_version_that_waits_is_not_given_up_for_one_of_other_tensors_that_failed)
{
    fail_while_one_waits(it, true);
}

/* What could not be read is not read at once because the user decides. */
SCENE(a_pause_outlasts_decisions)
{
    for (uint32_t refused = 0; refused < 2; refused++) {
        ahead = 0;
        it->now = rft_now();
        begin(it, LARGE, 1);
        rft_image *image = expect(it, RIG_EPOCH, 1);
        rig_keep(&it->rig, RIG_EPOCH, 2);
        kept_file second = rig_take_file(&it->rig, 1);
        flip(&second, second.count - 9);
        ahead = INT64_C(90000000000); /* so long it took */
        (void)look(it);
        const int64_t end = it->follower.next_look;
        assert_true(end - it->now >= ahead);
        if (refused == 1)
            refuse(it, image, false);
        else
            accept(it, image);
        assert_int_equal(it->follower.next_look, end);
        release(it, image);
        assert_int_equal(rft_follower_tick_at(&it->follower), end);
        rig_put_back(&second);
        apply(it, RIG_EPOCH, 2);
    }
}

SCENE(a_file_removed_while_it_is_read_costs_that_version_alone)
{
    begin(it, LARGE, 3);
    rft_follower_tick(&it->follower, it->now); /* the anchor is open */
    rft_follower_tick(&it->follower, it->now);
    assert_non_null(it->follower.archive);
    assert_int_equal(unlink(rig_path(&it->rig, 1)), 0); /* version 2 */
    (void)look(it);
    apply(it, RIG_EPOCH, 1);
    (void)look(it);
    assert_nothing_new(it, "its file is not there");
}

/* It was replaced since its header was read. */
SCENE(a_file_cut_short_while_it_is_read_is_never_torn)
{
    begin(it, LARGE, 3);
    for (uint32_t i = 0; i < 3; i++)
        rft_follower_tick(&it->follower, it->now);
    kept_file first = rig_take_file(&it->rig, 0);
    cut(&first);
    (void)look(it);
    assert_nothing_new(it, "-00000001-");
    rig_put_back(&first);
    apply(it, RIG_EPOCH, 3);
}

/* Copied by a tool that takes files in any order. */
SCENE(files_may_come_in_any_order)
{
    begin(it, SMALL, 3);
    kept_file second = rig_take_file(&it->rig, 1);
    assert_int_equal(unlink(second.path), 0);
    apply(it, RIG_EPOCH, 1);
    rig_put_back(&second);
    apply(it, RIG_EPOCH, 3);
}

SCENE(limits_hold)
{
    begin(it, LARGE, 1);
    leave(it);
    it->rig.config.limits_version_bytes = 1000;
    follow(it);
    (void)look(it);
    assert_nothing_new(it, "limits.version_bytes");
    assert_int_equal(images_in_memory(it), 0);
}

/* Wherever a bit of a file is wrong, the user has the version before or the version itself. */
SCENE(no_flipped_bit_reaches_the_user)
{
    rig_open_with(&it->rig, SMALL, 2);
    kept_file second = rig_take_file(&it->rig, 1);
    for (size_t at = 0; at < second.count; at++) {
        flip(&second, at);
        follow(it);
        rft_image *image = expect(it, RIG_EPOCH, 1);
        (void)image;
        leave(it);
    }
    rig_put_back(&second);
}

/* Whichever call it is: the file is not called damaged, and nothing torn is delivered. */
SCENE(a_call_that_fails_costs_time_alone)
{
    const int reasons[] = {EIO, ESTALE, EACCES, EMFILE};
    begin(it, LARGE, 3);
    for (unsigned nth = 1;; nth++) {
        leave(it);
        follow(it);
        fail_from(nth, reasons[nth % COUNT_OF(reasons)], false);
        (void)look(it);
        bool hit = calls >= nth;
        fail_from(0, 0, false);
        rft_image *image = NULL;
        if (rft_mailbox_take(&it->mailbox, 0, &image, NULL) == REFIT_OK) {
            uint64_t version = image->id.version;
            assert_is(it, image, RIG_EPOCH, version);
            accept(it, image);
            release(it, image);
            if (version < 3) apply(it, RIG_EPOCH, 3);
        } else {
            apply(it, RIG_EPOCH, 3);
        }
        if (!hit) break;
    }
}

/* The folder's system is away for a while: the sentence says why, and the version stays. */
SCENE(a_system_that_is_away_is_waited_for)
{
    begin(it, LARGE, 3);
    for (uint32_t i = 0; i < 4; i++) /* the anchor is half read */
        rft_follower_tick(&it->follower, it->now);
    assert_non_null(it->follower.archive);
    fail_from(1, ESTALE, true);
    for (uint32_t i = 0; i < 3; i++)
        (void)look(it);
    assert_nothing_new(it, strerror(ESTALE));
    assert_int_equal(it->follower.report.state, RFT_SESSION_CONNECTING);
    fail_from(0, 0, false);
    apply(it, RIG_EPOCH, 3);
    fail_from(1, EACCES, true);
    (void)look(it);
    assert_nothing_new(it, strerror(EACCES));
    assert_int_equal(it->follower.report.version, 3);
    fail_from(0, 0, false);
    rig_keep(&it->rig, RIG_EPOCH, 4);
    apply(it, RIG_EPOCH, 4);
}

/* ---- The folder */

SCENE(a_folder_that_is_not_there_is_waited_for)
{
    begin(it, SMALL, 1);
    leave(it);
    char away[160];
    (void)snprintf(away, sizeof away, "%s/away", it->rig.root);
    assert_int_equal(rename(it->rig.folder, away), 0);
    heard_begin(REFIT_LOG_WARNING);
    follow(it);
    for (uint32_t i = 0; i < 3; i++)
        (void)look(it);
    assert_int_equal(it->follower.report.state, RFT_SESSION_CONNECTING);
    assert_int_equal(it->follower.report.path, REFIT_PATH_NONE);
    assert_nothing_new(it, it->rig.folder);
    assert_int_equal(heard_count("waits for its archive"), 1);
    assert_int_equal(rename(away, it->rig.folder), 0);
    apply(it, RIG_EPOCH, 1);
    assert_int_equal(it->follower.report.path, REFIT_PATH_ARCHIVE);
}

SCENE(a_folder_that_goes_away_takes_nothing_from_the_user)
{
    begin(it, SMALL, 2);
    (void)look(it);
    char away[160];
    (void)snprintf(away, sizeof away, "%s/away", it->rig.root);
    assert_int_equal(rename(it->rig.folder, away), 0);
    apply(it, RIG_EPOCH, 2); /* it waited in the mailbox */
    assert_int_equal(rename(away, it->rig.folder), 0);
    rig_keep(&it->rig, RIG_EPOCH, 3);
    apply(it, RIG_EPOCH, 3);
}

SCENE(an_empty_folder_and_other_files_are_no_versions)
{
    begin(it, SMALL, 0);
    char path[160];
    (void)snprintf(path, sizeof path, "%s/model.safetensors", it->rig.folder);
    rig_store(path, (const unsigned char *)"x", 1);
    (void)look(it);
    assert_int_equal(it->follower.report.state, RFT_SESSION_CURRENT);
    assert_nothing_new(it, "none that this worker has not had");
}

SCENE(without_a_folder_it_ends_after_the_idle_timeout)
{
    begin(it, SMALL, 1);
    leave(it);
    char away[160];
    (void)snprintf(away, sizeof away, "%s/away", it->rig.root);
    it->rig.config.broadcast_idle_timeout_ms = 60000;
    follow(it);
    apply(it, RIG_EPOCH, 1);
    assert_int_equal(rename(it->rig.folder, away), 0);
    int64_t end = it->now + INT64_C(120000000000);
    while (it->follower.report.final.status == REFIT_OK && it->now < end)
        (void)look(it);
    rft_image *image = NULL;
    assert_refused(rft_mailbox_take(&it->mailbox, 0, &image, error), REFIT_ERR_CLOSED,
                   "broadcast.idle_timeout_ms");
    assert_int_equal(rft_follower_tick_at(&it->follower), INT64_MAX);
}

/* The folder is away for a look right after a version that took long to read. */
SCENE(the_time_of_reading_is_not_silence)
{
    char away[160];
    begin(it, LARGE, 3);
    leave(it);
    (void)snprintf(away, sizeof away, "%s/away", it->rig.root);
    it->rig.config.broadcast_idle_timeout_ms = 60000;
    follow(it);
    rft_follower_tick(&it->follower, it->now);
    assert_non_null(it->follower.archive);
    ahead = INT64_C(90000000000);
    it->now += ahead;
    while (it->follower.archive != NULL)
        rft_follower_tick(&it->follower, it->now);
    assert_int_equal(rename(it->rig.folder, away), 0);
    (void)look(it);
    assert_int_equal(it->follower.report.final.status, REFIT_OK);
    assert_int_equal(rename(away, it->rig.folder), 0);
    apply(it, RIG_EPOCH, 3);
}

/* ---- Opening, memory */

SCENE(what_cannot_be_is_refused)
{
    rig_open(&it->rig, SMALL);
    it->rig.config.broadcast_shm = REFIT_SHM_REQUIRE;
    assert_refused(try_follow(it, error), REFIT_ERR_CONFIG, "broadcast.shm");
    it->rig.config.broadcast_shm = REFIT_SHM_AUTO;
    it->rig.config.broadcast_gpu = REFIT_GPU_REQUIRE;
    assert_refused(try_follow(it, error), REFIT_ERR_CONFIG, "broadcast.gpu");
    assert_null(rft_follower_folder("user://refit"));
    assert_string_equal(rft_follower_folder("archive:///mnt/weights"), "/mnt/weights");
    assert_string_equal(rft_follower_folder("archive://kept"), "kept");
}

/* Whichever request fails, the version comes the next time. */
SCENE(every_failed_allocation_is_got_over)
{
    for (uint64_t nth = 1;; nth++) {
        begin(it, SMALL, 2);
        apply(it, RIG_EPOCH, 2);
        rig_keep(&it->rig, RIG_EPOCH, 3);
        rig_close_archive(&it->rig);
        leave(it);
        failing_alloc_begin(nth);
        refit_error error;
        refit_status status = try_follow(it, &error);
        if (status == REFIT_OK) (void)look(it);
        bool failed = failing_alloc_stop();
        if (status == REFIT_OK) {
            (void)look(it);
            rft_image *image = take(it);
            assert_int_equal(image->id.version, 3);
        } else {
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
        leave(it);
        (void)failing_alloc_end();
        if (!failed) break;
    }
}

int main(void)
{
    return test_run("follower");
}
