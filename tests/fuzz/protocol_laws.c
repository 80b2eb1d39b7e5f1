/*
 * What must hold after every step, whatever was said.
 *
 * Of the trainer: its transactions change state only along the lines that transaction.c draws; a
 * version ends once, as committed or as aborted, and only a sealed one is committed; with commit:
 * all, every worker that was a member when it began has said that it staged just this version, with
 * a quorum so many of them; the current version never goes back; tables and queues stay within
 * their bounds; a connection whose key does not count is told that and nothing else.
 *
 * Of a worker: its session goes only along the lines that session.c draws, for the message that it
 * has just heard; its user is given a version when COMMIT names it, and not before; and unless it
 * heard forged messages of its trainer, each version that its user is given and that it holds is a
 * committed one with just the bytes that were written, and never an older one than before.
 */
#include <malloc.h>
#include <refit/host.h>

#include "protocol_bench.h"

#define MEMORY_MOST (UINT64_C(4) << 20)

/* ---- Memory */

static uint64_t memory_bytes;

static void *count_allocate(void *user, size_t bytes)
{
    (void)user;
    void *block = malloc(bytes);
    if (block != NULL) memory_bytes += malloc_usable_size(block);
    return block;
}

static void *count_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    uint64_t before = block == NULL ? 0 : malloc_usable_size(block);
    void *moved = realloc(block, bytes);
    if (moved != NULL) memory_bytes += malloc_usable_size(moved) - before;
    return moved;
}

static void count_release(void *user, void *block)
{
    (void)user;
    if (block != NULL) memory_bytes -= malloc_usable_size(block);
    free(block);
}

void law_count_memory(void)
{
    static const refit_allocator counting = {sizeof counting, count_allocate, count_reallocate,
                                             count_release, NULL};
    FUZZ_REQUIRE(refit_set_allocator(&counting) == REFIT_OK);
}

uint64_t law_memory_bytes(void)
{
    return memory_bytes;
}

/* Of all memory that the library has now. */
static void law_memory(void)
{
    FUZZ_REQUIRE(memory_bytes < MEMORY_MOST);
}

/* ---- The ledger */

ledger_entry *ledger_find(protocol_bench *bench, uint64_t epoch, uint64_t version)
{
    for (uint32_t i = bench->ledger_count; i > 0; i--) {
        ledger_entry *entry = &bench->ledger[i - 1];
        if (entry->epoch == epoch && entry->version == version) return entry;
    }
    return NULL;
}

/* ---- The trainer */

#define TO(state) (1u << RFT_TRANSACTION_##state)

/* The states that one event may lead to. A version of which staging has begun may be decided and
 * over at once. */
static void check_transaction(rft_transaction_state before, rft_transaction_state now)
{
    static const unsigned next[] = {
        [RFT_TRANSACTION_IDLE] = TO(IDLE) | TO(PREPARING),
        [RFT_TRANSACTION_PREPARING] = TO(PREPARING) | TO(IDLE) | TO(WRITING),
        [RFT_TRANSACTION_WRITING] =
            TO(WRITING) | TO(STAGING) | TO(COMMITTING) | TO(IDLE) | TO(ABORTED),
        [RFT_TRANSACTION_STAGING] = TO(STAGING) | TO(COMMITTING) | TO(IDLE) | TO(ABORTED),
        [RFT_TRANSACTION_COMMITTING] = TO(COMMITTING) | TO(IDLE),
        [RFT_TRANSACTION_ABORTED] = TO(ABORTED) | TO(IDLE),
    };
    FUZZ_REQUIRE((next[before] & 1u << now) != 0);
}

static const bench_link *link_of(const protocol_bench *bench, const rft_peer *peer)
{
    for (uint32_t i = 0; i < PEERS; i++)
        if (rft_peer_id_equal(&bench->links[i].id, &peer->id)) return &bench->links[i];
    return NULL;
}

/* A version has been committed in this step: looks at the workers that staged it. */
static void check_commit(protocol_bench *bench)
{
    const rft_server *server = &bench->server;
    uint64_t version = server->current.version;
    ledger_entry *entry = ledger_find(bench, server->epoch, version);
    FUZZ_REQUIRE(entry != NULL && entry->fate == LEDGER_OPEN && entry->sealed);
    FUZZ_REQUIRE(version == server->transaction.version && version > bench->current.version);
    FUZZ_REQUIRE(rft_digest128_equal(&entry->digest, &server->current.digest));
    FUZZ_REQUIRE(server->current.epoch == server->epoch);
    entry->fate = LEDGER_COMMITTED;
    uint32_t staged = 0;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        if (!peer->member || peer->task.stage != RFT_STAGE_COMMITTING) continue;
        const bench_link *link = link_of(bench, peer);
        FUZZ_REQUIRE(peer->task.version == version);
        FUZZ_REQUIRE(link == NULL || link->said_staged == version);
        staged++;
    }
    bool all = server->config->broadcast_commit == REFIT_COMMIT_ALL;
    FUZZ_REQUIRE(staged >= (all ? entry->members : server->config->broadcast_quorum));
    FUZZ_REQUIRE(!all || server->transaction.members == entry->members);
}

static void check_abort(protocol_bench *bench)
{
    ledger_entry *entry =
        ledger_find(bench, bench->server.epoch, bench->server.transaction.version);
    FUZZ_REQUIRE(entry != NULL && entry->fate == LEDGER_OPEN);
    FUZZ_REQUIRE(bench->server.transaction.state == RFT_TRANSACTION_ABORTED);
    entry->fate = LEDGER_ABORTED;
}

/* Its key counts, and it is called by the name of its key. */
static void check_name(protocol_bench *bench, const rft_peer *peer)
{
    char key[RFT_KEY_NAME_BYTES], own[16];
    FUZZ_REQUIRE(rft_server_admits(&bench->server, &peer->id, key));
    size_t length = strlen(key);
    FUZZ_REQUIRE(length > 0 && strncmp(peer->name, key, length) == 0);
    FUZZ_REQUIRE(peer->name[length] == '\0' || peer->name[length] == RFT_PEER_NAME_MARK);
    const bench_link *link = link_of(bench, peer);
    if (link == NULL) return;
    (void)snprintf(own, sizeof own, "w%u", (unsigned)(link - bench->links));
    FUZZ_REQUIRE(strcmp(key, own) == 0);
}

static void check_peer(protocol_bench *bench, const rft_peer *peer)
{
    const rft_server *server = &bench->server;
    const rft_task *task = &peer->task;
    int32_t window = (int32_t)peer->window * RFT_CREDIT;
    FUZZ_REQUIRE(peer->window <= server->config->broadcast_window);
    FUZZ_REQUIRE(task->resend_count <= RFT_RESEND_ROOM);
    FUZZ_REQUIRE(task->credits <= window + RFT_CREDIT && task->credits > -2 * RFT_CREDIT);
    FUZZ_REQUIRE(peer->held.version <= server->current.version ||
                 peer->held.epoch != server->epoch || !peer->subscribed);
    FUZZ_REQUIRE((task->stage == RFT_STAGE_NONE) == (task->version == 0));
    FUZZ_REQUIRE(task->stage != RFT_STAGE_COMMITTING || task->version <= server->current.version);
    FUZZ_REQUIRE(task->stage == RFT_STAGE_NONE || peer->subscribed || peer->fetches);
    FUZZ_REQUIRE(!peer->subscribed || (peer->rank == 0 && !peer->fetches));
    FUZZ_REQUIRE(!peer->awaited ||
                 (server->transaction.state == RFT_TRANSACTION_COMMITTING && peer->member));
    if (bench->keys) check_name(bench, peer);
}

static void check_peers(protocol_bench *bench)
{
    const rft_peers *peers = &bench->server.peers;
    FUZZ_REQUIRE(peers->count <= bench->config.limits_workers);
    FUZZ_REQUIRE(peers->lost_count <= RFT_LOST_MOST);
    for (uint32_t i = 0; i < peers->count; i++) {
        check_peer(bench, peers->live[i]);
        for (uint32_t k = 0; k < i; k++) {
            FUZZ_REQUIRE(strcmp(peers->live[i]->name, peers->live[k]->name) != 0);
            FUZZ_REQUIRE(!rft_peer_id_equal(&peers->live[i]->id, &peers->live[k]->id));
        }
    }
}

void law_server(protocol_bench *bench)
{
    const rft_server *server = &bench->server;
    check_transaction(bench->transaction_before, server->transaction.state);
    uint64_t commits = server->counts.committed - bench->committed;
    uint64_t aborts = server->counts.aborted - bench->aborted;
    FUZZ_REQUIRE(commits + aborts <= 1);
    if (commits == 1) check_commit(bench);
    if (aborts == 1) check_abort(bench);
    if (commits == 0) {
        FUZZ_REQUIRE(server->current.version == bench->current.version &&
                     rft_digest128_equal(&server->current.digest, &bench->current.digest));
    }
    check_peers(bench);
    bench->transaction_before = server->transaction.state;
    bench->committed = server->counts.committed;
    bench->aborted = server->counts.aborted;
    bench->current = server->current;
    law_memory();
}

/* Whose key does not count is told that, and nothing else. */
void law_sent(const protocol_bench *bench, uint32_t peer, rft_view bytes)
{
    rft_message message;
    if (bench_key_counts(bench, peer)) return;
    FUZZ_REQUIRE(rft_message_decode(bytes, &bench->limits, &message, NULL) == REFIT_OK);
    FUZZ_REQUIRE(message.kind == RFT_REFUSE && message.as.refuse.final);
    FUZZ_REQUIRE(message.as.refuse.code == REFIT_ERR_SECURITY);
}

/* ---- A worker */

#undef TO
#define TO(state) (1u << RFT_SESSION_##state)
#define REST      (TO(CURRENT) | TO(APPLYING)) /* which of the two, check_state says */
#define OFFERED   (REST | TO(STAGING) | TO(STAGED) | TO(CONNECTING))
#define STATES    (RFT_SESSION_APPLYING + 1)

/* Where what happens may lead, besides to where the session is already. */
static unsigned next_states(rft_session_state from, uint32_t by)
{
    bool joined = from >= RFT_SESSION_JOINING;
    unsigned heard = from == RFT_SESSION_JOINING ? TO(CURRENT) : 0;
    switch (by) {
    case RFT_WELCOME: return TO(JOINING) | TO(CONNECTING);
    case RFT_REFUSE:
    case RFT_BYE: return TO(CONNECTING);
    case RFT_SHARD:
    case RFT_MANIFEST: return joined ? heard | TO(CONNECTING) : 0;
    case RFT_OFFER: return joined ? OFFERED : 0;
    case RFT_FRAME:
    case RFT_LEND:
    case RFT_PIECES:
    case RFT_SEAL:
    case RFT_BEAT:
        if (from == RFT_SESSION_STAGING) return OFFERED;
        return joined ? heard | TO(CONNECTING) : 0;
    case RFT_COMMIT:
        return from == RFT_SESSION_STAGED || from == RFT_SESSION_STAGING ? REST : heard;
    case RFT_ABORT: return from == RFT_SESSION_STAGING || from == RFT_SESSION_STAGED ? REST : heard;
    case LAW_TICK:
        if (from == RFT_SESSION_STAGING) return OFFERED;
        return joined ? TO(CONNECTING) : 0;
    case LAW_USER:
        if (from == RFT_SESSION_STAGED) return REST;
        return from >= RFT_SESSION_CURRENT ? OFFERED : 0;
    case LAW_GARBAGE: return joined ? TO(CONNECTING) | heard | REST : 0;
    default: return TO(CONNECTING); /* what a trainer never says */
    }
}

static void check_state(const bench_worker *worker, uint32_t by)
{
    const rft_session *session = &worker->session;
    rft_session_state now = session->report.state;
    const rft_receive *receive = &session->receive;
    FUZZ_REQUIRE(now < STATES);
    FUZZ_REQUIRE(now == worker->before || (next_states(worker->before, by) & 1u << now) != 0);
    const rft_image *undecided = session->applying;
    bool here = rft_session_holds(session, receive->version) ||
                (undecided != NULL && undecided->id.version == receive->version &&
                 undecided->id.epoch == session->report.epoch);
    bool known = receive->sealed && here;
    switch (now) {
    case RFT_SESSION_CONNECTING:
    case RFT_SESSION_JOINING: FUZZ_REQUIRE(receive->phase == RFT_RECEIVE_NONE); break;
    case RFT_SESSION_CURRENT: FUZZ_REQUIRE(!session->owes); break;
    case RFT_SESSION_STAGING: FUZZ_REQUIRE(receive->phase != RFT_RECEIVE_NONE); break;
    case RFT_SESSION_STAGED: FUZZ_REQUIRE(receive->phase == RFT_RECEIVE_COMPLETE || known); break;
    case RFT_SESSION_APPLYING: FUZZ_REQUIRE(session->owes); break;
    }
    FUZZ_REQUIRE(!session->owes || session->applying != NULL);
    FUZZ_REQUIRE(!session->told || (now == RFT_SESSION_STAGED && worker->taken));
    FUZZ_REQUIRE((session->applying != NULL) == (worker->mailbox.ready != NULL || worker->taken));
}

static const ledger_entry *committed_entry(protocol_bench *bench, const rft_version_id *held)
{
    const ledger_entry *entry = ledger_find(bench, held->epoch, held->version);
    FUZZ_REQUIRE(entry != NULL && entry->fate == LEDGER_COMMITTED);
    FUZZ_REQUIRE(rft_digest128_equal(&entry->digest, &held->digest));
    return entry;
}

static void check_held(protocol_bench *bench, bench_worker *worker)
{
    const rft_version_id now = worker->session.held;
    bool same = now.version == worker->held.version && now.epoch == worker->held.epoch;
    if (now.version != 0 && !same) {
        (void)committed_entry(bench, &now);
        FUZZ_REQUIRE(now.epoch >= worker->held.epoch);
        FUZZ_REQUIRE(now.epoch != worker->held.epoch || now.version > worker->held.version);
    }
    FUZZ_REQUIRE(now.version != 0 || worker->held.version == 0 || worker->lost);
    FUZZ_REQUIRE(worker->session.report.final.status == REFIT_OK || worker->may_end);
}

void law_worker_moved(protocol_bench *bench, uint32_t at, uint32_t by)
{
    bench_worker *worker = &bench->workers[at];
    check_state(worker, by);
    if (!worker->lied_to) check_held(bench, worker);
    worker->before = worker->session.report.state;
    worker->held = worker->session.held;
    law_memory();
}

void law_delivered(protocol_bench *bench, uint32_t at, const rft_image *image)
{
    FUZZ_REQUIRE(image->id.version == bench->workers[at].told_commit);
    if (bench->workers[at].lied_to) return;
    const ledger_entry *entry = committed_entry(bench, &image->id);
    const rft_manifest *manifest = image->catalog->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const unsigned char *bytes = image->bytes + manifest->tensors[i].offset;
        FUZZ_REQUIRE(manifest->tensors[i].bytes == TENSOR_BYTES);
        for (uint32_t k = 0; k < TENSOR_BYTES; k++) {
            bool wanted = rft_want_covers(image->catalog->want, i, k, 1);
            FUZZ_REQUIRE(!wanted || bytes[k] == entry->bytes[i][k]);
        }
    }
}
