/* The partition: blocks cover every byte of every tensor once, frames every block in order. */
#include "tensor_samples.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

/* Originals lie in order, aligned, none over another; a tied one lies where its original does. */
static void check_offsets(const rft_manifest *manifest)
{
    uint64_t end = 0;
    uint64_t payload = 0;
    uint32_t originals = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) {
            assert_int_equal(tensor->offset, manifest->tensors[tensor->alias_of].offset);
            assert_int_equal(tensor->blocks, 0);
            continue;
        }
        assert_int_equal(tensor->offset % RFT_TENSOR_ALIGNMENT, 0);
        assert_true(tensor->offset >= end && tensor->offset - end < RFT_TENSOR_ALIGNMENT);
        end = tensor->offset + tensor->bytes;
        payload += tensor->bytes;
        originals++;
    }
    assert_true(end <= manifest->store_bytes);
    assert_int_equal(manifest->store_bytes % RFT_TENSOR_ALIGNMENT, 0);
    assert_int_equal(manifest->payload_bytes, payload);
    assert_int_equal(manifest->originals, originals);
}

/* Returns the number of the block after the tensor's last one. */
static uint32_t check_tensor_blocks(const rft_manifest *manifest, uint32_t index, uint32_t next)
{
    const rft_manifest_tensor *tensor = &manifest->tensors[index];
    uint64_t covered = 0;
    uint32_t bits = refit_dtype_bits(tensor->dtype);
    assert_int_equal(tensor->block_bytes * 8, (uint64_t)RFT_BLOCK_ELEMENTS * bits);
    assert_true(tensor->blocks == 0 || tensor->first_block == next);
    for (uint32_t i = 0; i < tensor->blocks; i++, next++) {
        const rft_block *block = &manifest->blocks[next];
        assert_int_equal(block->tensor, index);
        assert_int_equal(block->tensor_offset, covered);
        assert_int_equal(block->tensor_offset % 8, 0);
        assert_int_equal(block->offset, tensor->offset + covered);
        assert_true(block->bytes > 0 && block->bytes <= tensor->block_bytes);
        assert_true(block->bytes == tensor->block_bytes || i + 1 == tensor->blocks);
        covered += block->bytes;
    }
    assert_int_equal(covered, tensor->alias_of == REFIT_NO_ALIAS ? tensor->bytes : 0);
    return next;
}

static void check_blocks(const rft_manifest *manifest)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < manifest->count; i++)
        next = check_tensor_blocks(manifest, i, next);
    assert_int_equal(next, manifest->block_count);
}

/* A frame that could have taken the block after it would have. */
static void check_frame_is_full(const rft_manifest *manifest, const rft_frame_span *frame,
                                uint64_t frame_bytes)
{
    uint32_t next = frame->first_block + frame->blocks;
    if (next == manifest->block_count || frame->blocks == RFT_FRAME_BLOCKS) return;
    const rft_block *block = &manifest->blocks[next];
    assert_true(block->offset + block->bytes - frame->offset > frame_bytes);
}

static void check_frames(const rft_manifest *manifest, uint64_t frame_bytes)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        const rft_frame_span *frame = &manifest->frames[i];
        assert_int_equal(frame->first_block, next);
        assert_true(frame->blocks > 0 && frame->blocks <= RFT_FRAME_BLOCKS);
        assert_true(frame->bytes <= frame_bytes || frame->blocks == 1);
        next += frame->blocks;
        const rft_block *last = &manifest->blocks[next - 1];
        assert_int_equal(frame->offset, manifest->blocks[frame->first_block].offset);
        assert_int_equal(frame->offset + frame->bytes, last->offset + last->bytes);
        check_frame_is_full(manifest, frame, frame_bytes);
    }
    assert_int_equal(next, manifest->block_count);
}

static void check_manifest(const refit_tensor *tensors, uint32_t count, uint64_t frame_bytes)
{
    rft_manifest *manifest = sample_manifest(tensors, count, frame_bytes);
    check_offsets(manifest);
    check_blocks(manifest);
    check_frames(manifest, frame_bytes);
    rft_manifest_close(manifest);
}

TEST(random_manifests_are_cut_exactly)
{
    uint64_t seed = 11;
    for (int round = 0; round < 300; round++) {
        refit_tensor tensors[64];
        uint32_t count = (uint32_t)(1 + seeded_below(&seed, 64));
        uint64_t most = UINT64_C(1) << seeded_below(&seed, 22);
        sample_tensors(&seed, tensors, count, most);
        check_manifest(tensors, count, 1 + seeded_below(&seed, 1 << 20));
    }
}

TEST(block_edges_are_exact)
{
    for (uint32_t dtype = 1; dtype <= 20; dtype++) {
        for (uint64_t elements = 65535; elements <= 65537; elements++) {
            refit_tensor tensor = sample_tensor("w", (refit_dtype)dtype, 1, elements, 0);
            check_manifest(&tensor, 1, 65536);
            rft_manifest *manifest = sample_manifest(&tensor, 1, 65536);
            assert_int_equal(manifest->block_count, elements <= 65536 ? 1 : 2);
            rft_manifest_close(manifest);
        }
    }
}

TEST(a_frame_has_at_most_1024_blocks)
{
    static refit_tensor many[1100];
    static char names[1100][4];
    for (uint32_t i = 0; i < 1100; i++) {
        names[i][0] = (char)('a' + i % 11);
        names[i][1] = (char)('a' + i / 11 % 10);
        names[i][2] = (char)('a' + i / 110);
        many[i] = sample_tensor(names[i], REFIT_U8, 1, 1, 0);
    }
    check_manifest(many, 1100, 1 << 20);
    rft_manifest *manifest = sample_manifest(many, 1100, 1 << 20);
    assert_int_equal(manifest->frame_count, 2);
    assert_int_equal(manifest->frames[0].blocks, RFT_FRAME_BLOCKS);
    rft_manifest_close(manifest);
}

int main(void)
{
    return test_run("partition");
}
