/*
 * note: what the processes of a run say to each other, one fixed struct a packet. The conductor
 * holds one line (a socket pair) to each; a process ends when the other end of its line is gone.
 */
#ifndef CHAOS_NOTE_H
#define CHAOS_NOTE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef enum chaos_note_kind {
    /* to all */
    NOTE_QUIT, /* close everything; GONE follows */
    /* to the trainer and the workers */
    NOTE_COUNT, /* give memory that malloc holds free back to the system; COUNTED follows */
    NOTE_PLANT, /* take `amount` bytes of memory; fate: free them, or leak them */
    /* to the trainer */
    NOTE_PUBLISH, /* version; seed of the change; fate, rate, manner (the way): how; pause_us
                     between two tensors; it waits for `amount` workers, `ms` at most */
    NOTE_REOPEN,  /* closes the publisher and opens one at the same endpoint; READY follows */
    NOTE_DECLARE, /* other tensors */
    NOTE_SHARD, /* it is one of several ranks: manner: the variant of the model; digest: the model's
                   seed; amount: a number of this order; text: rank 0; it waits for `ms` at most */
    /* to a worker */
    NOTE_MANNER, /* how its user behaves: manner, for `ms` */
    NOTE_CLOCK,  /* its wall clock jumps by `seconds` */
    /* to an attacker */
    NOTE_ATTACK, /* manner, for `ms`, 0: ends; worker: the worker whose name may be claimed; digest:
                    a seed; text: where the trainer is */
    /* to the proxy */
    NOTE_UPSTREAM, /* where the rank `worker` of the trainer is: name (the address), amount (the
                      port) */
    NOTE_LINK,     /* fault of the link with the number `worker`: fault, amount */

    /* from all */
    NOTE_READY,   /* text: where (trainer: endpoint; proxy: none) */
    NOTE_LOG,     /* text */
    NOTE_GONE,    /* amount: allocations of the library that are left */
    NOTE_COUNTED, /* what the process has: count; flags: 1 if it was steady meanwhile */
    /* from the trainer */
    NOTE_WAITED,  /* status, ms */
    NOTE_BEGUN,   /* version, status, ms */
    NOTE_PARTS,   /* version; digest: of the parts that `worker` takes */
    NOTE_WRITTEN, /* version, digest, moment */
    NOTE_SHARDED, /* status, ms; amount: that of the order; text: the error */
    NOTE_MEMBER,  /* of the version just ended: name, status, flags, manner: the path, text: reason
                   */
    NOTE_DONE,    /* version, status, ms, moment; amount: the committed version; text: the error */
    /* from a worker */
    NOTE_TAKEN,   /* version, digest, ms waited, flags */
    NOTE_LOST,    /* version, status, flags: it could not be loaded, and was refused; text: why */
    NOTE_DECIDES, /* version: it is about to accept it */
    NOTE_DECIDED, /* version, status, flags; manner: what it did */
    NOTE_ENDED,   /* status, text: refused for good */
    NOTE_COUNTS,  /* bytes that travelled, frames that were damaged */
} chaos_note_kind;

typedef enum chaos_member_flag {
    MEMBER_SUBSCRIBED = 1,
    MEMBER_COUNTED = 2, /* the version counted on it */
    MEMBER_COMMITTED = 4,
} chaos_member_flag;

typedef enum chaos_taken_flag {
    TAKEN_ON_GPU = 1,
    TAKEN_STREAMED = 2,
    TAKEN_FROM_NEIGHBOR = 4,
} chaos_taken_flag;

typedef enum chaos_plant {
    PLANT_NONE,
    PLANT_FREED,
    PLANT_LEAKED,
} chaos_plant;

/* What a process has of the machine. */
typedef struct resources {
    uint32_t descriptors;
    uint32_t segments; /* of refit's shared memory, mapped */
    uint64_t resident; /* bytes of its own: without shared memory and files */
} resources;

typedef struct chaos_note {
    uint32_t kind;
    int32_t status;
    uint64_t version;
    uint64_t digest; /* or a seed */
    uint64_t amount;
    int64_t seconds;
    int64_t moment; /* by the monotonic clock, in ns */
    uint32_t ms;
    uint32_t fate;
    uint32_t rate;
    uint32_t pause_us;
    uint32_t worker;
    uint32_t fault;
    uint32_t manner;
    uint32_t flags;
    resources count;
    uint64_t blocks[3]; /* that were the same, sent as changes, sent whole */
    char name[64];
    char text[256];
} chaos_note;

/* False: the other end is gone, or does not read. */
bool note_send(int line, const chaos_note *note);

/* 1: read; 0: none is there now; -1: the other end is gone. */
int note_receive(int line, chaos_note *note);

/* Waits at most so long; -1: without a limit. False: it is late, or the other end is gone. */
bool note_await(int line, chaos_note *note, int timeout_ms);

#endif
