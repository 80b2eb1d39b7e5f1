/*
 * grpo_model.h: what grpo.c trains, and how. Nothing here is about refit: a small network, its
 * task, sampling, AdamW and the GRPO objective, as plain as they can be.
 *
 * It is a header of static functions, so that the example is two files. Sums run in a fixed order:
 * the same numbers go in and the same bits come out, whatever else the machine does.
 */
#ifndef GRPO_MODEL_H
#define GRPO_MODEL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- Random numbers ---- */

/* The same on every machine for the same (seed, stream, index): splitmix64 (Steele, Lea and Flood
 * 2014), seeded by mixing its three numbers. */
typedef struct noise {
    uint64_t state;
} noise;

static uint64_t mix(uint64_t bits)
{
    bits = (bits ^ (bits >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    bits = (bits ^ (bits >> 27)) * UINT64_C(0x94D049BB133111EB);
    return bits ^ (bits >> 31);
}

static noise noise_start(uint64_t seed, uint64_t stream, uint64_t index)
{
    return (noise){mix(mix(mix(seed + 1) + stream + 1) + index + 1)};
}

static uint64_t noise_bits(noise *source)
{
    source->state += UINT64_C(0x9E3779B97F4A7C15);
    return mix(source->state);
}

/* in [0, 1) */
static float noise_uniform(noise *source)
{
    return (float)(noise_bits(source) >> 40) * 0x1p-24f;
}

/* close to a normal one: the sum of twelve uniform ones */
static float noise_normal(noise *source)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++)
        sum += noise_uniform(source);
    return sum;
}

/* ---- The task ---- */

/*
 * Add two digits. A prompt is two digits, a completion is their sum as two digits; each digit that
 * is right earns half of the reward. It is verifiable, so no reward model is needed.
 */
enum {
    DIGITS = 10,           /* the vocabulary */
    PROMPT_TOKENS = 2,     /* the two summands */
    COMPLETION_TOKENS = 2, /* tens and ones of the sum */
    PROMPTS = DIGITS * DIGITS,
};

#define REWARD_MOST 1.0f

/* The summands of prompt number `prompt`, 0 … PROMPTS - 1. */
static void task_prompt(uint32_t prompt, uint8_t tokens[PROMPT_TOKENS])
{
    tokens[0] = (uint8_t)(prompt / DIGITS % DIGITS);
    tokens[1] = (uint8_t)(prompt % DIGITS);
}

/* From 0 to REWARD_MOST. */
static float task_reward(const uint8_t prompt[PROMPT_TOKENS],
                         const uint8_t completion[COMPLETION_TOKENS])
{
    int sum = prompt[0] + prompt[1];
    int right = (completion[0] == sum / DIGITS) + (completion[1] == sum % DIGITS);
    return (float)right * (REWARD_MOST / COMPLETION_TOKENS);
}

/* ---- The policy ---- */

/*
 * A small autoregressive network over digits:
 *
 *     context = sum over positions of embed[position][token]          WIDTH numbers, token by token
 *     hidden  = relu(relu(context) * hidden.weight + hidden.bias)
 *     logits  = hidden * head.weight + head.bias
 *
 * The context is what an inference engine would cache: it is kept per sequence, and each new token
 * adds one row to it. All parameters lie in one array of floats; policy_tensors says which part is
 * what. Published weights are bf16, and are widened to float before they are used.
 */
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

/* What one forward pass leaves for the backward pass. */
typedef struct policy_step {
    float context[WIDTH];
    float hidden[HIDDEN]; /* after the relu */
    float logits[DIGITS];
} policy_step;

enum {
    EMBED = 0,
    EMBED_COUNT = POSITIONS * DIGITS * WIDTH,
    HIDDEN_WEIGHT = EMBED + EMBED_COUNT,
    HIDDEN_WEIGHT_COUNT = WIDTH * HIDDEN,
    HIDDEN_BIAS = HIDDEN_WEIGHT + HIDDEN_WEIGHT_COUNT,
    HEAD_WEIGHT = HIDDEN_BIAS + HIDDEN,
    HEAD_WEIGHT_COUNT = HIDDEN * DIGITS,
    HEAD_BIAS = HEAD_WEIGHT + HEAD_WEIGHT_COUNT,
    PARAMETERS = HEAD_BIAS + DIGITS,
};

static const size_t policy_parameters = PARAMETERS;

static const policy_tensor policy_tensors[POLICY_TENSORS] = {
    {"embed.weight", 3, {POSITIONS, DIGITS, WIDTH}, EMBED, EMBED_COUNT},
    {"hidden.weight", 2, {WIDTH, HIDDEN, 0}, HIDDEN_WEIGHT, HIDDEN_WEIGHT_COUNT},
    {"hidden.bias", 1, {HIDDEN, 0, 0}, HIDDEN_BIAS, HIDDEN},
    {"head.weight", 2, {HIDDEN, DIGITS, 0}, HEAD_WEIGHT, HEAD_WEIGHT_COUNT},
    {"head.bias", 1, {DIGITS, 0, 0}, HEAD_BIAS, DIGITS},
};

static void fill_normal(float *values, size_t count, float deviation, noise *source)
{
    for (size_t i = 0; i < count; i++)
        values[i] = deviation * noise_normal(source);
}

/* Small random weights, the same for the same seed. */
static void policy_init(float *weights, uint64_t seed)
{
    noise source = noise_start(seed, 0, 0);
    memset(weights, 0, PARAMETERS * sizeof *weights);
    fill_normal(weights + EMBED, EMBED_COUNT, 1.0f, &source);
    fill_normal(weights + HIDDEN_WEIGHT, HIDDEN_WEIGHT_COUNT, 1.0f / 32.0f, &source);
    fill_normal(weights + HEAD_WEIGHT, HEAD_WEIGHT_COUNT, 1.0f / 64.0f, &source);
}

/* sum += factor * row */
static void add_scaled(float *sum, const float *row, float factor, size_t count)
{
    for (size_t i = 0; i < count; i++)
        sum[i] += factor * row[i];
}

/* Sixteen sums side by side, so that vector code keeps the order of the scalar code. */
static float dot(const float *a, const float *b, size_t count)
{
    enum { LANES = 16 };
    float lanes[LANES] = {0};
    size_t whole = count / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++)
            lanes[lane] += a[i + lane] * b[i + lane];
    float sum = 0.0f;
    for (size_t lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    for (size_t i = whole; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

static size_t embed_row(uint32_t position, uint8_t token)
{
    return EMBED + ((size_t)position * DIGITS + token) * WIDTH;
}

/* Adds one token to a context, which starts as zeros. */
static void policy_extend(const float *weights, uint32_t position, uint8_t token,
                          float context[WIDTH])
{
    add_scaled(context, weights + embed_row(position, token), 1.0f, WIDTH);
}

/* From step->context to step->hidden and step->logits. */
static void policy_forward(const float *weights, policy_step *step)
{
    memcpy(step->hidden, weights + HIDDEN_BIAS, sizeof step->hidden);
    for (size_t i = 0; i < WIDTH; i++) {
        if (step->context[i] > 0.0f)
            add_scaled(step->hidden, weights + HIDDEN_WEIGHT + i * HIDDEN, step->context[i],
                       HIDDEN);
    }
    memcpy(step->logits, weights + HEAD_BIAS, sizeof step->logits);
    for (size_t i = 0; i < HIDDEN; i++) {
        step->hidden[i] = step->hidden[i] > 0.0f ? step->hidden[i] : 0.0f;
        add_scaled(step->logits, weights + HEAD_WEIGHT + i * DIGITS, step->hidden[i], DIGITS);
    }
}

/* Through the head: what the loss wants of each hidden number. */
static void backward_head(const float *weights, const policy_step *step,
                          const float d_logits[DIGITS], float d_hidden[HIDDEN], float *grads)
{
    add_scaled(grads + HEAD_BIAS, d_logits, 1.0f, DIGITS);
    for (size_t i = 0; i < HIDDEN; i++) {
        d_hidden[i] = step->hidden[i] > 0.0f
                          ? dot(weights + HEAD_WEIGHT + i * DIGITS, d_logits, DIGITS)
                          : 0.0f;
        add_scaled(grads + HEAD_WEIGHT + i * DIGITS, d_logits, step->hidden[i], DIGITS);
    }
    add_scaled(grads + HIDDEN_BIAS, d_hidden, 1.0f, HIDDEN);
}

/* Adds to `grads` what d(loss)/d(logits) means for every parameter. `tokens` are the `count` that
 * the context is made of. */
static void policy_backward(const float *weights, const policy_step *step,
                            const float d_logits[DIGITS], const uint8_t *tokens, uint32_t count,
                            float *grads)
{
    float d_hidden[HIDDEN];
    float d_context[WIDTH];
    backward_head(weights, step, d_logits, d_hidden, grads);
    for (size_t i = 0; i < WIDTH; i++) {
        d_context[i] = 0.0f;
        if (step->context[i] <= 0.0f) continue;
        d_context[i] = dot(weights + HIDDEN_WEIGHT + i * HIDDEN, d_hidden, HIDDEN);
        add_scaled(grads + HIDDEN_WEIGHT + i * HIDDEN, d_hidden, step->context[i], HIDDEN);
    }
    for (uint32_t position = 0; position < count; position++)
        add_scaled(grads + embed_row(position, tokens[position]), d_context, 1.0f, WIDTH);
}

/* Log-probabilities of all digits. */
static void policy_log_softmax(const float logits[DIGITS], float log_probs[DIGITS])
{
    float most = logits[0];
    for (size_t i = 1; i < DIGITS; i++)
        most = logits[i] > most ? logits[i] : most;
    float sum = 0.0f;
    for (size_t i = 0; i < DIGITS; i++)
        sum += expf(logits[i] - most);
    for (size_t i = 0; i < DIGITS; i++)
        log_probs[i] = logits[i] - most - logf(sum);
}

/* bf16 is the upper half of a float, rounded to the nearest, ties to even. */
static void policy_to_bf16(const float *from, uint16_t *to, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], sizeof bits);
        bits += 0x7FFFu + ((bits >> 16) & 1u);
        to[i] = (uint16_t)(bits >> 16);
    }
}

static void policy_from_bf16(const uint16_t *from, float *to, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

/* ---- AdamW (Loshchilov and Hutter 2019) on one flat array of parameters ---- */

typedef struct adamw_options {
    float rate;
    float beta1;
    float beta2;
    float epsilon;
    float decay;
} adamw_options;

/* What one step reads and writes, `count` floats each. `step` counts from 1. */
typedef struct adamw_states {
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    const float *grads;
    size_t count;
    uint64_t step;
} adamw_states;

static void adamw_step(const adamw_options *options, const adamw_states *states)
{
    float correction1 = 1.0f - powf(options->beta1, (float)states->step);
    float correction2 = 1.0f - powf(options->beta2, (float)states->step);
    for (size_t i = 0; i < states->count; i++) {
        float grad = states->grads[i];
        float mean = options->beta1 * states->exp_avg[i] + (1.0f - options->beta1) * grad;
        float square =
            options->beta2 * states->exp_avg_sq[i] + (1.0f - options->beta2) * grad * grad;
        states->exp_avg[i] = mean;
        states->exp_avg_sq[i] = square;
        float denominator = sqrtf(square / correction2) + options->epsilon;
        float weight = states->master[i] * (1.0f - options->rate * options->decay);
        states->master[i] = weight - options->rate * (mean / correction1) / denominator;
    }
}

/* ---- Rollout: prefill the prompt, then sample digit by digit ---- */

/* A batch is what one worker sends back for one version of the weights: groups of completions, each
 * group for one prompt. Plain old data, written and read as it is between processes of a machine.
 */
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

static uint8_t draw(const float log_probs[DIGITS], noise *source)
{
    float left = noise_uniform(source);
    for (uint8_t digit = 0; digit < DIGITS - 1; digit++) {
        left -= expf(log_probs[digit]);
        if (left < 0.0f) return digit;
    }
    return DIGITS - 1;
}

/* Samples a completion from a cache that rollout_prefill filled; it grows with every digit. */
static void rollout_decode(const float *weights, noise *source, float context[WIDTH], sample *out)
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

/* Reads the prompt: `context`, WIDTH floats of the caller's, becomes the sequence's cache. */
static void rollout_prefill(const float *weights, const uint8_t prompt[PROMPT_TOKENS],
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

/* Fills a batch: random prompts, GROUP completions each. The same seed, version and worker give the
 * same batch. */
static void rollout_batch(const float *weights, uint64_t seed, uint64_t version, uint32_t worker,
                          batch *out)
{
    noise source = noise_start(seed, version, worker + 1);
    memset(out, 0, sizeof *out);
    out->version = version;
    out->worker = worker;
    for (uint32_t g = 0; g < GROUPS; g++)
        fill_group(weights, &source, &out->groups[g]);
}

/* ---- The GRPO objective: from batches of scored completions to gradients ---- */

/*
 *     ratio = exp(log p_now(token) - log p_sampled(token))
 *     loss  = -mean over tokens of min(ratio * A, clip(ratio, 1 - c, 1 + c) * A) - entropy bonus
 *
 * Advantages are relative to the group: (reward - mean of the group) / its deviation (DeepSeekMath,
 * Shao et al. 2024).
 */
typedef struct learner_options {
    float clip;    /* how far a probability ratio may leave 1 before its gradient stops */
    float entropy; /* weight of the entropy bonus, which keeps the policy trying */
} learner_options;

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

/*
 * Adds the gradient of the loss over `count` batches to `grads` and returns the loss. Advantages
 * are relative to the group: (reward - mean of the group) / its deviation (DeepSeekMath, Shao et
 * al. 2024).
 */
static float learner_accumulate(const learner_options *options, const float *weights,
                                const batch *batches, uint32_t count, float *grads)
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

/* The mean reward of all completions. */
static float learner_mean_reward(const batch *batches, uint32_t count)
{
    float sum = 0.0f;
    for (uint32_t b = 0; b < count; b++)
        for (uint32_t g = 0; g < GROUPS; g++)
            for (uint32_t i = 0; i < GROUP; i++)
                sum += batches[b].groups[g].samples[i].reward;
    return sum / (float)(count * GROUPS * GROUP);
}

#endif
