/* Spans and names: a tree and an index agree with a plain search, in any order of adding. */
#include "tests/offload/offload.h"

#include <stdio.h>

#include "offload/region.h"

#define SPANS 500
#define NAMES 3000

typedef struct model {
    uint64_t begin[SPANS];
    uint64_t bytes[SPANS];
    bool held[SPANS];
} model;

static uint32_t find_plainly(const model *known, uint64_t begin, uint64_t bytes)
{
    for (uint32_t id = 0; id < SPANS; id++) {
        if (!known->held[id]) continue;
        if (begin < known->begin[id] + known->bytes[id] && known->begin[id] < begin + bytes) {
            return id;
        }
    }
    return RFT_NO_SPAN;
}

TEST(tree_agrees_with_a_plain_search)
{
    static model known;
    rft_span_tree tree = {0};
    uint64_t seed = 7;
    rft_span_tree_reset(&tree);
    assert_ok(rft_span_tree_reserve(&tree, SPANS, NULL));
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t id = (uint32_t)(seeded_below(&seed, SPANS));
        uint64_t begin = 1 + seeded_below(&seed, 20000);
        uint64_t bytes = 1 + seeded_below(&seed, 60);
        if (known.held[id]) {
            rft_span_tree_remove(&tree, id);
            known.held[id] = false;
        }
        bool clash = find_plainly(&known, begin, bytes) != RFT_NO_SPAN;
        uint32_t found = rft_span_tree_find(&tree, begin, bytes);
        assert_int_equal(found != RFT_NO_SPAN, clash);
        if (clash) {
            assert_true(known.held[found]);
            assert_true(begin < known.begin[found] + known.bytes[found] &&
                        known.begin[found] < begin + bytes);
            continue;
        }
        rft_span_tree_insert(&tree, id, begin, bytes);
        known.begin[id] = begin;
        known.bytes[id] = bytes;
        known.held[id] = true;
    }
    rft_span_tree_close(&tree);
}

TEST(touching_spans_do_not_clash)
{
    rft_span_tree tree = {0};
    rft_span_tree_reset(&tree);
    assert_ok(rft_span_tree_reserve(&tree, 3, NULL));
    rft_span_tree_insert(&tree, 0, 100, 50);
    assert_int_equal(rft_span_tree_find(&tree, 150, 1), RFT_NO_SPAN);
    assert_int_equal(rft_span_tree_find(&tree, 99, 1), RFT_NO_SPAN);
    assert_int_equal(rft_span_tree_find(&tree, 149, 1), 0);
    assert_int_equal(rft_span_tree_find(&tree, 0, 101), 0);
    rft_span_tree_remove(&tree, 0);
    rft_span_tree_remove(&tree, 0);
    assert_int_equal(rft_span_tree_find(&tree, 0, 1000), RFT_NO_SPAN);
    rft_span_tree_close(&tree);
}

TEST(every_name_is_found_and_no_other)
{
    static char names[NAMES][16];
    rft_name_index index = {0};
    assert_false(rft_name_index_has(&index, "layer.0"));
    for (uint32_t i = 0; i < NAMES; i++) {
        snprintf(names[i], sizeof names[i], "layer.%u", i);
        assert_ok(rft_name_index_reserve(&index, i + 1, NULL));
        assert_false(rft_name_index_has(&index, names[i]));
        rft_name_index_add(&index, names[i]);
    }
    for (uint32_t i = 0; i < NAMES; i++)
        assert_true(rft_name_index_has(&index, names[i]));
    assert_false(rft_name_index_has(&index, "layer.3000"));
    rft_name_index_reset(&index);
    assert_false(rft_name_index_has(&index, names[0]));
    rft_name_index_close(&index);
}

int main(void)
{
    return test_run("span_tree");
}
