/*
 * adam_lanes: a step in vectors, one text for all widths, op by op what adam.c does to an element.
 * A file that includes it has defined, for its width:
 *
 *     LANES, TARGET, FORM(name)      elements of a vector; what functions are compiled for; their
 *                                    names
 *     lanes                          a vector of floats, and on it, each with FORM:
 *     set load store                 one value in all lanes; 4 * LANES bytes at any address
 *     mul add sub div root fused     fused(a, b, c) = a * b + c, rounded once
 *     negated larger sign            larger: NaN if either is, the second if they are equal
 *     from_bf16 from_fp16            of 2 * LANES bytes
 *     to_bf16 to_fp16                as kernels/cast.h and kernels/floats.h round
 *     join split                     weights and remainders
 *
 * It has no guard, since it is included once for each width.
 */

typedef struct FORM(numbers) {
    lanes unscale, clip, l2, decay, lerp, beta1, one_minus_beta1, beta2, one_minus_beta2;
    lanes correction, eps, momentum, one_minus_dampening, rate;
} FORM(numbers);

TARGET static INLINE FORM(numbers) FORM(spread)(const rft_adam_rule *rule)
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

TARGET static INLINE lanes FORM(load_typed)(const void *from, rft_adam_type type, size_t i)
{
    switch (type) {
    case RFT_ADAM_BF16: return FORM(from_bf16)((const char *)from + 2 * i);
    case RFT_ADAM_FP16: return FORM(from_fp16)((const char *)from + 2 * i);
    case RFT_ADAM_FP32: break;
    }
    return FORM(load)((const char *)from + 4 * i);
}

TARGET static INLINE void FORM(store_typed)(void *to, rft_adam_type type, size_t i, lanes value)
{
    switch (type) {
    case RFT_ADAM_BF16: FORM(to_bf16)((char *)to + 2 * i, value); break;
    case RFT_ADAM_FP16: FORM(to_fp16)((char *)to + 2 * i, value); break;
    case RFT_ADAM_FP32: FORM(store)((char *)to + 4 * i, value); break;
    }
}

TARGET static INLINE lanes FORM(load_parameter)(const rft_adam_span *span, size_t i)
{
    switch (span->beside_is) {
    case RFT_ADAM_MASTER: return FORM(load)((const char *)span->beside + 4 * i);
    case RFT_ADAM_REMAINDER:
        return FORM(join)((const char *)span->weights + 2 * i, (const char *)span->beside + 2 * i);
    case RFT_ADAM_ALONE: break;
    }
    return FORM(load_typed)(span->weights, span->weights_type, i);
}

TARGET static INLINE void FORM(store_parameter)(const rft_adam_span *span, size_t i, lanes value)
{
    switch (span->beside_is) {
    case RFT_ADAM_REMAINDER:
        FORM(split)((char *)span->weights + 2 * i, (char *)span->beside + 2 * i, value);
        return;
    case RFT_ADAM_MASTER: FORM(store)((char *)span->beside + 4 * i, value); break;
    case RFT_ADAM_ALONE: break;
    }
    FORM(store_typed)(span->weights, span->weights_type, i, value);
}

TARGET static INLINE lanes FORM(load_gradient)(const rft_adam_rule *rule, FORM(numbers) by,
                                               const rft_adam_span *span, size_t i, lanes parameter)
{
    lanes gradient = FORM(load_typed)(span->gradient, span->gradient_type, i);
    gradient = FORM(mul)(FORM(mul)(gradient, by.unscale), by.clip);
    if (rule->maximize) gradient = FORM(negated)(gradient);
    return rule->has_l2 ? FORM(fused)(by.l2, parameter, gradient) : gradient;
}

TARGET static INLINE lanes FORM(load_state)(const rft_adam_span *span, size_t state, size_t i)
{
    return FORM(load)((const char *)span->states[state] + 4 * i);
}

TARGET static INLINE void FORM(store_state)(const rft_adam_span *span, size_t state, size_t i,
                                            lanes value)
{
    FORM(store)((char *)span->states[state] + 4 * i, value);
}

TARGET static INLINE lanes FORM(adam_moments)(const rft_adam_rule *rule, FORM(numbers) by,
                                              const rft_adam_span *span, size_t i, lanes gradient)
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

TARGET static INLINE lanes FORM(moments)(const rft_adam_rule *rule, rft_adam_kind kind,
                                         FORM(numbers) by, const rft_adam_span *span, size_t i,
                                         lanes gradient)
{
    if (kind == RFT_ADAM) return FORM(adam_moments)(rule, by, span, i, gradient);
    lanes sum = FORM(fused)(gradient, gradient, FORM(load_state)(span, 0, i));
    FORM(store_state)(span, 0, i, sum);
    return sum;
}

/* The new parameter. `along`: the first moment of Adam, the gradient of Adagrad. */
TARGET static INLINE lanes FORM(applied)(rft_adam_kind kind, FORM(numbers) by, lanes parameter,
                                         lanes along, lanes root)
{
    lanes least = FORM(add)(kind == RFT_ADAM ? FORM(div)(root, by.correction) : root, by.eps);
    lanes change = FORM(div)(FORM(mul)(by.rate, along), least);
    return FORM(add)(FORM(mul)(parameter, by.decay), change);
}

TARGET static INLINE void FORM(rooted)(const rft_adam_rule *rule, rft_adam_kind kind,
                                       FORM(numbers) by, const rft_adam_span *span,
                                       rft_adam_part part, float *roots, size_t i)
{
    lanes parameter = FORM(load_parameter)(span, i), root;
    lanes gradient = FORM(load_gradient)(rule, by, span, i, parameter);
    if (part == RFT_ADAM_APPLY) {
        root = FORM(load)((const char *)(roots + i));
    } else {
        lanes square = FORM(moments)(rule, kind, by, span, i, gradient);
        if (part == RFT_ADAM_MOMENTS) {
            FORM(store)((char *)(roots + i), square);
            return;
        }
        root = FORM(root)(square);
    }
    lanes along = kind == RFT_ADAM ? FORM(load_state)(span, 0, i) : gradient;
    FORM(store_parameter)(span, i, FORM(applied)(kind, by, parameter, along, root));
}

TARGET static INLINE void FORM(sgd)(const rft_adam_rule *rule, FORM(numbers) by,
                                    const rft_adam_span *span, size_t i)
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
    FORM(store_parameter)(span, i, FORM(fused)(by.rate, along, parameter));
}

TARGET static INLINE void FORM(lion)(const rft_adam_rule *rule, FORM(numbers) by,
                                     const rft_adam_span *span, size_t i)
{
    lanes parameter = FORM(load_parameter)(span, i);
    lanes gradient = FORM(load_gradient)(rule, by, span, i, parameter);
    lanes first = FORM(load_state)(span, 0, i);
    lanes update = FORM(add)(FORM(mul)(first, by.beta1), FORM(mul)(gradient, by.one_minus_beta1));
    parameter = FORM(mul)(parameter, by.decay);
    FORM(store_parameter)(span, i, FORM(fused)(by.rate, FORM(sign)(update), parameter));
    first = FORM(mul)(first, by.beta2);
    FORM(store_state)(span, 0, i, FORM(fused)(by.one_minus_beta2, gradient, first));
}

TARGET static INLINE size_t FORM(loop)(const rft_adam_rule *rule, rft_adam_kind kind,
                                       const rft_adam_span *span, rft_adam_part part, float *roots)
{
    const FORM(numbers) by = FORM(spread)(rule);
    size_t count = span->count / LANES * LANES;
    for (size_t i = 0; i < count; i += LANES) {
        switch (kind) {
        case RFT_ADAM:
        case RFT_ADAGRAD: FORM(rooted)(rule, kind, by, span, part, roots, i); break;
        case RFT_SGD: FORM(sgd)(rule, by, span, i); break;
        case RFT_LION: FORM(lion)(rule, by, span, i); break;
        }
    }
    return count;
}

TARGET size_t FORM(rft_adam)(const rft_adam_rule *rule, const rft_adam_span *span,
                             rft_adam_part part, float *roots)
{
    const rft_adam_rule local_rule = *rule;
    const rft_adam_span local = *span;
    return FORM(loop)(&local_rule, rule->kind, &local, part, roots);
}
