/* The fake driver keeps NVIDIA's rules of captures in global mode. */
#include "fake_fixture.h"

static void a_capture_takes_work_and_is_broken_by_unsafe_calls(void **state)
{
    rft_cu_stream stream = open_stream();
    rft_cu_event event = open_event();
    rft_cu_ptr memory = device_memory(512), second;
    int status, mode = RFT_CU_CAPTURE_MODE_RELAXED;
    fake_cuda_capture_begin(stream);
    assert_cu(cu.stream_capturing(stream, &status));
    assert_int_equal(status, RFT_CU_CAPTURE_ACTIVE);
    assert_cu(cu.fill(memory, 1, 512, stream));
    fake_cuda_settle();
    assert_int_not_equal(*(unsigned char *)fake_cuda_bytes(memory, 1), 1);
    assert_cu(cu.capture_mode(&mode));
    assert_int_equal(mode, RFT_CU_CAPTURE_MODE_GLOBAL);
    assert_cu(cu.event_query(event));
    assert_cu(cu.memory_alloc(&second, 512));
    assert_cu(cu.memory_free(second));
    assert_cu(cu.capture_mode(&mode));
    assert_true(fake_cuda_capture_end(stream));
    fake_cuda_capture_begin(stream);
    refuses(STREAM_CAPTURE_UNSUPPORTED, cu.memory_alloc(&second, 512));
    assert_cu(cu.stream_capturing(stream, &status));
    assert_int_equal(status, RFT_CU_CAPTURE_INVALIDATED);
    refuses(STREAM_CAPTURE_INVALIDATED, cu.fill(memory, 1, 512, stream));
    assert_false(fake_cuda_capture_end(stream));
    assert_cu(cu.event_close(event));
    assert_cu(cu.memory_free(memory));
    assert_cu(cu.stream_close(stream));
}

static void a_captured_event_is_no_place_in_time(void **state)
{
    rft_cu_stream stream = open_stream(), other = open_stream();
    rft_cu_event event = open_event();
    int mode = RFT_CU_CAPTURE_MODE_RELAXED;
    assert_cu(cu.capture_mode(&mode));
    fake_cuda_capture_begin(stream);
    assert_cu(cu.event_record(event, stream));
    refuses(CAPTURED_EVENT, cu.event_query(event));
    refuses(STREAM_CAPTURE_ISOLATION, cu.stream_wait_event(other, event, 0));
    assert_true(fake_cuda_capture_end(stream));
    assert_cu(cu.event_record(event, stream));
    fake_cuda_settle();
    assert_cu(cu.event_query(event));
    assert_cu(cu.capture_mode(&mode));
    assert_cu(cu.event_close(event));
    assert_cu(cu.stream_close(stream));
    assert_cu(cu.stream_close(other));
}

static void the_legacy_stream_breaks_the_capture_of_a_blocking_one(void **state)
{
    rft_cu_stream blocking = fake_cuda_stream(context, 0);
    rft_cu_ptr memory = device_memory(512);
    fake_cuda_capture_begin(blocking);
    refuses(STREAM_CAPTURE_IMPLICIT, cu.fill(memory, 1, 512, NULL));
    assert_false(fake_cuda_capture_end(blocking));
    fake_cuda_stream_free(blocking);
    assert_cu(cu.memory_free(memory));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        fixture_test(a_capture_takes_work_and_is_broken_by_unsafe_calls),
        fixture_test(a_captured_event_is_no_place_in_time),
        fixture_test(the_legacy_stream_breaks_the_capture_of_a_blocking_one),
    };
    return cmocka_run_group_tests_name("fake_captures", tests, NULL, NULL);
}
