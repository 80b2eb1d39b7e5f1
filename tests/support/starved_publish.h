/* starved_publish: one version from a GPU's memory, tried with every allocation failing in turn. */
#ifndef STARVED_PUBLISH_H
#define STARVED_PUBLISH_H

#include <refit/broadcast.h>

/* Writes tensor 0 of a version that was begun, which lies at `memory` of `device`. */
typedef refit_status starved_write(refit_publisher *publisher, refit_device *device,
                                   const void *memory, uint64_t bytes);

/* Each try publishes the version, perhaps another way, or is short of host memory; none leaks. */
void starve_a_publish(starved_write *write);

#endif
