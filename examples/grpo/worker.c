/*
 * worker: the other end of the broadcast. What refit_subscriber_next hands out is a whole version,
 * verified and committed: the worker widens it into its own copy, accepts it, and samples from it.
 */
#include "worker.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "or_die.h"
#include "rollout.h"

/* By name: the order of tensors is the publisher's business. */
static void load_weights(const refit_update *update, float *weights)
{
    refit_error error;
    for (uint32_t i = 0; i < POLICY_TENSORS; i++) {
        const policy_tensor *wanted = &policy_tensors[i];
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        uint32_t index;
        or_die(refit_update_find(update, wanted->name, &index, &error), &error);
        or_die(refit_update_tensor(update, index, &tensor, &bytes, &error), &error);
        if (tensor.dtype != REFIT_BF16 || tensor.bytes != wanted->count * sizeof(uint16_t))
            die("tensor %s is not what this policy has", wanted->name);
        policy_from_bf16(bytes, weights + wanted->first, wanted->count);
    }
}

static bool trainer_gone(void)
{
    struct pollfd socket = {.fd = WORKER_SOCKET, .events = POLLIN};
    return poll(&socket, 1, 0) > 0; /* the trainer never writes: readable means closed */
}

static bool send_batch(const batch *out)
{
    const char *at = (const char *)out;
    for (size_t sent = 0; sent < sizeof *out;) {
        ssize_t now = send(WORKER_SOCKET, at + sent, sizeof *out - sent, MSG_NOSIGNAL);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return false;
        sent += (size_t)now;
    }
    return true;
}

/* One version: load it, say so, let go of refit's memory, and sample. False: the trainer is gone.
 */
static bool serve(refit_update *update, const run_options *options, float *weights, batch *out)
{
    refit_error error;
    uint64_t version = refit_update_version(update);
    load_weights(update, weights);
    or_die(refit_update_accept(update, &error), &error);
    refit_update_close(update);
    rollout_batch(weights, options->seed, version, options->worker_index, out);
    return send_batch(out);
}

int worker_run(const run_options *options)
{
    refit_error error;
    refit_subscriber *subscriber;
    float *weights = calloc_or_die(policy_parameters, sizeof *weights);
    batch *out = calloc_or_die(1, sizeof *out);
    or_die(refit_subscriber_open(options->worker_endpoint, &options->config, &subscriber, &error),
           &error);
    for (bool more = true; more;) {
        refit_update *update;
        refit_status status = refit_subscriber_next(subscriber, 500, &update, &error);
        if (status == REFIT_ERR_TIMEOUT) {
            more = !trainer_gone();
            continue;
        }
        or_die(status, &error);
        more = serve(update, options, weights, out);
    }
    refit_subscriber_close(subscriber);
    free(weights);
    free(out);
    return 0;
}
