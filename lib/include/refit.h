/* clang-format off */
/*
 * refit.h: the whole public interface in one header.
 *
 * refit makes the refit of colocated RL post-training short, exact and safe: between an optimizer
 * step and the next rollout it offloads optimizer states and grads from the device, hands the new
 * weights to every rollout worker as one version that all of them switch to or none does, and
 * restores the states during the next step.
 *
 * The headers, from simple to advanced:
 *
 *   refit/controller.h   the cycle that a training loop calls
 *   refit/offload.h      states leave the device and come back
 *   refit/broadcast.h    publisher, subscriber, update
 *   refit/config.h       every choice, from a file, the environment or code
 *   refit/keys.h         key pairs, for what leaves this host
 *   refit/device.h       where tensors live; streams
 *   refit/dtype.h        element types
 *   refit/stats.h        what was done, as numbers
 *   refit/host.h         the allocator and the log that refit borrows from its process
 *   refit/status.h       what calls answer
 *   refit/version.h      which refit this is
 *   refit/deprecated.h   names of before, for one minor release
 *
 * The headers of the other schedules and tools are not included here, and may change more often
 * (docs/versioning.md):
 *
 *   refit/advanced/window.h       states that live on the host visit the device during a step
 *   refit/advanced/host_step.h    a share of the parameters is stepped on the CPU
 *   refit/advanced/activations.h  saved tensors leave in the forward pass, return in the backward
 *   refit/advanced/arena.h        device memory whose addresses never change
 *   refit/advanced/torch.h        PyTorch allocates from it
 *   refit/advanced/archive.h      versions kept as files
 *   refit/advanced/query.h        which version a publisher holds
 *
 * The smallest whole use, without error handling. Assign the statuses in your own code, or the
 * compiler warns (tests/abi/tour.c runs these lines, each call wrapped in a check):
 *
 *     refit_device *device;
 *     refit_offloader *states;
 *     refit_device_open("host:capacity=64MiB", NULL, &device, NULL);
 *     refit_offloader_open(device, NULL, &states, NULL);
 *
 *     void *moments;
 *     refit_memory_alloc(device, 1 << 20, &moments, NULL);
 *     refit_region_desc region = {.size = sizeof region, .name = "exp_avg", .memory = moments,
 *                                 .bytes = 1 << 20, .policy = REFIT_KEEP};
 *     refit_region_id id;
 *     refit_offloader_add(states, &region, &id, NULL);
 *     refit_offloader_seal(states, NULL);
 *
 *     refit_offloader_offload(states, REFIT_STREAM_NONE, NULL, NULL);
 *     refit_offloader_wait(states, 10000, NULL);
 *     refit_memory_free(device, moments, NULL);          // 1 MiB of the device is free
 *     refit_offloader_unbind(states, id, NULL);
 *
 *     refit_memory_alloc(device, 1 << 20, &moments, NULL);
 *     refit_offloader_bind(states, id, moments, NULL);
 *     refit_offloader_restore(states, REFIT_STREAM_NONE, NULL, NULL);
 *     refit_offloader_wait(states, 10000, NULL);       // the bytes are back, bit for bit
 *
 *     refit_offloader_close(states, NULL);
 *     refit_memory_free(device, moments, NULL);
 *     refit_device_close(device, NULL);
 *
 * Rules that hold everywhere:
 *  - A call returns a refit_status; results come through pointers, written only on REFIT_OK.
 *  - A call that fails has changed nothing, unless its comment says what it left.
 *  - An argument that cannot be (NULL, a size field too small) is REFIT_ERR_INVALID, also where the
 *    comment does not name it.
 *  - A device that is lost answers REFIT_ERR_DEVICE to every call (refit/device.h). What lies in
 *    host memory can be read.
 *  - One thread at a time uses an object, but for calls marked "any thread".
 *  - refit never aborts, never prints, never installs a signal handler, and keeps no thread beyond
 *    those that the object's header names.
 *  - An object belongs to the process that opened it: a forked child uses none, not even to close
 *    it. The child starts without its parent's sockets and locks, so that it keeps none taken.
 *  - Structs that may grow start with their size.
 *  - Timeouts are in milliseconds; 0 means: do not wait. No call waits without a limit.
 *  - Strings are UTF-8 and end with NUL.
 */
/* clang-format on */
#ifndef REFIT_H
#define REFIT_H

#include <refit/broadcast.h>
#include <refit/config.h>
#include <refit/controller.h>
#include <refit/deprecated.h>
#include <refit/device.h>
#include <refit/dtype.h>
#include <refit/host.h>
#include <refit/keys.h>
#include <refit/offload.h>
#include <refit/stats.h>
#include <refit/status.h>
#include <refit/version.h>

#endif
