/*
 * Frames into an assembly. The input is a list of frames, five bytes and its block modes each:
 *
 *     flags | sequence | number of modes | bytes too many, signed | byte of the payload | modes…
 *
 * The payload is made here, because frames of real size would hide what matters from the fuzzer;
 * one flag says that it has the length that the blocks need, another that its hash is right.
 * However the frames come, nothing is written outside the image, and a version that is complete
 * must verify against the digests of the image that came of it.
 */
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "fuzz.h"
#include "kernels/digest.h"
#include "wire/assembly.h"

#define HEADER     5u
#define PAYLOAD    (1u << 16)
#define COUNT      6u
#define HAS_LENGTH 1u
#define HAS_HASH   2u
#define HAS_BASE   4u
#define STARTS     8u

typedef struct fixture {
    rft_manifest *manifest;
    rft_assembly *assembly;
    unsigned char *staging;
    unsigned char *base;
    unsigned char payload[PAYLOAD];
} fixture;

static rft_manifest *open_manifest(void)
{
    const rft_limits limits = {.tensors = COUNT,
                               .rank = 8,
                               .name_bytes = 16,
                               .message_bytes = 4096,
                               .manifest_bytes = 4096,
                               .frame_bytes = 1 << 20,
                               .version_bytes = 1 << 20,
                               .blocks = 1 << 10,
                               .window = 8};
    const refit_tensor tensors[COUNT] = {
        {sizeof(refit_tensor), "odd", REFIT_U8, 1, {5}, 5, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "four", REFIT_F4, 1, {65537}, 32769, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "empty", REFIT_F32, 1, {0}, 0, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tied", REFIT_U8, 1, {5}, 5, 0},
        {sizeof(refit_tensor), "whole", REFIT_F4, 1, {65536}, 32768, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tail", REFIT_F32, 1, {100}, 400, REFIT_NO_ALIAS},
    };
    rft_manifest *manifest;
    FUZZ_REQUIRE(rft_manifest_open(tensors, COUNT, 32840, &limits, &manifest, NULL) == REFIT_OK);
    FUZZ_REQUIRE(manifest->block_count == 5 && manifest->frame_count == 3);
    return manifest;
}

static void open_fixture(fixture *f)
{
    f->manifest = open_manifest();
    f->staging = calloc(1, f->manifest->store_bytes);
    f->base = calloc(1, f->manifest->store_bytes);
    FUZZ_REQUIRE(f->staging != NULL && f->base != NULL);
    memset(f->base, 0x5a, f->manifest->store_bytes);
    FUZZ_REQUIRE(rft_assembly_open(f->manifest, f->staging, NULL, &f->assembly, NULL) == REFIT_OK);
}

static void close_fixture(fixture *f)
{
    rft_assembly_close(f->assembly);
    rft_manifest_close(f->manifest);
    free(f->staging);
    free(f->base);
}

/* The length that such modes need, found another way than the assembly finds it. */
static size_t needed_bytes(const rft_manifest *manifest, uint32_t sequence, rft_view modes)
{
    if (sequence >= manifest->frame_count) return 0;
    const rft_frame_span *span = &manifest->frames[sequence];
    const unsigned char *mode = modes.data;
    size_t bytes = 0;
    bool dense = true;
    for (uint32_t i = 0; i < span->blocks && i < modes.count; i++) {
        dense = dense && mode[i] != RFT_BLOCK_SAME;
        if (mode[i] != RFT_BLOCK_SAME) bytes += manifest->blocks[span->first_block + i].bytes;
    }
    return dense ? span->bytes : bytes;
}

/* A copy of its own, so that a sanitizer sees a read past its end. */
static void take(fixture *f, const rft_message *frame, size_t count)
{
    unsigned char *exact = malloc(count == 0 ? 1 : count);
    FUZZ_REQUIRE(exact != NULL);
    memcpy(exact, f->payload, count);
    uint32_t before = rft_assembly_taken(f->assembly);
    refit_status status = rft_assembly_take(f->assembly, frame, (rft_view){exact, count}, NULL);
    uint32_t more = rft_assembly_taken(f->assembly) - before;
    FUZZ_REQUIRE(status == REFIT_OK ? more <= 1 : more == 0);
    FUZZ_REQUIRE(status == REFIT_OK || status == REFIT_ERR_PROTOCOL || status == REFIT_ERR_CORRUPT);
    free(exact);
}

/* Returns how many bytes of input the frame took. */
static size_t run_frame(fixture *f, const uint8_t *at, size_t left)
{
    size_t modes = at[2] < left - HEADER ? at[2] : left - HEADER;
    rft_message frame = {.kind = RFT_FRAME};
    frame.as.frame.version = 1;
    frame.as.frame.sequence = at[1];
    frame.as.frame.modes = (rft_view){at + HEADER, modes};
    size_t count = needed_bytes(f->manifest, at[1], frame.as.frame.modes);
    if ((at[0] & HAS_LENGTH) == 0) count += (size_t)(int8_t)at[3];
    if (count > PAYLOAD) count = PAYLOAD;
    memset(f->payload, at[4], count);
    frame.as.frame.hash = XXH3_64bits(f->payload, count) ^ ((at[0] & HAS_HASH) == 0 ? 1 : 0);
    if ((at[0] & STARTS) != 0)
        rft_assembly_reset(f->assembly, f->staging, (at[0] & HAS_BASE) != 0 ? f->base : NULL);
    take(f, &frame, count);
    return HEADER + modes;
}

static void check_complete(const fixture *f)
{
    uint64_t numbers[COUNT];
    unsigned char bytes[8 * COUNT];
    uint32_t next = 0;
    for (uint32_t i = 0; i < f->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &f->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        uint64_t sum = rft_digest_part(f->staging + tensor->offset, tensor->bytes, 0);
        numbers[next] = rft_digest_finish(sum, tensor->bytes);
        rft_put_u64(bytes + 8 * (size_t)next, numbers[next]);
        next++;
    }
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.digest = rft_version_digest(f->manifest, numbers);
    seal.as.seal.tensors = (rft_view){bytes, 8 * (size_t)next};
    FUZZ_REQUIRE(rft_assembly_verify(f->assembly, &seal, NULL) == REFIT_OK);
    FUZZ_REQUIRE(rft_image_verify(f->manifest, f->staging, &seal, NULL) == REFIT_OK);
    bytes[0] ^= 1;
    FUZZ_REQUIRE(rft_assembly_verify(f->assembly, &seal, NULL) == REFIT_ERR_CORRUPT);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fixture f;
    open_fixture(&f);
    while (size >= HEADER) {
        size_t used = run_frame(&f, data, size);
        data += used;
        size -= used;
    }
    if (rft_assembly_complete(f.assembly)) check_complete(&f);
    close_fixture(&f);
    return 0;
}
