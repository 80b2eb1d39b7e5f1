/* What liars say: every field of every message is drawn from what would be right at this moment,
 * what was right once, what another would say, and what never is. */
#include "protocol_bench.h"

#define NAME_LONG "a name of sixty-three bytes, which is as long as a name may be...."

/* Takes some bits off the seed. */
static uint32_t draw(uint32_t *seed, uint32_t bound)
{
    uint32_t drawn = *seed % bound;
    *seed = *seed / bound * UINT32_C(2654435761) + (*seed >> 16) + 1;
    return drawn;
}

static uint64_t draw_version(const protocol_bench *bench, uint32_t *seed)
{
    const rft_server *server = &bench->server;
    switch (draw(seed, 8)) {
    case 0:
    case 1: return server->transaction.version;
    case 2: return server->current.version;
    case 3: return server->transaction.version + 1;
    case 4: return server->current.version - 1;
    case 5: return server->transaction.last;
    case 6: return draw(seed, 4);
    default: return UINT64_MAX - draw(seed, 2);
    }
}

static rft_digest128 draw_digest(protocol_bench *bench, uint32_t *seed)
{
    rft_digest128 digest = bench->server.current.digest;
    const rft_version_digests *served =
        bench->store == NULL ? NULL : rft_store_served(bench->store);
    uint32_t which = draw(seed, 4);
    if (which < 2 && served != NULL) digest = served->digest;
    if (which == 3) digest.bytes[draw(seed, 16)] ^= 1;
    return digest;
}

static uint64_t draw_epoch(const protocol_bench *bench, uint32_t *seed)
{
    uint32_t which = draw(seed, 6);
    if (which == 0) return bench->server.epoch - 1;
    if (which == 1) return bench->server.epoch + 1;
    return bench->server.epoch;
}

static rft_version_id draw_held(protocol_bench *bench, uint32_t *seed)
{
    if (draw(seed, 3) == 0) return (rft_version_id){0};
    rft_version_id held = {draw_epoch(bench, seed), draw_version(bench, seed),
                           draw_digest(bench, seed)};
    return held;
}

static rft_view draw_text(uint32_t *seed)
{
    static const char *const texts[] = {"", "a reason", "\xc3\xa9\xe2\x82\xac", NAME_LONG};
    return rft_view_text(texts[draw(seed, 4)]);
}

/* "w3" and "w4" are the liars' own. */
static rft_view draw_name(uint32_t *seed)
{
    static const char *const names[] = {"w3", "w4", "w3", "w4", "w0", "w1", "w2", NAME_LONG, ""};
    return rft_view_text(names[draw(seed, 9)]);
}

static rft_view draw_place(const protocol_bench *bench, uint32_t *seed)
{
    const char *const places[] = {"", "elsewhere", bench->workers[0].session.place,
                                  bench->workers[0].session.place};
    return bench->neighbors ? rft_view_text(places[draw(seed, 4)]) : (rft_view){0};
}

/* An honest worker's image, of whatever version, or none. */
static rft_view draw_image(const protocol_bench *bench, uint32_t *seed)
{
    const rft_images *images = &bench->workers[draw(seed, HONEST)].session.images;
    const char *const names[] = {"", "/proc/1/fd/1:1", images->private[0].memory.name,
                                 images->private[1].memory.name, images->mappings[0].segment.name};
    return bench->neighbors ? rft_view_text(names[draw(seed, 5)]) : (rft_view){0};
}

static void fill_hello(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    message->as.hello.worker = draw_name(seed);
    message->as.hello.protocol = draw(seed, 8) == 0 ? draw(seed, 4) : RFT_PROTOCOL;
    message->as.hello.instance = draw(seed, 2) == 0 ? draw(seed, 8) : 1000 + draw(seed, 2);
    message->as.hello.host = draw_text(seed);
    message->as.hello.shm = draw(seed, 2) == 0;
    message->as.hello.observer = draw(seed, 5) == 0;
    message->as.hello.window = 1 + draw(seed, 8);
    message->as.hello.held = draw_held(bench, seed);
    message->as.hello.delta = draw(seed, 2) == 0;
    message->as.hello.zstd = draw(seed, 2) == 0;
    message->as.hello.image = draw_place(bench, seed);
    message->as.hello.shards = draw(seed, 4) == 0;
    message->as.hello.fetches = draw(seed, 8) == 0;
    message->as.hello.rank = draw(seed, 8) == 0 ? 1 + draw(seed, 3) : 0;
}

static void fill_welcome(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    const refit_config *config = &bench->config;
    message->as.welcome.protocol = draw(seed, 6) == 0 ? draw(seed, 4) : RFT_PROTOCOL;
    message->as.welcome.epoch = draw_epoch(bench, seed);
    message->as.welcome.frame_bytes =
        draw(seed, 4) == 0 ? draw(seed, 2000) : config->broadcast_frame_bytes;
    message->as.welcome.window = draw(seed, 9);
    message->as.welcome.heartbeat_ms = draw(seed, 4) == 0 ? draw(seed, 400) : 100;
    message->as.welcome.heartbeat_timeout_ms =
        draw(seed, 4) == 0 ? draw(seed, 4) * UINT32_C(1200001) : 300;
    message->as.welcome.version = draw_version(bench, seed);
    message->as.welcome.probe = rft_view_text(bench->server.probe);
}

static void fill_join(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    message->as.join.epoch = draw_epoch(bench, seed);
    message->as.join.shm = draw(seed, 3) == 0;
    message->as.join.proof = bench->server.proof ^ (draw(seed, 3) == 0 ? 1 : 0);
    message->as.join.reason = draw_text(seed);
    message->as.join.gpu = draw(seed, 9) == 0;
    message->as.join.selects = draw(seed, 3) == 0;
}

static void fill_offer(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    const rft_manifest *manifest = bench->store->manifest;
    const rft_slot *slot = rft_store_served_slot(bench->store);
    message->as.offer.epoch = draw_epoch(bench, seed);
    message->as.offer.version = draw_version(bench, seed);
    message->as.offer.base = draw(seed, 2) == 0 ? 0 : draw_version(bench, seed);
    message->as.offer.manifest = manifest->digest;
    if (draw(seed, 5) == 0) message->as.offer.manifest.bytes[0] ^= 1;
    message->as.offer.bytes = manifest->payload_bytes + (draw(seed, 6) == 0);
    message->as.offer.frames = manifest->frame_count + (draw(seed, 6) == 0);
    message->as.offer.deadline_ms = draw(seed, 3) == 0 ? draw(seed, 300) : UINT32_MAX;
    message->as.offer.share = bench->neighbors && draw(seed, 2) == 0;
    message->as.offer.neighbor = bench->neighbors && draw(seed, 3) == 0;
    if (message->as.offer.neighbor) message->as.offer.segment = draw_image(bench, seed);
    bool mapped = draw(seed, 4) == 0 && slot != NULL && slot->buffer != NULL;
    if (!mapped) return;
    message->as.offer.segment = rft_view_text(slot->buffer->segment.name);
    message->as.offer.segment_offset = draw(seed, 3) == 0 ? draw(seed, 300) : RFT_SEQLOCK_BYTES;
}

static void fill_frame(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    static const unsigned char modes[] = {0, 1, 2, 3, 4, 255};
    message->as.frame.version = draw_version(bench, seed);
    message->as.frame.sequence = draw(seed, 5) == 0 ? draw(seed, 1000) : draw(seed, 4);
    message->as.frame.hash = draw(seed, 2);
    message->as.frame.modes = (rft_view){modes + draw(seed, 6), 1};
}

static void fill_resend(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    static const unsigned char sequences[4 * 8] = {0, 0, 0, 0, 1, 0, 0, 0, 2,   0,   0,   0,
                                                   1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255};
    message->as.resend.version = draw_version(bench, seed);
    message->as.resend.sequences =
        (rft_view){sequences + (size_t)4 * draw(seed, 2), (size_t)4 * (1 + draw(seed, 6))};
}

static void fill_seal(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    static const unsigned char zeroes[8 * TENSORS_MOST];
    const rft_version_digests *served = rft_store_served(bench->store);
    uint32_t count = draw(seed, 3) == 0 ? draw(seed, 4) + 1 : bench->store->manifest->originals;
    const void *sums =
        served != NULL && draw(seed, 2) == 0 ? (const void *)served->tensor_sums : zeroes;
    if (count > bench->store->manifest->originals) sums = zeroes;
    message->as.seal.version = draw_version(bench, seed);
    message->as.seal.digest = draw_digest(bench, seed);
    message->as.seal.tensors = (rft_view){sums, (size_t)8 * count};
}

static void fill_failed(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    message->as.failed.version = draw_version(bench, seed);
    message->as.failed.code = draw(seed, 30);
    message->as.failed.kept = message->kind == RFT_ABORT || draw(seed, 2) == 0;
    message->as.failed.reason = draw_text(seed);
}

static void fill_manifest(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    const rft_manifest *manifest = bench->store->manifest;
    message->as.manifest.epoch = draw_epoch(bench, seed);
    message->as.manifest.digest = manifest->digest;
    if (draw(seed, 4) == 0) message->as.manifest.digest.bytes[1] ^= 1;
    message->as.manifest.tensors = rft_bytes_view(&manifest->encoded);
    if (draw(seed, 4) == 0) message->as.manifest.tensors.count -= 1;
}

static const unsigned char nothing[4 * RFT_SHARE_BYTES];

/* Of tensors that are there or not, empty, in part, whole, twice. */
static rft_view draw_rows(uint32_t *seed)
{
    static const rft_want_rows rows[] = {{0, 0, 1, TENSOR_BYTES, TENSOR_BYTES},
                                         {0, 8, 3, 16, 8},
                                         {1, 0, 1, 4, 4},
                                         {1, 60, 1, 8, 8},
                                         {9, 0, 1, 8, 8},
                                         {2, 0, 2, 4, 8}};
    static unsigned char list[3 * RFT_WANT_ENTRY_BYTES];
    uint32_t count = draw(seed, 4);
    for (uint32_t i = 0; i < count; i++) {
        const rft_want_rows *one = &rows[draw(seed, 6)];
        unsigned char *entry = list + (size_t)i * RFT_WANT_ENTRY_BYTES;
        rft_put_u32(entry, one->tensor);
        rft_put_u64(entry + 4, one->offset);
        rft_put_u64(entry + 12, one->count);
        rft_put_u64(entry + 20, one->stride);
        rft_put_u64(entry + 28, one->bytes);
    }
    return (rft_view){list, (size_t)count * RFT_WANT_ENTRY_BYTES};
}

static void fill_shard(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    message->as.shard.epoch = draw_epoch(bench, seed);
    message->as.shard.manifest = bench->store->manifest->digest;
    if (draw(seed, 4) == 0) message->as.shard.manifest.bytes[2] ^= 1;
    message->as.shard.rank = draw(seed, 4);
    message->as.shard.ranks = 2 + draw(seed, 3);
    message->as.shard.endpoint = draw_text(seed);
    message->as.shard.rows = draw_rows(seed);
}

static void fill_sums(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    static const unsigned char sums[8 * (TENSORS_MOST + 1)], words[2 * RFT_WORD_BYTES];
    uint32_t count =
        draw(seed, 3) == 0 ? 1 + draw(seed, TENSORS_MOST + 1) : bench->store->manifest->originals;
    message->as.sums.version = draw_version(bench, seed);
    message->as.sums.tensors = (rft_view){sums, (size_t)8 * count};
    message->as.sums.words = (rft_view){words, (size_t)RFT_WORD_BYTES * draw(seed, 3)};
}

static void fill(protocol_bench *bench, uint32_t *seed, rft_message *message)
{
    switch (message->kind) {
    case RFT_HELLO: fill_hello(bench, seed, message); break;
    case RFT_WELCOME: fill_welcome(bench, seed, message); break;
    case RFT_JOIN: fill_join(bench, seed, message); break;
    case RFT_REFUSE:
        message->as.refuse.code = draw(seed, 30);
        message->as.refuse.final = draw(seed, 4) == 0;
        message->as.refuse.reason = draw_text(seed);
        break;
    case RFT_MANIFEST: fill_manifest(bench, seed, message); break;
    case RFT_OFFER: fill_offer(bench, seed, message); break;
    case RFT_PULL:
        message->as.pull.version = draw_version(bench, seed);
        message->as.pull.credits = 1 + draw(seed, 8);
        message->as.pull.image = draw_image(bench, seed);
        if (bench->neighbors) message->as.pull.have = (rft_view){nothing, draw(seed, 3)};
        message->as.pull.part = draw(seed, 4) == 0;
        if (draw(seed, 4) == 0)
            message->as.pull.manifest = (rft_view){bench->store->manifest->digest.bytes, 16};
        break;
    case RFT_FRAME: fill_frame(bench, seed, message); break;
    case RFT_RESEND: fill_resend(bench, seed, message); break;
    case RFT_LEND:
        message->as.lend.version = draw_version(bench, seed);
        message->as.lend.lock = draw_text(seed);
        message->as.lend.areas = (rft_view){nothing, (size_t)RFT_SHARE_BYTES * draw(seed, 3)};
        message->as.lend.places =
            (rft_view){nothing, (size_t)RFT_PLACE_BYTES * (1 + draw(seed, 3))};
        break;
    case RFT_PIECES:
        message->as.pieces.version = draw_version(bench, seed);
        message->as.pieces.sequence = 1 + draw(seed, 3);
        message->as.pieces.lock = draw_text(seed);
        message->as.pieces.areas =
            (rft_view){nothing, (size_t)RFT_SHARE_BYTES * (1 + draw(seed, 3))};
        message->as.pieces.list =
            (rft_view){nothing, (size_t)RFT_PIECE_BYTES * (1 + draw(seed, 3))};
        break;
    case RFT_TAKEN:
        message->as.taken.version = draw_version(bench, seed);
        message->as.taken.sequence = 1 + draw(seed, 3);
        break;
    case RFT_WANT:
        message->as.want.manifest = bench->store->manifest->digest;
        message->as.want.rows = draw_rows(seed);
        if (draw(seed, 4) == 0) message->as.want.from = draw(seed, 3);
        message->as.want.more = draw(seed, 4) == 0;
        break;
    case RFT_SHARD: fill_shard(bench, seed, message); break;
    case RFT_SUMS: fill_sums(bench, seed, message); break;
    case RFT_SEAL: fill_seal(bench, seed, message); break;
    case RFT_STAGED:
    case RFT_COMMITTED:
        message->as.staged.version = draw_version(bench, seed);
        message->as.staged.digest = draw_digest(bench, seed);
        break;
    case RFT_COMMIT:
    case RFT_RELEASED: message->as.commit.version = draw_version(bench, seed); break;
    case RFT_FAILED:
    case RFT_ABORT: fill_failed(bench, seed, message); break;
    case RFT_BEAT:
        message->as.beat.held = draw_held(bench, seed);
        message->as.beat.staged = draw(seed, 2) == 0 ? 0 : draw_version(bench, seed);
        break;
    case RFT_BYE:
        message->as.bye.code = draw(seed, 30);
        message->as.bye.reason = draw_text(seed);
        message->as.bye.final = draw(seed, 4) == 0;
        break;
    case RFT_MESSAGE_KINDS: break;
    }
}

bool bench_make_lie(protocol_bench *bench, uint32_t kind, uint32_t seed, rft_bytes *out)
{
    rft_message message = {.kind = (rft_message_kind)(kind % RFT_MESSAGE_KINDS)};
    fill(bench, &seed, &message);
    rft_bytes_reset(out);
    return rft_message_encode(&message, &bench->limits, out, NULL) == REFIT_OK;
}
