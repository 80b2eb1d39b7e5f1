/*
 * shard: the bytes of the tensors that one of several publishers has, as a want (want.h).
 *
 * Of each tensor it is one box at most, so that the wanted bytes of a tensor, one after the other,
 * are the box as its rank has it. Here: how these lie in memory, whether the shards of all ranks
 * are the tensors exactly, and what each rank adds to the digests of tensors that ranks divide.
 *
 * Pure arithmetic: no memory of a version is kept here, no rank is spoken to.
 */
#ifndef RFT_SHARD_H
#define RFT_SHARD_H

#include "wire/want.h"

/* The memory of a shard: the manifest's tensors, blocks and frames, each with the place and the
 * number of its bytes in the shard, which lie one after the other, aligned as in the manifest.
 * Bytes of a tensor are together; `tensor_offset` is that of the manifest. It has no names of its
 * own, and `manifest` must outlive it; closed like any other. REFIT_ERR_HOST_MEMORY. */
refit_status rft_shard_layout(const rft_manifest *manifest, const rft_want *shard,
                              rft_manifest **out, refit_error *error);

/* The bytes of a block that are in both, from an image of the layout, one after the other. `want`
 * is within the shard. */
void rft_shard_gather(const rft_want *want, const rft_want *shard, const rft_block *placed,
                      const unsigned char *image, unsigned char *out);

/* Whether each byte of each tensor is in one of the shards, and in no second one: REFIT_ERR_INVALID
 * names a tensor and its ranks, which are the places in the list. */
refit_status rft_shards_check(const rft_manifest *manifest, rft_want *const *shards, uint32_t ranks,
                              refit_error *error);

/* ---- Digests
 *
 * A tensor's digest is a sum over its words, so ranks add up what each has of it. A word that lies
 * across the border of two shards belongs to no single one: each says which bytes of it are its
 * own, and the words are put together from these.
 */

/* What the shard of one tensor adds to the sum of its digest. `bytes` are the shard's, one after
 * the other. Words of which it has a part are appended to `words`, RFT_WORD_BYTES each.
 * REFIT_ERR_HOST_MEMORY. */
refit_status rft_shard_sum(const rft_want *shard, uint32_t tensor, const unsigned char *bytes,
                           uint64_t *sum, rft_bytes *words, refit_error *error);

/* Adds the words that all ranks have said to `sums`, one a tensor of the manifest. `words` is
 * sorted on the way. REFIT_ERR_PROTOCOL: one is of no tensor. */
refit_status rft_shards_add_words(const rft_manifest *manifest, rft_bytes *words, uint64_t *sums,
                                  refit_error *error);

#endif
