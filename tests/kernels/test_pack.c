/* Packing moves exactly the bytes of its entries, of every size and alignment, there and back. */
#include "kernels/pack.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

#define ENTRIES 2000u
#define ROOM    ((size_t)8 << 20)

static unsigned char source[ROOM], packed[ROOM], expected[ROOM];
static rft_pack_entry entries[ENTRIES];

/* Entries one after the other with gaps between them, some of them empty; what they should give
 * stands in `expected`. */
static uint32_t make_entries(uint64_t seed)
{
    size_t from = 0, to = 0;
    uint32_t count = 0;
    fill_random(source, ROOM, &seed);
    memset(packed, 0xA5, ROOM);
    memset(expected, 0xA5, ROOM);
    for (; count < ENTRIES; count++) {
        size_t bytes = seeded_below(&seed, count % 10 == 0 ? 30000 : 300);
        from += seeded_below(&seed, 40);
        to += seeded_below(&seed, 40);
        if (from + bytes > ROOM || to + bytes > ROOM) break;
        entries[count] =
            (rft_pack_entry){(uintptr_t)(packed + to), (uintptr_t)(source + from), bytes};
        memcpy(expected + to, source + from, bytes);
        from += bytes;
        to += bytes;
    }
    return count;
}

TEST(entries_are_packed_exactly)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        uint32_t count = make_entries(seed);
        assert_true(count > 1000);
        rft_pack(entries, count);
        assert_memory_equal(packed, expected, ROOM);
    }
}

TEST(packed_bytes_go_back_where_they_were)
{
    uint32_t count = make_entries(9);
    rft_pack(entries, count);
    memcpy(expected, source, ROOM);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t from = entries[i].from;
        memset((void *)(uintptr_t)from, 0, entries[i].bytes);
        entries[i].from = entries[i].to;
        entries[i].to = from;
    }
    assert_memory_not_equal(source, expected, ROOM);
    rft_pack(entries, count);
    assert_memory_equal(source, expected, ROOM);
}

TEST(one_large_entry_is_packed)
{
    memset(packed, 0xA5, ROOM);
    rft_pack_entry large = {(uintptr_t)(packed + 3), (uintptr_t)(source + 1), ROOM - 5};
    rft_pack(&large, 1);
    assert_memory_equal(packed + 3, source + 1, ROOM - 5);
    assert_int_equal(packed[2], 0xA5);
    assert_int_equal(packed[ROOM - 2], 0xA5);
}

TEST(no_entries_are_no_work)
{
    rft_pack(NULL, 0);
    rft_pack_entry nothing = {0, 0, 0};
    rft_pack(&nothing, 1);
}

int main(void)
{
    return run_on_every_level("pack");
}
