/*
 * visits: which observers have just been told what a publisher holds. The question is short and the
 * answer may be long, so nobody is answered again and again, and no crowd is either.
 */
#ifndef RFT_QUERY_LIMIT_H
#define RFT_QUERY_LIMIT_H

#include "net/channel.h"

#define RFT_QUERY_LIMIT_MOST 64u   /* observers that are answered within RFT_QUERY_LIMIT_MS */
#define RFT_QUERY_LIMIT_MS   1000u /* between two answers to one of them */

/* {0} is empty. */
typedef struct rft_query_limit {
    rft_peer_id ids[RFT_QUERY_LIMIT_MOST];
    int64_t at[RFT_QUERY_LIMIT_MOST]; /* when it was answered; 0: nobody was */
} rft_query_limit;

/* Whether this one is answered now; notes that it was. Who is not may ask again later. */
bool rft_query_limit_admit(rft_query_limit *query_limit, const rft_peer_id *from, int64_t now);

#endif
