/*
 * One counted ZeroMQ context a process. inproc endpoints are only visible inside one context, and
 * each context costs two threads, so the process shares one; it is the only state here that no
 * object owns. It also makes the sockets whose first id must not be guessed: rand(), where ZeroMQ
 * takes it from, is one for the process, too.
 *
 * The process id tells a fork: a context that was made by another process is forgotten, never
 * ended, since its threads do not run here. The lock is held for no call that waits.
 */
#include "net/context.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <zmq.h>

#include "base/thread.h"

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static void *shared;   /* guarded by guard */
static uint64_t users; /* guarded by guard */
static pid_t maker;    /* guarded by guard */

/* Called with the lock held. */
static void *shared_take(void)
{
    if (shared == NULL || maker != getpid()) {
        shared = zmq_ctx_new();
        maker = getpid();
        users = 0;
    }
    if (shared != NULL) users++;
    return shared;
}

refit_status rft_context_acquire(void **out, refit_error *error)
{
    rft_lock(&guard);
    void *context = shared_take();
    int code = errno;
    rft_unlock(&guard);
    if (context == NULL) {
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "ZeroMQ gave no context: %s",
                            zmq_strerror(code));
    }
    *out = context;
    return REFIT_OK;
}

/* ZeroMQ asks rand(), which nothing has seeded: so it is given a series of its own meanwhile. The
 * words behind the first are the series itself, so that its beginning has more than 32 bits of
 * chance. Where rand() has nothing to do with random() it is seeded. */
void *rft_context_router(void *context)
{
    uint32_t series[64];
    uint64_t seed;
    rft_lock(&guard);
    bool given = getrandom(&seed, sizeof seed, 0) == (ssize_t)sizeof seed;
    char *before = given ? initstate((unsigned)seed, (char *)series, sizeof series) : NULL;
    given = given && before != NULL &&
            getrandom(&series[1], sizeof series - sizeof series[0], 0) ==
                (ssize_t)(sizeof series - sizeof series[0]);
#if !defined(__GLIBC__)
    srand((unsigned)seed);
#endif
    void *socket = given ? zmq_socket(context, ZMQ_ROUTER) : NULL;
    int code = errno;
    if (before != NULL) (void)setstate(before);
    rft_unlock(&guard);
    errno = code;
    return socket;
}

void rft_context_release(void *context)
{
    bool last = false;
    rft_lock(&guard);
    if (context == shared && maker == getpid()) {
        last = --users == 0;
        if (last) shared = NULL;
    }
    rft_unlock(&guard);
    while (last && zmq_ctx_term(context) != 0 && zmq_errno() == EINTR)
        continue;
}
