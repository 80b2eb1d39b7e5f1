/*
 * optim: one step of Adam, AdamW, Adagrad, SGD or Lion on the CPU, over a range of elements, in one
 * pass: gradient in, states updated, parameter and its master or remainder written.
 *
 * What the bits are. The result is that of torch.optim's single-tensor path (foreach=False,
 * fused=False, capturable=False, differentiable=False) on CPU tensors of fp32, op by op as ATen
 * 2.13 rounds them where it has FMA (its AVX2 and AVX-512 kernels, vector loops and tails):
 *
 *     op of the path                        computed as                        roundings
 *     grad.mul_(s)                          g * s                              1
 *     grad.add(param, alpha=a)              fma(a, p, g)                       1
 *     param.mul_(a), exp_avg_sq.mul_(a)     p * a                              1
 *     exp_avg.lerp_(grad, w)                |w| < 0.5: fma(w, g - m, m)        2
 *                                           else: fma(w - 1, g - m, g)         2
 *     exp_avg_sq.addcmul_(g, g, value=a)    fma(a * g, g, v)                   2
 *     buf.add_(grad, alpha=a)               fma(a, g, b)                       1
 *     torch.maximum(x, v)                   the larger; NaN if either is       0
 *     v.sqrt()                              see below                          1
 *     root / c                              a division, not by the reciprocal  1
 *     root.add_(eps)                        root + eps                         1
 *     param.addcdiv_(m, denom, value=a)     p + (a * m) / denom                3
 *
 * Numbers of Python are doubles until an op takes one, which rounds it to fp32 once: 1 - beta1, 1 -
 * beta2, 1 - lr * weight_decay, -(lr / (1 - beta1 ** step)) and (1 - beta2 ** step) ** 0.5 are
 * computed in double (rft_optim_rule_at). foreach=True has the same bits on the CPU. fused=True has
 * those of roots rounded to nearest (below), but for the last elements of a parameter, which are
 * less than a vector: there it rounds products that are fused elsewhere.
 * ATEN_CPU_CAPABILITY=default, which has no FMA, rounds each product. The last two are not meant.
 * Where beta1 is 0 and a gradient -0, PyTorch's first moment is a zero of another sign in the last
 * elements of a parameter than in the others; meant are the others.
 *
 * The square root. Without MKL, as on ARM, sqrt() of a tensor is rounded to nearest. With MKL it is
 * vmsSqrt, whose rounding depends on the processor: on AMD's, a fifth of the results is the
 * neighbour of the nearest (up to 0.75 units in the last place). With `root` NULL, roots are
 * rounded to nearest, in the same pass. With `root` the vmsSqrt of PyTorch's own library, the bits
 * are those of torch.optim in this process; it is called for blocks of RFT_OPTIM_SQRTS elements, on
 * the calling thread. MKL then starts a team of threads for each block, unless it has one thread
 * there. torch.set_num_threads() sets the threads of the process and forbids MKL to take fewer (two
 * threads that step, two of MKL's each, two cores: 18 times slower). `root_threads`, which is
 * MKL_Set_Num_Threads_Local, gives the calling thread one for the time of a call of rft_optim_step.
 *
 * Lion is not in torch.optim. Meant is the form that its authors published (google/automl,
 * lion/lion_pytorch.py; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023):
 * p * (1 - lr * weight_decay); sign(m * beta1 + g * (1 - beta1)), each op rounded, sign(NaN) = 0 as
 * torch.sign has it; fma(-lr, sign, p); fma(1 - beta2, g, m * beta2).
 *
 * Gradients and parameters of 16 bits are widened, which is exact, and the arithmetic is that of
 * fp32. Weights become the rounding of the new value: to nearest even, NaN 0x7FFF (kernels/cast.h,
 * kernels/floats.h). So weights with a master are what `weights.copy_(master)` gives after a step
 * of torch.optim on the masters; weights alone are what stepping `weights.float()` and copying back
 * gives. torch.optim on 16-bit parameters itself, which keeps states of 16 bits and rounds each op
 * to them, is not meant; nor is grad.mul_() on a gradient of 16 bits, which rounds the product to
 * 16 bits again.
 *
 * Remainders are Transformer Engine's (multi_tensor_adam.cu, AdamFunctorMasterParamRemainder):
 *
 *     remainder = low half of the master
 *     weight    = upper half + (remainder >= 0x8000), mod 2^16
 *     master    = (weight - (remainder >= 0x8000), mod 2^16) * 2^16 + remainder
 *
 * which gives back every pattern of bits. The weight is the master rounded to nearest, ties away
 * from zero: it is another than rounding ties to even gives only where the remainder is 0x8000 and
 * the upper half even, one in 2^17. 16 bits cannot hold ties to even (65,537 masters would have one
 * even weight). A NaN is kept as master 0x7FC00000, weight 0x7FC0, since with other payloads the
 * weight could be infinite or zero.
 *
 * Every form (scalar, AVX2, AVX-512, NEON) gives the same bits; of a NaN, any form gives a NaN, and
 * no payload is promised. Elements do not depend on each other: any division into ranges gives the
 * same bits. The arithmetic follows the modes of the calling thread, as PyTorch's does: rounding to
 * nearest, and subnormals are kept unless the thread flushes them.
 */
#ifndef RFT_KERNEL_ADAM_H
#define RFT_KERNEL_ADAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/floats.h"

typedef enum rft_optim_kind { RFT_OPTIM_ADAM, RFT_ADAGRAD, RFT_SGD, RFT_LION } rft_optim_kind;

/* vmsSqrt of Intel's Vector Mathematics: `to` may be `from`. */
typedef void (*rft_optim_sqrt)(int count, const float *from, float *to, long long mode);

/* MKL_Set_Num_Threads_Local: sets the threads of MKL's calls on the calling thread, 0: as many as
 * the process has set; what was set before. */
typedef int (*rft_optim_sqrt_threads)(int count);

/* As torch::vml calls it: VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE. */
#define RFT_OPTIM_SQRT_MODE 0x140102LL
#define RFT_OPTIM_SQRTS     ((size_t)1024)

/* What param_groups has, under PyTorch's names. What a kind does not know is not read. */
typedef struct rft_optim_options {
    rft_optim_kind kind;
    double lr, weight_decay;
    double beta1, beta2;        /* Adam, Lion */
    double eps;                 /* Adam, Adagrad */
    double lr_decay;            /* Adagrad */
    double momentum, dampening; /* SGD */
    bool decoupled;             /* Adam: AdamW, or decoupled_weight_decay=True */
    bool amsgrad;               /* Adam */
    bool nesterov;              /* SGD */
    bool maximize;
    bool lr_is_tensor;   /* `lr` is an fp32 tensor of no dimensions: what is computed of it, is in
                            fp32 */
    rft_optim_sqrt root; /* or NULL */
    rft_optim_sqrt_threads root_threads; /* or NULL: it needs no telling */
} rft_optim_options;

/* One step, as the numbers that its ops take. */
typedef struct rft_optim_rule {
    rft_optim_kind kind;
    bool maximize, amsgrad, nesterov;
    bool has_l2;       /* weight decay is added to the gradient */
    bool has_momentum; /* SGD */
    bool is_first;     /* SGD: there is no buffer yet, it becomes the gradient */
    bool lerp_is_far;  /* Adam: |lerp| >= 0.5 */
    /* Each a grad.mul_(…) of its own, in this order: 1 / loss scale, and what clipping multiplies
     * with. 1 where there is none, which changes nothing. */
    float unscale, clip;
    float l2;
    float decay; /* the parameter is multiplied by it; 1: as it is */
    float lerp;  /* Adam: the weight, less 1 if lerp_is_far */
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float correction; /* what the root is divided by */
    float eps;
    float momentum, one_minus_dampening;
    float rate; /* negative */
    rft_optim_sqrt root;
    rft_optim_sqrt_threads root_threads;
} rft_optim_rule;

typedef enum rft_optim_master {
    RFT_OPTIM_NO_MASTER,   /* the weights are the parameter */
    RFT_OPTIM_FP32_MASTER, /* 16-bit weights; `beside` are fp32 masters, and the weights only
                              written */
    RFT_OPTIM_REMAINDER,   /* bf16 weights; `beside` are 16-bit remainders */
} rft_optim_master;

/* Elements of one parameter. Arrays do not overlap and may lie at any address; the scalar form asks
 * for no alignment, the others are faster at multiples of 64. */
typedef struct rft_optim_span {
    size_t count;
    const void *gradient;
    void *weights;
    void *master;
    /* fp32. Adam: exp_avg, exp_avg_sq, max_exp_avg_sq if amsgrad; Adagrad: sum; SGD:
     * momentum_buffer if there is momentum; Lion: exp_avg. */
    void *states[3];
    rft_float_type gradient_type;
    rft_float_type weights_type;
    rft_optim_master master_form;
} rft_optim_span;

/* How many arrays of `states` a step uses. */
size_t rft_optim_states(const rft_optim_options *options);

/* The rule of step number `step`, from 1 on, with no unscaling and no clipping. */
rft_optim_rule rft_optim_rule_at(const rft_optim_options *options, double step);

/* Steps a range. No thread is started and nothing is allocated: the caller divides the work. When
 * it returns, other threads that are told so see the bytes (fenced). */
void rft_optim_step(const rft_optim_rule *rule, const rft_optim_span *span);

/* Weights and remainders of masters, and back. A NaN becomes 0x7FC00000. */
void rft_optim_split(uint16_t *weights, uint16_t *remainders, const float *masters, size_t count);
void rft_optim_join(float *masters, const uint16_t *weights, const uint16_t *remainders,
                    size_t count);

#endif
