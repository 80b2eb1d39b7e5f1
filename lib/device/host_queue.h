/*
 * host_queue: what a stream still has to do, first in first out. Not thread-safe.
 */
#ifndef RFT_HOST_QUEUE_H
#define RFT_HOST_QUEUE_H

#include "device/host_event.h"

/* Most copies in one command. */
#define RFT_HOST_BATCH_MOST 1024u

typedef enum rft_host_verb {
    RFT_HOST_COPY,        /* `count` copies follow; one without a source is zeroed */
    RFT_HOST_DIGEST,      /* one copy follows: the sum, the memory, its bytes */
    RFT_HOST_DIGEST_COPY, /* one copy follows */
    RFT_HOST_CAST,        /* one copy follows: the results, the numbers, the numbers' bytes */
    RFT_HOST_CALL,
    RFT_HOST_RECORD,
    RFT_HOST_JOIN,
} rft_host_verb;

typedef struct rft_host_command {
    rft_host_verb verb;
    uint32_t count; /* of copies */
    union {
        struct {
            refit_stream_fn function;
            void *user;
        } call;
        struct {
            uint64_t offset;
            uint64_t *sum; /* of DIGEST_COPY */
        } digest;
        struct {
            rft_host_event *event; /* held */
            uint64_t place;
        } record;
        struct {
            rft_host_line *line; /* retained */
            uint64_t place;
        } join;
    };
} rft_host_command;

typedef struct rft_host_chunk rft_host_chunk;

/* All zero is an empty queue. */
typedef struct rft_host_queue {
    rft_host_chunk *first; /* where commands are taken */
    rft_host_chunk *last;  /* where they are put */
    rft_host_chunk *spare;
    uint32_t head; /* in first */
    uint32_t tail; /* in last */
    uint32_t chunks;
} rft_host_queue;

void rft_host_queue_close(rft_host_queue *queue);

/* Room for one command and `copies` copies behind it. REFIT_ERR_HOST_MEMORY; REFIT_ERR_LIMIT if
 * very much is queued already. */
refit_status rft_host_queue_push(rft_host_queue *queue, uint32_t copies, rft_host_command **out,
                                 refit_error *error);

/* The oldest command, or NULL. It stays where it is until it is popped. */
rft_host_command *rft_host_queue_first(rft_host_queue *queue);
void rft_host_queue_pop(rft_host_queue *queue);

/* What follows a command of a verb that says so. */
rft_copy *rft_host_command_copies(rft_host_command *command);

#endif
