/*
 * A batch: what one worker sends back for one version of the weights: groups of completions, each
 * group for one prompt. Plain old data, written and read as it is between processes of one machine.
 */
#ifndef GRPO_BATCH_H
#define GRPO_BATCH_H

#include <stdint.h>

#include "task.h"

enum {
    GROUP = 8,   /* completions of one prompt: their mean reward is the baseline */
    GROUPS = 32, /* prompts in one batch */
};

typedef struct sample {
    uint8_t completion[COMPLETION_TOKENS];
    float log_probs[COMPLETION_TOKENS]; /* under the weights that sampled it */
    float reward;
} sample;

typedef struct group {
    uint8_t prompt[PROMPT_TOKENS];
    sample samples[GROUP];
} group;

typedef struct batch {
    uint64_t version; /* of the weights that sampled it */
    uint32_t worker;
    group groups[GROUPS];
} batch;

#endif
