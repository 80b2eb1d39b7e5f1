/* Activations: groups of tensors leave for an arena and return, in any order and from any thread.
 */
#include "tests/offload/layers.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/thread.h"
#include "tests/support/failing_alloc.h"

#define LAYERS 6

static const char *const budget[] = {"offload.budget_bytes=3MiB", NULL};

static uint64_t bytes_of(const layer *of)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < of->count; i++)
        bytes += of->tensors[i].bytes;
    return bytes;
}

/* ---- What holds ------------------------------------------------------------------------------ */

/* Tensors of a few bytes, and such as several slabs hold; the caller's stream, or the call. Groups
 * need not be committed in the order in which they were begun, nor one at a time. */
SCENE(every_byte_returns, .host_bytes = "16MiB")
{
    static const uint64_t most[] = {1, 700, 5000, 200000};
    for (int run = 0; run < 8; run++) {
        layer layers[LAYERS];
        refit_stream_ref stream = run % 2 == 0 ? on->stream : REFIT_STREAM_NONE;
        uint64_t bytes = 0;
        refit_stats before = figures(on);
        for (int i = 0; i < LAYERS; i++) {
            layer_make(on, &layers[i], (uint32_t)(1 + i * 2), most[run / 2]);
            layer_add(on, &layers[i]);
            bytes += bytes_of(&layers[i]);
        }
        for (int i = 0; i < LAYERS; i++)
            assert_ok(commit(on, &layers[(i + 2) % LAYERS], stream));
        for (int i = 0; i < LAYERS; i++) {
            assert_ok(join(on, &layers[i], REFIT_STREAM_NONE));
            layer_free(on, &layers[i]);
        }
        assert_int_equal(figures(on).activation_groups, LAYERS);
        for (int i = LAYERS; i-- > 0;) {
            layer_return(on, &layers[i], stream);
            layer_end(on, &layers[i]);
        }
        refit_stats stats = figures(on);
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
}

/* A group that is released below others leaves a piece, which is used where the top has no room. */
SCENE(other_orders_are_counted_and_use_what_is_free, .host_bytes = "64KiB")
{
    layer layers[4], more;
    for (int i = 0; i < 4; i++) { /* a quarter of the arena each */
        layer_make(on, &layers[i], 1, 16384);
        while (layers[i].tensors[0].bytes <= 16384 - 512) {
            layer_end(on, &layers[i]);
            layer_make(on, &layers[i], 1, 16384);
        }
        layer_leave(on, &layers[i], on->stream);
    }
    assert_int_equal(figures(on).activation_used_bytes, 65536);
    layer_return_and_end(on, &layers[1]);
    assert_int_equal(figures(on).activation_out_of_order, 1);
    layer_make(on, &more, 2, 7000);
    layer_leave(on, &more, on->stream);
    assert_int_equal(more.tensors[0].place, 0);
    assert_int_equal(more.tensors[1].place, 1);
    assert_int_equal(figures(on).activation_reused, 2);
    layer_return_and_end(on, &layers[0]);
    layer_return_and_end(on, &layers[2]);
    assert_int_equal(figures(on).activation_out_of_order, 3);
    layer_return_and_end(on, &layers[3]); /* on top */
    layer_return_and_end(on, &more);
    assert_int_equal(figures(on).activation_out_of_order, 3);
}

/* No error: all others go on, and a smaller one after it still fits. */
SCENE(what_has_no_room_stays, .host_bytes = "200000")
{
    layer first, second;
    layer_make(on, &first, 12, 40000);
    layer_leave(on, &first, on->stream);
    uint64_t refused = 0, left = 0;
    for (uint32_t i = 0; i < first.count; i++) {
        bool stays = first.tensors[i].place == REFIT_ACTIVATION_STAYS;
        *(stays ? &refused : &left) += first.tensors[i].bytes;
    }
    assert_true(refused > 0 && left > 0);
    refit_stats stats = figures(on);
    assert_int_equal(stats.activation_refused_bytes_total, refused);
    assert_int_equal(stats.activation_out_bytes_total, left);
    assert_true(stats.activation_used_bytes <= 200000);
    layer_make(on, &second, 3, 200000); /* finds the arena as good as full */
    layer_leave(on, &second, on->stream);
    layer_check(on, &second);
    layer_return_and_end(on, &second);
    layer_return_and_end(on, &first);
}

TEST(an_arena_of_nearly_nothing_takes_nearly_nothing)
{
    static const struct {
        const char *host_bytes;
        uint32_t left;
    } rows[] = {{"1", 0}, {"511", 0}, {"512", 1}, {"1024", 2}};
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        layer of;
        uint32_t left = 0;
        scene *on = open_scene(&(opening){.host_bytes = rows[at].host_bytes});
        layer_make(on, &of, 5, 500);
        layer_leave(on, &of, on->stream);
        for (uint32_t i = 0; i < of.count; i++)
            left += of.tensors[i].place != REFIT_ACTIVATION_STAYS;
        assert_int_equal(left, rows[at].left);
        layer_return_and_end(on, &of);
        close_scene(on);
    }
}

/* Addresses that are NULL, and fewer addresses than tensors. */
SCENE(some_tensors_return_before_others, .host_bytes = "2MiB")
{
    layer of;
    void *some[TENSORS_MOST];
    layer_make(on, &of, 9, 90000);
    layer_leave(on, &of, on->stream);
    layer_take(on, &of);
    assert_int_equal(layer_memories(&of, some), 9);
    for (int i = 0; i < 9; i++) {
        if (i % 3 != 0) some[i] = NULL;
    }
    assert_ok(refit_activations_fetch(on->activations, of.group, some, 7, on->stream, &on->error));
    assert_ok(wait_for(on, &of, TIMEOUT_MS));
    for (uint32_t i = 0; i < 9; i++) {
        const layer_tensor *tensor = &of.tensors[i];
        if (i % 3 != 0) memset(tensor->expected, 0xA5, tensor->bytes);
        assert_device_equal(on->plain, tensor->memory, tensor->expected, tensor->bytes);
    }
    uint64_t before = figures(on).activation_in_bytes_total;
    memset(some, 0, sizeof some);
    assert_ok(refit_activations_fetch(on->activations, of.group, some, 9, on->stream, &on->error));
    assert_int_equal(figures(on).activation_in_bytes_total, before);
    assert_ok(release(on, &of, on->stream));
    layer_end(on, &of);
}

/* ---- Wrong calls ----------------------------------------------------------------------------- */

static refit_status add(scene *on, const layer *of, void *memory, uint64_t bytes)
{
    uint32_t place;
    return refit_activations_add(on->activations, of->group, &memory, &bytes, 1, &place,
                                 &on->error);
}

SCENE(numbers_of_no_group_are_not_found, 0)
{
    layer of;
    layer_make(on, &of, 1, 100);
    layer_leave(on, &of, on->stream);
    refit_activation_group released = of.group;
    layer_return(on, &of, on->stream);
    const refit_activation_group numbers[] = {0, released, released + 1, UINT64_MAX};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        layer none = {.group = numbers[i]};
        assert_int_equal(add(on, &none, of.tensors[0].memory, 1), REFIT_ERR_NOT_FOUND);
        assert_int_equal(commit(on, &none, on->stream), REFIT_ERR_NOT_FOUND);
        assert_int_equal(join(on, &none, on->stream), REFIT_ERR_NOT_FOUND);
        assert_int_equal(wait_for(on, &none, 0), REFIT_ERR_NOT_FOUND);
        assert_int_equal(layer_fetch(on, &none, on->stream), REFIT_ERR_NOT_FOUND);
        assert_int_equal(release(on, &none, on->stream), REFIT_ERR_NOT_FOUND);
    }
    layer_leave(on, &of, on->stream);
    assert_int_equal(of.group, released + 1); /* never used again */
    layer_return_and_end(on, &of);
}

SCENE(calls_in_a_wrong_state_are_refused, 0)
{
    layer of;
    layer_make(on, &of, 3, 20000);
    layer_add(on, &of);
    assert_int_equal(join(on, &of, on->stream), REFIT_ERR_STATE); /* OPEN */
    assert_int_equal(layer_fetch(on, &of, on->stream), REFIT_ERR_STATE);
    assert_ok(wait_for(on, &of, 0));
    faulty_device_stop(on->device);
    assert_ok(commit(on, &of, on->stream)); /* LEAVING */
    assert_int_equal(commit(on, &of, on->stream), REFIT_ERR_STATE);
    assert_int_equal(add(on, &of, of.tensors[0].memory, 1), REFIT_ERR_STATE);
    faulty_device_go(on->device);
    assert_ok(wait_for(on, &of, TIMEOUT_MS)); /* AWAY */
    assert_int_equal(commit(on, &of, on->stream), REFIT_ERR_STATE);
    faulty_device_stop(on->device);
    layer_free(on, &of);
    layer_take(on, &of);
    assert_ok(layer_fetch(on, &of, on->stream)); /* RETURNING */
    assert_int_equal(commit(on, &of, on->stream), REFIT_ERR_STATE);
    assert_int_equal(layer_fetch(on, &of, on->stream), REFIT_ERR_STATE);
    faulty_device_go(on->device);
    layer_finish(on, &of);
}

SCENE(arguments_that_cannot_be_are_refused, 0)
{
    layer of;
    char here[16];
    void *memories[TENSORS_MOST + 1] = {NULL};
    refit_activations *other;
    refit_stats stats = {0};
    layer_make(on, &of, 2, 20000);
    void *memory = of.tensors[0].memory;
    assert_invalid(refit_activations_open(NULL, NULL, &other, &on->error));
    assert_invalid(refit_activations_open(on->device, NULL, NULL, &on->error));
    assert_ok(refit_activations_close(NULL, &on->error));
    assert_invalid(refit_activations_begin(on->activations, NULL, &on->error));
    assert_invalid(refit_activations_begin(NULL, &of.group, &on->error));
    assert_ok(refit_activations_begin(on->activations, &of.group, &on->error));
    assert_invalid(add(on, &of, memory, 0));
    assert_invalid(add(on, &of, NULL, 1));
    assert_invalid(add(on, &of, memory, UINT64_MAX));
    uint64_t one = 1;
    void *both[] = {memory, NULL};
    uint64_t sizes[] = {1, 1};
    uint32_t places[] = {7, 7};
    assert_invalid(
        refit_activations_add(on->activations, of.group, both, sizes, 1, NULL, &on->error));
    assert_invalid(
        refit_activations_add(on->activations, of.group, both, NULL, 1, places, &on->error));
    assert_invalid(
        refit_activations_add(on->activations, of.group, NULL, &one, 1, places, &on->error));
    assert_ok(refit_activations_add(on->activations, of.group, NULL, NULL, 0, NULL, &on->error));
    assert_invalid(
        refit_activations_add(on->activations, of.group, both, sizes, 2, places, &on->error));
    assert_int_equal(places[0], 0); /* it was added before the one that is none */
    assert_int_equal(places[1], 7);
    /* To the host device the memory of the process is its own. */
    if (test_on_cuda()) assert_invalid(add(on, &of, here, sizeof here));
    assert_ok(release(on, &of, on->stream));
    layer_leave(on, &of, on->stream);
    layer_take(on, &of);
    assert_ok(refit_activations_fetch(on->activations, of.group, NULL, 0, on->stream, &on->error));
    assert_invalid(
        refit_activations_fetch(on->activations, of.group, NULL, 1, on->stream, &on->error));
    if (test_on_cuda()) memories[1] = here;
    for (uint32_t count = test_on_cuda() ? 2 : 3; count <= 3; count++) {
        assert_invalid(refit_activations_fetch(on->activations, of.group, memories, count,
                                               on->stream, &on->error));
    }
    assert_invalid(refit_activations_stats(on->activations, NULL, &on->error));
    assert_invalid(refit_activations_stats(on->activations, &stats, &on->error));
    layer_return_and_end(on, &of);
}

SCENE(settings_that_cannot_be_are_refused, 0)
{
    refit_activations *other;
    assert_int_equal(refit_activations_open(on->device, NULL, &other, &on->error),
                     REFIT_ERR_CONFIG);
    assert_says(&on->error, "activations.host_bytes");
    on->config.use_pinned_optimizer_offload = 0;
    assert_int_equal(refit_activations_open(on->device, &on->config, &other, &on->error),
                     REFIT_ERR_UNSUPPORTED);
    on->config.use_pinned_optimizer_offload = 1;
    on->config.offload_budget_bytes = 1 << 20;
    assert_int_equal(refit_activations_open(on->device, &on->config, &other, &on->error),
                     REFIT_ERR_BUDGET); /* the first has it */
    assert_says(&on->error, "offload.budget_bytes");
}

/* An arena of states and one of activations, each of which would fit alone. */
SCENE(states_and_activations_share_a_budget, .host_bytes = "2MiB", .settings = budget)
{
    refit_offloader *states;
    refit_activations *other;
    refit_region_id id;
    refit_region_desc desc = {
        .size = sizeof desc, .name = "state", .bytes = 2 << 20, .placement = REFIT_PLACEMENT_HOST};
    assert_ok(refit_offloader_open(on->device, &on->config, &states, &on->error));
    assert_ok(refit_offloader_add(states, &desc, &id, &on->error));
    assert_int_equal(refit_offloader_seal(states, &on->error), REFIT_ERR_BUDGET);
    assert_ok(refit_activations_close(on->activations, &on->error));
    on->config.activations_host_bytes = 1 << 20;
    assert_ok(open_anew(on, NULL));
    assert_ok(refit_offloader_seal(states, &on->error));
    assert_int_equal(refit_activations_open(on->device, &on->config, &other, &on->error),
                     REFIT_ERR_BUDGET);
    assert_ok(refit_offloader_close(states, &on->error));
    assert_ok(refit_activations_open(on->device, &on->config, &other, &on->error));
    assert_ok(refit_activations_close(other, &on->error));
}

/* ---- Order on the streams -------------------------------------------------------------------- */

/* Puts a copy on the scene's stream. */
static void queue_copy(scene *on, void *to, const void *from, uint64_t bytes)
{
    assert_ok(refit_stream_copy(on->device, on->stream, to, from, bytes, &on->error));
}

/* The copies out read what the stream has made by then. */
SCENE(copies_out_follow_the_stream, 0)
{
    layer of;
    void *sources[3];
    layer_make(on, &of, 3, 60000);
    for (int i = 0; i < 3; i++) {
        sources[i] = test_host_alloc(on->plain, of.tensors[i].bytes);
        memcpy(sources[i], of.tensors[i].expected, of.tensors[i].bytes);
        test_fill(on->plain, of.tensors[i].memory, 0, of.tensors[i].bytes);
    }
    faulty_device_stop(on->device);
    for (int i = 0; i < 3; i++)
        queue_copy(on, of.tensors[i].memory, sources[i], of.tensors[i].bytes);
    layer_add(on, &of);
    assert_ok(commit(on, &of, on->stream));
    assert_int_equal(wait_for(on, &of, 10), REFIT_ERR_TIMEOUT);
    faulty_device_go(on->device);
    assert_ok(join(on, &of, REFIT_STREAM_NONE));
    layer_free(on, &of);
    for (int i = 0; i < 3; i++)
        test_host_free(on->plain, sources[i], of.tensors[i].bytes);
    layer_return_and_end(on, &of);
}

/* What the stream still reads of the memory is not written by the copies in before. */
SCENE(copies_in_follow_the_stream, 0)
{
    layer of;
    layer_make(on, &of, 1, 60000);
    const uint64_t bytes = of.tensors[0].bytes;
    unsigned char *kept = test_host_alloc(on->plain, bytes);
    layer_leave(on, &of, on->stream);
    layer_take(on, &of);
    faulty_device_stop(on->device);
    queue_copy(on, kept, of.tensors[0].memory, bytes);
    assert_ok(layer_fetch(on, &of, on->stream));
    faulty_device_go(on->device);
    layer_finish(on, &of);
    for (uint64_t at = 0; at < bytes; at++)
        assert_int_equal(kept[at], 0xA5);
    test_host_free(on->plain, kept, bytes);
}

/* Work on the stream after a join comes after the copies, in both directions. */
SCENE(work_after_a_join_comes_after_the_copies, 0)
{
    layer of;
    layer_make(on, &of, 1, 60000);
    const uint64_t bytes = of.tensors[0].bytes;
    unsigned char *other = test_host_alloc(on->plain, bytes);
    memset(other, 0x3C, bytes);
    layer_add(on, &of);
    faulty_device_stop(on->device);
    assert_ok(commit(on, &of, on->stream));
    assert_ok(join(on, &of, on->stream));               /* does not block */
    queue_copy(on, of.tensors[0].memory, other, bytes); /* the memory is used again */
    faulty_device_go(on->device);
    await_stream(on);
    faulty_device_stop(on->device);
    assert_ok(layer_fetch(on, &of, on->stream));
    assert_ok(join(on, &of, on->stream));
    queue_copy(on, other, of.tensors[0].memory, bytes); /* what has returned is read */
    faulty_device_go(on->device);
    await_stream(on);
    assert_memory_equal(other, of.tensors[0].expected, bytes);
    test_host_free(on->plain, other, bytes);
    layer_finish(on, &of);
}

/* A backward pass that comes at once, before the copies out are over. */
SCENE(a_group_is_fetched_while_it_leaves, 0)
{
    layer of;
    void *former[TENSORS_MOST];
    layer_make(on, &of, 5, 60000);
    layer_add(on, &of);
    faulty_device_stop(on->device);
    assert_ok(commit(on, &of, on->stream));
    assert_ok(join(on, &of, on->stream));
    layer_take_other(on, &of, former);
    assert_ok(layer_fetch(on, &of, on->stream));
    assert_int_equal(layer_fetch(on, &of, on->stream), REFIT_ERR_STATE); /* this one is not */
    assert_int_equal(wait_for(on, &of, 10), REFIT_ERR_TIMEOUT);
    faulty_device_go(on->device);
    assert_ok(wait_for(on, &of, TIMEOUT_MS));
    layer_free_former(on, &of, former);
    layer_finish(on, &of);
}

/* A fetch after a fetch that was joined waits for it, at most offload.timeout_ms. */
SCENE(a_second_fetch_waits_for_the_first, 0)
{
    layer of;
    layer_make(on, &of, 3, 30000);
    layer_leave(on, &of, on->stream);
    layer_take(on, &of);
    faulty_device_hang(on->device);
    assert_ok(layer_fetch(on, &of, on->stream));
    assert_int_equal(layer_fetch(on, &of, on->stream), REFIT_ERR_STATE);
    assert_ok(join(on, &of, on->stream));
    assert_hung(on, layer_fetch(on, &of, on->stream));
    faulty_device_go(on->device);
    assert_ok(layer_fetch(on, &of, on->stream));
    layer_finish(on, &of);
}

/* ---- Release, in each state ------------------------------------------------------------------ */

/* Room that is given back while copies in still read it, or copies out of a forward pass that
 * raised still write it, is written by a new group after them. */
SCENE(room_is_used_again_after_copies, .host_bytes = "128KiB")
{
    for (int back = 0; back < 2; back++) {
        layer old, new;
        layer_make(on, &old, 2, 60000);
        layer_make(on, &new, 2, 60000);
        if (back) layer_leave(on, &old, on->stream);
        if (back) layer_take(on, &old);
        if (!back) layer_add(on, &old);
        faulty_device_stop(on->device);
        assert_ok(back ? layer_fetch(on, &old, on->stream) : commit(on, &old, on->stream));
        assert_ok(release(on, &old, on->stream));
        layer_add(on, &new);
        assert_int_not_equal(new.tensors[0].place, REFIT_ACTIVATION_STAYS);
        assert_ok(commit(on, &new, REFIT_STREAM_NONE));
        faulty_device_go(on->device);
        await_stream(on); /* the release made it wait */
        layer_check(on, &old);
        assert_ok(join(on, &new, REFIT_STREAM_NONE));
        layer_free(on, &new);
        layer_return_and_end(on, &new);
        layer_end(on, &old);
    }
}

/* Without a stream a release waits, and changes nothing where the time is not enough. */
SCENE(a_release_that_cannot_wait_is_repeated, 0)
{
    layer of;
    layer_make(on, &of, 4, 30000);
    layer_add(on, &of);
    faulty_device_hang(on->device);
    int64_t began = rft_now();
    assert_ok(commit(on, &of, on->stream));
    assert_hung(on, join(on, &of, REFIT_STREAM_NONE));
    assert_hung(on, release(on, &of, REFIT_STREAM_NONE));
    refit_stats stats = figures(on);
    assert_int_equal(stats.activation_groups, 1);
    assert_true(stats.activation_used_bytes > 0);
    assert_true(stats.activation_blocked_seconds_total >= 0.039);
    assert_true(stats.activation_blocked_seconds_total < rft_seconds(rft_now() - began));
    faulty_device_go(on->device);
    assert_ok(release(on, &of, REFIT_STREAM_NONE));
    layer_check(on, &of);
    layer_end(on, &of);
}

/* Of groups that are there (0), and of such as were released while they left (1). */
SCENE(a_close_waits_for_copies_and_takes_all_groups, 0)
{
    for (uint64_t released = 0; released < 2; released++) {
        layer layers[2];
        refit_activation_group group;
        for (int i = 0; i < 2; i++) {
            layer_make(on, &layers[i], 4, 30000);
            layer_add(on, &layers[i]);
        }
        faulty_device_hang(on->device);
        assert_ok(commit(on, &layers[1], on->stream));
        if (released) assert_ok(release(on, &layers[1], on->stream));
        assert_hung(on, refit_activations_close(on->activations, &on->error));
        assert_int_equal(refit_activations_begin(on->activations, &group, &on->error),
                         REFIT_ERR_STATE);
        assert_int_equal(wait_for(on, &layers[0], 0), REFIT_ERR_STATE);
        assert_int_equal(figures(on).activation_groups, 2 - released);
        faulty_device_go(on->device);
        assert_ok(refit_activations_close(on->activations, &on->error));
        for (int i = 0; i < 2; i++) {
            layer_check(on, &layers[i]);
            layer_end(on, &layers[i]);
        }
        assert_ok(open_anew(on, NULL));
    }
}

/* ---- The arena in the background ------------------------------------------------------------- */

static void leave_and_return(scene *on)
{
    layer of;
    layer_make(on, &of, 4, 30000);
    layer_leave(on, &of, on->stream);
    assert_int_equal(figures(on).activation_host_bytes, 1 << 20);
    layer_return_and_end(on, &of);
}

SCENE(the_first_begin_waits_for_the_arena, 0)
{
    refit_activation_group group;
    static const char *const brief[] = {"offload.background=true", "offload.timeout_ms=20ms", NULL};
    static const char *const usual[] = {"offload.timeout_ms=20s", NULL};
    assert_ok(refit_activations_close(on->activations, &on->error));
    faulty_device_hold_pins(on->device, 1);
    assert_ok(open_anew(on, brief));
    faulty_device_await_pin(on->device);
    assert_int_equal(figures(on).activation_host_bytes, 1 << 20);
    assert_int_equal(refit_activations_begin(on->activations, &group, &on->error),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_activations_close(on->activations, &on->error), REFIT_ERR_TIMEOUT);
    faulty_device_let_pins(on->device);
    refit_status status = REFIT_ERR_TIMEOUT;
    for (int64_t end = rft_deadline(TIMEOUT_MS); status == REFIT_ERR_TIMEOUT && rft_now() < end;)
        status = refit_activations_close(on->activations, &on->error);
    assert_ok(status);
    assert_ok(open_anew(on, usual));
    leave_and_return(on);
}

/* How it failed is reported by each begin, which tries again. */
SCENE(an_arena_that_could_not_be_taken_is_taken_later, 0)
{
    refit_activation_group group;
    static const char *const settings[] = {"offload.background=true", "offload.pin=require", NULL};
    assert_ok(refit_activations_close(on->activations, &on->error));
    faulty_device_fail_times(on->device, FAULTY_HOST_PIN, 1, FAULTY_ALWAYS, REFIT_ERR_PIN);
    assert_ok(open_anew(on, settings));
    for (int time = 0; time < 2; time++) {
        assert_int_equal(refit_activations_begin(on->activations, &group, &on->error),
                         REFIT_ERR_PIN);
        assert_int_equal(figures(on).activation_host_bytes, 0);
    }
    faulty_device_reset(on->device);
    leave_and_return(on);
}

/* ---- Any sequence ---------------------------------------------------------------------------- */

#define RANDOM_LAYERS 10
#define RANDOM_STEPS  250

typedef enum random_place { NOWHERE, ADDED, COMMITTED, FETCHED, BACK } random_place;

static void random_step(scene *on, layer *of, random_place *place)
{
    refit_stream_ref stream = seeded_below(&on->seed, 3) == 0 ? REFIT_STREAM_NONE : on->stream;
    if (*place != NOWHERE && seeded_below(&on->seed, 8) == 0) *place = BACK; /* in any state */
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

TEST(any_sequence_keeps_every_byte)
{
    for (uint64_t run = 0; run < 6; run++) {
        layer layers[RANDOM_LAYERS];
        random_place places[RANDOM_LAYERS] = {NOWHERE};
        scene *on = open_scene(&(opening){.host_bytes = run % 2 == 0 ? "600KiB" : "8MiB"});
        on->seed += run;
        for (int step = 0; step < RANDOM_STEPS; step++) {
            uint64_t at = seeded_below(&on->seed, RANDOM_LAYERS);
            random_step(on, &layers[at], &places[at]);
        }
        for (int at = 0; at < RANDOM_LAYERS; at++) {
            while (places[at] != NOWHERE)
                random_step(on, &layers[at], &places[at]);
        }
        refit_stats stats = figures(on);
        assert_true(stats.activation_out_of_order > 0);
        if (run % 2 == 0) assert_true(stats.activation_reused > 0);
        assert_int_equal(stats.activation_failures, 0);
        close_scene(on);
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
    for (int round = 0; round < 20; round++) {
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

SCENE(threads_have_groups_of_their_own, 0)
{
    worker workers[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i].on = *on;
        workers[i].on.seed += 1000003 * i;
        assert_ok(refit_stream_open(on->device, &workers[i].on.stream, &on->error));
        assert_ok(rft_thread_start(&workers[i].thread, "worker", work, &workers[i], &on->error));
    }
    for (int i = 0; i < 200; i++) {
        assert_true(figures(on).activation_used_bytes <= 1 << 20); /* any time */
    }
    for (int i = 0; i < THREADS; i++) {
        rft_thread_join(workers[i].thread);
        assert_ok(refit_stream_close(on->device, workers[i].on.stream, &on->error));
    }
}

static void *wait_long(void *user)
{
    worker *self = user;
    layer of = {.group = 1};
    assert_ok(wait_for(&self->on, &of, TIMEOUT_MS));
    return NULL;
}

/* Figures are there at once while another thread waits in a call. */
SCENE(figures_do_not_wait, 0)
{
    layer of;
    worker other;
    layer_make(on, &of, 1, 1000);
    layer_add(on, &of);
    faulty_device_stop(on->device);
    assert_ok(commit(on, &of, on->stream));
    other.on = *on;
    assert_ok(rft_thread_start(&other.thread, "waiter", wait_long, &other, &on->error));
    for (int i = 0; i < 1000; i++)
        assert_int_equal(figures(on).activation_groups, 1);
    faulty_device_go(on->device);
    rft_thread_join(other.thread);
    layer_finish(on, &of);
}

/* ---- Growth ---------------------------------------------------------------------------------- */

#define TENSORS     10u
#define GROUPS_MOST 2000u

/* A forward pass and a backward pass, in which every group is away at once. */
static void iterate(scene *on, void *memory, uint32_t count)
{
    static layer groups[GROUPS_MOST];
    void *memories[TENSORS];
    for (uint32_t g = 0; g < count; g++) {
        groups[g] = (layer){.group = 0};
        assert_ok(refit_activations_begin(on->activations, &groups[g].group, &on->error));
        for (uint32_t i = 0; i < TENSORS; i++) {
            memories[i] = (char *)memory + (uint64_t)512 * i;
            assert_ok(add(on, &groups[g], memories[i], 500));
        }
        assert_ok(commit(on, &groups[g], on->stream));
        assert_ok(join(on, &groups[g], on->stream));
    }
    for (uint32_t g = count; g-- > 0;) {
        assert_ok(refit_activations_fetch(on->activations, groups[g].group, memories, TENSORS,
                                          on->stream, &on->error));
        assert_ok(join(on, &groups[g], on->stream));
        assert_ok(release(on, &groups[g], on->stream));
    }
    await_stream(on);
}

SCENE(thousands_of_groups_are_away_at_once, .host_bytes = "10MiB")
{
    void *memory;
    assert_ok(refit_memory_alloc(on->plain, 512 * TENSORS, &memory, &on->error));
    iterate(on, memory, GROUPS_MOST);
    refit_stats stats = figures(on);
    assert_int_equal(stats.activation_used_bytes_peak, GROUPS_MOST * TENSORS * 512);
    assert_int_equal(stats.activation_out_bytes_total, GROUPS_MOST * TENSORS * 500);
    assert_int_equal(stats.activation_refused_bytes_total, 0);
    assert_int_equal(stats.activation_out_of_order, 0);
    assert_ok(refit_memory_free(on->plain, memory, &on->error));
}

/* The device inside queues what it is given, so that its own queue may grow now and then: it takes
 * its memory before. */
SCENE(iterations_after_the_first_allocate_nothing, 0)
{
    void *memory;
    assert_ok(refit_memory_alloc(on->plain, 512 * TENSORS, &memory, &on->error));
    iterate(on, memory, 24);
    for (int iteration = 0; iteration < 100; iteration++) {
        failing_alloc_here(1);
        iterate(on, memory, 24);
        assert_false(failing_alloc_stop_here());
    }
    assert_ok(refit_memory_free(on->plain, memory, &on->error));
}

TEST(figures_of_devices_add_up)
{
    refit_stats one, other;
    refit_stats_init(&one, sizeof one);
    refit_stats_init(&other, sizeof other);
    one.activation_out_bytes_total = 5;
    other.activation_out_bytes_total = 7;
    one.activation_blocked_seconds_total = 1;
    other.activation_blocked_seconds_total = 2;
    refit_stats_merge(&one, &other);
    assert_int_equal(one.activation_out_bytes_total, 12);
    assert_true(one.activation_blocked_seconds_total > 2.9);
}

int main(void)
{
    return test_run("activations");
}
