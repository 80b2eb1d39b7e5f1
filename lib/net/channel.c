/*
 * A ROUTER or a DEALER with every wait and size bounded. The options are one table per kind; what
 * each is for stands beside it.
 *
 * A ROUTER's message has the sender's id as its first part, then the message, then at most one
 * payload. Zero-copy payloads are counted by their rft_pending, which is the only memory
 * of ours that ZeroMQ's threads write.
 *
 * ZeroMQ limits the bytes of a part and the number of whole messages, but it keeps the parts of a
 * message that has no end yet, however many. A ROUTER's connections by TCP are ended for that
 * (connections.c). What is not bounded: those by ipc, which lets in this user alone, and what a
 * DEALER takes from the trainer that it trusts.
 */
#include "net/channel.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <zmq.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "net/connections.h"
#include "net/endpoint.h"
#include "net/handshake.h"
#include "net/ipc.h"
#include "net/socket.h"
#include "net/zap.h"
#include "wire/frame.h"

/* Between two ends in one process (inproc) a message changes threads inside libzmq, which is not
 * instrumented: ThreadSanitizer is told that what was written before a send is seen after the
 * receive. */
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define MESSAGE_LEAVES(part) __tsan_release(zmq_msg_data(part))
#define MESSAGE_CAME(part)   __tsan_acquire(zmq_msg_data(part))
#else
#define MESSAGE_LEAVES(part) ((void)0)
#define MESSAGE_CAME(part)   ((void)0)
#endif

#define QUEUE_CONTROL   512  /* control messages that may queue, beside the frames in flight */
#define HANDSHAKE_MS    5000 /* a peer that connects and says nothing is dropped */
#define RECONNECT_MS    50
#define RECONNECT_MAX   1000
#define UNBIND_MS       1000
#define LOOK_MS         5000
#define MESSAGE_SPARE   (64 * 1024)
#define PARTS_MOST      3
#define TEXT_OF(number) zmq_strerror(number)

struct rft_channel {
    void *context;
    void *socket;
    bool router;
    bool full; /* a DEALER that took no message: the next poll ends when it has room, too */
    bool keys; /* CURVE */
    char key[RFT_KEY_TEXT];       /* of a ROUTER with keys: the public half of its own */
    rft_zap *zap;                 /* of a ROUTER with keys */
    rft_connections *connections; /* of a ROUTER that can be reached from outside the process */
    rft_handshake handshake;      /* of a DEALER */
    rft_ipc ipc;
    int64_t look_at; /* when to look whether the path still leads to the socket */
    rft_endpoint asked;
    rft_own_places places;                  /* of a DEALER at user://NAME: where a trainer may be */
    char user_name[RFT_KEY_NAME_BYTES];     /* that NAME; empty: it is at no such endpoint */
    char endpoint[RFT_ENDPOINT_BYTES + 16]; /* as bound, or as asked for by a DEALER */
    zmq_msg_t parts[PARTS_MOST];            /* of the last message received */
};

/* ---- Options */

typedef struct channel_option {
    int name;
    int64_t value;
    bool wide; /* ZeroMQ takes it as 64 bits */
} channel_option;

/* Of one part. Workers send no frames and no lists. */
static int64_t message_most(const rft_channel *channel, const refit_config *config)
{
    uint64_t most = rft_max_u64(config->limits_frame_bytes, config->limits_manifest_bytes);
    if (channel->router) most = 0;
    most = rft_max_u64(most, config->limits_message_bytes);
    return most > INT64_MAX - MESSAGE_SPARE ? INT64_MAX : (int64_t)most + MESSAGE_SPARE;
}

static bool options_apply(void *socket, const channel_option *options, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int narrow = (int)rft_min_u64((uint64_t)options[i].value, INT32_MAX);
        const void *value = options[i].wide ? (const void *)&options[i].value : &narrow;
        size_t bytes = options[i].wide ? sizeof options[i].value : sizeof narrow;
        if (zmq_setsockopt(socket, options[i].name, value, bytes) != 0) return false;
    }
    return true;
}

static bool options_common(const rft_channel *channel, const refit_config *config)
{
    int64_t frames = (int64_t)config->limits_window * RFT_CREDIT * 2;
    int64_t silence_s = config->broadcast_heartbeat_timeout_ms / 1000 + 1;
    const channel_option options[] = {
        {ZMQ_LINGER, config->broadcast_linger_ms, false},
        /* Of the smallest frames, a window's worth and as many that were asked for again. */
        {ZMQ_SNDHWM, (channel->router ? frames : 0) + QUEUE_CONTROL, false},
        {ZMQ_RCVHWM, (channel->router ? 0 : frames) + QUEUE_CONTROL, false},
        {ZMQ_MAXMSGSIZE, message_most(channel, config), true},
        {ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS, false},
        /* Cut the connection of a vanished peer, which frees what is queued for it. Not ZeroMQ's
         * own heartbeat: in 4.3 its timer aborts the process where a connection breaks whose input
         * is held up, as it is in a socket that closes. */
        {ZMQ_TCP_MAXRT, config->broadcast_heartbeat_timeout_ms, false},
        {ZMQ_TCP_KEEPALIVE, 1, false},
        {ZMQ_TCP_KEEPALIVE_IDLE, silence_s, false},
        {ZMQ_TCP_KEEPALIVE_INTVL, silence_s, false},
        {ZMQ_TCP_KEEPALIVE_CNT, 2, false},
        /* Only an address in brackets is IPv6: a name never turns into one unseen. */
        {ZMQ_IPV6, channel->asked.ipv6, false},
    };
    return options_apply(channel->socket, options, sizeof options / sizeof options[0]);
}

static bool options_of_kind(const rft_channel *channel)
{
    const channel_option router[] = {{ZMQ_ROUTER_MANDATORY, 1, false}};
    const channel_option dealer[] = {
        /* Nothing queues up for a trainer that is not there. The price: when a connection ends,
         * ZeroMQ drops what was received but not read, so a BYE or ABORT that was sent right before
         * the trainer closed may be lost: so a publisher awaits its workers' goodbyes
         * (publisher_service.c). A worker that is late notices the trainer's silence. */
        {ZMQ_IMMEDIATE, 1, false},
        {ZMQ_RECONNECT_IVL, RECONNECT_MS, false},
        {ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX, false},
    };
    if (channel->router) return options_apply(channel->socket, router, 1);
    return options_apply(channel->socket, dealer, sizeof dealer / sizeof dealer[0]);
}

/* ---- Opening and closing */

/* inproc has no handshake: both ends are this process. */
static bool wants_keys(const rft_channel *channel, const refit_config *config)
{
    return config->security_key[0] != '\0' && channel->asked.transport != RFT_TRANSPORT_INPROC;
}

static refit_status keys_open(rft_channel *channel, const refit_config *config, refit_error *error)
{
    channel->keys = wants_keys(channel, config);
    if (!channel->keys) return REFIT_OK;
    if (!channel->router) return rft_curve_join(channel->socket, config, error);
    RFT_REFUSE_IF(config->security_allow[0] == '\0', error, REFIT_ERR_CONFIG,
                  "security.key is set but security.allow is not: a trainer with keys needs the "
                  "folder of its workers' public ones");
    RFT_TRY(rft_zap_open(channel->context, config->security_allow, &channel->zap, error));
    return rft_curve_serve(channel->socket, config, rft_zap_domain(channel->zap), channel->key,
                           error);
}

static refit_status check_side(const rft_channel *channel, refit_error *error)
{
    RFT_REFUSE_IF(channel->asked.open && !channel->router, error, REFIT_ERR_INVALID,
                  "endpoint \"%s\" cannot be connected to: port 0 and * are for a publisher to "
                  "bind; name the endpoint that it found (refit_publisher_endpoint)",
                  channel->asked.text);
    RFT_REFUSE_IF(
        channel->asked.named && !channel->router, error, REFIT_ERR_INVALID,
        "endpoint \"%s\" cannot be connected to: an interface is for a publisher to bind; "
        "name an address of it, such as 127.0.0.1",
        channel->asked.text);
    return REFIT_OK;
}

/* A path that others could lead elsewhere, or one where another user listens. A worker may come
 * before its trainer has made the folder: it looks again when it is connected. */
static refit_status check_path(const rft_channel *channel, refit_error *error)
{
    if (channel->asked.transport != RFT_TRANSPORT_IPC) return REFIT_OK;
    refit_status status = rft_ipc_check_folder(channel->asked.rest, error);
    if (status == REFIT_ERR_SECURITY) return status;
    return channel->router ? REFIT_OK : rft_ipc_check_socket(channel->asked.rest, error);
}

/* Beyond this host all that reach a port could read the weights, and a host that answers at an
 * address could give others. */
static refit_status check_trust(const rft_channel *channel, const refit_config *config,
                                refit_error *error)
{
    const char *endpoint = channel->asked.text;
    if (channel->keys) return REFIT_OK;
    if (channel->asked.local) return check_path(channel, error);
    if (config->broadcast_insecure) {
        rft_log(REFIT_LOG_WARNING, "%s is open to the network, without keys (broadcast.insecure)",
                endpoint);
        return REFIT_OK;
    }
    RFT_REFUSE_IF(channel->router, error, REFIT_ERR_SECURITY,
                  "endpoint %.80s can be reached from beyond this host and has no keys: set "
                  "security.key and security.allow (refit keygen), or bind a loopback address or "
                  "an ipc path, or set broadcast.insecure: true",
                  endpoint);
    return rft_fail(error, REFIT_ERR_SECURITY,
                    "endpoint %.80s is beyond this host and there are no keys: set security.key "
                    "and security.server_key (refit keygen), or use a loopback address or an ipc "
                    "path, or set broadcast.insecure: true",
                    endpoint);
}

static refit_status socket_failed(refit_error *error)
{
    int code = zmq_errno();
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "a ZeroMQ socket could not be made: %s",
                        TEXT_OF(code));
}

static refit_status socket_open(rft_channel *channel, const refit_config *config,
                                refit_error *error)
{
    channel->socket = channel->router ? rft_context_router(channel->context)
                                      : zmq_socket(channel->context, ZMQ_DEALER);
    if (channel->socket != NULL && options_common(channel, config) && options_of_kind(channel)) {
        return REFIT_OK;
    }
    return socket_failed(error);
}

/* Of a DEALER that has to check the owner of the listening socket; NULL: it has not. Keys prove the
 * trainer. */
static const char *guarded_path(const rft_channel *channel)
{
    bool guarded =
        !channel->router && channel->asked.transport == RFT_TRANSPORT_IPC && !channel->keys;
    return guarded ? channel->asked.rest : NULL;
}

/* With a ZAP domain ZeroMQ refuses ZMTP before 3.0 (see connections.c). Without keys the handler
 * admits all peers, and need not run. */
static refit_status watch_connections(rft_channel *channel, const refit_config *config,
                                      refit_error *error)
{
    if (!channel->router) {
        return rft_handshake_open(&channel->handshake, channel->context, channel->socket,
                                  channel->keys, guarded_path(channel), error);
    }
    if (channel->asked.transport == RFT_TRANSPORT_INPROC) return REFIT_OK;
    if (!channel->keys &&
        zmq_setsockopt(channel->socket, ZMQ_ZAP_DOMAIN, RFT_ZAP_OPEN, strlen(RFT_ZAP_OPEN)) != 0) {
        return socket_failed(error);
    }
    return rft_connections_open(channel->context, channel->socket, &channel->ipc, config,
                                &channel->connections, error);
}

/* A worker that looks for this name would find the other publisher, in any of the folders. */
static refit_status check_name(const rft_endpoint *asked, refit_error *error)
{
    rft_own_places places;
    rft_endpoint found;
    if (asked->transport != RFT_TRANSPORT_USER || asked->open) return REFIT_OK;
    rft_own_places_list(&places);
    RFT_REFUSE_IF(rft_endpoint_seek(asked->rest, &places, &found), error, REFIT_ERR_BUSY,
                  "another publisher has the name %.60s: it listens at %.100s; close it, or use "
                  "another name",
                  asked->text, found.text);
    return REFIT_OK;
}

/* A worker connects where its trainer listens; while there is none, where it would bind itself. */
static refit_status find_address(rft_channel *channel, refit_error *error)
{
    if (channel->asked.transport == RFT_TRANSPORT_USER && !channel->router) {
        rft_endpoint found;
        strcpy(channel->user_name, channel->asked.rest);
        rft_own_places_list(&channel->places);
        if (rft_endpoint_seek(channel->user_name, &channel->places, &found))
            return rft_endpoint_parse(found.text, &channel->asked, error);
    }
    if (channel->router) RFT_TRY(check_name(&channel->asked, error));
    return rft_endpoint_place(&channel->asked, error);
}

static refit_status channel_open(const char *endpoint, bool router, const refit_config *config,
                                 rft_channel **out, refit_error *error)
{
    rft_channel *channel = rft_calloc(1, sizeof *channel);
    RFT_REFUSE_IF(channel == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a channel");
    channel->router = router;
    channel->ipc.lock_fd = -1;
    channel->look_at = INT64_MAX;
    for (int i = 0; i < PARTS_MOST; i++) {
        zmq_msg_init(&channel->parts[i]);
    }
    refit_status status = rft_endpoint_parse(endpoint, &channel->asked, error);
    if (status == REFIT_OK) status = check_side(channel, error);
    if (status == REFIT_OK) status = find_address(channel, error);
    if (status == REFIT_OK) status = rft_context_acquire(&channel->context, error);
    if (status == REFIT_OK) status = socket_open(channel, config, error);
    if (status == REFIT_OK) status = keys_open(channel, config, error);
    if (status == REFIT_OK) status = check_trust(channel, config, error);
    if (status == REFIT_OK) status = watch_connections(channel, config, error);
    if (status == REFIT_OK) {
        *out = channel;
    } else {
        rft_channel_close(channel);
    }
    return status;
}

static refit_status bind_failed(const rft_channel *channel, int code, refit_error *error)
{
    RFT_REFUSE_IF(code == EADDRINUSE, error, REFIT_ERR_BUSY,
                  "endpoint %s is in use: close what holds it, or use another",
                  channel->asked.text);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "cannot bind %.100s: %s%s",
                        channel->asked.text, TEXT_OF(code),
                        code == ENODEV ? ": a publisher binds a numeric address (127.0.0.1) or an "
                                         "interface's name, no host name"
                                       : "");
}

/* ZeroMQ gets the descriptor of a socket that listens already, and leaves its file alone. */
static refit_status ipc_listen(rft_channel *channel, refit_error *error)
{
    int fd = -1;
    RFT_TRY(rft_ipc_open(&channel->ipc, channel->asked.rest, &fd, error));
    if (zmq_setsockopt(channel->socket, ZMQ_USE_FD, &fd, sizeof fd) == 0 &&
        zmq_bind(channel->socket, channel->asked.text) == 0) {
        channel->look_at = rft_after_ms(rft_now(), LOOK_MS);
        return REFIT_OK;
    }
    int code = zmq_errno();
    close(fd);
    return bind_failed(channel, code, error);
}

static refit_status channel_listen(rft_channel *channel, refit_error *error)
{
    if (channel->asked.transport == RFT_TRANSPORT_IPC) {
        RFT_TRY(ipc_listen(channel, error));
    } else if (channel->asked.transport == RFT_TRANSPORT_TCP &&
               strncmp(channel->asked.rest, "localhost:", strlen("localhost:")) == 0) {
        /* From 4.3.5 on ZeroMQ binds what the resolver makes of a name. "localhost" needs no keys,
         * so it must not become an address that other hosts reach. */
        return bind_failed(channel, ENODEV, error);
    } else if (zmq_bind(channel->socket, channel->asked.text) != 0) {
        return bind_failed(channel, zmq_errno(), error);
    }
    if (channel->connections != NULL) rft_connections_tend(channel->connections, rft_now());
    size_t room = sizeof channel->endpoint;
    if (zmq_getsockopt(channel->socket, ZMQ_LAST_ENDPOINT, channel->endpoint, &room) == 0) {
        return REFIT_OK;
    }
    return bind_failed(channel, zmq_errno(), error);
}

/* Every user can reach a port of this host, and bind it while no publisher has it. */
static void warn_of_users(const rft_channel *channel, const refit_config *config)
{
    const rft_endpoint *asked = &channel->asked;
    if (asked->transport != RFT_TRANSPORT_TCP || !asked->local || channel->keys) return;
    rft_log(config->broadcast_insecure ? REFIT_LOG_INFO : REFIT_LOG_WARNING,
            "%s has no keys: every user of this machine can read and replace the weights; use "
            "user://NAME, or an ipc path, or keys (security.key)",
            channel->endpoint);
}

refit_status rft_channel_bind(const char *endpoint, const refit_config *config, rft_channel **out,
                              refit_error *error)
{
    rft_channel *channel = NULL;
    RFT_TRY(channel_open(endpoint, true, config, &channel, error));
    refit_status status = channel_listen(channel, error);
    if (status == REFIT_OK) {
        warn_of_users(channel, config);
        *out = channel;
    } else {
        rft_channel_close(channel);
    }
    return status;
}

/* At user://NAME the socket may change, and other threads read the text for their sentences: so it
 * does not name the socket. */
static void name_endpoint(rft_channel *channel)
{
    if (channel->user_name[0] == '\0')
        strcpy(channel->endpoint, channel->asked.text);
    else
        (void)snprintf(channel->endpoint, sizeof channel->endpoint, "user://%s of user %u",
                       channel->user_name, (unsigned)geteuid());
}

refit_status rft_channel_connect(const char *endpoint, const refit_config *config,
                                 rft_channel **out, refit_error *error)
{
    rft_channel *channel = NULL;
    RFT_TRY(channel_open(endpoint, false, config, &channel, error));
    if (zmq_connect(channel->socket, channel->asked.text) == 0) {
        name_endpoint(channel);
        warn_of_users(channel, config);
        *out = channel;
        return REFIT_OK;
    }
    int code = zmq_errno();
    refit_status status = rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "cannot connect to %s: %s",
                                       channel->asked.text, TEXT_OF(code));
    rft_channel_close(channel);
    return status;
}

/* Ends it for a child as well, which may not have come to its handler yet (forks.h). Not before
 * ZeroMQ has closed its own: it would take the end of a listener for a mistake. */
static void listener_end(int listener, bool closed)
{
    if (listener < 0) return;
    if (closed) (void)shutdown(listener, SHUT_RDWR);
    (void)close(listener);
}

/* ZeroMQ closes a listener on its own thread, some time after it was told to; until then the port
 * is busy for the next publisher. */
static void unbind(rft_channel *channel, int listener)
{
    char name[64];
    uint64_t unique; /* names of closed sockets stay taken for a while */
    void *monitor = zmq_socket(channel->context, ZMQ_PAIR);
    if (monitor == NULL) {
        listener_end(listener, false);
        return;
    }
    if (rft_random_u64(&unique, NULL) != REFIT_OK) unique = (uintptr_t)monitor;
    snprintf(name, sizeof name, "inproc://refit-closed-%" PRIx64, unique);
    bool heard = zmq_socket_monitor(channel->socket, name, ZMQ_EVENT_CLOSED) == 0 &&
                 zmq_connect(monitor, name) == 0 &&
                 zmq_unbind(channel->socket, channel->endpoint) == 0;
    zmq_pollitem_t item = {.socket = monitor, .events = ZMQ_POLLIN};
    bool closed = heard && zmq_poll(&item, 1, UNBIND_MS) > 0;
    listener_end(listener, closed);
    (void)zmq_socket_monitor(channel->socket, NULL, 0);
    zmq_close(monitor);
}

void rft_channel_set_linger(rft_channel *channel, uint32_t linger_ms)
{
    int linger = linger_ms < INT32_MAX ? (int)linger_ms : INT32_MAX;
    (void)zmq_setsockopt(channel->socket, ZMQ_LINGER, &linger, sizeof linger);
}

void rft_channel_close(rft_channel *channel)
{
    if (channel == NULL) return;
    bool listens = channel->router && channel->endpoint[0] != '\0';
    listens = listens && channel->asked.transport == RFT_TRANSPORT_TCP;
    int listener = listens ? rft_connections_copy_listener(channel->connections) : -1;
    rft_connections_close(channel->connections);
    if (listens) unbind(channel, listener);
    for (int i = 0; i < PARTS_MOST; i++) {
        zmq_msg_close(&channel->parts[i]);
    }
    rft_handshake_close(&channel->handshake, channel->socket);
    if (channel->socket != NULL) zmq_close(channel->socket);
    rft_zap_close(channel->zap);
    rft_ipc_close(&channel->ipc);
    if (channel->context != NULL) rft_context_release(channel->context);
    rft_free(channel);
}

const char *rft_channel_endpoint(const rft_channel *channel)
{
    return channel->endpoint;
}

bool rft_channel_is_local(const rft_channel *channel)
{
    return channel->asked.local;
}

const char *rft_channel_key(const rft_channel *channel)
{
    return channel->key;
}

rft_allow_list *rft_channel_allow_list(const rft_channel *channel)
{
    return channel->zap == NULL ? NULL : rft_zap_list(channel->zap);
}

void rft_channel_watch_keys(rft_channel *channel, int wake)
{
    if (channel->zap != NULL) rft_zap_set_wake(channel->zap, wake);
}

refit_status rft_channel_take_failure(rft_channel *channel, refit_error *why)
{
    return rft_handshake_take(&channel->handshake, why);
}

bool rft_channel_handshake_ended(const rft_channel *channel)
{
    return channel->handshake.ended;
}

/* ---- Messages */

/* Whether a trainer is elsewhere: at another of the user's own folders. */
static bool is_elsewhere(const rft_channel *channel, rft_endpoint *found)
{
    return channel->user_name[0] != '\0' &&
           rft_endpoint_seek(channel->user_name, &channel->places, found) &&
           strcmp(found->text, channel->asked.text) != 0;
}

/* For when ZeroMQ has given up on the other side, or tries an endpoint where no trainer is. */
static void reconnect(rft_channel *channel)
{
    rft_endpoint found;
    (void)zmq_disconnect(channel->socket, channel->asked.text);
    if (is_elsewhere(channel, &found)) {
        rft_log(REFIT_LOG_INFO, "the trainer listens at %s now", found.text);
        (void)rft_endpoint_parse(found.text, &channel->asked, NULL);
    }
    if (zmq_connect(channel->socket, channel->asked.text) != 0) {
        rft_log(REFIT_LOG_WARNING, "%s could not be connected to again: %s", channel->asked.text,
                TEXT_OF(zmq_errno()));
    }
}

/* Logs it once. To bind again would not help workers that look at the old path alone. */
static void look_at_path(rft_channel *channel, int64_t now)
{
    if (now < channel->look_at) return;
    channel->look_at = rft_after_ms(now, LOOK_MS);
    if (rft_ipc_is_named(&channel->ipc)) return;
    channel->look_at = INT64_MAX;
    rft_log(REFIT_LOG_WARNING,
            "the socket file %s was removed: workers that come now do not find the trainer, those "
            "that are connected stay; keep the folder (loginctl enable-linger), or set "
            "XDG_RUNTIME_DIR to another one for both ends, and start the trainer again",
            channel->ipc.path);
}

/* Reads what ZeroMQ tells about connections. Returns whether the caller has to know. */
static bool tend_connections(rft_channel *channel)
{
    rft_handshake *handshake = &channel->handshake;
    rft_endpoint found;
    look_at_path(channel, rft_now());
    if (channel->connections != NULL) rft_connections_tend(channel->connections, rft_now());
    if (handshake->monitor == NULL) return false;
    rft_handshake_receive(handshake, rft_now());
    if (rft_handshake_take_cut(handshake))
        (void)zmq_disconnect(channel->socket, channel->asked.text);
    bool missed = rft_handshake_take_missed(handshake) && is_elsewhere(channel, &found);
    if (rft_handshake_is_due(handshake, rft_now()) || missed) reconnect(channel);
    return handshake->why.status != REFIT_OK;
}

/* ---- Waiting */

/* Channels that are waited for without memory from the heap. */
#define POLL_FEW 4u
/* Where there is none for more, the others are looked at so often. */
#define POLL_FEW_MS 10u
/* Of a channel: its socket, and what tells about its connections. */
#define POLL_EACH 2u

static void *news_of(const rft_channel *channel)
{
    return channel->connections == NULL ? channel->handshake.monitor
                                        : rft_connections_monitor(channel->connections);
}

/* When something is to be done about its connections. */
static int64_t due_at(const rft_channel *channel)
{
    rft_connections *connections = channel->connections;
    int64_t due = connections == NULL ? INT64_MAX : rft_connections_tend_at(connections);
    if (channel->handshake.monitor != NULL) due = channel->handshake.retry_at;
    return channel->look_at < due ? channel->look_at : due;
}

/* What is waited for: POLL_EACH entries a channel, and the wake descriptor after them. */
static int list_items(rft_channel *const *channels, uint32_t count, int wake_fd,
                      zmq_pollitem_t *items)
{
    zmq_pollitem_t *item = items;
    for (uint32_t i = 0; i < count; i++) {
        short room = channels[i]->full ? ZMQ_POLLOUT : 0;
        void *news = news_of(channels[i]);
        *item++ =
            (zmq_pollitem_t){.socket = channels[i]->socket, .events = (short)(ZMQ_POLLIN | room)};
        /* Of a channel without news its socket stands there twice. */
        *item++ = (zmq_pollitem_t){.socket = news != NULL ? news : channels[i]->socket,
                                   .events = ZMQ_POLLIN};
    }
    if (wake_fd >= 0) *item++ = (zmq_pollitem_t){.fd = wake_fd, .events = ZMQ_POLLIN};
    return (int)(item - items);
}

/* Until what was waited for is there, ZeroMQ has news of a connection, or it is time to do
 * something about one. Returns whether something is there for the caller. */
static bool poll_once(rft_channel *const *channels, uint32_t count, int wake_fd,
                      zmq_pollitem_t *items, int64_t deadline)
{
    for (uint32_t i = 0; i < count; i++)
        if (due_at(channels[i]) < deadline) deadline = due_at(channels[i]);
    int listed = list_items(channels, count, wake_fd, items);
    bool there = zmq_poll(items, listed, rft_ms_until(deadline)) < 0;
    if (wake_fd >= 0) there = items[listed - 1].revents != 0 || there;
    for (uint32_t i = 0; i < count; i++) {
        const zmq_pollitem_t *own = &items[(size_t)i * POLL_EACH];
        if ((own->revents & ZMQ_POLLOUT) != 0) channels[i]->full = false;
        there = own->revents != 0 || there;
        there = tend_connections(channels[i]) || there;
    }
    return there;
}

void rft_channels_poll(rft_channel *const *channels, uint32_t count, int wake_fd, int timeout_ms)
{
    zmq_pollitem_t few[POLL_FEW * POLL_EACH + 1], *items = few;
    if (count > POLL_FEW) items = rft_calloc((size_t)count * POLL_EACH + 1, sizeof *items);
    if (items == NULL) {
        items = few;
        count = POLL_FEW;
        if (timeout_ms > (int)POLL_FEW_MS) timeout_ms = (int)POLL_FEW_MS;
    }
    int64_t deadline = rft_deadline((uint32_t)timeout_ms);
    while (!poll_once(channels, count, wake_fd, items, deadline) && rft_now() < deadline)
        continue;
    if (items != few) rft_free(items);
}

void rft_channel_poll(rft_channel *channel, int wake_fd, int timeout_ms)
{
    rft_channels_poll(&channel, 1, wake_fd, timeout_ms);
}

/* ---- Receiving and sending */

/* Reads all parts of one message, keeps the first `PARTS_MOST`, and gives their number. */
static refit_status parts_receive(rft_channel *channel, uint32_t *count, refit_error *error)
{
    zmq_msg_t spare;
    uint32_t got = 0;
    bool more = true;
    zmq_msg_init(&spare);
    for (; more; got++) {
        zmq_msg_t *part = got < PARTS_MOST ? &channel->parts[got] : &spare;
        if (zmq_msg_recv(part, channel->socket, ZMQ_DONTWAIT) < 0) break;
        MESSAGE_CAME(part);
        more = zmq_msg_more(part) != 0;
    }
    int code = zmq_errno();
    zmq_msg_close(&spare);
    *count = got;
    if (!more) return REFIT_OK;
    return rft_fail_sub(error, REFIT_ERR_TIMEOUT, code, "no message is there");
}

static rft_view part_view(zmq_msg_t *part)
{
    return (rft_view){zmq_msg_data(part), zmq_msg_size(part)};
}

static bool sender_read(rft_channel *channel, rft_peer_id *from)
{
    rft_view id = part_view(&channel->parts[0]);
    if (id.count > RFT_PEER_ID_BYTES) return false;
    memcpy(from->bytes, id.data, id.count);
    from->count = (uint8_t)id.count;
    return true;
}

/* Of a part that came through the connection: ZeroMQ 4.3 may lose what it knows of the first. */
static void key_read(zmq_msg_t *part, rft_peer_id *from)
{
    const char *user = zmq_msg_gets(part, "User-Id");
    if (user != NULL && strlen(user) == RFT_KEY_CHARS) strcpy(from->key, user);
}

/* On a DEALER, by the connection that its first part came through. What is refused counts as not
 * there. */
static refit_status check_sender(rft_channel *channel, refit_error *error)
{
    refit_error why;
    const char *path = channel->handshake.path;
    if (path == NULL) return REFIT_OK;
    const char *peer = zmq_msg_gets(&channel->parts[0], "Peer-Address");
    if (rft_ipc_check_peer(path, peer, &why) == REFIT_OK) return REFIT_OK;
    rft_handshake_refuse(&channel->handshake, &why, rft_now());
    return rft_fail(error, REFIT_ERR_TIMEOUT, "%s", why.text);
}

refit_status rft_channel_receive(rft_channel *channel, rft_envelope *out, refit_error *error)
{
    uint32_t count = 0, head = channel->router ? 1 : 0;
    RFT_TRY(parts_receive(channel, &count, error));
    RFT_TRY(check_sender(channel, error));
    memset(out, 0, sizeof *out);
    RFT_REFUSE_IF(channel->router && !sender_read(channel, &out->from), error, REFIT_ERR_PROTOCOL,
                  "a peer chose an id of more than %d bytes", RFT_PEER_ID_BYTES);
    if (channel->zap != NULL && count > head) key_read(&channel->parts[head], &out->from);
    out->connection = count > head ? zmq_msg_get(&channel->parts[head], ZMQ_SRCFD) : -1;
    if (channel->connections != NULL)
        rft_connections_receive(channel->connections, out->connection);
    RFT_REFUSE_IF(count <= head || count > head + 2, error, REFIT_ERR_PROTOCOL,
                  "a message of %u parts instead of one or two", count - head);
    out->message = part_view(&channel->parts[head]);
    if (count > head + 1) out->payload = part_view(&channel->parts[head + 1]);
    return REFIT_OK;
}

void rft_channel_claim(rft_channel *channel, int connection)
{
    if (channel->connections != NULL) {
        rft_connections_claim(channel->connections, connection, rft_now());
    }
}

rft_connection_counts rft_channel_count_connections(const rft_channel *channel)
{
    if (channel->connections == NULL) return (rft_connection_counts){0};
    return rft_connections_count(channel->connections);
}

static void payload_release(void *data, void *hint)
{
    (void)data;
    rft_pending_lower(hint);
}

/* The parts of one message that is sent. All are made before the first is sent: a message that
 * stopped in the middle would be taken for the beginning of the next one. */
typedef struct parcel {
    zmq_msg_t parts[PARTS_MOST];
    int count;
} parcel;

static bool parcel_add_bytes(parcel *to, const void *data, size_t count)
{
    zmq_msg_t *part = &to->parts[to->count];
    if (zmq_msg_init_size(part, count) != 0) return false;
    if (count > 0) memcpy(zmq_msg_data(part), data, count);
    to->count++;
    return true;
}

static bool parcel_add_payload(parcel *to, const rft_payload *payload)
{
    zmq_msg_t *part = &to->parts[to->count];
    if (payload->bytes.count == 0) return parcel_add_bytes(to, NULL, 0);
    rft_pending_raise(payload->pending);
    if (zmq_msg_init_data(part, (void *)(uintptr_t)payload->bytes.data, payload->bytes.count,
                          payload_release, payload->pending) != 0) {
        rft_pending_lower(payload->pending);
        return false;
    }
    to->count++;
    return true;
}

/* ZeroMQ refuses a message at its first part or not at all. */
static bool parcel_send(rft_channel *channel, parcel *from)
{
    for (int i = 0; i < from->count; i++) {
        int flags = ZMQ_DONTWAIT | (i + 1 < from->count ? ZMQ_SNDMORE : 0);
        MESSAGE_LEAVES(&from->parts[i]);
        if (zmq_msg_send(&from->parts[i], channel->socket, flags) < 0) return false;
    }
    return true;
}

/* Of parts that were sent, nothing is left to close. */
static void parcel_close(parcel *made)
{
    for (int i = 0; i < made->count; i++) {
        zmq_msg_close(&made->parts[i]);
    }
}

static refit_status send_failed(int code, refit_error *error)
{
    RFT_REFUSE_IF(code == EAGAIN, error, REFIT_ERR_BUSY, "the queue to the peer is full");
    RFT_REFUSE_IF(code == EHOSTUNREACH, error, REFIT_ERR_PEER, "the peer is not connected");
    RFT_REFUSE_IF(code == ENOMEM, error, REFIT_ERR_HOST_MEMORY, "no memory for a message");
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "a message could not be sent: %s",
                        TEXT_OF(code));
}

/* Takes the parcel; `made`: all its parts are. */
static refit_status send_parcel(rft_channel *channel, parcel *from, bool made, refit_error *error)
{
    bool sent = made && parcel_send(channel, from);
    int code = zmq_errno();
    channel->full = !sent && code == EAGAIN && !channel->router;
    parcel_close(from);
    return sent ? REFIT_OK : send_failed(code, error);
}

refit_status rft_channel_send(rft_channel *channel, const rft_peer_id *to, rft_view message,
                              const rft_payload *payload, refit_error *error)
{
    parcel made = {.count = 0};
    bool done = to == NULL || parcel_add_bytes(&made, to->bytes, to->count);
    done = done && parcel_add_bytes(&made, message.data, message.count);
    done = done && (payload == NULL || parcel_add_payload(&made, payload));
    return send_parcel(channel, &made, done, error);
}

refit_status rft_channel_send_lent(rft_channel *channel, const rft_peer_id *to,
                                   const rft_payload *message, refit_error *error)
{
    parcel made = {.count = 0};
    bool done = to == NULL || parcel_add_bytes(&made, to->bytes, to->count);
    done = done && parcel_add_payload(&made, message);
    return send_parcel(channel, &made, done, error);
}

bool rft_peer_id_equal(const rft_peer_id *a, const rft_peer_id *b)
{
    return a->count == b->count && memcmp(a->bytes, b->bytes, a->count) == 0 &&
           strcmp(a->key, b->key) == 0;
}
