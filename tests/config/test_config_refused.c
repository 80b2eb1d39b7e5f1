/* Every call that takes a configuration refuses one that is invalid, with its reason, and opens
 * nothing. */
#include <refit.h>
#include <refit/advanced/archive.h>
#include <refit/advanced/query.h>

#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define refused(call)                                                                              \
    do {                                                                                           \
        void *out = &out;                                                                          \
        assert_refused(call, status, words);                                                       \
        assert_ptr_equal(out, &out);                                                               \
    } while (0)

static void assert_all_refuse(const refit_config *config, refit_status status, const char *words)
{
    const char *trainer = "tcp://127.0.0.1:1";
    refit_device *device;
    refit_offloader *offloader;
    assert_ok(refit_device_open("host", NULL, &device, NULL));
    assert_ok(refit_offloader_open(device, NULL, &offloader, NULL));
    refused(refit_device_open("host", config, (refit_device **)&out, error));
    refused(refit_offloader_open(device, config, (refit_offloader **)&out, error));
    refused(refit_controller_open(offloader, NULL, config, (refit_controller **)&out, error));
    refused(refit_publisher_open("tcp://127.0.0.1:0", config, (refit_publisher **)&out, error));
    refused(refit_subscriber_open(trainer, config, (refit_subscriber **)&out, error));
    refused(refit_query_open(trainer, config, 0, (refit_query **)&out, error));
    refused(refit_archive_open("/", REFIT_ARCHIVE_READ, config, (refit_archive **)&out, error));
    refused(refit_snapshot_open("/none.refit", config, (refit_snapshot **)&out, error));
    assert_ok(refit_offloader_close(offloader, NULL));
    assert_ok(refit_device_close(device, NULL));
}

TEST(a_config_that_was_never_initialised_is_refused_by_all)
{
    refit_config config = {0};
    assert_all_refuse(&config, REFIT_ERR_INVALID, "refit_config_init");
}

TEST(values_that_do_not_fit_together_are_refused_by_all)
{
    refit_config config = quick_config();
    config.broadcast_heartbeat_ms = config.broadcast_heartbeat_timeout_ms;
    assert_all_refuse(&config, REFIT_ERR_CONFIG, "broadcast.heartbeat_timeout_ms");
}

int main(void)
{
    return test_run("config_refused");
}
