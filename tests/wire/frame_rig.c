#include <stdlib.h>

#include "frame_rig.h"
#include "tensor_samples.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire_samples.h"

void frame_rig_open(frame_rig *f, uint64_t seed, uint64_t most_elements, const refit_tensor *last,
                    uint64_t frame_bytes)
{
    refit_tensor tensors[FRAME_RIG_TENSORS];
    *f = (frame_rig){.seed = seed};
    sample_tensors(&f->seed, tensors, FRAME_RIG_TENSORS - 1, most_elements);
    tensors[FRAME_RIG_TENSORS - 1] = *last;
    f->manifest =
        sample_manifest(tensors, FRAME_RIG_TENSORS, 1 + seeded_below(&f->seed, frame_bytes));
    f->base = sample_image(f->manifest, &f->seed);
    f->staging = malloc(f->manifest->store_bytes);
    f->same = calloc(f->manifest->block_count + 1, 1);
    assert_true(f->staging != NULL && f->same != NULL);
    memset(f->staging, 0xee, f->manifest->store_bytes);
}

void frame_rig_seal(frame_rig *f)
{
    for (uint32_t i = 0; i < f->manifest->block_count; i++) {
        const rft_block *block = &f->manifest->blocks[i];
        f->same[i] = memcmp(f->image + block->offset, f->base + block->offset, block->bytes) == 0;
    }
    f->seal = sample_seal(f->manifest, f->image, f->digests);
}

void frame_rig_assemble(frame_rig *f)
{
    assert_ok(rft_reassembly_open(f->manifest, f->staging, f->base, &f->reassembly, NULL));
}

void frame_rig_close(frame_rig *f)
{
    rft_frame_codec_close(f->codec);
    rft_reassembly_close(f->reassembly);
    rft_manifest_close(f->manifest);
    rft_bytes_close(&f->modes);
    rft_bytes_close(&f->scratch);
    free(f->base);
    free(f->image);
    free(f->staging);
    free(f->same);
}

rft_message frame_rig_encode(frame_rig *f, uint32_t sequence, const rft_frame_source *source,
                             rft_view *payload)
{
    rft_message frame = {.kind = RFT_FRAME};
    rft_frame made;
    assert_ok(rft_frame_encode(f->manifest, sequence, source, &f->modes, &f->scratch, &made, NULL));
    frame.as.frame.version = 1;
    frame.as.frame.sequence = sequence;
    frame.as.frame.hash = made.hash;
    frame.as.frame.modes = rft_bytes_view(&f->modes);
    if (made.packed) {
        memcpy(f->planes, made.planes, sizeof f->planes);
        frame.as.frame.planes = bytes_view(f->planes, sizeof f->planes);
    }
    *payload = made.payload;
    f->counts = made.counts;
    return frame;
}

void assert_staged(const frame_rig *f)
{
    assert_true(rft_reassembly_complete(f->reassembly));
    assert_ok(rft_reassembly_verify(f->reassembly, &f->seal, NULL));
    for (uint32_t i = 0; i < f->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &f->manifest->tensors[i];
        assert_memory_equal(f->staging + tensor->offset, f->image + tensor->offset, tensor->bytes);
    }
}

refit_status frame_rig_take_copy(frame_rig *f, const rft_message *frame, rft_view payload)
{
    unsigned char *exact = NULL;
    if (payload.data != NULL) {
        exact = malloc(payload.count + (payload.count == 0));
        assert_non_null(exact);
        memcpy(exact, payload.data, payload.count);
    }
    refit_status status =
        rft_reassembly_take(f->reassembly, frame, bytes_view(exact, payload.count), NULL);
    free(exact);
    return status;
}

void assert_frame_refused(frame_rig *f, const rft_message *frame, rft_view payload)
{
    unsigned char *before = malloc(f->manifest->store_bytes);
    assert_non_null(before);
    memcpy(before, f->staging, f->manifest->store_bytes);
    assert_int_equal(frame_rig_take_copy(f, frame, payload), REFIT_ERR_PROTOCOL);
    assert_memory_equal(before, f->staging, f->manifest->store_bytes);
    assert_int_equal(rft_reassembly_taken(f->reassembly), 0);
    free(before);
}
