/* rollout: the policy answers prompts. Used by the rollout workers and by the trainer's own engine.
 */
#ifndef GRPO_ROLLOUT_H
#define GRPO_ROLLOUT_H

#include "batch.h"
#include "noise.h"
#include "policy.h"

/* Reads the prompt: `context`, WIDTH floats of the caller's, becomes the sequence's cache. */
void rollout_prefill(const float *weights, const uint8_t prompt[PROMPT_TOKENS],
                     float context[WIDTH]);

/* Samples a completion from a cache that rollout_prefill filled; it grows with every digit. */
void rollout_decode(const float *weights, noise *source, float context[WIDTH], sample *out);

/* Fills a batch: random prompts, GROUP completions each. The same seed, version and worker give the
 * same batch. */
void rollout_batch(const float *weights, uint64_t seed, uint64_t version, uint32_t worker,
                   batch *out);

#endif
