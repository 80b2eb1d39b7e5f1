/* Heartbeats that a worker can keep, and values that it computes with. */
#include "subscriber/welcome.h"

#include <inttypes.h>

#define HEARTBEAT_MOST_MS (60u * 60 * 1000)

refit_status rft_welcome_check(const rft_message *welcome, refit_error *error)
{
    uint32_t beat = welcome->as.welcome.heartbeat_ms;
    uint32_t timeout = welcome->as.welcome.heartbeat_timeout_ms;
    RFT_REFUSE_IF(welcome->as.welcome.epoch == 0 || welcome->as.welcome.frame_bytes == 0 ||
                      welcome->as.welcome.window == 0,
                  error, REFIT_ERR_PROTOCOL,
                  "a welcome without an epoch, a frame size or a window");
    RFT_REFUSE_IF(
        beat == 0 || timeout <= beat || timeout > HEARTBEAT_MOST_MS, error, REFIT_ERR_PROTOCOL,
        "a welcome asks for a heartbeat of %" PRIu32 " ms with a timeout of %" PRIu32 " ms", beat,
        timeout);
    return REFIT_OK;
}
