/*
 * ZeroMQ's sockets before they are a channel.
 *
 * The context is counted: inproc endpoints are only visible inside one context, and each context
 * costs two threads, so the process shares one; it is the only state here that no object owns. The
 * process id tells a fork: a context that was made by another process is forgotten, never ended,
 * since its threads do not run here. The lock is held for no call that waits, but for the start of
 * two threads. It also covers the making of sockets whose first id must not be guessed: rand(),
 * where ZeroMQ takes that id from, is one for the process, too. A fork waits for it: a child would
 * find it held, and rand() at a series on the stack of a thread that it does not have.
 *
 * A socket has one security mechanism: with CURVE it talks to no peer without. A secret key is in
 * memory of rft_secret_open until ZeroMQ has its copy.
 */
#include "net/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <refit/keys.h>

#include <zmq.h>

#include "base/random.h"
#include "base/thread.h"
#include "net/shortage.h"
#include "trust/key.h"

/* ZeroMQ 4.3 knows it in every build, but its header names it to some only. One that does not know
 * it refuses it, and so does rft_curve_serve. */
#if !defined(ZMQ_ZAP_ENFORCE_DOMAIN)
#define ZMQ_ZAP_ENFORCE_DOMAIN 93
#endif

/* ---- The context */

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static void *shared;   /* guarded by guard */
static uint64_t users; /* guarded by guard */
static pid_t maker;    /* guarded by guard */

/* ZeroMQ starts the context's threads with its first socket: so one is made right after the probe,
 * and closed. */
static refit_status context_start(void **out, refit_error *error)
{
    rft_shortage_guard();
    RFT_TRY(rft_shortage_probe(error));
    void *context = zmq_ctx_new();
    void *first = context == NULL ? NULL : zmq_socket(context, ZMQ_PAIR);
    int code = errno;
    if (first == NULL) {
        if (context != NULL) (void)zmq_ctx_term(context);
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "ZeroMQ gave no context: %s",
                            zmq_strerror(code));
    }
    zmq_close(first);
    *out = context;
    return REFIT_OK;
}

/* Called with the lock held. */
static refit_status shared_take(void **out, refit_error *error)
{
    if (shared == NULL || maker != getpid()) {
        shared = NULL;
        RFT_TRY(context_start(&shared, error));
        maker = getpid();
        users = 0;
    }
    users++;
    *out = shared;
    return REFIT_OK;
}

static void before_fork(void)
{
    rft_lock(&guard);
}

static void after_fork(void)
{
    rft_unlock(&guard);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int unprepared;

static void prepare_for_forks(void)
{
    unprepared = pthread_atfork(before_fork, after_fork, after_fork);
}

refit_status rft_context_acquire(void **out, refit_error *error)
{
    (void)pthread_once(&once, prepare_for_forks);
    if (unprepared != 0) {
        return rft_fail_sub(error, REFIT_ERR_HOST_MEMORY, unprepared,
                            "ZeroMQ's context cannot be made ready for forks: %s",
                            strerror(unprepared));
    }
    rft_lock(&guard);
    refit_status status = shared_take(out, error);
    rft_unlock(&guard);
    return status;
}

/* ZeroMQ asks rand(), which nothing has seeded: so it is given a series of its own meanwhile. The
 * words after the first are the series itself, so that its beginning has more than 32 bits of
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

/* ---- Keys as options */

static refit_status check_curve(refit_error *error)
{
    RFT_REFUSE_IF(zmq_has("curve") != 1, error, REFIT_ERR_UNSUPPORTED,
                  "the ZeroMQ here was built without CURVE, so there are no keys: install a libzmq "
                  "with libsodium");
    return REFIT_OK;
}

static refit_status fail_zmq(const char *what, int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "%s: %s", what, zmq_strerror(code));
}

static refit_status read_key(const char *path, rft_key_half half, rft_key *out, refit_error *error)
{
    return rft_key_file_read(AT_FDCWD, path, half, out, error);
}

static bool set_key(void *socket, int option, const rft_key *key)
{
    return zmq_setsockopt(socket, option, key->bytes, sizeof key->bytes) == 0;
}

typedef struct own_pair {
    rft_key secret;
    rft_key open; /* its public half */
    char secret_text[RFT_KEY_TEXT];
    char open_text[RFT_KEY_TEXT];
} own_pair;

/* The public half follows from the secret one. */
static bool complete_pair(own_pair *own)
{
    rft_key_print(&own->secret, own->secret_text);
    return zmq_curve_public(own->open_text, own->secret_text) == 0 &&
           rft_key_parse(own->open_text, RFT_KEY_CHARS, &own->open);
}

static refit_status serve_with(void *socket, const refit_config *config, const char *domain,
                               own_pair *own, refit_error *error)
{
    const int on = 1;
    RFT_TRY(read_key(config->security_key, RFT_KEY_SECRET, &own->secret, error));
    /* Both: a domain that is not enforced, and an enforced one that is empty, admit all peers. */
    bool set = complete_pair(own) &&
               zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, domain, strlen(domain)) == 0 &&
               zmq_setsockopt(socket, ZMQ_ZAP_ENFORCE_DOMAIN, &on, sizeof on) == 0 &&
               zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &on, sizeof on) == 0 &&
               set_key(socket, ZMQ_CURVE_SECRETKEY, &own->secret);
    return set ? REFIT_OK : fail_zmq("the trainer's key could not be used", zmq_errno(), error);
}

refit_status rft_curve_serve(void *socket, const refit_config *config, const char *domain,
                             char key[RFT_KEY_TEXT], refit_error *error)
{
    void *own = NULL;
    RFT_TRY(check_curve(error));
    RFT_TRY(rft_secret_open(sizeof(own_pair), &own, error));
    refit_status status = serve_with(socket, config, domain, own, error);
    if (status == REFIT_OK) strcpy(key, ((own_pair *)own)->open_text);
    rft_secret_close(own, sizeof(own_pair));
    return status;
}

static refit_status join_with(void *socket, const refit_config *config, own_pair *own,
                              refit_error *error)
{
    rft_key server;
    RFT_TRY(read_key(config->security_server_key, RFT_KEY_PUBLIC, &server, error));
    RFT_TRY(read_key(config->security_key, RFT_KEY_SECRET, &own->secret, error));
    bool set = complete_pair(own) && set_key(socket, ZMQ_CURVE_SERVERKEY, &server) &&
               set_key(socket, ZMQ_CURVE_PUBLICKEY, &own->open) &&
               set_key(socket, ZMQ_CURVE_SECRETKEY, &own->secret);
    return set ? REFIT_OK : fail_zmq("the worker's key could not be used", zmq_errno(), error);
}

refit_status rft_curve_join(void *socket, const refit_config *config, refit_error *error)
{
    void *own = NULL;
    RFT_TRY(check_curve(error));
    RFT_REFUSE_IF(config->security_server_key[0] == '\0', error, REFIT_ERR_CONFIG,
                  "security.key is set but security.server_key is not: a worker with keys needs "
                  "the trainer's public one");
    RFT_TRY(rft_secret_open(sizeof(own_pair), &own, error));
    refit_status status = join_with(socket, config, own, error);
    rft_secret_close(own, sizeof(own_pair));
    return status;
}

/* ---- Key pairs as files */

static refit_status make_pair(rft_key *public_key, rft_key *secret_key, refit_error *error)
{
    char public_text[RFT_KEY_TEXT];
    void *secret_text = NULL;
    RFT_TRY(check_curve(error));
    RFT_TRY(rft_secret_open(RFT_KEY_TEXT, &secret_text, error));
    bool made = zmq_curve_keypair(public_text, secret_text) == 0 &&
                rft_key_parse(public_text, RFT_KEY_CHARS, public_key) &&
                rft_key_parse(secret_text, RFT_KEY_CHARS, secret_key);
    int code = zmq_errno();
    rft_secret_close(secret_text, RFT_KEY_TEXT);
    return made ? REFIT_OK : fail_zmq("ZeroMQ made no key pair", code, error);
}

refit_status refit_keys_generate(const char *folder, const char *name, int replace,
                                 refit_error *error)
{
    rft_key public_key;
    void *secret_key = NULL;
    RFT_REFUSE_IF(folder == NULL || name == NULL || folder[0] == '\0', error, REFIT_ERR_INVALID,
                  "keys need a folder and a name");
    RFT_TRY(rft_secret_open(sizeof(rft_key), &secret_key, error));
    refit_status status = make_pair(&public_key, secret_key, error);
    if (status == REFIT_OK)
        status = rft_key_files_write(folder, name, &public_key, secret_key, replace != 0, error);
    rft_secret_close(secret_key, sizeof(rft_key));
    return status;
}

/* ---- Monitors: a PAIR by inproc, under a name that is used once, because names of closed sockets
 * stay taken for a while */

refit_status rft_monitor_open(void *context, void *socket, int events, void **out,
                              refit_error *error)
{
    const int none = 0;
    char name[64];
    uint64_t unique;
    RFT_TRY(rft_random_u64(&unique, error));
    snprintf(name, sizeof name, "inproc://refit-events-%016" PRIx64, unique);
    void *monitor = zmq_socket(context, ZMQ_PAIR);
    /* No limit: where the queue is full, ZeroMQ's thread would wait until it is read. */
    if (monitor != NULL && zmq_setsockopt(monitor, ZMQ_RCVHWM, &none, sizeof none) == 0 &&
        zmq_setsockopt(monitor, ZMQ_LINGER, &none, sizeof none) == 0 &&
        zmq_socket_monitor(socket, name, events) == 0 && zmq_connect(monitor, name) == 0) {
        *out = monitor;
        return REFIT_OK;
    }
    int code = zmq_errno();
    rft_monitor_close(monitor, socket);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "connections cannot be watched: %s",
                        zmq_strerror(code));
}

void rft_monitor_close(void *monitor, void *socket)
{
    if (monitor == NULL) return;
    (void)zmq_socket_monitor(socket, NULL, 0);
    zmq_close(monitor);
}

/* The first frame has a number of 16 bits and one of 32, as the machine has them; the second is an
 * address. */
bool rft_monitor_read(void *monitor, uint16_t *event, uint32_t *value)
{
    unsigned char head[6];
    char address[256];
    int more = 0;
    size_t room = sizeof more;
    if (zmq_recv(monitor, head, sizeof head, ZMQ_DONTWAIT) != (int)sizeof head) return false;
    memcpy(event, head, sizeof *event);
    memcpy(value, head + sizeof *event, sizeof *value);
    (void)zmq_getsockopt(monitor, ZMQ_RCVMORE, &more, &room);
    if (more != 0) (void)zmq_recv(monitor, address, sizeof address, ZMQ_DONTWAIT);
    return true;
}
