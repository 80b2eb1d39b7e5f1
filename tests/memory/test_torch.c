/* PyTorch's two entry points: which arena they use, what they return on a failure, and that no
 * memory leaks. On the host device, and on GPUs of the fake driver. */
#include <refit.h>
#include <refit/advanced/torch.h>

#include "base/thread.h"
#include "device/device.h"
#include "fake_cuda.h"
#include "tests/support/heard.h"
#include "tests/support/test.h"

#define CHUNK (4 * MIB)

typedef struct fixture {
    refit_device *device;
    refit_arena *arena;
    int ordinal;
    refit_error error;
} fixture;

static fixture all;

static void open_on(fixture *on, const char *spec, int ordinal)
{
    refit_config config;
    memset(on, 0, sizeof *on);
    on->ordinal = ordinal;
    refit_config_init(&config, sizeof config);
    assert_ok(refit_config_set(&config, "offload.chunk_bytes", "4MiB", &on->error));
    assert_ok(refit_device_open(spec, &config, &on->device, &on->error));
    assert_ok(refit_arena_open(on->device, 64 * MIB, &on->arena, &on->error));
    heard_begin(REFIT_LOG_DEBUG);
}

static void close_all(fixture *on)
{
    heard_end();
    assert_ok(refit_arena_close(on->arena, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
}

static int set_up_host(void **state)
{
    open_on(&all, "host:capacity=16MiB", 0);
    assert_ok(refit_torch_attach(all.arena, &all.error));
    return 0;
}

static int tear_down_host(void **state)
{
    assert_ok(refit_torch_detach(all.arena, &all.error));
    close_all(&all);
    return 0;
}

#define HOST(name) TEST_WITH(name, set_up_host, tear_down_host)

static uint64_t used_bytes(void)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(all.device, &info, NULL));
    return info.used_bytes;
}

HOST(segments_are_pieces_of_the_attached_arena)
{
    void *memory;
    uint64_t bytes;
    char *first = refit_torch_alloc((ptrdiff_t)(2 * MIB), 0, NULL);
    char *second = refit_torch_alloc(512, 0, NULL);
    assert_non_null(first);
    assert_non_null(second);
    memset(first, 1, 2 * MIB);
    assert_ok(refit_arena_piece(all.arena, 0, &memory, &bytes, &all.error));
    assert_ptr_equal(memory, first);
    assert_int_equal(bytes, 2 * MIB);
    assert_ok(refit_arena_piece(all.arena, 1, &memory, &bytes, &all.error));
    assert_ptr_equal(memory, second);
    assert_int_equal(bytes, 512);
    refit_torch_free(first, 17, 0, NULL); /* the size may be another one: it is not looked at */
    assert_ptr_equal(refit_torch_alloc((ptrdiff_t)MIB, 0, NULL), first);
    refit_torch_free(first, (ptrdiff_t)MIB, 0, NULL);
    refit_torch_free(second, 512, 0, NULL);
    assert_int_equal(used_bytes(), 0);
    assert_int_equal(heard_count(""), 0);
}

HOST(nothing_is_given_for_nothing)
{
    assert_null(refit_torch_alloc(0, 0, NULL));
    assert_null(refit_torch_alloc(-1, 0, NULL));
    refit_torch_free(NULL, 0, 0, NULL);
    refit_torch_free(NULL, 0, 77, NULL);
    assert_int_equal(heard_count(""), 0);
    assert_int_equal(used_bytes(), 0);
}

HOST(a_full_device_is_null_and_a_sentence)
{
    void *memory = refit_torch_alloc((ptrdiff_t)(10 * MIB), 0, NULL);
    assert_non_null(memory);
    assert_null(refit_torch_alloc((ptrdiff_t)(10 * MIB), 0, NULL));
    assert_int_equal(heard_count("the device is full"), 1);
    assert_null(refit_torch_alloc((ptrdiff_t)(100 * MIB), 0, NULL));
    assert_int_equal(heard_count("do not fit into the arena"), 1);
    refit_torch_free(memory, 0, 0, NULL);
    /* PyTorch frees what it can and tries again. */
    memory = refit_torch_alloc((ptrdiff_t)(15 * MIB), 0, NULL);
    assert_non_null(memory);
    refit_torch_free(memory, 0, 0, NULL);
    assert_int_equal(used_bytes(), 0);
}

HOST(a_device_without_an_arena_gives_nothing)
{
    static const int others[] = {1, 63, 64, -1, 1 << 30};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        heard_begin(REFIT_LOG_DEBUG);
        assert_null(refit_torch_alloc(512, others[i], NULL));
        assert_int_equal(heard_count("no arena is attached"), 1);
        heard_begin(REFIT_LOG_DEBUG);
        refit_torch_free(&all, 512, others[i], NULL);
        assert_int_equal(heard_count("no arena is attached"), 1);
    }
}

HOST(what_is_no_piece_is_not_freed)
{
    char *memory = refit_torch_alloc((ptrdiff_t)MIB, 0, NULL);
    refit_torch_free(memory + 4096, 512, 0, NULL);
    assert_int_equal(heard_count("not a piece"), 1);
    assert_int_equal(used_bytes(), MIB);
    assert_int_equal(refit_torch_detach(all.arena, &all.error), REFIT_ERR_BUSY);
    refit_torch_free(memory, 512, 0, NULL);
    heard_begin(REFIT_LOG_DEBUG);
    refit_torch_free(memory, 512, 0, NULL);
    assert_int_equal(heard_count("not a piece"), 1);
}

HOST(an_arena_is_attached_once_and_while_it_is_needed)
{
    refit_arena *other;
    assert_ok(refit_arena_open(all.device, MIB, &other, &all.error));
    assert_int_equal(refit_torch_attach(all.arena, &all.error), REFIT_ERR_EXISTS);
    assert_int_equal(refit_torch_attach(other, &all.error), REFIT_ERR_EXISTS);
    assert_int_equal(refit_torch_detach(other, &all.error), REFIT_ERR_NOT_FOUND);
    void *memory = refit_torch_alloc(512, 0, NULL);
    assert_refused(refit_torch_detach(all.arena, error), REFIT_ERR_BUSY, "1 pieces");
    refit_torch_free(memory, 512, 0, NULL);
    assert_refused(refit_arena_close(all.arena, error), REFIT_ERR_BUSY, "refit_torch_detach");
    assert_ok(refit_torch_detach(all.arena, &all.error));
    assert_int_equal(refit_torch_detach(all.arena, &all.error), REFIT_ERR_NOT_FOUND);
    assert_ok(refit_torch_attach(other, &all.error));
    assert_ok(refit_torch_detach(other, &all.error));
    assert_ok(refit_arena_close(other, &all.error));
    assert_ok(refit_torch_attach(all.arena, &all.error));
    assert_invalid(refit_torch_attach(NULL, &all.error));
    assert_invalid(refit_torch_detach(NULL, &all.error));
}

/* The pool dies before the offloader: the segment goes when the offloader does. */
HOST(a_segment_that_is_a_region_goes_with_its_offloader)
{
    refit_offloader *states;
    refit_region_id id;
    void *memory = refit_torch_alloc((ptrdiff_t)MIB, 0, NULL);
    assert_ok(refit_offloader_open(all.device, NULL, &states, &all.error));
    refit_region_desc region = {
        .size = sizeof region, .name = "segment", .memory = memory, .bytes = MIB};
    assert_ok(refit_offloader_add(states, &region, &id, &all.error));
    refit_torch_free(memory, (ptrdiff_t)MIB, 0, NULL);
    assert_int_equal(heard_count("stays for now"), 1);
    assert_int_equal(used_bytes(), MIB);
    assert_ok(refit_offloader_close(states, &all.error));
    assert_int_equal(used_bytes(), 0);
}

typedef struct torch_thread {
    rft_thread thread;
    bool right;
} torch_thread;

static void *allocate_and_free(void *user)
{
    torch_thread *it = user;
    it->right = true;
    for (int i = 0; i < 100 && it->right; i++) {
        char *memory = refit_torch_alloc((ptrdiff_t)(4096 * (1 + i % 7)), 0, NULL);
        it->right = memory != NULL;
        if (memory == NULL) break;
        memset(memory, i, 4096);
        refit_torch_free(memory, 4096, 0, NULL);
    }
    return NULL;
}

HOST(threads_allocate_while_it_cannot_be_detached)
{
    torch_thread threads[4];
    void *memory = refit_torch_alloc(512, 0, NULL);
    for (size_t i = 0; i < 4; i++) {
        assert_ok(
            rft_thread_start(&threads[i].thread, "torch", allocate_and_free, &threads[i], NULL));
    }
    for (int i = 0; i < 100; i++)
        assert_int_equal(refit_torch_detach(all.arena, NULL), REFIT_ERR_BUSY);
    for (size_t i = 0; i < 4; i++) {
        rft_thread_join(threads[i].thread);
        assert_true(threads[i].right);
    }
    refit_torch_free(memory, 512, 0, NULL);
    assert_int_equal(used_bytes(), 0);
}

/* ---- GPUs -------------------------------------------------------------------------------- */

static int set_up_gpu(void **state)
{
    fake_cuda_reset();
    open_on(&all, "cuda:1", 1);
    assert_ok(refit_torch_attach(all.arena, &all.error));
    return 0;
}

static int tear_down_gpu(void **state)
{
    (void)tear_down_host(state);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

#define GPU(name) TEST_WITH(name, set_up_gpu, tear_down_gpu)

GPU(each_gpu_has_its_own_arena)
{
    fixture first;
    open_on(&first, "cuda:0", 0);
    assert_null(refit_torch_alloc(512, 0, NULL));
    assert_ok(refit_torch_attach(first.arena, &first.error));
    void *one = refit_torch_alloc(512, 0, NULL);
    void *two = refit_torch_alloc(512, 1, NULL);
    assert_int_equal(fake_cuda_used(0), CHUNK);
    assert_int_equal(fake_cuda_used(1), CHUNK);
    refit_torch_free(one, 512, 1, NULL);
    assert_int_equal(heard_count("not a piece"), 1);
    refit_torch_free(one, 512, 0, NULL);
    assert_ok(refit_torch_detach(first.arena, &first.error));
    close_all(&first);
    refit_torch_free(two, 512, 1, NULL);
    assert_int_equal(used_bytes(), 0);
}

/* PyTorch's streams, its default one among them, are waited for before a segment goes. */
GPU(a_segment_waits_for_the_stream_it_was_made_on)
{
    rft_cu_stream side = fake_cuda_stream(fake_cuda_primary(1), RFT_CU_STREAM_NON_BLOCKING);
    const refit_stream_ref stream = {side};
    void *memory = refit_torch_alloc((ptrdiff_t)CHUNK, 1, side);
    void *other = refit_torch_alloc((ptrdiff_t)CHUNK, 1, NULL);
    assert_non_null(memory);
    assert_non_null(other);
    assert_true(fake_cuda_legacy_calls("cuEventRecord") > 0);
    fake_cuda_stop_stream(side);
    assert_ok(rft_device_zero(all.device, stream, memory, CHUNK, &all.error));
    all.device->wait_most_ms = 1;
    refit_torch_free(memory, 0, 1, side);
    assert_int_equal(heard_count("stays for now"), 1);
    assert_int_equal(fake_cuda_used(1), 2 * CHUNK);
    fake_cuda_go_stream(side);
    all.device->wait_most_ms = TIMEOUT_MS;
    refit_torch_free(other, 0, 1, NULL); /* the first one goes along */
    assert_int_equal(fake_cuda_used(1), 0);
    assert_ok(refit_arena_remove_stream(all.arena, stream, &all.error));
    fake_cuda_stream_free(side);
}

GPU(segments_are_made_while_a_graph_is_captured)
{
    rft_cu_stream side = fake_cuda_stream(fake_cuda_primary(1), RFT_CU_STREAM_NON_BLOCKING);
    fake_cuda_capture_begin(side);
    void *memory = refit_torch_alloc((ptrdiff_t)CHUNK, 1, side);
    assert_non_null(memory);
    refit_torch_free(memory, 0, 1, side);
    assert_int_equal(heard_count("captured"), 1);
    assert_int_equal(fake_cuda_used(1), CHUNK);
    assert_true(fake_cuda_capture_end(side));
    void *next = refit_torch_alloc((ptrdiff_t)CHUNK, 1, NULL);
    assert_ptr_equal(next, memory);
    refit_torch_free(next, 0, 1, NULL);
    assert_int_equal(fake_cuda_used(1), 0);
    assert_ok(refit_arena_remove_stream(all.arena, (refit_stream_ref){side}, &all.error));
    fake_cuda_stream_free(side);
}

/* Its work could not be waited for. */
GPU(a_stream_of_another_gpu_frees_nothing)
{
    rft_cu_stream stranger = fake_cuda_stream(fake_cuda_other_context(1), 0);
    assert_null(refit_torch_alloc(512, 1, stranger));
    assert_int_equal(heard_count("belongs to another"), 1);
    void *memory = refit_torch_alloc(512, 1, NULL);
    refit_torch_free(memory, 512, 1, stranger);
    assert_int_equal(heard_count("stays for now"), 1);
    assert_int_equal(fake_cuda_used(1), CHUNK);
    fake_cuda_stream_free(stranger);
    assert_int_equal(used_bytes(), CHUNK); /* until the arena closes */
}

int main(void)
{
    return test_run("torch");
}
