/*
 * The task: add two digits. A prompt is two digits, a completion is their sum as two digits; each
 * digit that is right earns half of the reward. It is verifiable, so no reward model is needed.
 */
#ifndef GRPO_TASK_H
#define GRPO_TASK_H

#include <stdint.h>

enum {
    DIGITS = 10,           /* the vocabulary */
    PROMPT_TOKENS = 2,     /* the two summands */
    COMPLETION_TOKENS = 2, /* tens and ones of the sum */
    PROMPTS = DIGITS * DIGITS,
};

#define REWARD_MOST 1.0f

/* The summands of prompt number `prompt`, 0 … PROMPTS - 1. */
void task_prompt(uint32_t prompt, uint8_t tokens[PROMPT_TOKENS]);

/* From 0 to REWARD_MOST. */
float task_reward(const uint8_t prompt[PROMPT_TOKENS], const uint8_t completion[COMPLETION_TOKENS]);

#endif
