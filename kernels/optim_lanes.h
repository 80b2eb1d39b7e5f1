/*
 * optim_lanes: a step in vectors, one text for all widths, op by op what optim.c does to an
 * element. A file that includes it has defined, for its width:
 *
 *     LANES, TARGET, FORM(name)      elements of a vector; what functions are compiled for; their
 *                                    names
 *     lanes                          a vector of floats, and on it, each with FORM:
 *     set load store                 one value in all lanes; 4 * LANES bytes at any address
 *     mul add sub div root fused     fused(a, b, c) = a * b + c, rounded once
 *     negated larger sign            larger: NaN if either is, the second if they are equal
 *     from_bf16 from_fp16            of 2 * LANES bytes
 *     to_bf16 to_fp16                as kernels/cast.h and kernels/floats.h round; `streams`: round
 * the caches, to a multiple of 2 * LANES join split                     weights and remainders
 *     fence                          after streaming
 *
 * It has no guard, since it is included once for each width.
 */

typedef struct FORM(numbers) {
    lanes unscale, clip, l2, decay, lerp, beta1, one_minus_beta1, beta2, one_minus_beta2;
    lanes correction, eps, momentum, one_minus_dampening, rate;
} FORM(numbers);

TARGET static INLINE FORM(numbers) FORM(spread)(const rft_optim_rule *rule)
{
    return (FORM(numbers)){.unscale = FORM(set)(rule->unscale),
                           .clip = FORM(set)(rule->clip),
                           .l2 = FORM(set)(rule->l2),
                           .decay = FORM(set)(rule->decay),
                           .lerp = FORM(set)(rule->lerp),
                           .beta1 = FORM(set)(rule->beta1),
                           .one_minus_beta1 = FORM(set)(rule->one_minus_beta1),
                           .beta2 = FORM(set)(rule->beta2),
                           .one_minus_beta2 = FORM(set)(rule->one_minus_beta2),
                           .correction = FORM(set)(rule->correction),
                           .eps = FORM(set)(rule->eps),
                           .momentum = FORM(set)(rule->momentum),
                           .one_minus_dampening = FORM(set)(rule->one_minus_dampening),
                           .rate = FORM(set)(rule->rate)};
}

TARGET static INLINE lanes FORM(load_typed)(const void *from, rft_float_type type, size_t i)
{
    switch (type) {
    case RFT_BF16: return FORM(from_bf16)((const char *)from + 2 * i);
    case RFT_FP16: return FORM(from_fp16)((const char *)from + 2 * i);
    case RFT_FP32: break;
    }
    return FORM(load)((const char *)from + 4 * i);
}

TARGET static INLINE void FORM(store_typed)(void *to, rft_float_type type, size_t i, lanes value,
                                            bool streams)
{
    switch (type) {
    case RFT_BF16: FORM(to_bf16)((char *)to + 2 * i, value, streams); break;
    case RFT_FP16: FORM(to_fp16)((char *)to + 2 * i, value, streams); break;
    case RFT_FP32: FORM(store)((char *)to + 4 * i, value); break;
    }
}

TARGET static INLINE lanes FORM(load_parameter)(const rft_optim_span *span, size_t i)
{
    switch (span->master_form) {
    case RFT_OPTIM_FP32_MASTER: return FORM(load)((const char *)span->master + 4 * i);
    case RFT_OPTIM_REMAINDER:
        return FORM(join)((const char *)span->weights + 2 * i, (const char *)span->master + 2 * i);
    case RFT_OPTIM_NO_MASTER: break;
    }
    return FORM(load_typed)(span->weights, span->weights_type, i);
}

TARGET static INLINE void FORM(store_parameter)(const rft_optim_span *span, size_t i, lanes value,
                                                bool streams)
{
    switch (span->master_form) {
    case RFT_OPTIM_REMAINDER:
        FORM(split)((char *)span->weights + 2 * i, (char *)span->master + 2 * i, value);
        return;
    case RFT_OPTIM_FP32_MASTER: FORM(store)((char *)span->master + 4 * i, value); break;
    case RFT_OPTIM_NO_MASTER: break;
    }
    FORM(store_typed)(span->weights, span->weights_type, i, value, streams);
}

TARGET static INLINE lanes FORM(load_gradient)(const rft_optim_rule *rule, FORM(numbers) by,
                                               const rft_optim_span *span, size_t i,
                                               lanes parameter)
{
    lanes gradient = FORM(load_typed)(span->gradient, span->gradient_type, i);
    gradient = FORM(mul)(FORM(mul)(gradient, by.unscale), by.clip);
    if (rule->maximize) gradient = FORM(negated)(gradient);
    return rule->has_l2 ? FORM(fused)(by.l2, parameter, gradient) : gradient;
}

TARGET static INLINE lanes FORM(load_state)(const rft_optim_span *span, size_t state, size_t i)
{
    return FORM(load)((const char *)span->states[state] + 4 * i);
}

TARGET static INLINE void FORM(store_state)(const rft_optim_span *span, size_t state, size_t i,
                                            lanes value)
{
    FORM(store)((char *)span->states[state] + 4 * i, value);
}

TARGET static INLINE lanes FORM(adam_moments)(const rft_optim_rule *rule, FORM(numbers) by,
                                              const rft_optim_span *span, size_t i, lanes gradient)
{
    lanes first = FORM(load_state)(span, 0, i), change = FORM(sub)(gradient, first);
    first = FORM(fused)(by.lerp, change, rule->lerp_is_far ? gradient : first);
    FORM(store_state)(span, 0, i, first);
    lanes second = FORM(mul)(FORM(load_state)(span, 1, i), by.beta2);
    second = FORM(fused)(FORM(mul)(by.one_minus_beta2, gradient), gradient, second);
    FORM(store_state)(span, 1, i, second);
    if (!rule->amsgrad) return second;
    lanes most = FORM(larger)(FORM(load_state)(span, 2, i), second);
    FORM(store_state)(span, 2, i, most);
    return most;
}

TARGET static INLINE lanes FORM(moments)(const rft_optim_rule *rule, rft_optim_kind kind,
                                         FORM(numbers) by, const rft_optim_span *span, size_t i,
                                         lanes gradient)
{
    if (kind == RFT_OPTIM_ADAM) return FORM(adam_moments)(rule, by, span, i, gradient);
    lanes sum = FORM(fused)(gradient, gradient, FORM(load_state)(span, 0, i));
    FORM(store_state)(span, 0, i, sum);
    return sum;
}

/* The new parameter. `along`: the first moment of Adam, the gradient of Adagrad. */
TARGET static INLINE lanes FORM(applied)(rft_optim_kind kind, FORM(numbers) by, lanes parameter,
                                         lanes along, lanes root)
{
    lanes least = FORM(add)(kind == RFT_OPTIM_ADAM ? FORM(div)(root, by.correction) : root, by.eps);
    lanes change = FORM(div)(FORM(mul)(by.rate, along), least);
    return FORM(add)(FORM(mul)(parameter, by.decay), change);
}

TARGET static INLINE void FORM(rooted)(const rft_optim_rule *rule, rft_optim_kind kind,
                                       FORM(numbers) by, const rft_optim_span *span,
                                       rft_optim_part part, float *roots, size_t i, bool streams)
{
    lanes parameter = FORM(load_parameter)(span, i), root;
    lanes gradient = FORM(load_gradient)(rule, by, span, i, parameter);
    if (part == RFT_OPTIM_APPLY) {
        root = FORM(load)((const char *)(roots + i));
    } else {
        lanes square = FORM(moments)(rule, kind, by, span, i, gradient);
        if (part == RFT_OPTIM_MOMENTS) {
            FORM(store)((char *)(roots + i), square);
            return;
        }
        root = FORM(root)(square);
    }
    lanes along = kind == RFT_OPTIM_ADAM ? FORM(load_state)(span, 0, i) : gradient;
    FORM(store_parameter)(span, i, FORM(applied)(kind, by, parameter, along, root), streams);
}

TARGET static INLINE void FORM(sgd)(const rft_optim_rule *rule, FORM(numbers) by,
                                    const rft_optim_span *span, size_t i, bool streams)
{
    lanes parameter = FORM(load_parameter)(span, i);
    lanes gradient = FORM(load_gradient)(rule, by, span, i, parameter), along = gradient;
    if (rule->has_momentum) {
        lanes buffer = gradient;
        if (!rule->is_first) {
            buffer = FORM(mul)(FORM(load_state)(span, 0, i), by.momentum);
            buffer = FORM(fused)(by.one_minus_dampening, gradient, buffer);
        }
        FORM(store_state)(span, 0, i, buffer);
        along = rule->nesterov ? FORM(fused)(by.momentum, buffer, gradient) : buffer;
    }
    FORM(store_parameter)(span, i, FORM(fused)(by.rate, along, parameter), streams);
}

TARGET static INLINE void FORM(lion)(const rft_optim_rule *rule, FORM(numbers) by,
                                     const rft_optim_span *span, size_t i, bool streams)
{
    lanes parameter = FORM(load_parameter)(span, i);
    lanes gradient = FORM(load_gradient)(rule, by, span, i, parameter);
    lanes first = FORM(load_state)(span, 0, i);
    lanes update = FORM(add)(FORM(mul)(first, by.beta1), FORM(mul)(gradient, by.one_minus_beta1));
    parameter = FORM(mul)(parameter, by.decay);
    FORM(store_parameter)(span, i, FORM(fused)(by.rate, FORM(sign)(update), parameter), streams);
    first = FORM(mul)(first, by.beta2);
    FORM(store_state)(span, 0, i, FORM(fused)(by.one_minus_beta2, gradient, first));
}

/* An integer sum, for it may point beyond the array; prefetching there does no harm. */
TARGET static INLINE void FORM(fetch)(const void *array, size_t byte)
{
    __builtin_prefetch((const void *)((uintptr_t)array + byte + AHEAD), 0, 3);
}

/* What the steps to come read: eight or more streams, of which the hardware follows but some. */
TARGET static INLINE void FORM(fetch_all)(rft_optim_kind kind, const rft_optim_span *span, size_t i)
{
    FORM(fetch)(span->gradient, (span->gradient_type == RFT_FP32 ? 4 : 2) * i);
    FORM(fetch)(span->states[0], 4 * i);
    if (kind == RFT_OPTIM_ADAM) FORM(fetch)(span->states[1], 4 * i);
    if (span->master_form == RFT_OPTIM_FP32_MASTER) {
        FORM(fetch)(span->master, 4 * i);
        return;
    }
    FORM(fetch)(span->weights, (span->weights_type == RFT_FP32 ? 4 : 2) * i);
    if (span->master_form == RFT_OPTIM_REMAINDER) FORM(fetch)(span->master, 2 * i);
}

/* Weights beside masters are not read, and streamed where that is possible. */
TARGET static INLINE bool FORM(can_stream)(const rft_optim_span *span)
{
    return span->master_form == RFT_OPTIM_FP32_MASTER && span->count >= STREAM_LEAST &&
           (uintptr_t)span->weights % (2 * LANES) == 0;
}

TARGET static INLINE size_t FORM(loop)(const rft_optim_rule *rule, rft_optim_kind kind,
                                       const rft_optim_span *span, rft_optim_part part,
                                       float *roots)
{
    const FORM(numbers) by = FORM(spread)(rule);
    const size_t count = span->count / LANES * LANES;
    const bool streams = FORM(can_stream)(span);
    for (size_t i = 0; i < count; i += LANES) {
        if (part != RFT_OPTIM_APPLY) FORM(fetch_all)(kind, span, i);
        switch (kind) {
        case RFT_OPTIM_ADAM:
        case RFT_ADAGRAD: FORM(rooted)(rule, kind, by, span, part, roots, i, streams); break;
        case RFT_SGD: FORM(sgd)(rule, by, span, i, streams); break;
        case RFT_LION: FORM(lion)(rule, by, span, i, streams); break;
        }
    }
    if (streams) FORM(fence)();
    return count;
}

/* With the types known where it is compiled, the loop has no branches. */
TARGET static INLINE size_t FORM(known)(const rft_optim_rule *rule, const rft_optim_span *span,
                                        rft_float_type gradient, rft_float_type weights,
                                        rft_optim_master master)
{
    rft_optim_rule plain = *rule;
    rft_optim_span typed = *span;
    plain.maximize = plain.amsgrad = plain.has_l2 = plain.lerp_is_far = false;
    typed.gradient_type = gradient;
    typed.weights_type = weights;
    typed.master_form = master;
    return FORM(loop)(&plain, RFT_OPTIM_ADAM, &typed, RFT_OPTIM_WHOLE, NULL);
}

TARGET static INLINE size_t FORM(by_weights)(const rft_optim_rule *rule, const rft_optim_span *span,
                                             rft_float_type gradient)
{
    bool is_half = span->weights_type == RFT_FP16;
    switch (span->master_form) {
    case RFT_OPTIM_REMAINDER:
        return FORM(known)(rule, span, gradient, RFT_BF16, RFT_OPTIM_REMAINDER);
    case RFT_OPTIM_FP32_MASTER:
        return is_half ? FORM(known)(rule, span, gradient, RFT_FP16, RFT_OPTIM_FP32_MASTER)
                       : FORM(known)(rule, span, gradient, RFT_BF16, RFT_OPTIM_FP32_MASTER);
    case RFT_OPTIM_NO_MASTER: break;
    }
    if (is_half) return FORM(known)(rule, span, gradient, RFT_FP16, RFT_OPTIM_NO_MASTER);
    if (span->weights_type == RFT_BF16) {
        return FORM(known)(rule, span, gradient, RFT_BF16, RFT_OPTIM_NO_MASTER);
    }
    return FORM(known)(rule, span, gradient, RFT_FP32, RFT_OPTIM_NO_MASTER);
}

/* AdamW, and Adam without decay, as most train. */
TARGET static size_t FORM(common)(const rft_optim_rule *rule, const rft_optim_span *span)
{
    switch (span->gradient_type) {
    case RFT_BF16: return FORM(by_weights)(rule, span, RFT_BF16);
    case RFT_FP16: return FORM(by_weights)(rule, span, RFT_FP16);
    case RFT_FP32: break;
    }
    return FORM(by_weights)(rule, span, RFT_FP32);
}

TARGET size_t FORM(rft_optim)(const rft_optim_rule *rule, const rft_optim_span *span,
                              rft_optim_part part, float *roots)
{
    bool is_plain = !rule->maximize && !rule->amsgrad && !rule->has_l2 && !rule->lerp_is_far;
    if (rule->kind == RFT_OPTIM_ADAM && part == RFT_OPTIM_WHOLE && is_plain) {
        return FORM(common)(rule, span);
    }
    const rft_optim_rule any = *rule;
    const rft_optim_span all = *span;
    switch (rule->kind) {
    case RFT_ADAGRAD: return FORM(loop)(&any, RFT_ADAGRAD, &all, part, roots);
    case RFT_SGD: return FORM(loop)(&any, RFT_SGD, &all, RFT_OPTIM_WHOLE, NULL);
    case RFT_LION: return FORM(loop)(&any, RFT_LION, &all, RFT_OPTIM_WHOLE, NULL);
    case RFT_OPTIM_ADAM: break;
    }
    return FORM(loop)(&any, RFT_OPTIM_ADAM, &all, part, roots);
}
