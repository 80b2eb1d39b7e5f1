/* subscriber: the worker's end as the door's files share it. */
#ifndef RFT_SUBSCRIBER_H
#define RFT_SUBSCRIBER_H

#include "subscriber/in_place.h"
#include "subscriber/subscriber_service.h"

/* One received version in the caller's hands. There is one in each subscriber, so that receiving
 * versions allocates nothing. It belongs to the caller's thread. */
struct refit_update {
    refit_subscriber *subscriber;
    rft_image *image; /* lent by the session; NULL: no update is open */
    bool decided;
};

struct refit_subscriber {
    rft_subscriber_service service;
    refit_device *device; /* retained; NULL: none was given, or it shares nothing */
    rft_in_place engine;  /* memory that updates are applied into, if any was bound */
    refit_update update;
};

#endif
