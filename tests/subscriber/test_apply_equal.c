/* Two tensors of the trainer that share one memory at the worker: they must be equal. */
#include "tests/support/fitting.h"
#include "tests/support/test.h"

#define ELEMENTS 300001u /* more than a window compares at once */
#define BYTES    (ELEMENTS * sizeof(float))

static float embed[ELEMENTS], head[ELEMENTS], engine[ELEMENTS];

static const fit_tensor TENSORS[] = {
    {"embed", REFIT_F32, ELEMENTS, embed, false},
    {"head", REFIT_F32, ELEMENTS, head, false},
    {"again", REFIT_F32, ELEMENTS, NULL, true},
};

static void fill(float *values, float first)
{
    for (uint32_t i = 0; i < ELEMENTS; i++)
        values[i] = first + (float)i;
}

static void bind_all(fitting *fit, refit_dtype dtype)
{
    refit_destination list[3];
    memset(list, 0, sizeof list);
    for (uint32_t i = 0; i < fit->count; i++) {
        list[i] = (refit_destination){.size = sizeof *list,
                                      .name = fit->tensors[i].name,
                                      .memory = engine,
                                      .bytes = BYTES,
                                      .dtype = dtype};
    }
    assert_ok(refit_subscriber_bind(fit->subscriber, list, fit->count, NULL));
}

static void check_refused(fitting *fit)
{
    refit_error error;
    fit_offer(fit);
    assert_invalid(refit_update_apply(fit->update, NULL, &error));
    assert_says(&error, "'embed' and 'head' have one memory here");
    assert_says(&error, "tie them at the trainer");
    for (uint32_t i = 0; i < ELEMENTS; i++)
        assert_true(engine[i] == -1.0F);
    assert_int_equal(refit_update_accept(fit->update, NULL), REFIT_ERR_STATE);
    assert_ok(refit_update_refuse(fit->update, NULL, 1, NULL));
    fit_end(fit);
    assert_int_equal(fit->status, REFIT_ERR_PEER);
}

static void check_taken(fitting *fit)
{
    fit_offer(fit);
    assert_done(refit_update_apply(fit->update, NULL, error));
    assert_memory_equal(engine, embed, BYTES);
    assert_ok(refit_update_accept(fit->update, NULL));
    fit_end(fit);
    assert_ok(fit->status);
}

/* Each version is looked at: they may be equal in one, and differ in the next. */
TEST(one_memory_takes_two_tensors_while_they_are_equal)
{
    for (int trial = 0; trial < 4; trial++) {
        fitting fit;
        fit_open(&fit, trial / 2 == 1, trial % 2 == 1, TENSORS, 3);
        bind_all(&fit, trial % 2 == 1 ? REFIT_F32 : (refit_dtype)0);
        fill(engine, 7);
        fill(embed, 1);
        fill(head, 1);
        check_taken(&fit);
        for (uint32_t i = 0; i < ELEMENTS; i++)
            engine[i] = -1.0F;
        head[ELEMENTS - 1] += 1;
        check_refused(&fit);
        head[ELEMENTS - 1] -= 1;
        head[0] = -0.5F;
        check_refused(&fit);
        fill(embed, 3);
        fill(head, 3);
        check_taken(&fit);
        fit_close(&fit);
    }
}

/* The same bytes mean something else in another type. */
TEST(equal_bytes_of_two_types_are_not_equal)
{
    fitting fit;
    fit_tensor tensors[2] = {TENSORS[0], TENSORS[1]};
    tensors[1].dtype = REFIT_I32;
    fit_open(&fit, false, false, tensors, 2);
    bind_all(&fit, 0);
    fill(embed, 1);
    memcpy(head, embed, BYTES);
    for (uint32_t i = 0; i < ELEMENTS; i++)
        engine[i] = -1.0F;
    check_refused(&fit);
    fit_close(&fit);
}

int main(void)
{
    return test_run("apply_equal");
}
