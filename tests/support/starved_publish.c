#include "tests/support/starved_publish.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/error.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/trainer.h"

/* Opens, declares, begins, writes and commits one tensor. */
static refit_status publish_one(starved_write *write, refit_device **device,
                                refit_publisher **publisher, void **memory)
{
    const refit_config config = trainer_config();
    const refit_tensor *tensor = sample_tensors();
    RFT_TRY(refit_device_open("cuda:0", NULL, device, NULL));
    RFT_TRY(refit_memory_alloc(*device, tensor->bytes, memory, NULL));
    RFT_TRY(refit_publisher_open("tcp://127.0.0.1:0", &config, publisher, NULL));
    RFT_TRY(refit_publisher_declare(*publisher, tensor, 1, NULL));
    RFT_TRY(refit_publisher_begin(*publisher, 1, NULL));
    RFT_TRY(write(*publisher, *device, *memory, tensor->bytes));
    return refit_publisher_commit(*publisher, NULL);
}

void starve_a_publish(starved_write *write)
{
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        refit_device *device = NULL;
        refit_publisher *publisher = NULL;
        void *memory = NULL;
        fake_cuda_reset();
        failing_alloc_begin(nth);
        refit_status status = publish_one(write, &device, &publisher, &memory);
        refit_publisher_close(publisher);
        if (memory != NULL) assert_int_equal(refit_memory_free(device, memory, NULL), REFIT_OK);
        assert_int_equal(refit_device_close(device, NULL), REFIT_OK);
        came = failing_alloc_end();
        assert_true(status == REFIT_OK || (came && status == REFIT_ERR_HOST_MEMORY));
        assert_int_equal(fake_cuda_leaks(), 0);
    }
}
