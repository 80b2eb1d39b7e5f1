/*
 * chaos_ledger: what the trainers of a run have published, and what its workers say they hold.
 * A contradiction is reported as one sentence.
 */
#ifndef CHAOS_LEDGER_H
#define CHAOS_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "chaos_plan.h"
#include "note.h"

typedef enum entry_fate {
    ENTRY_OPEN,
    ENTRY_COMMITTED,
    ENTRY_ABORTED,
    ENTRY_UNKNOWN, /* the trainer was killed before it said */
} entry_fate;

typedef struct ledger_entry {
    uint64_t number;
    uint32_t trainer; /* which trainer's, counted from 0 */
    uint64_t digest;
    uint64_t parts[WORKERS_MOST]; /* digests of what workers take that do not take all; else 0 */
    bool written;
    entry_fate fate;
    uint32_t announced; /* workers that were about to accept it, a bit each */
    uint32_t accepted;  /* workers that did, a bit each */
} ledger_entry;

#define LEDGER_MOST 4096 /* versions: those of the plan, and quiet ones until all are steady */

typedef struct ledger {
    ledger_entry entries[LEDGER_MOST];
    uint32_t count;
} ledger;

/* NULL: none is known. */
ledger_entry *ledger_find(ledger *of, uint64_t number);
/* NULL: it is full, or the number was used before. */
ledger_entry *ledger_add(ledger *of, uint64_t number, uint32_t trainer);

#define LEDGER_COMPLAINT 256

/* Each returns false and a sentence for what must not be. */
bool ledger_accepts(ledger *of, uint32_t worker, uint64_t number, uint64_t digest,
                    char complaint[LEDGER_COMPLAINT]);
/* The trainer's word on the version; `quorum` 0: commit: all. */
typedef struct ledger_result {
    uint64_t number;
    int32_t status;
    uint64_t committed; /* the trainer's committed version */
    uint64_t before;    /* the one committed before this version */
    uint32_t counted;   /* members */
    uint32_t applied;   /* members that applied it */
    uint32_t quorum;
    bool late;      /* the commit has not waited until workers have applied it */
    uint32_t names; /* workers that it says have applied it, a bit each */
} ledger_result;
bool ledger_ends(ledger *of, const ledger_result *result, char complaint[LEDGER_COMPLAINT]);

#endif
