/* rollout: prefill the prompt, then sample digit by digit, keeping the context as the cache. */
#include "rollout.h"

#include <math.h>
#include <string.h>

static uint8_t draw(const float log_probs[DIGITS], noise *source)
{
    float left = noise_uniform(source);
    for (uint8_t digit = 0; digit < DIGITS - 1; digit++) {
        left -= expf(log_probs[digit]);
        if (left < 0.0f) return digit;
    }
    return DIGITS - 1;
}

void rollout_decode(const float *weights, noise *source, float context[WIDTH], sample *out)
{
    policy_step step;
    float log_probs[DIGITS];
    for (uint32_t i = 0; i < COMPLETION_TOKENS; i++) {
        memcpy(step.context, context, sizeof step.context);
        policy_forward(weights, &step);
        policy_log_softmax(step.logits, log_probs);
        out->completion[i] = draw(log_probs, source);
        out->log_probs[i] = log_probs[out->completion[i]];
        if (i + 1 < COMPLETION_TOKENS)
            policy_extend(weights, PROMPT_TOKENS + i, out->completion[i], context);
    }
}

void rollout_prefill(const float *weights, const uint8_t prompt[PROMPT_TOKENS],
                     float context[WIDTH])
{
    memset(context, 0, WIDTH * sizeof *context);
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        policy_extend(weights, i, prompt[i], context);
}

static void fill_group(const float *weights, noise *source, group *out)
{
    float context[WIDTH];
    task_prompt((uint32_t)(noise_bits(source) % PROMPTS), out->prompt);
    for (uint32_t i = 0; i < GROUP; i++) {
        rollout_prefill(weights, out->prompt, context);
        rollout_decode(weights, source, context, &out->samples[i]);
        out->samples[i].reward = task_reward(out->prompt, out->samples[i].completion);
    }
}

void rollout_batch(const float *weights, uint64_t seed, uint64_t version, uint32_t worker,
                   batch *out)
{
    noise source = noise_start(seed, version, worker + 1);
    memset(out, 0, sizeof *out);
    out->version = version;
    out->worker = worker;
    for (uint32_t g = 0; g < GROUPS; g++)
        fill_group(weights, &source, &out->groups[g]);
}
