/*
 * The policy: a small autoregressive network over digits.
 *
 *     context = sum over positions of embed[position][token]     WIDTH numbers, grows token by
 * token hidden  = relu(relu(context) * hidden.weight + hidden.bias) logits  = hidden * head.weight
 * + head.bias
 *
 * The context is what an inference engine would cache: it is kept per sequence, and each new token
 * adds one row to it. All parameters lie in one array of floats; policy_tensors says which part is
 * what. Published weights are bf16; whoever computes widens them to float first.
 */
#ifndef GRPO_POLICY_H
#define GRPO_POLICY_H

#include <stddef.h>
#include <stdint.h>

#include "task.h"

enum {
    WIDTH = 1024,
    HIDDEN = 256,
    POSITIONS = PROMPT_TOKENS + COMPLETION_TOKENS - 1, /* the last token has no successor */
    POLICY_TENSORS = 5,
};

typedef struct policy_tensor {
    const char *name;
    uint32_t rank;
    uint64_t shape[3];
    size_t first; /* of its parameters in the array */
    size_t count;
} policy_tensor;

extern const policy_tensor policy_tensors[POLICY_TENSORS];
extern const size_t policy_parameters;

/* What one forward pass leaves for the backward pass. */
typedef struct policy_step {
    float context[WIDTH];
    float hidden[HIDDEN]; /* after the relu */
    float logits[DIGITS];
} policy_step;

/* Small random weights, the same for the same seed. */
void policy_init(float *weights, uint64_t seed);

/* Adds one token to a context, which starts as zeros. */
void policy_extend(const float *weights, uint32_t position, uint8_t token, float context[WIDTH]);

/* From step->context to step->hidden and step->logits. */
void policy_forward(const float *weights, policy_step *step);

/* Adds to `grads` what d(loss)/d(logits) means for every parameter. `tokens` are the `count` that
 * the context is made of. */
void policy_backward(const float *weights, const policy_step *step, const float d_logits[DIGITS],
                     const uint8_t *tokens, uint32_t count, float *grads);

/* Log-probabilities of all digits. */
void policy_log_softmax(const float logits[DIGITS], float log_probs[DIGITS]);

/* bf16 is the upper half of a float, rounded to the nearest, ties to even. */
void policy_to_bf16(const float *from, uint16_t *to, size_t count);
void policy_from_bf16(const uint16_t *from, float *to, size_t count);

#endif
