/*
 * The ZAP handler: one thread that answers ZAP (ZeroMQ's RFC 27) for every publisher of the
 * process, since a context has one place to ask. It starts with the first domain and ends with the
 * last.
 *
 *     ZeroMQ ── domain, key ──► ZAP handler ── 200, the key as User-Id; or 400 ──► ZeroMQ
 *                                  │ every LOOK_MS, and for requests
 *                                  ▼
 *                               allow list ── another edition ──► the publisher's wake descriptor
 *
 * A request makes it read the folder, too, but requests cannot keep the disk busy: for keys that
 * are allowed it is read once in LOOK_KNOWN_MS at most, for others once in LOOK_FRESH_MS. So a
 * removed key is refused LOOK_KNOWN_MS later. A worker that connected before that reading is
 * evicted by it, as are all workers of that key (server.c).
 *
 * Two locks: `turn` is held while the handler starts or ends, `guard` while the domains are read or
 * changed. Either may be held when the process forks, by a thread that the child does not have: the
 * child gets new locks. To take them before the fork instead would make the fork wait for the disk.
 */
#include "net/zap.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <zmq.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/thread.h"

#define ZAP_PLACE      "inproc://zeromq.zap.01"
#define LOOK_MS        200
#define LOOK_FRESH_MS  50
#define LOOK_KNOWN_MS  10
#define REQUEST_FRAMES 7u
#define LOG_MS         1000 /* a refused key is not logged more often */

struct rft_zap {
    rft_allow_list *list;
    char domain[RFT_ZAP_DOMAIN_BYTES];
    int wake;         /* guarded by guard */
    uint64_t edition; /* the handler's: of the list when the wake descriptor was last set */
    int64_t looked;   /* the handler's */
    int64_t logged;   /* the handler's */
    rft_zap *next;    /* guarded by guard */
};

static rft_mutex turn = PTHREAD_MUTEX_INITIALIZER;
static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static rft_zap *domains; /* guarded by guard */

/* From start to end it belongs to its thread. A child of a fork has none of it. */
static struct zap_handler {
    void *socket;
    int wake;
    rft_thread thread;
    atomic_bool ends;
    pid_t process;    /* guarded by turn */
    uint32_t domains; /* guarded by turn */
} handler;

/* ---- A request: version, id, domain, address, routing id, mechanism, key */

static void take_text(rft_view part, char *text, size_t room)
{
    size_t count = part.count < room ? part.count : 0;
    if (count != 0) memcpy(text, part.data, count);
    text[count] = '\0';
}

void rft_zap_request_take(rft_zap_request *asked, uint32_t at, rft_view part)
{
    char version[4];
    switch (at) {
    case 0:
        take_text(part, version, sizeof version);
        asked->whole = strcmp(version, "1.0") == 0;
        break;
    case 1:
        asked->id_bytes = part.count <= sizeof asked->id ? part.count : 0;
        if (asked->id_bytes != 0) memcpy(asked->id, part.data, asked->id_bytes);
        break;
    case 2: take_text(part, asked->domain, sizeof asked->domain); break;
    case 3: take_text(part, asked->address, sizeof asked->address); break;
    case 5: take_text(part, asked->mechanism, sizeof asked->mechanism); break;
    case 6:
        asked->whole = asked->whole && part.count == RFT_KEY_BYTES;
        if (asked->whole) memcpy(asked->key.bytes, part.data, RFT_KEY_BYTES);
        break;
    default: break;
    }
}

void rft_zap_request_end(rft_zap_request *asked, uint32_t count)
{
    asked->whole =
        asked->whole && count == REQUEST_FRAMES && strcmp(asked->mechanism, "CURVE") == 0;
}

/* False: there is none. */
static bool receive_request(void *socket, rft_zap_request *asked)
{
    zmq_msg_t part;
    uint32_t count = 0;
    bool more = true;
    memset(asked, 0, sizeof *asked);
    zmq_msg_init(&part);
    for (; more; count++) {
        if (zmq_msg_recv(&part, socket, ZMQ_DONTWAIT) < 0) break;
        const rft_view bytes = {zmq_msg_data(&part), zmq_msg_size(&part)};
        rft_zap_request_take(asked, count, bytes);
        more = zmq_msg_more(&part) != 0;
    }
    zmq_msg_close(&part);
    rft_zap_request_end(asked, count);
    return count > 0 && !more;
}

static void answer(void *socket, const rft_zap_request *asked, bool admitted, const char *user)
{
    const struct {
        const void *bytes;
        size_t count;
    } parts[] = {
        {"1.0", 3},
        {asked->id, asked->id_bytes},
        {admitted ? "200" : "400", 3},
        {admitted ? "OK" : "not allowed", admitted ? 2 : 11},
        {user, admitted ? strlen(user) : 0},
        {"", 0},
    };
    const size_t last = sizeof parts / sizeof parts[0] - 1;
    for (size_t i = 0; i <= last; i++) {
        int flags = ZMQ_DONTWAIT | (i < last ? ZMQ_SNDMORE : 0);
        (void)zmq_send(socket, parts[i].bytes, parts[i].count, flags);
    }
}

/* ---- The domains */

/* Called with guard held. */
static void look(rft_zap *zap)
{
    rft_allow_list_refresh(zap->list);
    zap->looked = rft_now();
    uint64_t edition = rft_allow_list_edition(zap->list);
    if (edition != zap->edition && zap->wake >= 0) rft_wake_fd_set(zap->wake);
    zap->edition = edition;
}

static bool looked_within(const rft_zap *zap, uint32_t ms)
{
    return rft_now() < rft_after_ms(zap->looked, ms);
}

/* Called with guard held. */
static bool admits(rft_zap *zap, const rft_zap_request *asked, const char *user)
{
    char name[RFT_KEY_NAME_BYTES];
    bool known = rft_allow_list_has(zap->list, user, NULL);
    if (!looked_within(zap, known ? LOOK_KNOWN_MS : LOOK_FRESH_MS)) look(zap);
    if (rft_allow_list_has(zap->list, user, name)) {
        rft_log(REFIT_LOG_INFO, "key %s comes in from %s", name, asked->address);
        return true;
    }
    if (rft_now() >= zap->logged) {
        rft_log(REFIT_LOG_WARNING, "a key that is not in security.allow is refused: %s, from %s",
                user, asked->address);
        zap->logged = rft_deadline(LOG_MS);
    }
    return false;
}

static void answer_request(struct zap_handler *it, const rft_zap_request *asked)
{
    char user[RFT_KEY_TEXT];
    bool admitted = strcmp(asked->domain, RFT_ZAP_OPEN) == 0;
    rft_key_print(&asked->key, user);
    rft_lock(&guard);
    for (rft_zap *zap = asked->whole ? domains : NULL; zap != NULL; zap = zap->next) {
        if (strcmp(zap->domain, asked->domain) == 0) admitted = admits(zap, asked, user);
    }
    rft_unlock(&guard);
    answer(it->socket, asked, admitted, user);
}

static void look_everywhere(void)
{
    rft_lock(&guard);
    for (rft_zap *zap = domains; zap != NULL; zap = zap->next) {
        if (!looked_within(zap, LOOK_MS)) look(zap);
    }
    rft_unlock(&guard);
}

static void *answer_requests(void *user)
{
    struct zap_handler *it = user;
    rft_zap_request asked;
    while (!atomic_load(&it->ends)) {
        zmq_pollitem_t items[] = {
            {.socket = it->socket, .events = ZMQ_POLLIN},
            {.fd = it->wake, .events = ZMQ_POLLIN},
        };
        (void)zmq_poll(items, 2, LOOK_MS);
        rft_wake_fd_clear(it->wake);
        if (receive_request(it->socket, &asked)) answer_request(it, &asked);
        look_everywhere();
    }
    return NULL;
}

/* ---- Its beginning and end, `turn` held */

static refit_status fail_zmq(refit_error *error)
{
    int code = zmq_errno();
    RFT_REFUSE_IF(code == EADDRINUSE, error, REFIT_ERR_BUSY,
                  "another part of this process answers ZeroMQ's requests about keys (ZAP)");
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "requests about keys (ZAP) cannot be answered: %s", zmq_strerror(code));
}

static refit_status place_open(struct zap_handler *it, void *context, refit_error *error)
{
    const int none = 0;
    it->socket = zmq_socket(context, ZMQ_REP);
    if (it->socket == NULL) return fail_zmq(error);
    if (zmq_setsockopt(it->socket, ZMQ_LINGER, &none, sizeof none) == 0 &&
        zmq_bind(it->socket, ZAP_PLACE) == 0) {
        return REFIT_OK;
    }
    refit_status status = fail_zmq(error);
    zmq_close(it->socket);
    return status;
}

/* A closed socket keeps its name for a while, but not one that was unbound. */
static void place_close(struct zap_handler *it)
{
    (void)zmq_unbind(it->socket, ZAP_PLACE);
    zmq_close(it->socket);
}

static refit_status handler_start(void *context, refit_error *error)
{
    struct zap_handler *it = &handler;
    refit_status status;
    atomic_store(&it->ends, false);
    RFT_TRY(rft_wake_fd_open(&it->wake, error));
    RFT_TRY_GOTO(place_open(it, context, error), undo_wake);
    RFT_TRY_GOTO(rft_thread_start(&it->thread, "refit-zap", answer_requests, it, error),
                 undo_place);
    return REFIT_OK;

undo_place:
    place_close(it);
undo_wake:
    rft_wake_fd_close(it->wake);
    return status;
}

static void handler_end(void)
{
    struct zap_handler *it = &handler;
    atomic_store(&it->ends, true);
    rft_wake_fd_set(it->wake);
    rft_thread_join(it->thread);
    place_close(it);
    rft_wake_fd_close(it->wake);
}

/* ---- A fork */

/* In the child, which has no other thread yet, and no use for what they guarded. */
static void forget_locks(void)
{
    static const rft_mutex unlocked = PTHREAD_MUTEX_INITIALIZER;
    turn = unlocked;
    guard = unlocked;
}

/* Without a lock, which a fork could find held. To register the handler twice does no harm. */
static refit_status prepare_for_forks(refit_error *error)
{
    static atomic_bool prepared;
    if (atomic_load(&prepared)) return REFIT_OK;
    int code = pthread_atfork(NULL, NULL, forget_locks);
    if (code != 0) {
        return rft_fail_sub(error, REFIT_ERR_HOST_MEMORY, code,
                            "the ZAP handler cannot be made ready for forks: %s", strerror(code));
    }
    atomic_store(&prepared, true);
    return REFIT_OK;
}

/* ---- Opening and closing a domain */

static void zap_free(rft_zap *zap)
{
    rft_allow_list_close(zap->list);
    rft_free(zap);
}

static refit_status zap_make(const char *folder, rft_zap **out, refit_error *error)
{
    uint64_t unique;
    RFT_TRY(rft_random_u64(&unique, error));
    rft_zap *zap = rft_calloc(1, sizeof *zap);
    RFT_REFUSE_IF(zap == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for an allow list");
    zap->wake = -1;
    snprintf(zap->domain, sizeof zap->domain, "refit-%016" PRIx64, unique);
    refit_status status = rft_allow_list_open(folder, &zap->list, error);
    if (status != REFIT_OK) {
        rft_free(zap);
        return status;
    }
    zap->edition = rft_allow_list_edition(zap->list);
    zap->looked = rft_now();
    *out = zap;
    return REFIT_OK;
}

static void zap_add(rft_zap *zap)
{
    rft_lock(&guard);
    zap->next = domains;
    domains = zap;
    rft_unlock(&guard);
}

static void zap_remove(const rft_zap *zap)
{
    rft_lock(&guard);
    for (rft_zap **at = &domains; *at != NULL; at = &(*at)->next) {
        if (*at != zap) continue;
        *at = zap->next;
        break;
    }
    rft_unlock(&guard);
}

refit_status rft_zap_open(void *context, const char *folder, rft_zap **out, refit_error *error)
{
    rft_zap *zap = NULL;
    refit_status status = REFIT_OK;
    RFT_TRY(prepare_for_forks(error));
    RFT_TRY(zap_make(folder, &zap, error));
    rft_lock(&turn);
    if (handler.process != getpid()) { /* what is there is the parent's */
        handler.process = getpid();
        handler.domains = 0;
        domains = NULL;
    }
    if (handler.domains == 0) status = handler_start(context, error);
    if (status == REFIT_OK) {
        handler.domains++;
        zap_add(zap);
        *out = zap;
    }
    rft_unlock(&turn);
    if (status != REFIT_OK) zap_free(zap);
    return status;
}

void rft_zap_close(rft_zap *zap)
{
    if (zap == NULL) return;
    rft_lock(&turn);
    zap_remove(zap);
    if (handler.process == getpid() && --handler.domains == 0) handler_end();
    rft_unlock(&turn);
    zap_free(zap);
}

const char *rft_zap_domain(const rft_zap *zap)
{
    return zap->domain;
}

rft_allow_list *rft_zap_list(const rft_zap *zap)
{
    return zap->list;
}

void rft_zap_set_wake(rft_zap *zap, int wake)
{
    rft_lock(&guard);
    zap->wake = wake;
    rft_unlock(&guard);
}
