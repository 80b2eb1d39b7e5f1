/* A worker that is offered memory of its GPU by a publisher that may be lying: it maps and verifies
 * the memory, and delivers a version only if it is as it was offered. */
#include "device/device.h"
#include "fake_cuda.h"
#include "store/segment.h"
#include "tests/support/pairing.h"
#include "tests/support/test.h"

/* A publisher's block of the GPU's memory, by hand. */
typedef struct block {
    unsigned char *memory;
    rft_share share;
    rft_share_lock share_lock;
} block;

typedef struct scene {
    pairing pair;
    refit_device *device; /* the worker's */
    refit_device *theirs;
    block blocks[2];
    unsigned char uuid[RFT_UUID_BYTES];
    unsigned char probe[RFT_SHARE_BYTES]; /* of WELCOME: the first block */
    bool places_missing;                  /* LEND lacks the last one */
    bool has_manifest;                    /* the worker was sent it: both versions have the same */
} scene;

static void block_open(scene *on, block *one, const sample_version *sample)
{
    void *memory = NULL;
    uint64_t bytes = sample->manifest->store_bytes;
    assert_ok(refit_memory_alloc(on->theirs, bytes, &memory, NULL));
    assert_ok(refit_stream_copy(on->theirs, REFIT_STREAM_NONE, memory, sample->image, bytes, NULL));
    assert_ok(rft_device_share_export(on->theirs, memory, bytes, &one->share, NULL));
    assert_ok(rft_share_lock_open(&one->share_lock, NULL));
    one->memory = memory;
}

static void scene_open(scene *on, void (*change)(refit_config *config))
{
    refit_error error;
    memset(on, 0, sizeof *on);
    fake_cuda_reset();
    if (refit_device_open("cuda:0", NULL, &on->device, &error) != REFIT_OK ||
        refit_device_open("cuda:0", NULL, &on->theirs, &error) != REFIT_OK)
        fail_msg("%s", error.text);
    memcpy(on->uuid, rft_device_get_caps(on->device).uuid, sizeof on->uuid);
    pair_open(&on->pair, true, change);
    block_open(on, &on->blocks[0], &on->pair.samples[0]);
    block_open(on, &on->blocks[1], &on->pair.samples[1]);
    rft_share_write(&on->blocks[0].share, on->probe);
    assert_ok(refit_subscriber_use_device(on->pair.subscriber, on->device, NULL));
}

static void scene_close(scene *on)
{
    pair_close(&on->pair);
    for (int i = 0; i < 2; i++) {
        assert_false(
            rft_share_lock_is_mapped(&on->blocks[i].share_lock)); /* the worker has let go */
        rft_share_lock_close(&on->blocks[i].share_lock);
        assert_ok(refit_memory_free(on->theirs, on->blocks[i].memory, NULL));
    }
    assert_ok(refit_device_close(on->theirs, NULL));
    assert_ok(refit_device_close(on->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
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

#define ON_SCENE(name) TEST_ON(scene *on, name, give_scene, close_scene)

static void welcome(scene *on)
{
    raw_publisher *raw = &on->pair.raw;
    rft_message message = sample_welcome(raw->epoch, raw->probe.name);
    message.as.welcome.share = (rft_view){on->probe, sizeof on->probe};
    raw_say(raw, message);
    raw_hear(raw, RFT_JOIN);
    raw_say(raw, sample_beat(raw->epoch));
}

/* From a HELLO that names the GPU to a first beat. */
static void join(scene *on)
{
    do {
        raw_hear(&on->pair.raw, RFT_HELLO);
    } while (on->pair.raw.heard.as.hello.gpu.count == 0);
    assert_memory_equal(on->pair.raw.heard.as.hello.gpu.data, on->uuid, sizeof on->uuid);
    welcome(on);
    assert_true(on->pair.raw.heard.as.join.gpu);
}

/* OFFER and LEND. */
static void offer(scene *on, uint32_t index, const rft_share *share, const char *lock)
{
    unsigned char area[RFT_SHARE_BYTES], places[SAMPLE_TENSORS * RFT_PLACE_BYTES];
    const sample_version *sample = &on->pair.samples[index];
    if (!on->has_manifest) raw_say(&on->pair.raw, sample_manifest(sample, PAIR_EPOCH));
    on->has_manifest = true;
    rft_message message = sample_offer(sample, PAIR_EPOCH, 0, NULL, 0);
    message.as.offer.lent = true;
    raw_say(&on->pair.raw, message);
    rft_message lend = {.kind = RFT_LEND};
    rft_share_write(share, area);
    lend.as.lend.version = message.as.offer.version;
    lend.as.lend.lock = rft_view_text(lock);
    lend.as.lend.areas = (rft_view){area, sizeof area};
    lend.as.lend.places = sample_places(sample, places);
    if (on->places_missing) lend.as.lend.places.count -= RFT_PLACE_BYTES;
    raw_say(&on->pair.raw, lend);
}

static void stage(scene *on, uint32_t index)
{
    const block *one = &on->blocks[index];
    offer(on, index, &one->share, one->share_lock.segment.name);
    raw_say(&on->pair.raw, sample_seal(&on->pair.samples[index]));
    raw_hear_staged(&on->pair.raw, &on->pair.samples[index]);
}

static void assert_is_on_gpu(scene *on, const refit_update *update, uint32_t index)
{
    assert_ptr_equal(refit_update_device(update), on->device);
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        unsigned char here[1 << 20];
        uint64_t offset = on->pair.samples[index].manifest->tensors[i].offset;
        assert_ok(refit_update_tensor(update, i, &tensor, &bytes, NULL));
        if (tensor.bytes == 0) continue;
        assert_ptr_equal(bytes, on->blocks[index].memory + offset);
        assert_true(tensor.bytes <= sizeof here);
        assert_ok(
            refit_stream_copy(on->device, REFIT_STREAM_NONE, here, bytes, tensor.bytes, NULL));
        assert_memory_equal(here, on->pair.samples[index].image + offset, tensor.bytes);
    }
}

ON_SCENE(a_gpu_that_the_trainer_names_in_a_second_welcome_is_used)
{
    scene_open(on, NULL);
    raw_publisher *raw = &on->pair.raw;
    do {
        raw_hear(raw, RFT_HELLO);
    } while (raw->heard.as.hello.gpu.count == 0);
    raw_say(raw, sample_welcome(raw->epoch, raw->probe.name));
    raw_hear(raw, RFT_JOIN);
    assert_false(raw->heard.as.join.gpu);
    rft_message shown = sample_welcome(raw->epoch, raw->probe.name);
    shown.as.welcome.share = (rft_view){on->probe, sizeof on->probe};
    raw_say(raw, shown);
    join(on);
    raw_say(raw, shown);
    raw_hear(raw, RFT_JOIN); /* on it already: nothing to do but say so again */
    assert_true(raw->heard.as.join.gpu);
}

ON_SCENE(a_version_on_the_gpu_is_read_in_place)
{
    scene_open(on, NULL);
    join(on);
    for (uint32_t i = 0; i < 2; i++) {
        stage(on, i);
        assert_true(rft_share_lock_is_mapped(&on->blocks[i].share_lock));
        assert_false(rft_share_lock_is_read(&on->blocks[i].share_lock));
        raw_say(&on->pair.raw, sample_commit(&on->pair.samples[i]));
        refit_update *update = pair_next(&on->pair);
        assert_true(rft_share_lock_is_read(&on->blocks[i].share_lock));
        assert_is_on_gpu(on, update, i);
        assert_ok(refit_update_accept(update, NULL));
        raw_hear(&on->pair.raw, RFT_COMMITTED);
        refit_update_close(update);
        raw_hear(&on->pair.raw, RFT_RELEASED);
        assert_false(rft_share_lock_is_read(&on->blocks[i].share_lock));
        assert_int_equal(pair_describe(&on->pair).path, REFIT_PATH_CUDA_IPC);
    }
    assert_true(
        rft_share_lock_is_mapped(&on->blocks[0].share_lock)); /* for the next version there */
}

ON_SCENE(a_block_that_is_given_up_is_let_go_at_the_next_beat)
{
    scene_open(on, NULL);
    join(on);
    stage(on, 0);
    raw_say(&on->pair.raw, sample_commit(&on->pair.samples[0]));
    refit_update *update = pair_next(&on->pair);
    assert_ok(refit_update_accept(update, NULL));
    rft_share_lock_retire(&on->blocks[0].share_lock);
    raw_say(&on->pair.raw, sample_beat(PAIR_EPOCH));
    stage(on, 1);
    assert_true(rft_share_lock_is_mapped(&on->blocks[0].share_lock)); /* it is still read */
    refit_update_close(update);
    raw_hear(&on->pair.raw, RFT_RELEASED);
    while (rft_share_lock_is_mapped(&on->blocks[0].share_lock))
        raw_hear(&on->pair.raw, RFT_BEAT);
}

ON_SCENE(bytes_taken_back_under_an_update_are_not_accepted)
{
    refit_error error;
    scene_open(on, NULL);
    join(on);
    stage(on, 0);
    raw_say(&on->pair.raw, sample_commit(&on->pair.samples[0]));
    refit_update *update = pair_next(&on->pair);
    rft_seqlock_begin(rft_share_lock_seqlock(&on->blocks[0].share_lock));
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STALE);
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_int_equal(on->pair.raw.heard.as.failed.code, REFIT_ERR_STALE);
    assert_false(on->pair.raw.heard.as.failed.kept);
    refit_update_close(update);
}

/* Between STAGED and COMMIT: the user never sees it. */
ON_SCENE(bytes_taken_back_before_the_commit_are_not_handed_over)
{
    refit_update *update = NULL;
    scene_open(on, NULL);
    join(on);
    stage(on, 0);
    rft_seqlock_begin(rft_share_lock_seqlock(&on->blocks[0].share_lock));
    raw_say(&on->pair.raw, sample_commit(&on->pair.samples[0]));
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_int_equal(on->pair.raw.heard.as.failed.code, REFIT_ERR_STALE);
    assert_true(on->pair.raw.heard.as.failed.kept);
    assert_int_equal(refit_subscriber_next(on->pair.subscriber, 0, &update, NULL),
                     REFIT_ERR_TIMEOUT);
    assert_false(rft_share_lock_is_read(&on->blocks[0].share_lock));
}

/* ---- Lies */

#define STAGED UINT32_MAX /* instead of a status */
#define REJOIN UINT32_MAX - 1

/* What FAILED says about an offer with something wrong; REJOIN: HELLO without the GPU. */
static uint32_t try_offer(int wrong, void (*change)(refit_config *config))
{
    scene on;
    unsigned char damaged = 0x5a;
    scene_open(&on, change);
    join(&on);
    block *one = &on.blocks[0];
    rft_share share = one->share;
    const char *lock = one->share_lock.segment.name;
    rft_message seal = sample_seal(&on.pair.samples[0]);
    if (wrong == 1) lock = "/proc/999999999/fd/3:1";
    if (wrong == 2) lock = "/etc/passwd";
    on.places_missing = wrong == 3;
    if (wrong == 4) rft_share_lock_retire(&one->share_lock);
    if (wrong == 5) rft_seqlock_begin(rft_share_lock_seqlock(&one->share_lock));
    if (wrong == 6) share.bytes = 8;
    if (wrong == 7) share.bytes = UINT64_MAX;
    if (wrong == 8) share.offset = UINT64_MAX - 7;
    if (wrong == 9) share.offset = 8;
    if (wrong == 10) share.uuid[5] ^= 1;
    if (wrong == 11) memset(share.handle, 0xff, sizeof share.handle);
    if (wrong == 12) share.address = 0;
    if (wrong == 13) seal.as.seal.digest.bytes[0] ^= 1;
    if (wrong == 14) {
        assert_ok(
            refit_stream_copy(on.theirs, REFIT_STREAM_NONE, one->memory + 5, &damaged, 1, NULL));
    }
    offer(&on, 0, &share, lock);
    raw_say(&on.pair.raw, seal);
    uint32_t code = STAGED;
    rft_message_kind kind;
    do {
        raw_hear_any(&on.pair.raw);
        kind = on.pair.raw.heard.kind;
    } while (kind != RFT_STAGED && kind != RFT_FAILED && kind != RFT_HELLO);
    if (kind == RFT_FAILED) code = on.pair.raw.heard.as.failed.code;
    if (kind == RFT_HELLO) {
        assert_int_equal(on.pair.raw.heard.as.hello.gpu.count, 0);
        code = REJOIN;
    }
    scene_close(&on);
    return code;
}

TEST(an_offer_that_lies_is_not_believed)
{
    assert_int_equal(try_offer(0, NULL), STAGED);
    assert_int_equal(try_offer(1, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(try_offer(2, NULL), REFIT_ERR_PROTOCOL);
    assert_int_equal(try_offer(3, NULL), REFIT_ERR_PROTOCOL);
    assert_int_equal(try_offer(4, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(try_offer(5, NULL), REFIT_ERR_STALE);
    assert_int_equal(try_offer(6, NULL), REFIT_ERR_PROTOCOL);
    assert_int_equal(try_offer(7, NULL), REJOIN);
    assert_int_equal(try_offer(8, NULL), REJOIN);
    assert_int_equal(try_offer(9, NULL), STAGED); /* as with other bytes */
    assert_int_equal(try_offer(10, NULL), REJOIN);
    assert_int_equal(try_offer(11, NULL), REJOIN);
    assert_int_equal(try_offer(12, NULL), REJOIN);
    assert_int_equal(try_offer(13, NULL), REFIT_ERR_CORRUPT);
    assert_int_equal(try_offer(14, NULL), STAGED); /* the bytes did not travel */
}

TEST(with_verify_always_the_bytes_are_digested_on_the_gpu)
{
    assert_int_equal(try_offer(0, with_verify_always), STAGED);
    assert_int_equal(try_offer(5, with_verify_always), REFIT_ERR_STALE);
    assert_int_equal(try_offer(13, with_verify_always), REFIT_ERR_CORRUPT);
    assert_int_equal(try_offer(14, with_verify_always), REFIT_ERR_CORRUPT);
}

/* Without having joined on it. */
ON_SCENE(a_gpu_that_was_not_agreed_on_is_not_touched)
{
    scene_open(on, NULL);
    on->probe[0] ^= 1; /* another trainer's: the GPU's UUID */
    do {
        raw_hear(&on->pair.raw, RFT_HELLO);
    } while (on->pair.raw.heard.as.hello.gpu.count == 0);
    welcome(on);
    assert_false(on->pair.raw.heard.as.join.gpu);
    assert_true(on->pair.raw.heard.as.join.shm);
    offer(on, 0, &on->blocks[0].share, on->blocks[0].share_lock.segment.name);
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_int_equal(on->pair.raw.heard.as.failed.code, REFIT_ERR_PROTOCOL);
}

/* The digest is under way when the trainer is lost. */
ON_SCENE(a_version_dropped_while_it_is_verified_ends_well)
{
    scene_open(on, with_verify_always);
    join(on);
    fake_cuda_stop();
    offer(on, 0, &on->blocks[0].share, on->blocks[0].share_lock.segment.name);
    raw_say(&on->pair.raw, sample_seal(&on->pair.samples[0]));
    raw_hear(&on->pair.raw, RFT_BEAT);
    raw_say(&on->pair.raw, sample_abort(&on->pair.samples[0]));
    raw_hear(&on->pair.raw, RFT_BEAT);
    fake_cuda_go();
    stage(on, 1);
}

/* ---- Piece by piece */

/* What PIECES says of one piece of a sample's block. */
typedef struct said_piece {
    uint32_t tensor;
    uint32_t area;
    uint64_t place; /* from the beginning of the tensor in the block */
    uint64_t offset;
    uint64_t bytes;
} said_piece;

static void say_pieces(scene *on, uint32_t index, uint32_t sequence, const said_piece *pieces,
                       uint32_t count)
{
    unsigned char area[RFT_SHARE_BYTES], list[8 * RFT_PIECE_BYTES];
    const rft_manifest *manifest = on->pair.samples[index].manifest;
    const block *one = &on->blocks[index];
    for (uint32_t i = 0; i < count; i++) {
        unsigned char *at = list + (size_t)i * RFT_PIECE_BYTES;
        uint32_t tensor = pieces[i].tensor < manifest->count ? pieces[i].tensor : 0;
        rft_put_u32(at, pieces[i].tensor);
        rft_put_u32(at + 4, pieces[i].area);
        rft_put_u64(at + 8, manifest->tensors[tensor].offset + pieces[i].place);
        rft_put_u64(at + 16, pieces[i].offset);
        rft_put_u64(at + 24, pieces[i].bytes);
    }
    rft_message message = {.kind = RFT_PIECES};
    rft_share_write(&one->share, area);
    message.as.pieces.version = on->pair.samples[index].version;
    message.as.pieces.sequence = sequence;
    message.as.pieces.lock = rft_view_text(one->share_lock.segment.name);
    message.as.pieces.areas = (rft_view){area, sizeof area};
    message.as.pieces.list = (rft_view){list, (size_t)count * RFT_PIECE_BYTES};
    raw_say(&on->pair.raw, message);
}

/* An original tensor of the sample with at least so many bytes. */
static uint32_t tensor_of(const scene *on, uint64_t least)
{
    const rft_manifest *manifest = on->pair.samples[0].manifest;
    uint32_t tensor = 0;
    while (manifest->tensors[tensor].alias_of != REFIT_NO_ALIAS ||
           manifest->tensors[tensor].bytes < least)
        tensor++;
    return tensor;
}

static uint64_t bytes_of(const scene *on, uint32_t tensor)
{
    return on->pair.samples[0].manifest->tensors[tensor].bytes;
}

static void offer_lent(scene *on, uint32_t index)
{
    const sample_version *sample = &on->pair.samples[index];
    if (!on->has_manifest) raw_say(&on->pair.raw, sample_manifest(sample, PAIR_EPOCH));
    on->has_manifest = true;
    rft_message message = sample_offer(sample, PAIR_EPOCH, 0, NULL, 0);
    message.as.offer.lent = true;
    raw_say(&on->pair.raw, message);
}

/* All tensors in lists of one piece each, from the last one; the largest in two. */
static uint32_t say_all(scene *on, uint32_t index)
{
    uint32_t sequence = 0, large = tensor_of(on, 4096);
    const rft_manifest *manifest = on->pair.samples[index].manifest;
    for (uint32_t i = manifest->count; i-- > 0;) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0) continue;
        uint64_t first = i == large ? 1024 : tensor->bytes;
        said_piece pieces[] = {{i, 0, 0, 0, first}, {i, 0, first, first, tensor->bytes - first}};
        say_pieces(on, index, ++sequence, pieces, 1);
        if (first < tensor->bytes) say_pieces(on, index, ++sequence, pieces + 1, 1);
    }
    return sequence;
}

/* Takes all that has come. */
static refit_status take_all(refit_update *update, uint64_t *bytes)
{
    const refit_piece *pieces;
    uint32_t count = 0;
    *bytes = 0;
    do {
        RFT_TRY(refit_update_next_pieces(update, PAIR_LONG, &pieces, &count, NULL));
        for (uint32_t i = 0; i < count; i++)
            *bytes += pieces[i].bytes;
    } while (count > 0);
    return REFIT_OK;
}

static void *accept_it(void *user)
{
    return refit_update_accept(user, NULL) == REFIT_OK ? user : NULL;
}

ON_SCENE(pieces_come_to_the_user_before_the_commit)
{
    uint64_t bytes;
    rft_thread thread;
    scene_open(on, NULL);
    join(on);
    assert_true(on->pair.raw.heard.as.join.pieces);
    offer_lent(on, 0);
    uint32_t lists = say_all(on, 0);
    refit_update *update = pair_next(&on->pair);
    assert_true(refit_update_is_streamed(update));
    raw_say(&on->pair.raw, sample_seal(&on->pair.samples[0]));
    assert_ok(take_all(update, &bytes));
    assert_int_equal(bytes, on->pair.samples[0].manifest->payload_bytes);
    assert_ok(rft_thread_start(&thread, "accept", accept_it, update, NULL));
    for (uint32_t taken = 0; taken < lists; taken = on->pair.raw.heard.as.taken.sequence)
        raw_hear(&on->pair.raw, RFT_TAKEN);
    raw_hear_staged(&on->pair.raw, &on->pair.samples[0]);
    assert_int_equal(pair_describe(&on->pair).version, 0);
    raw_say(&on->pair.raw, sample_commit(&on->pair.samples[0]));
    raw_hear(&on->pair.raw, RFT_COMMITTED);
    rft_thread_join(thread);
    assert_int_equal(refit_update_version(update), 1);
    assert_int_equal(pair_describe(&on->pair).version, 1);
    refit_update_close(update);
}

/* The bytes are not those of SEAL. */
ON_SCENE(pieces_that_changed_are_found_out)
{
    uint64_t bytes;
    const unsigned char damaged = 0x5a;
    scene_open(on, NULL);
    join(on);
    block *one = &on->blocks[0];
    uint32_t large = tensor_of(on, 4096);
    uint64_t at = on->pair.samples[0].manifest->tensors[large].offset + 9;
    assert_ok(
        refit_stream_copy(on->theirs, REFIT_STREAM_NONE, one->memory + at, &damaged, 1, NULL));
    offer_lent(on, 0);
    (void)say_all(on, 0);
    refit_update *update = pair_next(&on->pair);
    raw_say(&on->pair.raw, sample_seal(&on->pair.samples[0]));
    assert_int_equal(take_all(update, &bytes), REFIT_ERR_CORRUPT);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    assert_ok(refit_update_refuse(update, "", 1, NULL));
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_false(on->pair.raw.heard.as.failed.kept);
    refit_update_close(update);
}

/* The first list of a version is refused with the connection, and nothing of it reaches the user.
 */
static void refuse_first(scene *on, uint32_t sequence, said_piece first, said_piece second)
{
    const said_piece pieces[] = {first, second};
    if (on->device != NULL) scene_close(on);
    scene_open(on, NULL);
    join(on);
    offer_lent(on, 0);
    say_pieces(on, 0, sequence, pieces, second.bytes > 0 ? 2 : 1);
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_int_equal(on->pair.raw.heard.as.failed.code, REFIT_ERR_PROTOCOL);
    raw_hear(&on->pair.raw, RFT_BYE);
    assert_int_equal(pair_readable(&on->pair, 0), 0);
}

ON_SCENE(pieces_that_cannot_be_break_the_protocol)
{
    const said_piece none = {0, 0, 0, 0, 0};
    scene_open(on, NULL);
    uint32_t large = tensor_of(on, 4096), alias = 0, count = on->pair.samples[0].manifest->count;
    uint64_t bytes = bytes_of(on, large);
    while (on->pair.samples[0].manifest->tensors[alias].alias_of == REFIT_NO_ALIAS)
        alias++;
    refuse_first(on, 2, (said_piece){large, 0, 0, 0, bytes}, none);        /* not the first */
    refuse_first(on, 1, (said_piece){count, 0, 0, 0, 8}, none);            /* no such tensor */
    refuse_first(on, 1, (said_piece){UINT32_MAX, 0, 0, 0, 8}, none);       /* nor that */
    refuse_first(on, 1, (said_piece){alias, 0, 0, 0, 8}, none);            /* has no bytes */
    refuse_first(on, 1, (said_piece){large, 0, 8, 8, bytes - 8}, none);    /* place not aligned */
    refuse_first(on, 1, (said_piece){large, 0, 16, 16, bytes - 16}, none); /* a gap */
    refuse_first(on, 1, (said_piece){large, 0, 0, 0, bytes + 8}, none);    /* too much */
    refuse_first(on, 1, (said_piece){large, 0, 0, 0, UINT64_MAX}, none);   /* far too much */
    refuse_first(on, 1, (said_piece){large, 0, UINT64_MAX - 15, 0, 64}, none); /* before the area */
    refuse_first(on, 1, (said_piece){large, 1, 0, 0, bytes}, none);            /* no such area */
    refuse_first(on, 1, (said_piece){large, 0, 0, 0, 12}, none); /* ends within a word */
    refuse_first(on, 1, (said_piece){large, 0, 0, 0, bytes},
                 (said_piece){large, 0, 0, 0, 8}); /* more than there is */
}

/* The user has the first list when the trainer breaks the protocol. */
static void break_later(scene *on, bool seals)
{
    uint64_t bytes;
    const said_piece first = {tensor_of(on, 4096), 0, 0, 0, 1024};
    join(on);
    offer_lent(on, 0);
    say_pieces(on, 0, 1, &first, 1);
    refit_update *update = pair_next(&on->pair);
    if (seals)
        raw_say(&on->pair.raw, sample_seal(&on->pair.samples[0])); /* and most is missing */
    else
        say_pieces(on, 0, 1, &first, 1); /* once more */
    assert_int_equal(take_all(update, &bytes), REFIT_ERR_PROTOCOL);
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_false(on->pair.raw.heard.as.failed.kept);
    refit_update_close(update);
}

ON_SCENE(a_trainer_that_seals_too_early_is_found_out)
{
    scene_open(on, NULL);
    break_later(on, true);
}

ON_SCENE(a_trainer_that_repeats_pieces_is_found_out)
{
    scene_open(on, NULL);
    break_later(on, false);
}

/* More lists than a trainer may have out, none of them taken. */
ON_SCENE(too_many_pieces_at_once_break_the_protocol)
{
    scene_open(on, NULL);
    join(on);
    offer_lent(on, 0);
    uint32_t large = tensor_of(on, 4096);
    for (uint32_t i = 0; i < 9; i++) {
        const said_piece piece = {large, 0, (uint64_t)i * 16, (uint64_t)i * 16, 16};
        say_pieces(on, 0, i + 1, &piece, 1);
    }
    raw_hear(&on->pair.raw, RFT_FAILED);
    assert_int_equal(on->pair.raw.heard.as.failed.code, REFIT_ERR_PROTOCOL);
}

int main(void)
{
    return test_run("gpu_offer");
}
