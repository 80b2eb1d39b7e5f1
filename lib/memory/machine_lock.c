/*
 * The lock is held by a mapping. flock(2) belongs to an open file, which a forked child would
 * share, and with it the lock, for as long as it lives. So the file is mapped, the mapping is kept
 * from children (MADV_DONTFORK), and the descriptor is closed: then the mapping alone keeps the
 * file open and locked, and unmapping it, or the end of the process, gives the lock back. What is
 * left is a fork between opening and closing, a few system calls apart. Nothing is ever read or
 * written there.
 *
 * Two openings of one file exclude each other even within a process, so offloaders on several
 * threads exclude each other too. The kernel knows no flock with a deadline: it is tried again and
 * again.
 */
#include "memory/machine_lock.h"

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
#include "base/user.h"

#define FILE_MODE 0600
#define ROOM      1  /* byte; the kernel makes a page of it */
#define TRY_MS    10 /* between two tries */

typedef enum attempt {
    ATTEMPT_HELD,
    ATTEMPT_BUSY,   /* another process has the lock */
    ATTEMPT_FAILED, /* no file can be locked in this folder; errno says why */
} attempt;

static void name_place(char *path, const char *root, const char *folder)
{
    int length = snprintf(path, RFT_MACHINE_LOCK_PATH_BYTES, "%s%s/refit.turn-%lu", root, folder,
                          (unsigned long)geteuid());
    if (length < 0 || length >= RFT_MACHINE_LOCK_PATH_BYTES) path[0] = '\0';
}

void rft_machine_lock_find(rft_machine_lock *machine_lock, const char *root)
{
    const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
    memset(machine_lock, 0, sizeof *machine_lock);
    name_place(machine_lock->paths[0], root, "/dev/shm");
    if (runtime != NULL && runtime[0] == '/') name_place(machine_lock->paths[1], "", runtime);
}

/* In a folder that every user can write, another user may have put a file of this name, or a link,
 * and hold its lock. */
static bool is_own(int fd, struct timespec *since)
{
    struct stat file;
    if (fstat(fd, &file) != 0) return false;
    *since = file.st_mtim;
    bool own = S_ISREG(file.st_mode) && rft_user_is_own(file.st_uid) &&
               (file.st_mode & (S_IRWXG | S_IRWXO)) == 0;
    if (!own) errno = EPERM;
    return own;
}

/* The file may have been removed meanwhile: then other processes lock a new one. */
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

static attempt try_place(rft_machine_lock *machine_lock, const char *path)
{
    errno = ENOENT;
    if (path[0] == '\0') return ATTEMPT_FAILED;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, FILE_MODE);
    if (fd < 0) return ATTEMPT_FAILED;
    attempt made =
        is_own(fd, &machine_lock->since) ? lock_mapped(fd, &machine_lock->held) : ATTEMPT_FAILED;
    int code = errno;
    close(fd);
    errno = code;
    return made;
}

/* The second place is tried only if the first cannot be used, not if it is taken. */
static attempt try_places(rft_machine_lock *machine_lock, int *code)
{
    attempt made = ATTEMPT_FAILED;
    for (int i = 0; i < RFT_MACHINE_LOCK_PLACES && made == ATTEMPT_FAILED; i++) {
        made = try_place(machine_lock, machine_lock->paths[i]);
        if (made == ATTEMPT_FAILED && i == 0) *code = errno;
    }
    return made;
}

static void say_without(const rft_machine_lock *machine_lock, int code)
{
    rft_log(REFIT_LOG_WARNING,
            "host memory is taken without waiting for other processes of this user: %s cannot be "
            "used: %s",
            machine_lock->paths[0], strerror(code));
}

/* Has the holder of the lock changed since the last look? */
static bool has_passed_on(struct timespec *before, const struct timespec *now)
{
    bool first = before->tv_sec == 0;
    bool same = before->tv_sec == now->tv_sec && before->tv_nsec == now->tv_nsec;
    *before = *now;
    return !first && !same;
}

static refit_status wait_lock(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                              rft_cancel_token *token, refit_error *error)
{
    int code = 0;
    int64_t deadline = rft_after_ms(rft_now(), timeout_ms);
    struct timespec since = {0};
    for (;;) {
        attempt made = try_places(machine_lock, &code);
        if (made == ATTEMPT_FAILED) say_without(machine_lock, code);
        if (made != ATTEMPT_BUSY) return REFIT_OK;
        RFT_TRY(rft_cancel_token_check(token, error));
        int64_t now = rft_now();
        if (has_passed_on(&since, &machine_lock->since)) deadline = rft_after_ms(now, timeout_ms);
        RFT_REFUSE_IF(now >= deadline, error, REFIT_ERR_TIMEOUT,
                      "another process of this user has been taking its host memory for %u ms: try "
                      "again, raise offload.timeout_ms, or set offload.take_turns: false",
                      timeout_ms);
        int64_t next = rft_after_ms(now, TRY_MS);
        rft_cancel_token_pause(token, next < deadline ? next : deadline);
    }
}

refit_status rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                   rft_cancel_token *token, refit_error *error)
{
    atomic_store(&token->in_line, true);
    refit_status status = wait_lock(machine_lock, timeout_ms, token, error);
    atomic_store(&token->in_line, false);
    return status;
}

void rft_machine_lock_give(rft_machine_lock *machine_lock)
{
    if (machine_lock->held != NULL) (void)munmap(machine_lock->held, ROOM);
    machine_lock->held = NULL;
}
