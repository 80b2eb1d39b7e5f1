/*
 * bench_raw: the one file outside lib/net that uses ZeroMQ, because it is the baseline of lib/net
 * and lib/publisher.
 *
 * A worker sends a credit for each frame of its window and for each frame that it has received; the
 * sender answers each credit with a frame until all frames of the round are sent. A worker that has
 * received all of them sends an empty message.
 */
#include "bench_raw.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "bench.h"

enum { WORKERS_MOST = 64, ID_BYTES = 8, WAIT_MS = 60000 };

typedef struct raw_worker {
    unsigned char id[ID_BYTES];
    size_t id_bytes;
    uint32_t sent;
    uint32_t credits;
    bool done;
} raw_worker;

struct bench_raw {
    void *context;
    void *socket;
    char endpoint[128];
    char *memory;
    uint64_t bytes;
    uint64_t frame_bytes;
    uint32_t window;
    uint32_t frames;
    raw_worker workers[WORKERS_MOST];
    uint32_t count;
};

static void keep(void *data, void *hint)
{
    (void)data;
    (void)hint;
}

bench_raw *bench_raw_open(const char *address, uint64_t bytes, uint64_t frame_bytes,
                          uint32_t window)
{
    bench_raw *raw = calloc(1, sizeof *raw);
    size_t room;
    if (raw == NULL) return NULL;
    raw->context = zmq_ctx_new();
    raw->socket = zmq_socket(raw->context, ZMQ_ROUTER);
    raw->memory = malloc(bytes);
    raw->bytes = bytes;
    raw->frame_bytes = frame_bytes;
    raw->window = window;
    raw->frames = (uint32_t)((bytes + frame_bytes - 1) / frame_bytes);
    room = sizeof raw->endpoint;
    int linger = 0;
    int timeout = WAIT_MS;
    if (raw->socket != NULL) {
        zmq_setsockopt(raw->socket, ZMQ_LINGER, &linger, sizeof linger);
        zmq_setsockopt(raw->socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    }
    if (raw->socket == NULL || raw->memory == NULL || zmq_bind(raw->socket, address) != 0 ||
        zmq_getsockopt(raw->socket, ZMQ_LAST_ENDPOINT, raw->endpoint, &room) != 0) {
        bench_raw_close(raw);
        return NULL;
    }
    memset(raw->memory, 1, bytes);
    return raw;
}

const char *bench_raw_endpoint(const bench_raw *raw)
{
    return raw->endpoint;
}

void bench_raw_close(bench_raw *raw)
{
    if (raw == NULL) return;
    if (raw->socket != NULL) zmq_close(raw->socket);
    if (raw->context != NULL) zmq_ctx_term(raw->context);
    free(raw->memory);
    free(raw);
}

static raw_worker *find_worker(bench_raw *raw, const unsigned char *id, size_t bytes)
{
    for (uint32_t i = 0; i < raw->count; i++)
        if (raw->workers[i].id_bytes == bytes && memcmp(raw->workers[i].id, id, bytes) == 0)
            return &raw->workers[i];
    if (raw->count == WORKERS_MOST) return NULL;
    raw_worker *added = &raw->workers[raw->count++];
    *added = (raw_worker){.id_bytes = bytes};
    memcpy(added->id, id, bytes);
    return added;
}

/* One message of a worker: "one more", or nothing, which means that it has all. */
static raw_worker *hear(bench_raw *raw)
{
    unsigned char id[ID_BYTES];
    char word[8];
    int id_bytes = zmq_recv(raw->socket, id, sizeof id, 0);
    if (id_bytes <= 0 || id_bytes > ID_BYTES) return NULL;
    int bytes = zmq_recv(raw->socket, word, sizeof word, 0);
    raw_worker *worker = bytes < 0 ? NULL : find_worker(raw, id, (size_t)id_bytes);
    if (worker == NULL) return NULL;
    if (bytes == 0)
        worker->done = true;
    else
        worker->credits++;
    return worker;
}

static bool feed(bench_raw *raw, raw_worker *worker)
{
    while (worker->credits > 0 && worker->sent < raw->frames) {
        zmq_msg_t frame;
        uint64_t at = (uint64_t)worker->sent * raw->frame_bytes;
        uint64_t bytes = raw->bytes - at < raw->frame_bytes ? raw->bytes - at : raw->frame_bytes;
        if (zmq_msg_init_data(&frame, raw->memory + at, bytes, keep, NULL) != 0) return false;
        if (zmq_send(raw->socket, worker->id, worker->id_bytes, ZMQ_SNDMORE) < 0) return false;
        if (zmq_msg_send(&frame, raw->socket, 0) < 0) return false;
        worker->credits--;
        worker->sent++;
    }
    return true;
}

bool bench_raw_wait(bench_raw *raw, uint32_t workers)
{
    uint32_t ready = 0;
    while (ready < workers) {
        if (hear(raw) == NULL) return false;
        ready = 0;
        for (uint32_t i = 0; i < raw->count; i++)
            ready += raw->workers[i].credits >= raw->window;
    }
    return true;
}

double bench_raw_send(bench_raw *raw, uint32_t workers)
{
    uint32_t done = 0;
    double start = bench_now();
    for (uint32_t i = 0; i < raw->count; i++) {
        raw->workers[i].sent = 0;
        raw->workers[i].done = false;
        if (!feed(raw, &raw->workers[i])) return -1.0;
    }
    while (done < workers) {
        raw_worker *worker = hear(raw);
        if (worker == NULL || !feed(raw, worker)) return -1.0;
        done += worker->done;
        worker->done = false;
    }
    return bench_now() - start;
}

bool bench_input_ended(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&input, 1, 0) > 0;
}

/* False when there is nothing more to come. */
static bool take_frame(void *socket, uint64_t *have)
{
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    while (zmq_msg_recv(&frame, socket, 0) < 0) {
        if (bench_input_ended()) {
            zmq_msg_close(&frame);
            return false;
        }
    }
    *have += zmq_msg_size(&frame);
    zmq_msg_close(&frame);
    return true;
}

int bench_raw_receive(const char *endpoint, uint64_t bytes, uint32_t window)
{
    uint64_t have = 0;
    int tick = 200;
    int linger = 0;
    void *context = zmq_ctx_new();
    void *socket = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(socket, ZMQ_RCVTIMEO, &tick, sizeof tick);
    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
    int status = zmq_connect(socket, endpoint) == 0 ? 0 : 1;
    for (uint32_t i = 0; status == 0 && i < window; i++)
        zmq_send(socket, "1", 1, 0);
    while (status == 0 && take_frame(socket, &have)) {
        zmq_send(socket, "1", 1, 0);
        if (have < bytes) continue;
        zmq_send(socket, "", 0, 0);
        have = 0;
    }
    zmq_close(socket);
    zmq_ctx_term(context);
    return status;
}
