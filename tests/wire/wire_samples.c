/* The samples: their fields are listed by hand, so that one that is missing in the library's table
 * is noticed. */
#include "wire_samples.h"
#include "device/device.h"
#include "tests/support/test.h"
#include "wire/frame.h"

#define WINDOW        64
#define FRAME_BYTES   (UINT64_C(1) << 20)
#define VERSION_BYTES (UINT64_C(1) << 40)

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
        .frame_bytes = FRAME_BYTES,
        .version_bytes = VERSION_BYTES,
        .blocks = 1 << 20,
        .window = WINDOW,
    };
}

/* ---- The fields of each kind: what a small sample has, and a large one */

typedef enum field_form { FORM_NUMBER, FORM_DIGEST, FORM_VIEW } field_form;

typedef struct field {
    rft_message_kind kind;
    field_form form;
    size_t at, bytes;
    uint64_t small, large; /* the number, the digest's bytes, the length of the view */
    const void *view;
} field;

#define SIZE_OF(member) sizeof(((rft_message *)NULL)->as.member)
#define NUMBER(kind, member, small, large)                                                         \
    {                                                                                              \
        RFT_##kind, FORM_NUMBER, offsetof(rft_message, as.member), SIZE_OF(member), small, large,  \
            NULL                                                                                   \
    }
#define DIGEST(kind, member, large)                                                                \
    {                                                                                              \
        RFT_##kind, FORM_DIGEST, offsetof(rft_message, as.member), SIZE_OF(member), 0, large, NULL \
    }
#define VIEW(kind, member, small, large, view)                                                     \
    {                                                                                              \
        RFT_##kind, FORM_VIEW, offsetof(rft_message, as.member), SIZE_OF(member), small, large,    \
            view                                                                                   \
    }
#define NAME(kind, member, small) VIEW(kind, member, small, sizeof long_name, long_name)
#define TEXT(kind, member)        VIEW(kind, member, 0, sizeof long_text, long_text)

static const field FIELDS[] = {
    NUMBER(HELLO, hello.protocol, 1, UINT32_MAX),
    NAME(HELLO, hello.worker, 1),
    NUMBER(HELLO, hello.instance, 0, UINT64_MAX),
    TEXT(HELLO, hello.host),
    NUMBER(HELLO, hello.shm, 0, 1),
    NUMBER(HELLO, hello.observer, 0, 1),
    NUMBER(HELLO, hello.window, 1, WINDOW),
    NUMBER(HELLO, hello.held.epoch, 0, UINT64_MAX),
    NUMBER(HELLO, hello.held.version, 0, UINT64_MAX),
    DIGEST(HELLO, hello.held.digest, 0xff),
    VIEW(HELLO, hello.gpu, 0, RFT_UUID_BYTES, many_bytes),
    NUMBER(HELLO, hello.delta, 0, 1),
    NUMBER(HELLO, hello.zstd, 0, 1),
    NAME(HELLO, hello.image, 0),
    NUMBER(HELLO, hello.shards, 0, 1),
    NUMBER(HELLO, hello.fetches, 0, 1),
    NUMBER(HELLO, hello.rank, 0, RFT_RANKS_MOST - 1),

    NUMBER(WELCOME, welcome.protocol, 1, UINT32_MAX),
    NUMBER(WELCOME, welcome.epoch, 1, UINT64_MAX),
    NUMBER(WELCOME, welcome.frame_bytes, 1, FRAME_BYTES),
    NUMBER(WELCOME, welcome.window, 1, WINDOW),
    NUMBER(WELCOME, welcome.heartbeat_ms, 1, UINT32_MAX),
    NUMBER(WELCOME, welcome.heartbeat_timeout_ms, 1, UINT32_MAX - 1),
    NUMBER(WELCOME, welcome.version, 0, UINT64_MAX),
    NAME(WELCOME, welcome.probe, 0),
    VIEW(WELCOME, welcome.share, 0, RFT_SHARE_BYTES, many_bytes),
    NUMBER(WELCOME, welcome.parts, 0, 1),

    NUMBER(JOIN, join.epoch, 1, UINT64_MAX),
    NUMBER(JOIN, join.shm, 0, 1),
    NUMBER(JOIN, join.proof, 0, UINT64_MAX),
    TEXT(JOIN, join.reason),
    NUMBER(JOIN, join.gpu, 0, 1),
    NUMBER(JOIN, join.pieces, 0, 1),
    NUMBER(JOIN, join.selects, 0, 1),

    NUMBER(REFUSE, refuse.code, 1, UINT32_MAX),
    NUMBER(REFUSE, refuse.final, 0, 1),
    TEXT(REFUSE, refuse.reason),

    NUMBER(MANIFEST, manifest.epoch, 1, UINT64_MAX),
    DIGEST(MANIFEST, manifest.digest, 0xff),
    VIEW(MANIFEST, manifest.tensors, 1, sizeof many_bytes, many_bytes),

    NUMBER(OFFER, offer.epoch, 1, UINT64_MAX),
    NUMBER(OFFER, offer.version, 1, UINT64_MAX),
    NUMBER(OFFER, offer.base, 0, UINT64_MAX - 1),
    DIGEST(OFFER, offer.manifest, 0x80),
    NUMBER(OFFER, offer.bytes, 0, VERSION_BYTES),
    NUMBER(OFFER, offer.frames, 0, UINT32_MAX),
    NUMBER(OFFER, offer.deadline_ms, 0, UINT32_MAX - 1),
    NAME(OFFER, offer.segment, 0),
    NUMBER(OFFER, offer.segment_offset, 0, UINT64_MAX),
    NUMBER(OFFER, offer.lent, 0, 1),
    NUMBER(OFFER, offer.share, 0, 1),
    NUMBER(OFFER, offer.neighbor, 0, 1),
    NUMBER(OFFER, offer.whole, 0, 1),
    VIEW(OFFER, offer.want, 0, 3 * RFT_WANT_ENTRY_BYTES, many_bytes),
    NUMBER(OFFER, offer.ranks, 0, RFT_RANKS_MOST),

    DIGEST(WANT, want.manifest, 5),
    VIEW(WANT, want.rows, 0, 3 * RFT_WANT_ENTRY_BYTES, many_bytes),
    NUMBER(WANT, want.from, 0, UINT32_MAX),
    NUMBER(WANT, want.more, 0, 1),

    NUMBER(PULL, pull.version, 1, UINT64_MAX),
    NUMBER(PULL, pull.credits, 1, WINDOW),
    NAME(PULL, pull.image, 0),
    VIEW(PULL, pull.have, 0, sizeof many_bytes, many_bytes),
    NUMBER(PULL, pull.base, 0, UINT64_MAX),
    VIEW(PULL, pull.manifest, 0, 16, many_bytes),
    NUMBER(PULL, pull.part, 0, 1),

    NUMBER(SHARD, shard.epoch, 1, UINT64_MAX),
    DIGEST(SHARD, shard.manifest, 3),
    NUMBER(SHARD, shard.rank, 0, RFT_RANKS_MOST - 1),
    NUMBER(SHARD, shard.ranks, 2, RFT_RANKS_MOST),
    VIEW(SHARD, shard.endpoint, 0, 255, long_text),
    VIEW(SHARD, shard.rows, 0, 3 * RFT_WANT_ENTRY_BYTES, many_bytes),
    NUMBER(SHARD, shard.from, 0, UINT32_MAX),
    NUMBER(SHARD, shard.more, 0, 1),
    NUMBER(SHARD, shard.held, 0, UINT64_MAX),

    NUMBER(SUMS, sums.version, 1, UINT64_MAX),
    VIEW(SUMS, sums.tensors, 0, sizeof many_bytes, many_bytes),
    VIEW(SUMS, sums.words, 0, 3 * RFT_WORD_BYTES, many_bytes),
    NUMBER(SUMS, sums.from, 0, UINT32_MAX),
    NUMBER(SUMS, sums.more, 0, 1),

    NUMBER(FRAME, frame.version, 1, UINT64_MAX),
    NUMBER(FRAME, frame.sequence, 0, UINT32_MAX - 1),
    NUMBER(FRAME, frame.hash, 0, UINT64_MAX),
    VIEW(FRAME, frame.modes, 1, sizeof many_bytes, many_bytes),
    VIEW(FRAME, frame.planes, 0, RFT_PACK_BYTES, many_bytes),

    NUMBER(RESEND, resend.version, 1, UINT64_MAX),
    VIEW(RESEND, resend.sequences, 4, sizeof many_bytes, many_bytes),

    NUMBER(LEND, lend.version, 1, UINT64_MAX),
    NAME(LEND, lend.lock, 1),
    VIEW(LEND, lend.areas, 0, 2 * RFT_SHARE_BYTES, many_bytes),
    VIEW(LEND, lend.places, RFT_PLACE_BYTES, 3 * RFT_PLACE_BYTES, many_bytes),

    NUMBER(PIECES, pieces.version, 1, UINT64_MAX),
    NUMBER(PIECES, pieces.sequence, 1, UINT32_MAX),
    NAME(PIECES, pieces.lock, 1),
    VIEW(PIECES, pieces.areas, RFT_SHARE_BYTES, 2 * RFT_SHARE_BYTES, many_bytes),
    VIEW(PIECES, pieces.list, RFT_PIECE_BYTES, 3 * RFT_PIECE_BYTES, many_bytes),
    NUMBER(TAKEN, taken.version, 1, UINT64_MAX),
    NUMBER(TAKEN, taken.sequence, 1, UINT32_MAX),

    NUMBER(SEAL, seal.version, 1, UINT64_MAX),
    DIGEST(SEAL, seal.digest, 7),
    VIEW(SEAL, seal.tensors, 8, sizeof many_bytes, many_bytes),

    NUMBER(STAGED, staged.version, 1, UINT64_MAX),
    DIGEST(STAGED, staged.digest, 9),
    NUMBER(COMMITTED, staged.version, 1, UINT64_MAX),
    DIGEST(COMMITTED, staged.digest, 9),
    NUMBER(COMMIT, commit.version, 1, UINT64_MAX),
    NUMBER(RELEASED, commit.version, 1, UINT64_MAX),

    NUMBER(FAILED, failed.version, 0, UINT64_MAX),
    NUMBER(FAILED, failed.code, 1, UINT32_MAX),
    NUMBER(FAILED, failed.kept, 0, 1),
    TEXT(FAILED, failed.reason),
    NUMBER(ABORT, failed.version, 1, UINT64_MAX),
    NUMBER(ABORT, failed.code, 1, UINT32_MAX),
    NUMBER(ABORT, failed.kept, 1, 1),
    TEXT(ABORT, failed.reason),

    NUMBER(BEAT, beat.held.epoch, 0, UINT64_MAX),
    NUMBER(BEAT, beat.held.version, 0, UINT64_MAX),
    DIGEST(BEAT, beat.held.digest, 0xff),
    NUMBER(BEAT, beat.staged, 0, UINT64_MAX),
    NUMBER(BEAT, beat.pieces, 0, 1),

    NUMBER(BYE, bye.code, 0, UINT32_MAX),
    TEXT(BYE, bye.reason),
    NUMBER(BYE, bye.final, 0, 1),
};

/* A bool, or an unsigned number of four or eight bytes. */
static void put_number(unsigned char *at, size_t bytes, uint64_t value)
{
    const bool flag = value != 0;
    const uint32_t number = (uint32_t)value;
    assert_true(bytes == sizeof flag || bytes == sizeof number || bytes == sizeof value);
    if (bytes == sizeof flag) memcpy(at, &flag, bytes);
    if (bytes == sizeof number) memcpy(at, &number, bytes);
    if (bytes == sizeof value) memcpy(at, &value, bytes);
}

static rft_message sample(rft_message_kind kind, bool large)
{
    rft_message message = {.kind = kind};
    memset(many_bytes, 1, sizeof many_bytes);
    for (size_t i = 0; i < COUNT_OF(FIELDS); i++) {
        const field *one = &FIELDS[i];
        const uint64_t value = large ? one->large : one->small;
        const rft_view view = {value == 0 ? NULL : one->view, value};
        unsigned char *at = (unsigned char *)&message + one->at;
        if (one->kind != kind) continue;
        if (one->form == FORM_NUMBER) put_number(at, one->bytes, value);
        if (one->form == FORM_DIGEST) memset(at, (int)value, one->bytes);
        if (one->form == FORM_VIEW) memcpy(at, &view, sizeof view);
    }
    return message;
}

rft_message sample_small(rft_message_kind kind)
{
    return sample(kind, false);
}

rft_message sample_large(rft_message_kind kind)
{
    return sample(kind, true);
}

static void assert_fields_equal(const field *one, const unsigned char *a, const unsigned char *b)
{
    rft_view left = {a, one->bytes}, right = {b, one->bytes};
    if (one->form == FORM_VIEW) memcpy(&left, a, sizeof left);
    if (one->form == FORM_VIEW) memcpy(&right, b, sizeof right);
    assert_int_equal(left.count, right.count);
    if (left.count > 0) assert_memory_equal(left.data, right.data, left.count);
}

void assert_messages_equal(const rft_message *a, const rft_message *b)
{
    assert_int_equal(a->kind, b->kind);
    for (size_t i = 0; i < COUNT_OF(FIELDS); i++) {
        const size_t at = FIELDS[i].at;
        if (FIELDS[i].kind == a->kind)
            assert_fields_equal(&FIELDS[i], (const unsigned char *)a + at,
                                (const unsigned char *)b + at);
    }
}

rft_bytes sample_encode(const rft_message *message)
{
    rft_limits limits = sample_limits();
    rft_bytes out = {0};
    assert_done(rft_message_encode(message, &limits, &out, error));
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
