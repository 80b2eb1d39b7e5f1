/* How many bytes a changed element costs in updates such as training makes (bench_updates.h), with
 * each block's entry in the directory, and without a compressor; and that the blocks come back. */
#include "bench/bench_updates.h"
#include "kernels/delta.h"
#include "tests/support/test.h"

#define BLOCKS   16u
#define ELEMENTS ((size_t)BLOCKS * RFT_DELTA_ELEMENTS)

static uint16_t before[2 * ELEMENTS], after[2 * ELEMENTS]; /* the second halves for another */
static unsigned char out[5 * RFT_DELTA_ELEMENTS];

static const rft_delta_shape shape = {RFT_DELTA_ELEMENTS, 2, RFT_DELTA_HALF};

/* Makes an update, and sends it block by block. Returns the bytes of a changed element. */
static double cost(double density)
{
    size_t bytes = 0, changed = 0;
    assert_true(rft_delta_bound(shape) <= sizeof out);
    double made = bench_updates_make(1, density, before, after, ELEMENTS);
    assert_true(made > 0.8 * density && made < 1.2 * density);
    for (size_t at = 0; at < ELEMENTS; at += RFT_DELTA_ELEMENTS) {
        rft_delta_entry entry;
        if (rft_delta_encode(shape, before + at, after + at, out, &entry)) {
            assert_true(rft_delta_apply(shape, &entry, out, before + at));
            bytes += entry.total + RFT_DELTA_ENTRY_BYTES;
        } else if (entry.changed != 0) {
            memcpy(before + at, after + at, 2 * (size_t)RFT_DELTA_ELEMENTS);
            bytes += 2 * (size_t)RFT_DELTA_ELEMENTS;
        }
        changed += entry.changed;
    }
    assert_memory_equal(before, after, ELEMENTS * sizeof *before);
    return (double)bytes / (double)changed;
}

TEST(an_update_costs_no_more_than_this)
{
    static const double most[][2] = {{0.0013, 2.05}, {0.006, 1.55}, {0.01, 1.46}, {0.037, 1.23},
                                     {0.063, 1.15},  {0.125, 1.06}, {0.26, 1.01}, {0.5, 1}};
    for (size_t i = 0; i < COUNT_OF(most); i++)
        assert_true(cost(most[i][0]) <= most[i][1]);
}

TEST(an_update_of_everything_costs_less_than_the_weights)
{
    assert_true(cost(1) < 2);
}

TEST(the_same_arguments_make_the_same_update)
{
    uint16_t *again = before + ELEMENTS, *then = after + ELEMENTS;
    double first = bench_updates_make(7, 0.01, before, after, ELEMENTS);
    assert_true(bench_updates_make(7, 0.01, again, then, ELEMENTS) == first);
    assert_memory_equal(again, before, ELEMENTS * sizeof *again);
    assert_memory_equal(then, after, ELEMENTS * sizeof *again);
    (void)bench_updates_make(8, 0.01, again, then, ELEMENTS);
    assert_memory_not_equal(again, before, ELEMENTS * sizeof *again);
}

int main(void)
{
    return test_run("delta_bytes");
}
