/* chaos_worker: how the user of a worker may behave. */
#ifndef CHAOS_WORKER_H
#define CHAOS_WORKER_H

typedef enum worker_manner {
    MANNER_PLAIN,
    MANNER_SLOW, /* the next update only, like all below but the last */
    MANNER_REFUSE_KEPT,
    MANNER_REFUSE_LOST,
    MANNER_HOLD,
    MANNER_DEAF, /* until it is told otherwise */
} worker_manner;

#endif
