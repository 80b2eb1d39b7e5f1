/*
 * One poll loop. A pair is a worker's connection and its other half to the trainer; each has two
 * ways, and each way a queue of chunks with the time from which they may be passed on. A descriptor
 * is polled only for what would be done about it, so that a hole or a full queue does not spin.
 */
#include "proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "chaos_plan.h"
#include "note.h"

#define PAIRS_MOST  256u
#define CHUNK       (32u * 1024)
#define QUEUE_MOST  (256u * 1024)
#define FLIPS_MOST  8u
#define WAIT_MOST   1000
#define RATE_STEP   20 /* ms worth of bytes that may be passed on at once */
#define DOWN        0  /* to the worker */
#define UP          1  /* to the trainer */
#define NOT_FLIPPED UINT64_MAX

typedef struct chunk {
    struct chunk *next;
    int64_t due;
    uint32_t at, count;
    unsigned char bytes[CHUNK];
} chunk;

typedef struct way {
    chunk *first, *last;
    uint32_t queued;
    bool ended; /* nothing more comes in */
    bool shut;  /* and that was passed on */
} way;

typedef struct pair {
    uint32_t link;
    int ends[2]; /* ends[DOWN] is the worker's connection, ends[UP] the trainer's */
    way ways[2]; /* ways[DOWN] leads to ends[DOWN] */
} pair;

typedef struct cable {
    int listener;
    uint32_t rank;
    uint32_t delay_ms;
    uint64_t rate;
    int64_t budget[2]; /* bytes that may pass now */
    int64_t refilled;
    bool hole;
    uint64_t flips[2][FLIPS_MOST]; /* bytes until each */
} cable;

typedef struct proxy {
    int line;
    struct sockaddr_in upstream[RANKS_MOST];
    uint32_t links;
    cable link[LINKS_MOST];
    uint32_t pairs;
    pair *pair[PAIRS_MOST];
    struct pollfd items[1 + LINKS_MOST + 2 * PAIRS_MOST];
} proxy;

int proxy_listen(struct in_addr address, uint16_t *port)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr = address};
    socklen_t size = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&name, size) != 0 || listen(fd, 64) != 0 ||
        getsockname(fd, (struct sockaddr *)&name, &size) != 0) {
        if (fd >= 0) close(fd);
        return -1;
    }
    *port = ntohs(name.sin_port);
    return fd;
}

/* ---- Ways */

static void way_clear(way *of)
{
    while (of->first != NULL) {
        chunk *next = of->first->next;
        free(of->first);
        of->first = next;
    }
    of->last = NULL;
    of->queued = 0;
}

static void flip(cable *on, int direction, unsigned char *bytes, uint32_t count)
{
    for (uint32_t i = 0; i < FLIPS_MOST; i++) {
        uint64_t *ahead = &on->flips[direction][i];
        if (*ahead == NOT_FLIPPED) continue;
        if (*ahead < count) {
            bytes[*ahead] ^= (unsigned char)(1u << (*ahead % 8));
            *ahead = NOT_FLIPPED;
        } else {
            *ahead -= count;
        }
    }
}

/* False: the connection broke. */
static bool way_read(way *to, cable *on, int direction, int from)
{
    chunk *got = malloc(sizeof *got);
    if (got == NULL) return false;
    ssize_t count = recv(from, got->bytes, CHUNK, 0);
    if (count <= 0) {
        int code = errno;
        free(got);
        if (count < 0) return code == EAGAIN || code == EINTR;
        to->ended = true;
        return true;
    }
    got->next = NULL;
    got->at = 0;
    got->count = (uint32_t)count;
    got->due = rft_now() + (int64_t)on->delay_ms * 1000000;
    flip(on, direction, got->bytes, got->count);
    if (to->last != NULL) to->last->next = got;
    if (to->first == NULL) to->first = got;
    to->last = got;
    to->queued += got->count;
    return true;
}

static void way_pass_on(way *of, uint32_t count)
{
    chunk *done = of->first;
    done->at += count;
    of->queued -= count;
    if (done->at < done->count) return;
    of->first = done->next;
    if (of->first == NULL) of->last = NULL;
    free(done);
}

static bool way_write(way *of, cable *on, int direction, int to, int64_t now)
{
    while (of->first != NULL && of->first->due <= now) {
        uint64_t most = of->first->count - of->first->at;
        if (on->rate != 0 && on->budget[direction] <= 0) return true;
        if (on->rate != 0 && (uint64_t)on->budget[direction] < most)
            most = (uint64_t)on->budget[direction];
        ssize_t count = send(to, of->first->bytes + of->first->at, most, MSG_NOSIGNAL);
        if (count < 0) return errno == EAGAIN || errno == EINTR;
        on->budget[direction] -= count;
        way_pass_on(of, (uint32_t)count);
    }
    if (of->first == NULL && of->ended && !of->shut) {
        (void)shutdown(to, SHUT_WR);
        of->shut = true;
    }
    return true;
}

/* ---- Pairs */

static int reach_trainer(const proxy *the, uint32_t rank)
{
    struct sockaddr_in name = the->upstream[rank];
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (struct sockaddr *)&name, sizeof name) == 0 || errno == EINPROGRESS) return fd;
    close(fd);
    return -1;
}

static void pair_open(proxy *the, uint32_t at)
{
    int one = 1;
    int worker = accept4(the->link[at].listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (worker < 0) return;
    (void)setsockopt(worker, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    int trainer = the->pairs < PAIRS_MOST ? reach_trainer(the, the->link[at].rank) : -1;
    pair *made = trainer < 0 ? NULL : calloc(1, sizeof *made);
    if (made == NULL) {
        close(worker);
        if (trainer >= 0) close(trainer);
        return;
    }
    *made = (pair){.link = at, .ends = {worker, trainer}};
    the->pair[the->pairs++] = made;
}

static void pair_close(proxy *the, uint32_t at, bool reset)
{
    const struct linger abrupt = {1, 0};
    pair *gone = the->pair[at];
    for (int i = 0; i < 2; i++) {
        if (reset) (void)setsockopt(gone->ends[i], SOL_SOCKET, SO_LINGER, &abrupt, sizeof abrupt);
        close(gone->ends[i]);
        way_clear(&gone->ways[i]);
    }
    free(gone);
    the->pair[at] = the->pair[--the->pairs];
}

static void close_link(proxy *the, uint32_t link_at, bool reset)
{
    for (uint32_t i = the->pairs; i > 0; i--) {
        if (the->pair[i - 1]->link == link_at) pair_close(the, i - 1, reset);
    }
}

static void end_ways(proxy *the, uint32_t link_at, int direction)
{
    for (uint32_t i = 0; i < the->pairs; i++) {
        if (the->pair[i]->link == link_at) the->pair[i]->ways[direction].ended = true;
    }
}

/* ---- Orders */

static void add_flip(cable *on, int direction, uint64_t ahead)
{
    for (uint32_t i = 0; i < FLIPS_MOST; i++) {
        if (on->flips[direction][i] != NOT_FLIPPED) continue;
        on->flips[direction][i] = ahead;
        return;
    }
}

static void obey(proxy *the, const chaos_note *order)
{
    if (order->kind == NOTE_UPSTREAM && order->worker < RANKS_MOST) {
        struct sockaddr_in *to = &the->upstream[order->worker];
        *to =
            (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)order->amount)};
        (void)inet_pton(AF_INET, order->name, &to->sin_addr);
    }
    if (order->kind != NOTE_LINK || order->worker >= the->links) return;
    cable *on = &the->link[order->worker];
    switch ((proxy_fault)order->fault) {
    case FAULT_DELAY: on->delay_ms = (uint32_t)order->amount; break;
    case FAULT_RATE: on->rate = order->amount; break;
    case FAULT_HOLE: on->hole = order->amount != 0; break;
    case FAULT_RESET: close_link(the, order->worker, true); break;
    case FAULT_CLOSE: close_link(the, order->worker, false); break;
    case FAULT_HALF_DOWN: end_ways(the, order->worker, DOWN); break;
    case FAULT_HALF_UP: end_ways(the, order->worker, UP); break;
    case FAULT_FLIP_DOWN: add_flip(on, DOWN, order->amount); break;
    case FAULT_FLIP_UP: add_flip(on, UP, order->amount); break;
    case FAULT_FLIP_NONE: memset(on->flips, 0xff, sizeof on->flips); break;
    }
}

/* ---- The loop */

static void refill(cable *on, int64_t now)
{
    int64_t most = (int64_t)(on->rate * RATE_STEP / 1000) + 1;
    int64_t fresh = (int64_t)((double)on->rate * rft_seconds(now - on->refilled));
    if (fresh == 0) return;
    on->refilled = now;
    for (int i = 0; i < 2; i++) {
        on->budget[i] += fresh;
        if (on->budget[i] > most) on->budget[i] = most;
    }
}

/* The poll events of this end now. */
static short interest(const proxy *the, const pair *of, int end, int64_t now)
{
    const cable *on = &the->link[of->link];
    const way *out = &of->ways[end], *in = &of->ways[1 - end];
    short events = 0;
    if (on->hole) return 0;
    if (!in->ended && in->queued < QUEUE_MOST) events |= POLLIN;
    bool due = out->first != NULL && out->first->due <= now;
    if (due && (on->rate == 0 || on->budget[end] > 0)) events |= POLLOUT;
    if (out->first == NULL && out->ended && !out->shut) events |= POLLOUT;
    return events;
}

static int until_due(const proxy *the, int64_t now)
{
    int64_t first = now + (int64_t)WAIT_MOST * 1000000;
    for (uint32_t i = 0; i < the->pairs; i++) {
        const cable *on = &the->link[the->pair[i]->link];
        for (int k = 0; k < 2 && !on->hole; k++) {
            const chunk *next = the->pair[i]->ways[k].first;
            if (next == NULL) continue;
            int64_t due = next->due;
            if (on->rate != 0 && on->budget[k] <= 0 && due < now + 2000000) due = now + 2000000;
            if (due > now && due < first) first = due;
        }
    }
    return rft_ms_until(first);
}

static uint32_t gather(proxy *the, int64_t now)
{
    uint32_t count = 0;
    the->items[count++] = (struct pollfd){.fd = the->line, .events = POLLIN};
    for (uint32_t i = 0; i < the->links; i++) {
        int fd = the->link[i].hole ? -1 : the->link[i].listener;
        the->items[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    for (uint32_t i = 0; i < the->pairs; i++) {
        for (int k = 0; k < 2; k++) {
            short events = interest(the, the->pair[i], k, now);
            int fd = events != 0 ? the->pair[i]->ends[k] : -1;
            the->items[count++] = (struct pollfd){.fd = fd, .events = events};
        }
    }
    return count;
}

/* False: it is broken, or done. */
static bool serve_pair(proxy *the, pair *of, const struct pollfd items[2], int64_t now)
{
    cable *on = &the->link[of->link];
    for (int end = 0; end < 2; end++) {
        short ready = items[end].revents;
        way *in = &of->ways[1 - end], *out = &of->ways[end];
        if ((ready & (POLLIN | POLLHUP | POLLERR)) != 0 && !in->ended &&
            !way_read(in, on, 1 - end, of->ends[end]))
            return false;
        if ((ready & (POLLOUT | POLLERR)) != 0 && !way_write(out, on, end, of->ends[end], now))
            return false;
    }
    return !(of->ways[DOWN].shut && of->ways[UP].shut);
}

static bool serve_line(proxy *the)
{
    chaos_note order;
    int got;
    while ((got = note_receive(the->line, &order)) > 0) {
        if (order.kind == NOTE_QUIT) return false;
        obey(the, &order);
    }
    return got == 0;
}

static bool serve(proxy *the)
{
    int64_t now = rft_now();
    for (uint32_t i = 0; i < the->links; i++)
        refill(&the->link[i], now);
    uint32_t count = gather(the, now);
    (void)poll(the->items, count, until_due(the, now));
    now = rft_now();
    const struct pollfd *items = the->items + 1 + the->links;
    for (uint32_t i = the->pairs; i > 0; i--) {
        if (!serve_pair(the, the->pair[i - 1], items + (size_t)2 * (i - 1), now))
            pair_close(the, i - 1, true);
    }
    for (uint32_t i = 0; i < the->links; i++) {
        if (the->items[1 + i].revents != 0) pair_open(the, i);
    }
    return the->items[0].revents == 0 || serve_line(the);
}

void proxy_run(int line, const int *listeners, const uint32_t *ranks, uint32_t count)
{
    proxy *the = calloc(1, sizeof *the);
    if (the == NULL) return;
    the->line = line;
    the->links = count;
    for (uint32_t i = 0; i < count; i++) {
        the->link[i].listener = listeners[i];
        the->link[i].rank = ranks[i];
        the->link[i].refilled = rft_now();
        memset(the->link[i].flips, 0xff, sizeof the->link[i].flips);
    }
    while (serve(the)) {
    }
    for (uint32_t i = 0; i < count; i++)
        close_link(the, i, true);
    free(the);
}
