/*
 * subscriber_service: a subscriber's service thread. It owns the channel and the session, and
 * exchanges data with the caller in the mailbox.
 */
#ifndef RFT_SUBSCRIBER_SERVICE_H
#define RFT_SUBSCRIBER_SERVICE_H

#include "net/send_queue.h"
#include "subscriber/mailbox.h"

typedef struct rft_subscriber_service {
    refit_config config;
    rft_session_identity identity;
    rft_mailbox mailbox;
    rft_thread thread;
    /* From start to stop these belong to the service thread alone. */
    rft_channel *channel;
    rft_session session;
    rft_send_queue send_queue;
    bool send_queue_failed; /* a message could not be put in: the connection is lost */
} rft_subscriber_service;

/* Connects and starts the thread; config is copied. */
refit_status rft_subscriber_service_start(rft_subscriber_service *service, const char *endpoint,
                                          const refit_config *config, refit_error *error);
/* Says BYE, joins the thread and frees all. */
void rft_subscriber_service_stop(rft_subscriber_service *service);

#endif
