/* fake_fixture: the driver as a program finds it, for tests of the fake one itself. */
#ifndef FAKE_FIXTURE_H
#define FAKE_FIXTURE_H

#include "device/cuda/cuda_driver.h"
#include "fake_cuda.h"
#include "tests/support/test.h"

/* The table, read by set_up; and the primary context of device 0, then the current one. */
extern rft_cuda_driver cu;
extern rft_cu_context context;

#define assert_cu(call)           assert_int_equal(call, RFT_CU_SUCCESS)
#define refuses(answer, call)     assert_int_equal(call, RFT_CU_##answer)
#define DRIVER_TEST(name)         TEST_WITH(name, set_up, tear_down)
#define address_of(memory)        ((rft_cu_ptr)(uintptr_t)(memory))
#define assert_violations(number) assert_int_equal(fake_cuda_violations(), number)

/* NULL where the driver lacks it; the answer and what was found go out where they are wanted. */
void *symbol_of(const char *name, int version, rft_cu_result *result, int *found);
/* A driver that was reset, initialised, with the context. */
int set_up(void **state);
/* Ends what the calls below gave, if the test has not. Nothing is left, and no rule was broken that
 * the test did not forgive. */
int tear_down(void **state);

/* Initialises the driver and makes the primary context of device 0 current; and the end of that. */
void enter_context(void);
void leave_context(void);

rft_cu_stream open_stream(void);
rft_cu_event open_event(void);
rft_cu_ptr device_memory(size_t bytes);
void *pinned_memory(size_t bytes); /* of the host, registered */

#endif
