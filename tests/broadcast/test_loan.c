/* Loans and the attic: what is back is freed, what is not stays as it is, and no longer by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/thread.h"
#include "broadcast/loan.h"
#include "tests/support/mapped.h"

#define BYTES 100000u

/* One with memory, of which the transport still has a payload if it is `out`. */
static rft_loan *make_loan(bool out)
{
    rft_loan *loan = rft_loan_open();
    assert_non_null(loan);
    assert_int_equal(rft_segment_create(&loan->segment, BYTES, NULL), REFIT_OK);
    assert_int_equal(rft_bytes_append(&loan->gathered, "frame", 5, NULL), REFIT_OK);
    if (out) rft_pending_raise(&loan->pending);
    return loan;
}

static bool has_name(const char *name)
{
    rft_segment found;
    if (rft_segment_attach(&found, name, BYTES, NULL) != REFIT_OK) return false;
    rft_segment_close(&found);
    return true;
}

static void what_is_back_is_freed_at_once(void **state)
{
    (void)state;
    rft_attic attic = {0};
    rft_loan *loan = make_loan(false);
    const void *there = loan->segment.memory;
    rft_attic_put(&attic, loan);
    rft_attic_put(&attic, NULL);
    assert_null(attic.first);
    assert_false(is_mapped(there));
}

static void what_is_out_keeps_its_bytes_but_not_its_name(void **state)
{
    (void)state;
    rft_attic attic = {0};
    rft_loan *loan = make_loan(true);
    unsigned char *there = loan->segment.memory;
    char name[RFT_SEGMENT_NAME_BYTES];
    strcpy(name, loan->segment.name);
    there[BYTES - 1] = 7;
    assert_true(has_name(name));
    rft_attic_put(&attic, loan);
    rft_attic_sweep(&attic);
    assert_false(has_name(name));
    assert_int_equal(there[BYTES - 1], 7);
    rft_pending_lower(&loan->pending);
    rft_attic_sweep(&attic);
    assert_null(attic.first);
    assert_false(is_mapped(there));
}

/* The one in the middle is back: the others keep their places. */
static void a_sweep_takes_out_any_of_several(void **state)
{
    (void)state;
    for (int back = 0; back < 3; back++) {
        rft_attic attic = {0}, other = {0};
        rft_loan *loans[3];
        for (int i = 0; i < 3; i++) {
            loans[i] = make_loan(true);
            rft_attic_put(i == 0 ? &other : &attic, loans[i]);
        }
        rft_attic_move(&attic, &other);
        assert_null(other.first);
        const void *there = loans[back]->segment.memory;
        rft_pending_lower(&loans[back]->pending);
        rft_attic_sweep(&attic);
        assert_false(is_mapped(there));
        int left = 0;
        for (rft_loan *loan = attic.first; loan != NULL; loan = loan->next, left++) {
            assert_ptr_not_equal(loan, loans[back]);
        }
        assert_int_equal(left, 2);
        for (int i = 0; i < 3; i++) {
            if (i != back) rft_pending_lower(&loans[i]->pending);
        }
        assert_int_equal(rft_attic_close(&attic, 0), 0);
    }
}

static void *give_back(void *user)
{
    rft_pending_lower(user);
    return NULL;
}

static void a_close_frees_what_comes_back_while_it_waits(void **state)
{
    (void)state;
    rft_attic attic = {0};
    const void *there[2];
    rft_loan *loans[2];
    rft_thread thread;
    for (int i = 0; i < 2; i++) {
        loans[i] = make_loan(true);
        there[i] = loans[i]->segment.memory;
        rft_attic_put(&attic, loans[i]);
    }
    rft_pending_lower(&loans[0]->pending); /* before the close, without a sweep since */
    assert_int_equal(rft_thread_start(&thread, "give", give_back, &loans[1]->pending, NULL),
                     REFIT_OK);
    assert_int_equal(rft_attic_close(&attic, rft_deadline(20000)), 0);
    rft_thread_join(thread);
    assert_null(attic.first);
    assert_false(is_mapped(there[0]));
    assert_false(is_mapped(there[1]));
}

/* A transport may read it as long as the process lives. */
static void what_does_not_come_back_is_counted_and_left(void **state)
{
    (void)state;
    rft_attic attic = {0}, again = {0};
    rft_loan *loan = make_loan(true);
    const void *back, *there = loan->segment.memory;
    rft_loan *other = make_loan(true);
    back = other->segment.memory;
    rft_attic_put(&attic, other);
    rft_attic_put(&attic, loan);
    rft_pending_lower(&other->pending);
    assert_int_equal(rft_attic_close(&attic, 0), 1);
    assert_null(attic.first);
    assert_true(is_mapped(there));
    assert_false(is_mapped(back));
    rft_pending_lower(&loan->pending); /* for the memory checkers */
    loan->next = NULL;
    rft_attic_put(&again, loan);
    assert_false(is_mapped(there));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_back_is_freed_at_once),
        cmocka_unit_test(what_is_out_keeps_its_bytes_but_not_its_name),
        cmocka_unit_test(a_sweep_takes_out_any_of_several),
        cmocka_unit_test(a_close_frees_what_comes_back_while_it_waits),
        cmocka_unit_test(what_does_not_come_back_is_counted_and_left),
    };
    return cmocka_run_group_tests_name("loan", tests, NULL, NULL);
}
