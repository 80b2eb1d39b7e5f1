/*
 * message: the protocol's messages as structs, and as bytes and back.
 *
 * A message is one msgpack map {"k": kind, …} of at most limits.message_bytes (MANIFEST and SEAL,
 * which grow with the number of tensors: limits.manifest_bytes); a FRAME is followed by one raw
 * payload, which is not part of these bytes. Decoding runs the validator first, so msgpack never
 * sees a lying length; a missing key, a key that is there twice, an unknown kind, a value out of
 * range or a trailing byte is REFIT_ERR_PROTOCOL; a size above a limit is REFIT_ERR_LIMIT; unknown
 * keys are ignored. Encoding holds to the same ranges.
 *
 * Views (rft_view) in a decoded message point into the bytes it was decoded from.
 */
#ifndef RFT_MESSAGE_H
#define RFT_MESSAGE_H

#include <stdbool.h>

#include <refit/config.h>

#include "wire/bytes.h"

/* What the wire accepts at most, from limits.* of the configuration. */
typedef struct rft_limits {
    uint32_t tensors;
    uint32_t rank;
    uint32_t name_bytes;
    uint64_t message_bytes;
    uint64_t manifest_bytes;
    uint64_t frame_bytes;
    uint64_t version_bytes;
    uint64_t memory_bytes; /* of this machine, which has to hold a version; 0: not looked at */
    uint32_t blocks;
    bool blocks_told; /* `blocks` came with the list, and is not the user's choice */
    uint32_t window;
} rft_limits;

rft_limits rft_limits_from(const refit_config *config);

#define RFT_PROTOCOL 1

#define RFT_RANKS_MOST 4096u /* of publishers that share the tensors */

/* X(NAME, text on the wire). S→P: subscriber to publisher. */
#define RFT_MESSAGE_MAP(X)                                                                         \
    X(HELLO, "hello")         /* S→P subscribe */                                                \
    X(WELCOME, "welcome")     /* P→S subscribed so far; here is a probe segment */               \
    X(JOIN, "join")           /* S→P the path it can take, proved */                             \
    X(REFUSE, "refuse")       /* P→S no */                                                       \
    X(MANIFEST, "manifest")   /* P→S the tensors */                                              \
    X(OFFER, "offer")         /* P→S a version is coming or there */                             \
    X(PULL, "pull")           /* S→P send so many more frames */                                 \
    X(FRAME, "frame")         /* P→S some blocks; a payload follows */                           \
    X(RESEND, "resend")       /* S→P these were missing or damaged */                            \
    X(SEAL, "seal")           /* P→S all is written; these are the digests */                    \
    X(STAGED, "staged")       /* S→P all here, verified, nothing applied */                      \
    X(COMMIT, "commit")       /* P→S apply */                                                    \
    X(COMMITTED, "committed") /* S→P applied */                                                  \
    X(RELEASED, "released")   /* S→P no longer reads the version in shared or GPU memory */      \
    X(FAILED, "failed")       /* S→P could not stage or apply */                                 \
    X(ABORT, "abort")         /* P→S drop what you staged */                                     \
    X(BEAT, "beat")           /* both: alive */                                                    \
    X(BYE, "bye")             /* both: leaving in good order */                                    \
    X(LEND, "lend")           /* P→S where in the GPU's memory a version's bytes lie */          \
    X(PIECES, "pieces")       /* P→S where the next of them lie, for a while */                  \
    X(TAKEN, "taken")         /* S→P copied: their memory may be written again */                \
    X(WANT, "want")           /* S→P these bytes of each version, and no others */               \
    X(SHARD, "shard")         /* both: what one rank of several publishes, and where */            \
    X(SUMS, "sums")           /* S→P all of a rank's shard is written; its part of the digests */

typedef enum rft_message_kind {
#define RFT_MESSAGE_ENUM(name, text) RFT_##name,
    RFT_MESSAGE_MAP(RFT_MESSAGE_ENUM)
#undef RFT_MESSAGE_ENUM
        RFT_MESSAGE_KINDS
} rft_message_kind;

/* A 128-bit digest in canonical byte order. */
typedef struct rft_digest128 {
    unsigned char bytes[16];
} rft_digest128;

/* What a worker holds, or what a message is about. Version 0: nothing. */
typedef struct rft_version_id {
    uint64_t epoch;
    uint64_t version;
    rft_digest128 digest;
} rft_version_id;

typedef struct rft_message {
    rft_message_kind kind;
    union {
        struct {
            uint32_t protocol;
            rft_view worker; /* its name */
            uint64_t
                instance;  /* drawn when the subscriber opened: tells a reconnect from a namesake */
            rft_view host; /* host identity, a hint only */
            bool shm;      /* willing to share memory */
            bool observer; /* wants to be told what is there, once, and is not a worker */
            uint32_t window; /* frames it wants in flight at most */
            rft_version_id held;
            rft_view gpu;   /* UUID of the GPU whose memory it can map; empty: none */
            bool delta;     /* it takes sparse blocks */
            bool zstd;      /* and packed frames */
            rft_view image; /* rft_segment_place: workers of one place can share an image; empty: it
                               does not */
            bool shards;    /* it takes versions from several publishers */
            bool fetches;   /* it is a worker of another publisher, and wants frames alone */
            uint32_t rank;  /* it is the publisher of this rank; 0: a worker */
        } hello;
        struct {
            uint32_t protocol;
            uint64_t epoch;
            uint64_t frame_bytes;
            uint32_t window;
            uint32_t heartbeat_ms;
            uint32_t heartbeat_timeout_ms;
            uint64_t version; /* current one, 0 if none */
            rft_view probe;   /* shared-memory segment to open as proof; empty: no shm here */
            rft_view share;   /* RFT_SHARE_BYTES: memory to map as proof, on the GPU where versions
                                 are lent; empty: none are */
            bool parts;       /* workers may want parts of versions */
        } welcome;
        struct {
            uint64_t epoch;
            bool shm;        /* the path taken */
            uint64_t proof;  /* what the probe segment holds; 0 without shm */
            rft_view reason; /* why not a better path, for the report; may be empty */
            bool gpu;        /* it has mapped `share`, and takes versions where they are lent; needs
                                `proof` */
            bool pieces;     /* and takes versions piece by piece, before they are committed */
            bool selects;    /* it wants a part of each version: WANT will say which */
        } join;
        struct {
            uint32_t code; /* a refit_status */
            bool final;    /* do not try again */
            rft_view reason;
        } refuse; /* also: failed, abort and bye carry code and reason, below */
        struct {
            uint64_t epoch;
            rft_digest128 digest;
            rft_view tensors; /* manifest->encoded */
        } manifest;
        struct {
            uint64_t epoch;
            uint64_t version;
            uint64_t base; /* version that `same` blocks refer to; 0: full */
            rft_digest128 manifest;
            uint64_t bytes; /* of weights */
            uint32_t frames;
            uint32_t deadline_ms; /* from now, to be staged; UINT32_MAX while it is being written */
            rft_view segment;     /* shm path: the store's segment; else empty */
            uint64_t segment_offset; /* of the version in it */
            bool lent;               /* it lies in the GPU's memory: LEND says where */
            bool share;     /* it comes in frames, into an image that others of the host can map */
            bool neighbor;  /* `segment` is the image of another worker, which receives it */
            bool whole;     /* it comes whole, whatever the worker has said with WANT */
            rft_view want;  /* it comes in this part, as WANT has it; empty: in the worker's own */
            uint32_t ranks; /* it comes from so many publishers (SHARD); 0: from this one */
        } offer;
        struct {
            rft_digest128 manifest; /* that the rows are about */
            rft_view rows;          /* RFT_WANT_ENTRY_BYTES each, as want.h has them */
            uint32_t from;          /* rows before these, in messages before this one */
            bool more;              /* and further ones follow */
        } want;
        struct {
            uint64_t version;
            uint32_t credits;
            rft_view image; /* with the first of a version that is to be shared: the segment that
                               its frames go to; else empty */
            rft_view have;  /* a bit for each frame, the lowest one first, in bytes: those that are
                               there already; empty: none is */
            uint64_t base;  /* who fetches: the version that it has the same bytes of; 0: none */
            rft_view manifest; /* who fetches, with the first of a version: digest of that which
                                  the version is of */
            bool part;         /* the same: what it has said with WANT; else all that this
                                  publisher has */
        } pull;
        struct {
            uint64_t epoch; /* of the coordinator */
            rft_digest128 manifest;
            uint32_t rank;
            uint32_t ranks;    /* how many there are */
            rft_view endpoint; /* of the rank's publisher; empty: that of this connection */
            rft_view rows;     /* what it publishes, as WANT has it */
            uint32_t from;     /* S→P: rows before these, in messages before this one */
            bool more;         /* S→P: and further ones follow */
            uint64_t held;     /* S→P: the last version that it has, whole; 0: none */
        } shard;
        struct {
            uint64_t version;
            rft_view tensors; /* 8 bytes each, little-endian: its part of the sum of each tensor's
                                 digest, in order, aliases left out; may be empty */
            rft_view words;   /* RFT_WORD_BYTES each: its part of words that ranks divide */
            uint32_t from;    /* sums before these, in messages before this one */
            bool more;        /* and further sums or words follow */
        } sums;
        struct {
            uint64_t version;
            uint32_t sequence;
            uint64_t hash;   /* XXH3-64 of the payload */
            rft_view modes;  /* one rft_block_mode byte per block of the frame */
            rft_view planes; /* RFT_PACK_BYTES of frame.h; empty: the payload is not packed */
        } frame;
        struct {
            uint64_t version;
            rft_view sequences; /* 4 bytes each, little-endian */
        } resend;
        struct {
            uint64_t version;
            rft_view lock;   /* the segment of the seqlock and of readers' locks */
            rft_view areas;  /* RFT_SHARE_BYTES each: allocations of the GPU */
            rft_view places; /* RFT_PLACE_BYTES each, of the tensors in order, aliases left out */
        } lend;
        struct {
            uint64_t version;
            uint32_t sequence; /* 1, 2, … */
            rft_view lock;     /* as in LEND, with `areas` */
            rft_view areas;
            rft_view list; /* RFT_PIECE_BYTES each; those of a tensor in order, without gaps */
        } pieces;
        struct {
            uint64_t version;
            uint32_t sequence; /* of PIECES; and all before it */
        } taken;
        struct {
            uint64_t version;
            rft_digest128 digest;
            rft_view tensors; /* 8 bytes each, little-endian: digests of the tensors in order,
                                 aliases left out */
        } seal;
        struct {
            uint64_t version;
            rft_digest128 digest;
        } staged; /* also: committed */
        struct {
            uint64_t version;
        } commit; /* also: released */
        struct {
            uint64_t version;
            uint32_t code; /* a refit_status */
            bool kept;     /* the version before still serves */
            rft_view reason;
        } failed; /* also: abort (kept is true there) */
        struct {
            rft_version_id held;
            uint64_t staged; /* S→P: version staged and waiting for its commit, or 0 */
            bool pieces;     /* S→P: as in JOIN; it may change */
        } beat;
        struct {
            uint32_t code;
            rft_view reason;
            bool final; /* P→S: no trainer follows */
        } bye;
    } as;
} rft_message;

/* The kind as the wire says it ("hello"), a constant. */
const char *rft_message_kind_name(rft_message_kind kind);

/* That the two protocols differ, and on which side to install another release. */
void rft_message_say_protocols(uint32_t trainer, uint32_t worker, char text[RFT_SENTENCE_BYTES]);

/* How many entries of so many bytes one message to a publisher has: longer lists go in several. */
uint32_t rft_message_entries(const rft_limits *limits, uint32_t bytes);

/* Appends the message to `out`, which is as before on failure. REFIT_ERR_HOST_MEMORY,
 * REFIT_ERR_LIMIT (larger than `limits` allow), REFIT_ERR_INVALID (a value out of its range). */
refit_status rft_message_encode(const rft_message *message, const rft_limits *limits,
                                rft_bytes *out, refit_error *error);

/* Decodes exactly `bytes`. REFIT_ERR_PROTOCOL, REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY. */
refit_status rft_message_decode(rft_view bytes, const rft_limits *limits, rft_message *out,
                                refit_error *error);

/* A part of one word of a tensor's digest, which other ranks have the rest of: index of the tensor,
 * 4 bytes; of the word, 8 bytes; and the word, in which their bytes are 0. Little-endian. */
#define RFT_WORD_BYTES 20u

/* Where a tensor begins: the number of its area, 4 bytes, and the offset there, 8 bytes,
 * little-endian, a multiple of RFT_PLACE_ALIGNMENT. */
#define RFT_PLACE_BYTES     12u
#define RFT_PLACE_ALIGNMENT 16u

/* A piece of a tensor: the tensor's index, 4 bytes; its place, RFT_PLACE_BYTES; the offset in the
 * tensor, a multiple of 8, and the length, 8 bytes each, little-endian. */
#define RFT_PIECE_BYTES (20u + RFT_PLACE_BYTES)

/* Memory of a GPU as WELCOME, LEND and PIECES name it: UUID, handle, then offset, bytes and
 * address, 8 bytes each, little-endian. Any bytes of that length can be read; rft_device_share_map
 * checks what they say.
 */
#define RFT_SHARE_BYTES 112u

struct rft_share;

void rft_share_write(const struct rft_share *share, unsigned char bytes[RFT_SHARE_BYTES]);

/* REFIT_ERR_PROTOCOL: another length. */
refit_status rft_share_read(rft_view bytes, struct rft_share *out, refit_error *error);

#endif
