/*
 * The list of what children are to have, and what happens at a fork.
 *
 * A lock is held over each change of the list, and by a fork from its beginning to its end: so a
 * child finds the list whole, has no descriptor that is not on it, and can let the lock go. Nothing
 * that can wait is done under it. What a child does between fork and its first own instruction are
 * system calls alone: its parent may have forked while another thread held the allocator's lock.
 */
#include "memory/fork_map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/thread.h"

/* Of Linux, where the C library's headers are older. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

struct rft_fork_map {
    rft_fork_map *next;
    void *base;
    uint64_t bytes;
    int fd;
};

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static rft_fork_map *maps; /* guarded by guard */

/* ---- At a fork */

static void before_fork(void)
{
    rft_lock(&guard);
}

static void in_parent(void)
{
    rft_unlock(&guard);
}

/* Where no addresses are to be had for writing (vm.overcommit_memory 2), to read is enough. If
 * neither can be, a reader ends by a signal: there is no one to tell here. */
static void give_to_child(const rft_fork_map *map)
{
    int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    void *there = mmap(map->base, map->bytes, PROT_READ | PROT_WRITE, flags, map->fd, 0);
    if (there == MAP_FAILED) there = mmap(map->base, map->bytes, PROT_READ, flags, map->fd, 0);
    if (there != MAP_FAILED) (void)madvise(map->base, map->bytes, MADV_DONTDUMP);
    (void)close(map->fd);
}

static void in_child(void)
{
    int code = errno;
    for (const rft_fork_map *map = maps; map != NULL; map = map->next)
        give_to_child(map);
    maps = NULL;
    rft_unlock(&guard);
    errno = code;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int prepared;

static void prepare_for_forks(void)
{
    prepared = pthread_atfork(before_fork, in_parent, in_child);
}

/* ---- Opening and closing */

bool rft_file_fits(uint64_t bytes)
{
    struct rlimit most;
    return bytes <= INT64_MAX && (getrlimit(RLIMIT_FSIZE, &most) != 0 ||
                                  most.rlim_cur == RLIM_INFINITY || bytes <= most.rlim_cur);
}

int rft_memory_file(uint64_t bytes)
{
    if (!rft_file_fits(bytes)) {
        errno = EFBIG;
        return -1;
    }
    /* Memory that must not be run is refused by some systems unless it says so, and unknown to
     * older ones. */
    int fd = memfd_create("refit", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) fd = memfd_create("refit", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -1;
    if (fchmod(fd, 0600) == 0 && ftruncate(fd, (off_t)bytes) == 0) return fd;
    int code = errno;
    (void)close(fd);
    errno = code;
    return -1;
}

/* No process can take the end of the file away from under a reader. */
static bool map_file(rft_fork_map *map)
{
    int shared = MAP_SHARED | MAP_FIXED;
    map->fd = rft_memory_file(map->bytes);
    if (map->fd < 0) return false;
    if (fcntl(map->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0 &&
        mmap(map->base, map->bytes, PROT_READ | PROT_WRITE, shared, map->fd, 0) != MAP_FAILED)
        return true;
    int code = errno;
    (void)close(map->fd);
    errno = code;
    return false;
}

static refit_status failed(int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "the kernel gives no memory that forked processes could read "
                        "(memfd_create; see ulimit -f): %s",
                        strerror(code));
}

static refit_status open_map(rft_fork_map *map, refit_error *error)
{
    (void)pthread_once(&once, prepare_for_forks);
    if (prepared != 0) return failed(prepared, error);
    rft_lock(&guard);
    bool mapped = map_file(map);
    int code = errno;
    if (mapped) {
        (void)madvise(map->base, map->bytes, MADV_DONTFORK);
        map->next = maps;
        maps = map;
    }
    rft_unlock(&guard);
    return mapped ? REFIT_OK : failed(code, error);
}

refit_status rft_fork_map_open(void *base, uint64_t bytes, rft_fork_map **out, refit_error *error)
{
    rft_fork_map *map = rft_calloc(1, sizeof *map);
    RFT_REFUSE_IF(map == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to remember a mapping");
    map->base = base;
    map->bytes = bytes;
    refit_status status = open_map(map, error);
    if (status != REFIT_OK) {
        rft_free(map);
        return status;
    }
    *out = map;
    return REFIT_OK;
}

void rft_fork_map_close(rft_fork_map *map)
{
    if (map == NULL) return;
    rft_lock(&guard);
    rft_fork_map **at = &maps;
    while (*at != map)
        at = &(*at)->next;
    *at = map->next;
    (void)close(map->fd);
    rft_unlock(&guard);
    rft_free(map);
}
