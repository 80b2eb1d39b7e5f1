/* Versions for tests. Built with the library's own manifest and digests, which have tests of their
 * own. */
#include "tests/support/sample_version.h"

#include <stdlib.h>

#include "kernels/digest.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

const refit_tensor *sample_tensors(void)
{
    static const refit_tensor tensors[SAMPLE_TENSORS] = {
        {sizeof(refit_tensor), "first", REFIT_U8, 1, {65536 * 2}, 65536 * 2, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "large", REFIT_U8, 2, {3, 65569}, 3 * 65569, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "empty", REFIT_F32, 2, {0, 5}, 0, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tied", REFIT_U8, 2, {3, 65569}, 3 * 65569, 1},
        {sizeof(refit_tensor), "scalar", REFIT_F64, 0, {0}, 8, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "halves", REFIT_F4, 1, {9}, 5, REFIT_NO_ALIAS},
    };
    return tensors;
}

/* In odd versions the first tensor is as in the version before, so that its blocks are `same`. */
static unsigned char sample_byte(uint64_t version, uint64_t offset)
{
    if (offset < 65536 * 2) version &= ~UINT64_C(1);
    return (unsigned char)(offset * 131 + (offset >> 8) * 7 + version * 29);
}

static void digest_tensors(sample_version *sample)
{
    const rft_manifest *manifest = sample->manifest;
    unsigned char *at = sample->digests;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        uint64_t sum = rft_digest_part(sample->image + tensor->offset, tensor->bytes, 0);
        rft_put_u64(at, rft_digest_finish(sum, tensor->bytes));
        at += 8;
    }
    rft_view digests = {sample->digests, (size_t)manifest->originals * 8};
    sample->digest = rft_version_digest_encoded(manifest, digests);
}

void sample_open(sample_version *sample, uint64_t version)
{
    refit_config config = quick_config();
    rft_limits limits = rft_limits_from(&config);
    *sample = (sample_version){.version = version};
    assert_ok(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, SAMPLE_FRAME_BYTES, &limits,
                                &sample->manifest, NULL));
    sample->image = calloc(1, sample->manifest->store_bytes);
    sample->digests = calloc(sample->manifest->originals, 8);
    assert_non_null(sample->image);
    assert_non_null(sample->digests);
    for (uint32_t i = 0; i < sample->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &sample->manifest->tensors[i];
        for (uint64_t at = tensor->offset; at < tensor->offset + tensor->bytes; at++)
            sample->image[at] = sample_byte(version, at);
    }
    digest_tensors(sample);
    /* Taken now, so that a test of failing allocations meets none of ours. */
    assert_ok(rft_bytes_reserve(&sample->modes, RFT_FRAME_BLOCKS, NULL));
    assert_ok(rft_bytes_reserve(&sample->scratch, SAMPLE_FRAME_BYTES, NULL));
}

void sample_close(sample_version *sample)
{
    rft_manifest_close(sample->manifest);
    free(sample->image);
    free(sample->digests);
    rft_bytes_close(&sample->modes);
    rft_bytes_close(&sample->scratch);
}

unsigned char *sample_same(const sample_version *sample, const sample_version *base)
{
    unsigned char *same = calloc(sample->manifest->block_count, 1);
    assert_non_null(same);
    for (uint32_t i = 0; i < sample->manifest->block_count; i++) {
        const rft_block *block = &sample->manifest->blocks[i];
        same[i] =
            memcmp(sample->image + block->offset, base->image + block->offset, block->bytes) == 0;
    }
    return same;
}

rft_message sample_welcome(uint64_t epoch, const char *probe)
{
    rft_message message = {.kind = RFT_WELCOME};
    refit_config config = quick_config();
    message.as.welcome.protocol = RFT_PROTOCOL;
    message.as.welcome.epoch = epoch;
    message.as.welcome.frame_bytes = SAMPLE_FRAME_BYTES;
    message.as.welcome.window = 4;
    message.as.welcome.heartbeat_ms = config.broadcast_heartbeat_ms;
    message.as.welcome.heartbeat_timeout_ms = config.broadcast_heartbeat_timeout_ms;
    message.as.welcome.probe = rft_view_text(probe);
    return message;
}

rft_message sample_manifest(const sample_version *sample, uint64_t epoch)
{
    rft_message message = {.kind = RFT_MANIFEST};
    message.as.manifest.epoch = epoch;
    message.as.manifest.digest = sample->manifest->digest;
    message.as.manifest.tensors = rft_bytes_view(&sample->manifest->encoded);
    return message;
}

rft_message sample_offer(const sample_version *sample, uint64_t epoch, uint64_t base,
                         const char *segment, uint64_t offset)
{
    rft_message message = {.kind = RFT_OFFER};
    const refit_config config = quick_config();
    message.as.offer.epoch = epoch;
    message.as.offer.version = sample->version;
    message.as.offer.base = base;
    message.as.offer.manifest = sample->manifest->digest;
    message.as.offer.bytes = sample->manifest->payload_bytes;
    message.as.offer.frames = sample->manifest->frame_count;
    message.as.offer.deadline_ms = config.broadcast_stage_timeout_ms;
    message.as.offer.segment = rft_view_text(segment);
    message.as.offer.segment_offset = offset;
    return message;
}

rft_view sample_places(const sample_version *sample, unsigned char *room)
{
    unsigned char *at = room;
    for (uint32_t i = 0; i < sample->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &sample->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        rft_put_u32(at, 0);
        rft_put_u64(at + 4, tensor->offset);
        at += RFT_PLACE_BYTES;
    }
    return (rft_view){room, (size_t)(at - room)};
}

rft_message sample_seal(const sample_version *sample)
{
    rft_message message = {.kind = RFT_SEAL};
    message.as.seal.version = sample->version;
    message.as.seal.digest = sample->digest;
    message.as.seal.tensors = (rft_view){sample->digests, (size_t)sample->manifest->originals * 8};
    return message;
}

rft_message sample_frame(sample_version *sample, uint32_t sequence, const unsigned char *same,
                         rft_view *payload)
{
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.version = sample->version;
    message.as.frame.sequence = sequence;
    rft_bytes_reset(&sample->modes);
    rft_bytes_reset(&sample->scratch);
    const rft_frame_source source = {.image = sample->image, .same = same};
    rft_frame frame;
    assert_ok(rft_frame_encode(sample->manifest, sequence, &source, &sample->modes,
                               &sample->scratch, &frame, NULL));
    *payload = frame.payload;
    message.as.frame.hash = frame.hash;
    message.as.frame.modes = rft_bytes_view(&sample->modes);
    return message;
}

rft_message sample_commit(const sample_version *sample)
{
    rft_message message = {.kind = RFT_COMMIT};
    message.as.commit.version = sample->version;
    return message;
}

rft_message sample_abort(const sample_version *sample)
{
    rft_message message = {.kind = RFT_ABORT};
    message.as.failed.version = sample->version;
    message.as.failed.code = REFIT_ERR_PEER;
    message.as.failed.kept = true;
    message.as.failed.reason = rft_view_text("another worker failed");
    return message;
}

rft_message sample_beat(uint64_t epoch)
{
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.held.epoch = epoch;
    return message;
}

rft_message sample_refuse(refit_status code, bool final)
{
    rft_message message = {.kind = RFT_REFUSE};
    message.as.refuse.code = (uint32_t)code;
    message.as.refuse.final = final;
    message.as.refuse.reason = rft_view_text("no room for you");
    return message;
}

rft_message sample_bye(void)
{
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.reason = rft_view_text("the trainer closed");
    return message;
}
