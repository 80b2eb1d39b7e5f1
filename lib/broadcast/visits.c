/* Visits: the place of the one that was longest ago goes to the next. */
#include "broadcast/visits.h"

#include "base/clock.h"

static bool is_recent(int64_t at, int64_t now)
{
    return at != 0 && now < rft_after_ms(at, RFT_VISIT_MS);
}

bool rft_visits_admit(rft_visits *visits, const rft_peer_id *from, int64_t now)
{
    uint32_t oldest = 0;
    for (uint32_t i = 0; i < RFT_VISITS_MOST; i++) {
        if (is_recent(visits->at[i], now) && rft_peer_id_equal(&visits->ids[i], from)) return false;
        if (visits->at[i] < visits->at[oldest]) oldest = i;
    }
    if (is_recent(visits->at[oldest], now)) return false;
    visits->ids[oldest] = *from;
    visits->at[oldest] = now;
    return true;
}
