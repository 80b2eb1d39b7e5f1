/*
 * listener: a subscriber's service thread. It owns the channel and the session, and meets the
 * caller at the desk.
 */
#ifndef RFT_LISTENER_H
#define RFT_LISTENER_H

#include "broadcast/backlog.h"
#include "broadcast/desk.h"

typedef struct rft_listener {
    refit_config config;
    rft_session_identity identity;
    rft_desk desk;
    rft_thread thread;
    /* From start to stop these belong to the service thread alone. */
    rft_channel *channel;
    rft_session session;
    rft_backlog backlog;
    bool backlog_failed; /* a message could not be put in: the connection is lost */
} rft_listener;

/* Connects and starts the thread; config is copied. */
refit_status rft_listener_start(rft_listener *listener, const char *endpoint,
                                const refit_config *config, refit_error *error);
/* Says goodbye, joins the thread and frees all. */
void rft_listener_stop(rft_listener *listener);

#endif
