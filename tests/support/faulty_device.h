/*
 * A device that does what another one does, until it is told to fail: how tests show what happens
 * when memory runs out, a copy breaks, or work takes its time.
 *
 *     refit_device *device;
 *     faulty_device_open("host:capacity=64MiB", &device, &error);
 *     faulty_device_fail(device, FAULTY_MEMORY_ALLOC, 1, REFIT_ERR_DEVICE_MEMORY);
 *     ... the next refit_memory_alloc on `device` answers REFIT_ERR_DEVICE_MEMORY ...
 *     assert_int_equal(refit_device_close(device, NULL), REFIT_OK);
 *
 * It goes wherever a refit_device goes; the one inside is opened and closed with it. All functions
 * below may be called from any thread while the device is in use.
 */
#ifndef FAULTY_DEVICE_H
#define FAULTY_DEVICE_H

#include "device/device.h"

/* The slots of rft_device_ops that can fail. */
typedef enum faulty_slot {
    FAULTY_MEMORY_ALLOC,
    FAULTY_MEMORY_FREE,
    FAULTY_RESERVE,
    FAULTY_COMMIT,
    FAULTY_DECOMMIT,
    FAULTY_HOST_PIN,
    FAULTY_STREAM_OPEN,
    FAULTY_STREAM_CLOSE,
    FAULTY_STREAM_CALL,
    FAULTY_COPY_BATCH,
    FAULTY_ZERO,
    FAULTY_EVENT_OPEN,
    FAULTY_EVENT_RECORD,
    FAULTY_EVENT_JOIN,
    FAULTY_EVENT_WAIT,
    FAULTY_DIGEST,
    FAULTY_DIGEST_LIST,
    FAULTY_MASTER_ENCODE,
    FAULTY_MASTER_DECODE,
    FAULTY_DELTA_EXCHANGE,
    FAULTY_DELTA_APPLY,
    FAULTY_SHARE_EXPORT,
    FAULTY_SHARE_MAP,
    FAULTY_SLOTS,
} faulty_slot;

#define FAULTY_ALWAYS UINT32_MAX

/* What goes wrong with a call that is ordered to. The last three are for FAULTY_COPY_BATCH and
 * FAULTY_ZERO, and write a half: the first half of every destination is zeroed, the rest left. */
typedef enum faulty_kind {
    FAULTY_REFUSES, /* it answers the status, and does nothing */
    FAULTY_HALVES,  /* it answers the status, and has put a half on the stream */
    FAULTY_TEARS,   /* it answers REFIT_OK, and so does every wait: memory is at fault */
    FAULTY_LOSES,   /* it answers REFIT_OK, and the device is lost when the stream comes to it */
} faulty_kind;

typedef struct faulty_order {
    faulty_slot slot;
    uint32_t nth;   /* call of the slot from now on; 1: the next one */
    uint32_t times; /* that many in a row; 0: one */
    refit_status status;
    faulty_kind kind;
} faulty_order;

/* Opens `spec` and wraps it; `config` may be NULL. */
refit_status faulty_device_open(const char *spec, refit_device **out, refit_error *error);
refit_status faulty_device_open_with(const char *spec, const refit_config *config,
                                     refit_device **out, refit_error *error);

/* One order per slot: a new one takes the place of the old one. */
void faulty_device_order(refit_device *device, const faulty_order *order);

/* The nth call of `slot` from now on answers `status` and does nothing. */
void faulty_device_fail(refit_device *device, faulty_slot slot, uint32_t nth, refit_status status);

/* Fails the nth call and the `times - 1` calls after it; FAULTY_ALWAYS: all calls from the nth on.
 */
void faulty_device_fail_times(refit_device *device, faulty_slot slot, uint32_t nth, uint32_t times,
                              refit_status status);

/* FAULTY_COPY_BATCH or FAULTY_ZERO: the device is lost when a stream comes to the work of the nth
 * call. From then on waits for events, and all calls but those that free or close, answer
 * REFIT_ERR_DEVICE. On REFIT_STREAM_NONE the call itself does. */
void faulty_device_lose(refit_device *device, faulty_slot slot, uint32_t nth);

/* The one inside, which meets no order and counts no call. */
refit_device *faulty_device_inner(refit_device *device);

/* From now on streams stop before each copy or zero that is put on them, until faulty_device_go.
 * A wait for them returns REFIT_ERR_TIMEOUT meanwhile. REFIT_STREAM_NONE does not stop. A stream
 * cannot be closed while it stands: go first. */
void faulty_device_stop(refit_device *device);
void faulty_device_go(refit_device *device);

/* As faulty_device_stop, and a wait for an event or a stream ends after 20 ms, however long it
 * might take: the timeout of a call that runs out need not be one that others depend on. */
void faulty_device_hang(refit_device *device);

/* The longest timeout of such a wait since then, in milliseconds. */
uint32_t faulty_device_longest_wait(refit_device *device);

/* As faulty_device_stop, until a call waits for an event or a stream: a look, with a timeout of 0,
 * is not a wait. What is over after the call shows whether it has waited. */
void faulty_device_stop_until_awaited(refit_device *device);

/* The nth page-lock from now on (1: the next one) and those after it stand until
 * faulty_device_let_pins. */
void faulty_device_hold_pins(refit_device *device, uint32_t nth);
void faulty_device_let_pins(refit_device *device);

/* Waits until one stands. */
void faulty_device_await_pin(refit_device *device);

/* Forgets all orders and calls. */
void faulty_device_reset(refit_device *device);

/* Calls of the slot since the device was opened or reset, those that failed included: run once,
 * count, then fail each of them in turn. */
uint32_t faulty_device_calls(refit_device *device, faulty_slot slot);

/* Events that a stream was told to wait for since the device was opened or reset: whether work that
 * the stream gets next waits for something. */
uint32_t faulty_device_joins(refit_device *device, refit_stream_ref stream);

#endif
