/* A user's selection: which bytes of a manifest it stands for, element by element. */
#include <stdlib.h>

#include "tests/support/failing_alloc.h"
#include "tests/support/quick_config.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/selection.h"

#define TENSORS 6u
#define NAMED(text)                                                                                \
    {                                                                                              \
        .size = sizeof(refit_selection), .name = (text)                                            \
    }

static const refit_tensor tensors[TENSORS] = {
    {sizeof(refit_tensor), "layers.0.w", REFIT_BF16, 2, {48, 40}, 48 * 40 * 2, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "layers.0.b", REFIT_F32, 1, {40}, 160, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "layers.1.w", REFIT_F32, 4, {3, 4, 5, 6}, 1440, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "head", REFIT_BF16, 2, {48, 40}, 48 * 40 * 2, 0},
    {sizeof(refit_tensor), "empty", REFIT_F32, 1, {0}, 0, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "packed", REFIT_F4, 2, {6, 10}, 30, REFIT_NO_ALIAS},
};

static rft_manifest *make_manifest(void)
{
    rft_manifest *manifest = NULL;
    refit_config config = quick_config();
    rft_limits limits = rft_limits_from(&config);
    assert_ok(rft_manifest_open(tensors, TENSORS, 4096, &limits, &manifest, NULL));
    return manifest;
}

/* The caller releases the want before the manifest. With `missing`, the second name is. */
static rft_want *resolve(const rft_manifest *manifest, const refit_selection *list, uint32_t count,
                         const char **missing)
{
    const char *ignored;
    rft_selection *selection = NULL;
    rft_want *want = NULL;
    assert_ok(rft_selection_open(list, count, &selection, NULL));
    assert_ok(rft_selection_resolve(selection, manifest, &want,
                                    missing == NULL ? &ignored : missing, NULL));
    assert_true(missing != NULL || ignored == NULL);
    if (missing != NULL) assert_string_equal(*missing, list[1].name);
    rft_selection_close(selection);
    return want;
}

static bool wants(const rft_want *want, uint32_t tensor, uint64_t byte)
{
    return rft_want_covers(want, tensor, byte, 1);
}

/* Whether an element is in a box, by its number. */
static bool is_in(const refit_tensor *tensor, const refit_selection *box, uint64_t element)
{
    for (uint32_t i = tensor->rank; i-- > 0;) {
        uint64_t at = element % tensor->shape[i];
        element /= tensor->shape[i];
        if (i >= box->rank) continue;
        uint64_t end =
            box->shape[i] == REFIT_TO_THE_END ? tensor->shape[i] : box->first[i] + box->shape[i];
        if (at < box->first[i] || at >= end) return false;
    }
    return true;
}

static void check_box(const rft_manifest *manifest, uint32_t index, const refit_selection *box)
{
    const refit_tensor *tensor = &tensors[index];
    uint32_t width = refit_dtype_bits(tensor->dtype) / 8;
    rft_want *want = resolve(manifest, box, 1, NULL);
    for (uint64_t i = 0; i < tensor->bytes / width; i++) {
        for (uint32_t k = 0; k < width; k++)
            if (wants(want, index, i * width + k) != is_in(tensor, box, i))
                fail_msg("element %llu of %s", (unsigned long long)i, tensor->name);
    }
    rft_want_release(want);
}

TEST(a_box_is_its_elements)
{
    uint64_t seed = 7;
    rft_manifest *manifest = make_manifest();
    static const uint32_t indexes[] = {0, 1, 2};
    for (uint32_t round = 0; round < 600; round++) {
        uint32_t index = indexes[round % 3];
        refit_selection box = NAMED(tensors[index].name);
        box.rank = 1 + (uint32_t)seeded_below(&seed, tensors[index].rank);
        for (uint32_t i = 0; i < box.rank; i++) {
            uint64_t length = tensors[index].shape[i];
            bool whole = seeded_below(&seed, 3) == 0;
            box.first[i] = whole ? 0 : seeded_below(&seed, length);
            box.shape[i] = whole ? length : 1 + seeded_below(&seed, length - box.first[i]);
            if (seeded_below(&seed, 4) == 0) box.shape[i] = REFIT_TO_THE_END;
        }
        check_box(manifest, index, &box);
    }
    rft_manifest_close(manifest);
}

TEST(names_stand_for_tensors)
{
    rft_manifest *manifest = make_manifest();
    const char *missing;
    const refit_selection list[] = {NAMED("layers.0.*"), NAMED("nothing"), NAMED("also nothing")};
    rft_want *want = resolve(manifest, list, 3, &missing);
    static const rft_want_part expected[] = {RFT_WANT_ALL, RFT_WANT_ALL, RFT_WANT_NONE,
                                             RFT_WANT_ALL, RFT_WANT_ALL, RFT_WANT_NONE};
    for (uint32_t i = 0; i < TENSORS; i++)
        assert_int_equal(rft_want_tensor(want, i), expected[i]);
    rft_want_release(want);
    const refit_selection all[] = {NAMED("*")};
    want = resolve(manifest, all, 1, NULL);
    assert_int_equal(want->bytes, manifest->payload_bytes);
    rft_want_release(want);
    rft_manifest_close(manifest);
}

TEST(a_tied_name_stands_for_the_bytes_that_it_shares)
{
    rft_manifest *manifest = make_manifest();
    refit_selection list[] = {NAMED("head")};
    list[0].rank = 1;
    list[0].first[0] = 8;
    list[0].shape[0] = 4;
    rft_want *want = resolve(manifest, list, 1, NULL);
    assert_int_equal(want->bytes, 4 * 40 * 2);
    assert_true(rft_want_covers(want, 0, 8 * 80, 4 * 80));
    assert_int_equal(rft_want_tensor(want, 3), RFT_WANT_SOME);
    rft_want_release(want);
    rft_manifest_close(manifest);
}

TEST(boxes_of_one_tensor_are_put_together)
{
    rft_manifest *manifest = make_manifest();
    refit_selection list[] = {NAMED("layers.0.w"), NAMED("layers.0.w"), NAMED("layers.0.w")};
    for (uint32_t i = 0; i < 3; i++) {
        list[i].rank = 1;
        list[i].first[0] = 40 - 16 * i;
        list[i].shape[0] = 8;
    }
    rft_want *want = resolve(manifest, list, 3, NULL);
    assert_int_equal(want->bytes, 3 * 8 * 80);
    assert_int_equal(want->row_count, 3);
    rft_want_release(want);
    list[2].shape[0] = 17; /* meets the one before */
    want = resolve(manifest, list, 3, NULL);
    assert_int_equal(rft_want_tensor(want, 0), RFT_WANT_ALL);
    rft_want_release(want);
    list[1] = list[0]; /* twice the same */
    want = resolve(manifest, list, 2, NULL);
    assert_int_equal(rft_want_tensor(want, 0), RFT_WANT_ALL);
    rft_want_release(want);
    rft_manifest_close(manifest);
}

TEST(elements_of_half_a_byte_bring_their_neighbors)
{
    rft_manifest *manifest = make_manifest();
    refit_selection list[] = {NAMED("packed")};
    list[0].rank = 2;
    list[0].first[1] = 3;
    list[0].shape[0] = REFIT_TO_THE_END;
    list[0].shape[1] = 2;
    rft_want *want = resolve(manifest, list, 1, NULL);
    for (uint64_t row = 0; row < 6; row++)
        assert_true(rft_want_covers(want, 5, (row * 10 + 3) / 2, 2));
    rft_want_release(want);
    rft_manifest_close(manifest);
}

static refit_status open_one(refit_selection one)
{
    rft_selection *selection = NULL;
    refit_status status = rft_selection_open(&one, 1, &selection, NULL);
    rft_selection_close(selection);
    return status;
}

TEST(mistakes_are_named)
{
    refit_selection one = NAMED("layers.0.w");
    one.size = 8;
    assert_int_equal(open_one(one), REFIT_ERR_INVALID);
    one = (refit_selection)NAMED(NULL);
    assert_int_equal(open_one(one), REFIT_ERR_INVALID);
    one = (refit_selection)NAMED("");
    assert_int_equal(open_one(one), REFIT_ERR_INVALID);
    one = (refit_selection)NAMED("layers.0.w");
    one.rank = REFIT_RANK_MAX + 1;
    assert_int_equal(open_one(one), REFIT_ERR_INVALID);
    one.rank = 1; /* of 0 elements */
    assert_int_equal(open_one(one), REFIT_ERR_INVALID);
}

TEST(of_other_tensors_than_it_is_bound_to_it_is_everything)
{
    rft_manifest *manifest = make_manifest();
    const refit_selection one = NAMED("layers.0.b");
    for (int other = 0; other < 2; other++) {
        const char *missing;
        rft_want *want = NULL;
        rft_selection *selection = NULL;
        assert_ok(rft_selection_open(&one, 1, &selection, NULL));
        selection->bound = true;
        selection->manifest = manifest->digest;
        selection->manifest.bytes[3] ^= (unsigned char)other;
        assert_ok(rft_selection_resolve(selection, manifest, &want, &missing, NULL));
        assert_null(missing);
        for (uint32_t i = 0; i < TENSORS; i++) {
            bool all = other == 1 || i == 1;
            if (tensors[i].bytes > 0)
                assert_int_equal(rft_want_tensor(want, i), all ? RFT_WANT_ALL : RFT_WANT_NONE);
        }
        rft_want_release(want);
        rft_selection_close(selection);
    }
    rft_manifest_close(manifest);
}

TEST(a_box_beyond_its_tensor_is_refused)
{
    rft_manifest *manifest = make_manifest();
    static const struct {
        uint32_t rank;
        uint64_t first, shape;
    } boxes[] = {{1, 0, 49}, {1, 48, 1}, {1, 48, REFIT_TO_THE_END}, {1, 1, 48}, {3, 0, 1}};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++) {
        const char *missing;
        refit_error error;
        rft_want *want = NULL;
        rft_selection *selection = NULL;
        refit_selection one = NAMED("layers.0.w");
        one.rank = boxes[i].rank;
        for (uint32_t k = 0; k < one.rank; k++) {
            one.first[k] = boxes[i].first;
            one.shape[k] = boxes[i].shape;
        }
        assert_ok(rft_selection_open(&one, 1, &selection, NULL));
        assert_int_equal(rft_selection_resolve(selection, manifest, &want, &missing, &error),
                         REFIT_ERR_INVALID);
        assert_says(&error, "not within the tensor");
        rft_selection_close(selection);
    }
    rft_manifest_close(manifest);
}

int main(void)
{
    return test_run("selection");
}
