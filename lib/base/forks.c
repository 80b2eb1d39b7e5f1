/*
 * A table of descriptors, each with the file that it leads to, which pthread_atfork(3) has the
 * child close. The child has one thread and no use for any of them; what it closes, the parent
 * keeps, lock and place in an epoll included.
 *
 * A descriptor may be closed, and its number used again, without a word: so the child looks whether
 * it still leads to the same file, and a number that comes again takes the place that it had. The
 * table is thus no longer than the most that were open at once, and has its room from the start: a
 * lack of memory would keep descriptors in children. What finds no place is kept by the child.
 *
 * The lock is held across a fork, so that the child finds the table whole. Under it are a search, a
 * look at a file and a close.
 *
 * A lock is given up before its descriptor is closed, for a child may not have come to its handler
 * yet, or have none (clone(2)). What remains where the parent is killed: such a child, and a fork
 * in the moment between opening and keeping.
 */
#include "base/forks.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"

#define PLACES 4096

typedef struct kept {
    int fd;
    dev_t device; /* with `inode`: which file it is */
    ino_t inode;
} kept;

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static kept all[PLACES]; /* guarded by guard, like what follows */
static int count;
static bool prepared;

static void before_fork(void)
{
    rft_lock(&guard);
}

static void after_fork(void)
{
    rft_unlock(&guard);
}

static void in_child(void)
{
    struct stat file;
    for (int i = 0; i < count; i++)
        if (fstat(all[i].fd, &file) == 0 && file.st_dev == all[i].device &&
            file.st_ino == all[i].inode)
            (void)close(all[i].fd);
    count = 0;
    rft_unlock(&guard);
}

static int place_of(int fd)
{
    int at = 0;
    while (at < count && all[at].fd != fd)
        at++;
    return at;
}

void rft_forks_lock(void)
{
    rft_lock(&guard);
    if (!prepared) prepared = pthread_atfork(before_fork, after_fork, in_child) == 0;
}

void rft_forks_unlock(void)
{
    rft_unlock(&guard);
}

void rft_forks_keep(int fd)
{
    struct stat file;
    if (fd < 0) return;
    rft_forks_lock();
    int at = place_of(fd);
    if (at < PLACES && fstat(fd, &file) == 0) {
        all[at] = (kept){fd, file.st_dev, file.st_ino};
        if (at == count) count++;
    }
    rft_unlock(&guard);
}

void rft_forks_close(int fd)
{
    if (fd < 0) return;
    rft_lock(&guard);
    int at = place_of(fd);
    if (at < count) all[at] = all[--count];
    (void)flock(fd, LOCK_UN);
    (void)close(fd);
    rft_unlock(&guard);
}
