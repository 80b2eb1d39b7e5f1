/* The version that fuzz_frame assembles, for the target and for the program that writes its seeds.
 */
#ifndef FRAME_MANIFEST_H
#define FRAME_MANIFEST_H

#include "fuzz.h"
#include "wire/manifest.h"

#define FRAME_TENSORS   7u
#define FRAME_BASE_BYTE 0x5a /* of all of its base */

/* Six blocks in three frames, of three, one and two. */
static inline rft_manifest *frame_manifest_open(void)
{
    const rft_limits limits = {.tensors = FRAME_TENSORS,
                               .rank = 8,
                               .name_bytes = 16,
                               .message_bytes = 4096,
                               .manifest_bytes = 4096,
                               .frame_bytes = 1 << 20,
                               .version_bytes = 1 << 20,
                               .blocks = 1 << 10,
                               .window = 8};
    const refit_tensor tensors[FRAME_TENSORS] = {
        {sizeof(refit_tensor), "odd", REFIT_U8, 1, {5}, 5, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "four", REFIT_F4, 1, {65537}, 32769, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "empty", REFIT_F32, 1, {0}, 0, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tied", REFIT_U8, 1, {5}, 5, 0},
        {sizeof(refit_tensor), "whole", REFIT_F4, 1, {65536}, 32768, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tail", REFIT_F32, 1, {100}, 400, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "half", REFIT_BF16, 1, {300}, 600, REFIT_NO_ALIAS},
    };
    rft_manifest *manifest;
    FUZZ_REQUIRE(rft_manifest_open(tensors, FRAME_TENSORS, 32840, &limits, &manifest, NULL) ==
                 REFIT_OK);
    FUZZ_REQUIRE(manifest->block_count == 6 && manifest->frame_count == 3);
    return manifest;
}

#endif
