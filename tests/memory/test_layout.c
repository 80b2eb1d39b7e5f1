/* Layout: offsets are aligned, in order of return, slabs are never too large, waste under 1 %. */
#include <stdlib.h>

#include "memory/layout.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

static const rft_slab *find_slab(const rft_layout *layout, uint64_t offset)
{
    for (uint32_t i = 0; i < layout->slab_count; i++) {
        const rft_slab *slab = &layout->slabs[i];
        if (offset >= slab->offset && offset - slab->offset < slab->bytes) return slab;
    }
    return NULL;
}

static void check_slabs(const rft_layout *layout, uint64_t slab_bytes)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < layout->slab_count; i++) {
        assert_int_equal(layout->slabs[i].offset, end);
        assert_int_equal(end % RFT_SLAB_EDGE, 0);
        assert_in_range(layout->slabs[i].bytes, 1, slab_bytes);
        end += layout->slabs[i].bytes;
    }
    assert_int_equal(end, layout->image_bytes);
}

/* In one slab, or from the beginning of one on through full ones. */
static void check_item(const rft_layout *layout, const rft_layout_item *item, uint64_t slab_bytes)
{
    const rft_slab *slab = find_slab(layout, item->offset);
    assert_ptr_equal(slab, &layout->slabs[rft_layout_find(layout, item->offset)]);
    assert_non_null(slab);
    uint64_t end = item->offset + item->bytes;
    if (end <= slab->offset + slab->bytes) return;
    assert_int_equal(slab->offset, item->offset);
    assert_true(item->bytes > slab_bytes);
    for (; slab->offset + slab->bytes < end; slab++)
        assert_int_equal(slab->bytes, slab_bytes);
}

/* Orders are a permutation, and each item that has bytes lies after the one before it. */
static void check_items(const rft_layout *layout, const rft_layout_item *items, uint32_t count,
                        uint64_t alignment, uint64_t slab_bytes)
{
    const rft_layout_item **ordered = calloc(count, sizeof *ordered);
    assert_non_null(ordered);
    for (uint32_t i = 0; i < count; i++) {
        assert_true(items[i].order < count);
        assert_null(ordered[items[i].order]);
        ordered[items[i].order] = &items[i];
    }
    uint64_t end = 0;
    uint64_t payload = 0;
    for (uint32_t i = 0; i < count; i++) {
        const rft_layout_item *item = ordered[i];
        if (i > 0) assert_true(ordered[i - 1]->priority >= item->priority);
        if (item->bytes == 0) continue;
        check_item(layout, item, slab_bytes);
        assert_true(item->offset >= end);
        assert_int_equal(item->offset % (alignment < 64 ? alignment : 64), 0);
        bool whole = alignment > 512 || item->bytes >= 32 * alignment;
        if (whole) assert_int_equal(item->offset % alignment, 0);
        end = item->offset + item->bytes;
        payload += item->bytes;
    }
    assert_int_equal(end, layout->image_bytes);
    assert_int_equal(payload, layout->payload_bytes);
    free(ordered);
}

TEST(any_regions_are_laid_out_without_overlap)
{
    uint64_t seed = 88172645463325252u;
    for (int round = 0; round < 300; round++) {
        rft_layout_item items[200] = {{0, 0, 0, 0, 0}};
        uint32_t count = (uint32_t)(1 + seeded_next(&seed) % 200);
        uint64_t alignment = UINT64_C(1) << (seeded_next(&seed) % 13);
        uint64_t slab_bytes = RFT_SLAB_EDGE << (seeded_next(&seed) % 6);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t largest = UINT64_C(1) << (seeded_next(&seed) % 23);
            items[i].bytes = seeded_next(&seed) % largest;
            items[i].group = (uint32_t)(seeded_next(&seed) % 4);
            items[i].priority = (int32_t)(seeded_next(&seed) % 5) - 2;
        }
        rft_layout layout;
        assert_ok(rft_layout_open(&layout, items, count, alignment, slab_bytes, NULL));
        check_slabs(&layout, slab_bytes);
        check_items(&layout, items, count, alignment, slab_bytes);
        rft_layout_close(&layout);
    }
}

/* Sizes as in a model: many norms and biases, some matrices, one embedding. */
TEST(real_states_exceed_their_payload_by_less_than_one_percent)
{
    rft_layout_item items[600] = {{0, 0, 0, 0, 0}};
    for (uint32_t slab_shift = 26; slab_shift <= 30; slab_shift += 2) {
        for (uint32_t i = 0; i < 600; i++)
            items[i].bytes = i % 2 == 0 ? 512 + 4 * i : i % 7 == 0 ? 3 * MIB + 4 : 12 * MIB;
        items[1].bytes = 300 * MIB;
        items[2].bytes = 300 * MIB - 4;
        rft_layout layout;
        assert_ok(rft_layout_open(&layout, items, 600, 512, UINT64_C(1) << slab_shift, NULL));
        assert_true(layout.image_bytes >= layout.payload_bytes);
        assert_true(layout.image_bytes - layout.payload_bytes < layout.payload_bytes / 100);
        rft_layout_close(&layout);
    }
}

/* As the states of 10,000 small experts or adapters. */
TEST(small_states_exceed_their_payload_by_little)
{
    enum { COUNT = 10000 };
    const struct {
        uint64_t bytes;
        uint64_t alignment;
        uint64_t padding; /* of each */
    } cases[] = {{1600, 512, 0}, {1604, 512, 60}, {2049, 512, 63},   {6404, 512, 124},
                 {4, 512, 60},   {4, 16, 12},     {1600, 1024, 448}, {16384 + 4, 512, 508}};
    rft_layout_item *items = calloc(COUNT, sizeof *items);
    assert_non_null(items);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        for (uint32_t at = 0; at < COUNT; at++)
            items[at].bytes = cases[i].bytes;
        rft_layout layout;
        assert_ok(rft_layout_open(&layout, items, COUNT, cases[i].alignment, GIB, NULL));
        assert_int_equal(layout.image_bytes - layout.payload_bytes, (COUNT - 1) * cases[i].padding);
        rft_layout_close(&layout);
    }
    free(items);
}

TEST(order_is_priority_then_group_then_as_given)
{
    rft_layout_item items[] = {
        {512, 1, 0, 9, 9}, {512, 0, 0, 9, 9},  {512, 3, 7, 9, 9},
        {512, 0, 0, 9, 9}, {512, 0, -1, 9, 9},
    };
    const uint32_t orders[] = {3, 1, 0, 2, 4};
    rft_layout layout;
    assert_ok(rft_layout_open(&layout, items, 5, 512, GIB, NULL));
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(items[i].order, orders[i]);
        assert_int_equal(items[i].offset, orders[i] * 512);
    }
    rft_layout_close(&layout);
}

TEST(region_larger_than_a_slab_begins_one_and_covers_several)
{
    rft_layout_item items[] = {{4096, 0, 0, 0, 0}, {5 * MIB + 1, 0, 0, 0, 0}, {4096, 0, 0, 0, 0}};
    rft_layout layout;
    assert_ok(rft_layout_open(&layout, items, 3, 512, MIB, NULL));
    assert_int_equal(layout.slab_count, 7);
    assert_int_equal(items[1].offset, RFT_SLAB_EDGE);
    for (uint32_t i = 1; i < 6; i++) {
        assert_int_equal(layout.slabs[i].offset, items[1].offset + (i - 1) * MIB);
        assert_int_equal(layout.slabs[i].bytes, MIB);
    }
    /* What is left of its last slab is not wasted. */
    assert_int_equal(items[2].offset, items[1].offset + 5 * MIB + 128);
    assert_int_equal(layout.slabs[6].bytes, 128 + 4096);
    rft_layout_close(&layout);
}

TEST(region_as_large_as_slabs_fills_them)
{
    rft_layout_item items[] = {{3 * MIB, 0, 0, 0, 0}, {1, 0, 0, 0, 0}, {MIB, 0, 0, 0, 0}};
    rft_layout layout;
    assert_ok(rft_layout_open(&layout, items, 3, 512, MIB, NULL));
    assert_int_equal(layout.slab_count, 5);
    assert_int_equal(layout.slabs[2].bytes, MIB);
    assert_int_equal(layout.slabs[3].offset, items[1].offset);
    assert_int_equal(layout.slabs[4].offset, items[2].offset);
    assert_int_equal(layout.slabs[4].bytes, MIB);
    rft_layout_close(&layout);
}

TEST(region_of_no_bytes_takes_no_room)
{
    rft_layout_item items[] = {{0, 0, 5, 9, 9}, {100, 0, 0, 9, 9}, {0, 0, -5, 9, 9}};
    rft_layout layout;
    assert_ok(rft_layout_open(&layout, items, 3, 512, MIB, NULL));
    assert_int_equal(layout.image_bytes, 100);
    assert_int_equal(layout.payload_bytes, 100);
    assert_int_equal(items[0].order, 0);
    assert_int_equal(items[2].order, 2);
    rft_layout_close(&layout);
    assert_ok(rft_layout_open(&layout, items, 1, 512, MIB, NULL));
    assert_int_equal(layout.slab_count, 0);
    rft_layout_close(&layout);
    assert_ok(rft_layout_open(&layout, NULL, 0, 512, MIB, NULL));
    assert_int_equal(layout.image_bytes, 0);
    rft_layout_close(&layout);
}

TEST(sizes_that_wrap_are_refused)
{
    const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 511, UINT64_MAX / 2 + 1};
    for (size_t i = 0; i < 3; i++) {
        rft_layout_item items[] = {
            {512, 0, 0, 0, 0}, {sizes[i], 0, 0, 0, 0}, {sizes[i], 0, 0, 0, 0}};
        rft_layout layout = {7, 7, NULL, 7};
        refit_error error;
        assert_int_equal(rft_layout_open(&layout, items, 3, 512, GIB, &error), REFIT_ERR_LIMIT);
        assert_int_equal(layout.image_bytes, 7);
        assert_int_equal(error.status, REFIT_ERR_LIMIT);
    }
}

/* No single one wraps, and there would not be too many slabs. */
TEST(sums_that_wrap_are_refused)
{
    rft_layout_item items[] = {{UINT64_MAX / 2, 0, 0, 0, 0}, {UINT64_MAX / 2 + 2, 0, 0, 0, 0}};
    rft_layout layout = {7, 7, NULL, 7};
    assert_int_equal(rft_layout_open(&layout, items, 2, 512, UINT64_C(1) << 62, NULL),
                     REFIT_ERR_LIMIT);
    assert_int_equal(layout.image_bytes, 7);
}

TEST(alignment_and_slab_are_powers_of_two_that_fit)
{
    rft_layout_item item = {512, 0, 0, 0, 0};
    rft_layout layout;
    assert_invalid(rft_layout_open(&layout, &item, 1, 0, GIB, NULL));
    assert_invalid(rft_layout_open(&layout, &item, 1, 768, GIB, NULL));
    assert_invalid(rft_layout_open(&layout, &item, 1, 512, GIB + 1, NULL));
    assert_invalid(rft_layout_open(&layout, &item, 1, 8192, 4096, NULL));
}

TEST(every_failed_allocation_is_an_error)
{
    for (uint64_t nth = 1;; nth++) {
        rft_layout_item items[] = {{512, 0, 0, 0, 0}, {512, 1, 0, 0, 0}};
        rft_layout layout;
        failing_alloc_begin(nth);
        refit_status status = rft_layout_open(&layout, items, 2, 512, MIB, NULL);
        if (status == REFIT_OK) rft_layout_close(&layout);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("layout");
}
