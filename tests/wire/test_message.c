/* Messages: every kind decodes to what was encoded; shortened, changed or forged ones are refused.
 */
#include "device/device.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"
#include "wire_samples.h"

static refit_status decode(const rft_bytes *bytes, rft_message *out)
{
    rft_limits limits = sample_limits();
    return rft_message_decode(rft_bytes_view(bytes), &limits, out, NULL);
}

static void assert_undecodable(rft_bytes *bytes)
{
    rft_message message;
    assert_int_equal(decode(bytes, &message), REFIT_ERR_PROTOCOL);
    rft_bytes_close(bytes);
}

typedef void (*each_fn)(const rft_message *message, const rft_bytes *encoded);

/* Calls `check` for the small and the large sample of every kind. */
static void for_each_sample(each_fn check)
{
    for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        rft_message samples[] = {sample_small(kind), sample_large(kind)};
        for (int i = 0; i < 2; i++) {
            rft_bytes encoded = sample_encode(&samples[i]);
            check(&samples[i], &encoded);
            rft_bytes_close(&encoded);
        }
    }
}

static void check_round_trip(const rft_message *message, const rft_bytes *encoded)
{
    rft_message decoded;
    assert_ok(decode(encoded, &decoded));
    assert_messages_equal(message, &decoded);
}

TEST(every_kind_comes_back_as_it_went)
{
    for_each_sample(check_round_trip);
}

/* Each length in memory of its own, so that a sanitizer sees a read past the end. */
static void check_truncations(const rft_message *message, const rft_bytes *encoded)
{
    (void)message;
    for (size_t length = 0; length < encoded->count; length++) {
        rft_bytes cut = {0};
        assert_ok(rft_bytes_append(&cut, encoded->data, length, NULL));
        assert_undecodable(&cut);
    }
}

TEST(every_truncation_is_refused)
{
    for_each_sample(check_truncations);
}

/* What decodes is within bounds: it can be encoded again. */
static void check_decoded(const rft_message *message)
{
    rft_limits limits = sample_limits();
    rft_bytes again = {0};
    assert_ok(rft_message_encode(message, &limits, &again, NULL));
    rft_bytes_close(&again);
}

static void check_mutations(const rft_message *message, const rft_bytes *encoded)
{
    (void)message;
    size_t most = encoded->count < 300 ? encoded->count : 300;
    for (size_t at = 0; at < most; at++) {
        unsigned char kept = encoded->data[at];
        for (unsigned change = 1; change < 256; change++) {
            rft_message decoded;
            encoded->data[at] = (unsigned char)(kept ^ change);
            refit_status status = decode(encoded, &decoded);
            if (status == REFIT_OK)
                check_decoded(&decoded);
            else
                assert_true(status == REFIT_ERR_PROTOCOL || status == REFIT_ERR_LIMIT);
        }
        encoded->data[at] = kept;
    }
}

TEST(every_changed_byte_is_refused_or_decoded)
{
    for_each_sample(check_mutations);
}

TEST(every_required_key_is_required)
{
    for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        rft_message small = sample_small(kind);
        rft_bytes encoded = sample_encode(&small);
        for (uint32_t i = 0; i < sample_key_count(&encoded); i++) {
            rft_bytes without = sample_rebuild(&encoded, i, NULL);
            assert_undecodable(&without);
        }
        rft_bytes_close(&encoded);
    }
}

static void pack_minus_one(msgpack_packer *packer)
{
    msgpack_pack_int64(packer, -1);
}

static void pack_one(msgpack_packer *packer)
{
    msgpack_pack_uint64(packer, 1);
}

static void pack_nil(msgpack_packer *packer)
{
    msgpack_pack_nil(packer);
}

static void pack_true(msgpack_packer *packer)
{
    msgpack_pack_true(packer);
}

static void pack_float(msgpack_packer *packer)
{
    msgpack_pack_double(packer, 1);
}

static void pack_short_text(msgpack_packer *packer)
{
    msgpack_pack_str(packer, 4);
    msgpack_pack_str_body(packer, "text", 4);
}

static void pack_short_bytes(msgpack_packer *packer)
{
    msgpack_pack_bin(packer, 8);
    msgpack_pack_bin_body(packer, "12345678", 8);
}

static void pack_tree(msgpack_packer *packer)
{
    msgpack_pack_array(packer, 2);
    msgpack_pack_map(packer, 1);
    pack_short_text(packer);
    msgpack_pack_array(packer, 0);
    pack_nil(packer);
}

static const struct {
    msgpack_object_type type;
    sample_value_fn pack;
} other_values[] = {
    {MSGPACK_OBJECT_NIL, pack_nil},
    {MSGPACK_OBJECT_BOOLEAN, pack_true},
    {MSGPACK_OBJECT_POSITIVE_INTEGER, pack_one},
    {MSGPACK_OBJECT_NEGATIVE_INTEGER, pack_minus_one},
    {MSGPACK_OBJECT_FLOAT64, pack_float},
    {MSGPACK_OBJECT_STR, pack_short_text},
    {MSGPACK_OBJECT_BIN, pack_short_bytes},
    {MSGPACK_OBJECT_ARRAY, pack_tree},
};

static void check_types(const rft_message *message, const rft_bytes *encoded)
{
    (void)message;
    for (uint32_t key = 0; key < sample_key_count(encoded); key++) {
        for (size_t i = 0; i < COUNT_OF(other_values); i++) {
            if (other_values[i].type == sample_value_type(encoded, key)) continue;
            rft_bytes changed = sample_rebuild(encoded, key, other_values[i].pack);
            assert_undecodable(&changed);
        }
    }
}

TEST(every_wrong_type_is_refused)
{
    for_each_sample(check_types);
}

static void check_unknown_keys(const rft_message *message, const rft_bytes *encoded)
{
    rft_message decoded;
    rft_bytes extended = sample_extend(encoded, "later", pack_tree);
    assert_ok(decode(&extended, &decoded));
    assert_messages_equal(message, &decoded);
    rft_bytes twice = sample_extend(&extended, "later", pack_nil);
    assert_undecodable(&twice);
    rft_bytes second_kind = sample_extend(encoded, "k", pack_short_text);
    assert_undecodable(&second_kind);
    rft_bytes_close(&extended);
}

TEST(unknown_keys_are_ignored_but_never_twice)
{
    for_each_sample(check_unknown_keys);
}

static void check_trailing_byte(const rft_message *message, const rft_bytes *encoded)
{
    (void)message;
    rft_bytes longer = {0};
    assert_ok(rft_bytes_append(&longer, encoded->data, encoded->count, NULL));
    assert_ok(rft_bytes_append(&longer, "\xc0", 1, NULL));
    assert_undecodable(&longer);
}

TEST(a_trailing_byte_is_refused)
{
    for_each_sample(check_trailing_byte);
}

TEST(unknown_kinds_are_refused)
{
    rft_message bye = sample_small(RFT_BYE);
    rft_bytes encoded = sample_encode(&bye);
    rft_bytes unknown = sample_rebuild(&encoded, 0, pack_short_text);
    assert_undecodable(&unknown);
    rft_bytes_close(&encoded);
    bye.kind = RFT_MESSAGE_KINDS;
    rft_limits limits = sample_limits();
    assert_invalid(rft_message_encode(&bye, &limits, &encoded, NULL));
    assert_string_equal(rft_message_kind_name(RFT_MESSAGE_KINDS), "unknown");
}

TEST(kinds_have_the_names_of_the_list)
{
#define CHECK_NAME(name, text) assert_string_equal(rft_message_kind_name(RFT_##name), text);
    RFT_MESSAGE_MAP(CHECK_NAME)
#undef CHECK_NAME
}

/* What the sample is encoded under wide limits, and refused under narrow ones, both ways. */
static void check_limit(const rft_message *message, const rft_limits *narrow)
{
    rft_bytes encoded = sample_encode(message);
    rft_message decoded;
    assert_int_equal(rft_message_decode(rft_bytes_view(&encoded), narrow, &decoded, NULL),
                     REFIT_ERR_LIMIT);
    size_t before = encoded.count;
    assert_int_equal(rft_message_encode(message, narrow, &encoded, NULL), REFIT_ERR_LIMIT);
    assert_int_equal(encoded.count, before);
    rft_bytes_close(&encoded);
}

TEST(limits_hold_both_ways)
{
    rft_limits wide = sample_limits();
    for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        rft_message large = sample_large(kind);
        rft_bytes encoded = sample_encode(&large);
        rft_limits narrow = wide;
        bool grows = kind == RFT_MANIFEST || kind == RFT_SEAL || kind == RFT_LEND ||
                     kind == RFT_PIECES || kind == RFT_OFFER || kind == RFT_SHARD;
        *(grows ? &narrow.manifest_bytes : &narrow.message_bytes) = encoded.count - 1;
        check_limit(&large, &narrow);
        rft_bytes_close(&encoded);
    }
}

TEST(configured_sizes_hold_both_ways)
{
    rft_limits narrow = sample_limits();
    narrow.window--;
    rft_message hello = sample_large(RFT_HELLO);
    check_limit(&hello, &narrow);
    rft_message pull = sample_large(RFT_PULL);
    check_limit(&pull, &narrow);
    narrow = sample_limits();
    narrow.frame_bytes--;
    rft_message welcome = sample_large(RFT_WELCOME);
    check_limit(&welcome, &narrow);
    narrow = sample_limits();
    narrow.version_bytes--;
    rft_message offer = sample_large(RFT_OFFER);
    check_limit(&offer, &narrow);
    narrow = sample_limits();
    narrow.tensors = 127;
    rft_message seal = sample_large(RFT_SEAL);
    check_limit(&seal, &narrow);
}

static void assert_not_encoded(const rft_message *message)
{
    rft_limits limits = sample_limits();
    rft_bytes out = {0};
    assert_invalid(rft_message_encode(message, &limits, &out, NULL));
    assert_int_equal(out.count, 0);
    rft_bytes_close(&out);
}

TEST(values_out_of_range_are_not_encoded)
{
    rft_message m = sample_small(RFT_WELCOME);
    m.as.welcome.epoch = 0;
    assert_not_encoded(&m);
    m = sample_small(RFT_HELLO);
    m.as.hello.worker.count = 0;
    assert_not_encoded(&m);
    m = sample_large(RFT_HELLO);
    m.as.hello.worker = m.as.hello.host;
    assert_not_encoded(&m);
    m = sample_large(RFT_RESEND);
    m.as.resend.sequences.count = 1023;
    assert_not_encoded(&m);
    m = sample_large(RFT_SEAL);
    m.as.seal.tensors.count = 4;
    assert_not_encoded(&m);
    m = sample_small(RFT_FRAME);
    m.as.frame.sequence = UINT32_MAX;
    assert_not_encoded(&m);
    m = sample_small(RFT_OFFER);
    m.as.offer.version = 0;
    assert_not_encoded(&m);
}

static void pack_zero(msgpack_packer *packer)
{
    msgpack_pack_uint64(packer, 0);
}

static void pack_2_to_the_32(msgpack_packer *packer)
{
    msgpack_pack_uint64(packer, UINT64_C(1) << 32);
}

/* Key 1 of a PULL is its version, key 2 its credits. */
TEST(values_out_of_range_are_not_decoded)
{
    rft_message pull = sample_small(RFT_PULL);
    rft_bytes encoded = sample_encode(&pull);
    rft_bytes no_version = sample_rebuild(&encoded, 1, pack_zero);
    assert_undecodable(&no_version);
    rft_bytes no_credit = sample_rebuild(&encoded, 2, pack_zero);
    assert_undecodable(&no_credit);
    rft_bytes wrapped = sample_rebuild(&encoded, 2, pack_2_to_the_32);
    assert_undecodable(&wrapped);
    rft_bytes_close(&encoded);
}

TEST(encoding_appends)
{
    rft_limits limits = sample_limits();
    rft_message bye = sample_small(RFT_BYE);
    rft_bytes out = {0};
    assert_ok(rft_bytes_append(&out, "before", 6, NULL));
    assert_ok(rft_message_encode(&bye, &limits, &out, NULL));
    assert_memory_equal(out.data, "before", 6);
    rft_message decoded;
    assert_ok(rft_message_decode(bytes_view(out.data + 6, out.count - 6), &limits, &decoded, NULL));
    assert_messages_equal(&bye, &decoded);
    rft_bytes_close(&out);
}

TEST(an_aborted_worker_keeps_what_it_has)
{
    rft_message abort_message = sample_small(RFT_ABORT);
    abort_message.as.failed.kept = false;
    rft_bytes encoded = sample_encode(&abort_message);
    rft_message decoded;
    assert_ok(decode(&encoded, &decoded));
    assert_true(decoded.as.failed.kept);
    rft_bytes_close(&encoded);
}

TEST(a_decoded_message_is_written_only_on_success)
{
    rft_message message;
    memset(&message, 0x5a, sizeof message);
    rft_message before = message;
    rft_bytes garbage = {(unsigned char[]){0x81, 0xa1, 'k', 0xa3, 'b', 'y', 'e'}, 7, 7};
    assert_int_equal(decode(&garbage, &message), REFIT_ERR_PROTOCOL);
    assert_memory_equal(&message, &before, sizeof message);
}

TEST(a_failed_allocation_is_an_error)
{
    rft_limits limits = sample_limits();
    rft_message offer = sample_large(RFT_OFFER);
    for (uint64_t nth = 1;; nth++) {
        rft_bytes out = {0};
        failing_alloc_begin(nth);
        refit_status status = rft_message_encode(&offer, &limits, &out, NULL);
        assert_true(status == REFIT_OK || out.count == 0);
        rft_bytes_close(&out);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

/* ---- Limits: each comes from its own key of the configuration */

TEST(every_limit_has_its_key)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.limits_tensors = 1;
    config.limits_rank = 2;
    config.limits_name_bytes = 3;
    config.limits_message_bytes = 4;
    config.limits_manifest_bytes = 5;
    config.limits_frame_bytes = 6;
    config.limits_version_bytes = 7;
    config.limits_window = 8;
    config.limits_blocks = 9;
    rft_limits limits = rft_limits_from(&config);
    assert_int_equal(limits.tensors, 1);
    assert_int_equal(limits.rank, 2);
    assert_int_equal(limits.name_bytes, 3);
    assert_int_equal(limits.message_bytes, 4);
    assert_int_equal(limits.manifest_bytes, 5);
    assert_int_equal(limits.frame_bytes, 6);
    assert_int_equal(limits.version_bytes, 7);
    assert_int_equal(limits.blocks, 9);
    assert_int_equal(limits.window, 8);
}

/* ---- A GPU's memory as OFFER names it: at full length or not at all */

static rft_share share_sample(void)
{
    rft_share share = {.offset = 1, .bytes = UINT64_MAX, .address = UINT64_C(0x7f0123456789abcd)};
    for (unsigned i = 0; i < sizeof share.uuid; i++)
        share.uuid[i] = (unsigned char)(i + 1);
    for (unsigned i = 0; i < sizeof share.handle; i++)
        share.handle[i] = (unsigned char)(200 - i);
    return share;
}

TEST(every_field_of_a_share_comes_back)
{
    unsigned char bytes[RFT_SHARE_BYTES];
    rft_share before = share_sample(), after;
    memset(&after, 0xee, sizeof after);
    rft_share_write(&before, bytes);
    assert_ok(rft_share_read((rft_view){bytes, sizeof bytes}, &after, NULL));
    assert_memory_equal(after.uuid, before.uuid, sizeof before.uuid);
    assert_memory_equal(after.handle, before.handle, sizeof before.handle);
    assert_true(after.offset == before.offset && after.bytes == before.bytes);
    assert_true(after.address == before.address);
}

TEST(a_share_has_the_same_bytes_on_every_machine)
{
    unsigned char bytes[RFT_SHARE_BYTES];
    rft_share share = share_sample();
    rft_share_write(&share, bytes);
    assert_int_equal(bytes[0], 1);
    assert_int_equal(bytes[16], 200);
    assert_int_equal(bytes[80], 1);
    assert_int_equal(bytes[81], 0);
    assert_int_equal(bytes[96], 0xcd);
    assert_int_equal(bytes[103], 0x7f);
}

TEST(a_share_of_another_length_is_refused)
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
    return test_run("message");
}
