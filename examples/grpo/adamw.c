/* AdamW: the optimizer whose states are what refit moves off the device and back. */
#include "adamw.h"

#include <math.h>

void adamw_step(const adamw_options *options, const adamw_states *states)
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
