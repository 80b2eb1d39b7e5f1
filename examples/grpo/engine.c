/* engine: prefill fills the cache for every sequence, then all of them decode from it. */
#include "engine.h"

#include "or_die.h"
#include "rollout.h"

refit_status engine_wake(engine *it, refit_error *error)
{
    void *cache;
    uint64_t bytes = sizeof(float) * WIDTH * ENGINE_SEQUENCES;
    refit_status status = refit_memory_alloc(it->device, bytes, &cache, error);
    if (status == REFIT_OK) it->cache = cache;
    return status;
}

void engine_sleep(engine *it)
{
    refit_error error;
    or_die(refit_memory_free(it->device, it->cache, &error), &error);
    it->cache = NULL;
}

float engine_evaluate(engine *it, const float *weights, uint64_t seed, uint64_t version)
{
    float sum = 0.0f;
    noise source = noise_start(seed, version, 0);
    uint8_t prompt[PROMPT_TOKENS];
    for (uint32_t i = 0; i < ENGINE_SEQUENCES; i++) {
        task_prompt(i / ENGINE_ANSWERS, prompt);
        rollout_prefill(weights, prompt, it->cache[i]);
    }
    for (uint32_t i = 0; i < ENGINE_SEQUENCES; i++) {
        sample answer;
        task_prompt(i / ENGINE_ANSWERS, prompt);
        rollout_decode(weights, &source, it->cache[i], &answer);
        sum += task_reward(prompt, answer.completion);
    }
    return sum / ENGINE_SEQUENCES;
}
