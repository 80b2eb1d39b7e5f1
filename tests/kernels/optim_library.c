/*
 * The steps of kernels/optim.h as a library for tests/python/test_optim_kernel.py, which holds them
 * against torch.optim. Its structures are those of the header, field by field.
 */
#include "kernels/cpu.h"
#include "kernels/optim.h"

#define SHOWN __attribute__((visibility("default")))

SHOWN int optim_limit(int level);
SHOWN void optim_step(const rft_optim_options *options, double step, float unscale, float clip,
                      const rft_optim_span *span);
SHOWN void optim_split(uint16_t *weights, uint16_t *remainders, const float *masters, size_t count);
SHOWN void optim_join(float *masters, const uint16_t *weights, const uint16_t *remainders,
                      size_t count);

/* Steps are at most of this level from now on; the level that they have. */
int optim_limit(int level)
{
    rft_cpu_limit((rft_cpu_level)level);
    return (int)rft_cpu_get_level();
}

void optim_step(const rft_optim_options *options, double step, float unscale, float clip,
                const rft_optim_span *span)
{
    rft_optim_rule rule = rft_optim_rule_at(options, step);
    rule.unscale = unscale;
    rule.clip = clip;
    rft_optim_step(&rule, span);
}

void optim_split(uint16_t *weights, uint16_t *remainders, const float *masters, size_t count)
{
    rft_optim_split(weights, remainders, masters, count);
}

void optim_join(float *masters, const uint16_t *weights, const uint16_t *remainders, size_t count)
{
    rft_optim_join(masters, weights, remainders, count);
}
