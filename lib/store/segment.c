/*
 * Sealed memory, and the two locks that lie in it. F_SEAL_SHRINK and F_SEAL_GROW keep its length,
 * F_SEAL_FUTURE_WRITE (Linux 5.1) leaves the mappings that are there writable and refuses every
 * other way to write: so the owner maps it first, and seals it then.
 *
 * Another process of the owner's user can open the descriptor in /proc before it is sealed. To have
 * a writable mapping it has to have opened it for writing; the kernel grants a read lease only
 * where no process has, so the owner asks for one once the seals are on, and else makes another
 * file.
 *
 * A user of a reader may write what it is given, as engines do with the weights that they load. It
 * is given a mapping of its own for that, in which a write copies a page. Seqlock, digests and the
 * base of the next version are read in the other one, where nothing but the owner's bytes is.
 *
 * The memory is taken when the segment is made, so that too little of it is an error and not a
 * signal later. It does not count against the size of /dev/shm, and the kernel ends processes
 * rather than refuse such memory: what is free is looked at first.
 */
#include "store/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/forks.h"
#include "base/user.h"
#include "memory/budget.h"
#include "memory/fork_map.h"
#include "memory/procfile.h"
#include "memory/slab_pins.h"

/* Of Linux, where the C library's headers are older. */
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define MEMFD_LINK  "/memfd:refit (deleted)" /* of rft_memory_file */
#define MAKE_TRIES  8
#define BLOCK_BYTES 512 /* of st_blocks */
#define PLACE_BYTES 40  /* "/proc/PID/fd/FD" */
#define SEALS       (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE)

/* ---- Names */

typedef struct segment_place {
    char path[PLACE_BYTES];
    uint64_t inode; /* descriptors are used again, inodes are not */
} segment_place;

static void name_print(char name[RFT_SEGMENT_NAME_BYTES], unsigned process, unsigned fd,
                       uint64_t inode)
{
    snprintf(name, RFT_SEGMENT_NAME_BYTES, "/proc/%u/fd/%u:%" PRIx64, process, fd, inode);
}

/* False: not a name that name_print makes. */
static bool name_read(const char *name, segment_place *place)
{
    unsigned process, fd;
    char canonical[RFT_SEGMENT_NAME_BYTES];
    if (sscanf(name, "/proc/%9u/fd/%9u:%16" SCNx64, &process, &fd, &place->inode) != 3)
        return false;
    name_print(canonical, process, fd, place->inode);
    snprintf(place->path, sizeof place->path, "/proc/%u/fd/%u", process, fd);
    return strcmp(name, canonical) == 0;
}

#define BOOT_ID       "/proc/sys/kernel/random/boot_id"
#define BOOT_ID_BYTES 37 /* with its end */

void rft_segment_place(char place[RFT_SEGMENT_PLACE_BYTES])
{
    char boot[BOOT_ID_BYTES];
    struct stat space;
    place[0] = '\0';
    if (!rft_procfile_read(BOOT_ID, boot, sizeof boot)) return;
    if (stat("/proc/self/ns/pid", &space) != 0) return;
    boot[strcspn(boot, "\n/")] = '\0';
    snprintf(place, RFT_SEGMENT_PLACE_BYTES, "%s/%lu/%ju", boot, (unsigned long)geteuid(),
             (uintmax_t)space.st_ino);
}

bool rft_segment_place_is_near(const char *one, const char *other)
{
    size_t length = strcspn(one, "/");
    return length > 0 && strncmp(one, other, length + 1) == 0;
}

/* ---- Mapping */

static refit_status map_failed(uint64_t bytes, int fd, refit_error *error)
{
    return rft_fail_sub(error, fd < 0 ? REFIT_ERR_HOST_MEMORY : REFIT_ERR_SYSTEM, errno,
                        "%" PRIu64 " bytes could not be mapped: %s", bytes, strerror(errno));
}

static refit_status memory_map(rft_segment *segment, uint64_t bytes, int protection, int flags,
                               int fd, refit_error *error)
{
    void *memory = bytes > SIZE_MAX ? MAP_FAILED : mmap(NULL, bytes, protection, flags, fd, 0);
    if (memory == MAP_FAILED) return map_failed(bytes, fd, error);
    /* A forked child has no use for any of it, and would make the owner copy every page that it
     * writes. */
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

/* ---- Creating */

static refit_status file_failed(int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "no sealed memory could be made (memfd_create, Linux 5.1 or newer): %s",
                        strerror(code));
}

static const char *source_of(const rft_budget *room)
{
    return room->source == NULL ? "no account" : room->source;
}

static refit_status room_failed(uint64_t bytes, const rft_budget *room, int code,
                                refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "%" PRIu64 " bytes of shared memory could not be had (%s; %" PRIu64
                        " are free by %s): make room, or halve what is needed with "
                        "broadcast.slots: 1",
                        bytes, strerror(code), room->free_bytes, source_of(room));
}

static refit_status file_make(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    segment->fd = rft_memory_file(bytes);
    if (segment->fd < 0) return file_failed(errno, error);
    rft_forks_keep(segment->fd);
    return REFIT_OK;
}

/* The lease is given back at once. A process that opens the file meanwhile makes the kernel send a
 * signal: SIGURG, which is ignored unless asked for. */
static bool owner_alone_writes(int fd)
{
    bool alone = fcntl(fd, F_SETSIG, SIGURG) == 0 && fcntl(fd, F_SETLEASE, F_RDLCK) == 0;
    if (alone) (void)fcntl(fd, F_SETLEASE, F_UNLCK);
    return alone;
}

static refit_status file_seal(int fd, refit_error *error)
{
    if (fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) != 0) return file_failed(errno, error);
    if (owner_alone_writes(fd)) return REFIT_OK;
    int code = errno;
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "another process of this user opened shared memory while it was made (%s)",
                        strerror(code));
}

static refit_status file_name(rft_segment *segment, refit_error *error)
{
    struct stat file;
    if (fstat(segment->fd, &file) != 0) return file_failed(errno, error);
    name_print(segment->name, (unsigned)getpid(), (unsigned)segment->fd, file.st_ino);
    return REFIT_OK;
}

static refit_status sealed_make(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    refit_status status;
    segment_reset(segment);
    RFT_TRY_GOTO(file_make(segment, bytes, error), undo);
    RFT_TRY_GOTO(memory_map(segment, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, error),
                 undo);
    RFT_TRY_GOTO(file_seal(segment->fd, error), undo);
    RFT_TRY_GOTO(file_name(segment, error), undo);
    return REFIT_OK;

undo:
    if (segment->memory != NULL) munmap(segment->memory, segment->bytes);
    rft_forks_close(segment->fd);
    segment_reset(segment);
    return status;
}

/* A store that cannot fit is not to drive others out of memory on its way to the error. */
static refit_status room_check(uint64_t bytes, rft_budget *room, refit_error *error)
{
    rft_budget_free("", room);
    if (bytes > INT64_MAX) return room_failed(bytes, room, EFBIG, error);
    return bytes > room->free_bytes ? room_failed(bytes, room, ENOMEM, error) : REFIT_OK;
}

static bool is_filled(int fd, uint64_t bytes)
{
    struct stat file;
    return fstat(fd, &file) == 0 && (uint64_t)file.st_blocks * BLOCK_BYTES >= bytes;
}

bool rft_segment_is_filled(const rft_segment *segment)
{
    return is_filled(segment->fd, segment->bytes);
}

/* Taken through the mapping, by several threads, it is mapped as well, so that writing it meets no
 * page faults. A kernel that does not know how (before Linux 5.14) would answer with a signal where
 * there is not so much, and an emulator (QEMU's) takes the advice and does nothing: there the file
 * is given its room, and the faults come later. */
static refit_status room_take(rft_segment *segment, const rft_budget *room, refit_error *error)
{
    int code;
    refit_error why = {0};
    if (madvise(segment->memory, 1, MADV_POPULATE_WRITE) == 0) {
        refit_status status = rft_touch_all(segment->memory, segment->bytes, &why);
        if (status != REFIT_OK) return room_failed(segment->bytes, room, why.subsystem, error);
        if (is_filled(segment->fd, segment->bytes)) return REFIT_OK;
    }
    do {
        code = posix_fallocate(segment->fd, 0, (off_t)segment->bytes);
    } while (code == EINTR);
    return code == 0 ? REFIT_OK : room_failed(segment->bytes, room, code, error);
}

static refit_status sealed_make_alone(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    refit_error why;
    refit_status status = sealed_make(segment, bytes, &why);
    for (int i = 1; i < MAKE_TRIES && status != REFIT_OK && why.subsystem == EAGAIN; i++) {
        status = sealed_make(segment, bytes, &why);
    }
    return status == REFIT_OK ? status : rft_fail_sub(error, status, why.subsystem, "%s", why.text);
}

refit_status rft_segment_create(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    rft_budget room;
    uint64_t needed = bytes == 0 ? 1 : bytes;
    segment_reset(segment);
    RFT_TRY(room_check(needed, &room, error));
    RFT_TRY(sealed_make_alone(segment, needed, error));
    refit_status status = room_take(segment, &room, error);
    if (status != REFIT_OK) rft_segment_close(segment);
    return status;
}

static refit_status create_private(rft_segment *segment, uint64_t bytes, int flags,
                                   refit_error *error)
{
    segment_reset(segment);
    return memory_map(segment, bytes == 0 ? 1 : bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, error);
}

refit_status rft_segment_create_partial(rft_segment *segment, uint64_t bytes, uint64_t written,
                                        refit_error *error)
{
    rft_budget room;
    segment_reset(segment);
    rft_budget_free("", &room);
    RFT_REFUSE_IF(written > room.free_bytes, error, REFIT_ERR_HOST_MEMORY,
                  "%" PRIu64 " bytes of host memory for a version could not be had: %" PRIu64
                  " are free by %s; make room, or raise the limit of the container",
                  written, room.free_bytes, source_of(&room));
    RFT_TRY(create_private(segment, bytes, 0, error));
    /* A huge page would be taken for a few bytes of it. */
    if (written < bytes) (void)madvise(segment->memory, segment->bytes, MADV_NOHUGEPAGE);
    return REFIT_OK;
}

refit_status rft_segment_create_private(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    return rft_segment_create_partial(segment, bytes, bytes, error);
}

void rft_segment_fill(const rft_segment *segment)
{
    (void)rft_touch_all(segment->memory, segment->bytes, NULL);
}

refit_status rft_segment_create_sparse(rft_segment *segment, uint64_t bytes, refit_error *error)
{
    return create_private(segment, bytes, MAP_NORESERVE, error);
}

/* ---- Attaching */

/* A place of a process's own, for calls that take paths. */
static void own_place(int fd, char path[PLACE_BYTES])
{
    snprintf(path, PLACE_BYTES, "/proc/self/fd/%d", fd);
}

static refit_status reach_failed(int code, refit_error *error)
{
    return rft_fail_sub(error, code == ENOENT ? REFIT_ERR_NOT_FOUND : REFIT_ERR_SYSTEM, code,
                        "shared memory could not be opened, for which a worker has to share its "
                        "owner's user, /proc and PID namespace: %s",
                        strerror(code));
}

static bool is_ours(int fd, const struct stat *file)
{
    char path[PLACE_BYTES], link[sizeof MEMFD_LINK];
    own_place(fd, path);
    return S_ISREG(file->st_mode) && rft_user_is_own(file->st_uid) &&
           readlink(path, link, sizeof link) == (ssize_t)strlen(MEMFD_LINK) &&
           memcmp(link, MEMFD_LINK, strlen(MEMFD_LINK)) == 0;
}

/* `fd` is a place alone: what lies there has not been opened, so that a pipe or a device notices
 * nothing. */
static refit_status place_check(int fd, const segment_place *place, refit_error *error)
{
    struct stat file;
    if (fstat(fd, &file) != 0) return reach_failed(errno, error);
    if (file.st_ino != place->inode) return reach_failed(ENOENT, error);
    RFT_REFUSE_IF(!is_ours(fd, &file), error, REFIT_ERR_SECURITY,
                  "the memory that is offered belongs to another user, or is not a segment");
    return REFIT_OK;
}

static refit_status file_check(int fd, uint64_t bytes, refit_error *error)
{
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS);
    RFT_REFUSE_IF(seals < 0 || (seals & SEALS) != SEALS, error, REFIT_ERR_SECURITY,
                  "other processes can change the memory that is offered: it is not sealed");
    if (fstat(fd, &file) != 0) return reach_failed(errno, error);
    RFT_REFUSE_IF(file.st_size < 0 || (uint64_t)file.st_size < bytes, error, REFIT_ERR_PROTOCOL,
                  "the memory that is offered has %jd bytes instead of %" PRIu64,
                  (intmax_t)file.st_size, bytes);
    return REFIT_OK;
}

static refit_status fill_check(int fd, uint64_t bytes, refit_error *error)
{
    RFT_REFUSE_IF(!is_filled(fd, bytes), error, REFIT_ERR_SECURITY,
                  "the memory that is offered was not filled");
    return REFIT_OK;
}

static refit_status file_open(const segment_place *place, int *out, refit_error *error)
{
    char path[PLACE_BYTES];
    int fd = open(place->path, O_PATH | O_CLOEXEC);
    if (fd < 0) return reach_failed(errno, error);
    refit_status status = place_check(fd, place, error);
    own_place(fd, path);
    /* Not blocking: a lease of another process would hold up the call for as long as the system has
     * it, 45 seconds as a rule. */
    if (status == REFIT_OK) *out = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (status == REFIT_OK && *out < 0) status = reach_failed(errno, error);
    close(fd);
    if (status == REFIT_OK) rft_forks_keep(*out);
    return status;
}

static refit_status attach(rft_segment *segment, const char *name, uint64_t bytes, bool growing,
                           refit_error *error)
{
    refit_status status;
    segment_place place;
    uint64_t needed = bytes == 0 ? 1 : bytes;
    segment_reset(segment);
    RFT_REFUSE_IF(!name_read(name, &place), error, REFIT_ERR_PROTOCOL,
                  "memory is offered by a name that this refit does not give: install the "
                  "same refit at both ends");
    RFT_TRY(file_open(&place, &segment->fd, error));
    RFT_TRY_GOTO(file_check(segment->fd, needed, error), undo_file);
    if (!growing) RFT_TRY_GOTO(fill_check(segment->fd, needed, error), undo_file);
    RFT_TRY_GOTO(memory_map(segment, needed, PROT_READ, MAP_SHARED, segment->fd, error), undo_file);
    strcpy(segment->name, name);
    return REFIT_OK;

undo_file:
    rft_forks_close(segment->fd);
    segment_reset(segment);
    return status;
}

refit_status rft_segment_attach_open(rft_segment *segment, const char *name, uint64_t bytes,
                                     refit_error *error)
{
    return attach(segment, name, bytes, false, error);
}

/* A system that counts all that could be written (vm.overcommit_memory 2) may refuse that much:
 * then the view can be read. */
static refit_status view_map(rft_segment *segment, refit_error *error)
{
    int flags = MAP_PRIVATE | MAP_NORESERVE;
    void *view = mmap(NULL, segment->bytes, PROT_READ | PROT_WRITE, flags, segment->fd, 0);
    if (view == MAP_FAILED) view = mmap(NULL, segment->bytes, PROT_READ, flags, segment->fd, 0);
    if (view == MAP_FAILED) return map_failed(segment->bytes, segment->fd, error);
    (void)madvise(view, segment->bytes, MADV_DONTFORK);
    segment->view = view;
    return REFIT_OK;
}

refit_status rft_segment_attach(rft_segment *segment, const char *name, uint64_t bytes,
                                refit_error *error)
{
    RFT_TRY(rft_segment_attach_open(segment, name, bytes, error));
    refit_status status = view_map(segment, error);
    rft_forks_close(segment->fd);
    segment->fd = -1;
    if (status != REFIT_OK) rft_segment_close(segment);
    return status;
}

refit_status rft_segment_attach_growing(rft_segment *segment, const char *name, uint64_t bytes,
                                        refit_error *error)
{
    RFT_TRY(attach(segment, name, bytes, true, error));
    refit_status status = view_map(segment, error);
    if (status != REFIT_OK) rft_segment_close(segment);
    return status;
}

#define OVERCOMMIT "/proc/sys/vm/overcommit_memory"

/* Where the system counts each page as it is taken, one that cannot be had is a signal. */
static bool is_strict(void)
{
    char text[16];
    uint64_t mode;
    return rft_procfile_read(OVERCOMMIT, text, sizeof text) && rft_procfile_number(text, &mode) &&
           mode == 2;
}

/* Written by the owner alone, it has the owner's user write to a view, too. */
refit_status rft_segment_create_growing(rft_segment *segment, uint64_t bytes, uint64_t written,
                                        refit_error *error)
{
    rft_budget room;
    uint64_t needed = bytes == 0 ? 1 : bytes;
    segment_reset(segment);
    RFT_REFUSE_IF(is_strict(), error, REFIT_ERR_SYSTEM,
                  "memory is taken as it is written, which vm.overcommit_memory: 2 makes unsafe");
    RFT_TRY(room_check(written, &room, error));
    RFT_TRY(sealed_make_alone(segment, needed, error));
    refit_status status = view_map(segment, error);
    if (status != REFIT_OK) rft_segment_close(segment);
    return status;
}

/* Of /proc/self/pagemap: a page that is there, in memory or swapped out, and is not a file's is a
 * copy of this process's. */
#define PAGE_THERE (UINT64_C(3) << 62)
#define PAGE_FILE  (UINT64_C(1) << 61)
#define PAGES_READ 1024

static bool has_copies(const uint64_t *pages, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if ((pages[i] & PAGE_THERE) != 0 && (pages[i] & PAGE_FILE) == 0) return true;
    }
    return false;
}

/* True, too, where the system does not tell. */
static bool view_is_written(const rft_segment *segment)
{
    uint64_t pages[PAGES_READ];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t at = (uintptr_t)segment->view / page, end = at + (segment->bytes + page - 1) / page;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    bool written = fd < 0;
    while (!written && at < end) {
        size_t wanted = end - at < PAGES_READ ? (size_t)(end - at) : PAGES_READ;
        ssize_t got = pread(fd, pages, wanted * sizeof *pages, (off_t)(at * sizeof *pages));
        written = got != (ssize_t)(wanted * sizeof *pages) || has_copies(pages, wanted);
        at += wanted;
    }
    if (fd >= 0) close(fd);
    return written;
}

/* To let all pages go costs the next reader a fault for each: to look first is cheaper. */
void rft_segment_reset_view(rft_segment *segment)
{
    if (segment->view == NULL || !view_is_written(segment)) return;
    (void)madvise(segment->view, segment->bytes, MADV_DONTNEED);
}

bool rft_segment_is_retired(const rft_segment *segment)
{
    segment_place place;
    struct stat there;
    if (!name_read(segment->name, &place)) return true;
    if (stat(place.path, &there) != 0) return errno == ENOENT;
    return there.st_ino != place.inode;
}

void rft_segment_retire(rft_segment *segment)
{
    if (segment->memory == NULL || segment->fd < 0) return;
    rft_forks_close(segment->fd);
    segment->fd = -1;
    segment->name[0] = '\0';
}

/* ---- Closing */

struct rft_kept {
    atomic_uint users; /* the segment is one until it is closed */
    pid_t process;     /* a forked child has nothing there, or by then something of its own */
    void *memory;
    void *view; /* may be NULL */
    uint64_t bytes;
};

/* What stands before the caller's room. */
typedef struct keep_header {
    alignas(max_align_t) rft_kept *kept;
} keep_header;

static void both_unmap(void *memory, void *view, uint64_t bytes)
{
    munmap(memory, bytes);
    if (view != NULL) munmap(view, bytes);
}

/* To count down releases what the thread has done with the memory, and the last to do so acquires
 * what all others have: nothing is read or written there after the unmapping. */
static void kept_leave(rft_kept *kept)
{
    if (atomic_fetch_sub(&kept->users, 1) > 1) return;
    if (kept->process == getpid()) both_unmap(kept->memory, kept->view, kept->bytes);
    rft_free(kept);
}

static refit_status segment_share(rft_segment *segment, refit_error *error)
{
    if (segment->kept != NULL) return REFIT_OK;
    rft_kept *kept = rft_calloc(1, sizeof *kept);
    RFT_REFUSE_IF(kept == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to keep a mapping");
    kept->process = getpid();
    kept->memory = segment->memory;
    kept->view = segment->view;
    kept->bytes = segment->bytes;
    atomic_init(&kept->users, 1);
    segment->kept = kept;
    return REFIT_OK;
}

refit_status rft_segment_retain(rft_segment *segment, size_t room, void **out, refit_error *error)
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

void rft_segment_release(void *out)
{
    if (out == NULL) return;
    keep_header *header = (keep_header *)out - 1;
    kept_leave(header->kept);
    rft_free(header);
}

void rft_segment_close(rft_segment *segment)
{
    if (segment->memory == NULL) return;
    rft_segment_retire(segment);
    if (segment->kept != NULL) {
        kept_leave(segment->kept);
    } else {
        both_unmap(segment->memory, segment->view, segment->bytes);
    }
    segment_reset(segment);
}

/* ---- The seqlock: one writer, and readers that never wait
 *
 * Why it holds where the CPU orders memory weakly, as ARM does. The number and the bytes are in
 * memory that both processes share, and plain reads and writes of the bytes stand between these:
 *
 *     begin  writes the odd number, then a full fence: no byte is written before it
 *     end    adds with release: all bytes are written before it. Those of other threads and streams
 *            too, which were waited for: such an order is handed on
 *     note   reads with acquire: no byte is read before it
 *     holds  an acquire fence, then a read: all bytes are read before it
 *
 * If a reader saw a byte that was written after a begin, the fences pair: its holds sees that
 * begin's number or a later one, and numbers do not return. Seeing an end's number, its note sees
 * all bytes of that end. That it sees no older one is the socket's doing: SEAL is sent after end
 * and received before note, through a queue in the kernel whose lock the sender gives and the
 * receiver takes.
 *
 * An atomic that needed a lock would lie in each process for itself; one that needs none may be an
 * instruction (LSE) in one process and a loop of exclusive loads and stores in another. */

#define RETIRED UINT64_MAX /* odd */

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && sizeof(rft_seqlock) == 8,
               "processes share the number of a seqlock");

void rft_seqlock_begin(rft_seqlock *lock)
{
    uint64_t generation = atomic_load(&lock->generation);
    atomic_store(&lock->generation, (generation | 1) + (generation & 1) * 2);
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_seqlock_end(rft_seqlock *lock)
{
    atomic_fetch_add(&lock->generation, 1);
}

/* The bytes are gone, and do not come back. */
static void seqlock_retire(rft_seqlock *lock)
{
    atomic_store(&lock->generation, RETIRED);
}

bool rft_seqlock_note(const rft_seqlock *lock, uint64_t *generation)
{
    *generation = atomic_load_explicit(&lock->generation, memory_order_acquire);
    return *generation % 2 == 0;
}

bool rft_seqlock_holds(const rft_seqlock *lock, uint64_t generation)
{
    /* The user's reads come before this look at the number, as in any sequence lock. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&lock->generation, memory_order_relaxed) == generation;
}

bool rft_seqlock_is_retired(const rft_seqlock *lock)
{
    return atomic_load(&lock->generation) == RETIRED;
}

/* ---- The share lock
 *
 * Its locks are those of open file descriptions: the kernel's own account of the processes that
 * have the file open and hold a lock, which no crash leaves behind, and which keep two ends in one
 * process apart as well. A forked child would share its parent's, and begins by closing them
 * (forks.h), which unlocks nothing. */

/* The bytes of the file that the locks lie on. */
typedef enum lock_byte { BYTE_MAPPED, BYTE_READ } lock_byte;

static struct flock range(short type, lock_byte byte)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
}

refit_status rft_share_lock_open(rft_share_lock *share_lock, refit_error *error)
{
    return rft_segment_create(&share_lock->segment, RFT_SEQLOCK_BYTES, error);
}

void rft_share_lock_retire(rft_share_lock *share_lock)
{
    seqlock_retire(rft_share_lock_seqlock(share_lock));
}

/* The seqlock's change comes before the look at the lock, and the lock before the look at the
 * seqlock. A system call orders nothing by itself. */
static bool is_locked(const rft_share_lock *share_lock, lock_byte byte)
{
    struct flock other = range(F_WRLCK, byte);
    atomic_thread_fence(memory_order_seq_cst);
    return fcntl(share_lock->segment.fd, F_OFD_GETLK, &other) != 0 || other.l_type != F_UNLCK;
}

bool rft_share_lock_is_mapped(const rft_share_lock *share_lock)
{
    return is_locked(share_lock, BYTE_MAPPED);
}

bool rft_share_lock_is_read(const rft_share_lock *share_lock)
{
    return is_locked(share_lock, BYTE_READ);
}

static void give_lock(const rft_share_lock *share_lock, lock_byte byte)
{
    struct flock mine = range(F_UNLCK, byte);
    (void)fcntl(share_lock->segment.fd, F_OFD_SETLK, &mine); /* to give up a lock takes no memory */
}

static refit_status take_lock(const rft_share_lock *share_lock, lock_byte byte, refit_error *error)
{
    struct flock mine = range(F_RDLCK, byte);
    if (fcntl(share_lock->segment.fd, F_OFD_SETLK, &mine) == 0) {
        atomic_thread_fence(memory_order_seq_cst);
        return REFIT_OK;
    }
    int code = errno;
    return rft_fail_sub(
        error, REFIT_ERR_SYSTEM, code,
        "%s could not be locked, so the trainer cannot know which process reads its GPU's "
        "memory: %s",
        share_lock->segment.name, strerror(code));
}

static refit_status hold(rft_share_lock *share_lock, refit_error *error)
{
    RFT_TRY(take_lock(share_lock, BYTE_MAPPED, error));
    RFT_REFUSE_IF(rft_seqlock_is_retired(rft_share_lock_seqlock(share_lock)), error,
                  REFIT_ERR_NOT_FOUND, "the trainer has given up the GPU's memory that it offered");
    return REFIT_OK;
}

refit_status rft_share_lock_hold(rft_share_lock *share_lock, const char *name, refit_error *error)
{
    RFT_TRY(rft_segment_attach_open(&share_lock->segment, name, RFT_SEQLOCK_BYTES, error));
    refit_status status = hold(share_lock, error);
    if (status != REFIT_OK) rft_share_lock_close(share_lock);
    return status;
}

refit_status rft_share_lock_read(rft_share_lock *share_lock, refit_error *error)
{
    return take_lock(share_lock, BYTE_READ, error);
}

void rft_share_lock_unread(rft_share_lock *share_lock)
{
    give_lock(share_lock, BYTE_READ);
}

/* Locks are given up before the descriptor is closed, as forks.h does: a child may still have it.
 */
void rft_share_lock_close(rft_share_lock *share_lock)
{
    if (share_lock->segment.memory == NULL) return;
    give_lock(share_lock, BYTE_READ);
    give_lock(share_lock, BYTE_MAPPED);
    rft_segment_close(&share_lock->segment);
}

rft_seqlock *rft_share_lock_seqlock(const rft_share_lock *share_lock)
{
    return (rft_seqlock *)(void *)share_lock->segment.memory;
}
