/*
 * master: an fp32 master beside the bf16 weights that are its rounding, as what the weights do not
 * say of it.
 *
 * A master m and its weight w, as bits:
 *
 *     low(m)          = m mod 2^16                                       the remainder
 *     rebuild(w, low) = ((w - (low > 0x8000)) mod 2^16) * 2^16 + low
 *
 * Rounding to nearest adds one to the upper half where the lower one is above the middle, so that
 * rebuild(w, low(m)) is m. Where it is not, the element is an *exception*: half of those that lie
 * in the middle (0x8000), NaNs, and every weight that is not a rounding of its master. What is
 * written is exact for every pattern of bits, whatever the weights are.
 *
 * Masters are coded in units of 64 blocks of 4096 elements; only the last unit of a call may be
 * shorter. All parts of a unit lie at multiples of 16 bytes, and all units of a call have the same
 * room, so that where a unit lies is known before it is coded:
 *
 *     rft_master_entry table[blocks]
 *     uint16_t remainder[elements]                and up to 14 bytes of nothing
 *     room for exceptions, block after block: of a block in which the exceptions are
 *         fewer than half its elements   uint32_t (element in the block) << 16 | upper half,
 *                                        by element
 *         more                           uint16_t upper half, of each element; rounded up to 4
 *
 * A unit whose exceptions do not fit cannot be decoded, and the result says so. The weights are
 * needed to decode, and have to be as they were: a block whose weights have another digest is left
 * alone. What a table says is checked before it is followed.
 *
 * The GPU's version (master.cu, "rft_master_split_kernel", "rft_master_list_kernel",
 * "rft_master_join_kernel") and the C twins agree bit for bit.
 *
 * Method: the split of fp32 in a bf16 weight and a 16-bit remainder is that of Transformer Engine's
 * FusedAdam (store_param_remainders), which needs weights that it rounded itself.
 */
#ifndef RFT_KERNEL_MASTER_H
#define RFT_KERNEL_MASTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RFT_MASTER_BLOCK UINT32_C(4096)          /* elements */
#define RFT_MASTER_UNIT  (64 * RFT_MASTER_BLOCK) /* elements */
#define RFT_MASTER_ROOM  (2 * RFT_MASTER_UNIT)   /* bytes: no unit needs more */

typedef struct rft_master_entry {
    uint64_t digest;     /* of the block's weights: kernels/digest.h, offset 0 */
    uint32_t exceptions; /* in the block */
    uint32_t at;         /* where they begin in the unit's room */
} rft_master_entry;

/* What a call finds is added to what is there. */
typedef struct rft_master_result {
    uint32_t found; /* RFT_MASTER_*; 0: all is well */
    uint32_t need;  /* encoding: the most room that a unit would have filled */
} rft_master_result;

#define RFT_MASTER_NO_ROOM   1u /* encoding: the exceptions of a unit do not fit */
#define RFT_MASTER_CHANGED   2u /* decoding: the weights are not those of the encoding */
#define RFT_MASTER_MALFORMED 4u /* decoding: nothing that encoding writes */
#define RFT_MASTER_DIFFERS   8u /* comparing: the master is another */

/* Masters and where they are coded. Masters lie at a multiple of 4, weights of 2, the others of 16.
 */
typedef struct rft_master_job {
    void *master;        /* only read by encoding and comparing */
    const void *weights; /* as many elements */
    void *coded;         /* rft_master_bytes of them; only written by encoding */
    rft_master_result *result;
    uint64_t elements;
    uint32_t room; /* of each unit; a multiple of 16 */
    bool compares; /* decoding: writes nothing, says whether the master is what is coded */
} rft_master_job;

/* Bytes that the coded form of `elements` has. */
uint64_t rft_master_bytes(uint64_t elements, uint32_t room);

/* The room that the exceptions of one unit fill, by the table of `coded`. */
uint32_t rft_master_need(const void *coded, uint32_t elements);

/* Encoding is both: the table, but for `at`, and the remainders; then, with what the first has left
 * in the table, the rest. */
void rft_master_split(const rft_master_job *job);
void rft_master_list(const rft_master_job *job);

/* Decodes, or compares. Blocks that cannot be decoded are left alone. */
void rft_master_join(const rft_master_job *job);

#endif
