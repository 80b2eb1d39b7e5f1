/*
 * Memory on loan to the transport. A stopped worker can keep frames in a queue for as long as its
 * connection stands; the publisher goes on with other memory meanwhile, and frees the old when its
 * count has come down. Looking costs one atomic read a loan, and there are few.
 */
#include "broadcast/loan.h"

#include <stddef.h>

#include "base/alloc.h"

rft_loan *rft_loan_open(void)
{
    rft_loan *loan = rft_calloc(1, sizeof *loan);
    if (loan != NULL) loan->segment.fd = -1;
    return loan;
}

static void loan_close(rft_loan *loan)
{
    rft_pinning_close(&loan->pinning);
    rft_segment_close(&loan->segment);
    rft_bytes_close(&loan->gathered);
    rft_free(loan);
}

void rft_attic_put(rft_attic *attic, rft_loan *loan)
{
    if (loan == NULL) return;
    rft_segment_retire(&loan->segment);
    loan->next = attic->first;
    attic->first = loan;
    rft_attic_sweep(attic);
}

void rft_attic_move(rft_attic *attic, rft_attic *from)
{
    while (from->first != NULL) {
        rft_loan *loan = from->first;
        from->first = loan->next;
        rft_attic_put(attic, loan);
    }
}

void rft_attic_sweep(rft_attic *attic)
{
    for (rft_loan **at = &attic->first; *at != NULL;) {
        rft_loan *loan = *at;
        if (rft_pending_count(&loan->pending) == 0) {
            *at = loan->next;
            loan_close(loan);
        } else {
            at = &loan->next;
        }
    }
}

uint32_t rft_attic_close(rft_attic *attic, int64_t deadline)
{
    uint32_t left = 0;
    for (rft_loan *loan = attic->first; loan != NULL; loan = loan->next) {
        if (!rft_pending_wait(&loan->pending, deadline)) left++;
    }
    rft_attic_sweep(attic);
    attic->first = NULL;
    return left;
}
