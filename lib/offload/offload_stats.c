/*
 * The offloader's figures, as refit_stats shows them. A caller compiled against an older list gets
 * as many as its struct has room for.
 */
#include <string.h>

#include "base/clock.h"
#include "offload/offloader.h"

static void add_directions(const rft_offload_figures *figures, refit_stats *stats)
{
    stats->offload_count = figures->count[RFT_OFFLOAD];
    stats->offload_copies_per_cycle = figures->copies_last;
    stats->offload_bytes_total = figures->bytes_total[RFT_OFFLOAD];
    stats->offload_bytes_last = figures->bytes_last[RFT_OFFLOAD];
    stats->offload_reclaimed_bytes_last = figures->reclaimed_last;
    stats->offload_seconds_last = rft_seconds(figures->last[RFT_OFFLOAD]);
    stats->offload_exposed_seconds_last = rft_seconds(figures->exposed[RFT_OFFLOAD]);
    stats->restore_count = figures->count[RFT_RESTORE];
    stats->restore_bytes_total = figures->bytes_total[RFT_RESTORE];
    stats->restore_bytes_last = figures->bytes_last[RFT_RESTORE];
    stats->restore_seconds_last = rft_seconds(figures->last[RFT_RESTORE]);
    stats->restore_exposed_seconds_last = rft_seconds(figures->exposed[RFT_RESTORE]);
    stats->offload_failures = figures->failures;
}

static void add_image(refit_offloader *offloader, refit_stats *stats)
{
    stats->offload_regions = offloader->regions.count;
    stats->host_payload_bytes = offloader->schedule.layout.payload_bytes;
    if (offloader->image == NULL) return;
    rft_host_arena_info info = rft_host_arena_describe(offloader->image);
    stats->host_bytes = info.bytes;
    stats->host_ready_bytes = info.ready_bytes;
    stats->host_pinned_bytes = info.pinned_bytes;
    stats->host_pageable_bytes = info.pageable_bytes;
    stats->host_huge_pages = info.huge_pages;
    stats->host_pin_seconds = info.seconds;
}

refit_status refit_offloader_stats(refit_offloader *offloader, refit_stats *stats,
                                   refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || stats == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_stats needs an offloader and a place for the figures");
    RFT_REFUSE_IF(stats->size < sizeof stats->size, error, REFIT_ERR_INVALID,
                  "refit_stats.size is %zu: call refit_stats_init first", stats->size);
    refit_stats whole = {0};
    size_t known = stats->size < sizeof whole ? stats->size : sizeof whole;
    memcpy(&whole, stats, known);
    whole.host_bytes = whole.host_ready_bytes = 0;
    whole.host_pinned_bytes = whole.host_pageable_bytes = 0;
    add_image(offloader, &whole);
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    add_directions(&offloader->figures, &whole);
    uint64_t pageable = rft_pageable_bytes(offloader);
    whole.host_bytes += pageable;
    whole.host_ready_bytes += pageable;
    whole.host_pageable_bytes += pageable;
    whole.leases = offloader->leases;
    rft_unlock(&offloader->lock);
    memcpy(stats, &whole, known);
    return REFIT_OK;
}
