/*
 * session: the worker's side of the protocol as a state machine.
 *
 * Events go in: a message of the publisher, the time, a decision of the user. Messages for the
 * publisher are appended to the send queue, which the service thread sends after every event; a
 * version that is ready for the user is put into the mailbox. No socket, no clock, no thread: the
 * time is handed in, so every test chooses it. It belongs to one thread (the subscriber's service
 * thread). The states are drawn in session.c.
 */
#ifndef RFT_SESSION_H
#define RFT_SESSION_H

#include "subscriber/mailbox.h"
#include "subscriber/receive.h"

/* "connecting", "joining", …: for refit_subscriber_describe. */
const char *rft_session_state_name(rft_session_state state);

/* The names under which the worker says HELLO. */
typedef struct rft_session_identity {
    char worker[64];
    char host[64];
    bool near;         /* its endpoint cannot be reached from another host */
    uint64_t instance; /* drawn when the subscriber opened */
} rft_session_identity;

typedef struct rft_session {
    const refit_config *config;
    const rft_session_identity *identity;
    rft_mailbox *mailbox; /* borrowed */
    rft_limits limits;
    rft_send_queue send_queue; /* messages for the publisher */
    uint32_t failures_seen;    /* of the send queue's: the connection was ended for these */

    rft_session_report report; /* its fields are kept nowhere else */
    rft_version_id held;       /* the version that the user's engine runs */
    rft_image *held_image;     /* its bytes, as base of the next version; NULL: there are none */
    rft_image *applying;       /* with the user, undecided; outlives the connection */
    bool owes;                 /* the trainer of this connection waits to hear of `applying` */
    bool told;                 /* what is staged was committed, while the user had `applying` */
    rft_image *open;           /* decided, its update not yet closed */
    rft_receive receive;
    rft_shard_links links; /* to the publishers that share the tensors with the trainer's */
    rft_images images;

    uint64_t frame_bytes; /* these five are of WELCOME */
    uint32_t window;
    uint32_t heartbeat_ms; /* of the configuration while connecting */
    uint32_t heartbeat_timeout_ms;
    uint64_t proof;                      /* of the probe segment; 0: none */
    char place[RFT_SEGMENT_PLACE_BYTES]; /* where images are shared; empty: they are not */
    char why_not[RFT_SENTENCE_BYTES];    /* why no better path is taken; may be empty */
    char warned[RFT_SENTENCE_BYTES];     /* the last such sentence that was a warning */
    unsigned char uuid[RFT_UUID_BYTES];  /* of images.device */
    bool on_gpu;                    /* it has joined on the GPU that it shares with the trainer */
    bool whole;                     /* it takes no version piece by piece */
    const rft_selection *selection; /* borrowed; NULL: all of each version is taken */
    bool parts;                     /* of WELCOME: the trainer sends parts */
    bool names_gpu; /* the next HELLO is the first to name it: no WELCOME before answers that */
    char no_gpu[RFT_SENTENCE_BYTES]; /* why that device is not named, until the connection ends;
                                        empty: it is */
    uint64_t unmappable_epoch; /* of the trainer whose share could not be mapped: `unmappable` */
    char unmappable[RFT_SENTENCE_BYTES];
    rft_catalog *catalog;         /* of the last MANIFEST; NULL: none, or it was refused */
    refit_error manifest_failure; /* why it was refused; an OFFER that needs it is answered so */
    int64_t rejected_since;       /* the trainer's keys and ours do not fit; 0: they may */
    int64_t rejected_last;        /* when that was last said */
    bool rejoins;      /* HELLO is said instead of a beat, once no version is under way */
    int64_t next_beat; /* or the next HELLO */
    int64_t heard;     /* when the publisher last said something; at first the start */
    int64_t asked;     /* when HELLO was first said since then; 0: it was not */
} rft_session;

/* `config`, `identity` and `mailbox` are borrowed until close. Takes no memory for versions before
 * one is offered. */
void rft_session_init(rft_session *session, const refit_config *config,
                      const rft_session_identity *identity, rft_mailbox *mailbox, int64_t now);
void rft_session_close(rft_session *session);

/* One decoded message; payload is that of a FRAME. */
void rft_session_message(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now);
/* One that could not be decoded, and why: above a limit, it costs the version under way, and those
 * whose manifest it may have been; else the connection. */
void rft_session_garbage(rft_session *session, const refit_error *why, int64_t now);

/* The same of the publisher of a rank, through the link to it; and that its connection failed. */
void rft_session_link_message(rft_session *session, rft_shard_link *link,
                              const rft_message *message, rft_view payload, int64_t now);
void rft_session_link_failed(rft_session *session, rft_shard_link *link, const refit_error *why,
                             int64_t now);

/* Acts on the time: HELLO, BEAT, the publisher's silence, an offer's deadline, and the next part of
 * an image to verify. If a message could not be put into the send queue, the connection counts as
 * lost. */
void rft_session_tick(rft_session *session, int64_t now);
/* When tick has something to do at the latest. */
int64_t rft_session_tick_at(const rft_session *session);

/* The user's decision about the delivered version; `reason` is clean UTF-8. One that came piece by
 * piece is staged by accept, and the trainer decides (rft_piece_queue_await_commit). */
void rft_session_accept(rft_session *session, int64_t now);
void rft_session_refuse(rft_session *session, refit_status code, bool kept, const char *reason,
                        int64_t now);
/* The user has closed the decided update: its image is free again. */
void rft_session_release(rft_session *session, int64_t now);

/* What is taken of each version from now on, borrowed until close. */
void rft_session_select(rft_session *session, const rft_selection *selection, int64_t now);

/* The GPU whose memory may be shared, borrowed until close: it is named from now on. Once. */
void rft_session_use_device(rft_session *session, refit_device *device, int64_t now);

/* Whether it takes versions as a whole alone, since they are to be applied with a way back. */
void rft_session_take_whole(rft_session *session, bool whole, int64_t now);
/* Tells the trainer which pieces the user is done with. After each order and wake. */
void rft_session_collect(rft_session *session);

/* No connection comes about, and why. With REFIT_ERR_SECURITY the session ends once this has been
 * so for the heartbeat timeout; else it goes on trying. */
void rft_session_reject(rft_session *session, const refit_error *why, int64_t now);
/* Says BYE. */
void rft_session_leave(rft_session *session);

/* Whether the worker holds this version of the trainer it is connected to. */
bool rft_session_holds(const rft_session *session, uint64_t version);
/* Forgets the connection; says HELLO again after `pause_ms`. */
void rft_session_disconnect(rft_session *session, uint32_t pause_ms, int64_t now);

#endif
