/* Every call that takes a configuration refuses one that is invalid, with its reason, and opens
 * nothing. */
#include <refit.h>

#include "tests/support/quick_config.h"
#include "tests/support/test.h"

/* What the objects are opened on. */
typedef struct base {
    refit_device *device;
    refit_offloader *offloader;
} base;

typedef refit_status (*open_fn)(const base *on, const refit_config *config, void **out,
                                refit_error *error);

static refit_status device(const base *on, const refit_config *config, void **out,
                           refit_error *error)
{
    (void)on;
    return refit_device_open("host", config, (refit_device **)out, error);
}

static refit_status offloader(const base *on, const refit_config *config, void **out,
                              refit_error *error)
{
    return refit_offloader_open(on->device, config, (refit_offloader **)out, error);
}

static refit_status controller(const base *on, const refit_config *config, void **out,
                               refit_error *error)
{
    return refit_controller_open(on->offloader, NULL, config, (refit_controller **)out, error);
}

static refit_status publisher(const base *on, const refit_config *config, void **out,
                              refit_error *error)
{
    (void)on;
    return refit_publisher_open("tcp://127.0.0.1:0", config, (refit_publisher **)out, error);
}

static refit_status subscriber(const base *on, const refit_config *config, void **out,
                               refit_error *error)
{
    (void)on;
    return refit_subscriber_open("tcp://127.0.0.1:1", config, (refit_subscriber **)out, error);
}

static refit_status glance(const base *on, const refit_config *config, void **out,
                           refit_error *error)
{
    (void)on;
    return refit_glance_open("tcp://127.0.0.1:1", config, 0, (refit_glance **)out, error);
}

static refit_status archive(const base *on, const refit_config *config, void **out,
                            refit_error *error)
{
    (void)on;
    return refit_archive_open("/", REFIT_ARCHIVE_READ, config, (refit_archive **)out, error);
}

static refit_status snapshot(const base *on, const refit_config *config, void **out,
                             refit_error *error)
{
    (void)on;
    return refit_snapshot_open("/none.refit", config, (refit_snapshot **)out, error);
}

static const struct {
    const char *name;
    open_fn open;
} calls[] = {
    {"device", device},       {"offloader", offloader},   {"controller", controller},
    {"publisher", publisher}, {"subscriber", subscriber}, {"glance", glance},
    {"archive", archive},     {"snapshot", snapshot},
};

static void assert_all_refuse(const refit_config *config, refit_status expected, const char *words)
{
    base on;
    refit_error error;
    assert_ok(refit_device_open("host", NULL, &on.device, &error));
    assert_ok(refit_offloader_open(on.device, NULL, &on.offloader, &error));
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        void *out = &on;
        refit_status status = calls[i].open(&on, config, &out, &error);
        if (status != expected || strstr(error.text, words) == NULL || out != &on)
            fail_msg("%s: status %d: %s", calls[i].name, (int)status, error.text);
    }
    assert_ok(refit_offloader_close(on.offloader, &error));
    assert_ok(refit_device_close(on.device, &error));
}

static void a_config_that_was_never_initialised_is_refused_by_all(void **state)
{
    refit_config config = {0};
    assert_all_refuse(&config, REFIT_ERR_INVALID, "refit_config_init");
}

static void values_that_do_not_fit_together_are_refused_by_all(void **state)
{
    refit_config config = quick_config();
    config.broadcast_heartbeat_ms = config.broadcast_heartbeat_timeout_ms;
    assert_all_refuse(&config, REFIT_ERR_CONFIG, "broadcast.heartbeat_timeout_ms");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_config_that_was_never_initialised_is_refused_by_all),
        cmocka_unit_test(values_that_do_not_fit_together_are_refused_by_all),
    };
    return cmocka_run_group_tests_name("config_refused", tests, NULL, NULL);
}
