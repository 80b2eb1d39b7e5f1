/* protocol_steps: how the input of fuzz_protocol.c begins, and what its steps mean. */
#ifndef PROTOCOL_STEPS_H
#define PROTOCOL_STEPS_H

#include <stdint.h>

/* The first byte of the settings. */
#define SET_KEYS      0x01u
#define SET_TWO_SLOTS 0x02u
#define SET_QUORUM(n) ((n) << 2) /* 1 or 2; 0 and 3: all */
#define SET_SHM       0x30u      /* both bits */
#define SET_NEIGHBORS 0x10u /* this one alone: workers share memory, and the trainer does not */
#define SET_VERIFY    0x40u
#define SET_DELTA     0x80u

/* The second. */
#define SET_ZSTD       0x01u
#define SET_ALL_JOINED 0x02u /* before the first step */
#define SET_PARTS      0x04u /* two workers select parts of versions */
#define SET_STAGED     0x10u /* with two slots: no wait for workers to apply */
#define SET_BEHIND(n)  ((n) << 5)

#define SETTINGS 2u

typedef struct step {
    uint8_t what; /* a step_kind, modulo STEP_KINDS */
    uint8_t peer;
    uint8_t amount;
    uint8_t seed;
} step;

/* What is frequent has more than one number. */
typedef enum step_kind {
    STEP_UP,      /* so many messages of a worker arrive */
    STEP_DOWN,    /* so many messages and frames arrive at a worker */
    STEP_TIME,    /* one of eight moments passes */
    STEP_TRAINER, /* so many of the trainer's calls */
    STEP_TRAINER_TOO,
    STEP_USER,        /* takes, decides (`amount`) or closes */
    STEP_FRAMES,      /* so many are sent */
    STEP_ALL_ARRIVES, /* even: users take and accept, too */
    STEP_LIE,         /* of kind `peer` / LIARS, to the trainer */
    STEP_LIE_TOO,
    STEP_LIE_ALSO,
    STEP_DAMAGED,  /* a lie with a byte that is wrong, or cut off */
    STEP_LINK,     /* is made again or breaks */
    STEP_LEAVES,   /* a worker; another comes */
    STEP_RARE,     /* a step_rare, modulo RARE_KINDS */
    STEP_LIE_DOWN, /* of kind `peer` / HONEST, to a worker */
    STEP_KINDS,
} step_kind;

typedef enum step_rare {
    RARE_ABORT,
    RARE_CANCEL,
    RARE_DECLARE,
    RARE_RESTART,
    RARE_KEY_ENDS,
    RARE_KEY_ENDS_TOO,
    RARE_KEYS_COUNT,
    RARE_SHUT_OUT,
    RARE_UNREACHABLE,
    RARE_KINDS,
} step_rare;

#endif
