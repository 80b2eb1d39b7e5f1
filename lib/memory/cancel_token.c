/*
 * Progress and the order to stop are atomics, so that reading them never waits for the work; a
 * condition wakes work that pauses. Knows nothing of what the work is.
 */
#include "memory/cancel_token.h"

refit_status rft_cancel_token_open(rft_cancel_token *token, refit_error *error)
{
    atomic_init(&token->in_line, false);
    atomic_init(&token->taken, 0);
    atomic_init(&token->ready, 0);
    token->left = NULL;
    atomic_init(&token->stopped, false);
    RFT_TRY(rft_mutex_open(&token->lock, error));
    refit_status status = rft_cond_open(&token->moved, error);
    if (status != REFIT_OK) rft_mutex_close(&token->lock);
    return status;
}

void rft_cancel_token_close(rft_cancel_token *token)
{
    rft_cond_close(&token->moved);
    rft_mutex_close(&token->lock);
}

void rft_cancel_token_stop(rft_cancel_token *token)
{
    rft_lock(&token->lock);
    atomic_store(&token->stopped, true);
    rft_cond_wake_all(&token->moved);
    rft_unlock(&token->lock);
}

refit_status rft_cancel_token_check(rft_cancel_token *token, refit_error *error)
{
    RFT_REFUSE_IF(atomic_load(&token->stopped), error, REFIT_ERR_CANCELLED,
                  "the host image was cancelled while its memory was being taken");
    return REFIT_OK;
}

void rft_cancel_token_pause(rft_cancel_token *token, int64_t deadline)
{
    rft_lock(&token->lock);
    while (!atomic_load(&token->stopped) && rft_cond_wait(&token->moved, &token->lock, deadline)) {
    }
    rft_unlock(&token->lock);
}
