/* cuda_event: events of the driver as events of device.h, and the wait for one. */
#ifndef RFT_CUDA_EVENT_H
#define RFT_CUDA_EVENT_H

#include "device/cuda_device.h"

/* Looks at the event until it is done (rft_look_again), at most until `deadline` (of rft_deadline);
 * a deadline that has passed looks once. REFIT_ERR_TIMEOUT, or REFIT_ERR_DEVICE if the work before
 * it has lost the GPU. Inside a context guard. */
refit_status rft_cuda_event_poll_wait(rft_cuda_device *cuda, rft_cu_event event, int64_t deadline,
                                      refit_error *error);

/* The slots of device.h, inside a context guard. */
refit_status rft_cuda_event_open(rft_cuda_device *cuda, rft_event **out, refit_error *error);
void rft_cuda_event_close(rft_cuda_device *cuda,
                          rft_event *event); /* enters the context by itself */
refit_status rft_cuda_event_record(rft_cuda_device *cuda, rft_event *event, refit_stream_ref stream,
                                   refit_error *error);
refit_status rft_cuda_event_join(rft_cuda_device *cuda, rft_event *event, refit_stream_ref stream,
                                 refit_error *error);
refit_status rft_cuda_event_wait(rft_cuda_device *cuda, rft_event *event, uint32_t timeout_ms,
                                 refit_error *error);

#endif
