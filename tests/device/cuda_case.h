/*
 * A test of the CUDA device on the fake driver: before it the driver is as new, after it nothing
 * may be left open there, none of its rules broken, and the thread's context and capture mode as
 * they were. Warnings are heard (heard.h).
 */
#ifndef CUDA_CASE_H
#define CUDA_CASE_H

#include "device/device.h"
#include "fake_cuda.h"
#include "tests/support/heard.h"
#include "tests/support/test.h"

int cuda_case_begin(void **state);
int cuda_case_end(void **state);

#define CUDA_TEST(name) TEST_WITH(name, cuda_case_begin, cuda_case_end)

/* "cuda:0" or another, with a deadline that only a hang reaches. It succeeds. */
refit_device *cuda_open(void);
refit_device *cuda_open_spec(const char *spec);
void cuda_close(refit_device *device);

/* As CUDA_TEST, with "cuda:0" open meanwhile. A test that closes it leaves NULL. */
extern refit_device *gpu;

int gpu_case_begin(void **state);
int gpu_case_end(void **state);

#define GPU_TEST(name) TEST_WITH(name, gpu_case_begin, gpu_case_end)

/* For the next of several rounds of a test: as after cuda_case_end and cuda_case_begin. */
void cuda_case_again(void);

#endif
