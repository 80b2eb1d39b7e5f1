/*
 * delta_chunk: the steps that the wide forms of encoding and applying share. Both go through the
 * changed elements in chunks that lie in the first-level cache, step by step: positions, bits,
 * values. Their text is the same for every processor; what its vectors do is in the file of the
 * processor, which defines, on 16 lanes of 16 bits:
 *
 *     rft_delta_lanes                a vector of them
 *     rft_delta_get16 _put16         from and to any address
 *     rft_delta_code16               remainders of elements that moved
 *     rft_delta_nearest16            the bits of the numbers nearest to others with a remainder
 *     rft_delta_keep16               lanes of one vector, or of another where a third says so
 *     rft_delta_find16               which lanes hold a value, a bit each
 *     rft_delta_falls16 _none16      lanes that are not above the ones before; whether there are
 * any rft_delta_join16               positions from their two parts rft_delta_symbols32 two vectors
 * of symbols as bytes of four
 *
 * and on whole words rft_delta_pack4, rft_delta_spread4 and rft_delta_places.
 */
#ifndef RFT_KERNEL_DELTA_CHUNK_H
#define RFT_KERNEL_DELTA_CHUNK_H

#include "kernels/delta_plan.h"

/* Elements that are done at once; what a last word of bits adds; what writing by vectors adds. */
#define RFT_DELTA_CHUNK 512u
#define RFT_DELTA_ROOM  (RFT_DELTA_CHUNK + 64 + 32)

/* All chunks but the last are whole groups, so that they begin on whole bytes in every plane. */
#define RFT_DELTA_GROUP 32u

#define RFT_DELTA_INLINE __attribute__((always_inline)) inline

/* As rft_delta_load: the processors with a wide form are little-endian. */
static inline void rft_delta_store(unsigned char *at, uint64_t word)
{
    memcpy(at, &word, sizeof word);
}

/* The low `bits` of each of four elements. */
static inline uint64_t rft_delta_four(uint32_t bits)
{
    return ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
}

#if defined(__x86_64__)
#include "kernels/delta_chunk_x86.h"
#elif defined(__aarch64__)
#include "kernels/delta_chunk_neon.h"
#endif

#endif
