/* The samples, written out by hand, so that a field that is missing in a table is noticed. */
#include "wire_samples.h"
#include "device/device.h"
#include "tests/support/unit.h"
#include "wire/frame.h"

static const char long_text[512] = "words";
static const char long_name[63] = "a worker's name of as many bytes as the protocol lets it have";
static unsigned char many_bytes[1024];

rft_view bytes_view(const void *data, size_t count)
{
    return (rft_view){data, count};
}

rft_limits sample_limits(void)
{
    return (rft_limits){
        .tensors = 2000,
        .rank = 8,
        .name_bytes = 256,
        .message_bytes = 4096,
        .manifest_bytes = 1 << 16,
        .frame_bytes = 1 << 20,
        .version_bytes = UINT64_C(1) << 40,
        .blocks = 1 << 20,
        .window = 64,
    };
}

static rft_digest128 digest_of(unsigned char fill)
{
    rft_digest128 digest;
    memset(digest.bytes, fill, sizeof digest.bytes);
    return digest;
}

static rft_held held_of(uint64_t number)
{
    return (rft_held){number, number, digest_of((unsigned char)number)};
}

rft_message sample_small(rft_message_kind kind)
{
    rft_message m = {.kind = kind};
    rft_view one = bytes_view("x", 1);
    switch (kind) {
    case RFT_HELLO:
        m.as.hello.protocol = 1;
        m.as.hello.worker = one;
        m.as.hello.window = 1;
        break;
    case RFT_WELCOME:
        m.as.welcome.protocol = 1;
        m.as.welcome.epoch = 1;
        m.as.welcome.frame_bytes = 1;
        m.as.welcome.window = 1;
        m.as.welcome.heartbeat_ms = 1;
        m.as.welcome.heartbeat_timeout_ms = 1;
        break;
    case RFT_JOIN: m.as.join.epoch = 1; break;
    case RFT_REFUSE: m.as.refuse.code = 1; break;
    case RFT_MANIFEST:
        m.as.manifest.epoch = 1;
        m.as.manifest.tensors = one;
        break;
    case RFT_OFFER:
        m.as.offer.epoch = 1;
        m.as.offer.version = 1;
        break;
    case RFT_PULL:
        m.as.pull.version = 1;
        m.as.pull.credits = 1;
        break;
    case RFT_FRAME:
        m.as.frame.version = 1;
        m.as.frame.modes = bytes_view(many_bytes, 1);
        break;
    case RFT_RESEND:
        m.as.resend.version = 1;
        m.as.resend.sequences = bytes_view(many_bytes, 4);
        break;
    case RFT_SEAL:
        m.as.seal.version = 1;
        m.as.seal.tensors = bytes_view(many_bytes, 8);
        break;
    case RFT_STAGED:
    case RFT_COMMITTED: m.as.staged.version = 1; break;
    case RFT_COMMIT:
    case RFT_RELEASED: m.as.commit.version = 1; break;
    case RFT_FAILED: m.as.failed.code = 1; break;
    case RFT_ABORT:
        m.as.failed.version = 1;
        m.as.failed.code = 1;
        m.as.failed.kept = true;
        break;
    case RFT_BEAT:
    case RFT_BYE:
    case RFT_MESSAGE_KINDS: break;
    }
    return m;
}

rft_message sample_large(rft_message_kind kind)
{
    rft_limits limits = sample_limits();
    rft_message m = {.kind = kind};
    rft_view text = bytes_view(long_text, sizeof long_text);
    rft_view name = bytes_view(long_name, sizeof long_name);
    memset(many_bytes, 1, sizeof many_bytes);
    switch (kind) {
    case RFT_HELLO:
        m.as.hello.protocol = UINT32_MAX;
        m.as.hello.worker = name;
        m.as.hello.instance = UINT64_MAX;
        m.as.hello.host = text;
        m.as.hello.shm = true;
        m.as.hello.observer = true;
        m.as.hello.window = limits.window;
        m.as.hello.held = held_of(UINT64_MAX);
        m.as.hello.gpu = bytes_view(many_bytes, RFT_UUID_BYTES);
        m.as.hello.delta = true;
        m.as.hello.zstd = true;
        break;
    case RFT_WELCOME:
        m.as.welcome.protocol = UINT32_MAX;
        m.as.welcome.epoch = UINT64_MAX;
        m.as.welcome.frame_bytes = limits.frame_bytes;
        m.as.welcome.window = limits.window;
        m.as.welcome.heartbeat_ms = UINT32_MAX;
        m.as.welcome.heartbeat_timeout_ms = UINT32_MAX - 1;
        m.as.welcome.version = UINT64_MAX;
        m.as.welcome.probe = name;
        m.as.welcome.gpu = bytes_view(many_bytes, RFT_UUID_BYTES);
        break;
    case RFT_JOIN:
        m.as.join.epoch = UINT64_MAX;
        m.as.join.shm = true;
        m.as.join.proof = UINT64_MAX;
        m.as.join.reason = text;
        m.as.join.gpu = true;
        break;
    case RFT_REFUSE:
        m.as.refuse.code = UINT32_MAX;
        m.as.refuse.final = true;
        m.as.refuse.reason = text;
        break;
    case RFT_MANIFEST:
        m.as.manifest.epoch = UINT64_MAX;
        m.as.manifest.digest = digest_of(0xff);
        m.as.manifest.tensors = bytes_view(many_bytes, sizeof many_bytes);
        break;
    case RFT_OFFER:
        m.as.offer.epoch = UINT64_MAX;
        m.as.offer.version = UINT64_MAX;
        m.as.offer.base = UINT64_MAX - 1;
        m.as.offer.manifest = digest_of(0x80);
        m.as.offer.bytes = limits.version_bytes;
        m.as.offer.frames = UINT32_MAX;
        m.as.offer.deadline_ms = UINT32_MAX - 1;
        m.as.offer.segment = name;
        m.as.offer.segment_offset = UINT64_MAX;
        m.as.offer.share = bytes_view(many_bytes, RFT_SHARE_BYTES);
        m.as.offer.seqlock = name;
        break;
    case RFT_PULL:
        m.as.pull.version = UINT64_MAX;
        m.as.pull.credits = limits.window;
        break;
    case RFT_FRAME:
        m.as.frame.version = UINT64_MAX;
        m.as.frame.sequence = UINT32_MAX - 1;
        m.as.frame.hash = UINT64_MAX;
        m.as.frame.modes = bytes_view(many_bytes, 1024);
        m.as.frame.planes = bytes_view(many_bytes, RFT_PACK_BYTES);
        break;
    case RFT_RESEND:
        m.as.resend.version = UINT64_MAX;
        m.as.resend.sequences = bytes_view(many_bytes, 1024);
        break;
    case RFT_SEAL:
        m.as.seal.version = UINT64_MAX;
        m.as.seal.digest = digest_of(7);
        m.as.seal.tensors = bytes_view(many_bytes, 1024);
        break;
    case RFT_STAGED:
    case RFT_COMMITTED:
        m.as.staged.version = UINT64_MAX;
        m.as.staged.digest = digest_of(9);
        break;
    case RFT_COMMIT:
    case RFT_RELEASED: m.as.commit.version = UINT64_MAX; break;
    case RFT_FAILED:
    case RFT_ABORT:
        m.as.failed.version = UINT64_MAX;
        m.as.failed.code = UINT32_MAX;
        m.as.failed.kept = true;
        m.as.failed.reason = text;
        break;
    case RFT_BEAT:
        m.as.beat.held = held_of(UINT64_MAX);
        m.as.beat.staged = UINT64_MAX;
        break;
    case RFT_BYE:
        m.as.bye.code = UINT32_MAX;
        m.as.bye.reason = text;
        break;
    case RFT_MESSAGE_KINDS: break;
    }
    return m;
}

static void assert_views_equal(rft_view a, rft_view b)
{
    assert_int_equal(a.count, b.count);
    if (a.count > 0) assert_memory_equal(a.data, b.data, a.count);
}

#define SAME(member)        assert_true(a->as.member == b->as.member)
#define SAME_VIEW(member)   assert_views_equal(a->as.member, b->as.member)
#define SAME_DIGEST(member) assert_memory_equal(a->as.member.bytes, b->as.member.bytes, 16)
#define SAME_HELD(member)                                                                          \
    do {                                                                                           \
        SAME(member.epoch);                                                                        \
        SAME(member.version);                                                                      \
        SAME_DIGEST(member.digest);                                                                \
    } while (0)

void assert_messages_equal(const rft_message *a, const rft_message *b)
{
    assert_int_equal(a->kind, b->kind);
    switch (a->kind) {
    case RFT_HELLO:
        SAME(hello.protocol);
        SAME_VIEW(hello.worker);
        SAME(hello.instance);
        SAME_VIEW(hello.host);
        SAME(hello.shm);
        SAME(hello.observer);
        SAME(hello.window);
        SAME_HELD(hello.held);
        SAME_VIEW(hello.gpu);
        SAME(hello.delta);
        SAME(hello.zstd);
        break;
    case RFT_WELCOME:
        SAME(welcome.protocol);
        SAME(welcome.epoch);
        SAME(welcome.frame_bytes);
        SAME(welcome.window);
        SAME(welcome.heartbeat_ms);
        SAME(welcome.heartbeat_timeout_ms);
        SAME(welcome.version);
        SAME_VIEW(welcome.probe);
        SAME_VIEW(welcome.gpu);
        break;
    case RFT_JOIN:
        SAME(join.epoch);
        SAME(join.shm);
        SAME(join.proof);
        SAME_VIEW(join.reason);
        SAME(join.gpu);
        break;
    case RFT_REFUSE:
        SAME(refuse.code);
        SAME(refuse.final);
        SAME_VIEW(refuse.reason);
        break;
    case RFT_MANIFEST:
        SAME(manifest.epoch);
        SAME_DIGEST(manifest.digest);
        SAME_VIEW(manifest.tensors);
        break;
    case RFT_OFFER:
        SAME(offer.epoch);
        SAME(offer.version);
        SAME(offer.base);
        SAME_DIGEST(offer.manifest);
        SAME(offer.bytes);
        SAME(offer.frames);
        SAME(offer.deadline_ms);
        SAME_VIEW(offer.segment);
        SAME(offer.segment_offset);
        SAME_VIEW(offer.share);
        SAME_VIEW(offer.seqlock);
        break;
    case RFT_PULL:
        SAME(pull.version);
        SAME(pull.credits);
        break;
    case RFT_FRAME:
        SAME(frame.version);
        SAME(frame.sequence);
        SAME(frame.hash);
        SAME_VIEW(frame.modes);
        SAME_VIEW(frame.planes);
        break;
    case RFT_RESEND:
        SAME(resend.version);
        SAME_VIEW(resend.sequences);
        break;
    case RFT_SEAL:
        SAME(seal.version);
        SAME_DIGEST(seal.digest);
        SAME_VIEW(seal.tensors);
        break;
    case RFT_STAGED:
    case RFT_COMMITTED:
        SAME(staged.version);
        SAME_DIGEST(staged.digest);
        break;
    case RFT_COMMIT:
    case RFT_RELEASED: SAME(commit.version); break;
    case RFT_FAILED:
    case RFT_ABORT:
        SAME(failed.version);
        SAME(failed.code);
        SAME(failed.kept);
        SAME_VIEW(failed.reason);
        break;
    case RFT_BEAT:
        SAME_HELD(beat.held);
        SAME(beat.staged);
        break;
    case RFT_BYE:
        SAME(bye.code);
        SAME_VIEW(bye.reason);
        break;
    case RFT_MESSAGE_KINDS: fail_msg("no such kind");
    }
}

rft_bytes sample_encode(const rft_message *message)
{
    rft_limits limits = sample_limits();
    rft_bytes out = {0};
    refit_error error = {0};
    if (rft_message_encode(message, &limits, &out, &error) != REFIT_OK) fail_msg("%s", error.text);
    return out;
}

/* ---- Rebuilding, by msgpack's own means ---- */

static int append(void *user, const char *data, size_t count)
{
    assert_ok(rft_bytes_append(user, data, count, NULL));
    return 0;
}

static msgpack_object_map unpack(const rft_bytes *encoded, msgpack_unpacked *unpacked)
{
    msgpack_unpacked_init(unpacked);
    assert_int_equal(
        msgpack_unpack_next(unpacked, (const char *)encoded->data, encoded->count, NULL),
        MSGPACK_UNPACK_SUCCESS);
    return unpacked->data.via.map;
}

uint32_t sample_key_count(const rft_bytes *encoded)
{
    msgpack_unpacked unpacked;
    uint32_t count = unpack(encoded, &unpacked).size;
    msgpack_unpacked_destroy(&unpacked);
    return count;
}

msgpack_object_type sample_value_type(const rft_bytes *encoded, uint32_t index)
{
    msgpack_unpacked unpacked;
    msgpack_object_type type = unpack(encoded, &unpacked).ptr[index].val.type;
    msgpack_unpacked_destroy(&unpacked);
    return type;
}

rft_bytes sample_rebuild(const rft_bytes *encoded, uint32_t changed, sample_value_fn value)
{
    msgpack_unpacked unpacked;
    msgpack_object_map map = unpack(encoded, &unpacked);
    rft_bytes out = {0};
    msgpack_packer codec;
    msgpack_packer_init(&codec, &out, append);
    msgpack_pack_map(&codec, map.size - (value == NULL && changed < map.size ? 1 : 0));
    for (uint32_t i = 0; i < map.size; i++) {
        if (i == changed && value == NULL) continue;
        msgpack_pack_object(&codec, map.ptr[i].key);
        if (i == changed)
            value(&codec);
        else
            msgpack_pack_object(&codec, map.ptr[i].val);
    }
    msgpack_unpacked_destroy(&unpacked);
    return out;
}

rft_bytes sample_extend(const rft_bytes *encoded, const char *key, sample_value_fn value)
{
    msgpack_unpacked unpacked;
    msgpack_object_map map = unpack(encoded, &unpacked);
    rft_bytes out = {0};
    msgpack_packer codec;
    msgpack_packer_init(&codec, &out, append);
    msgpack_pack_map(&codec, map.size + 1);
    for (uint32_t i = 0; i < map.size; i++) {
        msgpack_pack_object(&codec, map.ptr[i].key);
        msgpack_pack_object(&codec, map.ptr[i].val);
    }
    msgpack_pack_str(&codec, strlen(key));
    msgpack_pack_str_body(&codec, key, strlen(key));
    value(&codec);
    msgpack_unpacked_destroy(&unpacked);
    return out;
}
