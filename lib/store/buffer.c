/*
 * Memory on loan to the transport. A stopped worker can keep frames in a queue for as long as its
 * connection stands; the publisher goes on with other memory meanwhile, and frees the old when its
 * count has come down. Looking costs one atomic read a loan, and there are few.
 */
#include "store/buffer.h"

#include <stddef.h>

#include "base/alloc.h"

rft_buffer *rft_buffer_open(void)
{
    rft_buffer *buffer = rft_calloc(1, sizeof *buffer);
    if (buffer != NULL) buffer->segment.fd = -1;
    return buffer;
}

static void buffer_close(rft_buffer *buffer)
{
    rft_pinning_close(&buffer->pinning);
    rft_segment_close(&buffer->segment);
    rft_bytes_close(&buffer->gathered);
    rft_free(buffer);
}

void rft_retire_list_put(rft_retire_list *retired, rft_buffer *buffer)
{
    if (buffer == NULL) return;
    rft_segment_retire(&buffer->segment);
    buffer->next = retired->first;
    retired->first = buffer;
    rft_retire_list_sweep(retired);
}

void rft_retire_list_move(rft_retire_list *retired, rft_retire_list *from)
{
    while (from->first != NULL) {
        rft_buffer *buffer = from->first;
        from->first = buffer->next;
        rft_retire_list_put(retired, buffer);
    }
}

void rft_retire_list_sweep(rft_retire_list *retired)
{
    for (rft_buffer **at = &retired->first; *at != NULL;) {
        rft_buffer *buffer = *at;
        if (rft_pending_count(&buffer->pending) == 0) {
            *at = buffer->next;
            buffer_close(buffer);
        } else {
            at = &buffer->next;
        }
    }
}

uint32_t rft_retire_list_close(rft_retire_list *retired, int64_t deadline)
{
    uint32_t left = 0;
    for (rft_buffer *buffer = retired->first; buffer != NULL; buffer = buffer->next) {
        if (!rft_pending_wait(&buffer->pending, deadline)) left++;
    }
    rft_retire_list_sweep(retired);
    retired->first = NULL;
    return left;
}
