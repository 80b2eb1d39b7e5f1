/* What the tests of offloading share: settings, figures, and both ways of the states. */
#ifndef OFFLOAD_OFFLOAD_H
#define OFFLOAD_OFFLOAD_H

#include <refit.h>
#include <refit/advanced/activations.h>
#include <refit/advanced/arena.h>
#include <refit/advanced/host_step.h>
#include <refit/advanced/torch.h>
#include <refit/advanced/window.h>

#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

/* `settings`: "key=value" strings, ended by NULL; may itself be NULL. */
void set_each(refit_config *config, const char *const *settings);

refit_stats stats_of(refit_offloader *offloader);
refit_region_info region_of(refit_offloader *offloader, refit_region_id region);
uint64_t used_bytes(refit_device *device);

/* Starts it, and waits for its end. */
refit_status offload_all(refit_offloader *offloader, refit_error *error);
refit_status restore_all(refit_offloader *offloader, refit_error *error);

/* Between the two every block is freed, which the second asserts. If a test in between
 * fails, leaks of later tests go unreported. */
void begin_without_blocks(void);
void end_without_blocks(void);

/* Calls of `slot` that fail. */
typedef struct fault {
    const char *name;
    faulty_slot slot;
    refit_status status;
    bool may_succeed; /* the library has a fallback */
} fault;

/* The nth such call fails. */
void order_fault(refit_device *device, const fault *it, uint32_t nth);

/* The call timed out, because the device hangs; it would have waited offload.timeout_ms, 20 s,
 * otherwise. */
void check_hung(refit_device *device, refit_status status);
#define assert_hung(on, call) check_hung((on)->device, (call))

#define SETTINGS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* Each kind of scene has its own. */
typedef struct scene scene;
typedef struct opening opening;
scene *open_scene(const opening *how);
void close_scene(scene *on);

int set_up(void **state);
int tear_down(void **state);

/* A test `on` a scene, which is opened as the words after the name say (0 if there are none):
 *
 *     SCENE(copies_out_follow_the_stream, .windows = "1")
 *     {
 *         assert_ok(begin(on));
 *     }
 */
#define SCENE(name, ...)                                                                           \
    static void name(scene *on);                                                                   \
    static void run_##name(void **state)                                                           \
    {                                                                                              \
        name(*state);                                                                              \
    }                                                                                              \
    LIST_SCENE(name, name, #name, __VA_ARGS__)                                                     \
    static void name(scene *on)

/* The same test once more, on a scene that is opened otherwise. */
#define SCENE_AGAIN(name, as, ...) LIST_SCENE(name, name##_##as, #name ", " #as, __VA_ARGS__)

#define LIST_SCENE(name, as, words, ...)                                                           \
    static opening opening_of_##as = {__VA_ARGS__};                                                \
    TEST_LIST(as, words, run_##name, set_up, tear_down, &opening_of_##as)

#endif
