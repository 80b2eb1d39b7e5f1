/*
 * Locks of open file descriptions: the kernel's own count of who has the file open and says so,
 * which no crash leaves behind, and which two ends in one process keep apart as well. A forked
 * child shares its parent's, so a lock may outlive the process that took it: never the other way
 * round.
 */
#include "broadcast/leash.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* The bytes of the file that the locks lie on. */
typedef enum leash_byte { BYTE_MAPPED, BYTE_READ } leash_byte;

static struct flock range(short type, leash_byte byte)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
}

refit_status rft_leash_open(rft_leash *leash, refit_error *error)
{
    return rft_segment_create(&leash->segment, RFT_MARK_BYTES, error);
}

void rft_leash_retire(rft_leash *leash)
{
    rft_mark_retire(rft_leash_mark(leash));
}

/* The mark's change comes before the look at the lock, and the lock before the look at the mark. A
 * system call orders nothing by itself. */
static bool is_locked(const rft_leash *leash, leash_byte byte)
{
    struct flock other = range(F_WRLCK, byte);
    rft_mark_fence();
    return fcntl(leash->segment.fd, F_OFD_GETLK, &other) != 0 || other.l_type != F_UNLCK;
}

bool rft_leash_is_mapped(const rft_leash *leash)
{
    return is_locked(leash, BYTE_MAPPED);
}

bool rft_leash_is_read(const rft_leash *leash)
{
    return is_locked(leash, BYTE_READ);
}

static refit_status take_lock(const rft_leash *leash, leash_byte byte, refit_error *error)
{
    struct flock mine = range(F_RDLCK, byte);
    if (fcntl(leash->segment.fd, F_OFD_SETLK, &mine) == 0) {
        rft_mark_fence();
        return REFIT_OK;
    }
    int code = errno;
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "%s could not be locked, so the trainer cannot know who reads its GPU's "
                        "memory: %s",
                        leash->segment.name, strerror(code));
}

static refit_status hold(rft_leash *leash, refit_error *error)
{
    RFT_TRY(take_lock(leash, BYTE_MAPPED, error));
    RFT_REFUSE_IF(rft_mark_is_retired(rft_leash_mark(leash)), error, REFIT_ERR_NOT_FOUND,
                  "the trainer has given up the GPU's memory that it offered");
    return REFIT_OK;
}

refit_status rft_leash_hold(rft_leash *leash, const char *name, refit_error *error)
{
    RFT_TRY(rft_segment_attach_open(&leash->segment, name, RFT_MARK_BYTES, error));
    refit_status status = hold(leash, error);
    if (status != REFIT_OK) rft_leash_close(leash);
    return status;
}

refit_status rft_leash_read(rft_leash *leash, refit_error *error)
{
    return take_lock(leash, BYTE_READ, error);
}

void rft_leash_unread(rft_leash *leash)
{
    struct flock mine = range(F_UNLCK, BYTE_READ);
    (void)fcntl(leash->segment.fd, F_OFD_SETLK, &mine); /* to give up a lock takes no memory */
}

void rft_leash_close(rft_leash *leash)
{
    rft_segment_close(&leash->segment);
}

rft_mark *rft_leash_mark(const rft_leash *leash)
{
    return (rft_mark *)(void *)leash->segment.memory;
}
