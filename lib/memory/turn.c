/*
 * The lock is held by a mapping. flock(2) belongs to an open file, which a forked child would
 * share, and with it the lock, for as long as it lives. So the file is mapped, the mapping is kept
 * from children (MADV_DONTFORK), and the descriptor is closed: then the mapping alone keeps the
 * file open and locked, and unmapping it, or the end of the process, gives the lock back. What is
 * left is a fork between opening and closing, a few system calls apart. Nothing is ever read or
 * written there.
 *
 * Two openings of one file exclude each other even within a process, so offloaders on several
 * threads take turns too. The kernel knows no flock with a deadline: it is tried again and again.
 */
#include "memory/turn.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

#define FILE_MODE 0600
#define ROOM      1  /* byte; the kernel makes a page of it */
#define TRY_MS    10 /* between two tries */

typedef enum attempt {
    ATTEMPT_HELD,
    ATTEMPT_BUSY,   /* somebody else has the turn */
    ATTEMPT_FAILED, /* there is no turn to be had in this place; errno says why */
} attempt;

static void name_place(char *path, const char *root, const char *folder)
{
    int length = snprintf(path, RFT_TURN_PATH_BYTES, "%s%s/refit.turn-%lu", root, folder,
                          (unsigned long)geteuid());
    if (length < 0 || length >= RFT_TURN_PATH_BYTES) path[0] = '\0';
}

void rft_turn_find(rft_turn *turn, const char *root)
{
    const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
    memset(turn, 0, sizeof *turn);
    name_place(turn->paths[0], root, "/dev/shm");
    if (runtime != NULL && runtime[0] == '/') name_place(turn->paths[1], "", runtime);
}

/* Where anybody may write, anybody may have put a file of this name, or a link, and hold it. */
static bool is_own(int fd, struct timespec *since)
{
    struct stat file;
    if (fstat(fd, &file) != 0) return false;
    *since = file.st_mtim;
    bool own = S_ISREG(file.st_mode) && file.st_uid == geteuid() &&
               (file.st_mode & (S_IRWXG | S_IRWXO)) == 0;
    if (!own) errno = EPERM;
    return own;
}

/* Somebody may have removed the file meanwhile: then others take turns at another. */
static bool is_named(int fd)
{
    struct stat file;
    return fstat(fd, &file) == 0 && file.st_nlink > 0;
}

static attempt lock_file(int fd)
{
    int result;
    do {
        result = flock(fd, LOCK_EX | LOCK_NB);
    } while (result != 0 && errno == EINTR);
    if (result == 0) {
        (void)futimens(fd, NULL);
        return is_named(fd) ? ATTEMPT_HELD : ATTEMPT_BUSY;
    }
    return errno == EWOULDBLOCK ? ATTEMPT_BUSY : ATTEMPT_FAILED;
}

static attempt lock_mapped(int fd, void **held)
{
    void *mapping = mmap(NULL, ROOM, PROT_NONE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) return ATTEMPT_FAILED;
    attempt made = madvise(mapping, ROOM, MADV_DONTFORK) == 0 ? lock_file(fd) : ATTEMPT_FAILED;
    if (made == ATTEMPT_HELD) {
        *held = mapping;
        return made;
    }
    int code = errno;
    (void)munmap(mapping, ROOM);
    errno = code;
    return made;
}

static attempt try_place(rft_turn *turn, const char *path)
{
    errno = ENOENT;
    if (path[0] == '\0') return ATTEMPT_FAILED;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, FILE_MODE);
    if (fd < 0) return ATTEMPT_FAILED;
    attempt made = is_own(fd, &turn->since) ? lock_mapped(fd, &turn->held) : ATTEMPT_FAILED;
    int code = errno;
    close(fd);
    errno = code;
    return made;
}

/* The second place is for where the first cannot be used, not for where it is taken. */
static attempt try_places(rft_turn *turn, int *code)
{
    attempt made = ATTEMPT_FAILED;
    for (int i = 0; i < RFT_TURN_PLACES && made == ATTEMPT_FAILED; i++) {
        made = try_place(turn, turn->paths[i]);
        if (made == ATTEMPT_FAILED && i == 0) *code = errno;
    }
    return made;
}

static void say_without(const rft_turn *turn, int code)
{
    rft_log(REFIT_LOG_WARNING,
            "host memory is taken without waiting for other processes of this user: %s cannot be "
            "used: %s",
            turn->paths[0], strerror(code));
}

/* Has somebody else the turn than at the last look? */
static bool has_passed_on(struct timespec *before, const struct timespec *now)
{
    bool first = before->tv_sec == 0;
    bool same = before->tv_sec == now->tv_sec && before->tv_nsec == now->tv_nsec;
    *before = *now;
    return !first && !same;
}

static refit_status wait_turn(rft_turn *turn, uint32_t timeout_ms, rft_watch *watch,
                              refit_error *error)
{
    int code = 0;
    int64_t deadline = rft_after_ms(rft_now(), timeout_ms);
    struct timespec since = {0};
    for (;;) {
        attempt made = try_places(turn, &code);
        if (made == ATTEMPT_FAILED) say_without(turn, code);
        if (made != ATTEMPT_BUSY) return REFIT_OK;
        RFT_TRY(rft_watch_check(watch, error));
        int64_t now = rft_now();
        if (has_passed_on(&since, &turn->since)) deadline = rft_after_ms(now, timeout_ms);
        RFT_REFUSE_IF(now >= deadline, error, REFIT_ERR_TIMEOUT,
                      "another process of this user has been taking its host memory for %u ms: try "
                      "again, raise offload.timeout_ms, or set offload.take_turns: false",
                      timeout_ms);
        int64_t next = rft_after_ms(now, TRY_MS);
        rft_watch_pause(watch, next < deadline ? next : deadline);
    }
}

refit_status rft_turn_take(rft_turn *turn, uint32_t timeout_ms, rft_watch *watch,
                           refit_error *error)
{
    atomic_store(&watch->in_line, true);
    refit_status status = wait_turn(turn, timeout_ms, watch, error);
    atomic_store(&watch->in_line, false);
    return status;
}

void rft_turn_give(rft_turn *turn)
{
    if (turn->held != NULL) (void)munmap(turn->held, ROOM);
    turn->held = NULL;
}
