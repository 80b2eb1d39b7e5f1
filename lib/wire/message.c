/*
 * Messages: one table per kind says which fields travel under which keys and what they may hold;
 * encoding and decoding are one lookup and one loop (fields.c).
 *
 * A message is checked alone. Whether it fits the state of the protocol (a version that was not
 * offered, an epoch of another publisher) is checked by the session and the server.
 */
#include "wire/message.h"

#include <string.h>

#include "base/checked.h"
#include "base/text.h"
#include "device/device.h"
#include "wire/fields.h"
#include "wire/frame.h"
#include "wire/manifest.h"
#include "wire/want.h"

#define WORKER_MOST   63u  /* what refit_worker_info can show */
#define SEGMENT_MOST  63u  /* a shared-memory name */
#define IMAGE_MOST    95u  /* RFT_SEGMENT_PLACE_BYTES, without its end */
#define ENDPOINT_MOST 255u /* broadcast.endpoint */
#define TEXT_MOST     512u /* words for a report: a refit_error's sentence always fits */

#define FIELD(kind, member) .type = RFT_FIELD_##kind, .offset = offsetof(rft_message, as.member)
#define U32(member)         FIELD(U32, member)
#define U64(member)         FIELD(U64, member)
#define BOOL(member)        FIELD(BOOL, member)
#define TEXT(member)        FIELD(TEXT, member)
#define BYTES(member)       FIELD(BYTES, member)
#define DIGEST(member)      FIELD(DIGEST, member)

static const rft_field hello_fields[] = {
    {"protocol", U32(hello.protocol), .least = 1},
    {"worker", TEXT(hello.worker), .least = 1, .most = WORKER_MOST},
    {"instance", U64(hello.instance)},
    {"host", TEXT(hello.host), .optional = true, .most = TEXT_MOST},
    {"shm", BOOL(hello.shm)},
    {"observer", BOOL(hello.observer), .optional = true},
    {"window", U32(hello.window), .least = 1, .limit = RFT_LIMIT_WINDOW},
    {"epoch", U64(hello.held.epoch)},
    {"version", U64(hello.held.version)},
    {"digest", DIGEST(hello.held.digest)},
    {"gpu", BYTES(hello.gpu), .optional = true, .least = RFT_UUID_BYTES, .most = RFT_UUID_BYTES},
    {"delta", BOOL(hello.delta), .optional = true},
    {"zstd", BOOL(hello.zstd), .optional = true},
    {"image", TEXT(hello.image), .optional = true, .most = IMAGE_MOST},
    {"shards", BOOL(hello.shards), .optional = true},
    {"fetches", BOOL(hello.fetches), .optional = true},
    {"rank", U32(hello.rank), .optional = true, .most = RFT_RANKS_MOST - 1},
};

static const rft_field welcome_fields[] = {
    {"protocol", U32(welcome.protocol), .least = 1},
    {"epoch", U64(welcome.epoch), .least = 1},
    {"frame", U64(welcome.frame_bytes), .least = 1, .limit = RFT_LIMIT_FRAME},
    {"window", U32(welcome.window), .least = 1, .limit = RFT_LIMIT_WINDOW},
    {"beat", U32(welcome.heartbeat_ms), .least = 1},
    {"silence", U32(welcome.heartbeat_timeout_ms), .least = 1},
    {"version", U64(welcome.version)},
    {"probe", TEXT(welcome.probe), .optional = true, .most = SEGMENT_MOST},
    {"share", BYTES(welcome.share), .optional = true, .least = RFT_SHARE_BYTES,
     .most = RFT_SHARE_BYTES},
    {"parts", BOOL(welcome.parts), .optional = true},
};

static const rft_field join_fields[] = {
    {"epoch", U64(join.epoch), .least = 1},
    {"shm", BOOL(join.shm)},
    {"proof", U64(join.proof), .optional = true},
    {"reason", TEXT(join.reason), .optional = true, .most = TEXT_MOST},
    {"gpu", BOOL(join.gpu), .optional = true},
    {"pieces", BOOL(join.pieces), .optional = true},
    {"selects", BOOL(join.selects), .optional = true},
};

static const rft_field refuse_fields[] = {
    {"code", U32(refuse.code), .least = 1},
    {"final", BOOL(refuse.final)},
    {"reason", TEXT(refuse.reason), .optional = true, .most = TEXT_MOST},
};

static const rft_field manifest_fields[] = {
    {"epoch", U64(manifest.epoch), .least = 1},
    {"digest", DIGEST(manifest.digest)},
    {"tensors", BYTES(manifest.tensors), .least = 1},
};

static const rft_field offer_fields[] = {
    {"epoch", U64(offer.epoch), .least = 1},
    {"version", U64(offer.version), .least = 1},
    {"base", U64(offer.base), .optional = true},
    {"manifest", DIGEST(offer.manifest)},
    {"bytes", U64(offer.bytes), .limit = RFT_LIMIT_VERSION},
    {"frames", U32(offer.frames)},
    {"deadline", U32(offer.deadline_ms)},
    {"segment", TEXT(offer.segment), .optional = true, .most = SEGMENT_MOST},
    {"offset", U64(offer.segment_offset), .optional = true},
    {"lent", BOOL(offer.lent), .optional = true},
    {"share", BOOL(offer.share), .optional = true},
    {"neighbor", BOOL(offer.neighbor), .optional = true},
    {"whole", BOOL(offer.whole), .optional = true},
    {"want", BYTES(offer.want), .optional = true, .unit = RFT_WANT_ENTRY_BYTES},
    {"ranks", U32(offer.ranks), .optional = true, .most = RFT_RANKS_MOST},
};

static const rft_field want_fields[] = {
    {"manifest", DIGEST(want.manifest)},
    {"rows", BYTES(want.rows), .optional = true, .unit = RFT_WANT_ENTRY_BYTES},
    {"from", U32(want.from), .optional = true},
    {"more", BOOL(want.more), .optional = true},
};

static const rft_field pull_fields[] = {
    {"version", U64(pull.version), .least = 1},
    {"credits", U32(pull.credits), .least = 1, .limit = RFT_LIMIT_WINDOW},
    {"image", TEXT(pull.image), .optional = true, .most = SEGMENT_MOST},
    {"have", BYTES(pull.have), .optional = true},
    {"base", U64(pull.base), .optional = true},
    {"manifest", BYTES(pull.manifest), .optional = true, .least = 16, .most = 16},
    {"part", BOOL(pull.part), .optional = true},
};

static const rft_field shard_fields[] = {
    {"epoch", U64(shard.epoch), .least = 1},
    {"manifest", DIGEST(shard.manifest)},
    {"rank", U32(shard.rank), .most = RFT_RANKS_MOST - 1},
    {"ranks", U32(shard.ranks), .least = 2, .most = RFT_RANKS_MOST},
    {"endpoint", TEXT(shard.endpoint), .optional = true, .most = ENDPOINT_MOST},
    {"rows", BYTES(shard.rows), .optional = true, .unit = RFT_WANT_ENTRY_BYTES},
    {"from", U32(shard.from), .optional = true},
    {"more", BOOL(shard.more), .optional = true},
    {"held", U64(shard.held), .optional = true},
};

static const rft_field sums_fields[] = {
    {"version", U64(sums.version), .least = 1},
    {"tensors", BYTES(sums.tensors), .optional = true, .unit = 8, .limit = RFT_LIMIT_TENSORS},
    {"words", BYTES(sums.words), .optional = true, .unit = RFT_WORD_BYTES},
    {"from", U32(sums.from), .optional = true},
    {"more", BOOL(sums.more), .optional = true},
};

static const rft_field frame_fields[] = {
    {"version", U64(frame.version), .least = 1},
    {"frame", U32(frame.sequence), .most = UINT32_MAX - 1},
    {"hash", U64(frame.hash)},
    {"modes", BYTES(frame.modes), .least = 1, .most = RFT_FRAME_BLOCKS},
    {"planes", BYTES(frame.planes), .optional = true, .least = RFT_PACK_BYTES,
     .most = RFT_PACK_BYTES},
};

static const rft_field resend_fields[] = {
    {"version", U64(resend.version), .least = 1},
    {"frames", BYTES(resend.sequences), .unit = 4, .least = 1},
};

static const rft_field seal_fields[] = {
    {"version", U64(seal.version), .least = 1},
    {"digest", DIGEST(seal.digest)},
    {"tensors", BYTES(seal.tensors), .unit = 8, .least = 1, .limit = RFT_LIMIT_TENSORS},
};

static const rft_field lend_fields[] = {
    {"version", U64(lend.version), .least = 1},
    {"lock", TEXT(lend.lock), .least = 1, .most = SEGMENT_MOST},
    {"areas", BYTES(lend.areas), .optional = true, .unit = RFT_SHARE_BYTES,
     .limit = RFT_LIMIT_TENSORS},
    {"places", BYTES(lend.places), .unit = RFT_PLACE_BYTES, .least = 1, .limit = RFT_LIMIT_TENSORS},
};

static const rft_field pieces_fields[] = {
    {"version", U64(pieces.version), .least = 1},
    {"sequence", U32(pieces.sequence), .least = 1},
    {"lock", TEXT(pieces.lock), .least = 1, .most = SEGMENT_MOST},
    {"areas", BYTES(pieces.areas), .unit = RFT_SHARE_BYTES, .least = 1, .limit = RFT_LIMIT_TENSORS},
    {"list", BYTES(pieces.list), .unit = RFT_PIECE_BYTES, .least = 1, .limit = RFT_LIMIT_TENSORS},
};

static const rft_field taken_fields[] = {
    {"version", U64(taken.version), .least = 1},
    {"sequence", U32(taken.sequence), .least = 1},
};

/* And COMMITTED. */
static const rft_field staged_fields[] = {
    {"version", U64(staged.version), .least = 1},
    {"digest", DIGEST(staged.digest)},
};

/* And RELEASED. */
static const rft_field commit_fields[] = {
    {"version", U64(commit.version), .least = 1},
};

/* Version 0: what failed came before any version, such as a manifest that is too large. */
static const rft_field failed_fields[] = {
    {"version", U64(failed.version)},
    {"code", U32(failed.code), .least = 1},
    {"kept", BOOL(failed.kept)},
    {"reason", TEXT(failed.reason), .optional = true, .most = TEXT_MOST},
};

static const rft_field abort_fields[] = {
    {"version", U64(failed.version), .least = 1},
    {"code", U32(failed.code), .least = 1},
    {"reason", TEXT(failed.reason), .optional = true, .most = TEXT_MOST},
};

static const rft_field beat_fields[] = {
    {"epoch", U64(beat.held.epoch)},
    {"version", U64(beat.held.version)},
    {"digest", DIGEST(beat.held.digest)},
    {"staged", U64(beat.staged), .optional = true},
    {"pieces", BOOL(beat.pieces), .optional = true},
};

static const rft_field bye_fields[] = {
    {"code", U32(bye.code)},
    {"reason", TEXT(bye.reason), .optional = true, .most = TEXT_MOST},
    {"final", BOOL(bye.final), .optional = true},
};

#define LIST(fields)                                                                               \
    {                                                                                              \
        .count = sizeof(fields) / sizeof((fields)[0]), .list = (fields)                            \
    }

/* The kind's fields; fields_of adds its name. */
static const rft_fields lists[RFT_MESSAGE_KINDS] = {
    [RFT_HELLO] = LIST(hello_fields),       [RFT_WELCOME] = LIST(welcome_fields),
    [RFT_JOIN] = LIST(join_fields),         [RFT_REFUSE] = LIST(refuse_fields),
    [RFT_MANIFEST] = LIST(manifest_fields), [RFT_OFFER] = LIST(offer_fields),
    [RFT_PULL] = LIST(pull_fields),         [RFT_FRAME] = LIST(frame_fields),
    [RFT_RESEND] = LIST(resend_fields),     [RFT_LEND] = LIST(lend_fields),
    [RFT_SEAL] = LIST(seal_fields),         [RFT_STAGED] = LIST(staged_fields),
    [RFT_COMMIT] = LIST(commit_fields),     [RFT_COMMITTED] = LIST(staged_fields),
    [RFT_RELEASED] = LIST(commit_fields),   [RFT_FAILED] = LIST(failed_fields),
    [RFT_ABORT] = LIST(abort_fields),       [RFT_BEAT] = LIST(beat_fields),
    [RFT_BYE] = LIST(bye_fields),           [RFT_PIECES] = LIST(pieces_fields),
    [RFT_TAKEN] = LIST(taken_fields),       [RFT_WANT] = LIST(want_fields),
    [RFT_SHARD] = LIST(shard_fields),       [RFT_SUMS] = LIST(sums_fields),
};

const char *rft_message_kind_name(rft_message_kind kind)
{
    static const char *const names[RFT_MESSAGE_KINDS] = {
#define KIND_NAME(name, text) [RFT_##name] = (text),
        RFT_MESSAGE_MAP(KIND_NAME)
#undef KIND_NAME
    };
    return (unsigned)kind < RFT_MESSAGE_KINDS ? names[kind] : "unknown";
}

static rft_fields fields_of(rft_message_kind kind)
{
    rft_fields fields = lists[kind];
    fields.name = rft_message_kind_name(kind);
    fields.tagged = true;
    return fields;
}

/* What grows with the number of tensors has the manifest's limit. */
static uint64_t most_bytes(rft_message_kind kind, const rft_limits *limits)
{
    bool large = kind == RFT_MANIFEST || kind == RFT_SEAL || kind == RFT_LEND ||
                 kind == RFT_PIECES || kind == RFT_OFFER || kind == RFT_SHARD;
    return large ? limits->manifest_bytes : limits->message_bytes;
}

/* Half of a message is left for all else. */
uint32_t rft_message_entries(const rft_limits *limits, uint32_t bytes)
{
    uint64_t entries = limits->message_bytes / 2 / bytes;
    return entries == 0 ? 1 : (uint32_t)rft_min_u64(entries, UINT32_MAX);
}

refit_status rft_message_encode(const rft_message *message, const rft_limits *limits,
                                rft_bytes *out, refit_error *error)
{
    RFT_REFUSE_IF((unsigned)message->kind >= RFT_MESSAGE_KINDS, error, REFIT_ERR_INVALID,
                  "there is no message kind %u", (unsigned)message->kind);
    rft_fields fields = fields_of(message->kind);
    return rft_fields_encode(&fields, message, limits, most_bytes(message->kind, limits), out,
                             error);
}

/* RFT_MESSAGE_KINDS if it is none. */
static rft_message_kind find_kind(rft_view name)
{
    for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        rft_view known = rft_view_text(rft_message_kind_name(kind));
        if (known.count == name.count && memcmp(known.data, name.data, name.count) == 0)
            return kind;
    }
    return RFT_MESSAGE_KINDS;
}

static refit_status read_message(const rft_map *map, uint64_t bytes, const rft_limits *limits,
                                 rft_message *out, refit_error *error)
{
    rft_view name = rft_map_text(map, RFT_FIELDS_KIND);
    char shown[24];
    rft_view_print(name, shown, sizeof shown);
    rft_message_kind kind = name.count == 0 ? RFT_MESSAGE_KINDS : find_kind(name);
    RFT_REFUSE_IF(kind == RFT_MESSAGE_KINDS, error, REFIT_ERR_PROTOCOL,
                  "a message of unknown kind '%s'", shown);
    RFT_REFUSE_IF(bytes > most_bytes(kind, limits), error, REFIT_ERR_LIMIT,
                  "%s: %llu bytes; at most %llu are allowed", shown, (unsigned long long)bytes,
                  (unsigned long long)most_bytes(kind, limits));
    rft_message message = {.kind = kind};
    if (kind == RFT_ABORT) message.as.failed.kept = true;
    rft_fields fields = fields_of(kind);
    RFT_TRY(rft_map_read(map, &fields, limits, &message, error));
    *out = message;
    return REFIT_OK;
}

refit_status rft_message_decode(rft_view bytes, const rft_limits *limits, rft_message *out,
                                refit_error *error)
{
    uint64_t most = rft_max_u64(limits->message_bytes, limits->manifest_bytes);
    RFT_REFUSE_IF(bytes.count > most, error, REFIT_ERR_LIMIT,
                  "a message of %zu bytes; at most %llu are allowed", bytes.count,
                  (unsigned long long)most);
    rft_map map;
    size_t used;
    RFT_TRY(rft_map_open(bytes, limits, &map, &used, error));
    RFT_REFUSE_IF(used != bytes.count, error, REFIT_ERR_PROTOCOL,
                  "a message has %zu bytes after its end", bytes.count - used);
    return read_message(&map, bytes.count, limits, out, error);
}

void rft_message_say_protocols(uint32_t trainer, uint32_t worker, char text[RFT_SENTENCE_BYTES])
{
    rft_text_say(text, RFT_SENTENCE_BYTES,
                 "the trainer speaks protocol %u and this worker protocol %u: install the %s's "
                 "release of refit on the %s's side",
                 trainer, worker, trainer > worker ? "trainer" : "worker",
                 trainer > worker ? "worker" : "trainer");
}

/* ---- Limits
 *
 * Taken from a configuration that was checked when its object was opened.
 */

rft_limits rft_limits_from(const refit_config *config)
{
    return (rft_limits){
        .tensors = config->limits_tensors,
        .rank = config->limits_rank,
        .name_bytes = config->limits_name_bytes,
        .message_bytes = config->limits_message_bytes,
        .manifest_bytes = config->limits_manifest_bytes,
        .frame_bytes = config->limits_frame_bytes,
        .version_bytes = config->limits_version_bytes,
        .blocks = config->limits_blocks,
        .window = config->limits_window,
    };
}

/* ---- A share of GPU memory
 *
 * Its fields one by one: the struct's own layout is not part of the wire.
 */

_Static_assert(RFT_SHARE_BYTES == RFT_UUID_BYTES + sizeof(((rft_share *)NULL)->handle) + 4 * 8,
               "every field of a share travels");

void rft_share_write(const rft_share *share, unsigned char bytes[RFT_SHARE_BYTES])
{
    unsigned char *at = bytes;
    memcpy(at, share->uuid, sizeof share->uuid);
    at += sizeof share->uuid;
    memcpy(at, share->handle, sizeof share->handle);
    at += sizeof share->handle;
    rft_put_u64(at, share->offset);
    rft_put_u64(at + 8, share->bytes);
    rft_put_u64(at + 16, share->address);
    rft_put_u64(at + 24, share->id);
}

refit_status rft_share_read(rft_view bytes, rft_share *out, refit_error *error)
{
    RFT_REFUSE_IF(bytes.count != RFT_SHARE_BYTES, error, REFIT_ERR_PROTOCOL,
                  "a share of %zu bytes instead of %u", bytes.count, RFT_SHARE_BYTES);
    const unsigned char *at = bytes.data;
    memcpy(out->uuid, at, sizeof out->uuid);
    at += sizeof out->uuid;
    memcpy(out->handle, at, sizeof out->handle);
    at += sizeof out->handle;
    out->offset = rft_get_u64(at);
    out->bytes = rft_get_u64(at + 8);
    out->address = rft_get_u64(at + 16);
    out->id = rft_get_u64(at + 24);
    return REFIT_OK;
}
