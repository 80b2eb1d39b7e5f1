/*
 * visits: which observers have just been told what a publisher holds. The question is short and the
 * answer may be long, so nobody is answered again and again, and no crowd is either.
 */
#ifndef RFT_VISITS_H
#define RFT_VISITS_H

#include "broadcast/channel.h"

#define RFT_VISITS_MOST 64u   /* observers that are answered within RFT_VISIT_MS */
#define RFT_VISIT_MS    1000u /* between two answers to one of them */

/* {0} is empty. */
typedef struct rft_visits {
    rft_peer_id ids[RFT_VISITS_MOST];
    int64_t at[RFT_VISITS_MOST]; /* when it was answered; 0: nobody was */
} rft_visits;

/* Whether this one is answered now; notes that it was. Who is not may ask again later. */
bool rft_visits_admit(rft_visits *visits, const rft_peer_id *from, int64_t now);

#endif
