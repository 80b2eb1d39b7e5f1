/* Versions written into memory of another type: converted, and taken back as it was. */
#include "kernels/floats.h"
#include "tests/support/fitting.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define ELEMENTS 600001u /* several windows, and a last block that is short */

static float wide[ELEMENTS];
static uint16_t half[ELEMENTS], brain[ELEMENTS];
static uint32_t engine[ELEMENTS], before[ELEMENTS], expected[ELEMENTS];

/* Between 2^-30 and 2^17, of both signs: what fp16 has, and what is beyond it at both ends. */
static void fill(uint64_t seed)
{
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        uint64_t random = seeded_next(&seed);
        uint32_t exponent = 97u + (uint32_t)(random >> 32) % 48u;
        uint32_t bits = (uint32_t)(random & 0x807FFFFFu) | exponent << 23;
        memcpy(&wide[i], &bits, sizeof bits);
        half[i] = (uint16_t)(random >> 40 & 0xBFFFu);
        brain[i] = (uint16_t)(random >> 48 & 0xBFFFu);
    }
}

static void fill_engine(uint64_t seed)
{
    for (uint32_t i = 0; i < ELEMENTS; i++)
        before[i] = (uint32_t)seeded_next(&seed);
    memcpy(engine, before, sizeof engine);
}

static uint16_t to_brain(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static float from_half(uint16_t bits)
{
    float value;
    rft_floats_from_half(&value, &bits, 1);
    return value;
}

static float from_brain(uint16_t bits)
{
    uint32_t wider = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wider, sizeof value);
    return value;
}

static float value_of(refit_dtype from, uint32_t i)
{
    if (from == REFIT_F32) return wide[i];
    return from == REFIT_F16 ? from_half(half[i]) : from_brain(brain[i]);
}

static void expect(refit_dtype from, refit_dtype to)
{
    memcpy(expected, before, sizeof expected);
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        float value = value_of(from, i);
        uint16_t narrow = to_brain(value);
        if (to == REFIT_F16) rft_floats_to_half(&narrow, &value, 1);
        if (to == REFIT_F32) memcpy((unsigned char *)expected + 4u * i, &value, 4);
        if (to != REFIT_F32) memcpy((unsigned char *)expected + 2u * i, &narrow, 2);
    }
}

static fit_tensor tensor_of(refit_dtype dtype)
{
    const void *bytes = dtype == REFIT_F32   ? (const void *)wide
                        : dtype == REFIT_F16 ? (const void *)half
                                             : (const void *)brain;
    return (fit_tensor){"w", dtype, ELEMENTS, bytes, false};
}

static refit_destination destination_of(refit_dtype dtype)
{
    return (refit_destination){.size = sizeof(refit_destination),
                               .name = "w",
                               .memory = engine,
                               .bytes = (uint64_t)ELEMENTS * refit_dtype_bits(dtype) / 8,
                               .dtype = dtype,
                               .cast = 1};
}

/* The engine's memory on a device, if it is on one. */
typedef struct place {
    refit_device *device;
    void *memory;
} place;

static void place_open(place *it, bool on_device, refit_destination *destination)
{
    *it = (place){.device = NULL};
    if (!on_device) return;
    assert_ok(refit_device_open("host", NULL, &it->device, NULL));
    assert_ok(refit_memory_alloc(it->device, sizeof engine, &it->memory, NULL));
    assert_ok(
        refit_stream_copy(it->device, REFIT_STREAM_NONE, it->memory, engine, sizeof engine, NULL));
    destination->device = it->device;
    destination->memory = it->memory;
}

static void place_close(place *it)
{
    if (it->device == NULL) return;
    assert_ok(refit_memory_free(it->device, it->memory, NULL));
    assert_ok(refit_device_close(it->device, NULL));
}

static void look(const place *it)
{
    if (it->device == NULL) return;
    assert_ok(
        refit_stream_copy(it->device, REFIT_STREAM_NONE, engine, it->memory, sizeof engine, NULL));
}

static void apply(fitting *fit, const place *where)
{
    assert_done(refit_update_apply(fit->update, NULL, error));
    look(where);
    assert_memory_equal(engine, expected, sizeof engine);
}

/* Refused, it is as it was; then accepted; then a version of which nothing differs. */
static void run_pair(refit_dtype from, refit_dtype to, bool on_gpu, bool verify, bool on_device)
{
    fitting fit;
    place where;
    fit_tensor tensor = tensor_of(from);
    refit_destination destination = destination_of(to);
    fill(from * 100u + to);
    fill_engine(to);
    expect(from, to);
    place_open(&where, on_device, &destination);
    fit_open(&fit, on_gpu, verify, &tensor, 1);
    assert_ok(refit_subscriber_bind(fit.subscriber, &destination, 1, NULL));
    fit_offer(&fit);
    assert_ok(refit_update_accept(fit.update, NULL)); /* as if the engine had it */
    fit_end(&fit);
    fit_offer(&fit);
    apply(&fit, &where);
    apply(&fit, &where);
    assert_ok(refit_update_refuse(fit.update, NULL, 0, NULL));
    look(&where);
    assert_memory_equal(engine, before, sizeof engine);
    fit_end(&fit);
    assert_ok(refit_subscriber_next(fit.subscriber, 30000, &fit.update, NULL));
    apply(&fit, &where);
    assert_ok(refit_update_accept(fit.update, NULL));
    refit_update_close(fit.update);
    fit_close(&fit);
    place_close(&where);
}

TEST(versions_are_converted_and_old_bytes_come_back)
{
    static const refit_dtype dtypes[] = {REFIT_F32, REFIT_F16, REFIT_BF16};
    for (uint32_t i = 0; i < 18; i++)
        run_pair(dtypes[i / 3 % 3], dtypes[i % 3], i % 2 == 1, i % 3 != 1, i >= 9);
}

static refit_status try_apply(fit_tensor tensor, refit_destination destination, refit_error *error)
{
    fitting fit;
    fill_engine(3);
    fit_open(&fit, false, false, &tensor, 1);
    assert_ok(refit_subscriber_bind(fit.subscriber, &destination, 1, NULL));
    fit_offer(&fit);
    refit_status status = refit_update_apply(fit.update, NULL, error);
    assert_memory_equal(engine, before, sizeof engine);
    fit_end(&fit);
    fit_close(&fit);
    return status;
}

TEST(what_is_not_converted_is_refused)
{
    refit_error error;
    refit_destination destination = destination_of(REFIT_BF16);
    destination.bytes -= 2;
    assert_invalid(try_apply(tensor_of(REFIT_F32), destination, &error));
    assert_says(&error, "1200002 bytes as BF16, and its destination 1200000");
    destination = destination_of(REFIT_BF16);
    destination.cast = 0;
    assert_invalid(try_apply(tensor_of(REFIT_F32), destination, &error));
    destination = destination_of(REFIT_F32);
    destination.dtype = REFIT_I32;
    assert_invalid(try_apply(tensor_of(REFIT_F32), destination, &error));
    assert_says(&error, "only F32, F16 and BF16");
}

TEST(lists_with_casts_that_make_no_sense_are_refused)
{
    fitting fit;
    refit_error error;
    fit_tensor tensor = tensor_of(REFIT_F32);
    refit_destination list[2] = {destination_of(REFIT_BF16), destination_of(REFIT_F16)};
    fit_open(&fit, false, false, &tensor, 1);
    list[1].name = "v";
    assert_invalid(refit_subscriber_bind(fit.subscriber, list, 2, &error));
    assert_says(&error, "one memory of two types");
    list[0].dtype = 0;
    assert_invalid(refit_subscriber_bind(fit.subscriber, list, 1, &error));
    assert_says(&error, "set dtype");
    list[1].cast = 2;
    assert_invalid(refit_subscriber_bind(fit.subscriber, list + 1, 1, &error));
    fit_close(&fit);
}

/* ---- fp16 */

TEST(every_half_is_what_it_says)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint16_t again, one = (uint16_t)bits;
        uint32_t exponent = bits >> 10 & 31u, fraction = bits & 1023u;
        float value = from_half(one);
        rft_floats_to_half(&again, &value, 1);
        if (exponent == 31 && fraction != 0) {
            assert_true(value != value);
            assert_int_equal(again, 0x7FFF);
            continue;
        }
        double steps = exponent == 0 ? fraction : (1024.0 + fraction);
        for (uint32_t i = 1; i < exponent && exponent < 31; i++)
            steps *= 2;
        if (exponent < 31) assert_true((value < 0 ? -value : value) * 16777216.0 == steps);
        assert_int_equal(again, one);
    }
}

/* Half-way between two neighbours it is the even one; beyond that the nearer one. */
TEST(floats_become_the_nearest_half)
{
    for (uint32_t bits = 0; bits < 0x7C00; bits++) {
        float low = from_half((uint16_t)bits);
        float high = bits == 0x7BFF ? 65536.0F : from_half((uint16_t)(bits + 1));
        float middle = low + (high - low) / 2;
        uint32_t raw;
        memcpy(&raw, &middle, sizeof raw);
        for (int aside = -1; aside <= 1; aside++) {
            uint32_t near = raw + (uint32_t)aside;
            uint16_t got;
            float value;
            memcpy(&value, &near, sizeof value);
            rft_floats_to_half(&got, &value, 1);
            uint32_t even = bits % 2 == 0 ? bits : bits + 1;
            assert_int_equal(got, aside < 0 ? bits : aside > 0 ? bits + 1 : even);
        }
    }
}

int main(void)
{
    return test_run("apply_cast");
}
