/* Manifests: every rule is held, for a caller's list and for a peer's; both ends get the same. */
#include <stdlib.h>

#include <refit/host.h>

#include "tensor_samples.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire_samples.h"

#define FRAME 65536u

static refit_status open_list(const refit_tensor *tensors, uint32_t count, const rft_limits *limits)
{
    rft_manifest *manifest = NULL;
    refit_status status = rft_manifest_open(tensors, count, FRAME, limits, &manifest, NULL);
    assert_true((status == REFIT_OK) == (manifest != NULL));
    rft_manifest_close(manifest);
    return status;
}

/* What a peer without scruples would send: the list as it is, unchecked. */
static rft_bytes encode_list(const refit_tensor *tensors, uint32_t count)
{
    rft_limits wide = sample_limits();
    rft_bytes out = {0};
    for (uint32_t i = 0; i < count; i++) {
        const refit_tensor *from = &tensors[i];
        rft_listed_tensor listed = {
            .name = rft_view_text(from->name),
            .dtype = (uint32_t)from->dtype,
            .original = from->alias_of == REFIT_NO_ALIAS ? 0 : from->alias_of + 1,
            .shape.rank = from->rank,
            .bytes = from->bytes,
        };
        memcpy(listed.shape.at, from->shape, sizeof from->shape);
        assert_ok(rft_tensor_list_append(&listed, &wide, &out, NULL));
    }
    return out;
}

static refit_status decode_list(const refit_tensor *tensors, uint32_t count,
                                const rft_limits *limits)
{
    rft_bytes encoded = encode_list(tensors, count);
    rft_manifest *manifest = NULL;
    refit_status status =
        rft_manifest_decode(rft_bytes_view(&encoded), FRAME, limits, &manifest, NULL);
    assert_true((status == REFIT_OK) == (manifest != NULL));
    rft_manifest_close(manifest);
    rft_bytes_close(&encoded);
    return status;
}

static void assert_list_refused(const refit_tensor *tensors, uint32_t count)
{
    rft_limits limits = sample_limits();
    assert_invalid(open_list(tensors, count, &limits));
    assert_int_equal(decode_list(tensors, count, &limits), REFIT_ERR_PROTOCOL);
}

static void assert_list_accepted(const refit_tensor *tensors, uint32_t count)
{
    rft_limits limits = sample_limits();
    assert_ok(open_list(tensors, count, &limits));
    assert_ok(decode_list(tensors, count, &limits));
}

static void assert_list_limited(const refit_tensor *tensors, uint32_t count,
                                const rft_limits *limits)
{
    assert_list_accepted(tensors, count);
    assert_int_equal(open_list(tensors, count, limits), REFIT_ERR_LIMIT);
    assert_int_equal(decode_list(tensors, count, limits), REFIT_ERR_LIMIT);
}

TEST(a_manifest_of_no_tensors_is_refused)
{
    assert_list_refused(NULL, 0);
}

TEST(bytes_must_be_those_of_the_shape)
{
    refit_tensor tensor = sample_tensor("w", REFIT_BF16, 2, 3, 5);
    assert_list_accepted(&tensor, 1);
    tensor.bytes++;
    assert_list_refused(&tensor, 1);
    tensor.bytes -= 2;
    assert_list_refused(&tensor, 1);
}

TEST(small_elements_are_rounded_up_to_bytes)
{
    refit_tensor tensors[] = {
        sample_tensor("four", REFIT_F4, 1, 3, 0),
        sample_tensor("six", REFIT_F6_E2M3, 1, 3, 0),
        sample_tensor("scalar", REFIT_F6_E3M2, 0, 0, 0),
    };
    assert_int_equal(tensors[0].bytes, 2);
    assert_int_equal(tensors[1].bytes, 3);
    assert_int_equal(tensors[2].bytes, 1);
    assert_list_accepted(tensors, 3);
}

TEST(a_shape_that_overflows_is_refused)
{
    refit_tensor tensor = sample_tensor("w", REFIT_F32, 2, 1, 1);
    tensor.shape[0] = UINT64_C(1) << 32;
    tensor.shape[1] = UINT64_C(1) << 32;
    tensor.bytes = 0;
    assert_list_refused(&tensor, 1);
    tensor.shape[0] = UINT64_MAX;
    tensor.shape[1] = UINT64_MAX;
    assert_list_refused(&tensor, 1);
}

/* Its bits are more than 64 bits can count; its bytes are not. */
TEST(a_tensor_of_half_the_addresses_is_above_a_limit)
{
    rft_manifest *manifest = NULL;
    refit_config config;
    refit_config_init(&config, sizeof config);
    rft_limits limits = rft_limits_from(&config);
    refit_tensor tensor = sample_tensor("w", REFIT_F32, 2, 1, 1);
    tensor.shape[0] = UINT64_C(1) << 61;
    tensor.bytes = UINT64_C(1) << 63;
    assert_refused(rft_manifest_open(&tensor, 1, 1 << 20, &limits, &manifest, error),
                   REFIT_ERR_LIMIT, "limits.version_bytes");
    assert_null(manifest);
}

static size_t largest; /* that was asked for */

static void *note_allocate(void *user, size_t bytes)
{
    (void)user;
    if (bytes > largest) largest = bytes;
    return malloc(bytes);
}

static void *note_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    if (bytes > largest) largest = bytes;
    return realloc(block, bytes);
}

static void note_release(void *user, void *block)
{
    (void)user;
    free(block);
}

/* A hundred bytes that name a tensor of a terabyte are checked before tables are made for it. */
TEST(more_than_the_machine_has_is_refused_before_memory_is_taken)
{
    const refit_allocator noting = {sizeof noting, note_allocate, note_reallocate, note_release,
                                    NULL};
    refit_config config;
    refit_error error;
    rft_bytes encoded = {0};
    rft_manifest *manifest = NULL;
    refit_config_init(&config, sizeof config);
    rft_limits limits = rft_limits_from(&config);
    rft_listed_tensor tensor = {.name = rft_view_text("w"),
                                .dtype = REFIT_F32,
                                .shape = {.rank = 1, .at = {UINT64_C(1) << 38}},
                                .bytes = UINT64_C(1) << 40};
    limits.memory_bytes = UINT64_C(64) << 30;
    assert_ok(refit_set_allocator(&noting));
    assert_ok(rft_tensor_list_append(&tensor, &limits, &encoded, &error));
    largest = 0;
    assert_int_equal(
        rft_manifest_decode(rft_bytes_view(&encoded), 1 << 20, &limits, &manifest, &error),
        REFIT_ERR_HOST_MEMORY);
    assert_says(&error, "more memory than this machine has, 68719476736 bytes");
    assert_true(largest > 0 && largest < 4096);
    rft_bytes_close(&encoded);
    assert_ok(refit_set_allocator(NULL));
}

/* A list is stepped through by that size: it is looked at before anything after it is. */
TEST(a_size_that_no_struct_has_is_refused)
{
    static const size_t sizes[] = {0, 8, sizeof(refit_tensor) + 1, 1 << 20, SIZE_MAX};
    rft_limits limits = sample_limits();
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        refit_tensor tensors[2] = {sample_tensor("v", REFIT_F32, 1, 4, 1),
                                   sample_tensor("w", REFIT_F32, 1, 4, 1)};
        tensors[0].size = sizes[i];
        assert_invalid(open_list(tensors, 2, &limits));
    }
}

/* Nothing times anything is nothing, whichever comes first. */
TEST(an_empty_tensor_is_accepted)
{
    refit_tensor tensor = sample_tensor("w", REFIT_F32, 3, 0, 7);
    tensor.shape[2] = UINT64_MAX;
    tensor.bytes = 0;
    assert_list_accepted(&tensor, 1);
    tensor.shape[0] = UINT64_MAX;
    tensor.shape[2] = 0;
    assert_list_accepted(&tensor, 1);
    rft_manifest *manifest = sample_manifest(&tensor, 1, FRAME);
    assert_int_equal(manifest->block_count, 0);
    assert_int_equal(manifest->frame_count, 0);
    assert_int_equal(manifest->payload_bytes, 0);
    assert_int_equal(manifest->store_bytes, RFT_TENSOR_ALIGNMENT);
    rft_manifest_close(manifest);
}

TEST(unknown_dtypes_are_refused)
{
    refit_tensor tensor = sample_tensor("w", REFIT_U8, 1, 1, 0);
    tensor.dtype = (refit_dtype)0;
    assert_list_refused(&tensor, 1);
    tensor.dtype = (refit_dtype)21;
    assert_list_refused(&tensor, 1);
}

TEST(names_must_be_text)
{
    const char *const bad[] = {"", "two\nlines", "\xff", "tab\t", "\x7f"};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        refit_tensor tensor = sample_tensor(bad[i], REFIT_U8, 1, 1, 0);
        assert_list_refused(&tensor, 1);
    }
    refit_tensor good = sample_tensor("\xe5\xb1\x82.\xce\xb3", REFIT_U8, 1, 1, 0);
    assert_list_accepted(&good, 1);
}

/* A NUL inside a name that travels must not make another name of it. */
TEST(a_name_with_a_nul_is_refused)
{
    rft_limits limits = sample_limits();
    rft_listed_tensor listed = {
        .name = bytes_view("a\0b", 3), .dtype = REFIT_U8, .shape = {1, {1}}, .bytes = 1};
    rft_bytes encoded = {0};
    assert_ok(rft_tensor_list_append(&listed, &limits, &encoded, NULL));
    rft_manifest *manifest;
    assert_int_equal(rft_manifest_decode(rft_bytes_view(&encoded), FRAME, &limits, &manifest, NULL),
                     REFIT_ERR_PROTOCOL);
    rft_bytes_close(&encoded);
}

TEST(names_must_be_unique)
{
    refit_tensor tensors[] = {
        sample_tensor("b", REFIT_U8, 1, 1, 0),
        sample_tensor("a", REFIT_U8, 1, 1, 0),
        sample_tensor("b", REFIT_I8, 1, 2, 0),
    };
    assert_list_accepted(tensors, 2);
    assert_list_refused(tensors, 3);
}

TEST(ties_name_an_original_of_the_same_form)
{
    refit_tensor tensors[] = {
        sample_tensor("tied", REFIT_BF16, 1, 8, 0),
        sample_tensor("original", REFIT_BF16, 2, 4, 2),
        sample_tensor("other", REFIT_F16, 1, 8, 0),
    };
    tensors[0].alias_of = 1;
    assert_list_accepted(tensors, 3);
    tensors[0].alias_of = 3;
    assert_list_refused(tensors, 3);
    tensors[0].alias_of = 0;
    assert_list_refused(tensors, 3);
    tensors[0].alias_of = 2;
    assert_list_refused(tensors, 3);
    tensors[0].alias_of = 1;
    tensors[1].shape[0] = 5;
    tensors[1].bytes = 20;
    assert_list_refused(tensors, 3);
    tensors[1] = sample_tensor("original", REFIT_BF16, 1, 8, 0);
    tensors[2] = sample_tensor("other", REFIT_BF16, 1, 8, 0);
    tensors[1].alias_of = 2;
    assert_list_refused(tensors, 3);
}

TEST(limits_are_held)
{
    refit_tensor tensors[] = {
        sample_tensor("name", REFIT_U8, 2, 100, 10),
        sample_tensor("other", REFIT_U8, 1, 1, 0),
    };
    rft_limits tight[7];
    for (size_t i = 0; i < COUNT_OF(tight); i++)
        tight[i] = sample_limits();
    tight[0].tensors = 1;
    tight[1].rank = 1;
    tight[2].name_bytes = 3;
    tight[3].version_bytes = 1087; /* 1000 bytes take 1024, and one more takes 64 */
    tight[4].blocks = 1;
    tight[5].frame_bytes = FRAME - 1;
    tight[6].manifest_bytes = 50;
    for (size_t i = 0; i < COUNT_OF(tight); i++)
        assert_list_limited(tensors, 2, &tight[i]);
}

TEST(a_block_above_the_frame_limit_is_refused)
{
    refit_tensor tensor = sample_tensor("w", REFIT_F64, 1, 65536, 0);
    rft_limits limits = sample_limits();
    limits.frame_bytes = 524287;
    assert_list_limited(&tensor, 1, &limits);
}

TEST(sizes_that_would_wrap_are_refused)
{
    refit_tensor tensors[] = {
        sample_tensor("a", REFIT_U8, 1, UINT64_MAX / 8, 0),
        sample_tensor("b", REFIT_U8, 1, UINT64_MAX / 8, 0),
    };
    tensors[0].bytes = tensors[1].bytes = UINT64_MAX / 8;
    rft_limits limits = sample_limits();
    assert_int_equal(open_list(tensors, 2, &limits), REFIT_ERR_LIMIT);
    limits.version_bytes = UINT64_MAX;
    assert_int_equal(open_list(tensors, 2, &limits), REFIT_ERR_LIMIT);
}

/* Four bits an element: a few bytes of manifest that would make gigabytes of tables. */
TEST(blocks_beyond_the_limit_take_no_memory)
{
    refit_tensor tensor = sample_tensor("w", REFIT_F4, 1, UINT64_C(1) << 42, 0);
    rft_limits limits = sample_limits();
    limits.version_bytes = UINT64_MAX;
    limits.blocks = (1u << 26) - 1;
    failing_alloc_begin(0); /* counts: nothing is held afterwards */
    assert_int_equal(open_list(&tensor, 1, &limits), REFIT_ERR_LIMIT);
    assert_int_equal(decode_list(&tensor, 1, &limits), REFIT_ERR_LIMIT);
    (void)failing_alloc_end();
}

TEST(frames_of_nothing_are_refused)
{
    refit_tensor tensor = sample_tensor("w", REFIT_U8, 1, 1, 0);
    rft_limits limits = sample_limits();
    rft_manifest *manifest;
    assert_invalid(rft_manifest_open(&tensor, 1, 0, &limits, &manifest, NULL));
}

TEST(bad_structs_are_refused)
{
    rft_limits limits = sample_limits();
    refit_tensor tensors[] = {
        sample_tensor("a", REFIT_U8, 1, 1, 0),
        sample_tensor("b", REFIT_U8, 1, 1, 0),
    };
    assert_invalid(open_list(NULL, 1, &limits));
    tensors[1].size = 0;
    assert_invalid(open_list(tensors, 2, &limits));
    tensors[0].size = 8;
    assert_invalid(open_list(tensors, 1, &limits));
    tensors[0] = sample_tensor(NULL, REFIT_U8, 1, 1, 0);
    assert_invalid(open_list(tensors, 1, &limits));
    tensors[0] = sample_tensor("a", REFIT_U8, 9, 1, 1);
    assert_invalid(open_list(tensors, 1, &limits));
}

/* A caller compiled against a later, larger struct. */
TEST(larger_structs_are_stepped_over)
{
    struct {
        refit_tensor tensor;
        uint64_t later;
    } list[2] = {{sample_tensor("a", REFIT_U8, 1, 1, 0), 1},
                 {sample_tensor("b", REFIT_F32, 1, 2, 0), 2}};
    list[0].tensor.size = list[1].tensor.size = sizeof list[0];
    rft_manifest *manifest = sample_manifest(&list[0].tensor, 2, FRAME);
    assert_string_equal(manifest->tensors[1].name, "b");
    assert_int_equal(manifest->payload_bytes, 9);
    rft_manifest_close(manifest);
}

static void assert_manifests_equal(const rft_manifest *a, const rft_manifest *b)
{
    assert_int_equal(a->count, b->count);
    assert_int_equal(a->originals, b->originals);
    assert_int_equal(a->block_count, b->block_count);
    assert_int_equal(a->frame_count, b->frame_count);
    assert_int_equal(a->store_bytes, b->store_bytes);
    assert_int_equal(a->payload_bytes, b->payload_bytes);
    assert_true(rft_digest128_equal(&a->digest, &b->digest));
    assert_memory_equal(a->frames, b->frames, a->frame_count * sizeof *a->frames);
    for (uint32_t i = 0; i < a->count; i++) {
        refit_tensor left;
        refit_tensor right;
        rft_manifest_describe(a, i, &left);
        rft_manifest_describe(b, i, &right);
        assert_string_equal(left.name, right.name);
        left.name = right.name = NULL;
        assert_memory_equal(left.shape, right.shape, sizeof left.shape);
        assert_int_equal(left.dtype, right.dtype);
        assert_int_equal(left.rank, right.rank);
        assert_int_equal(left.bytes, right.bytes);
        assert_int_equal(left.alias_of, right.alias_of);
        assert_int_equal(a->tensors[i].offset, b->tensors[i].offset);
    }
}

TEST(both_ends_get_the_same)
{
    uint64_t seed = 3;
    rft_limits limits = sample_limits();
    for (int round = 0; round < 50; round++) {
        refit_tensor tensors[40];
        uint32_t count = (uint32_t)(1 + seeded_below(&seed, 40));
        sample_tensors(&seed, tensors, count, 300000);
        rft_manifest *here = sample_manifest(tensors, count, FRAME);
        rft_manifest *there;
        assert_ok(
            rft_manifest_decode(rft_bytes_view(&here->encoded), FRAME, &limits, &there, NULL));
        assert_manifests_equal(here, there);
        rft_manifest_close(there);
        rft_manifest_close(here);
    }
}

TEST(a_changed_list_has_another_digest)
{
    refit_tensor tensor = sample_tensor("w", REFIT_U8, 2, 4, 3);
    rft_manifest *one = sample_manifest(&tensor, 1, FRAME);
    tensor.shape[0] = 3;
    tensor.shape[1] = 4;
    rft_manifest *two = sample_manifest(&tensor, 1, FRAME);
    assert_false(rft_digest128_equal(&one->digest, &two->digest));
    rft_manifest_close(one);
    rft_manifest_close(two);
}

TEST(every_name_is_found)
{
    uint64_t seed = 9;
    refit_tensor tensors[64];
    sample_tensors(&seed, tensors, 64, 10);
    rft_manifest *manifest = sample_manifest(tensors, 64, FRAME);
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(rft_manifest_find(manifest, tensors[i].name), i);
    assert_int_equal(rft_manifest_find(manifest, "layer.64.weight"), UINT32_MAX);
    assert_int_equal(rft_manifest_find(manifest, ""), UINT32_MAX);
    rft_manifest_close(manifest);
}

TEST(a_tensor_is_described_whole)
{
    refit_tensor tensors[] = {
        sample_tensor("w", REFIT_BF16, 2, 7, 5),
        sample_tensor("tied", REFIT_BF16, 1, 35, 0),
    };
    tensors[1].alias_of = 0;
    rft_manifest *manifest = sample_manifest(tensors, 2, FRAME);
    refit_tensor out = {0};
    rft_manifest_describe(manifest, 1, &out);
    assert_int_equal(out.size, sizeof out);
    assert_string_equal(out.name, "tied");
    assert_int_equal(out.bytes, 70);
    assert_int_equal(out.alias_of, 0);
    assert_int_equal(out.rank, 1);
    assert_int_equal(manifest->originals, 1);
    assert_int_equal(manifest->payload_bytes, 70);
    rft_manifest_close(manifest);
}

TEST(every_truncated_list_is_refused_or_shorter)
{
    uint64_t seed = 4;
    rft_limits limits = sample_limits();
    refit_tensor tensors[6];
    sample_tensors(&seed, tensors, 6, 1000);
    rft_bytes encoded = encode_list(tensors, 6);
    for (size_t length = 0; length < encoded.count; length++) {
        rft_manifest *manifest;
        rft_view cut = bytes_view(encoded.data, length);
        refit_status status = rft_manifest_decode(cut, FRAME, &limits, &manifest, NULL);
        if (status != REFIT_OK) {
            assert_int_equal(status, REFIT_ERR_PROTOCOL);
            continue;
        }
        assert_true(manifest->count < 6); /* cut between two tensors: the digest tells */
        rft_manifest_close(manifest);
    }
    rft_bytes_close(&encoded);
}

TEST(every_changed_byte_is_refused_or_decoded)
{
    uint64_t seed = 4;
    rft_limits limits = sample_limits();
    limits.version_bytes = 1 << 20;
    refit_tensor tensors[4];
    sample_tensors(&seed, tensors, 4, 1000);
    rft_bytes encoded = encode_list(tensors, 4);
    for (size_t at = 0; at < encoded.count; at++) {
        unsigned char kept = encoded.data[at];
        for (unsigned change = 1; change < 256; change++) {
            rft_manifest *manifest = NULL;
            encoded.data[at] = (unsigned char)(kept ^ change);
            refit_status status =
                rft_manifest_decode(rft_bytes_view(&encoded), FRAME, &limits, &manifest, NULL);
            assert_true(status == REFIT_OK || status == REFIT_ERR_PROTOCOL ||
                        status == REFIT_ERR_LIMIT);
            rft_manifest_close(manifest);
        }
        encoded.data[at] = kept;
    }
    rft_bytes_close(&encoded);
}

TEST(version_digests_agree)
{
    refit_tensor tensors[] = {
        sample_tensor("a", REFIT_U8, 1, 9, 0),
        sample_tensor("b", REFIT_U8, 1, 9, 0),
    };
    rft_manifest *manifest = sample_manifest(tensors, 2, FRAME);
    const uint64_t numbers[] = {UINT64_C(0x0123456789abcdef), 2};
    unsigned char bytes[16];
    rft_put_u64(bytes, numbers[0]);
    rft_put_u64(bytes + 8, numbers[1]);
    rft_digest128 a = rft_version_digest(manifest, numbers);
    rft_digest128 b = rft_version_digest_encoded(manifest, bytes_view(bytes, 16));
    assert_true(rft_digest128_equal(&a, &b));
    unsigned char whole[32];
    memcpy(whole, manifest->digest.bytes, 16);
    memcpy(whole + 16, bytes, 16);
    rft_digest128 c = rft_digest128_of(bytes_view(whole, 32));
    assert_true(rft_digest128_equal(&a, &c));
    rft_manifest_close(manifest);
}

TEST(failed_allocations_are_errors)
{
    refit_tensor tensors[] = {
        sample_tensor("a", REFIT_U8, 1, 200000, 0),
        sample_tensor("b", REFIT_U8, 1, 9, 0),
    };
    rft_limits limits = sample_limits();
    rft_bytes encoded = encode_list(tensors, 2);
    rft_bytes copy = {0};
    copy.data = malloc(encoded.count); /* not counted as refit's while the allocator changes */
    assert_non_null(copy.data);
    memcpy(copy.data, encoded.data, encoded.count);
    rft_view view = bytes_view(copy.data, encoded.count);
    rft_bytes_close(&encoded);
    for (int wire = 0; wire < 2; wire++) {
        for (uint64_t nth = 1;; nth++) {
            rft_manifest *manifest = NULL;
            failing_alloc_begin(nth);
            refit_status status =
                wire ? rft_manifest_decode(view, FRAME, &limits, &manifest, NULL)
                     : rft_manifest_open(tensors, 2, FRAME, &limits, &manifest, NULL);
            rft_manifest_close(manifest);
            if (!failing_alloc_end()) break;
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
    }
    free(copy.data);
}

/* ---- Element types: each has a name and a size, and is found by its name */

TEST(every_type_has_name_and_bits)
{
#define CHECK_DTYPE(name, number, bits)                                                            \
    do {                                                                                           \
        refit_dtype found;                                                                         \
        assert_string_equal(refit_dtype_name(REFIT_##name), #name);                                \
        assert_int_equal(refit_dtype_bits(REFIT_##name), bits);                                    \
        assert_ok(refit_dtype_parse(#name, &found));                                               \
        assert_int_equal(found, REFIT_##name);                                                     \
        assert_int_equal(found, number);                                                           \
    } while (0);
    REFIT_DTYPE_MAP(CHECK_DTYPE)
#undef CHECK_DTYPE
}

TEST(unknown_types_are_told)
{
    refit_dtype found = REFIT_F32;
    assert_null(refit_dtype_name((refit_dtype)0));
    assert_null(refit_dtype_name((refit_dtype)21));
    assert_int_equal(refit_dtype_bits((refit_dtype)0), 0);
    assert_int_equal(refit_dtype_parse("float32", &found), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_dtype_parse("", &found), REFIT_ERR_NOT_FOUND);
    assert_invalid(refit_dtype_parse(NULL, &found));
    assert_invalid(refit_dtype_parse("F32", NULL));
    assert_int_equal(found, REFIT_F32);
}

int main(void)
{
    return test_run("manifest");
}
