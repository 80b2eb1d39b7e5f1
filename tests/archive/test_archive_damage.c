/*
 * Files that are not what was written: each is refused with a status and a sentence that names it,
 * none is read beyond its end, and none gives other weights.
 */
#include <stdatomic.h>
#include <unistd.h>
#include <xxhash.h>

#include <refit/host.h>

#include "archive/archive_format.h"
#include "archive_rig.h"
#include "tests/support/descriptors.h"

static refit_status check_alone(archive_rig *rig, const char *path, refit_error *error)
{
    refit_snapshot *snapshot = NULL;
    refit_status status = refit_snapshot_open(path, &rig->config, &snapshot, error);
    if (status == REFIT_OK) refit_snapshot_close(snapshot);
    return status;
}

static void assert_typed_refusal(refit_status status, const refit_error *error)
{
    bool typed = status == REFIT_ERR_CORRUPT || status == REFIT_ERR_INVALID ||
                 status == REFIT_ERR_UNSUPPORTED || status == REFIT_ERR_STALE;
    if (!typed) fail_msg("status %d: %s", (int)status, error->text);
    assert_true(error->text[0] != '\0');
    if (strstr(error->text, ".refit") == NULL) fail_msg("no file named: %s", error->text);
}

/* Alone, and as one of the files that version 2 needs. */
static void assert_file_refused(archive_rig *rig, const char *path)
{
    refit_error error;
    assert_typed_refusal(check_alone(rig, path, &error), &error);
    assert_typed_refusal(rig_check(rig, RIG_EPOCH, 2, &error), &error);
}

static void flip_bits(archive_rig *rig, uint32_t file, size_t step)
{
    kept_file kept = rig_take_file(rig, file);
    int descriptors = count_descriptors();
    for (size_t bit = 0; bit < 8 * kept.count; bit += step) {
        kept.bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
        rig_store(kept.path, kept.bytes, kept.count);
        assert_file_refused(rig, kept.path);
        kept.bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    assert_int_equal(count_descriptors(), descriptors);
    rig_put_back(&kept);
    rig_expect(rig, RIG_EPOCH, 2);
}

RIG_TEST(every_flipped_bit_is_found)
{
    rig_open_with(rig, 10, 2); /* an anchor and a delta, of some hundred bytes each */
    flip_bits(rig, 0, 1);
    flip_bits(rig, 1, 1);
}

RIG_TEST(flipped_bits_of_packed_files_are_found)
{
    rig_open_packed(rig, 4000, 2);
    assert_true(rig_info(rig, 0).frames_packed > 0 && rig_info(rig, 1).frames_packed > 0);
    flip_bits(rig, 0, 7); /* every byte, and every bit in turn */
    flip_bits(rig, 1, 7);
}

/* What stands in a frame, with right hashes: the planes of its only packed frame say otherwise. */
RIG_TEST(packed_frames_that_lie_are_refused)
{
    refit_error error;
    rig_open_packed(rig, 4000, 2);
    for (uint32_t file = 0; file < 2; file++) {
        kept_file kept = rig_take_file(rig, file);
        const unsigned char *bytes = kept.bytes;
        unsigned char *changed = malloc(kept.count);
        assert_non_null(changed);
        const size_t frame = RFT_ARCHIVE_HEADER_BYTES + (size_t)rft_get_u64(bytes + 96) +
                             RIG_ORIGINALS * (8 + RFT_ARCHIVE_CHANGE_BYTES) +
                             RFT_ARCHIVE_HASH_BYTES;
        const size_t hashed = RFT_ARCHIVE_FRAME_BYTES + rft_get_u32(bytes + frame + 4);
        for (uint32_t plane = 0; plane < RFT_PACK_PLANES; plane++) {
            const uint32_t length = rft_get_u32(bytes + frame + 24 + 4 * plane);
            const uint32_t lies[] = {length + 1, UINT32_MAX, 1, length > 1 ? length - 1 : 2};
            for (uint32_t i = 0; i < 4; i++) {
                memcpy(changed, bytes, kept.count);
                rft_put_u32(changed + frame + 24 + 4 * plane, lies[i]);
                rft_put_u64(changed + frame + hashed, XXH3_64bits(changed + frame, hashed));
                rig_store(kept.path, changed, kept.count);
                assert_int_equal(rig_check(rig, RIG_EPOCH, 2, &error), REFIT_ERR_CORRUPT);
            }
        }
        rig_put_back(&kept);
        free(changed);
    }
    rig_expect(rig, RIG_EPOCH, 2);
}

/* By its name it is a version of this archive; looked at alone it may be anything. */
RIG_TEST(a_version_that_is_no_file_of_an_archive_is_damaged)
{
    refit_archive *archive;
    refit_error error;
    refit_archive_info info = {.size = sizeof info};
    rig_open_with(rig, 10, 2);
    kept_file kept = rig_take_file(rig, 1);
    unsigned char garbage[300];
    memset(garbage, 0x5A, sizeof garbage);
    for (size_t count = 0; count <= sizeof garbage; count += 100) {
        rig_store(kept.path, garbage, count);
        assert_invalid(check_alone(rig, kept.path, &error));
        assert_int_equal(rig_check(rig, RIG_EPOCH, 2, &error), REFIT_ERR_CORRUPT);
        assert_ok(
            refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL));
        assert_int_equal(refit_archive_describe(archive, 1, &info, &error), REFIT_ERR_CORRUPT);
        assert_says(&error, ".refit: it is not a file of an archive");
        refit_archive_close(archive);
    }
    rig_put_back(&kept);
}

RIG_TEST(every_other_length_is_found)
{
    rig_open_with(rig, 10, 2);
    for (uint32_t file = 0; file < 2; file++) {
        kept_file kept = rig_take_file(rig, file);
        unsigned char *longer = calloc(1, kept.count + 4);
        assert_non_null(longer);
        memcpy(longer, kept.bytes, kept.count);
        for (size_t length = 0; length < kept.count + 4; length++) {
            if (length == kept.count) continue;
            rig_store(kept.path, longer, length);
            assert_file_refused(rig, kept.path);
        }
        rig_put_back(&kept);
        free(longer);
    }
}

RIG_TEST(a_missing_base_is_named)
{
    refit_error error;
    rig_open_with(rig, 10, 2);
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(unlink(rig_path(rig, 1)), 0);
    assert_int_equal(rig_check(rig, RIG_EPOCH, 3, &error), REFIT_ERR_NOT_FOUND);
    assert_says(&error, "version 3 builds on version 2");
    rig_expect(rig, RIG_EPOCH, 1);
    assert_int_equal(unlink(rig_path(rig, 0)), 0);
    assert_int_equal(rig_check(rig, RIG_EPOCH, 1, &error), REFIT_ERR_NOT_FOUND);
}

/* Another file under the name of file `index` of this archive. */
static void put_in_place_of(archive_rig *rig, uint32_t index, archive_rig *from, uint32_t other)
{
    size_t count;
    unsigned char *bytes = rig_load(rig_path(from, other), &count);
    rig_store(rig_path(rig, index), bytes, count);
    free(bytes);
}

RIG_TEST(a_base_of_another_chain_is_refused)
{
    archive_rig other = {0};
    rig_open_with(rig, 10, 2);
    rig_open(&other, 10);
    refit_archive_version one = rig_version(&other, RIG_EPOCH, 9);
    one.version = 1; /* the same trainer and number, other weights */
    rig_keep_this(&other, &one);
    put_in_place_of(rig, 0, &other, 0);
    assert_refused(rig_check(rig, RIG_EPOCH, 2, error), REFIT_ERR_STALE,
                   "builds on another version 1");
    rig_close(&other);
}

RIG_TEST(a_file_of_another_trainer_is_refused)
{
    archive_rig other = {0};
    rig_open_with(rig, 10, 2);
    rig_open(&other, 10);
    rig_keep(&other, RIG_OTHER, 1);
    put_in_place_of(rig, 0, &other, 0);
    assert_refused(rig_check(rig, RIG_EPOCH, 2, error), REFIT_ERR_STALE, "not what its name says");
    rig_close(&other);
}

/* Headers with a right hash that say what cannot be. */
typedef struct lie {
    size_t at;
    uint32_t bytes;
    uint64_t value;
    refit_status status;
} lie;

static void tell(unsigned char *bytes, const lie *what)
{
    for (uint32_t i = 0; i < what->bytes; i++)
        bytes[what->at + i] = (unsigned char)(what->value >> (8 * i));
    rft_put_u64(bytes + 168, XXH3_64bits(bytes, 168));
}

RIG_TEST(headers_that_lie_are_refused_before_memory_is_taken)
{
    static const lie lies[] = {
        {8, 4, 3, REFIT_ERR_UNSUPPORTED},
        {8, 4, 0, REFIT_ERR_UNSUPPORTED},
        {8, 4, 1, REFIT_ERR_CORRUPT},
        {12, 4, 6, REFIT_ERR_CORRUPT},
        {12, 4, UINT32_MAX, REFIT_ERR_LIMIT},
        {16, 4, 2, REFIT_ERR_CORRUPT},
        {16, 4, UINT32_MAX, REFIT_ERR_CORRUPT},
        {20, 4, 1, REFIT_ERR_CORRUPT},
        {20, 4, UINT32_MAX, REFIT_ERR_CORRUPT},
        {24, 4, 1, REFIT_ERR_CORRUPT},
        {28, 4, 0, REFIT_ERR_CORRUPT},
        {32, 8, 0, REFIT_ERR_CORRUPT},
        {40, 8, 0, REFIT_ERR_CORRUPT},
        {48, 8, 1, REFIT_ERR_CORRUPT},
        {56, 8, UINT64_MAX, REFIT_ERR_CORRUPT},
        {64, 8, 0, REFIT_ERR_INVALID},
        {64, 8, UINT64_MAX, REFIT_ERR_LIMIT},
        {72, 8, UINT64_MAX, REFIT_ERR_LIMIT},
        {72, 8, 1u << 29, REFIT_ERR_CORRUPT},
        {88, 8, UINT64_MAX, REFIT_ERR_CORRUPT},
        {96, 8, UINT64_MAX, REFIT_ERR_LIMIT},
        {96, 8, 1u << 19, REFIT_ERR_CORRUPT},
        {104, 8, UINT64_MAX, REFIT_ERR_CORRUPT},
        {104, 8, 8, REFIT_ERR_CORRUPT},
        {128, 1, 1, REFIT_ERR_CORRUPT},
        {160, 4, 1, REFIT_ERR_CORRUPT},
        {160, 4, UINT32_MAX, REFIT_ERR_CORRUPT},
        {164, 4, 1, REFIT_ERR_CORRUPT},
    };
    refit_error error;
    rig_open_with(rig, 10, 2);
    kept_file kept = rig_take_file(rig, 0);
    unsigned char *changed = malloc(kept.count);
    assert_non_null(changed);
    for (size_t i = 0; i < COUNT_OF(lies); i++) {
        memcpy(changed, kept.bytes, kept.count);
        tell(changed, &lies[i]);
        rig_store(kept.path, changed, kept.count);
        refit_status status = check_alone(rig, kept.path, &error);
        if (status == lies[i].status) continue;
        if (lies[i].at == 64) { /* whose fault it is, is the wire's to say */
            assert_true(status != REFIT_OK);
            continue;
        }
        fail_msg("lie %zu: status %d, %s", i, (int)status, error.text);
    }
    rig_put_back(&kept);
    free(changed);
}

/* ---- A list of tensors that promises more than there is */

static atomic_size_t asked; /* bytes, ever */

static void *count_allocate(void *user, size_t bytes)
{
    (void)user;
    atomic_fetch_add(&asked, bytes);
    return malloc(bytes);
}

static void *count_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    atomic_fetch_add(&asked, bytes);
    return realloc(block, bytes);
}

static void count_release(void *user, void *block)
{
    (void)user;
    free(block);
}

static void count_requests(bool on)
{
    const refit_allocator counter = {.size = sizeof counter,
                                     .allocate = count_allocate,
                                     .reallocate = count_reallocate,
                                     .release = count_release};
    atomic_store(&asked, 0);
    assert_ok(refit_set_allocator(on ? &counter : NULL));
}

/* An anchor of one packed frame, whose tensor has as many blocks as limits.blocks allows. Nothing
 * but its size is wrong. */
static size_t make_promise(const rft_limits *limits, uint64_t counted, unsigned char *out)
{
    const uint64_t bytes = (uint64_t)limits->blocks * RFT_BLOCK_ELEMENTS;
    rft_listed_tensor tensor = {.name = rft_view_text("w"), .dtype = REFIT_I8, .bytes = bytes};
    tensor.shape.rank = 1;
    tensor.shape.at[0] = bytes;
    rft_bytes list = {0};
    assert_ok(rft_tensor_list_append(&tensor, limits, &list, NULL));
    rft_archive_header header = {
        .format = RFT_ARCHIVE_FORMAT,
        .packed = 1,
        .tensors = 1,
        .frames = 1,
        .dense = (uint32_t)counted,
        .epoch = RIG_EPOCH,
        .version = 1,
        .frame_bytes = limits->frame_bytes,
        .weight_bytes = bytes,
        .elements = bytes,
        .changed = bytes,
        .manifest_bytes = list.count,
        .digest_bytes = 8,
        .manifest = rft_digest128_of((rft_view){list.data, list.count}),
    };
    header.file_bytes = RFT_ARCHIVE_HEADER_BYTES + list.count + 8 +
                        rft_archive_changes_bytes(&header) + RFT_ARCHIVE_FRAME_BYTES + 1 +
                        RFT_ARCHIVE_HASH_BYTES;
    memset(out, 0, header.file_bytes);
    rft_archive_header_encode(&header, out);
    memcpy(out + RFT_ARCHIVE_HEADER_BYTES, list.data, list.count);
    rft_bytes_close(&list);
    return (size_t)header.file_bytes;
}

TEST(a_short_file_takes_no_memory_for_many_blocks)
{
    static const uint64_t counts[] = {1, 0, UINT32_MAX};
    unsigned char file[1024];
    char path[] = "/tmp/refit-promise-XXXXXX.refit";
    int made = mkstemps(path, 6);
    assert_true(made >= 0);
    assert_int_equal(close(made), 0);
    refit_config config;
    refit_config_init(&config, sizeof config);
    const rft_limits limits = rft_limits_from(&config);
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        refit_error error;
        refit_snapshot *snapshot = NULL;
        size_t count = make_promise(&limits, counts[i], file);
        assert_true(count < 512);
        rig_store(path, file, count);
        count_requests(true);
        assert_typed_refusal(refit_snapshot_open(path, &config, &snapshot, &error), &error);
        size_t taken = atomic_load(&asked);
        count_requests(false);
        if (taken > 65536) fail_msg("%zu bytes were taken for a file of %zu", taken, count);
    }
    assert_int_equal(unlink(path), 0);
}

RIG_TEST(limits_hold_for_files)
{
    refit_error error;
    rig_open_with(rig, 10, 2);
    rig->config.limits_tensors = 3;
    assert_int_equal(rig_check(rig, RIG_EPOCH, 1, &error), REFIT_ERR_LIMIT);
    rig->config.limits_tensors = 1000;
    rig->config.limits_version_bytes = 90;
    assert_int_equal(rig_check(rig, RIG_EPOCH, 1, &error), REFIT_ERR_LIMIT);
    assert_says(&error, "limits.version_bytes");
}

int main(void)
{
    return test_run("archive_damage");
}
