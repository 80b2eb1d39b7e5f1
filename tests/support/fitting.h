/* fitting: a trainer with tensors of the test's choice, and a worker that takes them. What fails
 * fails the test. */
#ifndef FITTING_H
#define FITTING_H

#include <refit/broadcast.h>

#include "base/thread.h"

/* One tensor of one dimension, of the trainer. */
typedef struct fit_tensor {
    const char *name;
    refit_dtype dtype;
    uint64_t elements;
    const void *bytes;
    bool tied; /* to the first */
} fit_tensor;

#define FIT_TENSORS 8u

typedef struct fitting {
    refit_config config;
    refit_device *device; /* the trainer's, whose versions lie on it; NULL: the host */
    refit_device *theirs; /* the worker's, of the same GPU */
    refit_publisher *publisher;
    refit_subscriber *subscriber;
    refit_update *update;
    fit_tensor tensors[FIT_TENSORS];
    uint32_t count;
    rft_thread thread;
    refit_status status; /* of the commit */
} fitting;

/* `on_gpu` needs the fake driver. `verify`: broadcast.verify: always. */
void fit_open(fitting *fit, bool on_gpu, bool verify, const fit_tensor *tensors, uint32_t count);
void fit_close(fitting *fit);

/* The tensors as they are now, as a version in the worker's hands. */
void fit_offer(fitting *fit);
/* Closes the update, and joins the trainer. */
void fit_end(fitting *fit);

#endif
