/*
 * follower: the worker's side of an archive, in the place of the session.
 *
 * The time and the user's decisions go in; a version that is ready for the user is put into the
 * mailbox. There is no trainer to answer: a version is the user's once its file is in the folder.
 * It belongs to one thread (the subscriber's service thread, whose loop is rft_follower_run). How
 * it works stands in follower.c.
 */
#ifndef RFT_FOLLOWER_H
#define RFT_FOLLOWER_H

#include "archive/archive_chain.h"
#include "subscriber/mailbox.h"

/* A file that could not be used, as it was then. */
typedef struct rft_follower_fault {
    rft_archive_entry entry;
    uint64_t inode;
    int64_t bytes, seconds, nanoseconds;
    bool damaged; /* not to be read again before it has changed */
    char why[RFT_SENTENCE_BYTES];
} rft_follower_fault;

typedef struct rft_follower {
    const refit_config *config; /* borrowed, as the next two */
    rft_mailbox *mailbox;
    const char *worker; /* its name */
    char *folder;       /* owned; an absolute path */
    rft_limits limits;
    rft_session_report report;
    rft_images images;

    rft_image *newest;   /* the last version that was put together: what files may build on; NULL */
    bool waits;          /* it is not yet in the mailbox */
    rft_image *applying; /* in the mailbox, or the user's and undecided; NULL */
    rft_image *open;     /* decided, its update not yet closed; NULL */
    rft_version_id before; /* what the user has decided on last, and not lost; 0: nothing */
    uint32_t before_run;

    /* a version being put together; else archive is NULL */
    refit_archive *archive;
    rft_archive_chain chain;
    rft_image *image;
    rft_catalog *catalog; /* of `image` */
    bool based;           /* it builds on `newest`, or did */
    int64_t began;

    int64_t next_look; /* into the folder */
    int64_t pause;     /* no look before */
    int64_t gone;      /* since then nothing of the trainer reached is listed; 0: there is */
    int64_t heard;     /* when it could last be read; at first the start */
    rft_follower_fault **faults; /* owned, as each of them; sorted by entry */
    uint32_t fault_count, fault_room;
} rft_follower;

/* The folder that an endpoint names, as archive:///mnt/weights; NULL: it names a trainer. */
const char *rft_follower_folder(const char *endpoint);

/* `config`, `mailbox` and `worker` are borrowed until close; `folder` need not exist. Takes no
 * memory for versions before there is one. REFIT_ERR_INVALID: the folder is empty;
 * REFIT_ERR_CONFIG: broadcast.shm or broadcast.gpu is require; REFIT_ERR_SYSTEM,
 * REFIT_ERR_HOST_MEMORY. */
refit_status rft_follower_open(rft_follower *follower, const char *folder,
                               const refit_config *config, const char *worker, rft_mailbox *mailbox,
                               int64_t now, refit_error *error);
void rft_follower_close(rft_follower *follower);

/* One part of what there is to do: a frame, a look into the folder, a version into the mailbox. */
void rft_follower_tick(rft_follower *follower, int64_t now);
/* When tick has something to do at the latest. */
int64_t rft_follower_tick_at(const rft_follower *follower);

/* The orders of the mailbox. */
void rft_follower_obey(rft_follower *follower, int64_t now);

/* The thread's loop: until the mailbox is shut. */
void *rft_follower_run(void *follower);

#endif
