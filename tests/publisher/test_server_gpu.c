/* The publisher's state machine and workers on its GPU: which of them may join there, what they are
 * offered, and what follows from their reading there. */
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

typedef struct scene {
    server_bench bench;
    rft_gpu_store gpu;
    rft_gpu_block block;
    rft_gpu_chunk chunk;
} scene;

static const unsigned char ours[RFT_UUID_BYTES] = {1, 2, 3};
static const unsigned char others[RFT_UUID_BYTES] = {9, 9, 9};

/* The GPU has one block, of the second slot, which holds the version given. */
static void scene_open(scene *on, refit_gpu mode, uint64_t version)
{
    memset(on, 0, sizeof *on);
    server_bench_open(&on->bench, 2, true);
    on->bench.config.broadcast_gpu = (int32_t)mode;
    memcpy(on->gpu.probe_share.uuid, ours, sizeof ours);
    on->gpu.writing = RFT_NO_SLOT;
    on->chunk.bytes = on->bench.store->manifest->store_bytes;
    on->chunk.share.offset = 512;
    on->chunk.share.bytes = on->chunk.bytes;
    on->block.chunks = &on->chunk;
    on->block.chunk_count = 1;
    strcpy(on->block.share_lock.segment.name, "/proc/1/fd/3:1");
    if (version != 0) on->gpu.slots[1] = (rft_gpu_slot){.block = &on->block, .version = version};
}

static void scene_close(scene *on)
{
    server_bench_close(&on->bench);
}

/* A test opens the scene that is its state. */
static int give_scene(void **state)
{
    static scene on;
    *state = &on;
    return 0;
}

static int close_scene(void **state)
{
    scene_close(*state);
    return 0;
}

#define ON_GPU(name) TEST_ON(scene *on, name, give_scene, close_scene)

static void use_gpu(scene *on)
{
    rft_server_use_gpu(&on->bench.server, &on->gpu);
    server_bench_tick(&on->bench, 0);
}

/* NULL: without a GPU. */
static void hello(scene *on, unsigned worker, const unsigned char *uuid)
{
    char name[2] = {(char)('a' + worker), '\0'};
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(name);
    message.as.hello.instance = worker;
    message.as.hello.window = 4;
    if (uuid != NULL) message.as.hello.gpu = (rft_view){uuid, RFT_UUID_BYTES};
    server_bench_say(&on->bench, worker, message);
}

static void join(scene *on, unsigned worker, bool gpu, uint64_t proof)
{
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = SERVER_EPOCH;
    message.as.join.shm = proof != 0;
    message.as.join.gpu = gpu;
    message.as.join.proof = proof;
    server_bench_say(&on->bench, worker, message);
}

static void join_gpu(scene *on, unsigned worker)
{
    hello(on, worker, ours);
    join(on, worker, true, SERVER_PROOF);
}

static bool is_subscribed(scene *on, unsigned worker)
{
    const rft_peer *peer = server_bench_peer(&on->bench, worker);
    return peer != NULL && peer->subscribed;
}

/* The last REFUSE: its code, and whether it is final. */
static void assert_join_refused(scene *on, unsigned worker, bool final)
{
    const rft_message *told = server_bench_told(&on->bench, worker, RFT_REFUSE);
    assert_int_equal(told->as.refuse.code, REFIT_ERR_UNSUPPORTED);
    assert_int_equal(told->as.refuse.final, final);
    assert_false(is_subscribed(on, worker));
}

ON_GPU(a_welcome_names_the_gpu_once_there_is_one)
{
    scene_open(on, REFIT_GPU_AUTO, 0);
    hello(on, 1, ours);
    assert_int_equal(server_bench_told(&on->bench, 1, RFT_WELCOME)->as.welcome.share.count, 0);
    use_gpu(on);
    hello(on, 2, NULL);
    assert_int_equal(server_bench_told(&on->bench, 2, RFT_WELCOME)->as.welcome.share.count,
                     RFT_SHARE_BYTES);
}

ON_GPU(only_workers_on_the_gpu_are_told_to_join_once_more)
{
    scene_open(on, REFIT_GPU_AUTO, 0);
    hello(on, 1, ours);
    join(on, 1, false, SERVER_PROOF);
    hello(on, 2, others);
    join(on, 2, false, SERVER_PROOF);
    hello(on, 3, NULL);
    join(on, 3, false, 0);
    use_gpu(on);
    assert_int_equal(server_bench_count(&on->bench, 1, RFT_REFUSE), 1);
    assert_false(server_bench_told(&on->bench, 1, RFT_REFUSE)->as.refuse.final);
    assert_int_equal(server_bench_count(&on->bench, 2, RFT_REFUSE), 0);
    assert_int_equal(server_bench_count(&on->bench, 3, RFT_REFUSE), 0);
    assert_true(is_subscribed(on, 1)); /* until it says hello again */
    join_gpu(on, 1);
    assert_true(server_bench_peer(&on->bench, 1)->gpu);
}

TEST(joining_on_the_gpu_takes_the_proof_and_the_same_gpu)
{
    static const struct {
        const unsigned char *uuid;
        uint64_t proof;
        bool there; /* the publisher has a GPU */
        refit_status code;
    } trials[] = {
        {ours, SERVER_PROOF, true, REFIT_OK},
        {ours, SERVER_PROOF + 1, true, REFIT_ERR_SECURITY},
        {ours, 0, true, REFIT_ERR_SECURITY},
        {others, SERVER_PROOF, true, REFIT_ERR_PROTOCOL},
        {NULL, SERVER_PROOF, true, REFIT_ERR_PROTOCOL},
        {ours, SERVER_PROOF, false, REFIT_ERR_PROTOCOL},
    };
    for (size_t i = 0; i < COUNT_OF(trials); i++) {
        scene on;
        scene_open(&on, REFIT_GPU_AUTO, 0);
        if (trials[i].there) use_gpu(&on);
        hello(&on, 1, trials[i].uuid);
        join(&on, 1, true, trials[i].proof);
        assert_int_equal(is_subscribed(&on, 1), trials[i].code == REFIT_OK);
        if (trials[i].code != REFIT_OK)
            assert_int_equal(server_bench_told(&on.bench, 1, RFT_BYE)->as.bye.code, trials[i].code);
        scene_close(&on);
    }
}

ON_GPU(with_require_only_workers_on_the_gpu_come_in)
{
    scene_open(on, REFIT_GPU_REQUIRE, 0);
    hello(on, 1, ours);
    assert_join_refused(on, 1, false); /* the publisher may learn its GPU yet */
    assert_null(server_bench_peer(&on->bench, 1));
    use_gpu(on);
    hello(on, 2, NULL);
    assert_join_refused(on, 2, false); /* the worker may learn its GPU yet */
    assert_null(server_bench_peer(&on->bench, 2));
    hello(on, 3, others);
    assert_join_refused(on, 3, true);
    assert_null(server_bench_peer(&on->bench, 3));
    hello(on, 4, ours);
    join(on, 4, false, SERVER_PROOF);
    assert_join_refused(on, 4, false);
    assert_null(server_bench_peer(&on->bench, 4));
    join_gpu(on, 5);
    assert_true(is_subscribed(on, 5));
}

ON_GPU(worker_returning_without_required_gpu_is_lost)
{
    scene_open(on, REFIT_GPU_REQUIRE, 1);
    use_gpu(on);
    join_gpu(on, 1);
    server_bench_begin(&on->bench, 1);
    hello(on, 1, NULL);
    assert_join_refused(on, 1, false);
    server_bench_write(&on->bench);
    server_bench_seal(&on->bench);
    assert_int_equal(on->bench.server.transaction.state, RFT_TRANSACTION_ABORTED);
}

ON_GPU(an_offer_names_the_block_where_the_version_lies_there)
{
    scene_open(on, REFIT_GPU_AUTO, 2);
    use_gpu(on);
    join_gpu(on, 1);
    hello(on, 2, NULL);
    join(on, 2, false, SERVER_PROOF);
    for (uint64_t version = 1; version <= 2; version++) {
        server_bench_forget(&on->bench);
        server_bench_offer(&on->bench, version);
        for (unsigned worker = 1; worker <= 2; worker++) {
            const rft_message *offer = server_bench_told(&on->bench, worker, RFT_OFFER);
            bool gpu = worker == 1 && version == 2;
            assert_true(offer->as.offer.lent == gpu);
            assert_true((offer->as.offer.segment.count > 0) == !gpu);
            assert_int_equal(server_bench_peer(&on->bench, worker)->path,
                             gpu ? REFIT_PATH_CUDA_IPC : REFIT_PATH_SHM);
            server_bench_stage(&on->bench, worker);
        }
        server_bench_apply(&on->bench, 1);
        server_bench_apply(&on->bench, 2);
    }
    uint64_t bytes = on->bench.store->manifest->payload_bytes;
    assert_int_equal(on->bench.server.counts.gpu_bytes, bytes);
    assert_int_equal(on->bench.server.counts.shm_bytes, 3 * bytes);
}

TEST(a_reader_on_the_gpu_taints_no_slot_of_the_host)
{
    for (uint64_t version = 1; version <= 2; version++) {
        scene on;
        scene_open(&on, REFIT_GPU_AUTO, version == 1 ? 1 : 0);
        use_gpu(&on);
        join_gpu(&on, 1);
        server_bench_publish(&on.bench, 1, 1);
        rft_slot *slot = &on.bench.store->slots[on.bench.store->committed_slot];
        rft_server_evict(&on.bench.server, server_bench_peer(&on.bench, 1), REFIT_ERR_PEER,
                         "the test");
        assert_int_equal(slot->tainted, version == 2); /* read in shared memory */
        server_bench_tick(&on.bench, 0);
        scene_close(&on);
    }
}

ON_GPU(a_reader_on_the_gpu_blocks_the_slot_until_it_lets_go)
{
    scene_open(on, REFIT_GPU_AUTO, 1);
    use_gpu(on);
    join_gpu(on, 1);
    for (uint64_t version = 1; version <= 2; version++) {
        server_bench_publish(&on->bench, version, 1);
    }
    server_bench_prepare(&on->bench, 3);
    assert_true(rft_server_has_readers(&on->bench.server));
    server_bench_say(&on->bench, 1, server_released(1));
    assert_false(rft_server_has_readers(&on->bench.server));
}

ON_GPU(a_recall_is_a_beat_for_those_on_the_gpu)
{
    scene_open(on, REFIT_GPU_AUTO, 0);
    use_gpu(on);
    join_gpu(on, 1);
    hello(on, 2, NULL);
    join(on, 2, false, SERVER_PROOF);
    hello(on, 3, ours);
    server_bench_forget(&on->bench);
    rft_server_recall_gpu(&on->bench.server);
    server_bench_tick(&on->bench, 0);
    assert_int_equal(server_bench_count(&on->bench, 1, RFT_BEAT), 1);
    assert_int_equal(server_bench_count(&on->bench, 2, RFT_BEAT), 0);
    assert_int_equal(server_bench_count(&on->bench, 3, RFT_BEAT), 0);
}

static int forget_samples(void **state)
{
    server_samples_forget();
    return 0;
}

/* ---- Piece by piece */

static void join_for_pieces(scene *on, unsigned worker)
{
    hello(on, worker, ours);
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = SERVER_EPOCH;
    message.as.join.shm = message.as.join.gpu = message.as.join.pieces = true;
    message.as.join.proof = SERVER_PROOF;
    server_bench_say(&on->bench, worker, message);
}

/* Version 2 is being written, in the GPU's memory, and these lists are announced. */
static void stream(scene *on, uint32_t lists)
{
    on->gpu.slots[1].version = 2;
    server_bench_begin(&on->bench, 2);
    for (uint32_t i = 1; i <= lists; i++) {
        unsigned char piece[RFT_PIECE_BYTES] = {0}, area[RFT_SHARE_BYTES] = {0};
        rft_message message = {.kind = RFT_PIECES};
        message.as.pieces.version = 2;
        message.as.pieces.sequence = i;
        message.as.pieces.lock = rft_view_text("/proc/1/fd/3:1");
        message.as.pieces.areas = (rft_view){area, sizeof area};
        message.as.pieces.list = (rft_view){piece, sizeof piece};
        rft_transaction_send_pieces(&on->bench.server, &message);
        on->gpu.slots[1].streamed = true;
    }
    server_bench_tick(&on->bench, 0);
}

static void take(scene *on, unsigned worker, uint64_t version, uint32_t sequence)
{
    rft_message message = {.kind = RFT_TAKEN};
    message.as.taken.version = version;
    message.as.taken.sequence = sequence;
    server_bench_say(&on->bench, worker, message);
}

ON_GPU(pieces_are_written_over_when_all_workers_have_them)
{
    const rft_server *server = &on->bench.server;
    scene_open(on, REFIT_GPU_AUTO, 0);
    use_gpu(on);
    join_for_pieces(on, 1);
    join_for_pieces(on, 2);
    on->gpu.slots[1].block = &on->block;
    stream(on, 2);
    assert_int_equal(server_bench_count(&on->bench, 1, RFT_PIECES), 2);
    take(on, 1, 2, 2);
    assert_false(rft_transaction_pieces_taken(server, 1));
    take(on, 2, 1, 2); /* of another version */
    assert_false(rft_transaction_pieces_taken(server, 1));
    take(on, 2, 2, 1);
    assert_true(rft_transaction_pieces_taken(server, 1));
    assert_false(rft_transaction_pieces_taken(server, 2));
    rft_transaction_evict_slow(&on->bench.server, 2, on->bench.now);
    assert_true(rft_transaction_pieces_taken(server, 2));
    assert_true(is_subscribed(on, 1));
    assert_false(is_subscribed(on, 2));
    assert_int_equal(server->transaction.lost, 1);
}

ON_GPU(pieces_that_were_not_sent_cannot_be_taken)
{
    scene_open(on, REFIT_GPU_AUTO, 0);
    use_gpu(on);
    join_for_pieces(on, 1);
    on->gpu.slots[1].block = &on->block;
    stream(on, 2);
    take(on, 1, 2, 3);
    assert_false(is_subscribed(on, 1));
    assert_int_equal(on->bench.server.counts.refused, 1);
}

ON_GPU(a_worker_that_comes_between_pieces_waits_for_the_next_version)
{
    scene_open(on, REFIT_GPU_REQUIRE, 0);
    use_gpu(on);
    join_for_pieces(on, 1);
    on->gpu.slots[1].block = &on->block;
    stream(on, 1);
    join_for_pieces(on, 2);
    assert_true(is_subscribed(on, 2));
    assert_int_equal(server_bench_count(&on->bench, 2, RFT_PIECES), 0);
    assert_true(server_bench_peer(&on->bench, 2)->task.path != REFIT_PATH_CUDA_IPC);
}

ON_GPU(one_worker_without_pieces_is_enough_to_send_none)
{
    scene_open(on, REFIT_GPU_AUTO, 0);
    use_gpu(on);
    join_for_pieces(on, 1);
    on->gpu.slots[1].block = &on->block;
    on->gpu.slots[1].version = 2;
    server_bench_begin(&on->bench, 2);
    assert_true(rft_transaction_may_stream(&on->bench.server));
    join_gpu(on, 2);
    assert_false(rft_transaction_may_stream(&on->bench.server));
}

int main(void)
{
    return test_run_within("server_gpu", NULL, forget_samples);
}
