/* Segments: sealed, read-only for others, gone with their owner however it ends. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/segment.h"
#include "subscriber/destinations.h"
#include "tests/support/descriptors.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/mapped.h"
#include "tests/support/test.h"

#define BYTES 100000u

/* A name of the right form, of no process. */
#define NOT_THERE "/proc/999999999/fd/3:1"

static bool can_attach(const char *name)
{
    rft_segment reader;
    bool there = rft_segment_attach(&reader, name, 1, NULL) == REFIT_OK;
    rft_segment_close(&reader);
    return there;
}

/* The descriptor's place, as any process of this user sees it. */
static const char *place_of(const rft_segment *segment, char path[RFT_SEGMENT_NAME_BYTES])
{
    strcpy(path, segment->name);
    *strchr(path, ':') = '\0';
    return path;
}

TEST(reader_sees_what_the_owner_writes)
{
    rft_segment owner, reader;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_int_equal(owner.bytes, BYTES);
    assert_int_equal(owner.memory[BYTES - 1], 0);
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    owner.memory[BYTES - 1] = 77;
    assert_int_equal(reader.memory[BYTES - 1], 77);
    rft_segment_close(&reader);
    assert_true(can_attach(owner.name));
    rft_segment_close(&owner);
}

TEST(owner_alone_may_open_it)
{
    rft_segment owner;
    struct stat file;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_int_equal(fstat(owner.fd, &file), 0);
    assert_int_equal(file.st_mode & 0777, 0600);
    assert_true((uint64_t)file.st_blocks * 512 >= BYTES);
    rft_segment_close(&owner);
}

TEST(closing_retires_but_mappings_stay)
{
    rft_segment owner, reader, late;
    char name[RFT_SEGMENT_NAME_BYTES];
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    memset(owner.memory, 5, BYTES);
    strcpy(name, owner.name);
    rft_segment_close(&owner);
    rft_segment_close(&owner);
    assert_int_equal(reader.memory[BYTES / 2], 5);
    assert_int_equal(rft_segment_attach(&late, name, BYTES, NULL), REFIT_ERR_NOT_FOUND);
    rft_segment_close(&reader);
}

/* What another process of this user does to memory that is being made: it opens the descriptor
 * before it is sealed, and maps the memory so that it can write it ever after. */
static int intruders; /* how many calls of memfd_create it is quick enough for */
static unsigned char *intrusion;

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);

int __wrap_memfd_create(const char *name, unsigned flags)
{
    int fd = __real_memfd_create(name, flags);
    if (fd < 0 || intruders == 0) return fd;
    intruders--;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int theirs = open(path, O_RDWR | O_CLOEXEC);
    assert_true(theirs >= 0);
    intrusion = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, theirs, 0);
    assert_ptr_not_equal(intrusion, MAP_FAILED);
    close(theirs);
    return fd;
}

TEST(memory_mapped_by_another_process_during_creation_is_not_used)
{
    rft_segment owner;
    refit_error error;
    int before = count_descriptors();
    intruders = 1;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_int_equal(intruders, 0);
    intrusion[0] = 99;
    assert_int_equal(owner.memory[0], 0);
    assert_int_equal(count_descriptors(), before + 1);
    rft_segment_close(&owner);
    munmap(intrusion, BYTES);
    intruders = 1000;
    assert_int_equal(rft_segment_create(&owner, BYTES, &error), REFIT_ERR_SYSTEM);
    assert_true(intruders > 0);
    intruders = 0;
    assert_int_equal(error.subsystem, EAGAIN);
    assert_says(&error, "another process");
    assert_int_equal(count_descriptors(), before);
}

/* Every way to change a file, by a descriptor that is open for writing. */
TEST(sealed_memory_cannot_be_changed_by_other_descriptors)
{
    rft_segment owner;
    char path[RFT_SEGMENT_NAME_BYTES];
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    int fd = open(place_of(&owner, path), O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, BYTES * 2), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(truncate(path, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(open(path, O_RDWR | O_TRUNC | O_CLOEXEC), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_ptr_equal(mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    assert_int_equal(errno, EPERM);
    void *memory = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    assert_int_equal(mprotect(memory, BYTES, PROT_READ | PROT_WRITE), -1);
    assert_int_equal(errno, EACCES);
    munmap(memory, BYTES);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    assert_int_equal(owner.memory[0], 0);
    owner.memory[0] = 1; /* the owner alone still writes it */
    close(fd);
    rft_segment_close(&owner);
}

/* Memory of this user that is not a segment, as a false trainer would name it. */
static refit_status try_to_attach(int fd, uint64_t inode, refit_error *error)
{
    rft_segment reader;
    char name[RFT_SEGMENT_NAME_BYTES];
    struct stat file;
    int before = count_descriptors();
    assert_int_equal(fstat(fd, &file), 0);
    snprintf(name, sizeof name, "/proc/%d/fd/%d:%" PRIx64, getpid(), fd,
             inode == 0 ? (uint64_t)file.st_ino : inode);
    refit_status status = rft_segment_attach(&reader, name, BYTES, error);
    assert_null(reader.memory);
    assert_int_equal(count_descriptors(), before);
    return status;
}

static int memory_of(const char *name, int seals)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

TEST(memory_that_is_not_sealed_is_refused)
{
    const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
    refit_error error;
    for (int i = 0; i < 5; i++) {
        static const int missing[] = {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE, -1, 0};
        int fd = memory_of(i == 4 ? "other" : "refit", all & ~missing[i]);
        assert_int_equal(try_to_attach(fd, 0, &error), REFIT_ERR_SECURITY);
        assert_says(&error, i == 4 ? "not a segment" : "not sealed");
        close(fd);
    }
    char path[] = "/dev/shm/refit-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(try_to_attach(fd, 0, &error), REFIT_ERR_SECURITY);
    close(fd);
    fd = memory_of("refit", all);
    assert_int_equal(try_to_attach(fd, 1, &error), REFIT_ERR_NOT_FOUND); /* used again since */
    close(fd);
}

/* To look at what is named opens nothing: the writer of a pipe would see its reader come. */
TEST(a_pipe_is_refused_unopened)
{
    int ends[2];
    refit_error error;
    assert_int_equal(pipe(ends), 0);
    close(ends[0]);
    assert_int_equal(try_to_attach(ends[1], 0, &error), REFIT_ERR_SECURITY);
    (void)signal(SIGPIPE, SIG_IGN);
    assert_int_equal(write(ends[1], "", 1), -1);
    assert_int_equal(errno, EPIPE);
    (void)signal(SIGPIPE, SIG_DFL);
    close(ends[1]);
}

/* A child that is forked has all descriptors, and would keep the memory. */
TEST(a_reader_keeps_no_descriptor)
{
    rft_segment owner, reader, locker;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    int descriptors = count_descriptors();
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    assert_int_equal(count_descriptors(), descriptors);
    assert_ok(rft_segment_attach_open(&locker, owner.name, BYTES, NULL));
    assert_int_equal(count_descriptors(), descriptors + 1);
    rft_segment_close(&locker);
    assert_int_equal(count_descriptors(), descriptors);
    rft_segment_close(&reader);
    rft_segment_close(&owner);
}

/* Its copy would keep the memory after the owner's end. */
TEST(a_forked_child_keeps_no_descriptor_of_an_owner)
{
    rft_segment owner;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    pid_t child = fork();
    if (child == 0) _exit(fcntl(owner.fd, F_GETFD) >= 0 ? 1 : 0);
    assert_child_succeeds(child);
    assert_true(can_attach(owner.name));
    rft_segment_close(&owner);
}

/* Opened for reading, it would be waited for as long as the system gives the lease's holder. */
TEST(a_read_lock_of_another_process_holds_nothing_up)
{
    rft_segment owner, reader;
    refit_error error;
    char path[40];
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    snprintf(path, sizeof path, "/proc/self/fd/%d", owner.fd);
    int held = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(held >= 0);
    signal(SIGIO, SIG_IGN);
    if (fcntl(held, F_SETLEASE, F_WRLCK) == 0) {
        assert_int_equal(rft_segment_attach(&reader, owner.name, BYTES, &error), REFIT_ERR_SYSTEM);
        assert_int_equal(error.subsystem, EWOULDBLOCK);
        assert_int_equal(fcntl(held, F_SETLEASE, F_UNLCK), 0);
    }
    close(held);
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    rft_segment_close(&reader);
    rft_segment_close(&owner);
}

TEST(what_was_retired_is_known_to_be)
{
    rft_segment owner, reader, next;
    struct rlimit before, none;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    int descriptors = count_descriptors(), fd = owner.fd;
    assert_false(rft_segment_is_retired(&reader));
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 0; /* to look takes no descriptor */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    bool retired = rft_segment_is_retired(&reader);
    refit_status attached = rft_segment_attach(&next, reader.name, BYTES, NULL);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_false(retired);
    assert_int_equal(attached, REFIT_ERR_SYSTEM);
    assert_int_equal(count_descriptors(), descriptors);
    rft_segment_retire(&owner);
    assert_true(rft_segment_is_retired(&reader));
    assert_ok(rft_segment_create(&next, BYTES, NULL));
    assert_int_equal(next.fd, fd); /* the descriptor is used again, and is another's */
    assert_true(rft_segment_is_retired(&reader));
    assert_string_not_equal(next.name, reader.name);
    rft_segment_close(&next);
    rft_segment_close(&owner);
    rft_segment_close(&reader);
}

/* In a child that has no standard input, so that files are opened as descriptor 0: 0, or at which
 * step it went wrong. */
static int work_without_input(void)
{
    rft_segment first, reader, second;
    if (rft_segment_create(&first, BYTES, NULL) != REFIT_OK) return 1;
    if (rft_segment_attach(&reader, first.name, BYTES, NULL) != REFIT_OK) return 2;
    close(0);
    if (rft_segment_is_retired(&reader)) return 3;
    if (rft_segment_create(&second, BYTES, NULL) != REFIT_OK || second.fd != 0) return 5;
    char name[RFT_SEGMENT_NAME_BYTES];
    strcpy(name, second.name);
    rft_segment_close(&second);
    if (fcntl(0, F_GETFD) >= 0 || can_attach(name)) return 6;
    rft_segment_close(&reader);
    rft_segment_close(&first);
    return 0;
}

TEST(a_process_without_standard_input_shares_memory_too)
{
    int status = -1;
    pid_t child = fork();
    if (child == 0) _exit(work_without_input());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

TEST(mapping_that_is_too_short_is_refused)
{
    rft_segment owner, reader;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_int_equal(rft_segment_attach(&reader, owner.name, BYTES + 1, NULL), REFIT_ERR_PROTOCOL);
    assert_null(reader.memory);
    rft_segment_close(&owner);
}

TEST(foreign_names_are_refused)
{
    static const char *const names[] = {
        "",
        "/",
        "/etc/passwd",
        "/proc/1/fd/1",
        "/proc/1/fd/1:",
        "/proc/1/fd/1:1:",
        "/proc/1/fd/1:0x1",
        "/proc/1/fd/1:01",
        "/proc/1/fd/ 1:1",
        "/proc/-1/fd/1:1",
        "/proc/1/../../etc/passwd:1",
        "/proc/self/fd/1:1",
        "/proc/99999999999999999999/fd/1:1",
        "/proc/1/fd/1:11111111111111111",
        "/refit-0123456789abcdef0123456789abcdef",
    };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        rft_segment reader;
        assert_int_equal(rft_segment_attach(&reader, names[i], 1, NULL), REFIT_ERR_PROTOCOL);
    }
}

TEST(more_than_is_free_is_an_error_with_numbers)
{
    rft_segment owner;
    refit_error error;
    assert_int_equal(rft_segment_create(&owner, UINT64_C(1) << 60, &error), REFIT_ERR_SYSTEM);
    assert_int_equal(error.subsystem, ENOMEM);
    assert_says(&error, "1152921504606846976");
    assert_int_equal(rft_segment_create(&owner, UINT64_MAX, &error), REFIT_ERR_SYSTEM);
    assert_null(owner.memory);
    rft_segment_close(&owner);
}

TEST(private_memory_has_no_name)
{
    rft_segment store;
    assert_ok(rft_segment_create_private(&store, BYTES, NULL));
    assert_string_equal(store.name, "");
    memset(store.memory, 1, BYTES);
    rft_segment_close(&store);
    assert_null(store.memory);
    assert_int_equal(rft_segment_create_private(&store, UINT64_C(1) << 60, NULL),
                     REFIT_ERR_HOST_MEMORY);
    assert_int_equal(rft_segment_create_sparse(&store, UINT64_C(1) << 60, NULL),
                     REFIT_ERR_HOST_MEMORY);
}

/* Bytes of memory and swap of this machine; 0 where that cannot be seen. */
static uint64_t all_memory(void)
{
    char line[128];
    unsigned long long kib, sum = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    if (file == NULL) return 0;
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "MemTotal: %llu kB", &kib) == 1 ||
            sscanf(line, "SwapTotal: %llu kB", &kib) == 1)
            sum += kib * 1024;
    (void)fclose(file);
    return sum;
}

/* More than the machine has: the system refuses that where it is promised, by its usual setting. */
static uint64_t too_much(void)
{
    rft_segment memory;
    const uint64_t bytes = all_memory() + (UINT64_C(1) << 30);
    if (rft_segment_create_private(&memory, bytes, NULL) != REFIT_OK) return bytes;
    rft_segment_close(&memory);
    return 0;
}

/* Room for the old bytes of everything, of which little is used. */
TEST(room_for_the_worst_case_may_be_more_than_there_is)
{
    const uint64_t bytes = too_much();
    if (bytes == 0) skip(); /* this system refuses nothing */
    rft_segment memory;
    assert_ok(rft_segment_create_sparse(&memory, bytes, NULL));
    memory.memory[0] = memory.memory[bytes - 1] = 1;
    rft_segment_close(&memory);

    rft_rollback notes = {.last = UINT64_MAX};
    assert_ok(rft_rollback_prepare(&notes, 1, bytes, NULL));
    rft_rollback_reset(&notes);
}

TEST(nothing_at_all_fits_too)
{
    rft_segment owner, reader;
    assert_ok(rft_segment_create(&owner, 0, NULL));
    assert_ok(rft_segment_attach(&reader, owner.name, 0, NULL));
    rft_segment_close(&reader);
    rft_segment_close(&owner);
}

/* A child that makes a segment, tells its name, and waits to be killed. */
static pid_t owner_start(char name[RFT_SEGMENT_NAME_BYTES])
{
    int pipe_fds[2];
    assert_int_equal(pipe(pipe_fds), 0);
    pid_t child = fork();
    if (child == 0) {
        rft_segment owner;
        if (rft_segment_create(&owner, BYTES, NULL) != REFIT_OK) _exit(1);
        if (write(pipe_fds[1], owner.name, sizeof owner.name) < 0) _exit(1);
        child_waits();
    }
    assert_int_equal(read(pipe_fds[0], name, RFT_SEGMENT_NAME_BYTES), RFT_SEGMENT_NAME_BYTES);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    return child;
}

TEST(a_dead_owner_leaves_nothing)
{
    char name[RFT_SEGMENT_NAME_BYTES];
    rft_segment reader;
    pid_t owner = owner_start(name);
    assert_ok(rft_segment_attach(&reader, name, BYTES, NULL));
    assert_false(rft_segment_is_retired(&reader));
    kill(owner, SIGKILL);
    waitpid(owner, NULL, 0);
    assert_true(rft_segment_is_retired(&reader));
    assert_false(can_attach(name));
    assert_int_equal(reader.memory[BYTES - 1], 0);
    rft_segment_close(&reader);
    assert_false(can_attach(NOT_THERE));
}

TEST(kept_memory_outlives_its_segment)
{
    rft_segment owner, reader;
    void *first, *second;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    owner.memory[7] = 42;
    const unsigned char *there = reader.memory;
    assert_ok(rft_segment_retain(&reader, 100, &first, NULL));
    assert_ok(rft_segment_retain(&reader, 0, &second, NULL));
    assert_int_equal((uintptr_t)first % alignof(max_align_t), 0);
    memset(first, 1, 100);
    rft_segment_release(first);
    rft_segment_close(&reader);
    rft_segment_close(&owner);
    assert_int_equal(there[7], 42);
    assert_true(is_mapped(there));
    rft_segment_release(second);
    assert_false(is_mapped(there));
    rft_segment_release(NULL);
}

/* In a child: 0 if what it has mapped in the place of the parent's is still there afterwards. */
static int release_in_child(void *kept, unsigned char *there)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    void *mine = mmap(there, BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mine != there) return 1;
    rft_segment_release(kept);
    return is_mapped(mine) ? 0 : 2;
}

TEST(forked_child_unmaps_nothing_of_its_own)
{
    rft_segment memory;
    void *kept;
    int status = -1;
    assert_ok(rft_segment_create_private(&memory, BYTES, NULL));
    unsigned char *there = memory.memory;
    assert_ok(rft_segment_retain(&memory, 1, &kept, NULL));
    rft_segment_close(&memory);
    pid_t child = fork();
    if (child == 0) _exit(release_in_child(kept, there));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    rft_segment_release(kept);
    assert_false(is_mapped(there));
}

/* An engine that changes a weight while it loads it. */
TEST(what_is_written_into_a_view_stays_there_until_it_is_reset)
{
    rft_segment owner, reader;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    memset(owner.memory, 5, BYTES);
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    assert_ptr_not_equal(reader.view, reader.memory);
    reader.view[BYTES / 2] += 2;
    assert_int_equal(reader.view[BYTES / 2], 7);
    assert_int_equal(reader.memory[BYTES / 2], 5);
    assert_int_equal(owner.memory[BYTES / 2], 5);
    owner.memory[BYTES / 2] = 6;
    rft_segment_reset_view(&reader);
    assert_int_equal(reader.view[BYTES / 2], 6);
    rft_segment_close(&reader);
    rft_segment_close(&owner);
}

static bool is_resident(unsigned char *at)
{
    uint64_t page = 0, bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    off_t place = (off_t)((uintptr_t)at / bytes * sizeof page);
    assert_int_equal(pread(fd, &page, sizeof page, place), sizeof page);
    close(fd);
    return page >> 63 != 0;
}

/* Its pages stay mapped for the next reader. */
TEST(a_view_that_was_only_read_is_left_as_it_is)
{
    rft_segment owner, reader;
    volatile unsigned char *bytes;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    bytes = reader.view;
    assert_int_equal(bytes[BYTES - 1], 0);
    rft_segment_reset_view(&reader);
    assert_true(is_resident(reader.view + BYTES - 1));
    reader.view[0] = 1;
    rft_segment_reset_view(&reader);
    assert_false(is_resident(reader.view));
    rft_segment_close(&reader);
    rft_segment_close(&owner);
}

TEST(a_view_is_kept_with_its_segment)
{
    rft_segment owner, reader;
    void *kept;
    assert_ok(rft_segment_create(&owner, BYTES, NULL));
    assert_ok(rft_segment_attach(&reader, owner.name, BYTES, NULL));
    unsigned char *view = reader.view;
    assert_ok(rft_segment_retain(&reader, 1, &kept, NULL));
    rft_segment_close(&reader);
    assert_true(is_mapped(view));
    rft_segment_release(kept);
    assert_false(is_mapped(view));
    rft_segment_close(&owner);
}

TEST(keeping_survives_every_failed_allocation)
{
    rft_segment memory;
    void *kept = NULL;
    assert_ok(rft_segment_create_private(&memory, BYTES, NULL));
    assert_int_equal(rft_segment_retain(&memory, SIZE_MAX, &kept, NULL), REFIT_ERR_HOST_MEMORY);
    for (uint64_t nth = 1; nth <= 2; nth++) {
        failing_alloc_begin(nth);
        refit_status status = rft_segment_retain(&memory, 1, &kept, NULL);
        assert_true(failing_alloc_end());
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_null(kept);
    rft_segment_close(&memory);
}

int main(void)
{
    return test_run("segment");
}
