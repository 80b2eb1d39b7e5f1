/* The digest is its header's at every level, length and alignment, and sees every change. */
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/digest.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

#define ROOM ((size_t)5 << 19)

static unsigned char data[ROOM], copied[ROOM];

/* The formula of the header, byte by byte. */
static uint64_t oracle(const unsigned char *at, size_t bytes, uint64_t offset)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        for (size_t k = 0; k < 8 && i + k < bytes; k++)
            word |= (uint64_t)at[i + k] << (8 * k);
        uint64_t x = word ^ ((offset + i) / 8 + 1) * UINT64_C(0x9E3779B97F4A7C15);
        uint64_t low = x % (UINT64_C(1) << 32), high = x / (UINT64_C(1) << 32);
        sum += low * high + (low * (UINT64_C(1) << 32) + high);
    }
    return sum;
}

static uint64_t digest(const void *at, size_t bytes)
{
    return rft_digest_finish(rft_digest_part(at, bytes, 0), bytes);
}

/* Answers made from the formula by another program in another language. */
TEST(known_answers_are_given)
{
    unsigned char counted[1000], set[256], ones[65536];
    const char *fox = "The quick brown fox jumps over the lazy dog";
    for (size_t i = 0; i < sizeof counted; i++)
        counted[i] = (unsigned char)(i * 7);
    for (size_t i = 0; i < sizeof set; i++)
        set[i] = (unsigned char)i;
    memset(ones, 0xFF, sizeof ones);
    const char zeros[9] = {0};
    assert_int_equal(digest("", 0), 0);
    assert_int_equal(digest("a", 1), UINT64_C(0xc3a84c90907ddc1e));
    assert_int_equal(digest("refit", 5), UINT64_C(0xd6c97e397aca1979));
    assert_int_equal(digest(zeros, 8), UINT64_C(0xfd58efdc6810b977));
    assert_int_equal(digest(zeros, 9), UINT64_C(0xdaf53f0852961646));
    assert_int_equal(digest(fox, strlen(fox)), UINT64_C(0xd6347917a18d72c0));
    assert_int_equal(digest(set, sizeof set), UINT64_C(0x261639e5a5f390cf));
    assert_int_equal(digest(counted, sizeof counted), UINT64_C(0x2ca5186e17e66219));
    assert_int_equal(digest(ones, sizeof ones), UINT64_C(0x606c98ece34555be));
}

typedef uint64_t (*copy_fn)(void *to, const void *from, size_t bytes, uint64_t offset);

static void check_copy_by(copy_fn copy, size_t to, size_t from, size_t bytes, uint64_t offset)
{
    memset(copied + to, 0xA5, bytes + 1);
    uint64_t sum = copy(copied + to, data + from, bytes, offset);
    assert_int_equal(sum, oracle(data + from, bytes, offset));
    assert_memory_equal(copied + to, data + from, bytes);
    assert_int_equal(copied[to + bytes], 0xA5);
}

static void check_copy(size_t to, size_t from, size_t bytes, uint64_t offset)
{
    check_copy_by(rft_digest_copy_part, to, from, bytes, offset);
    check_copy_by(rft_digest_copy_piece, to, from, bytes, offset);
}

TEST(every_length_and_alignment_equals_the_oracle)
{
    for (size_t bytes = 0; bytes <= 1100; bytes++) {
        size_t shift = bytes % 17;
        uint64_t offset = bytes % 5 * 8 + bytes / 100 * (UINT64_C(1) << 35);
        assert_int_equal(rft_digest_part(data + shift, bytes, offset),
                         oracle(data + shift, bytes, offset));
        check_copy(bytes % 67, shift, bytes, offset);
    }
}

/* Sizes that are streamed, and one below; also to places that streaming cannot be made to meet. */
TEST(large_parts_equal_the_oracle)
{
    static const size_t sizes[] = {(1 << 20) - 8, 1 << 20, (1 << 20) + 1, (2 << 20) + 255};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        assert_int_equal(rft_digest_part(data + i, sizes[i], 8 * i),
                         oracle(data + i, sizes[i], 8 * i));
        for (size_t to = 0; to < 72; to += 4)
            check_copy(to, i, sizes[i], 4096);
        check_copy(3, i, sizes[i], 0);
    }
}

/* Pieces that are streamed, and one below. */
TEST(streamed_pieces_equal_the_oracle)
{
    static const size_t sizes[] = {(4 << 10) - 1, 4 << 10, (4 << 10) + 9, (16 << 10) + 300};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (size_t to = 0; to < 72; to++)
            check_copy(to, i, sizes[i], 8 * to);
    }
}

TEST(parts_add_up_to_the_whole)
{
    const size_t bytes = 100003;
    uint64_t whole = rft_digest_part(data, bytes, 0);
    for (size_t part = 8; part < 40000; part = part * 3 / 8 * 8) {
        uint64_t sum = 0;
        for (size_t at = 0; at < bytes; at += part) {
            size_t here = bytes - at < part ? bytes - at : part;
            sum += rft_digest_part(data + at, here, at);
        }
        assert_int_equal(sum, whole);
    }
}

/* Streamed or not, to any place: the bytes arrive, and each piece has its own part. */
TEST(pieces_have_the_parts_of_their_bytes)
{
    static const size_t sizes[] = {0, 5, 131072, 300001, (1 << 20) + 3 * 131072 + 9};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (size_t to = 0; to < 72; to += 4) {
            uint64_t parts[2][16] = {0};
            size_t each = 131072, bytes = sizes[i];
            uint64_t offset = 8 * to, whole = oracle(data + 1, bytes, offset);
            memset(copied + to, 0xA5, bytes + 1);
            assert_int_equal(
                rft_digest_copy_parts(copied + to, data + 1, bytes, offset, each, parts[0]), whole);
            assert_int_equal(rft_digest_parts(data + 1, bytes, offset, each, parts[1]), whole);
            assert_memory_equal(parts[0], parts[1], sizeof parts[0]);
            assert_memory_equal(copied + to, data + 1, bytes);
            assert_int_equal(copied[to + bytes], 0xA5);
            for (size_t at = 0; at < bytes; at += each) {
                size_t piece = bytes - at < each ? bytes - at : each;
                assert_int_equal(parts[0][at / each], oracle(data + 1 + at, piece, offset + at));
            }
        }
    }
}

/* The same memory twice: what is written to one place is read at the other. */
#define SHARED ((size_t)2 << 20)

static unsigned char *shared_at[2];

/* A source that changes while it is copied, as a weight does that is trained on meanwhile: it is a
 * part of the target, some bytes on. Each byte of the target is written once, so it must be what
 * the sum was made of. */
static void check_changing_by(copy_fn copy)
{
    static const size_t sizes[] = {1, 7, 8, 40, 200, 255, 523, 4107, 40009, 300001, (1 << 20) + 77};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (size_t ahead = 1; ahead < 40; ahead += 6) {
            memcpy(shared_at[0], data, SHARED);
            uint64_t sum = copy(shared_at[1] + ahead, shared_at[0], sizes[i], 8);
            assert_int_equal(sum, oracle(shared_at[1] + ahead, sizes[i], 8));
        }
    }
}

TEST(the_digest_is_that_of_the_copy_where_the_source_changes)
{
    int file = memfd_create("digest", MFD_CLOEXEC);
    assert_true(file >= 0);
    assert_int_equal(ftruncate(file, (off_t)SHARED), 0);
    for (int i = 0; i < 2; i++) {
        shared_at[i] = mmap(NULL, SHARED, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        assert_true(shared_at[i] != MAP_FAILED);
    }
    check_changing_by(rft_digest_copy_part);
    check_changing_by(rft_digest_copy_piece);
    for (int i = 0; i < 2; i++)
        (void)munmap(shared_at[i], SHARED);
    (void)close(file);
}

TEST(every_flipped_bit_is_seen)
{
    enum { BYTES = 523 };
    uint64_t right = digest(data, BYTES);
    for (size_t bit = 0; bit < 8 * BYTES; bit++) {
        data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        assert_int_not_equal(digest(data, BYTES), right);
        data[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    assert_int_equal(digest(data, BYTES), right);
}

static void swap_words(unsigned char *a, unsigned char *b)
{
    unsigned char kept[8];
    memcpy(kept, a, 8);
    memcpy(a, b, 8);
    memcpy(b, kept, 8);
}

TEST(every_swapped_pair_is_seen)
{
    enum { WORDS = 70 };
    uint64_t right = digest(data, 8 * WORDS);
    for (size_t a = 0; a < WORDS; a++) {
        for (size_t b = a + 1; b < WORDS; b++) {
            swap_words(data + 8 * a, data + 8 * b);
            assert_int_not_equal(digest(data, 8 * WORDS), right);
            swap_words(data + 8 * a, data + 8 * b);
        }
    }
}

TEST(zeros_at_the_end_are_seen)
{
    const char zeros[100] = {0};
    for (size_t bytes = 1; bytes < sizeof zeros; bytes++)
        assert_int_not_equal(digest(zeros, bytes), digest(zeros, bytes - 1));
}

int main(void)
{
    uint64_t seed = 3;
    fill_random(data, ROOM, &seed);
    return run_on_every_level("digest");
}
