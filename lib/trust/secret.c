/*
 * The pages of a secret:
 *
 *     [ guard ][ secret … unused ][ guard ]
 *
 * Not from the allocator that the process installed: that one may keep what it was given back.
 */
#include "trust/secret.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Whole pages. */
static size_t room_for(size_t bytes)
{
    size_t page = page_bytes();
    return (bytes + page - 1) / page * page;
}

/* A kernel that knows one of these words not is none that refit runs on. */
static void keep_from_others(void *secret, size_t room)
{
    (void)madvise(secret, room, MADV_DONTDUMP);
    (void)madvise(secret, room, MADV_DONTFORK);
    if (mlock(secret, room) == 0) return;
    rft_log(REFIT_LOG_INFO, "a secret key is not locked in memory, so it could be swapped out: %s",
            strerror(errno));
}

refit_status rft_secret_open(size_t bytes, void **out, refit_error *error)
{
    const size_t page = page_bytes(), room = room_for(bytes);
    void *whole =
        mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned char *secret = whole == MAP_FAILED ? NULL : (unsigned char *)whole + page;
    if (secret != NULL && mprotect(secret, room, PROT_READ | PROT_WRITE) != 0) {
        (void)munmap(whole, room + 2 * page);
        secret = NULL;
    }
    RFT_REFUSE_IF(secret == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a secret key");
    keep_from_others(secret, room);
    *out = secret;
    return REFIT_OK;
}

void rft_secret_close(void *secret, size_t bytes)
{
    if (secret == NULL) return;
    const size_t page = page_bytes(), room = room_for(bytes);
    explicit_bzero(secret, room);
    (void)munmap((unsigned char *)secret - page, room + 2 * page);
}
