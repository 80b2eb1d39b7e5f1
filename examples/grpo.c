/*
 * grpo: a small but whole GRPO loop on refit, against the public headers only.
 *
 * One trainer process and several rollout workers learn to add two digits. The device is too small
 * for the trainer's states and the inference engine's cache at once, so every cycle clears the
 * states away, publishes the weights, rolls out, and brings the states back behind the next
 * backward pass. Start reading at training.c (the loop) and worker.c (the other end);
 * examples/README.md explains what is printed.
 */
#include <stdio.h>
#include <string.h>

#include "grpo/or_die.h"
#include "grpo/policy.h"
#include "grpo/states.h"
#include "grpo/training.h"
#include "grpo/worker.h"

enum { LAST_CYCLES = 10 };

static float last_reward(const run_result *run)
{
    uint32_t count = run->cycles < LAST_CYCLES ? run->cycles : LAST_CYCLES;
    float sum = 0.0f;
    for (uint32_t i = run->cycles - count; i < run->cycles; i++)
        sum += run->rewards[i];
    return sum / (float)count;
}

static int train(const run_options *options)
{
    run_result run;
    training_run(options, &run);
    float reward = last_reward(&run);
    int reached = options->target <= 0.0f || reward >= options->target * REWARD_MOST;
    printf("\n%u cycles in %.1f s; reward %.3f -> %.3f of %.1f (mean of the last %d): target %.2f "
           "%s\n",
           run.cycles, run.seconds, (double)run.rewards[0], (double)reward, (double)REWARD_MOST,
           LAST_CYCLES, (double)options->target, reached ? "reached" : "NOT reached");
    run_result_free(&run);
    return reached ? 0 : 1;
}

/* 1 if the bytes are the same; says so either way. */
static int same(const char *what, const void *a, const void *b, size_t bytes)
{
    int equal = memcmp(a, b, bytes) == 0;
    printf("  %-8s %10zu bytes  %s\n", what, bytes, equal ? "identical" : "DIFFERENT");
    return equal;
}

static int compare(const run_result *a, const run_result *b)
{
    int equal = same("losses", a->losses, b->losses, a->cycles * sizeof(float));
    equal &= same("rewards", a->rewards, b->rewards, a->cycles * sizeof(float));
    equal &= same("weights", a->weights, b->weights, policy_parameters * sizeof(uint16_t));
    equal &= same("states", a->states, b->states, 3 * policy_parameters * sizeof(float));
    return equal;
}

static int check(run_options options)
{
    run_result with, without;
    options.device = states_large_device;
    options.quiet = true;
    options.offload = true;
    training_run(&options, &with);
    options.offload = false;
    options.json = NULL;
    training_run(&options, &without);
    printf("%u cycles with the refit cycle (%.1f s) and without (%.1f s), compared bit for bit:\n",
           with.cycles, with.seconds, without.seconds);
    int equal = compare(&with, &without);
    puts(equal ? "Both runs are identical." : "The runs DIFFER.");
    run_result_free(&with);
    run_result_free(&without);
    return equal ? 0 : 1;
}

int main(int argc, char **argv)
{
    run_options options;
    run_options_read(&options, argc, argv);
    if (options.is_worker) return worker_run(&options);
    return options.check ? check(options) : train(&options);
}
