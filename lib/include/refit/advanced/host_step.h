/*
 * refit/advanced/host_step.h: a share of the parameters is stepped on the CPU.
 *
 *     IDLE ──begin──► GATHERING ──run──► RETURNING ──wait, begin──► IDLE
 *      ▲                │   │                ▲
 *      └──────skip──────┘   │ run fails      │ run, skip
 *                           └──► STEPPING ───┘
 *
 * The optimizer states of these parameters are regions of an OFFLOADED offloader, with
 * REFIT_PLACEMENT_HOST as a rule, and do not visit the device; if the caller restores them, they
 * come as they were stepped, and no step begins before they are away again. Their gradients come to
 * the host while the backward pass goes on, the CPU steps them, and the new parameters return:
 *
 *     refit_host_step_begin(step, groups, count, &error);
 *     refit_host_step_gradient(step, p, gradient, n, stream, &error);    as each becomes final
 *     refit_host_step_norm(step, &squared, &found_inf, &error);          to clip, or to skip
 *     refit_host_step_run(step, unscale, clip, stream, &error);          or refit_host_step_skip
 *     refit_host_step_join(step, p, stream, &error);                     before its next use
 *
 * The bits are those of torch.optim's single-tensor path on the CPU, for Lion those of its authors'
 * code, in any division between threads (kernels/optim.h says op by op which bits are meant).
 * Arithmetic follows the rounding and the treatment of subnormal numbers of the thread that calls
 * run.
 *
 * Host memory, page-locked like the image, is taken at open: for each parameter its gradient, all
 * of it, and the parameter. The image and this memory together are held against the budget then. No
 * part of a gradient is stepped before the norm of all is known, so a ring of less memory would
 * have to bring each gradient twice. No later call takes memory, but for an image whose memory was
 * given back.
 *
 * The host's copy of a parameter is what steps begin from, not the device's: refit_host_step_load
 * brings it once at first, and again after anything but a step has changed it. A caller that cannot
 * tell whether anything has calls refit_host_step_refresh in each step instead.
 *
 * After a failure it is known what happened to each parameter (refit_host_step_progress), and the
 * call that failed can be repeated: each parameter is stepped once. Until REFIT_PARAMETER_RETURNED
 * shows, the device's parameter is neither the old nor the new one; the host's is the new one. A
 * copy back that could not be started is started by wait, run and begin. When the device is lost
 * (refit/device.h), states and parameters on the host stay: skip the step, or close it, to read
 * them.
 *
 * A host step is used by the thread that uses its offloader. Its threads compute while run, norm or
 * load do, and sleep otherwise. A window may be open on the same offloader, for other regions, and
 * may be stepped at any time between the calls below. Copies go as fast as they can:
 * offload.rate_limit is not for them.
 */
#ifndef REFIT_ADVANCED_HOST_STEP_H
#define REFIT_ADVANCED_HOST_STEP_H

#include <refit/dtype.h>
#include <refit/offload.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_host_step refit_host_step;

#define REFIT_HOST_STATES    3          /* most states of one parameter */
#define REFIT_EACH_PARAMETER UINT32_MAX /* of refit_host_step_join */

/* What is kept of a parameter beside itself. */
typedef enum refit_master_form {
    REFIT_MASTER_NONE = 0,      /* the parameter is stepped itself, and rounded if it has 16 bits */
    REFIT_MASTER_FP32 = 1,      /* fp32 masters are stepped, and rounded to the parameter */
    REFIT_MASTER_REMAINDER = 2, /* bf16 parameters: the lower 16 bits of the master that they and
                                   the remainder make, as Transformer Engine keeps it */
} refit_master_form;

typedef enum refit_optimizer {
    REFIT_ADAM = 0,    /* exp_avg, exp_avg_sq, with amsgrad max_exp_avg_sq */
    REFIT_ADAGRAD = 1, /* sum */
    REFIT_SGD = 2,     /* momentum_buffer, if there is momentum */
    REFIT_LION = 3,    /* exp_avg */
} refit_optimizer;

/* What a param_group has, under PyTorch's names. What an optimizer does not know is not read. */
typedef struct refit_optimizer_options {
    size_t size;       /* sizeof(refit_optimizer_options) */
    int32_t optimizer; /* refit_optimizer */
    uint8_t decoupled; /* Adam: 1 for AdamW */
    uint8_t amsgrad;   /* Adam */
    uint8_t nesterov;  /* SGD */
    uint8_t maximize;
    double lr;
    double weight_decay;
    double beta1; /* Adam, Lion */
    double beta2;
    double eps;      /* Adam, Adagrad */
    double lr_decay; /* Adagrad */
    double momentum; /* SGD */
    double dampening;
    uint8_t lr_is_tensor; /* 1: `lr` is an fp32 tensor, and what is computed of it is in fp32 */
    uint8_t reserved[7];  /* not read */
} refit_optimizer_options;

typedef struct refit_host_parameter {
    size_t size;      /* sizeof(refit_host_parameter) */
    const char *name; /* for errors; copied */
    void *memory;     /* the parameter, in device memory; borrowed until close */
    uint64_t elements;
    int32_t type;          /* refit_dtype: REFIT_F32, REFIT_BF16 or REFIT_F16 */
    int32_t gradient_type; /* likewise */
    uint32_t group;        /* whose options it takes, below the count of refit_host_step_begin */
    int32_t master;        /* refit_master_form */
    refit_region_id master_region; /* not for REFIT_MASTER_NONE: 4 bytes an element, 2 of a
                                      remainder */
    uint32_t state_count;
    refit_region_id states[REFIT_HOST_STATES]; /* fp32, in the order of refit_optimizer */
    uint32_t reserved;                         /* not read */
} refit_host_parameter;

/* What has happened to a parameter since the last begin. */
typedef enum refit_parameter_flag {
    REFIT_PARAMETER_SUBMITTED = 1, /* its gradient was submitted, and was not dropped */
    REFIT_PARAMETER_STEPPED = 2,   /* on the host */
    REFIT_PARAMETER_RETURNED = 4,  /* the device has it; seen by wait, run or begin */
} refit_parameter_flag;

/*
 * Opens a host step for these parameters; the list is copied. `size` is the same in all elements,
 * and is the distance between them. The order is that in which parameters return: that of the next
 * forward pass. The offloader must outlive it, and its regions that are named here belong to one
 * host step, and to no step in windows, until it is closed.
 *
 * Starts offload.host_step_threads threads, less one: the calling thread computes too. If a thread
 * cannot be started, fewer compute, with the same bits, and the log says so. They are bound to the
 * NUMA node that holds the states (offload.host_step_bind); the log says if they cannot be. Takes,
 * touches and page-locks its host memory, two streams, and three events a parameter. Blocks as
 * refit_offloader_seal does.
 *
 * Errors:
 * - REFIT_ERR_STATE: the offloader is not OFFLOADED
 * - REFIT_ERR_BUSY: the offloader has a host step, or a step in windows is under way
 * - REFIT_ERR_UNSUPPORTED: use_pinned_optimizer_offload: false; masters that leave by their
 *   weights: add their region without weights
 * - REFIT_ERR_NOT_FOUND: no such region, or one that is not kept
 * - REFIT_ERR_EXISTS: a region that is named twice, or parameters that overlap
 * - REFIT_ERR_INVALID: a parameter that cannot be: of no elements, a region of another size,
 *   remainders that are not of bf16, masters of an fp32 parameter, not device memory
 * - REFIT_ERR_LIMIT: more elements than can be
 * - REFIT_ERR_BUDGET: more memory than the budget has beside the image
 * - others of refit_offloader_seal about memory
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_open(refit_offloader *offloader,
                                                             const refit_host_parameter *parameters,
                                                             uint32_t count, refit_host_step **out,
                                                             refit_error *error);

/*
 * Closes it in any state and frees its memory; NULL is allowed. What was not stepped, and what has
 * not returned, stays so. Waits for copies that are under way, for each direction at most
 * offload.timeout_ms of the configuration that the device was opened with.
 *
 * Errors, with which its memory is kept and it is to be closed again; other calls answer
 * REFIT_ERR_STATE until then:
 * - REFIT_ERR_TIMEOUT: copies are still under way
 * - REFIT_ERR_DEVICE: the device does not close a stream
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_close(refit_host_step *step,
                                                              refit_error *error);

/* Square roots of `count` numbers, as vmsSqrt of Intel's MKL takes them; `to` may be `from`. */
typedef void (*refit_sqrt_fn)(int count, const float *from, float *to, long long mode);

/* Sets how many threads that library's calls on the calling thread may have, as
 * MKL_Set_Num_Threads_Local does, and returns what was set before. */
typedef int (*refit_sqrt_threads_fn)(int count);

/*
 * From the next begin on Adam and Adagrad take their square roots by `root`: PyTorch that was built
 * with MKL takes them so, and they are not always those rounded to nearest. All threads of the host
 * step call it at once, for 1,024 numbers at most. `threads`: how each gives the library one thread
 * for the time of its work; NULL: `root` starts no threads. `root` NULL, as at first: roots are
 * rounded to nearest. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_set_sqrt(refit_host_step *step,
                                                                 refit_sqrt_fn root,
                                                                 refit_sqrt_threads_fn threads,
                                                                 refit_error *error);

/*
 * Brings all parameters from the device to the host, after what `after` has queued. It is called
 * before the first step, unless each parameter is refreshed in it, and when anything but a step has
 * changed a parameter. `renew` 0: masters
 * and remainders stay as they are, as a checkpoint has brought them, say; 1: masters become their
 * parameters, and remainders zeros. Waits for the parameters of the last step, for the image if its
 * memory is being taken, and for the copies: for each at most offload.timeout_ms.
 *
 * Errors, with which no parameter is on the host until it is called again:
 * - REFIT_ERR_STATE: not IDLE, or the offloader is not OFFLOADED
 * - REFIT_ERR_BUSY: `renew`, and a read lock reads the image
 * - REFIT_ERR_COPY, REFIT_ERR_TIMEOUT and others
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_load(refit_host_step *step, int renew,
                                                             refit_stream_ref after,
                                                             refit_error *error);

/*
 * Begins a step with the options of each group, which are copied; `size` as in open. First waits
 * for the parameters of the last step, as refit_host_step_wait does; then for the image, if its
 * memory is being taken: for each at most offload.timeout_ms.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way, or the offloader is not OFFLOADED
 * - REFIT_ERR_INVALID: options that cannot be, a parameter of a group beyond `count`, or with fewer
 *   states than its optimizer has
 * - those of refit_host_step_wait
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_begin(refit_host_step *step,
                                                              const refit_optimizer_options *groups,
                                                              uint32_t count, refit_error *error);

/*
 * The gradient of `parameter` is what `stream` has made of it by now: its copy to the host starts
 * after that. REFIT_STREAM_NONE: it is there already. `number` counts the steps of this parameter,
 * this one included, from 1 on. A parameter that is not submitted is not stepped. Does not wait for
 * the copy.
 *
 * A gradient that is submitted again, because the caller has clipped it or added to it, replaces
 * the former one, which may have lain elsewhere: the squares are summed anew. The memory of each
 * gradient that was submitted stays until norm, run or skip has returned REFIT_OK. Its bytes may
 * change before: what a copy brings that is under way is not used, if the gradient is submitted
 * again or dropped.
 *
 * Errors:
 * - REFIT_ERR_STATE: no step is under way, or run was called
 * - REFIT_ERR_NOT_FOUND: no such parameter
 * - REFIT_ERR_INVALID: not device memory, or `number` is not from 1 on
 * - REFIT_ERR_COPY, REFIT_ERR_DEVICE and others: it is not submitted, and neither is the former
 *   one; submit it again. Until norm, run or skip has returned REFIT_OK a part of it may still be
 *   read
 */
REFIT_API REFIT_MUST_CHECK refit_status
refit_host_step_gradient(refit_host_step *step, uint32_t parameter, const void *gradient,
                         uint64_t number, refit_stream_ref stream, refit_error *error);

/*
 * The parameter is not stepped in this step, unless its gradient is submitted again: a gradient
 * that was submitted is not there any more, or is not to count. One that was not submitted stays
 * so. Until norm, run or skip has returned REFIT_OK the gradient may still be read, as if it were
 * submitted. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: no step is under way, or run was called
 * - REFIT_ERR_NOT_FOUND: no such parameter
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_drop(refit_host_step *step,
                                                             uint32_t parameter,
                                                             refit_error *error);

/*
 * The parameter is what `stream` has made of it by now: its copy to the host starts after that,
 * and the step begins from it. For REFIT_MASTER_NONE only: masters and remainders are the parameter
 * themselves. It may be called before or after the gradient is submitted, or without one, and
 * again. The parameter stays as it is until norm, run or skip has returned REFIT_OK, or it is
 * refreshed again after the change. norm and run wait for the copy as for a gradient. Does not wait
 * for the copy. If the call fails, run does not step the parameter before another refresh, or a
 * load, has brought it.
 *
 * Errors:
 * - REFIT_ERR_STATE: no step is under way, or run was called
 * - REFIT_ERR_NOT_FOUND: no such parameter
 * - REFIT_ERR_UNSUPPORTED: it has masters or remainders
 * - REFIT_ERR_COPY, REFIT_ERR_DEVICE and others: call it again. Until norm, run or skip has
 *   returned REFIT_OK a part of the parameter may still be read
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_refresh(refit_host_step *step,
                                                                uint32_t parameter,
                                                                refit_stream_ref stream,
                                                                refit_error *error);

/*
 * Waits for the gradients that were submitted, and writes the sum of their squares, in double, and
 * whether any number is infinite or a NaN (1). Gradients count as they came: the caller multiplies
 * by the square of what run is given as `unscale`. The bits do not depend on threads. The sums of
 * ranks or of parameters elsewhere are the caller's to add. More gradients may be submitted
 * afterwards. Blocks while the CPU computes, and for each gradient and each parameter that is
 * refreshed at most offload.timeout_ms, and once more if one could not be submitted, or was
 * dropped: the backward pass that makes them may take longer than the limit. NULL for both places:
 * only waits, so that the gradients may be changed or freed.
 *
 * Errors:
 * - REFIT_ERR_STATE: not in GATHERING
 * - REFIT_ERR_INVALID: one place
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_norm(refit_host_step *step, double *squared,
                                                             int *found_inf, refit_error *error);

/*
 * Steps the parameters whose gradients were submitted: the gradient is multiplied by `unscale`,
 * then by `clip` (1: as it is). Steps what has landed, in the order of open, and starts each new
 * parameter's copy back at once, after what `stream` has queued by the call: its last uses of the
 * old ones. Blocks while the CPU computes, and for each gradient and each parameter that is
 * refreshed at most offload.timeout_ms; not for the copies back. A read lock on the image may be
 * open until here.
 *
 * Errors, with REFIT_PARAMETER_STEPPED saying what was stepped; call run again with the same two
 * factors, or skip the rest:
 * - REFIT_ERR_STATE: no step is under way, or the offloader is not OFFLOADED; a parameter whose
 *   gradient was submitted is not on the host, since it was neither loaded nor refreshed: nothing
 *   was stepped
 * - REFIT_ERR_INVALID: a factor that is not finite, or another than the first run had
 * - REFIT_ERR_BUSY: a read lock reads the image; nothing was stepped
 * - REFIT_ERR_COPY and others: a copy back could not be started; all that has landed was stepped
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE: a gradient, or a parameter that is refreshed, has not
 *   arrived
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_run(refit_host_step *step, double unscale,
                                                            double clip, refit_stream_ref stream,
                                                            refit_error *error);

/*
 * Drops the gradients of the parameters that were not stepped: all of them, unless a run has
 * failed. Nothing moves. Waits for copies to the host that are under way, at most
 * offload.timeout_ms; on a lost device for none. In IDLE and RETURNING it does nothing.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE: gradients are still being read; skip tries again
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_skip(refit_host_step *step,
                                                             refit_error *error);

/*
 * Makes `stream` wait, on the device, until `parameter` (REFIT_EACH_PARAMETER: all of them) is
 * back. One that was not stepped is not waited for. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: in GATHERING and STEPPING, when it has not left
 * - REFIT_ERR_NOT_FOUND: no such parameter
 * - REFIT_ERR_INVALID: REFIT_STREAM_NONE: call refit_host_step_wait
 * - REFIT_ERR_COPY: its copy could not be started, see wait
 * - REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_join(refit_host_step *step,
                                                             uint32_t parameter,
                                                             refit_stream_ref stream,
                                                             refit_error *error);

/*
 * Waits until every stepped parameter is back, at most `timeout_ms` (0: only looks). Starts copies
 * back that could not be started before.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE
 * - REFIT_ERR_COPY and others: a copy could not be started
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_wait(refit_host_step *step,
                                                             uint32_t timeout_ms,
                                                             refit_error *error);

/* What has happened to a parameter: flags of refit_parameter_flag. 0 for NULL and for no parameter.
 * Does not block. */
REFIT_API uint32_t refit_host_step_progress(const refit_host_step *step, uint32_t parameter);

/*
 * The parameter as the host has it, in its own type: to publish it, say, without a transfer over
 * the device. Borrowed until close; changed by run, load and refresh. Does not block.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND: no such parameter
 * - REFIT_ERR_STATE: it was neither loaded nor refreshed, or is on its way
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_parameter(const refit_host_step *step,
                                                                  uint32_t parameter,
                                                                  const void **bytes,
                                                                  uint64_t *count,
                                                                  refit_error *error);

/*
 * The bytes of a state, master or remainder in the image, for the caller to read and write between
 * steps: what a checkpoint brings is written here. They may be used until the next run, load,
 * refit_read_lock_acquire, or restore, after which they may lie elsewhere: then call this again.
 * Waits for the image, if its memory is being taken, at most offload.timeout_ms.
 *
 * Errors:
 * - REFIT_ERR_STATE: in STEPPING, or the offloader is not OFFLOADED
 * - REFIT_ERR_BUSY: a read lock is open
 * - REFIT_ERR_NOT_FOUND: no region of this host step
 * - those of refit_offloader_seal about memory, and REFIT_ERR_TIMEOUT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_host_step_region(refit_host_step *step,
                                                               refit_region_id region, void **bytes,
                                                               uint64_t *count, refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
