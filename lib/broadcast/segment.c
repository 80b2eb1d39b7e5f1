/*
 * Shared memory by name, with two protections that POSIX does not give. The memory is taken when
 * the segment is made, so that a full /dev/shm is an error and not a signal later; and the owner
 * holds a lock on the file, which the kernel drops when it dies however it dies, so that the next
 * owner can tell an orphan from a living segment.
 *
 * Between making the file and locking it a sweep could take it for an orphan: the owner looks
 * afterwards whether the file still has its name, and else makes another.
 */
#include "broadcast/segment.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/random.h"

#define FOLDER      "/dev/shm"
#define NAME_PREFIX "/refit-"
#define NAME_DIGITS 32
#define NAME_TRIES  8

static bool name_is_ours(const char *name)
{
    size_t prefix = strlen(NAME_PREFIX);
    return strncmp(name, NAME_PREFIX, prefix) == 0 &&
           strspn(name + prefix, "0123456789abcdef") == NAME_DIGITS &&
           name[prefix + NAME_DIGITS] == '\0';
}

/* ---- Sweeping */

static bool sweep_one(int folder, const char *file)
{
    int fd = openat(folder, file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return false;
    bool orphan = flock(fd, LOCK_EX | LOCK_NB) == 0 && unlinkat(folder, file, 0) == 0;
    close(fd);
    return orphan;
}

uint32_t rft_segment_sweep(void)
{
    uint32_t count = 0;
    DIR *folder = opendir(FOLDER);
    if (folder == NULL) return 0;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char name[sizeof entry->d_name + 2];
        snprintf(name, sizeof name, "/%s", entry->d_name);
        if (name_is_ours(name) && sweep_one(dirfd(folder), entry->d_name)) count++;
    }
    closedir(folder);
    return count;
}

/* ---- Creating */

static refit_status name_draw(char name[RFT_SEGMENT_NAME_BYTES], refit_error *error)
{
    uint64_t high, low;
    RFT_TRY(rft_random_u64(&high, error));
    RFT_TRY(rft_random_u64(&low, error));
    snprintf(name, RFT_SEGMENT_NAME_BYTES, NAME_PREFIX "%016" PRIx64 "%016" PRIx64, high, low);
    return REFIT_OK;
}

/* Locked, and still under its name. */
static bool file_own(int fd)
{
    struct stat file;
    return flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &file) == 0 && file.st_nlink > 0;
}

static refit_status file_make(rft_segment *segment, refit_error *error)
{
    for (int i = 0; i < NAME_TRIES; i++) {
        RFT_TRY(name_draw(segment->name, error));
        segment->fd = shm_open(segment->name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (segment->fd < 0) break;
        if (file_own(segment->fd)) return REFIT_OK;
        (void)shm_unlink(segment->name); /* unless a sweep has */
        close(segment->fd);
        segment->fd = -1;
    }
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno, "no file could be made in " FOLDER ": %s",
                        strerror(errno));
}

static refit_status file_failed(uint64_t bytes, int code, refit_error *error)
{
    struct statvfs room = {0};
    (void)statvfs(FOLDER, &room);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        FOLDER " has %" PRIu64 " bytes left of the %" PRIu64
                               " needed (%s): enlarge it, or set broadcast.shm: off",
                        (uint64_t)room.f_bavail * room.f_frsize, bytes, strerror(code));
}

/* Asks for the room first: a store that cannot fit is not to drive others out of memory on its way
 * to the error. */
static refit_status file_reserve(int fd, uint64_t bytes, refit_error *error)
{
    struct statvfs room;
    if (bytes > INT64_MAX) return file_failed(bytes, EFBIG, error);
    if (statvfs(FOLDER, &room) == 0 && bytes / room.f_frsize > room.f_bavail) {
        return file_failed(bytes, ENOSPC, error);
    }
    int code;
    do {
        code = posix_fallocate(fd, 0, (off_t)bytes);
    } while (code == EINTR);
    return code == 0 ? REFIT_OK : file_failed(bytes, code, error);
}

/* Shared memory that is reserved is mapped at once, so that writing it meets no page faults. A
 * forked child has no use for any of it, and would make the owner copy every page that it writes.
 */
static refit_status memory_map(rft_segment *segment, uint64_t bytes, int protection, int flags,
                               int fd, refit_error *error)
{
    if (fd >= 0 && (protection & PROT_WRITE) != 0) flags |= MAP_POPULATE;
    void *memory = bytes > SIZE_MAX ? MAP_FAILED : mmap(NULL, bytes, protection, flags, fd, 0);
    if (memory == MAP_FAILED) {
        return rft_fail_sub(error, fd < 0 ? REFIT_ERR_HOST_MEMORY : REFIT_ERR_SYSTEM, errno,
                            "%" PRIu64 " bytes could not be mapped: %s", bytes, strerror(errno));
    }
    (void)madvise(memory, bytes, MADV_DONTFORK);
    if (fd < 0) (void)madvise(memory, bytes, MADV_HUGEPAGE);
    segment->memory = memory;
    segment->bytes = bytes;
    return REFIT_OK;
}

static void segment_reset(rft_segment *segment)
{
    *segment = (rft_segment){.fd = -1};
}

refit_status rft_segment_create(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    refit_status status;
    uint64_t room = bytes == 0 ? 1 : bytes;
    segment_reset(segment);
    (void)rft_segment_sweep();
    RFT_TRY_GOTO(file_make(segment, error), forget);
    RFT_TRY_GOTO(file_reserve(segment->fd, room, error), undo_file);
    RFT_TRY_GOTO(memory_map(segment, room, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, error),
                 undo_file);
    return REFIT_OK;

undo_file:
    (void)shm_unlink(segment->name);
    close(segment->fd);
forget:
    segment_reset(segment);
    return status;
}

static refit_status create_private(rft_segment *segment, uint64_t bytes, int flags,
                                   refit_error *error)
{
    segment_reset(segment);
    return memory_map(segment, bytes == 0 ? 1 : bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, error);
}

refit_status rft_segment_create_private(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    return create_private(segment, bytes, 0, error);
}

refit_status rft_segment_create_sparse(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    return create_private(segment, bytes, MAP_NORESERVE, error);
}

/* ---- Attaching */

static refit_status file_open(const char *name, int *fd, refit_error *error)
{
    *fd = shm_open(name, O_RDONLY | O_CLOEXEC, 0);
    if (*fd >= 0) return REFIT_OK;
    int code = errno;
    return rft_fail_sub(error, code == ENOENT ? REFIT_ERR_NOT_FOUND : REFIT_ERR_SYSTEM, code,
                        "shared memory %s could not be opened: %s", name, strerror(code));
}

static refit_status file_check(int fd, const char *name, uint64_t bytes, refit_error *error)
{
    struct stat file;
    if (fstat(fd, &file) != 0) {
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno, "shared memory %s cannot be read: %s",
                            name, strerror(errno));
    }
    RFT_REFUSE_IF(file.st_size < 0 || (uint64_t)file.st_size < bytes, error, REFIT_ERR_PROTOCOL,
                  "shared memory %s has %jd bytes instead of %" PRIu64, name,
                  (intmax_t)file.st_size, bytes);
    return REFIT_OK;
}

refit_status rft_segment_attach(rft_segment *segment, const char *name, uint64_t bytes,
                                refit_error *error)
{
    int fd = -1;
    uint64_t room = bytes == 0 ? 1 : bytes;
    segment_reset(segment);
    RFT_REFUSE_IF(!name_is_ours(name), error, REFIT_ERR_PROTOCOL,
                  "the name of a shared-memory segment is not one that refit gives");
    RFT_TRY(file_open(name, &fd, error));
    refit_status status = file_check(fd, name, room, error);
    if (status == REFIT_OK) status = memory_map(segment, room, PROT_READ, MAP_SHARED, fd, error);
    close(fd);
    if (status == REFIT_OK) strcpy(segment->name, name);
    return status;
}

bool rft_segment_is_retired(const rft_segment *segment)
{
    int fd = shm_open(segment->name, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return errno == ENOENT;
    close(fd);
    return false;
}

void rft_segment_unlink(rft_segment *segment)
{
    if (segment->memory == NULL || segment->fd < 0) return;
    (void)shm_unlink(segment->name);
    close(segment->fd);
    segment->fd = -1;
    segment->name[0] = '\0';
}

/* ---- Closing */

struct rft_kept {
    atomic_uint users; /* the segment is one until it is closed */
    pid_t process;     /* a forked child has nothing there, or by then something of its own */
    void *memory;
    uint64_t bytes;
};

/* What stands before the caller's room. */
typedef struct keep_header {
    alignas(max_align_t) rft_kept *kept;
} keep_header;

static void kept_leave(rft_kept *kept)
{
    if (atomic_fetch_sub(&kept->users, 1) > 1) return;
    if (kept->process == getpid()) munmap(kept->memory, kept->bytes);
    rft_free(kept);
}

static refit_status segment_share(rft_segment *segment, refit_error *error)
{
    if (segment->kept != NULL) return REFIT_OK;
    rft_kept *kept = rft_calloc(1, sizeof *kept);
    RFT_REFUSE_IF(kept == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to keep a mapping");
    kept->process = getpid();
    kept->memory = segment->memory;
    kept->bytes = segment->bytes;
    atomic_init(&kept->users, 1);
    segment->kept = kept;
    return REFIT_OK;
}

refit_status rft_segment_keep(rft_segment *segment, size_t room, void **out, refit_error *error)
{
    keep_header *header =
        room > SIZE_MAX - sizeof *header ? NULL : rft_calloc(1, sizeof *header + room);
    RFT_REFUSE_IF(header == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to keep a mapping");
    refit_status status = segment_share(segment, error);
    if (status != REFIT_OK) {
        rft_free(header);
        return status;
    }
    header->kept = segment->kept;
    atomic_fetch_add(&segment->kept->users, 1);
    *out = header + 1;
    return REFIT_OK;
}

void rft_segment_unkeep(void *out)
{
    if (out == NULL) return;
    keep_header *header = (keep_header *)out - 1;
    kept_leave(header->kept);
    rft_free(header);
}

void rft_segment_close(rft_segment *segment)
{
    if (segment->memory == NULL) return;
    rft_segment_unlink(segment);
    if (segment->kept != NULL) {
        kept_leave(segment->kept);
    } else {
        munmap(segment->memory, segment->bytes);
    }
    segment_reset(segment);
}
