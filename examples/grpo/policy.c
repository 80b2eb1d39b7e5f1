/*
 * The policy's arithmetic: plain loops that a compiler turns into vector code. Sums run in a fixed
 * order, so the same numbers go in and the same bits come out, whatever else the machine does.
 */
#include "policy.h"

#include <math.h>
#include <string.h>

#include "noise.h"

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

const size_t policy_parameters = PARAMETERS;

const policy_tensor policy_tensors[POLICY_TENSORS] = {
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

void policy_init(float *weights, uint64_t seed)
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

void policy_extend(const float *weights, uint32_t position, uint8_t token, float context[WIDTH])
{
    add_scaled(context, weights + embed_row(position, token), 1.0f, WIDTH);
}

void policy_forward(const float *weights, policy_step *step)
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

void policy_backward(const float *weights, const policy_step *step, const float d_logits[DIGITS],
                     const uint8_t *tokens, uint32_t count, float *grads)
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

void policy_log_softmax(const float logits[DIGITS], float log_probs[DIGITS])
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

void policy_to_bf16(const float *from, uint16_t *to, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], sizeof bits);
        bits += 0x7FFFu + ((bits >> 16) & 1u);
        to[i] = (uint16_t)(bits >> 16);
    }
}

void policy_from_bf16(const uint16_t *from, float *to, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}
