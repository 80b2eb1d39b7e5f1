/* A ZeroMQ that was built without CURVE: keys are refused at both ends, with a sentence, instead of
 * left out. This program answers zmq_has for the library. */
#include <refit/broadcast.h>
#include <refit/keys.h>

#include "tests/support/key_fixture.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

static int curve_is_here;

int zmq_has(const char *capability);

int zmq_has(const char *capability)
{
    return strcmp(capability, "curve") == 0 && curve_is_here;
}

TEST(without_curve_keys_are_unsupported)
{
    curve_is_here = 1;
    key_fixture smith = key_fixture_open();
    key_fixture_admit(&smith, "w0");
    curve_is_here = 0;
    refit_error error;
    char folder[256];
    key_fixture_path(&smith, "keys", folder);
    assert_int_equal(refit_keys_generate(folder, "w1", 0, &error), REFIT_ERR_UNSUPPORTED);
    assert_says(&error, "CURVE");

    refit_config config = quick_config();
    refit_publisher *publisher = NULL;
    key_fixture_equip_trainer(&smith, &config);
    assert_int_equal(refit_publisher_open("tcp://127.0.0.1:0", &config, &publisher, &error),
                     REFIT_ERR_UNSUPPORTED);
    refit_subscriber *subscriber = NULL;
    config = quick_config();
    key_fixture_equip_worker(&smith, "w0", &config);
    assert_int_equal(refit_subscriber_open("tcp://127.0.0.1:1", &config, &subscriber, &error),
                     REFIT_ERR_UNSUPPORTED);
    key_fixture_close(&smith);
}

int main(void)
{
    return test_run("curve_missing");
}
