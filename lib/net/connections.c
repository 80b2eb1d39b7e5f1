/*
 * The connections of a ROUTER, as its monitor reports them.
 *
 *     ACCEPTED ─► unclaimed ──a worker's message──► claimed
 *                     ▲  │                              │
 *                     │  │ too many, too long           │ silent for as long
 *                     │  └──► shutdown(2) ─► gone       │
 *                     └────────────────────────────────┘
 *
 * Why it is needed. ZeroMQ (4.3.4, 4.3.5, and its master of July 2026) gives a peer without a
 * routing id the next number of a counter, a zero byte and 32 bits, and lets any peer claim such an
 * id. A peer that is given an id which another one claims makes ZeroMQ abort the process. Every
 * peer that finishes a handshake can claim: where there are no keys, all that reach the address;
 * with keys, the owners of allowed ones. No option forbids either half, so what is left is to make
 * the number hard to hit:
 *
 *   - The counter begins at random bits (rft_context_router).
 *   - Few connections stand at once, workers and unclaimed ones: H. A claim that gets no answer
 *     tells that the number is in use, so standing peers count as much as standing claims do.
 *   - Few handshakes succeed in a time: RATE_NS each in the long run, after a burst. More, and the
 *     listener is held off. Connections that stand are not touched by that.
 *   - ZMTP before 3.0 is refused (rft_channel): its handshake ends without an event.
 *
 * An attacker that holds all of H then needs 2^32 / H * RATE_NS on average. With the defaults, H is
 * 256 workers and the 100 connections that are made in the time for which one of a former worker
 * stays: 140 days. The burst adds a chance of 1 in 2,700 at the most, once. What remains: it is a
 * chance, not an impossibility; and peers that may finish handshakes can use up the rate, and so
 * keep new workers out. Workers that have joined stay. Workers go without a routing id of their
 * own: ZeroMQ would connect again under the same one, and a ROUTER ignores a second connection of
 * that id for as long as it has not noticed that the first one is dead.
 *
 * Before the handshake, each connection costs a descriptor and some 150 KB. Unclaimed connections
 * are bounded in number, oldest first out; and in number to CROWDED where descriptors reach into
 * the last of what the process may open (RESERVE). That is noticed after ZeroMQ has accepted: on
 * a machine that is overloaded the last descriptors may be taken for a moment. When accept(2) fails
 * for want of descriptors, ZeroMQ tries again at once, without end: so the listener is emptied by
 * means of a spare descriptor, and held off. On ipc ZeroMQ would abort on that failure; shortage.c
 * sees to it that it does not. Where that cannot be arranged, and so that a worker that comes then
 * is not refused, the free descriptors are counted there all the time (LOOK_MS, and after each
 * connection), and the listener is held off while few are left (IPC_RESERVE): four times as many as
 * may wait to be accepted.
 *
 * A message that never ends. ZeroMQ limits the bytes of a part and the number of whole messages;
 * the parts of a message that has no end yet it keeps, however many, and shows them to nobody. On
 * TCP the system tells how many bytes have come through a connection: one that has brought more
 * than four of the largest messages (or 1 MiB) without making one is ended. That is looked at every
 * WEIGH_MS, so what a peer can send meanwhile comes on top: tens of megabytes on a fast network. A
 * part of no bytes takes two on the wire and 64 in memory. On ipc the system tells no such number.
 *
 * The listener is held off on TCP by a filter on its socket that drops what arrives: the system of
 * the other side tries again by itself, and nothing is closed. (zmq_unbind would end all
 * connections.) An ipc socket takes no filter, and its file is renamed; its workers try again. On
 * ipc no rate is bounded: a socket file lets in its owner alone, which can end the process anyway.
 *
 * Ending a connection. ZeroMQ owns the descriptor, so it is shut down, never closed. ZeroMQ tells
 * DISCONNECTED before it closes one, and all that was told is read before anything is ended: so the
 * descriptor was the connection's a moment ago. It is then duplicated over the spare one, the
 * duplicate is compared with the socket that was noted, and shut down. A number that the process
 * has used again meanwhile is thus left alone. What remains: a file that gets the number between
 * the first look and the duplication; closing its duplicate gives up the process's POSIX locks on
 * it.
 */
#include "net/connections.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <zmq.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/forks.h"
#include "base/log.h"
#include "net/socket.h"

#define UNCLAIMED_LEAST 64u  /* how many may be unclaimed, with few workers */
#define BURST_LEAST     1024 /* handshakes */
#define RATE_NS         INT64_C(1000000000)
#define REGAIN          8   /* handshakes that are free again when the listener opens again */
#define RESERVE         256 /* descriptors for the rest of the process, or a quarter of all */
#define CROWDED         8u
#define STAY_LEAST_MS   5000u
#define STAY_MOST_MS    60000u
#define HOLD_MS         1000 /* without descriptors */
#define IPC_RESERVE     128  /* descriptors, or a quarter of all; 4 times as many as may wait */
#define LOOK_MS         20
#define COUNTED_MOST    4096
#define LOG_MS          10000
#define WEIGH_MS        100
#define WEIGHT_LEAST    (UINT64_C(1) << 20)
#define EVENTS                                                                                     \
    (ZMQ_EVENT_LISTENING | ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_ACCEPT_FAILED |                          \
     ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED)

typedef enum claim {
    ABSENT, /* no accepted connection has this descriptor, or it was ended */
    UNCLAIMED,
    CLAIMED,
    CLAIMS,
} claim;

/* One for each descriptor, which is its index. */
typedef struct connection {
    claim claim;
    int64_t since; /* unclaimed; claimed: of the last message */
    dev_t device;  /* with `inode`: which socket it is */
    ino_t inode;
    int before, after; /* in the list of its claim, oldest first; -1: none */
    bool spoke;        /* a message has come since it was weighed */
    uint64_t weighed;  /* bytes that had come by then */
} connection;

typedef struct row {
    int first, last;
    uint32_t count;
} row;

struct rft_connections {
    void *monitor;
    void *socket;
    connection *of; /* by descriptor */
    int room;
    row rows[CLAIMS];
    const rft_ipc *ipc;
    int listener; /* ZeroMQ's; -1: not bound yet */
    bool tcp;     /* held off by a filter, else by `ipc` */
    int null_fd;
    int spare_fd; /* its number is for duplicates */
    int entry_fd; /* given up while a connection is refused; -1: ZeroMQ took its place */

    uint32_t unclaimed_most;
    uint32_t stay_ms;
    int64_t burst_ns;
    int64_t spent;    /* the moment at which all handshakes so far are paid for */
    int64_t hold_to;  /* when the listener opens again; 0: it is open */
    int64_t count_at; /* when free descriptors are counted again */
    int64_t weigh_at; /* when connections are weighed again */
    uint64_t most;    /* bytes that may come without making a message */
    uint32_t crowd;   /* accepted into the reserve since the last look */
    uint32_t fresh;   /* accepted, and not kept from forked children yet */
    bool accepted;    /* any, since descriptors were counted */
    int failure;      /* of accept, since the last look; 0: none */
    int64_t log_at;   /* of connections that were closed */
    int64_t hold_log_at;
    struct pollfd *asked; /* room to count open descriptors; NULL: not needed so far */
    int asked_room;
    rft_connection_counts counts;
};

/* ---- The rows */

static void row_add(rft_connections *all, int fd, claim which, int64_t now)
{
    connection *it = &all->of[fd];
    row *to = &all->rows[which];
    it->claim = which;
    it->since = now;
    it->before = to->last;
    it->after = -1;
    if (to->last >= 0) all->of[to->last].after = fd;
    if (to->first < 0) to->first = fd;
    to->last = fd;
    to->count++;
}

static void row_remove(rft_connections *all, int fd)
{
    connection *it = &all->of[fd];
    row *from = &all->rows[it->claim];
    if (it->claim == ABSENT) return;
    if (it->before >= 0) all->of[it->before].after = it->after;
    if (it->after >= 0) all->of[it->after].before = it->before;
    if (from->first == fd) from->first = it->after;
    if (from->last == fd) from->last = it->before;
    from->count--;
    it->claim = ABSENT;
}

static bool is_known(const rft_connections *all, int fd)
{
    return fd >= 0 && fd < all->room && all->of[fd].claim != ABSENT;
}

static bool make_room(rft_connections *all, int fd)
{
    if (fd < all->room) return true;
    int room = fd / 64 * 64 + 128;
    connection *of = rft_realloc(all->of, (size_t)room, sizeof *of);
    if (of == NULL) return false;
    memset(of + all->room, 0, (size_t)(room - all->room) * sizeof *of);
    all->of = of;
    all->room = room;
    return true;
}

/* ---- What ZeroMQ tells */

static int descriptors_most(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT32_MAX) return INT32_MAX;
    return (int)limit.rlim_cur;
}

/* Descriptors are given out lowest first: as a rule the number of a new one says how many there
 * are. */
static bool is_in_last(int fd, uint64_t count, uint64_t share)
{
    int most = descriptors_most();
    return fd >= most - (int)rft_min_u64(count, (uint64_t)most / share);
}

static int take_descriptor(const rft_connections *all)
{
    return all->null_fd < 0 ? -1 : fcntl(all->null_fd, F_DUPFD_CLOEXEC, 0);
}

/* How many of the first `most` descriptors are open. */
static int count_open(rft_connections *all, int most)
{
    int open = 0;
    if (all->asked == NULL || all->asked_room < most) {
        struct pollfd *asked = rft_realloc(all->asked, (size_t)most, sizeof *asked);
        if (asked == NULL) return 0;
        for (int i = 0; i < most; i++)
            asked[i] = (struct pollfd){.fd = i};
        all->asked = asked;
        all->asked_room = most;
    }
    if (poll(all->asked, (nfds_t)most, 0) < 0) return 0;
    for (int i = 0; i < most; i++)
        open += (all->asked[i].revents & POLLNVAL) == 0;
    return open;
}

/* How many descriptors the process may still open. Since Linux 6.2 the size of the folder says how
 * many are open. Before, a limit that is not too high lets them be counted; else the lowest free
 * number has to do. */
static int descriptors_free(rft_connections *all)
{
    struct stat folder;
    int most = descriptors_most();
    if (stat("/proc/self/fd", &folder) == 0 && folder.st_size > 0)
        return folder.st_size < most ? most - (int)folder.st_size : 0;
    if (most <= COUNTED_MOST) return most - count_open(all, most);
    int fd = take_descriptor(all);
    if (fd < 0) return 0;
    close(fd);
    return most - fd;
}

static int ipc_reserve(void)
{
    return (int)rft_min_u64(IPC_RESERVE, (uint64_t)descriptors_most() / 4);
}

/* fstat(2), of a descriptor that another thread may have closed by now: ThreadSanitizer takes a
 * call of that name for a race. */
static bool look_at(int fd, struct stat *about)
{
    return fstatat(fd, "", about, AT_EMPTY_PATH) == 0;
}

static void note_accepted(rft_connections *all, int fd, int64_t now)
{
    struct stat about;
    if (fd < 0 || !make_room(all, fd)) return;
    row_remove(all, fd);
    all->accepted = true;
    if (!look_at(fd, &about)) return; /* it has ended already */
    all->of[fd].device = about.st_dev;
    all->of[fd].inode = about.st_ino;
    all->of[fd].spoke = true;
    row_add(all, fd, UNCLAIMED, now);
    all->fresh++;
    if (is_in_last(fd, RESERVE, 4)) all->crowd++;
}

static void note_gone(rft_connections *all, int fd)
{
    if (is_known(all, fd)) row_remove(all, fd);
}

/* Not blocking: if a connection goes away, or is refused here, before ZeroMQ has accepted it,
 * ZeroMQ's thread must not wait for the next one. */
static void note_listener(rft_connections *all, int fd)
{
    int domain = 0;
    socklen_t room = sizeof domain;
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0) (void)fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    (void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &room);
    all->tcp = domain == AF_INET || domain == AF_INET6;
    if (!all->tcp) (void)listen(fd, ipc_reserve() / 4); /* again: the backlog changes */
    all->listener = fd;
    rft_forks_keep(fd);
}

static void note_handshake(rft_connections *all, int64_t now)
{
    all->spent = (all->spent > now ? all->spent : now) + RATE_NS;
}

static void note_failure(rft_connections *all, int code)
{
    if (code == EMFILE || code == ENFILE) all->failure = code;
}

static void read_all(rft_connections *all, int64_t now)
{
    uint16_t event;
    uint32_t value;
    while (rft_monitor_read(all->monitor, &event, &value)) {
        switch (event) {
        case ZMQ_EVENT_LISTENING: note_listener(all, (int)value); break;
        case ZMQ_EVENT_ACCEPTED: note_accepted(all, (int)value, now); break;
        case ZMQ_EVENT_ACCEPT_FAILED: note_failure(all, (int)value); break;
        case ZMQ_EVENT_HANDSHAKE_SUCCEEDED: note_handshake(all, now); break;
        case ZMQ_EVENT_DISCONNECTED: note_gone(all, (int)value); break;
        default: break;
        }
    }
}

/* Of connections that have gone since, the number may be a file's that the child needs. */
static void keep_from_children(rft_connections *all)
{
    for (int fd = all->rows[UNCLAIMED].last; fd >= 0 && all->fresh > 0; fd = all->of[fd].before) {
        rft_forks_keep(fd);
        all->fresh--;
    }
    all->fresh = 0;
}

/* ---- What is done about it */

static bool is_socket_of(int fd, const connection *it)
{
    struct stat about;
    return look_at(fd, &about) && S_ISSOCK(about.st_mode) && about.st_dev == it->device &&
           about.st_ino == it->inode;
}

/* The connection is forgotten here; ZeroMQ tells later that it has gone. The first look avoids
 * duplicating a file: closing the duplicate would give up the process's locks on it. */
static void end(rft_connections *all, int fd)
{
    const connection *it = &all->of[fd];
    row_remove(all, fd);
    if (!is_socket_of(fd, it)) return;
    if (dup3(fd, all->spare_fd, O_CLOEXEC) < 0) return;
    if (is_socket_of(all->spare_fd, it) && shutdown(all->spare_fd, SHUT_RDWR) == 0) {
        all->counts.ended++;
    }
    (void)dup3(all->null_fd, all->spare_fd, O_CLOEXEC);
}

static bool may_log(int64_t *log_at, int64_t now)
{
    if (now < *log_at) return false;
    *log_at = rft_after_ms(now, LOG_MS);
    return true;
}

static void end_surplus(rft_connections *all, int64_t now)
{
    row *unclaimed = &all->rows[UNCLAIMED];
    uint32_t before = unclaimed->count;
    while (unclaimed->count > all->unclaimed_most) {
        end(all, unclaimed->first);
    }
    for (; all->crowd > 0 && unclaimed->count > CROWDED; all->crowd--) {
        end(all, unclaimed->first);
    }
    all->crowd = 0;
    if (unclaimed->count < before && may_log(&all->log_at, now)) {
        rft_log(REFIT_LOG_WARNING,
                "connections that belong to no worker were closed: there were %u; look which "
                "processes connect "
                "to the trainer's endpoint",
                before);
    }
}

/* By TCP; 0: not known. */
static uint64_t bytes_received(int fd)
{
    struct tcp_info info;
    socklen_t room = sizeof info;
    const size_t least = offsetof(struct tcp_info, tcpi_bytes_received) + sizeof(uint64_t);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &room) != 0 || room < least) return 0;
    return info.tcpi_bytes_received;
}

static void weigh(rft_connections *all, int fd, int64_t now)
{
    connection *it = &all->of[fd];
    uint64_t received = bytes_received(fd);
    bool ahead = !it->spoke && received > it->weighed && received - it->weighed > all->most;
    if (it->spoke) it->weighed = received;
    it->spoke = false;
    if (!ahead) return;
    end(all, fd);
    if (may_log(&all->log_at, now)) {
        rft_log(REFIT_LOG_WARNING,
                "a connection was closed: it has sent %llu bytes of a message without an end; look "
                "which processes connect to the trainer's endpoint",
                (unsigned long long)(received - it->weighed));
    }
}

static void weigh_all(rft_connections *all, int64_t now)
{
    if (!all->tcp || now < all->weigh_at) return;
    all->weigh_at = rft_after_ms(now, WEIGH_MS);
    for (claim which = UNCLAIMED; which < CLAIMS; which++) {
        for (int fd = all->rows[which].first, after; fd >= 0; fd = after) {
            after = all->of[fd].after;
            weigh(all, fd, now);
        }
    }
}

static bool is_old(const rft_connections *all, claim which, int64_t now)
{
    int first = all->rows[which].first;
    return first >= 0 && now >= rft_after_ms(all->of[first].since, all->stay_ms);
}

static void end_old(rft_connections *all, int64_t now)
{
    while (is_old(all, UNCLAIMED, now)) {
        end(all, all->rows[UNCLAIMED].first);
    }
    while (is_old(all, CLAIMED, now)) {
        int fd = all->rows[CLAIMED].first;
        row_remove(all, fd);
        row_add(all, fd, UNCLAIMED, now);
    }
}

/* Accepts and closes what waits, for ZeroMQ cannot. As ZeroMQ tries all the time, it may be the one
 * that gets the descriptor: see regain_entry. */
static void refuse_waiting(rft_connections *all)
{
    int fd = 0;
    if (all->listener < 0) return;
    if (all->entry_fd >= 0) close(all->entry_fd);
    all->entry_fd = -1;
    while (fd >= 0) {
        fd = accept4(all->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) break;
        close(fd);
        all->counts.refused++;
    }
    all->entry_fd = take_descriptor(all);
}

/* A connection that ZeroMQ accepted with our descriptor is ended, one after the other, until none
 * waits that it could accept: while one waits and no descriptor is free, it costs a core. */
static void regain_entry(rft_connections *all)
{
    if (all->entry_fd >= 0) return;
    all->entry_fd = take_descriptor(all);
    if (all->entry_fd < 0 && all->rows[UNCLAIMED].count > 0) end(all, all->rows[UNCLAIMED].first);
}

static bool listener_shut(const rft_connections *all)
{
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    const struct sock_fprog program = {1, &drop};
    if (!all->tcp) return rft_ipc_hide(all->ipc);
    return setsockopt(all->listener, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}

static bool listener_reopen(const rft_connections *all)
{
    const int unused = 0;
    if (!all->tcp) return rft_ipc_show(all->ipc);
    return setsockopt(all->listener, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused) == 0;
}

/* Whether the listener was open and is held off now. */
static bool hold_off(rft_connections *all, int64_t now, int64_t until)
{
    bool open = all->hold_to == 0;
    if (all->listener < 0) return false;
    if (open && !listener_shut(all)) {
        if (may_log(&all->hold_log_at, now)) {
            rft_log(REFIT_LOG_ERROR, "new connections cannot be held off: %s", strerror(errno));
        }
        return false;
    }
    if (until > all->hold_to) all->hold_to = until;
    all->counts.pauses += open;
    return open;
}

static void answer_failure(rft_connections *all, int64_t now)
{
    if (all->failure == 0) return;
    all->failure = 0;
    for (uint32_t i = 0; i < CROWDED && all->rows[UNCLAIMED].count > CROWDED; i++) {
        end(all, all->rows[UNCLAIMED].first);
    }
    refuse_waiting(all);
    (void)hold_off(all, now, rft_after_ms(now, HOLD_MS));
    if (may_log(&all->hold_log_at, now)) {
        rft_log(REFIT_LOG_ERROR,
                "new connections are refused: the process has no descriptor left; raise its limit "
                "(ulimit -n)");
    }
}

static void hold_to_rate(rft_connections *all, int64_t now)
{
    if (all->tcp && all->spent - now > all->burst_ns &&
        hold_off(all, now, all->spent - all->burst_ns + REGAIN * RATE_NS) &&
        may_log(&all->hold_log_at, now)) {
        rft_log(REFIT_LOG_WARNING,
                "new connections are held off for a while: far more came than there may be "
                "workers; look which processes connect to the trainer's endpoint");
    }
}

static bool is_watched(const rft_connections *all)
{
    return all->listener >= 0 && !all->tcp;
}

static void keep_descriptors(rft_connections *all, int64_t now)
{
    if (!is_watched(all) || (now < all->count_at && !all->accepted)) return;
    all->accepted = false;
    all->count_at = rft_after_ms(now, LOOK_MS);
    if (descriptors_free(all) < ipc_reserve() && hold_off(all, now, rft_after_ms(now, HOLD_MS)) &&
        may_log(&all->hold_log_at, now)) {
        rft_log(REFIT_LOG_ERROR,
                "new workers are refused for a while: the process has hardly a descriptor left; "
                "raise its limit (ulimit -n)");
    }
}

static void open_again(rft_connections *all, int64_t now)
{
    if (all->hold_to == 0 || now < all->hold_to) return;
    if (listener_reopen(all)) {
        all->hold_to = 0;
        return;
    }
    int code = errno;
    all->hold_to = rft_after_ms(now, HOLD_MS);
    if (may_log(&all->hold_log_at, now)) {
        rft_log(REFIT_LOG_ERROR,
                "new workers cannot connect: the listener cannot be opened again: %s",
                strerror(code));
    }
}

void rft_connections_tend(rft_connections *connections, int64_t now)
{
    read_all(connections, now);
    keep_from_children(connections);
    end_surplus(connections, now);
    end_old(connections, now);
    weigh_all(connections, now);
    answer_failure(connections, now);
    regain_entry(connections);
    hold_to_rate(connections, now);
    keep_descriptors(connections, now);
    open_again(connections, now);
}

static int64_t old_at(const rft_connections *all, claim which)
{
    int first = all->rows[which].first;
    return first < 0 ? INT64_MAX : rft_after_ms(all->of[first].since, all->stay_ms);
}

int64_t rft_connections_tend_at(const rft_connections *connections)
{
    int64_t at = connections->hold_to == 0 ? INT64_MAX : connections->hold_to;
    int64_t unclaimed = old_at(connections, UNCLAIMED), claimed = old_at(connections, CLAIMED);
    if (unclaimed < at) at = unclaimed;
    if (is_watched(connections) && connections->count_at < at) at = connections->count_at;
    bool any = unclaimed != INT64_MAX || claimed != INT64_MAX;
    if (any && connections->tcp && connections->weigh_at < at) at = connections->weigh_at;
    return claimed < at ? claimed : at;
}

void rft_connections_receive(rft_connections *connections, int fd)
{
    if (is_known(connections, fd)) connections->of[fd].spoke = true;
}

void rft_connections_claim(rft_connections *connections, int fd, int64_t now)
{
    if (!is_known(connections, fd)) return;
    row_remove(connections, fd);
    row_add(connections, fd, CLAIMED, now);
}

rft_connection_counts rft_connections_count(const rft_connections *connections)
{
    rft_connection_counts counts = connections->counts;
    counts.unclaimed = connections->rows[UNCLAIMED].count;
    return counts;
}

void *rft_connections_monitor(const rft_connections *connections)
{
    return connections->monitor;
}

int rft_connections_copy_listener(const rft_connections *connections)
{
    int listener = connections == NULL ? -1 : connections->listener;
    return listener < 0 ? -1 : fcntl(listener, F_DUPFD_CLOEXEC, 0);
}

/* ---- Opening and closing */

static void set_bounds(rft_connections *all, const refit_config *config)
{
    uint64_t workers = config->limits_workers;
    uint64_t silence = config->broadcast_heartbeat_timeout_ms;
    uint64_t stay = rft_min_u64(rft_max_u64(silence * 10, STAY_LEAST_MS), STAY_MOST_MS);
    all->most = rft_max_u64(config->limits_message_bytes * 4, WEIGHT_LEAST);
    all->stay_ms = (uint32_t)rft_max_u64(stay, silence * 2);
    all->unclaimed_most = (uint32_t)rft_max_u64(workers * 2, UNCLAIMED_LEAST);
    all->burst_ns = (int64_t)rft_max_u64(workers * 8, BURST_LEAST) * RATE_NS;
}

refit_status rft_connections_open(void *context, void *socket, const rft_ipc *ipc,
                                  const refit_config *config, rft_connections **out,
                                  refit_error *error)
{
    const row none = {-1, -1, 0};
    rft_connections *all = rft_calloc(1, sizeof *all);
    RFT_REFUSE_IF(all == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to watch connections");
    *all =
        (rft_connections){.socket = socket, .ipc = ipc, .rows = {none, none, none}, .listener = -1};
    set_bounds(all, config);
    all->null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    all->spare_fd = take_descriptor(all);
    all->entry_fd = take_descriptor(all);
    refit_status status = REFIT_OK;
    if (all->entry_fd < 0) {
        status = rft_fail_sub(error, REFIT_ERR_SYSTEM, errno,
                              "no descriptor to watch connections with: %s", strerror(errno));
    }
    if (status == REFIT_OK)
        status = rft_monitor_open(context, socket, EVENTS, &all->monitor, error);
    if (status == REFIT_OK) {
        *out = all;
    } else {
        rft_connections_close(all);
    }
    return status;
}

void rft_connections_close(rft_connections *connections)
{
    if (connections == NULL) return;
    rft_monitor_close(connections->monitor, connections->socket);
    if (connections->entry_fd >= 0) close(connections->entry_fd);
    if (connections->spare_fd >= 0) close(connections->spare_fd);
    if (connections->null_fd >= 0) close(connections->null_fd);
    rft_free(connections->asked);
    rft_free(connections->of);
    rft_free(connections);
}
