/* The trainer's end of the bench, and its lines. See protocol_bench.h. */
#include "protocol_bench.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/budget.h"
#include "protocol_steps.h"
#include "tests/support/hosted_store.h"
#include "tests/support/quick_config.h"
#include "wire/manifest.h"

#define FRAME_BYTES  64u
#define EPOCH        UINT64_C(77)
#define PROOF        UINT64_C(0x0123456789abcdef)
#define SEND_MOST    64u
#define PUMP_MOST    64u
#define KEYS_EDITION UINT64_C(0x5ea1ed) /* no list has it: the server looks */

/* ---- Lines */

bool bench_push(bench_line *line, rft_view message, rft_view payload)
{
    if (line->count == LINE_MOST || message.count + payload.count > PACKET_BYTES) return false;
    bench_packet *packet = &line->packets[(line->first + line->count++) % LINE_MOST];
    packet->message = (uint32_t)message.count;
    packet->payload = (uint32_t)payload.count;
    memcpy(packet->bytes, message.data, message.count);
    if (payload.count > 0) memcpy(packet->bytes + message.count, payload.data, payload.count);
    return true;
}

/* NULL: there is none. */
static bench_packet *pop(bench_line *line)
{
    if (line->count == 0) return NULL;
    bench_packet *packet = &line->packets[line->first];
    line->first = (line->first + 1) % LINE_MOST;
    line->count--;
    return packet;
}

static void key_text(uint32_t peer, char text[RFT_KEY_TEXT])
{
    rft_key key;
    memset(key.bytes, (int)peer + 1, sizeof key.bytes);
    rft_key_print(&key, text);
}

void bench_disconnect(protocol_bench *bench, uint32_t peer)
{
    bench_link *link = &bench->links[peer];
    link->open = false;
    link->up.first = link->up.count = 0;
    link->down.first = link->down.count = 0;
}

void bench_connect(protocol_bench *bench, uint32_t peer)
{
    bench_link *link = &bench->links[peer];
    bench_disconnect(bench, peer);
    link->open = true;
    link->said_staged = 0;
    memset(&link->id, 0, sizeof link->id);
    link->id.count = 5;
    rft_put_u32(link->id.bytes + 1, ++bench->connections);
    if (bench->keys) key_text(peer, link->id.key);
}

/* ---- Messages */

static void note_staged(protocol_bench *bench, uint32_t peer, const rft_message *message)
{
    const rft_version_digests *served =
        bench->store == NULL ? NULL : rft_store_served(bench->store);
    bool right = message->kind == RFT_STAGED && served != NULL &&
                 message->as.staged.version == served->version &&
                 rft_digest128_equal(&message->as.staged.digest, &served->digest);
    if (right) bench->links[peer].said_staged = served->version;
}

void bench_server_hears(protocol_bench *bench, uint32_t peer, rft_view bytes)
{
    rft_message message;
    refit_error why;
    const rft_peer_id id = bench->links[peer].id;
    if (rft_message_decode(bytes, &bench->server.limits, &message, &why) == REFIT_OK) {
        if (bench_key_counts(bench, peer)) note_staged(bench, peer, &message);
        rft_server_message(&bench->server, &id, &message, bench->now);
    } else {
        rft_server_garbage(&bench->server, &id, &why, bench->now);
    }
    law_server(bench);
    bench_server_sends(bench);
}

static bench_link *find_link(protocol_bench *bench, const rft_peer_id *id)
{
    for (uint32_t i = 0; i < PEERS; i++) {
        bench_link *link = &bench->links[i];
        if (link->open && rft_peer_id_equal(&link->id, id)) return link;
    }
    return NULL;
}

static refit_status send_one(protocol_bench *bench, const rft_peer_id *to, rft_view message,
                             rft_view payload)
{
    bench_link *link = find_link(bench, to);
    if (link == NULL) return REFIT_ERR_PEER;
    law_sent(bench, (uint32_t)(link - bench->links), message);
    /* Liars read, and forget. */
    if (link >= &bench->links[HONEST]) return REFIT_OK;
    return bench_push(&link->down, message, payload) ? REFIT_OK : REFIT_ERR_BUSY;
}

/* Messages that the server adds because a peer cannot be reached are sent as well. */
void bench_server_sends(protocol_bench *bench)
{
    for (uint32_t turn = 0; !rft_send_queue_is_empty(&bench->server.send_queue); turn++) {
        FUZZ_REQUIRE(turn < SEND_MOST);
        rft_send_queue full = bench->server.send_queue;
        bench->server.send_queue = bench->spare;
        rft_outgoing next;
        while (rft_send_queue_take(&full, &next)) {
            refit_status status = send_one(bench, &next.to, next.message, (rft_view){NULL, 0});
            if (status != REFIT_OK)
                rft_server_unreachable(&bench->server, &next.to, status, bench->now);
        }
        rft_send_queue_reset(&full);
        bench->spare = full;
        law_server(bench);
    }
}

void bench_send_frames(protocol_bench *bench, uint32_t most)
{
    rft_frame_order order;
    for (uint32_t i = 0; i < most && rft_server_next_frame(&bench->server, &order); i++) {
        rft_encoded frame;
        FUZZ_REQUIRE(rft_frames_encode(bench->frames, bench->store, order.sequence, order.coding,
                                       order.want, order.ready, &frame, NULL) == REFIT_OK);
        refit_status status = send_one(bench, &order.to, frame.message, frame.payload.bytes);
        if (status == REFIT_OK)
            rft_server_frame_sent(&bench->server, &order, frame.payload.bytes.count);
        else
            rft_server_unreachable(&bench->server, &order.to, status, bench->now);
        rft_want_release(order.want);
        law_server(bench);
        bench_server_sends(bench);
    }
}

/* ---- The trainer's calls */

static rft_manifest *make_manifest(const protocol_bench *bench, uint32_t count)
{
    refit_tensor tensors[TENSORS_MOST] = {
        {sizeof(refit_tensor), "first", REFIT_U8, 1, {64}, 64, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "second", REFIT_BF16, 1, {32}, 64, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "third", REFIT_F32, 2, {4, 4}, 64, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tied", REFIT_U8, 1, {64}, 64, 0},
    };
    rft_manifest *manifest;
    FUZZ_REQUIRE(rft_manifest_open(tensors, count, FRAME_BYTES, &bench->server.limits, &manifest,
                                   NULL) == REFIT_OK);
    return manifest;
}

void bench_trainer_declares(protocol_bench *bench, uint32_t tensors)
{
    rft_store *store;
    rft_frames *frames;
    bool same = bench->store != NULL && bench->tensors == tensors;
    if (same || bench->server.transaction.state != RFT_TRANSACTION_IDLE) return;
    FUZZ_REQUIRE(hosted_store_open(make_manifest(bench, tensors), bench->config.broadcast_slots,
                                   bench->shm, &bench->retired, &store, NULL) == REFIT_OK);
    FUZZ_REQUIRE(rft_frames_open(store->manifest, &bench->config, NULL, &frames, NULL) == REFIT_OK);
    rft_server_adopt(&bench->server, store);
    rft_frames_close(bench->frames, &bench->retired);
    rft_store_close(bench->store);
    bench->store = store;
    bench->frames = frames;
    bench->tensors = tensors;
    law_server(bench);
    bench_server_sends(bench);
}

/* A slot that a worker may still read gets fresh memory. */
static void clear_slot(protocol_bench *bench, uint32_t slot)
{
    rft_retire_list_sweep(&bench->retired);
    const rft_slot *place = &bench->store->slots[slot];
    if (place->buffer != NULL && !place->tainted) return;
    FUZZ_REQUIRE(rft_store_renew(bench->store, slot, NULL) == REFIT_OK);
}

static void begin(protocol_bench *bench, uint32_t seed)
{
    rft_server *server = &bench->server;
    if (rft_server_has_readers(server)) {
        if (seed % 2 == 0) return;
        rft_server_evict_readers(server, bench->now);
    }
    if (bench->ledger_count == VERSIONS) {
        rft_transaction_expire(server, bench->now);
        return;
    }
    clear_slot(bench, rft_store_target(bench->store));
    rft_store_begin(bench->store, server->transaction.version);
    rft_transaction_begin(server, bench->now);
    bench->ledger[bench->ledger_count++] = (ledger_entry){.epoch = server->epoch,
                                                          .version = server->transaction.version,
                                                          .members = server->transaction.members};
    bench->next_tensor = 0;
    for (uint32_t i = 0; i < TENSORS_MOST; i++)
        if ((seed >> i & 1) != 0) bench->bytes[i][seed % TENSOR_BYTES] += (unsigned char)(seed | 1);
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

static void seal(protocol_bench *bench)
{
    ledger_entry *entry =
        ledger_find(bench, bench->server.epoch, bench->server.transaction.version);
    FUZZ_REQUIRE(entry != NULL && rft_store_seal(bench->store, NULL) == REFIT_OK);
    for (uint32_t i = 0; i < bench->store->manifest->count; i++) {
        const uint32_t alias = bench->store->manifest->tensors[i].alias_of;
        memcpy(entry->bytes[i], bench->bytes[alias == REFIT_NO_ALIAS ? i : alias], TENSOR_BYTES);
    }
    entry->digest = rft_store_served(bench->store)->digest;
    entry->sealed = true;
    rft_transaction_seal(&bench->server, bench->now);
}

static void write_next(protocol_bench *bench)
{
    const rft_manifest *manifest = bench->store->manifest;
    uint32_t at = bench->next_tensor++;
    if (at == manifest->count) {
        seal(bench);
    } else if (manifest->tensors[at].alias_of == REFIT_NO_ALIAS) {
        FUZZ_REQUIRE(rft_store_write(bench->store, at, bench->bytes[at], TENSOR_BYTES, add_ready,
                                     bench->store, NULL) == REFIT_OK);
    }
}

static void roll_back(protocol_bench *bench)
{
    rft_store *store = bench->store;
    if (store->writing_slot == store->committed_slot) clear_slot(bench, store->writing_slot);
    rft_store_undo(store);
    rft_store_rollback(store, true);
    rft_transaction_end_rollback(&bench->server, bench->now);
}

void bench_trainer_steps(protocol_bench *bench, uint32_t seed)
{
    uint64_t version = 0;
    switch (bench->server.transaction.state) {
    case RFT_TRANSACTION_IDLE:
        FUZZ_REQUIRE(rft_transaction_prepare(&bench->server, &version, NULL) == REFIT_OK);
        break;
    case RFT_TRANSACTION_PREPARING: begin(bench, seed); break;
    case RFT_TRANSACTION_WRITING: write_next(bench); break;
    case RFT_TRANSACTION_ABORTED: roll_back(bench); break;
    case RFT_TRANSACTION_STAGING:
    case RFT_TRANSACTION_COMMITTING: break; /* it waits */
    }
    law_server(bench);
    bench_server_sends(bench);
}

void bench_trainer_aborts(protocol_bench *bench)
{
    if (bench->server.transaction.state != RFT_TRANSACTION_WRITING) return;
    rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "the trainer dropped it");
    law_server(bench);
    bench_server_sends(bench);
}

void bench_trainer_cancels(protocol_bench *bench)
{
    switch (bench->server.transaction.state) {
    case RFT_TRANSACTION_PREPARING: rft_transaction_expire(&bench->server, bench->now); break;
    case RFT_TRANSACTION_WRITING:
    case RFT_TRANSACTION_STAGING:
    case RFT_TRANSACTION_COMMITTING: rft_transaction_cancel(&bench->server, bench->now); break;
    case RFT_TRANSACTION_IDLE:
    case RFT_TRANSACTION_ABORTED: return;
    }
    law_server(bench);
    bench_server_sends(bench);
}

/* ---- The machine */

void __real_rft_budget_free(const char *root, rft_budget *out);
void __wrap_rft_budget_free(const char *root, rft_budget *out);

/* Every shared segment asks for the memory that is free, and to read the accounts of the cgroups
 * takes a tenth of the time of all sequences. They are read once. */
void __wrap_rft_budget_free(const char *root, rft_budget *out)
{
    static rft_budget kept;
    if (kept.free_bytes == 0) __real_rft_budget_free(root, &kept);
    *out = kept;
}

/* ---- Opening and closing */

static void open_server(protocol_bench *bench, uint64_t epoch)
{
    static rft_segment probe;
    rft_server_init(&bench->server, &bench->config, epoch, bench->now);
    bench->server.allow = bench->keys ? bench->allow[0] : NULL;
    bench->transaction_before = RFT_TRANSACTION_IDLE;
    bench->committed = bench->aborted = 0;
    bench->current = bench->server.current;
    if (bench->shm && probe.memory == NULL) {
        const uint64_t proof = PROOF;
        FUZZ_REQUIRE(rft_segment_create(&probe, sizeof proof, NULL) == REFIT_OK);
        memcpy(probe.memory, &proof, sizeof proof);
    }
    bench->server.proof = PROOF;
    if (bench->shm) strcpy(bench->server.probe, probe.name);
    bench_trainer_declares(bench, TENSORS_MOST);
}

static void close_server(protocol_bench *bench)
{
    rft_frames_close(bench->frames, &bench->retired);
    rft_store_close(bench->store);
    bench->frames = NULL;
    bench->store = NULL;
    rft_send_queue_close(&bench->spare);
    bench->spare = (rft_send_queue){0};
    FUZZ_REQUIRE(rft_server_close(&bench->server, INT64_MIN) == 0);
    FUZZ_REQUIRE(rft_retire_list_close(&bench->retired, INT64_MIN) == 0);
}

void bench_trainer_restarts(protocol_bench *bench, bool says_goodbye)
{
    uint64_t epoch = bench->server.epoch + 1;
    rft_transaction_state state = bench->server.transaction.state;
    bool leaves =
        says_goodbye && (state == RFT_TRANSACTION_WRITING || state == RFT_TRANSACTION_STAGING);
    if (leaves) rft_transaction_abort(&bench->server, REFIT_ERR_CLOSED, "the trainer closes");
    if (says_goodbye) rft_server_leave(&bench->server, false);
    bench_server_sends(bench);
    close_server(bench);
    open_server(bench, epoch);
    for (uint32_t i = 0; i < PEERS; i++) {
        bench_link *link = &bench->links[i];
        const uint32_t first = link->down.first, count = says_goodbye ? link->down.count : 0;
        bench_connect(bench, i);
        link->down.first = first;
        link->down.count = count;
    }
}

/* The folders of keys, once for all inputs. */
static void make_allow_lists(rft_allow_list *lists[PEERS + 1])
{
    for (uint32_t without = 0; without <= PEERS; without++) {
        char folder[64] = "/tmp/fuzz-protocol-XXXXXX", file[96], text[RFT_KEY_TEXT];
        FUZZ_REQUIRE(mkdtemp(folder) != NULL);
        for (uint32_t peer = 0; peer < PEERS; peer++) {
            if (peer + 1 == without) continue;
            (void)snprintf(file, sizeof file, "%s/w%u%s", folder, peer,
                           rft_key_suffix(RFT_KEY_PUBLIC));
            key_text(peer, text);
            FILE *out = fopen(file, "w");
            FUZZ_REQUIRE(out != NULL && fputs(text, out) >= 0 && fclose(out) == 0);
            FUZZ_REQUIRE(chmod(file, 0600) == 0);
        }
        FUZZ_REQUIRE(rft_allow_list_open(folder, &lists[without], NULL) == REFIT_OK);
        for (uint32_t peer = 0; peer < PEERS; peer++) {
            (void)snprintf(file, sizeof file, "%s/w%u%s", folder, peer,
                           rft_key_suffix(RFT_KEY_PUBLIC));
            (void)unlink(file);
        }
        FUZZ_REQUIRE(rmdir(folder) == 0);
    }
}

void bench_set_keys(protocol_bench *bench, uint32_t without)
{
    if (!bench->keys) return;
    bench->server.allow = bench->allow[without == PEERS ? 0 : without + 1];
    bench->server.keys_edition = KEYS_EDITION;
    if (without < HONEST) bench->workers[without].may_end = true;
    rft_server_check_keys(&bench->server, bench->now);
    law_server(bench);
    bench_server_sends(bench);
}

bool bench_key_counts(const protocol_bench *bench, uint32_t peer)
{
    return !bench->keys || bench->server.allow != bench->allow[peer + 1];
}

static void configure(protocol_bench *bench, const uint8_t *settings)
{
    refit_config *config = &bench->config;
    *config = quick_config();
    bench->keys = (settings[0] & SET_KEYS) != 0;
    config->broadcast_slots = (settings[0] & SET_TWO_SLOTS) != 0 ? 2 : 1;
    uint32_t quorum = settings[0] >> 2 & 3;
    config->broadcast_commit = quorum == 0 || quorum == 3 ? REFIT_COMMIT_ALL : REFIT_COMMIT_QUORUM;
    config->broadcast_quorum = config->broadcast_commit == REFIT_COMMIT_ALL ? 0 : quorum;
    bench->shm = (settings[0] & SET_SHM) == SET_SHM;
    bench->neighbors = (settings[0] & SET_SHM) == SET_NEIGHBORS;
    config->broadcast_shm = bench->shm || bench->neighbors ? REFIT_SHM_AUTO : REFIT_SHM_OFF;
    if ((settings[0] & SET_VERIFY) != 0) config->broadcast_verify = REFIT_VERIFY_ALWAYS;
    if ((settings[0] & SET_DELTA) != 0) config->broadcast_delta = REFIT_DELTA_ALWAYS;
    if ((settings[1] & SET_STAGED) != 0 && config->broadcast_slots == 2) {
        config->broadcast_wait = REFIT_WAIT_STAGED;
        config->broadcast_max_behind = settings[1] >> 5 & 3;
    }
    bench->parts = (settings[1] & SET_PARTS) != 0;
    if ((settings[1] & SET_ZSTD) != 0) config->broadcast_compress = REFIT_COMPRESS_ZSTD;
    config->broadcast_frame_bytes = FRAME_BYTES;
    config->broadcast_window = 2;
    config->broadcast_resend_limit = 2;
    config->broadcast_heartbeat_ms = 100;
    config->broadcast_heartbeat_timeout_ms = 300;
    config->broadcast_stage_timeout_ms = 1000;
    config->broadcast_commit_timeout_ms = 1000;
    config->limits_workers = PEERS;
    config->limits_message_bytes = 1024;
    config->limits_manifest_bytes = 1024;
    config->limits_frame_bytes = 1024;
    config->limits_version_bytes = 4096;
    config->limits_window = 8;
}

void bench_open(protocol_bench *bench, const uint8_t *settings)
{
    static rft_allow_list *lists[PEERS + 1];
    if (lists[0] == NULL) make_allow_lists(lists);
    /* What lies in lines and ledger beyond their counts is never read. */
    memset(bench, 0, offsetof(protocol_bench, links));
    bench->connections = bench->instances = bench->ledger_count = 0;
    bench->scratch = (rft_bytes){0};
    bench->allow = lists;
    bench->now = INT64_C(1000000000);
    configure(bench, settings);
    bench->limits = rft_limits_from(&bench->config);
    open_server(bench, EPOCH);
    for (uint32_t i = 0; i < PEERS; i++)
        bench_connect(bench, i);
    for (uint32_t i = 0; i < HONEST; i++)
        bench_worker_opens(bench, i);
}

void bench_close(protocol_bench *bench)
{
    for (uint32_t i = 0; i < HONEST; i++) {
        rft_session_close(&bench->workers[i].session);
        rft_mailbox_close(&bench->workers[i].mailbox);
    }
    close_server(bench);
    rft_bytes_close(&bench->scratch);
}

/* ---- Both ends */

void bench_deliver_up(protocol_bench *bench, uint32_t peer, uint32_t most)
{
    const bench_packet *packet;
    for (uint32_t i = 0; i < most && (packet = pop(&bench->links[peer].up)) != NULL; i++)
        bench_server_hears(bench, peer, (rft_view){packet->bytes, packet->message});
}

void bench_deliver_down(protocol_bench *bench, uint32_t worker, uint32_t most)
{
    const bench_packet *packet;
    for (uint32_t i = 0; i < most && (packet = pop(&bench->links[worker].down)) != NULL; i++) {
        bench_worker_hears(bench, worker, (rft_view){packet->bytes, packet->message},
                           (rft_view){packet->bytes + packet->message, packet->payload});
    }
}

void bench_advance(protocol_bench *bench, uint32_t ms)
{
    bench->now = rft_after_ms(bench->now, ms);
    if (bench->now >= rft_server_tick_at(&bench->server))
        rft_server_tick(&bench->server, bench->now);
    law_server(bench);
    bench_server_sends(bench);
    for (uint32_t i = 0; i < HONEST; i++) {
        rft_session_tick(&bench->workers[i].session, bench->now);
        bench_worker_moved(bench, i, LAW_TICK);
    }
}

static bool is_quiet(const protocol_bench *bench, bool users)
{
    for (uint32_t i = 0; i < HONEST; i++) {
        const bench_link *link = &bench->links[i];
        const bench_worker *worker = &bench->workers[i];
        if (link->up.count + link->down.count > 0) return false;
        if (users && (worker->mailbox.ready != NULL || worker->taken || worker->open)) return false;
        if (rft_receive_is_busy(&worker->session.receive)) return false;
    }
    return !rft_server_wants_frames(&bench->server);
}

void bench_pump(protocol_bench *bench, bool users)
{
    for (uint32_t turn = 0; turn < PUMP_MOST && !is_quiet(bench, users); turn++) {
        for (uint32_t i = 0; i < HONEST; i++)
            bench_deliver_up(bench, i, LINE_MOST);
        bench_send_frames(bench, 8);
        for (uint32_t i = 0; i < HONEST; i++) {
            bench_deliver_down(bench, i, LINE_MOST);
            rft_session_tick(&bench->workers[i].session, bench->now);
            bench_worker_moved(bench, i, LAW_TICK);
            if (users) bench_user_acts(bench, i, 0);
        }
    }
}
