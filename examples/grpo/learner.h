/* learner: the GRPO objective. From batches of scored completions to gradients. */
#ifndef GRPO_LEARNER_H
#define GRPO_LEARNER_H

#include "batch.h"

typedef struct learner_options {
    float clip;    /* how far a probability ratio may leave 1 before its gradient stops */
    float entropy; /* weight of the entropy bonus, which keeps the policy trying */
} learner_options;

/*
 * Adds the gradient of the loss over `count` batches to `grads` and returns the loss. Advantages
 * are relative to the group: (reward - mean of the group) / its deviation (DeepSeekMath, Shao et
 * al. 2024).
 */
float learner_accumulate(const learner_options *options, const float *weights, const batch *batches,
                         uint32_t count, float *grads);

/* The mean reward of all completions. */
float learner_mean_reward(const batch *batches, uint32_t count);

#endif
