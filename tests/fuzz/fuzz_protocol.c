/*
 * Sequences of messages. The input is two bytes of settings (keys or none, slots, commit policy,
 * shared memory, verify, delta, compression: protocol_bench.c reads them) and steps of four:
 *
 *     what happens | to which peer | amount | seed
 *
 * What happens is a delivery, a moment that passes, a step of the trainer, a decision of a user, a
 * connection that breaks, a key that is taken back, or a lie, told to the trainer or to a worker.
 * After every step the laws of protocol_laws.c must hold. At the end the liars fall silent and all
 * workers are connected: then a version reaches all of them within a few tries.
 */
#include "protocol_bench.h"
#include "protocol_steps.h"

#define STEPS_MOST 128u
#define HEAL_TRIES 8u
#define HEAL_WAITS 14u

static uint32_t mix(const step *at)
{
    uint32_t seed = (uint32_t)at->amount << 8 | at->seed;
    return seed * UINT32_C(2654435761) ^ seed >> 3;
}

/* ---- What may happen */

static void up(protocol_bench *bench, const step *at)
{
    bench_deliver_up(bench, at->peer % HONEST, 1u + at->amount % 4);
}

static void down(protocol_bench *bench, const step *at)
{
    bench_deliver_down(bench, at->peer % HONEST, 1u + at->amount % 4);
}

static void time_passes(protocol_bench *bench, const step *at)
{
    static const uint32_t moments[] = {0, 1, 50, 100, 100, 150, 301, 1001};
    bench_advance(bench, moments[at->amount % 8]);
}

static void trainer_steps(protocol_bench *bench, const step *at)
{
    for (uint32_t i = 0; i < 1u + at->amount % 8; i++)
        bench_trainer_steps(bench, at->seed);
}

static void user_acts(protocol_bench *bench, const step *at)
{
    bench_user_acts(bench, at->peer % HONEST, at->amount % 4);
}

static void frames_go(protocol_bench *bench, const step *at)
{
    bench_send_frames(bench, 1u + at->amount % 4);
}

static void all_arrives(protocol_bench *bench, const step *at)
{
    bench_pump(bench, at->amount % 2 == 0);
}

static void lie_to_server(protocol_bench *bench, const step *at)
{
    uint32_t liar = HONEST + at->peer % LIARS;
    if (!bench_make_lie(bench, at->peer / LIARS, mix(at), &bench->scratch)) return;
    bench_server_hears(bench, liar, rft_bytes_view(&bench->scratch));
}

/* One byte of it is wrong, or it ends too soon. */
static void damage(rft_bytes *message, const step *at)
{
    uint32_t place = mix(at) % (uint32_t)message->count;
    if (at->seed % 4 == 0)
        message->count = place;
    else
        message->data[place] ^= (unsigned char)(at->seed | 1);
}

static void damaged_to_server(protocol_bench *bench, const step *at)
{
    uint32_t liar = HONEST + at->peer % LIARS;
    if (!bench_make_lie(bench, at->peer / LIARS, at->amount, &bench->scratch)) return;
    damage(&bench->scratch, at);
    bench_server_hears(bench, liar, rft_bytes_view(&bench->scratch));
}

static void link_breaks(protocol_bench *bench, const step *at)
{
    uint32_t peer = at->peer % PEERS;
    if (at->amount % 2 == 0)
        bench_connect(bench, peer);
    else
        bench_disconnect(bench, peer);
}

static void reopen(protocol_bench *bench, uint32_t worker, bool says_goodbye)
{
    bench_worker_closes(bench, worker, says_goodbye);
    bench_worker_opens(bench, worker);
}

static void worker_leaves(protocol_bench *bench, const step *at)
{
    reopen(bench, at->peer % HONEST, at->amount % 2 == 0);
}

/* What ZeroMQ says when a handshake fails. */
static void rejection(protocol_bench *bench, uint32_t at, uint32_t seed)
{
    bench_worker *worker = &bench->workers[at];
    refit_error why = {.status = seed % 2 == 0 ? REFIT_ERR_SECURITY : REFIT_ERR_SYSTEM,
                       .text = "no connection came about"};
    worker->may_end = true;
    rft_session_reject(&worker->session, &why, bench->now);
    bench_worker_moved(bench, at, LAW_OTHER);
}

static void something_rare(protocol_bench *bench, const step *at)
{
    switch ((step_rare)(at->amount % RARE_KINDS)) {
    case RARE_ABORT: bench_trainer_aborts(bench); break;
    case RARE_CANCEL: bench_trainer_cancels(bench); break;
    case RARE_DECLARE: bench_trainer_declares(bench, 1u + at->seed % TENSORS_MOST); break;
    case RARE_RESTART: bench_trainer_restarts(bench, at->seed % 2 == 0); break;
    case RARE_KEY_ENDS:
    case RARE_KEY_ENDS_TOO: bench_set_keys(bench, at->seed % PEERS); break;
    case RARE_KEYS_COUNT: bench_set_keys(bench, PEERS); break;
    case RARE_SHUT_OUT: rejection(bench, at->peer % HONEST, at->seed); break;
    case RARE_UNREACHABLE:
        rft_server_unreachable(&bench->server, &bench->links[at->peer % PEERS].id,
                               at->seed % 2 == 0 ? REFIT_ERR_PEER : REFIT_ERR_BUSY, bench->now);
        law_server(bench);
        bench_server_sends(bench);
        break;
    case RARE_KINDS: break;
    }
}

/* A worker hears a forged message in the trainer's name, or a damaged one. */
static void lie_to_worker(protocol_bench *bench, const step *at)
{
    static const unsigned char payload[TENSOR_BYTES];
    uint32_t worker = at->peer % HONEST;
    if (!bench_make_lie(bench, at->peer / HONEST, mix(at), &bench->scratch)) return;
    bench->workers[worker].lied_to = true;
    if (at->seed % 16 == 0) damage(&bench->scratch, at);
    /* The scratch buffer is used again for the answer. */
    unsigned char copy[PACKET_BYTES];
    size_t count = bench->scratch.count < sizeof copy ? bench->scratch.count : sizeof copy;
    if (count > 0) memcpy(copy, bench->scratch.data, count);
    bench_worker_hears(bench, worker, (rft_view){copy, count},
                       (rft_view){payload, at->amount % (TENSOR_BYTES + 1u)});
}

typedef void (*step_fn)(protocol_bench *bench, const step *at);

static void play(protocol_bench *bench, const step *at)
{
    static const step_fn steps[STEP_KINDS] = {
        [STEP_UP] = up,
        [STEP_DOWN] = down,
        [STEP_TIME] = time_passes,
        [STEP_TRAINER] = trainer_steps,
        [STEP_TRAINER_TOO] = trainer_steps,
        [STEP_USER] = user_acts,
        [STEP_FRAMES] = frames_go,
        [STEP_ALL_ARRIVES] = all_arrives,
        [STEP_LIE] = lie_to_server,
        [STEP_LIE_TOO] = lie_to_server,
        [STEP_LIE_ALSO] = lie_to_server,
        [STEP_DAMAGED] = damaged_to_server,
        [STEP_LINK] = link_breaks,
        [STEP_LEAVES] = worker_leaves,
        [STEP_RARE] = something_rare,
        [STEP_LIE_DOWN] = lie_to_worker,
    };
    steps[at->what % STEP_KINDS](bench, at);
}

/* ---- Recovery */

/* A worker that was lied to, or whose session has ended, is replaced by another. */
static void mend(protocol_bench *bench)
{
    bench_set_keys(bench, PEERS);
    for (uint32_t i = 0; i < HONEST; i++) {
        const bench_worker *worker = &bench->workers[i];
        if (worker->lied_to || worker->session.report.final.status != REFIT_OK)
            reopen(bench, i, false);
        else if (!bench->links[i].open)
            bench_connect(bench, i);
    }
}

/* The transaction under way is brought to its end: versions only begin when the trainer is idle. */
static void finish_transaction(protocol_bench *bench)
{
    for (uint32_t i = 0; i < HEAL_WAITS; i++) {
        for (uint32_t k = 0; k <= TENSORS_MOST + 1; k++)
            if (bench->server.transaction.state != RFT_TRANSACTION_IDLE)
                bench_trainer_steps(bench, 1);
        if (bench->server.transaction.state == RFT_TRANSACTION_IDLE) return;
        bench_pump(bench, true);
        bench_advance(bench, 100);
        bench_pump(bench, true);
    }
    FUZZ_REQUIRE(bench->server.transaction.state == RFT_TRANSACTION_IDLE);
}

static bool all_hold(const protocol_bench *bench, uint64_t version)
{
    for (uint32_t i = 0; i < HONEST; i++)
        if (!rft_session_holds(&bench->workers[i].session, version)) return false;
    return bench->server.current.version == version;
}

static void check_recovery(protocol_bench *bench)
{
    bool reached = false;
    for (uint32_t i = 0; i < HEAL_TRIES && !reached; i++) {
        mend(bench);
        finish_transaction(bench);
        bench_advance(bench, 100);
        bench_pump(bench, true);
        if (bench->ledger_count == VERSIONS) return;
        bench_trainer_steps(bench, 7);
        uint64_t version = bench->server.transaction.version;
        finish_transaction(bench);
        bench_pump(bench, true);
        reached = all_hold(bench, version);
    }
    FUZZ_REQUIRE(reached);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static protocol_bench bench;
    static uint64_t kept; /* what is made once for all inputs */
    if (size < SETTINGS) return 0;
    if (kept == 0) law_count_memory();
    bench_open(&bench, data);
    if ((data[1] & SET_ALL_JOINED) != 0) bench_pump(&bench, true);
    uint32_t steps = (uint32_t)((size - SETTINGS) / sizeof(step));
    for (uint32_t i = 0; i < steps && i < STEPS_MOST; i++) {
        step at;
        memcpy(&at, data + SETTINGS + i * sizeof(step), sizeof at);
        play(&bench, &at);
    }
    check_recovery(&bench);
    bench_close(&bench);
    if (kept == 0) kept = law_memory_bytes();
    FUZZ_REQUIRE(law_memory_bytes() == kept);
    fuzz_taken++;
    return 0;
}
