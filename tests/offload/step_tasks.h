/* The threads of host steps, as /proc shows them. */
#ifndef OFFLOAD_STEP_TASKS_H
#define OFFLOAD_STEP_TASKS_H

#include <sched.h>
#include <stdint.h>

/* Those whose affinity is `set`; NULL: all. */
uint32_t count_step_threads(const cpu_set_t *set);

/* Waits until there are so many: they bind themselves as they start, and are listed for a while
 * after they have ended. */
void await_step_threads(uint32_t count, const cpu_set_t *set);

#endif
