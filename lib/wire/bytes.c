/*
 * Byte strings, borrowed and owned.
 *
 * An owned one grows by half, so appending is cheap on average, and keeps its room when it
 * is reset, so a loop that reuses it allocates only at first. Text that came from elsewhere is
 * shown through rft_view_print alone: a peer's name cannot forge a line of a log or overrun a
 * buffer.
 */
#include "wire/bytes.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"

#define FIRST_ROOM 256u

rft_view rft_view_text(const char *text)
{
    return (rft_view){text, text == NULL ? 0 : strlen(text)};
}

bool rft_view_is_text(rft_view view)
{
    return rft_text_is_clean(view.data, view.count);
}

void rft_view_print(rft_view view, char *out, size_t room)
{
    rft_text_fit(view.data, view.count, out, room);
}

refit_status rft_bytes_reserve(rft_bytes *bytes, size_t count, refit_error *error)
{
    uint64_t needed;
    RFT_REFUSE_IF(!rft_add_u64(bytes->count, count, &needed), error, REFIT_ERR_HOST_MEMORY,
                  "a byte string of more than 2^64 bytes was asked for");
    if (needed <= bytes->room) return REFIT_OK;
    size_t room = rft_max_u64(rft_max_u64(needed, FIRST_ROOM), bytes->room + bytes->room / 2);
    unsigned char *data = rft_realloc(bytes->data, room, 1);
    RFT_REFUSE_IF(data == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for %zu bytes of a message", room);
    bytes->data = data;
    bytes->room = room;
    return REFIT_OK;
}

refit_status rft_bytes_append(rft_bytes *bytes, const void *data, size_t count, refit_error *error)
{
    if (count == 0) return REFIT_OK;
    RFT_TRY(rft_bytes_reserve(bytes, count, error));
    memcpy(bytes->data + bytes->count, data, count);
    bytes->count += count;
    return REFIT_OK;
}

void rft_bytes_reset(rft_bytes *bytes)
{
    bytes->count = 0;
}

void rft_bytes_close(rft_bytes *bytes)
{
    rft_free(bytes->data);
    *bytes = (rft_bytes){0};
}

rft_view rft_bytes_view(const rft_bytes *bytes)
{
    return (rft_view){bytes->data, bytes->count};
}
