/*
 * learner: group-relative advantages, the clipped ratio, and the gradient that follows from them.
 *
 *     ratio = exp(log p_now(token) - log p_sampled(token))
 *     loss  = -mean over tokens of min(ratio * A, clip(ratio, 1 - c, 1 + c) * A) - entropy bonus
 */
#include "learner.h"

#include <math.h>
#include <string.h>

#include "policy.h"

static void group_advantages(const group *one, float advantages[GROUP])
{
    float mean = 0.0f;
    float square = 0.0f;
    for (uint32_t i = 0; i < GROUP; i++)
        mean += one->samples[i].reward / GROUP;
    for (uint32_t i = 0; i < GROUP; i++)
        square += (one->samples[i].reward - mean) * (one->samples[i].reward - mean) / GROUP;
    for (uint32_t i = 0; i < GROUP; i++)
        advantages[i] = (one->samples[i].reward - mean) / (sqrtf(square) + 1e-4f);
}

/* One token: its loss, and d(loss)/d(logits) through the chosen token's log-probability and the
 * entropy. */
static float token_loss(const learner_options *options, const float log_probs[DIGITS],
                        uint8_t token, float sampled_log_prob, float advantage,
                        float d_logits[DIGITS])
{
    float ratio = expf(log_probs[token] - sampled_log_prob);
    int clipped = (advantage > 0.0f && ratio > 1.0f + options->clip) ||
                  (advantage < 0.0f && ratio < 1.0f - options->clip);
    float bounded = fminf(fmaxf(ratio, 1.0f - options->clip), 1.0f + options->clip);
    float slope = clipped ? 0.0f : -ratio * advantage;
    float entropy = 0.0f;
    for (size_t i = 0; i < DIGITS; i++)
        entropy -= expf(log_probs[i]) * log_probs[i];
    for (size_t i = 0; i < DIGITS; i++) {
        float prob = expf(log_probs[i]);
        d_logits[i] = slope * ((i == token ? 1.0f : 0.0f) - prob);
        d_logits[i] += options->entropy * prob * (log_probs[i] + entropy);
    }
    return -fminf(ratio * advantage, bounded * advantage) - options->entropy * entropy;
}

static float sample_loss(const learner_options *options, const float *weights, const group *one,
                         const sample *answer, float advantage, float scale, float *grads)
{
    uint8_t tokens[PROMPT_TOKENS + COMPLETION_TOKENS];
    policy_step step = {0};
    float loss = 0.0f;
    memcpy(tokens, one->prompt, PROMPT_TOKENS);
    memcpy(tokens + PROMPT_TOKENS, answer->completion, COMPLETION_TOKENS);
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        policy_extend(weights, i, tokens[i], step.context);
    for (uint32_t i = 0; i < COMPLETION_TOKENS; i++) {
        float log_probs[DIGITS];
        float d_logits[DIGITS];
        policy_forward(weights, &step);
        policy_log_softmax(step.logits, log_probs);
        loss += token_loss(options, log_probs, answer->completion[i], answer->log_probs[i],
                           advantage, d_logits);
        for (size_t d = 0; d < DIGITS; d++)
            d_logits[d] *= scale;
        policy_backward(weights, &step, d_logits, tokens, PROMPT_TOKENS + i, grads);
        if (i + 1 < COMPLETION_TOKENS)
            policy_extend(weights, PROMPT_TOKENS + i, tokens[PROMPT_TOKENS + i], step.context);
    }
    return loss * scale;
}

float learner_accumulate(const learner_options *options, const float *weights, const batch *batches,
                         uint32_t count, float *grads)
{
    float scale = 1.0f / (float)(count * GROUPS * GROUP * COMPLETION_TOKENS);
    float loss = 0.0f;
    for (uint32_t b = 0; b < count; b++) {
        for (uint32_t g = 0; g < GROUPS; g++) {
            const group *one = &batches[b].groups[g];
            float advantages[GROUP];
            group_advantages(one, advantages);
            for (uint32_t i = 0; i < GROUP; i++)
                loss += sample_loss(options, weights, one, &one->samples[i], advantages[i], scale,
                                    grads);
        }
    }
    return loss;
}

float learner_mean_reward(const batch *batches, uint32_t count)
{
    float sum = 0.0f;
    for (uint32_t b = 0; b < count; b++)
        for (uint32_t g = 0; g < GROUPS; g++)
            for (uint32_t i = 0; i < GROUP; i++)
                sum += batches[b].groups[g].samples[i].reward;
    return sum / (float)(count * GROUPS * GROUP);
}
