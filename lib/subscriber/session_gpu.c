/*
 * The part of a session that is about the GPU it shares with its trainer, if it does.
 *
 * The worker names its GPU with HELLO, and joins on it if WELCOME names the same and the probe
 * could be opened, without which nobody would know who reads there. Where the memory can then not
 * be mapped after all (another container, a driver that refuses), the worker joins once more
 * without its GPU, and takes its versions another way, unless its own broadcast.gpu is require.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "device/device_uuid.h"
#include "subscriber/session.h"

static bool is_required(const rft_session *session)
{
    return session->config->broadcast_gpu == REFIT_GPU_REQUIRE;
}

bool rft_session_is_ready(const rft_session *session)
{
    return session->images.device != NULL || !is_required(session);
}

rft_view rft_session_gpu(const rft_session *session)
{
    bool named = session->images.device != NULL && session->no_gpu[0] == '\0';
    return named ? (rft_view){session->uuid, sizeof session->uuid} : (rft_view){0};
}

void rft_session_use_device(rft_session *session, refit_device *device, int64_t now)
{
    rft_device_caps caps = rft_device_get_caps(device);
    memcpy(session->uuid, caps.uuid, sizeof session->uuid);
    session->images.device = device;
    session->no_gpu[0] = '\0';
    rft_session_disconnect(session, 0, now);
    session->names_gpu = true;
}

/* Empty: the worker is on the trainer's GPU, and can share it. */
static void find_obstacle(const rft_session *session, rft_view theirs, char *text, size_t room)
{
    char uuid[RFT_UUID_TEXT_BYTES];
    text[0] = '\0';
    if (session->no_gpu[0] != '\0') {
        rft_text_say(text, room, "%s", session->no_gpu);
    } else if (session->proof == 0) {
        rft_text_say(text, room, "no shared memory to say who reads the GPU: %s", session->why_not);
    } else if (theirs.count == 0) {
        snprintf(text, room, "the trainer shows no GPU's memory");
    } else if (!rft_uuid_equal(theirs.data, session->uuid)) {
        rft_uuid_print(theirs.data, uuid);
        snprintf(text, room, "the trainer is on another GPU, %s", uuid);
    }
}

void rft_session_find_gpu(rft_session *session, rft_view theirs)
{
    char why[sizeof session->why_not];
    session->on_gpu = false;
    if (session->images.device == NULL) return;
    find_obstacle(session, theirs, why, sizeof why);
    session->on_gpu = why[0] == '\0';
    if (session->on_gpu) session->report.path = REFIT_PATH_CUDA_IPC;
    memcpy(session->why_not, why, sizeof why);
}

bool rft_session_could_use_gpu(const rft_session *session, rft_view theirs)
{
    char why[sizeof session->why_not];
    if (session->on_gpu || session->images.device == NULL) return false;
    find_obstacle(session, theirs, why, sizeof why);
    return why[0] == '\0';
}

bool rft_session_needs_gpu(rft_session *session, rft_view theirs, int64_t now)
{
    if (!is_required(session) || session->on_gpu) return false;
    bool later = theirs.count == 0 && session->proof != 0;
    if (later) {
        rft_session_put_off(session,
                            "broadcast.gpu is require here, and the trainer shows no GPU's "
                            "memory",
                            now);
    } else {
        rft_session_end(session, REFIT_ERR_UNSUPPORTED, session->why_not, now);
    }
    return true;
}

void rft_session_leave_gpu(rft_session *session, const refit_error *why, int64_t now)
{
    if (is_required(session)) {
        rft_session_send_failed(session, session->receive.version, why, true);
        rft_session_end(session, (refit_status)why->status, why->text, now);
        return;
    }
    rft_log(REFIT_LOG_WARNING, "worker %s takes its versions another way than from its GPU: %s",
            session->identity->worker, why->text);
    rft_session_disconnect(session, 0, now);
    rft_text_say(session->no_gpu, sizeof session->no_gpu, "%s", why->text);
}
