/*
 * A call on the stream stands until the bytes of the batch before it were due at the given rate.
 * Calls run one after the other, so where the operation has come to is known without asking. A
 * stream that was held up by others makes up for one step at most: who holds it up is who the limit
 * is for. Knows nothing of events or of who waits.
 */
#include "transfer/pacer.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"

#define STEPS_A_SECOND 20u
#define LEAST_STEP     UINT64_C(65536)

struct rft_pacer {
    uint64_t rate;
    rft_mutex lock;
    rft_cond hurried;
    bool hurry;           /* guarded by lock, like the rest */
    const rft_plan *plan; /* of the operation under way */
    uint32_t at;          /* its next batch */
    int64_t due;          /* when that one has its turn; 0: at once, as the first */
};

refit_status rft_pacer_open(uint64_t rate, rft_pacer **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    *out = NULL;
    if (rate == 0) return REFIT_OK;
    rft_pacer *pacer = rft_calloc(1, sizeof *pacer);
    RFT_REFUSE_IF(pacer == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a pacer");
    pacer->rate = rate;
    RFT_TRY_GOTO(rft_mutex_open(&pacer->lock, error), free_pacer);
    RFT_TRY_GOTO(rft_cond_open(&pacer->hurried, error), close_lock);
    *out = pacer;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&pacer->lock);
free_pacer:
    rft_free(pacer);
    return status;
}

void rft_pacer_close(rft_pacer *pacer)
{
    if (pacer == NULL) return;
    rft_cond_close(&pacer->hurried);
    rft_mutex_close(&pacer->lock);
    rft_free(pacer);
}

uint64_t rft_pacer_step(uint64_t rate)
{
    return rate == 0 ? 0 : rft_max_u64(rate / STEPS_A_SECOND, LEAST_STEP);
}

void rft_pacer_begin(rft_pacer *pacer, const rft_plan *plan)
{
    rft_lock(&pacer->lock);
    pacer->hurry = false;
    pacer->plan = plan;
    pacer->at = 0;
    pacer->due = 0;
    rft_unlock(&pacer->lock);
}

/* The batch that has its turn now: zeroes have none. */
static const rft_batch *next_batch(rft_pacer *pacer)
{
    const rft_plan *plan = pacer->plan;
    while (plan->copies[plan->batches[pacer->at].first].from == NULL) {
        pacer->at++;
    }
    return &plan->batches[pacer->at++];
}

static int64_t time_of(const rft_pacer *pacer, uint64_t bytes)
{
    return (int64_t)((double)bytes / (double)pacer->rate * 1e9);
}

/* How late a batch is that begins `now`, as far as that is made up for. */
static int64_t made_up(const rft_pacer *pacer, int64_t now)
{
    if (pacer->due == 0 || now < pacer->due) return 0;
    int64_t late = now - pacer->due;
    int64_t most = time_of(pacer, rft_pacer_step(pacer->rate));
    return late < most ? late : most;
}

/* On the stream's thread. */
static void stand(void *user)
{
    rft_pacer *pacer = user;
    rft_lock(&pacer->lock);
    while (!pacer->hurry && rft_now() < pacer->due) {
        (void)rft_cond_wait(&pacer->hurried, &pacer->lock, pacer->due);
    }
    int64_t now = rft_now();
    pacer->due = now - made_up(pacer, now) + time_of(pacer, next_batch(pacer)->bytes);
    rft_unlock(&pacer->lock);
}

refit_status rft_pacer_put(rft_pacer *pacer, refit_device *device, refit_stream_ref stream,
                           refit_error *error)
{
    refit_status status = refit_stream_call(device, stream, stand, pacer, error);
    RFT_REFUSE_IF(status == REFIT_ERR_UNSUPPORTED, error, status,
                  "offload.rate_limit needs a device whose streams can call back: set it to 0");
    return status;
}

void rft_pacer_hurry(rft_pacer *pacer)
{
    if (pacer == NULL) return;
    rft_lock(&pacer->lock);
    pacer->hurry = true;
    rft_cond_wake_all(&pacer->hurried);
    rft_unlock(&pacer->lock);
}
