/* Visits: the place of the one that was longest ago goes to the next. */
#include "publisher/query_limit.h"

#include "base/clock.h"

static bool is_recent(int64_t at, int64_t now)
{
    return at != 0 && now < rft_after_ms(at, RFT_QUERY_LIMIT_MS);
}

bool rft_query_limit_admit(rft_query_limit *query_limit, const rft_peer_id *from, int64_t now)
{
    uint32_t oldest = 0;
    for (uint32_t i = 0; i < RFT_QUERY_LIMIT_MOST; i++) {
        if (is_recent(query_limit->at[i], now) && rft_peer_id_equal(&query_limit->ids[i], from))
            return false;
        if (query_limit->at[i] < query_limit->at[oldest]) oldest = i;
    }
    if (is_recent(query_limit->at[oldest], now)) return false;
    query_limit->ids[oldest] = *from;
    query_limit->at[oldest] = now;
    return true;
}
