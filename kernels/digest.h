/*
 * digest: the position-mixed 64-bit hash of a byte string, the same on every CPU and GPU.
 *
 * The bytes are read as little-endian 64-bit words w[0], w[1], … (the last one padded with zeros).
 * With x = w[i] ^ ((i + 1) * 0x9E3779B97F4A7C15):
 *
 *     sum    = Σ  lo32(x) * hi32(x) + rot32(x)        (mod 2^64)
 *     digest = mix(sum ^ bytes * 0xC2B2AE3D27D4EB4F)  (mix: murmur3's 64-bit finalizer)
 *
 * A sum, so parts can be computed anywhere and in any order and added: a block's part needs only
 * the index of its first word. Any single changed bit changes the sum. It guards against accidents;
 * against an adversary there is authentication.
 */
#ifndef RFT_KERNEL_DIGEST_H
#define RFT_KERNEL_DIGEST_H

#include <stddef.h>
#include <stdint.h>

/* The part of `bytes` at `data`, which lies `offset` bytes (a multiple of 8) into the whole. Only
 * the last part of a whole may have a length that is not a multiple of 8. */
uint64_t rft_digest_part(const void *data, size_t bytes, uint64_t offset);

/* As rft_digest_part, and copies the bytes to `to` in the same pass (streaming stores where they
 * win). */
uint64_t rft_digest_copy_part(void *to, const void *from, size_t bytes, uint64_t offset);

/* As rft_digest_copy_part, for a piece of a copy that as a whole is too large for the caches:
 * streams the piece however small it is, where streaming pays at all. */
uint64_t rft_digest_copy_piece(void *to, const void *from, size_t bytes, uint64_t offset);

/* rft_digest_part and rft_digest_copy_part, giving in `parts` that of each `each` bytes (a multiple
 * of 8; the last may be fewer). They return the sum. */
uint64_t rft_digest_parts(const void *data, size_t bytes, uint64_t offset, size_t each,
                          uint64_t *parts);
uint64_t rft_digest_copy_parts(void *to, const void *from, size_t bytes, uint64_t offset,
                               size_t each, uint64_t *parts);

/* From the sum of all parts to the digest of a whole of `bytes`. */
uint64_t rft_digest_finish(uint64_t sum, uint64_t bytes);

#endif
