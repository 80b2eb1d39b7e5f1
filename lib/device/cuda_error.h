/*
 * cuda_error: from a driver's answer to a status and a sentence. error->subsystem is the CUresult.
 */
#ifndef RFT_CUDA_ERROR_H
#define RFT_CUDA_ERROR_H

#include "device/cuda_driver.h"

/* What the answer means when nothing better is known: OUT_OF_MEMORY is REFIT_ERR_DEVICE_MEMORY,
 * NOT_READY is REFIT_ERR_TIMEOUT, captures are REFIT_ERR_STATE, no GPU and a stub library are
 * REFIT_ERR_NOT_FOUND, a GPU that is taken is REFIT_ERR_BUSY, …; the rest is REFIT_ERR_DEVICE. */
refit_status rft_cuda_status(rft_cu_result result);

/* After one of these the context is lost: every further call gives the same answer, and only a new
 * process helps (an illegal address, a device-side assert, an ECC error, …). */
bool rft_cuda_is_lost(rft_cu_result result);

/* "CUDA_ERROR_INVALID_VALUE": the driver's name for it, for sentences of one's own. Never NULL. */
const char *rft_cuda_name(const rft_cuda_driver *driver, rft_cu_result result);

/* REFIT_OK, or a failure: "`what`: CUDA_ERROR_NAME (the driver's words); advice". */
refit_status rft_cuda_check(const rft_cuda_driver *driver, rft_cu_result result, refit_error *error,
                            const char *what);

/* Likewise for work on memory: an address that the driver refuses is REFIT_ERR_COPY, with what may
 * be wrong with it. Nothing was queued, and the GPU is as it was. */
refit_status rft_cuda_check_copy(const rft_cuda_driver *driver, rft_cu_result result,
                                 refit_error *error, const char *what);

#endif
