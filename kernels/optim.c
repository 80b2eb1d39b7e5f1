/*
 * The scalar form of a step, which every other form equals bit for bit, the numbers of a step, and
 * the choice between the forms at run time.
 *
 * Where an op of PyTorch contracts, fmaf() stands here, and nowhere else is a product fused with a
 * sum: all of refit is compiled with -ffp-contract=off. Elements are read and written as bytes, so
 * they may lie anywhere.
 *
 * With a root of the caller's, a step goes through blocks that stay in the cache: the moments of a
 * block and the squares whose roots are asked for, their roots, and what the roots are for.
 */
#include "kernels/optim.h"

#include <math.h>
#include <string.h>

#include "kernels/cast.h"
#include "kernels/cpu.h"
#include "kernels/floats.h"
#include "kernels/optim_wide.h"

/* ---- Numbers of a step */

size_t rft_optim_states(const rft_optim_options *options)
{
    switch (options->kind) {
    case RFT_OPTIM_ADAM: return options->amsgrad ? 3 : 2;
    case RFT_SGD: return options->momentum != 0 ? 1 : 0;
    case RFT_ADAGRAD:
    case RFT_LION: break;
    }
    return 1;
}

/* lr / by, and 1 - lr * by. */
static double rate_over(const rft_optim_options *options, double by)
{
    return options->lr_is_tensor ? (double)((float)options->lr / (float)by) : options->lr / by;
}

static float kept_of(const rft_optim_options *options)
{
    if (!options->lr_is_tensor) return (float)(1 - options->lr * options->weight_decay);
    float lost = (float)options->lr * (float)options->weight_decay;
    return 1.0f - lost;
}

static void set_adam(rft_optim_rule *rule, const rft_optim_options *options, double step)
{
    float weight = (float)(1 - options->beta1);
    rule->amsgrad = options->amsgrad;
    rule->lerp_is_far = !(fabsf(weight) < 0.5f);
    rule->lerp = rule->lerp_is_far ? weight - 1.0f : weight;
    rule->correction = (float)pow(1 - pow(options->beta2, step), 0.5);
    rule->rate = (float)-rate_over(options, 1 - pow(options->beta1, step));
}

rft_optim_rule rft_optim_rule_at(const rft_optim_options *options, double step)
{
    bool decays = options->weight_decay != 0;
    bool decoupled =
        options->kind == RFT_LION || (options->kind == RFT_OPTIM_ADAM && options->decoupled);
    rft_optim_rule rule = {.kind = options->kind,
                           .maximize = options->maximize,
                           .nesterov = options->nesterov,
                           .has_l2 = decays && !decoupled,
                           .has_momentum = options->momentum != 0,
                           .is_first = step <= 1,
                           .unscale = 1,
                           .clip = 1,
                           .l2 = (float)options->weight_decay,
                           .decay = decays && decoupled ? kept_of(options) : 1.0f,
                           .beta1 = (float)options->beta1,
                           .one_minus_beta1 = (float)(1 - options->beta1),
                           .beta2 = (float)options->beta2,
                           .one_minus_beta2 = (float)(1 - options->beta2),
                           .correction = 1,
                           .eps = (float)options->eps,
                           .momentum = (float)options->momentum,
                           .one_minus_dampening = (float)(1 - options->dampening),
                           .rate = (float)-options->lr,
                           .root = options->root,
                           .root_threads = options->root_threads};
    if (options->kind == RFT_OPTIM_ADAM) set_adam(&rule, options, step);
    if (options->kind == RFT_ADAGRAD) {
        rule.rate = (float)-rate_over(options, 1 + (step - 1) * options->lr_decay);
    }
    return rule;
}

/* ---- Elements */

static float load_float(const void *from, size_t i)
{
    float value;
    memcpy(&value, (const char *)from + 4 * i, sizeof value);
    return value;
}

static void store_float(void *to, size_t i, float value)
{
    memcpy((char *)to + 4 * i, &value, sizeof value);
}

static uint16_t load_half(const void *from, size_t i)
{
    uint16_t half;
    memcpy(&half, (const char *)from + 2 * i, sizeof half);
    return half;
}

static void store_half(void *to, size_t i, uint16_t half)
{
    memcpy((char *)to + 2 * i, &half, sizeof half);
}

static float load_typed(const void *from, rft_float_type type, size_t i)
{
    if (type == RFT_FP32) return load_float(from, i);
    uint16_t half = load_half(from, i);
    float value;
    if (type == RFT_BF16) {
        rft_floats_from_bf16(&value, &half, 1);
    } else {
        rft_floats_from_half(&value, &half, 1);
    }
    return value;
}

static void store_typed(void *to, rft_float_type type, size_t i, float value)
{
    uint16_t half;
    if (type == RFT_FP32) {
        store_float(to, i, value);
        return;
    }
    if (type == RFT_BF16) {
        rft_cast_bf16(&half, &value, 1);
    } else {
        rft_floats_to_half(&half, &value, 1);
    }
    store_half(to, i, half);
}

static void split_one(void *weights, void *remainders, size_t i, float master)
{
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    if (isnan(master)) bits = 0x7FC00000u;
    uint32_t low = bits & 0xFFFFu;
    store_half(weights, i, (uint16_t)((bits >> 16) + (low >> 15)));
    store_half(remainders, i, (uint16_t)low);
}

static float join_one(const void *weights, const void *remainders, size_t i)
{
    uint32_t low = load_half(remainders, i), weight = load_half(weights, i);
    uint32_t bits = (weight - (low >> 15)) << 16 | low;
    float master;
    memcpy(&master, &bits, sizeof master);
    return master;
}

void rft_optim_split(uint16_t *weights, uint16_t *remainders, const float *masters, size_t count)
{
    for (size_t i = 0; i < count; i++)
        split_one(weights, remainders, i, load_float(masters, i));
}

void rft_optim_join(float *masters, const uint16_t *weights, const uint16_t *remainders,
                    size_t count)
{
    for (size_t i = 0; i < count; i++)
        store_float(masters, i, join_one(weights, remainders, i));
}

static float load_parameter(const rft_optim_span *span, size_t i)
{
    switch (span->master_form) {
    case RFT_OPTIM_FP32_MASTER: return load_float(span->master, i);
    case RFT_OPTIM_REMAINDER: return join_one(span->weights, span->master, i);
    case RFT_OPTIM_NO_MASTER: break;
    }
    return load_typed(span->weights, span->weights_type, i);
}

static void store_parameter(const rft_optim_span *span, size_t i, float value)
{
    if (span->master_form == RFT_OPTIM_REMAINDER) {
        split_one(span->weights, span->master, i, value);
        return;
    }
    if (span->master_form == RFT_OPTIM_FP32_MASTER) store_float(span->master, i, value);
    store_typed(span->weights, span->weights_type, i, value);
}

/* The gradient as the moments take it. */
static float load_gradient(const rft_optim_rule *rule, const rft_optim_span *span, size_t i,
                           float parameter)
{
    float gradient = load_typed(span->gradient, span->gradient_type, i);
    gradient = gradient * rule->unscale * rule->clip;
    if (rule->maximize) gradient = -gradient;
    return rule->has_l2 ? fmaf(rule->l2, parameter, gradient) : gradient;
}

/* ---- The optimizers, an element each */

static float larger(float a, float b)
{
    if (isnan(a)) return a;
    return a > b ? a : b;
}

/* The moments; what the root is asked of. */
static float adam_moments(const rft_optim_rule *rule, const rft_optim_span *span, size_t i)
{
    float gradient = load_gradient(rule, span, i, load_parameter(span, i));
    float first = load_float(span->states[0], i), change = gradient - first;
    first = fmaf(rule->lerp, change, rule->lerp_is_far ? gradient : first);
    store_float(span->states[0], i, first);
    float second = load_float(span->states[1], i) * rule->beta2;
    second = fmaf(rule->one_minus_beta2 * gradient, gradient, second);
    store_float(span->states[1], i, second);
    if (!rule->amsgrad) return second;
    float most = larger(load_float(span->states[2], i), second);
    store_float(span->states[2], i, most);
    return most;
}

static float adagrad_moments(const rft_optim_rule *rule, const rft_optim_span *span, size_t i)
{
    float gradient = load_gradient(rule, span, i, load_parameter(span, i));
    float sum = fmaf(gradient, gradient, load_float(span->states[0], i));
    store_float(span->states[0], i, sum);
    return sum;
}

static float moments(const rft_optim_rule *rule, const rft_optim_span *span, size_t i)
{
    return rule->kind == RFT_OPTIM_ADAM ? adam_moments(rule, span, i)
                                        : adagrad_moments(rule, span, i);
}

/* The parameter, of the moments and the root; Adam and Adagrad. */
static void apply(const rft_optim_rule *rule, const rft_optim_span *span, size_t i, float root)
{
    float parameter = load_parameter(span, i);
    float along = rule->kind == RFT_OPTIM_ADAM ? load_float(span->states[0], i)
                                               : load_gradient(rule, span, i, parameter);
    float least = root / rule->correction + rule->eps;
    store_parameter(span, i, parameter * rule->decay + rule->rate * along / least);
}

static void sgd(const rft_optim_rule *rule, const rft_optim_span *span, size_t i)
{
    float parameter = load_parameter(span, i);
    float gradient = load_gradient(rule, span, i, parameter), along = gradient;
    if (rule->has_momentum) {
        float buffer = gradient;
        if (!rule->is_first) {
            buffer = load_float(span->states[0], i) * rule->momentum;
            buffer = fmaf(rule->one_minus_dampening, gradient, buffer);
        }
        store_float(span->states[0], i, buffer);
        along = rule->nesterov ? fmaf(rule->momentum, buffer, gradient) : buffer;
    }
    store_parameter(span, i, fmaf(rule->rate, along, parameter));
}

static void lion(const rft_optim_rule *rule, const rft_optim_span *span, size_t i)
{
    float parameter = load_parameter(span, i);
    float gradient = load_gradient(rule, span, i, parameter);
    float first = load_float(span->states[0], i);
    float update = first * rule->beta1 + gradient * rule->one_minus_beta1;
    float sign = (float)((update > 0) - (update < 0));
    store_parameter(span, i, fmaf(rule->rate, sign, parameter * rule->decay));
    first = fmaf(rule->one_minus_beta2, gradient, first * rule->beta2);
    store_float(span->states[0], i, first);
}

static void scalar_pass(const rft_optim_rule *rule, const rft_optim_span *span, rft_optim_part part,
                        float *roots)
{
    for (size_t i = 0; i < span->count; i++) {
        switch (part) {
        case RFT_OPTIM_MOMENTS: roots[i] = moments(rule, span, i); break;
        case RFT_OPTIM_APPLY: apply(rule, span, i, roots[i]); break;
        case RFT_OPTIM_WHOLE:
            if (rule->kind == RFT_SGD) {
                sgd(rule, span, i);
            } else if (rule->kind == RFT_LION) {
                lion(rule, span, i);
            } else {
                apply(rule, span, i, sqrtf(moments(rule, span, i)));
            }
        }
    }
}

/* ---- Forms and blocks */

static void *moved(void *array, size_t bytes)
{
    return array == NULL ? NULL : (char *)array + bytes;
}

/* `count` elements of it from `first` on. */
static rft_optim_span slice(const rft_optim_span *span, size_t first, size_t count)
{
    rft_optim_span part = *span;
    part.count = count;
    part.gradient = (const char *)span->gradient + first * rft_float_bytes(span->gradient_type);
    part.weights = moved(span->weights, first * rft_float_bytes(span->weights_type));
    part.master = moved(span->master, first * (span->master_form == RFT_OPTIM_FP32_MASTER ? 4 : 2));
    for (size_t i = 0; i < 3; i++)
        part.states[i] = moved(span->states[i], 4 * first);
    return part;
}

/* How many elements the wide form has done, from the first on. */
static size_t wide_pass(const rft_optim_rule *rule, const rft_optim_span *span, rft_optim_part part,
                        float *roots)
{
#if defined(__x86_64__)
    switch (rft_cpu_get_level()) {
    case RFT_CPU_AVX512: return rft_optim_avx512(rule, span, part, roots);
    case RFT_CPU_AVX2: return rft_optim_avx2(rule, span, part, roots);
    case RFT_CPU_BASE: break;
    }
#elif defined(__aarch64__)
    if (rft_cpu_get_level() == RFT_CPU_NEON) return rft_optim_neon(rule, span, part, roots);
#endif
    (void)rule;
    (void)span;
    (void)part;
    (void)roots;
    return 0;
}

static void run_pass(const rft_optim_rule *rule, const rft_optim_span *span, rft_optim_part part,
                     float *roots)
{
    size_t done = wide_pass(rule, span, part, roots);
    rft_optim_span rest = slice(span, done, span->count - done);
    scalar_pass(rule, &rest, part, roots == NULL ? NULL : roots + done);
}

void rft_optim_step(const rft_optim_rule *rule, const rft_optim_span *span)
{
    if (rule->root == NULL || rule->kind == RFT_SGD || rule->kind == RFT_LION) {
        run_pass(rule, span, RFT_OPTIM_WHOLE, NULL);
        return;
    }
    _Alignas(64) float roots[RFT_OPTIM_SQRTS];
    int former = rule->root_threads == NULL ? 0 : rule->root_threads(1);
    for (size_t first = 0; first < span->count; first += RFT_OPTIM_SQRTS) {
        size_t left = span->count - first, count = left < RFT_OPTIM_SQRTS ? left : RFT_OPTIM_SQRTS;
        rft_optim_span block = slice(span, first, count);
        run_pass(rule, &block, RFT_OPTIM_MOMENTS, roots);
        rule->root((int)count, roots, roots, RFT_OPTIM_SQRT_MODE);
        run_pass(rule, &block, RFT_OPTIM_APPLY, roots);
    }
    if (rule->root_threads != NULL) (void)rule->root_threads(former);
}
