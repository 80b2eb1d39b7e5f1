/*
 * The lock is held by a mapping. flock(2) belongs to an open file, which a forked child would
 * share, and with it the lock, for as long as it lives. So the file is mapped, the mapping is kept
 * from children (MADV_DONTFORK), and the descriptor is closed before this process can fork: then
 * the mapping alone keeps the file open and locked, and unmapping it, or the end of the process,
 * gives the lock back. Nothing is ever read or written there.
 *
 * A claim is a file with the number of bytes, locked in the same way; through its mapping the
 * number falls. Whether it is someone's shows when its lock is tried, which is done under the
 * machine's lock alone, as is claiming: so no two processes ever try the same file at once, and no
 * one reads a number that is not there yet. The number is first written to the file: a folder
 * without room refuses that, where a store to the mapping would end the process.
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

#include "base/checked.h"
#include "base/clock.h"
#include "base/forks.h"
#include "base/log.h"
#include "base/user.h"
#include "memory/fork_map.h"

#define FILE_MODE 0600
#define ROOM      sizeof(uint64_t) /* the kernel makes a page of it */
#define TRY_MS    10               /* between two tries */
#define CLAIMS    64               /* at once, at most */

#define CLAIM_PATH_BYTES (RFT_MACHINE_LOCK_PATH_BYTES + 16)

typedef enum attempt {
    ATTEMPT_HELD,
    ATTEMPT_BUSY,   /* another holder has the lock */
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

/* -1 is allowed. Does not change errno. */
static void close_file(int fd)
{
    int code = errno;
    if (fd >= 0) (void)close(fd);
    rft_forks_unlock();
    errno = code;
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

static attempt lock_mapped(int fd, int access, void **held)
{
    void *mapping = mmap(NULL, ROOM, access, MAP_SHARED, fd, 0);
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

/* Not for a child: until close_file nothing forks. `since` is when its last holder took it. -1:
 * there is none, or it is not this user's alone. */
static int open_file(const char *path, int flags, struct timespec *since)
{
    rft_forks_lock();
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, FILE_MODE);
    if (fd >= 0 && is_own(fd, since)) return fd;
    close_file(fd);
    return -1;
}

/* ---- The lock ------------------------------------------------------------------------------- */

static attempt try_place(rft_machine_lock *machine_lock, const char *path)
{
    errno = ENOENT;
    if (path[0] == '\0') return ATTEMPT_FAILED;
    int fd = open_file(path, O_CREAT, &machine_lock->since);
    if (fd < 0) return ATTEMPT_FAILED;
    attempt made = lock_mapped(fd, PROT_NONE, &machine_lock->held);
    close_file(fd);
    return made;
}

/* The second place is tried only if the first cannot be used, not if it is taken. */
static attempt try_places(rft_machine_lock *machine_lock, int *code)
{
    attempt made = ATTEMPT_FAILED;
    for (int i = 0; i < RFT_MACHINE_LOCK_PLACES && made == ATTEMPT_FAILED; i++) {
        machine_lock->place = i;
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

/* Between two tries. */
static refit_status pause_before(int64_t deadline, uint32_t timeout_ms, rft_cancel_token *token,
                                 refit_error *error)
{
    RFT_TRY(rft_cancel_token_check(token, error));
    int64_t now = rft_now();
    RFT_REFUSE_IF(now >= deadline, error, REFIT_ERR_TIMEOUT,
                  "another process of this user has been taking its host memory for %u ms: try "
                  "again, raise offload.timeout_ms, or set offload.take_turns: false",
                  timeout_ms);
    int64_t next = rft_after_ms(now, TRY_MS);
    rft_cancel_token_pause(token, next < deadline ? next : deadline);
    return REFIT_OK;
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
        if (has_passed_on(&since, &machine_lock->since))
            deadline = rft_after_ms(rft_now(), timeout_ms);
        RFT_TRY(pause_before(deadline, timeout_ms, token, error));
    }
}

refit_status rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                   rft_cancel_token *token, refit_error *error)
{
    machine_lock->until = 0;
    return wait_lock(machine_lock, timeout_ms, token, error);
}

static void unlock(void **mapping)
{
    int code = errno;
    if (*mapping != NULL) (void)munmap(*mapping, ROOM);
    *mapping = NULL;
    errno = code;
}

void rft_machine_lock_give(rft_machine_lock *machine_lock)
{
    void *claim = machine_lock->claim;
    unlock(&machine_lock->held);
    unlock(&claim);
    machine_lock->claim = NULL;
}

/* ---- Claims --------------------------------------------------------------------------------- */

/* Next to the file that is locked. */
static void name_claim(char *path, const rft_machine_lock *machine_lock, int nth)
{
    (void)snprintf(path, CLAIM_PATH_BYTES, "%s.claim-%d", machine_lock->paths[machine_lock->place],
                   nth);
}

/* False: no one claims anything there. */
static bool read_claim(const char *path, uint64_t *bytes)
{
    struct timespec since;
    int fd = open_file(path, 0, &since);
    if (fd < 0) return false;
    bool claimed = lock_file(fd) == ATTEMPT_BUSY && pread(fd, bytes, ROOM, 0) == ROOM;
    close_file(fd);
    return claimed;
}

bool rft_machine_lock_claimed(rft_machine_lock *machine_lock, uint64_t *bytes)
{
    char path[CLAIM_PATH_BYTES];
    uint64_t one, all = 0;
    bool any = false;
    for (int i = 0; i < CLAIMS && machine_lock->held != NULL; i++) {
        name_claim(path, machine_lock, i);
        if (!read_claim(path, &one)) continue;
        if (!rft_add_u64(all, one, &all)) all = UINT64_MAX;
        any = true;
    }
    machine_lock->claimed = all;
    *bytes = all;
    return any;
}

refit_status rft_machine_lock_retry(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                    rft_cancel_token *token, refit_error *error)
{
    unlock(&machine_lock->held);
    if (machine_lock->until == 0 || machine_lock->claimed != machine_lock->waited)
        machine_lock->until = rft_after_ms(rft_now(), timeout_ms);
    machine_lock->waited = machine_lock->claimed;
    RFT_TRY(pause_before(machine_lock->until, timeout_ms, token, error));
    return wait_lock(machine_lock, timeout_ms, token, error);
}

static bool write_claim(int fd, uint64_t bytes)
{
    errno = EFBIG;
    return rft_file_fits(ROOM) && pwrite(fd, &bytes, ROOM, 0) == ROOM;
}

/* BUSY: it is another's. */
static attempt make_claim(const char *path, uint64_t bytes, void **claim)
{
    struct timespec since;
    int fd = open_file(path, O_CREAT, &since);
    if (fd < 0) return ATTEMPT_FAILED;
    attempt made = lock_mapped(fd, PROT_READ | PROT_WRITE, claim);
    if (made == ATTEMPT_HELD && !write_claim(fd, bytes)) {
        made = ATTEMPT_FAILED;
        unlock(claim);
    }
    close_file(fd);
    return made;
}

void rft_machine_lock_claim(rft_machine_lock *machine_lock, uint64_t bytes)
{
    char path[CLAIM_PATH_BYTES];
    attempt made = ATTEMPT_BUSY;
    void *claim = NULL;
    if (machine_lock->held == NULL) return;
    for (int i = 0; i < CLAIMS && made == ATTEMPT_BUSY; i++) {
        name_claim(path, machine_lock, i);
        made = make_claim(path, bytes, &claim);
    }
    machine_lock->claim = claim;
    if (made == ATTEMPT_HELD) {
        unlock(&machine_lock->held);
        return;
    }
    rft_log(REFIT_LOG_WARNING,
            "other processes of this user wait until this one has taken its host memory: %s cannot "
            "be used: %s",
            path, strerror(errno));
}
