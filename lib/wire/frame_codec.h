/*
 * frame_codec: a frame's gathered payload plane by plane, each of them compressed (zstd) where it
 * shrinks.
 *
 * What the blocks of a frame have in common compresses better together than what stands next to it
 * in a block. So the payload is taken apart into planes over the whole frame, one behind the other:
 * the directory of the sparse blocks, the six planes of kernels/delta.h, and the bytes of dense
 * blocks; in each the blocks' parts in their order. FRAME says in `planes` how long each is as it
 * travels, 4 bytes each: 0 where it is not compressed, and then as long as the blocks need.
 *
 * How long a plane is once it is unpacked follows from the block modes and from the planes before
 * it, and all of them together are no longer than the stretch of the image that the frame stands
 * for: memory is reserved for that, once, and never because a message says so.
 */
#ifndef RFT_FRAME_CODEC_H
#define RFT_FRAME_CODEC_H

#include "kernels/delta.h"
#include "wire/manifest.h"

#define RFT_PACK_PLANES (RFT_DELTA_PLANES + 2u)
#define RFT_PACK_BYTES  (RFT_PACK_PLANES * 4u) /* of FRAME's `planes` */

/* What one thread needs to pack and unpack frames. It takes memory as it is used, and keeps it. */
typedef struct rft_frame_codec rft_frame_codec;

/* `level` as zstd has them, 1 and up. REFIT_ERR_HOST_MEMORY */
refit_status rft_frame_codec_open(uint32_t level, rft_frame_codec **out, refit_error *error);
/* NULL is allowed. */
void rft_frame_codec_close(rft_frame_codec *codec);

/* Packs a gathered payload, as rft_frame_encode has made it. `*packed` is in the codec's memory
 * until its next use; it is empty if nothing shrinks or there is nothing, and `planes` says nothing
 * then. REFIT_ERR_HOST_MEMORY */
refit_status rft_frame_codec_pack(rft_frame_codec *codec, const rft_manifest *manifest,
                                  const rft_frame_span *span, const unsigned char *modes,
                                  rft_view payload, rft_view *packed,
                                  unsigned char planes[RFT_PACK_BYTES], refit_error *error);

/* The way back, from what came from elsewhere: `modes` has been checked. What is in `*payload` has
 * yet to be. REFIT_ERR_PROTOCOL, REFIT_ERR_HOST_MEMORY */
refit_status rft_frame_codec_unpack(rft_frame_codec *codec, const rft_manifest *manifest,
                                    const rft_frame_span *span, const unsigned char *modes,
                                    rft_view planes, rft_view packed, rft_view *payload,
                                    refit_error *error);

#endif
