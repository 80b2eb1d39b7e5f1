/*
 * What a publisher holds, asked once: refit_glance_*.
 *
 *     HELLO, as an observer ─► WELCOME, MANIFEST, SEAL, BYE
 *
 * A publisher answers an observer at once, if it did not just do so: no version waits for it, and
 * no report names it. It happens on the caller's thread; nothing is left running. A publisher that
 * does not know observers says WELCOME alone, to a worker that never joins and says BYE itself.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/random.h"
#include "config/resolve.h"
#include "net/channel.h"
#include "wire/manifest.h"

#define POLL_MOST_MS 100 /* HELLO is said again, in case the publisher came up meanwhile */

struct refit_glance {
    rft_channel *channel; /* while it asks */
    rft_limits limits;
    uint64_t epoch, version, frame_bytes;
    rft_manifest *manifest; /* owned; NULL: nothing is declared */
    uint64_t *digests;      /* owned; a tensor; NULL: nothing is committed */
    rft_digest128 digest;
    bool welcomed, sealed, done;
    refit_error shut_out; /* why the other side and we cannot talk; status REFIT_OK: we may */
};

static refit_status say(refit_glance *glance, const rft_message *message, refit_error *error)
{
    rft_bytes bytes = {0};
    refit_status status = rft_message_encode(message, &glance->limits, &bytes, error);
    if (status == REFIT_OK) {
        status = rft_channel_send(glance->channel, NULL, rft_bytes_view(&bytes), NULL, error);
        if (status == REFIT_ERR_BUSY) status = REFIT_OK; /* it is said again */
    }
    rft_bytes_close(&bytes);
    return status;
}

static rft_message make_hello(uint64_t instance, char name[32])
{
    rft_message message = {.kind = RFT_HELLO};
    (void)snprintf(name, 32, "observer-%016" PRIx64, instance);
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(name);
    message.as.hello.instance = instance;
    message.as.hello.host = rft_view_text("observer");
    message.as.hello.window = 1;
    message.as.hello.observer = true;
    return message;
}

/* ---- What the publisher answers ---- */

/* What was said of tensors that are no longer the ones. */
static void forget_seal(refit_glance *glance)
{
    rft_free(glance->digests);
    glance->digests = NULL;
    glance->digest = (rft_digest128){0};
    glance->sealed = false;
}

/* A trainer that greets again says all that follows again, too. */
static refit_status take_welcome(refit_glance *glance, const rft_message *message,
                                 refit_error *error)
{
    if (message->as.welcome.protocol != RFT_PROTOCOL) {
        char reason[RFT_SENTENCE_BYTES];
        rft_message_say_protocols(message->as.welcome.protocol, RFT_PROTOCOL, reason);
        return rft_fail(error, REFIT_ERR_PROTOCOL, "%s", reason);
    }
    forget_seal(glance);
    rft_manifest_close(glance->manifest);
    glance->manifest = NULL;
    glance->welcomed = true;
    glance->epoch = message->as.welcome.epoch;
    glance->version = message->as.welcome.version;
    glance->frame_bytes = message->as.welcome.frame_bytes;
    return REFIT_OK;
}

static refit_status take_manifest(refit_glance *glance, const rft_message *message,
                                  refit_error *error)
{
    rft_manifest *manifest;
    RFT_TRY(rft_manifest_decode(message->as.manifest.tensors, glance->frame_bytes, &glance->limits,
                                &manifest, error));
    forget_seal(glance);
    rft_manifest_close(glance->manifest);
    glance->manifest = manifest;
    return REFIT_OK;
}

static refit_status take_seal(refit_glance *glance, const rft_message *message, refit_error *error)
{
    rft_view digests = message->as.seal.tensors;
    const rft_manifest *manifest = glance->manifest;
    RFT_REFUSE_IF(manifest == NULL || digests.count != (size_t)manifest->originals * 8, error,
                  REFIT_ERR_PROTOCOL, "the trainer's digests are not those of its tensors");
    rft_digest128 digest = rft_version_digest_encoded(manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &message->as.seal.digest), error, REFIT_ERR_CORRUPT,
                  "the version's digest is not that of its tensors");
    forget_seal(glance);
    glance->digests = rft_calloc(manifest->count, sizeof *glance->digests);
    RFT_REFUSE_IF(glance->digests == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u digests",
                  manifest->count);
    rft_digests_by_tensor(manifest, digests.data, glance->digests);
    glance->version = message->as.seal.version;
    glance->digest = digest;
    glance->sealed = true;
    return REFIT_OK;
}

static refit_status take(refit_glance *glance, const rft_message *message, refit_error *error)
{
    char reason[RFT_SENTENCE_BYTES];
    switch (message->kind) {
    case RFT_WELCOME: return take_welcome(glance, message, error);
    case RFT_REFUSE:
        rft_view_print(message->as.refuse.reason, reason, sizeof reason);
        return rft_fail(error, REFIT_ERR_PEER, "the trainer refuses: %s", reason);
    case RFT_MANIFEST: return glance->welcomed ? take_manifest(glance, message, error) : REFIT_OK;
    case RFT_SEAL: return take_seal(glance, message, error);
    case RFT_BYE: glance->done = true; return REFIT_OK;
    default: return REFIT_OK;
    }
}

/* What is there, until the publisher has said all; but one that never stops talking keeps nobody
 * beyond the deadline. */
static refit_status hear(refit_glance *glance, int64_t deadline, refit_error *error)
{
    while (!glance->done && rft_ms_until(deadline) > 0) {
        rft_envelope envelope;
        rft_message message;
        refit_status status = rft_channel_receive(glance->channel, &envelope, error);
        if (status == REFIT_ERR_TIMEOUT) return REFIT_OK;
        RFT_TRY(status);
        RFT_TRY(rft_message_decode(envelope.message, &glance->limits, &message, error));
        RFT_TRY(take(glance, &message, error));
    }
    return REFIT_OK;
}

/* To one that does not know observers, and took us for a worker. */
static refit_status say_bye(refit_glance *glance, refit_error *error)
{
    const rft_message bye = {.kind = RFT_BYE};
    return say(glance, &bye, error);
}

/* What is known of the keys is not forgotten for what may be a thousand things. */
static void note_failure(refit_glance *glance)
{
    refit_error why;
    refit_status status = rft_channel_take_failure(glance->channel, &why);
    if (status == REFIT_OK) return;
    if (status == REFIT_ERR_SECURITY || glance->shut_out.status != REFIT_ERR_SECURITY)
        glance->shut_out = why;
}

static refit_status nobody(const refit_glance *glance, uint32_t timeout_ms, refit_error *error)
{
    const bool known = glance->shut_out.status != REFIT_OK;
    return rft_fail(error, REFIT_ERR_TIMEOUT, "no trainer has answered at %s within %u ms%s%s",
                    rft_channel_endpoint(glance->channel), timeout_ms, known ? ": " : "",
                    known ? glance->shut_out.text : "");
}

static refit_status ask(refit_glance *glance, uint32_t timeout_ms, refit_error *error)
{
    char name[32];
    uint64_t instance;
    RFT_TRY(rft_random_u64(&instance, error));
    const rft_message hello = make_hello(instance, name);
    const int64_t deadline = rft_deadline(timeout_ms);
    while (!glance->done) {
        int left = rft_ms_until(deadline);
        if (left == 0 && glance->welcomed) return say_bye(glance, error);
        if (left == 0) return nobody(glance, timeout_ms, error);
        if (!glance->welcomed) RFT_TRY(say(glance, &hello, error));
        rft_channel_poll(glance->channel, -1, left < POLL_MOST_MS ? left : POLL_MOST_MS);
        note_failure(glance);
        RFT_TRY(hear(glance, deadline, error));
    }
    RFT_REFUSE_IF(!glance->welcomed, error, REFIT_ERR_CLOSED, "the trainer closes");
    return REFIT_OK;
}

/* ---- The door ---- */

refit_status refit_glance_open(const char *endpoint, const refit_config *config,
                               uint32_t timeout_ms, refit_glance **out, refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "refit_glance_open needs `out`");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    refit_glance *glance = rft_calloc(1, sizeof *glance);
    RFT_REFUSE_IF(glance == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a glance");
    glance->limits = rft_limits_from(&own);
    refit_status status = rft_channel_connect(endpoint == NULL ? own.broadcast_endpoint : endpoint,
                                              &own, &glance->channel, error);
    if (status == REFIT_OK) {
        status = ask(glance, timeout_ms, error);
        rft_channel_close(glance->channel);
        glance->channel = NULL;
    }
    if (status == REFIT_OK)
        *out = glance;
    else
        refit_glance_close(glance);
    return status;
}

void refit_glance_close(refit_glance *glance)
{
    if (glance == NULL) return;
    rft_manifest_close(glance->manifest);
    rft_free(glance->digests);
    rft_free(glance);
}

refit_status refit_glance_describe(const refit_glance *glance, refit_glance_info *info,
                                   refit_error *error)
{
    RFT_REFUSE_IF(glance == NULL || info == NULL || info->size < sizeof *info, error,
                  REFIT_ERR_INVALID, "refit_glance_describe needs a glance and info.size set");
    size_t size = info->size;
    *info = (refit_glance_info){
        .size = size,
        .epoch = glance->epoch,
        .version = glance->version,
        .frame_bytes = glance->frame_bytes,
        .sealed = glance->sealed,
    };
    memcpy(info->digest, glance->digest.bytes, sizeof info->digest);
    if (glance->manifest == NULL) return REFIT_OK;
    info->weight_bytes = glance->manifest->payload_bytes;
    info->tensors = glance->manifest->count;
    memcpy(info->manifest, glance->manifest->digest.bytes, sizeof info->manifest);
    return REFIT_OK;
}

refit_status refit_glance_tensor(const refit_glance *glance, uint32_t index, refit_tensor *tensor,
                                 uint64_t *digest, refit_error *error)
{
    RFT_REFUSE_IF(glance == NULL, error, REFIT_ERR_INVALID, "there is no glance: it is NULL");
    uint32_t count = glance->manifest == NULL ? 0 : glance->manifest->count;
    RFT_REFUSE_IF(index >= count, error, REFIT_ERR_NOT_FOUND,
                  "there is no tensor %u: the trainer has %u", index, count);
    RFT_REFUSE_IF(tensor != NULL && tensor->size < sizeof *tensor, error, REFIT_ERR_INVALID,
                  "tensor.size is %zu: set it to sizeof(refit_tensor), %zu", tensor->size,
                  sizeof *tensor);
    if (tensor != NULL) rft_manifest_describe(glance->manifest, index, tensor);
    if (digest != NULL) *digest = glance->digests == NULL ? 0 : glance->digests[index];
    return REFIT_OK;
}
