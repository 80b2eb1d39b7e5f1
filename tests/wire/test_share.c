/* A GPU's memory as OFFER names it: every field is encoded and decoded, and only at full length. */
#include "device/device.h"
#include "tests/support/unit.h"
#include "wire/message.h"

static rft_share sample(void)
{
    rft_share share = {.offset = 1, .bytes = UINT64_MAX, .address = UINT64_C(0x7f0123456789abcd)};
    for (unsigned i = 0; i < sizeof share.uuid; i++) {
        share.uuid[i] = (unsigned char)(i + 1);
    }
    for (unsigned i = 0; i < sizeof share.handle; i++) {
        share.handle[i] = (unsigned char)(200 - i);
    }
    return share;
}

static void every_field_comes_back(void **state)
{
    unsigned char bytes[RFT_SHARE_BYTES];
    rft_share before = sample(), after;
    memset(&after, 0xee, sizeof after);
    rft_share_write(&before, bytes);
    assert_ok(rft_share_read((rft_view){bytes, sizeof bytes}, &after, NULL));
    assert_memory_equal(after.uuid, before.uuid, sizeof before.uuid);
    assert_memory_equal(after.handle, before.handle, sizeof before.handle);
    assert_true(after.offset == before.offset && after.bytes == before.bytes);
    assert_true(after.address == before.address);
}

static void the_bytes_are_the_same_on_every_machine(void **state)
{
    unsigned char bytes[RFT_SHARE_BYTES];
    rft_share share = sample();
    rft_share_write(&share, bytes);
    assert_int_equal(bytes[0], 1);
    assert_int_equal(bytes[16], 200);
    assert_int_equal(bytes[80], 1);
    assert_int_equal(bytes[81], 0);
    assert_int_equal(bytes[96], 0xcd);
    assert_int_equal(bytes[103], 0x7f);
}

static void another_length_is_refused(void **state)
{
    unsigned char bytes[RFT_SHARE_BYTES + 1] = {0};
    const size_t lengths[] = {0, 1, RFT_SHARE_BYTES - 1, RFT_SHARE_BYTES + 1};
    rft_share share;
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        assert_int_equal(rft_share_read((rft_view){bytes, lengths[i]}, &share, NULL),
                         REFIT_ERR_PROTOCOL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_comes_back),
        cmocka_unit_test(the_bytes_are_the_same_on_every_machine),
        cmocka_unit_test(another_length_is_refused),
    };
    return cmocka_run_group_tests_name("share", tests, NULL, NULL);
}
