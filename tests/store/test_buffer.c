/* Buffers and the retire list: a buffer without readers is freed; one with readers keeps its bytes
 * and loses its name. */
#include "base/clock.h"
#include "base/thread.h"
#include "store/buffer.h"
#include "tests/support/mapped.h"
#include "tests/support/test.h"

#define BYTES 100000u

/* One with memory, of which the transport still has a payload if it is `out`. */
static rft_buffer *make_buffer(bool out)
{
    rft_buffer *buffer = rft_buffer_open();
    assert_non_null(buffer);
    assert_ok(rft_segment_create(&buffer->segment, BYTES, NULL));
    assert_ok(rft_bytes_append(&buffer->gathered, "frame", 5, NULL));
    if (out) rft_pending_raise(&buffer->pending);
    return buffer;
}

static bool has_name(const char *name)
{
    rft_segment found;
    if (rft_segment_attach(&found, name, BYTES, NULL) != REFIT_OK) return false;
    rft_segment_close(&found);
    return true;
}

TEST(what_is_back_is_freed_at_once)
{
    rft_retire_list retired = {0};
    rft_buffer *buffer = make_buffer(false);
    const void *there = buffer->segment.memory;
    rft_retire_list_put(&retired, buffer);
    rft_retire_list_put(&retired, NULL);
    assert_null(retired.first);
    assert_false(is_mapped(there));
}

TEST(what_is_out_keeps_its_bytes_but_not_its_name)
{
    rft_retire_list retired = {0};
    rft_buffer *buffer = make_buffer(true);
    unsigned char *there = buffer->segment.memory;
    char name[RFT_SEGMENT_NAME_BYTES];
    strcpy(name, buffer->segment.name);
    there[BYTES - 1] = 7;
    assert_true(has_name(name));
    rft_retire_list_put(&retired, buffer);
    rft_retire_list_sweep(&retired);
    assert_false(has_name(name));
    assert_int_equal(there[BYTES - 1], 7);
    rft_pending_lower(&buffer->pending);
    rft_retire_list_sweep(&retired);
    assert_null(retired.first);
    assert_false(is_mapped(there));
}

/* The one in the middle is back: the others keep their places. */
TEST(a_sweep_takes_out_any_of_several)
{
    for (int back = 0; back < 3; back++) {
        rft_retire_list retired = {0}, other = {0};
        rft_buffer *buffers[3];
        for (int i = 0; i < 3; i++) {
            buffers[i] = make_buffer(true);
            rft_retire_list_put(i == 0 ? &other : &retired, buffers[i]);
        }
        rft_retire_list_move(&retired, &other);
        assert_null(other.first);
        const void *there = buffers[back]->segment.memory;
        rft_pending_lower(&buffers[back]->pending);
        rft_retire_list_sweep(&retired);
        assert_false(is_mapped(there));
        int left = 0;
        for (rft_buffer *buffer = retired.first; buffer != NULL; buffer = buffer->next, left++)
            assert_ptr_not_equal(buffer, buffers[back]);
        assert_int_equal(left, 2);
        for (int i = 0; i < 3; i++)
            if (i != back) rft_pending_lower(&buffers[i]->pending);
        assert_int_equal(rft_retire_list_close(&retired, 0), 0);
    }
}

static void *give_back(void *user)
{
    rft_pending_lower(user);
    return NULL;
}

TEST(a_close_frees_what_comes_back_while_it_waits)
{
    rft_retire_list retired = {0};
    const void *there[2];
    rft_buffer *buffers[2];
    rft_thread thread;
    for (int i = 0; i < 2; i++) {
        buffers[i] = make_buffer(true);
        there[i] = buffers[i]->segment.memory;
        rft_retire_list_put(&retired, buffers[i]);
    }
    rft_pending_lower(&buffers[0]->pending); /* before the close, without a sweep since */
    assert_ok(rft_thread_start(&thread, "give", give_back, &buffers[1]->pending, NULL));
    assert_int_equal(rft_retire_list_close(&retired, rft_deadline(20000)), 0);
    rft_thread_join(thread);
    assert_null(retired.first);
    assert_false(is_mapped(there[0]));
    assert_false(is_mapped(there[1]));
}

/* A transport may read it as long as the process lives. */
TEST(what_does_not_come_back_is_counted_and_left)
{
    rft_retire_list retired = {0}, again = {0};
    rft_buffer *buffer = make_buffer(true);
    const void *back, *there = buffer->segment.memory;
    rft_buffer *other = make_buffer(true);
    back = other->segment.memory;
    rft_retire_list_put(&retired, other);
    rft_retire_list_put(&retired, buffer);
    rft_pending_lower(&other->pending);
    assert_int_equal(rft_retire_list_close(&retired, 0), 1);
    assert_null(retired.first);
    assert_true(is_mapped(there));
    assert_false(is_mapped(back));
    rft_pending_lower(&buffer->pending); /* for the memory checkers */
    buffer->next = NULL;
    rft_retire_list_put(&again, buffer);
    assert_false(is_mapped(there));
}

int main(void)
{
    return test_run("buffer");
}
