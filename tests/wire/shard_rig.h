/* shard_rig: tensors that ranks divide, each in another way, and who has which byte of them. */
#ifndef SHARD_RIG_H
#define SHARD_RIG_H

#include "wire/shard.h"

#define SHARD_RIG_MOST 5u /* ranks */

typedef struct shard_rig {
    uint64_t seed;
    rft_manifest *manifest;
    uint32_t ranks;
    unsigned char *owners; /* per byte of an image: a bit for each rank that has it */
    rft_want *shards[SHARD_RIG_MOST];
} shard_rig;

/* Each byte of each tensor is of one rank; of a tensor a rank has one box at most. */
void shard_rig_open(shard_rig *rig, uint64_t seed);
void shard_rig_close(shard_rig *rig);

/* The shards once more, from `owners`. */
void shard_rig_follow(shard_rig *rig);

/* A part of the rank's shard, as a want of `manifest`, which is the rig's or a copy of it. */
rft_want *shard_rig_part(shard_rig *rig, uint32_t rank, const rft_manifest *manifest);

/* The bytes of a tensor that a want has, one after the other, in memory that ends where they do:
 * free it. */
unsigned char *shard_rig_cut(const rft_want *want, uint32_t tensor, const unsigned char *image,
                             uint64_t *count);

/* Per byte of an image: 1 if it is wanted. Free it. */
unsigned char *shard_rig_map(const rft_want *want);

#endif
