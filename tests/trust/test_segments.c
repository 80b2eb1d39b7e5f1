/* What processes can do to each other through shared memory: a false trainer to a worker, a worker
 * to the trainer and to other workers, of the same user and of another. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/pairing.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

#define OTHER_USER 65534

/* Waits for the child, which is to end with status 0. */
static void await_child(pid_t child)
{
    int how = -1;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
}

/* ---- A worker that changes what the trainer shares */

static bool is_refused(long result, int code)
{
    return result == -1 && errno == code;
}

/* Every way to change memory that a descriptor leads to. 0: all were refused; else which was not.
 */
static int attack(const char *place)
{
    int fd = open(place, O_RDWR | O_CLOEXEC);
    if (fd < 0) return 1;
    if (!is_refused(pwrite(fd, "tampered", 8, 64), EPERM)) return 2;
    if (!is_refused(ftruncate(fd, 0), EPERM)) return 3;
    if (!is_refused(truncate(place, 0), EPERM)) return 4;
    if (!is_refused(open(place, O_WRONLY | O_TRUNC | O_CLOEXEC), EPERM)) return 5;
    int hole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (!is_refused(fallocate(fd, hole, 0, 4096), EPERM)) return 6;
    if (mmap(NULL, 64, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED) return 7;
    void *memory = mmap(NULL, 64, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return 8;
    if (!is_refused(mprotect(memory, 64, PROT_READ | PROT_WRITE), EACCES)) return 9;
    if (!is_refused(madvise(memory, 4096, MADV_REMOVE), EACCES)) return 10;
    close(fd);
    return 0;
}

/* In a process of the same user: attacks each segment of the trainer's. Exits with 0 if there were
 * at least `count` and none gave way. */
static void attack_trainer(pid_t trainer, int count)
{
    char folder[64], place[sizeof folder + NAME_MAX + 2], link[64];
    snprintf(folder, sizeof folder, "/proc/%ld/fd", (long)trainer);
    DIR *all = opendir(folder);
    if (all == NULL) _exit(100);
    for (struct dirent *entry; (entry = readdir(all)) != NULL;) {
        snprintf(place, sizeof place, "%s/%s", folder, entry->d_name);
        ssize_t length = readlink(place, link, sizeof link);
        if (length < 12 || memcmp(link, "/memfd:refit", 12) != 0) continue;
        int gave_way = attack(place);
        if (gave_way != 0) _exit(gave_way);
        count--;
    }
    _exit(count <= 0 ? 0 : 101);
}

TEST(the_same_user_cannot_change_what_workers_take)
{
    test_trainer trainer;
    raw_worker first, second;
    refit_config config = trainer_config();
    config.broadcast_slots = 2;
    trainer_open(&trainer, &config);
    raw_worker_open(&first, refit_publisher_endpoint(trainer.publisher), "first", true);
    raw_worker_join(&first);
    trainer_offer(&trainer, 1);
    raw_worker_stage(&first);
    assert_true(first.segment[0] != '\0');
    pid_t child = fork();
    if (child == 0) attack_trainer(getppid(), 2); /* the probe and the first slot */
    await_child(child);
    trainer_check_bytes(&first, 1);
    raw_worker_apply(&first);
    assert_ok(trainer_join(&trainer));
    raw_worker_say_released(&first, 1);

    /* A worker that joins now maps what was attacked; the trainer still writes it. */
    raw_worker_open(&second, refit_publisher_endpoint(trainer.publisher), "second", true);
    raw_worker_join(&second);
    raw_worker_stage(&second);
    assert_true(second.segment[0] != '\0');
    trainer_check_bytes(&second, 1);
    raw_worker_close(&first);
    raw_worker_close(&second);
    trainer_close(&trainer);
}

/* ---- A trainer that offers memory that it can change */

static int memory_of(uint64_t bytes, int seals)
{
    int fd = memfd_create("refit", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

/* A file that anyone may write. */
static int file_of(uint64_t bytes)
{
    char path[] = "/dev/shm/refit-test-XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fchmod(fd, 0666), 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(unlink(path), 0);
    return fd;
}

static void name_of(int fd, char name[RFT_SEGMENT_NAME_BYTES])
{
    struct stat file;
    assert_int_equal(fstat(fd, &file), 0);
    snprintf(name, RFT_SEGMENT_NAME_BYTES, "/proc/%ld/fd/%d:%" PRIx64, (long)getpid(), fd,
             (uint64_t)file.st_ino);
}

/* The subscriber takes the socket, and takes its version there. */
static void expect_socket(pairing *pair, const char *probe, const char *reason)
{
    char said[RFT_SENTENCE_BYTES];
    raw_hear(&pair->raw, RFT_HELLO);
    raw_say(&pair->raw, sample_welcome(PAIR_EPOCH, probe));
    raw_hear(&pair->raw, RFT_JOIN);
    assert_false(pair->raw.heard.as.join.shm);
    rft_view_print(pair->raw.heard.as.join.reason, said, sizeof said);
    if (strstr(said, reason) == NULL) fail_msg("it says: %s", said);
    raw_say(&pair->raw, sample_beat(PAIR_EPOCH));
    pair_apply(pair, 0, NULL);
    assert_int_equal(pair_describe(pair).path, REFIT_PATH_SOCKET);
}

TEST(a_probe_that_others_can_change_is_not_mapped)
{
    for (int way = 0; way < 5; way++) {
        static const int seals[] = {0, F_SEAL_SHRINK | F_SEAL_GROW,
                                    F_SEAL_GROW | F_SEAL_FUTURE_WRITE, 0,
                                    F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE};
        static const char *const reasons[] = {"not sealed", "not sealed", "not sealed",
                                              "not a segment", "not filled"};
        pairing pair;
        char name[RFT_SEGMENT_NAME_BYTES];
        int fd = way == 3 ? file_of(4096) : memory_of(4096, seals[way]);
        name_of(fd, name);
        pair_open(&pair, true, NULL);
        expect_socket(&pair, name, reasons[way]);
        pair_close(&pair);
        close(fd);
    }
}

TEST(an_older_trainers_memory_is_not_mapped)
{
    pairing pair;
    pair_open(&pair, true, NULL);
    expect_socket(&pair, "/refit-0123456789abcdef0123456789abcdef", "same refit at both ends");
    pair_close(&pair);
}

/* A probe in order, and then a slot that is cut short: no signal ends the worker. */
TEST(memory_cut_short_after_it_was_offered_does_no_harm)
{
    pairing pair;
    rft_segment slot;
    char name[RFT_SEGMENT_NAME_BYTES];
    pair_open(&pair, true, NULL);
    const sample_version *sample = &pair.samples[0];
    int fd = memory_of(RFT_SEQLOCK_BYTES + sample->manifest->store_bytes, F_SEAL_GROW);
    name_of(fd, name);
    raw_join(&pair.raw);
    assert_true(pair.raw.heard.as.join.shm);
    raw_say(&pair.raw, sample_manifest(sample, PAIR_EPOCH));
    raw_say(&pair.raw, sample_offer(sample, PAIR_EPOCH, 0, name, RFT_SEQLOCK_BYTES));
    assert_int_equal(ftruncate(fd, 0), 0);
    raw_say(&pair.raw, sample_seal(sample));
    raw_hear(&pair.raw, RFT_FAILED);
    assert_int_equal(pair.raw.heard.as.failed.code, REFIT_ERR_SECURITY);
    close(fd);
    raw_slot_open(&slot, sample);
    raw_say(&pair.raw, sample_offer(sample, PAIR_EPOCH, 0, slot.name, RFT_SEQLOCK_BYTES));
    raw_say(&pair.raw, sample_seal(sample));
    raw_hear_staged(&pair.raw, sample);
    pair_close(&pair);
    rft_segment_close(&slot);
}

/* ---- Another user */

static void write_all(int fd, const void *bytes, size_t count)
{
    if (write(fd, bytes, count) != (ssize_t)count) _exit(102);
}

/* As another user: makes a segment, tells its name, and waits until the pipe ends. */
static void lend_memory(int told, int until)
{
    rft_segment theirs;
    char byte;
    if (setgid(OTHER_USER) != 0 || setuid(OTHER_USER) != 0) _exit(103);
    if (rft_segment_create(&theirs, 4096, NULL) != REFIT_OK) _exit(104);
    write_all(told, theirs.name, sizeof theirs.name);
    _exit(read(until, &byte, 1) == 0 ? 0 : 105);
}

TEST(another_users_memory_is_not_mapped)
{
    int told[2], until[2];
    char name[RFT_SEGMENT_NAME_BYTES];
    if (geteuid() != 0) skip(); /* only root can become another user */
    assert_int_equal(pipe(told), 0);
    assert_int_equal(pipe(until), 0);
    pid_t child = fork();
    if (child == 0) {
        close(until[1]);
        lend_memory(told[1], until[0]);
    }
    assert_int_equal(read(told[0], name, sizeof name), sizeof name);
    pairing pair;
    pair_open(&pair, true, NULL);
    expect_socket(&pair, name, "another user");
    pair_close(&pair);
    close(until[1]);
    await_child(child);
    close(until[0]);
    close(told[0]);
    close(told[1]);
}

/* 0: the update is this version to the last byte. */
static int compare(const refit_update *update, uint64_t version)
{
    sample_version sample;
    sample_open(&sample, version);
    int differs = refit_update_version(update) == version ? 0 : 110;
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        if (refit_update_tensor(update, i, &tensor, &bytes, NULL) != REFIT_OK) return 111;
        const unsigned char *place = sample.image + sample.manifest->tensors[i].offset;
        if (memcmp(bytes, place, tensor.bytes) != 0) differs = 112;
    }
    sample_close(&sample);
    return differs;
}

/* As another user: takes one version. 0: through the socket, and exactly. */
static int take_one(int endpoint_from)
{
    char endpoint[128] = "";
    refit_config config = quick_config();
    refit_subscriber *subscriber;
    refit_update *update;
    refit_subscriber_info info = {.size = sizeof info};
    if (setgid(OTHER_USER) != 0 || setuid(OTHER_USER) != 0) return 103;
    if (read(endpoint_from, endpoint, sizeof endpoint - 1) <= 0) return 104;
    if (refit_subscriber_open(endpoint, &config, &subscriber, NULL) != REFIT_OK) return 105;
    if (refit_subscriber_next(subscriber, PAIR_LONG, &update, NULL) != REFIT_OK) return 106;
    if (refit_subscriber_describe(subscriber, &info, NULL) != REFIT_OK) return 107;
    if (info.path != REFIT_PATH_SOCKET) return 108;
    int differs = compare(update, 1);
    if (refit_update_accept(update, NULL) != REFIT_OK) return 109;
    refit_update_close(update);
    refit_subscriber_close(subscriber);
    return differs;
}

TEST(another_users_worker_takes_the_version_through_the_socket)
{
    int endpoint[2];
    test_trainer trainer;
    refit_config config = trainer_config();
    if (geteuid() != 0) skip(); /* only root can become another user */
    assert_int_equal(pipe(endpoint), 0);
    pid_t child = fork(); /* before there are threads, so that it can open a subscriber */
    if (child == 0) _exit(take_one(endpoint[0]));
    trainer_open(&trainer, &config);
    const char *text = refit_publisher_endpoint(trainer.publisher);
    assert_int_equal(write(endpoint[1], text, strlen(text)), strlen(text));
    trainer_wait_workers(&trainer, 1);
    trainer_start(&trainer, TRAINER_PUBLISH, 1);
    assert_ok(trainer_join(&trainer));
    await_child(child);
    trainer_close(&trainer);
    close(endpoint[0]);
    close(endpoint[1]);
}

int main(void)
{
    /* First what forks a child that works with threads. */
    return test_run("segments");
}
