/* Activations: groups of tensors leave for an arena and return, in any order and from any thread.
 */
#include "tests/offload/layers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"

#define LAYERS 6

static refit_status commit(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_commit(on->activations, of->group, stream, &on->error);
}

static refit_status join(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_join(on->activations, of->group, stream, &on->error);
}

static refit_status wait_for(scene *on, const layer *of, uint32_t timeout_ms)
{
    return refit_activations_wait(on->activations, of->group, timeout_ms, &on->error);
}

static refit_status release(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_release(on->activations, of->group, stream, &on->error);
}

static void await_stream(scene *on)
{
    assert_ok(refit_stream_wait(on->device, on->stream, PATIENCE_MS, &on->error));
}

static uint64_t bytes_of(const layer *of)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        bytes += of->tensors[i].bytes;
    }
    return bytes;
}

/* ---- What holds ------------------------------------------------------------------------------ */

/* Tensors of a few bytes, and such as several slabs hold; the caller's stream, or the call. */
static void every_byte_returns(void **state)
{
    (void)state;
    static const uint64_t most[] = {1, 700, 5000, 200000};
    scene on;
    scene_open(&on, "16MiB", NULL);
    for (int run = 0; run < 8; run++) {
        layer layers[LAYERS];
        refit_stream_ref stream = run % 2 == 0 ? on.stream : REFIT_STREAM_NONE;
        uint64_t bytes = 0;
        refit_stats before = scene_stats(&on);
        for (int i = 0; i < LAYERS; i++) {
            layer_make(&on, &layers[i], (uint32_t)(1 + i * 2), most[run / 2]);
            layer_leave(&on, &layers[i], stream);
            bytes += bytes_of(&layers[i]);
        }
        assert_int_equal(scene_stats(&on).activation_groups, LAYERS);
        for (int i = LAYERS; i-- > 0;) {
            layer_return(&on, &layers[i], stream);
            layer_end(&on, &layers[i]);
        }
        refit_stats stats = scene_stats(&on);
        assert_int_equal(stats.activation_out_bytes_total - before.activation_out_bytes_total,
                         bytes);
        assert_int_equal(stats.activation_in_bytes_total - before.activation_in_bytes_total, bytes);
        assert_int_equal(stats.activation_used_bytes, 0);
        assert_true(stats.activation_used_bytes_peak >= bytes);
        assert_int_equal(stats.activation_out_of_order, 0);
        assert_int_equal(stats.activation_reused, 0);
        assert_int_equal(stats.activation_refused_bytes_total, 0);
        assert_int_equal(stats.activation_failures, 0);
        assert_int_equal(stats.activation_host_bytes, 16 << 20);
    }
    scene_close(&on);
}

/* A group that is released below others leaves a piece, which is used where the top has no room. */
static void other_orders_are_counted_and_use_what_is_free(void **state)
{
    (void)state;
    scene on;
    layer layers[4], more;
    scene_open(&on, "64KiB", NULL);
    for (int i = 0; i < 4; i++) { /* a quarter of the arena each */
        layer_make(&on, &layers[i], 1, 16384);
        while (layers[i].tensors[0].bytes <= 16384 - 512) {
            layer_end(&on, &layers[i]);
            layer_make(&on, &layers[i], 1, 16384);
        }
        layer_leave(&on, &layers[i], on.stream);
    }
    assert_int_equal(scene_stats(&on).activation_used_bytes, 65536);
    layer_return(&on, &layers[1], on.stream);
    assert_int_equal(scene_stats(&on).activation_out_of_order, 1);
    layer_make(&on, &more, 2, 7000);
    layer_leave(&on, &more, on.stream);
    assert_int_equal(more.tensors[0].place, 0);
    assert_int_equal(more.tensors[1].place, 1);
    assert_int_equal(scene_stats(&on).activation_reused, 2);
    layer_return(&on, &layers[0], on.stream);
    layer_return(&on, &layers[2], on.stream);
    assert_int_equal(scene_stats(&on).activation_out_of_order, 3);
    layer_return(&on, &layers[3], on.stream); /* on top */
    layer_return(&on, &more, on.stream);
    assert_int_equal(scene_stats(&on).activation_out_of_order, 3);
    for (int i = 0; i < 4; i++) {
        layer_end(&on, &layers[i]);
    }
    layer_end(&on, &more);
    scene_close(&on);
}

/* No error: all others go on, and a smaller one behind it still fits. */
static void what_has_no_room_stays(void **state)
{
    (void)state;
    scene on;
    layer first, second;
    scene_open(&on, "200000", NULL);
    layer_make(&on, &first, 12, 40000);
    layer_leave(&on, &first, on.stream);
    uint64_t refused = 0, left = 0;
    for (uint32_t i = 0; i < first.count; i++) {
        bool stays = first.tensors[i].place == REFIT_ACTIVATION_STAYS;
        *(stays ? &refused : &left) += first.tensors[i].bytes;
    }
    assert_true(refused > 0 && left > 0);
    refit_stats stats = scene_stats(&on);
    assert_int_equal(stats.activation_refused_bytes_total, refused);
    assert_int_equal(stats.activation_out_bytes_total, left);
    assert_true(stats.activation_used_bytes <= 200000);
    layer_make(&on, &second, 3, 200000); /* finds the arena as good as full */
    layer_leave(&on, &second, on.stream);
    layer_check(&on, &second);
    layer_return(&on, &second, on.stream);
    layer_return(&on, &first, on.stream);
    layer_end(&on, &first);
    layer_end(&on, &second);
    scene_close(&on);
}

static void an_arena_of_nearly_nothing_takes_nearly_nothing(void **state)
{
    (void)state;
    static const char *const sizes[] = {"1", "511", "512", "1024"};
    for (uint32_t size = 0; size < 4; size++) {
        scene on;
        layer of;
        uint32_t left = 0;
        scene_open(&on, sizes[size], NULL);
        layer_make(&on, &of, 5, 500);
        layer_leave(&on, &of, on.stream);
        for (uint32_t i = 0; i < of.count; i++) {
            left += of.tensors[i].place != REFIT_ACTIVATION_STAYS;
        }
        assert_int_equal(left, size < 2 ? 0 : size - 1);
        layer_return(&on, &of, on.stream);
        layer_end(&on, &of);
        scene_close(&on);
    }
}

static void a_group_without_tensors_goes_through_all_states(void **state)
{
    (void)state;
    scene on;
    layer of = {.group = 0};
    scene_open(&on, "64KiB", NULL);
    layer_leave(&on, &of, on.stream);
    assert_ok(wait_for(&on, &of, 0));
    assert_ok(refit_activations_fetch(on.activations, of.group, NULL, 0, on.stream, &on.error));
    assert_ok(join(&on, &of, on.stream));
    assert_ok(release(&on, &of, on.stream));
    assert_int_equal(scene_stats(&on).activation_out_bytes_total, 0);
    scene_close(&on);
}

static void a_group_is_fetched_as_often_as_wanted(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "2MiB", NULL);
    layer_make(&on, &of, 8, 90000);
    layer_leave(&on, &of, on.stream);
    for (int time = 0; time < 4; time++) {
        layer_take(&on, &of);
        assert_ok(layer_fetch(&on, &of, on.stream));
        assert_ok(time % 2 == 0 ? join(&on, &of, on.stream) : wait_for(&on, &of, PATIENCE_MS));
        await_stream(&on);
        layer_check(&on, &of);
        layer_free(&on, &of);
    }
    layer_return(&on, &of, on.stream);
    assert_int_equal(scene_stats(&on).activation_in_bytes_total, 5 * bytes_of(&of));
    layer_end(&on, &of);
    scene_close(&on);
}

/* Addresses that are NULL, and fewer addresses than tensors. */
static void some_tensors_return_before_others(void **state)
{
    (void)state;
    scene on;
    layer of;
    void *all[TENSORS_MOST], *some[TENSORS_MOST];
    scene_open(&on, "2MiB", NULL);
    layer_make(&on, &of, 9, 90000);
    layer_leave(&on, &of, on.stream);
    layer_take(&on, &of);
    assert_int_equal(layer_memories(&of, all), 9);
    for (int i = 0; i < 9; i++) {
        some[i] = i % 3 == 0 ? all[i] : NULL;
    }
    assert_ok(refit_activations_fetch(on.activations, of.group, some, 7, on.stream, &on.error));
    assert_ok(wait_for(&on, &of, PATIENCE_MS));
    for (uint32_t i = 0; i < 9; i++) {
        const layer_tensor *tensor = &of.tensors[i];
        unsigned char first;
        test_read(on.plain, &first, tensor->memory, 1);
        bool is_back =
            test_alike(on.plain, tensor->memory, tensor->expected, tensor->bytes) == tensor->bytes;
        assert_true(is_back == (i % 3 == 0) || tensor->bytes < 8);
        if (i % 3 != 0) assert_int_equal(first, 0xA5);
    }
    uint64_t before = scene_stats(&on).activation_in_bytes_total;
    memset(some, 0, sizeof some);
    assert_ok(refit_activations_fetch(on.activations, of.group, some, 9, on.stream, &on.error));
    assert_int_equal(scene_stats(&on).activation_in_bytes_total, before);
    layer_return(&on, &of, on.stream);
    layer_end(&on, &of);
    scene_close(&on);
}

/* Groups need not be committed in the order in which they were begun, nor one at a time. */
static void several_groups_may_be_open(void **state)
{
    (void)state;
    scene on;
    layer layers[3];
    scene_open(&on, "2MiB", NULL);
    for (int i = 0; i < 3; i++) {
        layer_make(&on, &layers[i], 5, 50000);
        assert_ok(refit_activations_begin(on.activations, &layers[i].group, &on.error));
        assert_int_equal(layers[i].group, i + 1);
    }
    for (uint32_t t = 0; t < 5; t++) {
        for (int i = 0; i < 3; i++) {
            layer_tensor *tensor = &layers[i].tensors[t];
            assert_ok(refit_activations_add(on.activations, layers[i].group, tensor->memory,
                                            tensor->bytes, &tensor->place, &on.error));
            assert_int_equal(tensor->place, t);
        }
    }
    for (int i = 0; i < 3; i++) {
        assert_ok(commit(&on, &layers[(i + 1) % 3], on.stream));
    }
    for (int i = 0; i < 3; i++) {
        assert_ok(join(&on, &layers[i], REFIT_STREAM_NONE));
        layer_free(&on, &layers[i]);
    }
    for (int i = 0; i < 3; i++) {
        layer_return(&on, &layers[(i + 2) % 3], on.stream);
    }
    for (int i = 0; i < 3; i++) {
        layer_end(&on, &layers[i]);
    }
    scene_close(&on);
}

/* ---- Wrong calls ----------------------------------------------------------------------------- */

static void numbers_of_no_group_are_not_found(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 1, 100);
    layer_leave(&on, &of, on.stream);
    layer released = of;
    layer_return(&on, &of, on.stream);
    const refit_activation_group numbers[] = {0, released.group, released.group + 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        uint32_t place;
        layer none = {.group = numbers[i]};
        assert_int_equal(refit_activations_add(on.activations, numbers[i], of.tensors[0].memory, 1,
                                               &place, &on.error),
                         REFIT_ERR_NOT_FOUND);
        assert_int_equal(commit(&on, &none, on.stream), REFIT_ERR_NOT_FOUND);
        assert_int_equal(join(&on, &none, on.stream), REFIT_ERR_NOT_FOUND);
        assert_int_equal(wait_for(&on, &none, 0), REFIT_ERR_NOT_FOUND);
        assert_int_equal(layer_fetch(&on, &none, on.stream), REFIT_ERR_NOT_FOUND);
        assert_int_equal(release(&on, &none, on.stream), REFIT_ERR_NOT_FOUND);
    }
    layer_leave(&on, &of, on.stream);
    assert_int_equal(of.group, released.group + 1); /* never used again */
    layer_return(&on, &of, on.stream);
    layer_end(&on, &of);
    scene_close(&on);
}

static void calls_in_a_wrong_state_are_refused(void **state)
{
    (void)state;
    scene on;
    layer of;
    uint32_t place;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 3, 20000);
    layer_add(&on, &of);
    assert_int_equal(join(&on, &of, on.stream), REFIT_ERR_STATE); /* OPEN */
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_STATE);
    assert_ok(wait_for(&on, &of, 0));
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &of, on.stream)); /* LEAVING */
    assert_int_equal(commit(&on, &of, on.stream), REFIT_ERR_STATE);
    assert_int_equal(
        refit_activations_add(on.activations, of.group, of.tensors[0].memory, 1, &place, &on.error),
        REFIT_ERR_STATE);
    faulty_device_go(on.device);
    assert_ok(wait_for(&on, &of, PATIENCE_MS)); /* AWAY */
    assert_int_equal(commit(&on, &of, on.stream), REFIT_ERR_STATE);
    faulty_device_stop(on.device);
    layer_free(&on, &of);
    layer_take(&on, &of);
    assert_ok(layer_fetch(&on, &of, on.stream)); /* RETURNING */
    assert_int_equal(commit(&on, &of, on.stream), REFIT_ERR_STATE);
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_STATE);
    faulty_device_go(on.device);
    assert_ok(wait_for(&on, &of, PATIENCE_MS));
    layer_check(&on, &of);
    assert_ok(release(&on, &of, on.stream));
    layer_end(&on, &of);
    scene_close(&on);
}

static void arguments_that_cannot_be_are_refused(void **state)
{
    (void)state;
    scene on;
    layer of;
    uint32_t place;
    char here[16];
    void *memories[TENSORS_MOST + 1] = {NULL};
    refit_activations *other;
    refit_stats stats;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 2, 20000);
    assert_int_equal(refit_activations_open(NULL, NULL, &other, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_activations_open(on.device, NULL, NULL, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_activations_close(NULL, &on.error));
    assert_int_equal(refit_activations_begin(on.activations, NULL, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_activations_begin(NULL, &of.group, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_activations_begin(on.activations, &of.group, &on.error));
    const layer_tensor *tensor = &of.tensors[0];
    assert_int_equal(
        refit_activations_add(on.activations, of.group, tensor->memory, 0, &place, &on.error),
        REFIT_ERR_INVALID);
    assert_int_equal(refit_activations_add(on.activations, of.group, NULL, 1, &place, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(
        refit_activations_add(on.activations, of.group, tensor->memory, 1, NULL, &on.error),
        REFIT_ERR_INVALID);
    assert_int_equal(refit_activations_add(on.activations, of.group, tensor->memory, UINT64_MAX,
                                           &place, &on.error),
                     REFIT_ERR_INVALID);
    if (test_on_cuda()) { /* to the host device the memory of the process is its own */
        assert_int_equal(
            refit_activations_add(on.activations, of.group, here, sizeof here, &place, &on.error),
            REFIT_ERR_INVALID);
    }
    assert_ok(release(&on, &of, on.stream));
    layer_leave(&on, &of, on.stream);
    layer_take(&on, &of);
    assert_int_equal(
        refit_activations_fetch(on.activations, of.group, NULL, 1, on.stream, &on.error),
        REFIT_ERR_INVALID);
    assert_int_equal(
        refit_activations_fetch(on.activations, of.group, memories, 3, on.stream, &on.error),
        REFIT_ERR_INVALID);
    if (test_on_cuda()) {
        memories[1] = here;
        assert_int_equal(
            refit_activations_fetch(on.activations, of.group, memories, 2, on.stream, &on.error),
            REFIT_ERR_INVALID);
    }
    assert_int_equal(refit_activations_stats(on.activations, NULL, &on.error), REFIT_ERR_INVALID);
    memset(&stats, 0, sizeof stats);
    assert_int_equal(refit_activations_stats(on.activations, &stats, &on.error), REFIT_ERR_INVALID);
    layer_return(&on, &of, on.stream);
    layer_end(&on, &of);
    scene_close(&on);
}

static void settings_that_cannot_be_are_refused(void **state)
{
    (void)state;
    scene on;
    refit_activations *other;
    scene_open(&on, "1MiB", NULL);
    assert_int_equal(refit_activations_open(on.device, NULL, &other, &on.error), REFIT_ERR_CONFIG);
    assert_non_null(strstr(on.error.text, "activations.host_bytes"));
    scene_set(&on, "use_pinned_optimizer_offload", "false");
    assert_int_equal(refit_activations_open(on.device, &on.config, &other, &on.error),
                     REFIT_ERR_UNSUPPORTED);
    scene_set(&on, "use_pinned_optimizer_offload", "true");
    scene_set(&on, "offload.budget_bytes", "1MiB");
    assert_int_equal(refit_activations_open(on.device, &on.config, &other, &on.error),
                     REFIT_ERR_BUDGET); /* the first has it */
    assert_non_null(strstr(on.error.text, "offload.budget_bytes"));
    scene_close(&on);
}

/* An arena of states and one of activations, each of which would fit alone. */
static void states_and_activations_share_a_budget(void **state)
{
    (void)state;
    scene on;
    refit_offloader *states;
    refit_region_id id;
    const char *const settings[] = {"offload.budget_bytes", "3MiB", NULL};
    refit_region_desc desc = {
        .size = sizeof desc, .name = "state", .bytes = 2 << 20, .home = REFIT_HOME_HOST};
    scene_open(&on, "2MiB", settings);
    assert_ok(refit_offloader_open(on.device, &on.config, &states, &on.error));
    assert_ok(refit_offloader_add(states, &desc, &id, &on.error));
    assert_int_equal(refit_offloader_seal(states, &on.error), REFIT_ERR_BUDGET);
    const char *const smaller[] = {"activations.host_bytes", "1MiB", NULL};
    scene_reopen(&on, smaller);
    assert_ok(refit_offloader_seal(states, &on.error));
    refit_activations *other;
    assert_int_equal(refit_activations_open(on.device, &on.config, &other, &on.error),
                     REFIT_ERR_BUDGET);
    assert_ok(refit_offloader_close(states, &on.error));
    assert_ok(refit_activations_open(on.device, &on.config, &other, &on.error));
    assert_ok(refit_activations_close(other, &on.error));
    scene_close(&on);
}

/* ---- Order on the streams -------------------------------------------------------------------- */

/* The copies out read what the stream has made by then. */
static void copies_out_follow_the_stream(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 3, 60000);
    void *sources[3];
    for (int i = 0; i < 3; i++) {
        sources[i] = test_host_alloc(on.plain, of.tensors[i].bytes);
        memcpy(sources[i], of.tensors[i].expected, of.tensors[i].bytes);
        test_fill(on.plain, of.tensors[i].memory, 0, of.tensors[i].bytes);
    }
    faulty_device_stop(on.device);
    for (int i = 0; i < 3; i++) {
        assert_ok(refit_stream_copy(on.device, on.stream, of.tensors[i].memory, sources[i],
                                    of.tensors[i].bytes, &on.error));
    }
    layer_add(&on, &of);
    assert_ok(commit(&on, &of, on.stream));
    assert_int_equal(wait_for(&on, &of, 10), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_ok(join(&on, &of, REFIT_STREAM_NONE));
    layer_free(&on, &of);
    layer_return(&on, &of, on.stream);
    for (int i = 0; i < 3; i++) {
        test_host_free(on.plain, sources[i], of.tensors[i].bytes);
    }
    layer_end(&on, &of);
    scene_close(&on);
}

/* What the stream still reads of the memory is not written by the copies in before. */
static void copies_in_follow_the_stream(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 1, 60000);
    const uint64_t bytes = of.tensors[0].bytes;
    unsigned char *kept = test_host_alloc(on.plain, bytes);
    layer_leave(&on, &of, on.stream);
    layer_take(&on, &of);
    faulty_device_stop(on.device);
    assert_ok(
        refit_stream_copy(on.device, on.stream, kept, of.tensors[0].memory, bytes, &on.error));
    assert_ok(layer_fetch(&on, &of, on.stream));
    faulty_device_go(on.device);
    assert_ok(join(&on, &of, REFIT_STREAM_NONE));
    layer_check(&on, &of);
    for (uint64_t at = 0; at < bytes; at++) {
        assert_int_equal(kept[at], 0xA5);
    }
    assert_ok(release(&on, &of, REFIT_STREAM_NONE));
    test_host_free(on.plain, kept, bytes);
    layer_end(&on, &of);
    scene_close(&on);
}

/* Work on the stream behind a join comes behind the copies, in both directions. */
static void work_behind_a_join_comes_behind_the_copies(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 1, 60000);
    const uint64_t bytes = of.tensors[0].bytes;
    unsigned char *other = test_host_alloc(on.plain, bytes);
    memset(other, 0x3C, bytes);
    layer_add(&on, &of);
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &of, on.stream));
    assert_ok(join(&on, &of, on.stream)); /* does not block */
    assert_ok(refit_stream_copy(on.device, on.stream, of.tensors[0].memory, other, bytes,
                                &on.error)); /* the memory is used again */
    faulty_device_go(on.device);
    await_stream(&on);
    faulty_device_stop(on.device);
    assert_ok(layer_fetch(&on, &of, on.stream));
    assert_ok(join(&on, &of, on.stream));
    assert_ok(refit_stream_copy(on.device, on.stream, other, of.tensors[0].memory, bytes,
                                &on.error)); /* what has returned is read */
    faulty_device_go(on.device);
    await_stream(&on);
    assert_memory_equal(other, of.tensors[0].expected, bytes);
    assert_ok(release(&on, &of, on.stream));
    test_host_free(on.plain, other, bytes);
    layer_end(&on, &of);
    scene_close(&on);
}

/* A backward pass that comes at once, before the copies out are over. */
static void a_group_is_fetched_while_it_leaves(void **state)
{
    (void)state;
    scene on;
    layer of;
    void *memories[TENSORS_MOST];
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 5, 60000);
    layer_add(&on, &of);
    layer_memories(&of, memories);
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &of, on.stream));
    assert_ok(join(&on, &of, on.stream));
    for (uint32_t i = 0; i < of.count; i++) {
        of.tensors[i].memory = NULL;
    }
    layer_take(&on, &of);
    assert_ok(layer_fetch(&on, &of, on.stream));
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_STATE); /* this one is not */
    assert_int_equal(wait_for(&on, &of, 10), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_ok(join(&on, &of, REFIT_STREAM_NONE));
    layer_check(&on, &of);
    assert_ok(release(&on, &of, on.stream));
    for (uint32_t i = 0; i < of.count; i++) {
        assert_ok(refit_memory_free(on.plain, memories[i], &on.error));
    }
    layer_end(&on, &of);
    scene_close(&on);
}

/* A fetch behind a fetch that was joined waits for it, at most offload.timeout_ms. */
static void a_second_fetch_waits_for_the_first(void **state)
{
    (void)state;
    scene on;
    layer of;
    const char *const settings[] = {"offload.timeout_ms", "50ms", NULL};
    scene_open(&on, "1MiB", settings);
    layer_make(&on, &of, 3, 30000);
    layer_leave(&on, &of, on.stream);
    layer_take(&on, &of);
    faulty_device_stop(on.device);
    assert_ok(layer_fetch(&on, &of, on.stream));
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_STATE);
    assert_ok(join(&on, &of, on.stream));
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_ok(layer_fetch(&on, &of, on.stream));
    assert_ok(wait_for(&on, &of, PATIENCE_MS));
    layer_check(&on, &of);
    assert_ok(release(&on, &of, on.stream));
    layer_end(&on, &of);
    scene_close(&on);
}

/* ---- Release, in each state ------------------------------------------------------------------ */

/* Room that is given back while copies in still read it is written by a new group behind them. */
static void room_is_used_again_behind_copies_in(void **state)
{
    (void)state;
    scene on;
    layer old, new;
    scene_open(&on, "128KiB", NULL);
    layer_make(&on, &old, 2, 60000);
    layer_make(&on, &new, 2, 60000);
    layer_leave(&on, &old, on.stream);
    layer_take(&on, &old);
    faulty_device_stop(on.device);
    assert_ok(layer_fetch(&on, &old, on.stream));
    assert_ok(release(&on, &old, on.stream));
    layer_add(&on, &new);
    assert_int_not_equal(new.tensors[0].place, REFIT_ACTIVATION_STAYS);
    assert_ok(commit(&on, &new, REFIT_STREAM_NONE));
    faulty_device_go(on.device);
    assert_ok(join(&on, &new, REFIT_STREAM_NONE));
    await_stream(&on); /* the release made it wait */
    layer_check(&on, &old);
    layer_free(&on, &new);
    layer_return(&on, &new, on.stream);
    layer_end(&on, &old);
    layer_end(&on, &new);
    scene_close(&on);
}

/* A forward pass that raised: its group goes while it leaves, and the next one takes its room. */
static void room_is_used_again_behind_copies_out(void **state)
{
    (void)state;
    scene on;
    layer old, new;
    scene_open(&on, "128KiB", NULL);
    layer_make(&on, &old, 2, 60000);
    layer_make(&on, &new, 2, 60000);
    layer_add(&on, &old);
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &old, on.stream));
    assert_ok(release(&on, &old, on.stream));
    layer_add(&on, &new);
    assert_ok(commit(&on, &new, REFIT_STREAM_NONE));
    faulty_device_go(on.device);
    await_stream(&on);
    layer_check(&on, &old);
    assert_ok(join(&on, &new, REFIT_STREAM_NONE));
    layer_free(&on, &new);
    layer_return(&on, &new, on.stream);
    layer_end(&on, &old);
    layer_end(&on, &new);
    scene_close(&on);
}

static void a_group_is_released_in_any_state(void **state)
{
    (void)state;
    static const refit_stream_ref none = {NULL};
    scene on;
    scene_open(&on, "1MiB", NULL);
    for (int at = 0; at < 10; at++) {
        layer of;
        refit_stream_ref stream = at % 2 == 0 ? on.stream : none;
        layer_make(&on, &of, 4, 30000);
        layer_add(&on, &of);
        if (at >= 2) assert_ok(commit(&on, &of, stream));        /* LEAVING */
        if (at >= 4) assert_ok(wait_for(&on, &of, PATIENCE_MS)); /* AWAY */
        if (at >= 6) assert_ok(layer_fetch(&on, &of, stream));   /* RETURNING */
        if (at >= 8) assert_ok(join(&on, &of, none));            /* RETURNED */
        assert_ok(release(&on, &of, stream));
        assert_int_equal(release(&on, &of, stream), REFIT_ERR_NOT_FOUND);
        await_stream(&on);
        layer_check(&on, &of);
        layer_end(&on, &of);
    }
    assert_int_equal(scene_stats(&on).activation_failures, 0);
    scene_close(&on);
}

/* Without a stream a release waits, and changes nothing where the time is not enough. */
static void a_release_that_cannot_wait_is_repeated(void **state)
{
    (void)state;
    scene on;
    layer of;
    const char *const settings[] = {"offload.timeout_ms", "50ms", NULL};
    scene_open(&on, "1MiB", settings);
    layer_make(&on, &of, 4, 30000);
    layer_add(&on, &of);
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &of, on.stream));
    assert_int_equal(join(&on, &of, REFIT_STREAM_NONE), REFIT_ERR_TIMEOUT);
    assert_int_equal(release(&on, &of, REFIT_STREAM_NONE), REFIT_ERR_TIMEOUT);
    refit_stats stats = scene_stats(&on);
    assert_int_equal(stats.activation_groups, 1);
    assert_true(stats.activation_used_bytes > 0);
    assert_true(stats.activation_exposed_seconds_total >= 0.1);
    assert_true(stats.activation_exposed_seconds_total < 10);
    faulty_device_go(on.device);
    assert_ok(release(&on, &of, REFIT_STREAM_NONE));
    layer_check(&on, &of);
    layer_end(&on, &of);
    scene_close(&on);
}

/* Of groups that are there (0), and of such as were released while they left (1). */
static void a_close_waits_for_copies_and_takes_all_groups(void **state)
{
    (void)state;
    const char *const settings[] = {"offload.timeout_ms", "50ms", NULL};
    for (uint64_t released = 0; released < 2; released++) {
        scene on;
        layer layers[2];
        refit_activation_group group;
        scene_open(&on, "1MiB", settings);
        for (int i = 0; i < 2; i++) {
            layer_make(&on, &layers[i], 4, 30000);
            layer_add(&on, &layers[i]);
        }
        faulty_device_stop(on.device);
        assert_ok(commit(&on, &layers[1], on.stream));
        if (released) assert_ok(release(&on, &layers[1], on.stream));
        assert_int_equal(refit_activations_close(on.activations, &on.error), REFIT_ERR_TIMEOUT);
        assert_int_equal(refit_activations_begin(on.activations, &group, &on.error),
                         REFIT_ERR_STATE);
        assert_int_equal(wait_for(&on, &layers[0], 0), REFIT_ERR_STATE);
        assert_int_equal(scene_stats(&on).activation_groups, 2 - released);
        faulty_device_go(on.device);
        assert_ok(refit_activations_close(on.activations, &on.error));
        for (int i = 0; i < 2; i++) {
            layer_check(&on, &layers[i]);
            layer_end(&on, &layers[i]);
        }
        assert_ok(refit_activations_open(on.device, &on.config, &on.activations, &on.error));
        scene_close(&on);
    }
}

/* ---- The arena in the background ------------------------------------------------------------- */

static void the_first_begin_waits_for_the_arena(void **state)
{
    (void)state;
    scene on;
    layer of;
    refit_activation_group group;
    const char *const settings[] = {"offload.background", "true", "offload.timeout_ms", "50ms",
                                    NULL};
    scene_open(&on, "1MiB", NULL);
    faulty_device_hold_pins(on.device, 1);
    scene_reopen(&on, settings);
    faulty_device_await_pin(on.device);
    assert_int_equal(scene_stats(&on).activation_host_bytes, 1 << 20);
    assert_int_equal(refit_activations_begin(on.activations, &group, &on.error), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_activations_close(on.activations, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_let_pins(on.device);
    const char *const patient[] = {"offload.timeout_ms", "20s", NULL};
    scene_reopen(&on, patient);
    layer_make(&on, &of, 4, 30000);
    layer_leave(&on, &of, on.stream);
    layer_return(&on, &of, on.stream);
    layer_end(&on, &of);
    scene_close(&on);
}

/* How it failed is reported by each begin, which tries again. */
static void an_arena_that_could_not_be_taken_is_taken_later(void **state)
{
    (void)state;
    scene on;
    layer of;
    refit_activation_group group;
    const char *const settings[] = {"offload.background", "true", "offload.pin", "require", NULL};
    scene_open(&on, "1MiB", NULL);
    faulty_device_fail_times(on.device, FAULTY_HOST_PIN, 1, FAULTY_ALWAYS, REFIT_ERR_PIN);
    scene_reopen(&on, settings);
    for (int time = 0; time < 2; time++) {
        assert_int_equal(refit_activations_begin(on.activations, &group, &on.error), REFIT_ERR_PIN);
        assert_int_equal(scene_stats(&on).activation_host_bytes, 0);
    }
    faulty_device_reset(on.device);
    layer_make(&on, &of, 4, 30000);
    layer_leave(&on, &of, on.stream);
    assert_int_equal(scene_stats(&on).activation_host_bytes, 1 << 20);
    layer_return(&on, &of, on.stream);
    layer_end(&on, &of);
    scene_close(&on);
}

/* ---- Any sequence ---------------------------------------------------------------------------- */

#define RANDOM_LAYERS 10

typedef enum random_place { NOWHERE, ADDED, COMMITTED, FETCHED, BACK } random_place;

static void random_step(scene *on, layer *of, random_place *place)
{
    refit_stream_ref stream = seeded_below(&on->seed, 3) == 0 ? REFIT_STREAM_NONE : on->stream;
    switch (*place) {
    case NOWHERE:
        layer_make(on, of, (uint32_t)seeded_below(&on->seed, TENSORS_MOST), 50000);
        layer_add(on, of);
        *place = ADDED;
        return;
    case ADDED:
        assert_ok(commit(on, of, stream));
        *place = COMMITTED;
        return;
    case COMMITTED:
        if (seeded_below(&on->seed, 2) == 0) {
            assert_ok(join(on, of, REFIT_STREAM_NONE));
            layer_free(on, of);
            layer_take(on, of);
        }
        assert_ok(layer_fetch(on, of, stream));
        *place = FETCHED;
        return;
    case FETCHED:
        assert_ok(join(on, of, stream));
        if (stream.native != NULL) await_stream(on);
        layer_check(on, of);
        *place = seeded_below(&on->seed, 4) == 0 ? COMMITTED : BACK;
        return;
    case BACK:
        assert_ok(release(on, of, stream));
        await_stream(on);
        layer_check(on, of);
        layer_end(on, of);
        *place = NOWHERE;
        return;
    }
}

static void any_sequence_keeps_every_byte(void **state)
{
    (void)state;
    for (uint64_t run = 0; run < 6; run++) {
        scene on;
        layer layers[RANDOM_LAYERS];
        random_place places[RANDOM_LAYERS] = {NOWHERE};
        scene_open(&on, run % 2 == 0 ? "600KiB" : "8MiB", NULL);
        on.seed += run;
        for (int step = 0; step < 600; step++) {
            uint64_t at = seeded_below(&on.seed, RANDOM_LAYERS);
            random_step(&on, &layers[at], &places[at]);
        }
        for (int at = 0; at < RANDOM_LAYERS; at++) {
            while (places[at] != NOWHERE) {
                random_step(&on, &layers[at], &places[at]);
            }
        }
        refit_stats stats = scene_stats(&on);
        assert_true(stats.activation_out_of_order > 0);
        if (run % 2 == 0) assert_true(stats.activation_reused > 0);
        assert_int_equal(stats.activation_failures, 0);
        scene_close(&on);
    }
}

/* ---- Threads --------------------------------------------------------------------------------- */

#define THREADS 4

typedef struct worker {
    scene on; /* its own seed, stream and error; the rest is shared */
    rft_thread thread;
} worker;

static void *work(void *user)
{
    worker *self = user;
    scene *on = &self->on;
    for (int round = 0; round < 40; round++) {
        layer layers[3];
        for (int i = 0; i < 3; i++) {
            layer_make(on, &layers[i], 4, 20000);
            layer_leave(on, &layers[i], on->stream);
        }
        for (int i = 3; i-- > 0;) {
            layer_return(on, &layers[i], i == 1 ? REFIT_STREAM_NONE : on->stream);
            layer_end(on, &layers[i]);
        }
    }
    return NULL;
}

static void threads_have_groups_of_their_own(void **state)
{
    (void)state;
    scene on;
    worker workers[THREADS];
    scene_open(&on, "1MiB", NULL);
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i].on = on;
        workers[i].on.seed += 1000003 * i;
        assert_ok(refit_stream_open(on.device, &workers[i].on.stream, &on.error));
        assert_ok(rft_thread_start(&workers[i].thread, "worker", work, &workers[i], &on.error));
    }
    for (int i = 0; i < 200; i++) {
        refit_stats stats = scene_stats(&on); /* any time */
        assert_true(stats.activation_used_bytes <= 1 << 20);
    }
    for (int i = 0; i < THREADS; i++) {
        rft_thread_join(workers[i].thread);
        assert_ok(refit_stream_close(on.device, workers[i].on.stream, &on.error));
    }
    scene_close(&on);
}

static void *wait_long(void *user)
{
    worker *self = user;
    layer of = {.group = 1};
    assert_ok(wait_for(&self->on, &of, PATIENCE_MS));
    return NULL;
}

/* Figures are there at once while another thread waits in a call. */
static void figures_do_not_wait(void **state)
{
    (void)state;
    scene on;
    layer of;
    worker other;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 1, 1000);
    layer_add(&on, &of);
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &of, on.stream));
    other.on = on;
    assert_ok(rft_thread_start(&other.thread, "waiter", wait_long, &other, &on.error));
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(scene_stats(&on).activation_groups, 1);
    }
    faulty_device_go(on.device);
    rft_thread_join(other.thread);
    assert_ok(release(&on, &of, on.stream));
    await_stream(&on);
    layer_end(&on, &of);
    scene_close(&on);
}

/* ---- Growth ---------------------------------------------------------------------------------- */

typedef struct many {
    void *memory;
    refit_activation_group *groups;
    uint32_t count;
    uint32_t tensors;
} many;

/* A forward pass and a backward pass, in which every group is away at once. */
static void iterate(scene *on, const many *of)
{
    void *memories[16];
    for (uint32_t i = 0; i < of->tensors; i++) {
        memories[i] = (char *)of->memory + (uint64_t)512 * i;
    }
    for (uint32_t g = 0; g < of->count; g++) {
        assert_ok(refit_activations_begin(on->activations, &of->groups[g], &on->error));
        for (uint32_t i = 0; i < of->tensors; i++) {
            uint32_t place;
            assert_ok(refit_activations_add(on->activations, of->groups[g], memories[i], 500,
                                            &place, &on->error));
            assert_int_equal(place, i);
        }
        assert_ok(refit_activations_commit(on->activations, of->groups[g], on->stream, &on->error));
        assert_ok(refit_activations_join(on->activations, of->groups[g], on->stream, &on->error));
    }
    for (uint32_t g = of->count; g-- > 0;) {
        assert_ok(refit_activations_fetch(on->activations, of->groups[g], memories, of->tensors,
                                          on->stream, &on->error));
        assert_ok(refit_activations_join(on->activations, of->groups[g], on->stream, &on->error));
        assert_ok(
            refit_activations_release(on->activations, of->groups[g], on->stream, &on->error));
    }
    await_stream(on);
}

static void open_many(scene *on, many *of, uint32_t count, uint32_t tensors)
{
    *of = (many){.count = count, .tensors = tensors};
    of->groups = calloc(count, sizeof *of->groups);
    assert_non_null(of->groups);
    assert_ok(refit_memory_alloc(on->plain, (uint64_t)512 * tensors, &of->memory, &on->error));
}

static void close_many(scene *on, many *of)
{
    assert_ok(refit_memory_free(on->plain, of->memory, &on->error));
    free(of->groups);
}

static void ten_thousand_groups_are_away_at_once(void **state)
{
    (void)state;
    scene on;
    many of;
    scene_open(&on, "49MiB", NULL);
    open_many(&on, &of, 10000, 10);
    iterate(&on, &of);
    refit_stats stats = scene_stats(&on);
    assert_int_equal(stats.activation_used_bytes_peak, UINT64_C(10000) * 10 * 512);
    assert_int_equal(stats.activation_out_bytes_total, UINT64_C(10000) * 10 * 500);
    assert_int_equal(stats.activation_out_of_order, 0);
    close_many(&on, &of);
    scene_close(&on);
}

/* The device inside queues what it is given, so that its own queue may grow now and then: it takes
 * its memory before. */
static void iterations_behind_the_first_allocate_nothing(void **state)
{
    (void)state;
    scene on;
    many of;
    failing_alloc_begin(0);
    scene_open(&on, "1MiB", NULL);
    open_many(&on, &of, 24, 10);
    iterate(&on, &of);
    for (int iteration = 0; iteration < 500; iteration++) {
        failing_alloc_here(1);
        iterate(&on, &of);
        assert_false(failing_alloc_stop_here());
    }
    close_many(&on, &of);
    scene_close(&on);
    assert_false(failing_alloc_end());
}

static void figures_of_devices_add_up(void **state)
{
    (void)state;
    refit_stats one, other;
    refit_stats_init(&one, sizeof one);
    refit_stats_init(&other, sizeof other);
    one.activation_out_bytes_total = 5;
    other.activation_out_bytes_total = 7;
    one.activation_exposed_seconds_total = 1;
    other.activation_exposed_seconds_total = 2;
    refit_stats_merge(&one, &other);
    assert_int_equal(one.activation_out_bytes_total, 12);
    assert_true(one.activation_exposed_seconds_total > 2.9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_returns),
        cmocka_unit_test(other_orders_are_counted_and_use_what_is_free),
        cmocka_unit_test(what_has_no_room_stays),
        cmocka_unit_test(an_arena_of_nearly_nothing_takes_nearly_nothing),
        cmocka_unit_test(a_group_without_tensors_goes_through_all_states),
        cmocka_unit_test(a_group_is_fetched_as_often_as_wanted),
        cmocka_unit_test(some_tensors_return_before_others),
        cmocka_unit_test(several_groups_may_be_open),
        cmocka_unit_test(numbers_of_no_group_are_not_found),
        cmocka_unit_test(calls_in_a_wrong_state_are_refused),
        cmocka_unit_test(arguments_that_cannot_be_are_refused),
        cmocka_unit_test(settings_that_cannot_be_are_refused),
        cmocka_unit_test(states_and_activations_share_a_budget),
        cmocka_unit_test(copies_out_follow_the_stream),
        cmocka_unit_test(copies_in_follow_the_stream),
        cmocka_unit_test(work_behind_a_join_comes_behind_the_copies),
        cmocka_unit_test(a_group_is_fetched_while_it_leaves),
        cmocka_unit_test(a_second_fetch_waits_for_the_first),
        cmocka_unit_test(room_is_used_again_behind_copies_in),
        cmocka_unit_test(room_is_used_again_behind_copies_out),
        cmocka_unit_test(a_group_is_released_in_any_state),
        cmocka_unit_test(a_release_that_cannot_wait_is_repeated),
        cmocka_unit_test(a_close_waits_for_copies_and_takes_all_groups),
        cmocka_unit_test(the_first_begin_waits_for_the_arena),
        cmocka_unit_test(an_arena_that_could_not_be_taken_is_taken_later),
        cmocka_unit_test(any_sequence_keeps_every_byte),
        cmocka_unit_test(threads_have_groups_of_their_own),
        cmocka_unit_test(figures_do_not_wait),
        cmocka_unit_test(ten_thousand_groups_are_away_at_once),
        cmocka_unit_test(iterations_behind_the_first_allocate_nothing),
        cmocka_unit_test(figures_of_devices_add_up),
    };
    return cmocka_run_group_tests_name("activations", tests, NULL, NULL);
}
