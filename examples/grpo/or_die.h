/*
 * or_die: what an example does with errors: says refit's sentence and ends. A real training loop
 * would decide by status instead (see publish_weights in training.c, which tries again after
 * REFIT_ERR_PEER).
 *
 *     refit_error error;
 *     or_die(refit_device_open(spec, &config, &device, &error), &error);
 */
#ifndef GRPO_OR_DIE_H
#define GRPO_OR_DIE_H

#include <refit.h>

/* Ends the program with status 1 unless `status` is REFIT_OK. */
void or_die(refit_status status, const refit_error *error);

/* Ends the program with status 1 and a sentence, which `format` makes. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* `count` zeroed elements, or the end. */
void *calloc_or_die(size_t count, size_t bytes);

#endif
