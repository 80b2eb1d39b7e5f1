/*
 * A call on the stream stands until the bytes of the batch before it were due at the given rate.
 * Calls run one after the other, so where the operation has come to is known without asking. A
 * stream that was held up by others makes up for one step at most: who holds it up is who the limit
 * is for. Knows nothing of events or of who waits.
 */
#include "transfer/rate_limiter.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"

#define STEPS_A_SECOND 20u
#define LEAST_STEP     UINT64_C(65536)

struct rft_rate_limiter {
    uint64_t rate;
    rft_mutex lock;
    rft_cond hurried;
    bool hurry;           /* guarded by lock, like the rest */
    const rft_plan *plan; /* of the operation under way */
    uint32_t at;          /* its next batch */
    int64_t due;          /* when that one has its turn; 0: at once, as the first */
};

refit_status rft_rate_limiter_open(uint64_t rate, rft_rate_limiter **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    *out = NULL;
    if (rate == 0) return REFIT_OK;
    rft_rate_limiter *limiter = rft_calloc(1, sizeof *limiter);
    RFT_REFUSE_IF(limiter == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a rate limiter");
    limiter->rate = rate;
    RFT_TRY_GOTO(rft_mutex_open(&limiter->lock, error), free_limiter);
    RFT_TRY_GOTO(rft_cond_open(&limiter->hurried, error), close_lock);
    *out = limiter;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&limiter->lock);
free_limiter:
    rft_free(limiter);
    return status;
}

void rft_rate_limiter_close(rft_rate_limiter *limiter)
{
    if (limiter == NULL) return;
    rft_cond_close(&limiter->hurried);
    rft_mutex_close(&limiter->lock);
    rft_free(limiter);
}

uint64_t rft_rate_limiter_step(uint64_t rate)
{
    return rate == 0 ? 0 : rft_max_u64(rate / STEPS_A_SECOND, LEAST_STEP);
}

void rft_rate_limiter_begin(rft_rate_limiter *limiter, const rft_plan *plan)
{
    rft_lock(&limiter->lock);
    limiter->hurry = false;
    limiter->plan = plan;
    limiter->at = 0;
    limiter->due = 0;
    rft_unlock(&limiter->lock);
}

/* The batch that has its turn now: zeroes have none. */
static const rft_batch *next_batch(rft_rate_limiter *limiter)
{
    const rft_plan *plan = limiter->plan;
    while (plan->copies[plan->batches[limiter->at].first].from == NULL) {
        limiter->at++;
    }
    return &plan->batches[limiter->at++];
}

static int64_t time_of(const rft_rate_limiter *limiter, uint64_t bytes)
{
    return (int64_t)((double)bytes / (double)limiter->rate * 1e9);
}

/* How late a batch is that begins `now`, as far as that is made up for. */
static int64_t made_up(const rft_rate_limiter *limiter, int64_t now)
{
    if (limiter->due == 0 || now < limiter->due) return 0;
    int64_t late = now - limiter->due;
    int64_t most = time_of(limiter, rft_rate_limiter_step(limiter->rate));
    return late < most ? late : most;
}

/* On the stream's thread. */
static void stand(void *user)
{
    rft_rate_limiter *limiter = user;
    rft_lock(&limiter->lock);
    while (!limiter->hurry && rft_now() < limiter->due) {
        (void)rft_cond_wait(&limiter->hurried, &limiter->lock, limiter->due);
    }
    int64_t now = rft_now();
    limiter->due = now - made_up(limiter, now) + time_of(limiter, next_batch(limiter)->bytes);
    rft_unlock(&limiter->lock);
}

refit_status rft_rate_limiter_put(rft_rate_limiter *limiter, refit_device *device,
                                  refit_stream_ref stream, refit_error *error)
{
    refit_status status = refit_stream_call(device, stream, stand, limiter, error);
    RFT_REFUSE_IF(status == REFIT_ERR_UNSUPPORTED, error, status,
                  "offload.rate_limit needs a device whose streams can call back: set it to 0");
    return status;
}

void rft_rate_limiter_hurry(rft_rate_limiter *limiter)
{
    if (limiter == NULL) return;
    rft_lock(&limiter->lock);
    limiter->hurry = true;
    rft_cond_wake_all(&limiter->hurried);
    rft_unlock(&limiter->lock);
}
