/*
 * Locks of open file descriptions: the kernel's own account of the processes that have the file
 * open and hold a lock, which no crash leaves behind, and which two ends in one process keep apart
 * as well. A forked child shares its parent's, so a lock may outlive the process that took it:
 * never the other way round.
 */
#include "store/share_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* The bytes of the file that the locks lie on. */
typedef enum leash_byte { BYTE_MAPPED, BYTE_READ } leash_byte;

static struct flock range(short type, leash_byte byte)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
}

refit_status rft_share_lock_open(rft_share_lock *share_lock, refit_error *error)
{
    return rft_segment_create(&share_lock->segment, RFT_SEQLOCK_BYTES, error);
}

void rft_share_lock_retire(rft_share_lock *share_lock)
{
    rft_seqlock_retire(rft_share_lock_seqlock(share_lock));
}

/* The seqlock's change comes before the look at the lock, and the lock before the look at the
 * seqlock. A system call orders nothing by itself. */
static bool is_locked(const rft_share_lock *share_lock, leash_byte byte)
{
    struct flock other = range(F_WRLCK, byte);
    rft_seqlock_fence();
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

static refit_status take_lock(const rft_share_lock *share_lock, leash_byte byte, refit_error *error)
{
    struct flock mine = range(F_RDLCK, byte);
    if (fcntl(share_lock->segment.fd, F_OFD_SETLK, &mine) == 0) {
        rft_seqlock_fence();
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
    struct flock mine = range(F_UNLCK, BYTE_READ);
    (void)fcntl(share_lock->segment.fd, F_OFD_SETLK, &mine); /* to give up a lock takes no memory */
}

void rft_share_lock_close(rft_share_lock *share_lock)
{
    rft_segment_close(&share_lock->segment);
}

rft_seqlock *rft_share_lock_seqlock(const rft_share_lock *share_lock)
{
    return (rft_seqlock *)(void *)share_lock->segment.memory;
}
