/*
 * The figures of refit cycles: each verb hands in how long it took and how it ended. Time between
 * the verbs belongs to the cycle but is not exposed: the caller was busy with something else.
 */
#include "controller/cycle.h"

#include <string.h>

#include "base/clock.h"

void rft_cycle_begin(rft_cycle *cycle, int64_t began)
{
    cycle->open = true;
    cycle->failed = false;
    cycle->began = began;
    cycle->exposed = 0;
    memset(cycle->phases, 0, sizeof cycle->phases);
}

refit_status rft_cycle_count(rft_cycle *cycle, rft_phase phase, int64_t began, refit_status status)
{
    int64_t spent = rft_now() - began;
    /* A verb may be called again: to go on, or for nothing. */
    cycle->phases[phase] = (cycle->open ? cycle->phases[phase] : 0) + spent;
    cycle->exposed += spent;
    if (status != REFIT_OK && cycle->open && !cycle->failed) {
        cycle->failed = true;
        cycle->failures++;
    }
    return status;
}

void rft_cycle_end(rft_cycle *cycle)
{
    if (!cycle->open) return;
    cycle->open = false;
    cycle->completed++;
    cycle->last_seconds_ns = rft_now() - cycle->began;
    cycle->last_exposed_ns = cycle->exposed;
}

static void add_cycle(const rft_cycle *cycle, refit_stats *stats)
{
    stats->cycles = cycle->completed;
    stats->cycle_failures = cycle->failures;
    stats->cycle_seconds_last = rft_seconds(cycle->last_seconds_ns);
    stats->cycle_exposed_seconds_last = rft_seconds(cycle->last_exposed_ns);
    stats->clear_seconds_last = rft_seconds(cycle->phases[RFT_PHASE_CLEAR]);
    stats->refit_seconds_last = rft_seconds(cycle->phases[RFT_PHASE_PUBLISH]);
    stats->return_seconds_last = stats->restore_seconds_last;
    stats->join_seconds_last = rft_seconds(cycle->phases[RFT_PHASE_JOIN]);
}

refit_status refit_controller_stats(refit_controller *controller, refit_stats *stats,
                                    refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL || stats == NULL, error, REFIT_ERR_INVALID,
                  "refit_controller_stats needs a controller and a place for the figures");
    RFT_REFUSE_IF(stats->size < sizeof stats->size, error, REFIT_ERR_INVALID,
                  "refit_stats.size is %zu: call refit_stats_init first", stats->size);
    refit_stats whole;
    refit_stats_init(&whole, sizeof whole);
    if (controller->offloader != NULL) {
        RFT_TRY(refit_offloader_stats(controller->offloader, &whole, error));
    }
    if (controller->publisher != NULL) {
        RFT_TRY(refit_publisher_stats(controller->publisher, &whole, error));
    }
    add_cycle(&controller->cycle, &whole);
    size_t known = stats->size < sizeof whole ? stats->size : sizeof whole;
    whole.size = stats->size;
    memcpy(stats, &whole, known);
    return REFIT_OK;
}
