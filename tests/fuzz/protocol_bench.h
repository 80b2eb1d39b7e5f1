/*
 * protocol_bench: a trainer, its workers and some liars, all of their state machines in one thread,
 * with a clock that stands still until it is moved. The server, the store, the frames, the sessions
 * and every message as bytes are the library's own; sockets are queues here, and the trainer's
 * calls are made step by step, as publisher.c makes them.
 *
 * protocol_bench.c has the trainer and the lines, protocol_workers.c the workers, protocol_lies.c
 * what liars say, and protocol_laws.c what must hold after every step.
 */
#ifndef PROTOCOL_BENCH_H
#define PROTOCOL_BENCH_H

#include "fuzz.h"
#include "publisher/server.h"
#include "store/frames.h"
#include "subscriber/session.h"

#define HONEST       3u /* workers */
#define LIARS        2u /* connections that say what the input wants */
#define PEERS        (HONEST + LIARS)
#define LINE_MOST    64u
#define PACKET_BYTES 1536u
#define VERSIONS     200u
#define TENSORS_MOST 4u
#define TENSOR_BYTES 64u

/* What is under way to one end. */
typedef struct bench_packet {
    uint32_t message;
    uint32_t payload;
    unsigned char bytes[PACKET_BYTES];
} bench_packet;

typedef struct bench_line {
    bench_packet packets[LINE_MOST];
    uint32_t first;
    uint32_t count;
} bench_line;

/* One connection to the trainer. */
typedef struct bench_link {
    rft_peer_id id;
    bool open;
    bench_line down; /* to the worker */
    bench_line up;
    uint64_t said_staged; /* the last version that was said to be staged, with the right digest */
} bench_link;

typedef struct bench_worker {
    rft_mailbox mailbox;
    rft_session session;
    rft_session_identity identity;
    rft_session_state before; /* at the last look */
    rft_version_id held;      /* at the last look */
    uint64_t told_commit;     /* the version that the COMMIT it hears now names, or 0 */
    bool taken;               /* and undecided */
    bool open;                /* decided and not closed */
    bool lied_to;             /* it heard a forged message of its trainer */
    bool may_end;             /* its key was taken back, or no connection came about */
    bool lost;                /* it refused a version and has nothing left */
} bench_worker;

typedef enum ledger_fate { LEDGER_OPEN, LEDGER_COMMITTED, LEDGER_ABORTED } ledger_fate;

typedef struct ledger_entry {
    uint64_t epoch;
    uint64_t version;
    unsigned char bytes[TENSORS_MOST][TENSOR_BYTES];
    rft_digest128 digest;
    ledger_fate fate;
    bool sealed;
    uint32_t members; /* when it began */
} ledger_entry;

typedef struct protocol_bench {
    refit_config config;
    rft_limits limits;
    int64_t now;
    bool keys;
    bool shm;
    bool neighbors;               /* workers share memory among them */
    bool parts;                   /* and some select parts of versions */
    rft_allow_list *const *allow; /* all keys; then without one key each */

    rft_server server;
    rft_send_queue spare; /* empty: takes the place of the server's while that is sent */
    rft_retire_list retired;
    rft_store *store;
    rft_frames *frames;
    uint32_t tensors;                                /* of the declared ones */
    unsigned char bytes[TENSORS_MOST][TENSOR_BYTES]; /* of the model */
    uint32_t next_tensor;                            /* to be written */
    rft_transaction_state transaction_before;        /* at the last look */
    uint64_t committed, aborted;                     /* at the last look, of the server's counts */
    rft_version_id current;                          /* at the last look */

    bench_link links[PEERS];
    uint32_t connections; /* ever */
    bench_worker workers[HONEST];
    uint32_t instances;

    ledger_entry ledger[VERSIONS];
    uint32_t ledger_count;
    rft_bytes scratch;
} protocol_bench;

/* `settings` are two bytes of the input. */
void bench_open(protocol_bench *bench, const uint8_t *settings);
void bench_close(protocol_bench *bench);

/* ---- Lines */

/* A new connection: what was under way is lost, and the trainer is not told. */
void bench_connect(protocol_bench *bench, uint32_t peer);
void bench_disconnect(protocol_bench *bench, uint32_t peer);
/* False: the line is full or shut, or the packet too large. */
bool bench_push(bench_line *line, rft_view message, rft_view payload);

/* ---- The trainer */

/* Bytes come in from a connection. */
void bench_server_hears(protocol_bench *bench, uint32_t peer, rft_view message);
/* Sends the messages in the server's send queue. */
void bench_server_sends(protocol_bench *bench);
void bench_send_frames(protocol_bench *bench, uint32_t most);
/* The trainer's next call, or a part of it; `seed` decides what changes in a version. */
void bench_trainer_steps(protocol_bench *bench, uint32_t seed);
void bench_trainer_aborts(protocol_bench *bench);
void bench_trainer_cancels(protocol_bench *bench);
void bench_trainer_declares(protocol_bench *bench, uint32_t tensors);
/* Another trainer at the same address. */
void bench_trainer_restarts(protocol_bench *bench, bool says_goodbye);
/* All keys count but this connection's; PEERS: all do. */
void bench_set_keys(protocol_bench *bench, uint32_t without);
bool bench_key_counts(const protocol_bench *bench, uint32_t peer);

/* ---- Workers (protocol_workers.c) */

void bench_worker_opens(protocol_bench *bench, uint32_t worker);
void bench_worker_closes(protocol_bench *bench, uint32_t worker, bool says_goodbye);
/* What the session said goes to the trainer, and the laws are looked at. `by`: see below. */
void bench_worker_moved(protocol_bench *bench, uint32_t worker, uint32_t by);
void bench_worker_hears(protocol_bench *bench, uint32_t worker, rft_view message, rft_view payload);
/* Takes, decides (0, 1: accepts; 2: refuses and keeps; 3: refuses and has nothing), or closes. */
void bench_user_acts(protocol_bench *bench, uint32_t worker, uint32_t decision);

/* ---- Both */

void bench_deliver_up(protocol_bench *bench, uint32_t peer, uint32_t most);
void bench_deliver_down(protocol_bench *bench, uint32_t worker, uint32_t most);
void bench_advance(protocol_bench *bench, uint32_t ms);
/* All that is under way arrives, and all that follows from it. With `users`, they accept. */
void bench_pump(protocol_bench *bench, bool users);

/* ---- Lies (protocol_lies.c) */

/* A message of this kind whose fields are drawn by `seed` from what is right, what was right and
 * what never is. False: it cannot be said at all. */
bool bench_make_lie(protocol_bench *bench, uint32_t kind, uint32_t seed, rft_bytes *out);

/* ---- Laws (protocol_laws.c) */

ledger_entry *ledger_find(protocol_bench *bench, uint64_t epoch, uint64_t version);
/* What the session hears or does next: a message's kind, or one of these. */
enum { LAW_TICK = RFT_MESSAGE_KINDS, LAW_USER, LAW_GARBAGE, LAW_OTHER };
void law_worker_moved(protocol_bench *bench, uint32_t worker, uint32_t by);
void law_delivered(protocol_bench *bench, uint32_t worker, const rft_image *image);
void law_server(protocol_bench *bench);
/* The trainer says it to a connection. */
void law_sent(const protocol_bench *bench, uint32_t peer, rft_view message);
void law_count_memory(void); /* once, before anything is opened */
uint64_t law_memory_bytes(void);

#endif
