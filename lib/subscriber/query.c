/*
 * An observer's query: the version that a publisher holds. refit_query_*.
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

#include <refit/advanced/query.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/random.h"
#include "config/config.h"
#include "net/channel.h"
#include "wire/manifest.h"

#define POLL_MOST_MS 100 /* HELLO is said again, in case the publisher came up meanwhile */

struct refit_query {
    rft_channel *channel; /* while it asks */
    rft_limits limits;
    uint64_t epoch, version, frame_bytes;
    rft_manifest *manifest; /* owned; NULL: nothing is declared */
    uint64_t *digests;      /* owned; a tensor; NULL: nothing is committed */
    rft_digest128 digest;
    bool welcomed, sealed, done;
    refit_error rejection; /* why no connection comes about; status REFIT_OK: unknown */
};

static refit_status say(refit_query *query, const rft_message *message, refit_error *error)
{
    rft_bytes bytes = {0};
    refit_status status = rft_message_encode(message, &query->limits, &bytes, error);
    if (status == REFIT_OK) {
        status = rft_channel_send(query->channel, NULL, rft_bytes_view(&bytes), NULL, error);
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

/* ---- The publisher's answers */

/* Forgets digests of tensors that are no longer declared. */
static void forget_seal(refit_query *query)
{
    rft_free(query->digests);
    query->digests = NULL;
    query->digest = (rft_digest128){0};
    query->sealed = false;
}

/* A trainer that greets again says all that follows again, too. */
static refit_status take_welcome(refit_query *query, const rft_message *message, refit_error *error)
{
    if (message->as.welcome.protocol != RFT_PROTOCOL) {
        char reason[RFT_SENTENCE_BYTES];
        rft_message_say_protocols(message->as.welcome.protocol, RFT_PROTOCOL, reason);
        return rft_fail(error, REFIT_ERR_PROTOCOL, "%s", reason);
    }
    forget_seal(query);
    rft_manifest_close(query->manifest);
    query->manifest = NULL;
    query->welcomed = true;
    query->epoch = message->as.welcome.epoch;
    query->version = message->as.welcome.version;
    query->frame_bytes = message->as.welcome.frame_bytes;
    return REFIT_OK;
}

static refit_status take_manifest(refit_query *query, const rft_message *message,
                                  refit_error *error)
{
    rft_manifest *manifest;
    RFT_TRY(rft_manifest_decode(message->as.manifest.tensors, query->frame_bytes, &query->limits,
                                &manifest, error));
    forget_seal(query);
    rft_manifest_close(query->manifest);
    query->manifest = manifest;
    return REFIT_OK;
}

static refit_status take_seal(refit_query *query, const rft_message *message, refit_error *error)
{
    rft_view digests = message->as.seal.tensors;
    const rft_manifest *manifest = query->manifest;
    RFT_REFUSE_IF(manifest == NULL || digests.count != (size_t)manifest->originals * 8, error,
                  REFIT_ERR_PROTOCOL, "the trainer's digests are not those of its tensors");
    rft_digest128 digest = rft_version_digest_encoded(manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &message->as.seal.digest), error, REFIT_ERR_CORRUPT,
                  "the version's digest is not that of its tensors");
    forget_seal(query);
    query->digests = rft_calloc(manifest->count, sizeof *query->digests);
    RFT_REFUSE_IF(query->digests == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u digests",
                  manifest->count);
    rft_digests_by_tensor(manifest, digests.data, query->digests);
    query->version = message->as.seal.version;
    query->digest = digest;
    query->sealed = true;
    return REFIT_OK;
}

static refit_status take(refit_query *query, const rft_message *message, refit_error *error)
{
    char reason[RFT_SENTENCE_BYTES];
    switch (message->kind) {
    case RFT_WELCOME: return take_welcome(query, message, error);
    case RFT_REFUSE:
        rft_view_print(message->as.refuse.reason, reason, sizeof reason);
        return rft_fail(error, REFIT_ERR_PEER, "the trainer refuses: %s", reason);
    case RFT_MANIFEST: return query->welcomed ? take_manifest(query, message, error) : REFIT_OK;
    case RFT_SEAL: return take_seal(query, message, error);
    case RFT_BYE: query->done = true; return REFIT_OK;
    default: return REFIT_OK;
    }
}

/* Receives until the publisher has sent everything. A publisher that never stops sending does not
 * extend the deadline. */
static refit_status receive(refit_query *query, int64_t deadline, refit_error *error)
{
    while (!query->done && rft_ms_until(deadline) > 0) {
        rft_envelope envelope;
        rft_message message;
        refit_status status = rft_channel_receive(query->channel, &envelope, error);
        if (status == REFIT_ERR_TIMEOUT) return REFIT_OK;
        RFT_TRY(status);
        RFT_TRY(rft_message_decode(envelope.message, &query->limits, &message, error));
        RFT_TRY(take(query, &message, error));
    }
    return REFIT_OK;
}

/* To a publisher that does not know observers, and took this one for a worker. */
static refit_status say_bye(refit_query *query, refit_error *error)
{
    const rft_message bye = {.kind = RFT_BYE};
    return say(query, &bye, error);
}

/* A definite failure of keys is not replaced by an ambiguous one. */
static void note_failure(refit_query *query)
{
    refit_error why;
    refit_status status = rft_channel_take_failure(query->channel, &why);
    if (status == REFIT_OK) return;
    if (status == REFIT_ERR_SECURITY || query->rejection.status != REFIT_ERR_SECURITY)
        query->rejection = why;
}

static refit_status no_answer(const refit_query *query, uint32_t timeout_ms, refit_error *error)
{
    const char *why = "";
    if (query->rejection.status != REFIT_OK)
        why = query->rejection.text;
    else if (rft_channel_handshake_ended(query->channel))
        why = "the other side ended the handshake; if the trainer asks for keys, set security.key "
              "and security.server_key";
    return rft_fail(error, REFIT_ERR_TIMEOUT, "no trainer has answered at %s within %u ms%s%s",
                    rft_channel_endpoint(query->channel), timeout_ms, why[0] == '\0' ? "" : ": ",
                    why);
}

static refit_status ask(refit_query *query, uint32_t timeout_ms, refit_error *error)
{
    char name[32];
    uint64_t instance;
    RFT_TRY(rft_random_u64(&instance, error));
    const rft_message hello = make_hello(instance, name);
    const int64_t deadline = rft_deadline(timeout_ms);
    while (!query->done) {
        int left = rft_ms_until(deadline);
        if (left == 0 && query->welcomed) return say_bye(query, error);
        if (left == 0) return no_answer(query, timeout_ms, error);
        if (!query->welcomed) RFT_TRY(say(query, &hello, error));
        rft_channel_poll(query->channel, -1, left < POLL_MOST_MS ? left : POLL_MOST_MS);
        note_failure(query);
        RFT_TRY(receive(query, deadline, error));
    }
    RFT_REFUSE_IF(!query->welcomed, error, REFIT_ERR_CLOSED, "the trainer closes");
    return REFIT_OK;
}

/* ---- Public functions */

refit_status refit_query_open(const char *endpoint, const refit_config *config, uint32_t timeout_ms,
                              refit_query **out, refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "refit_query_open needs `out`");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    refit_query *query = rft_calloc(1, sizeof *query);
    RFT_REFUSE_IF(query == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a query");
    query->limits = rft_limits_from(&own);
    refit_status status = rft_channel_connect(endpoint == NULL ? own.broadcast_endpoint : endpoint,
                                              &own, &query->channel, error);
    if (status == REFIT_OK) {
        status = ask(query, timeout_ms, error);
        rft_channel_close(query->channel);
        query->channel = NULL;
    }
    if (status == REFIT_OK)
        *out = query;
    else
        refit_query_close(query);
    return status;
}

void refit_query_close(refit_query *query)
{
    if (query == NULL) return;
    rft_manifest_close(query->manifest);
    rft_free(query->digests);
    rft_free(query);
}

refit_status refit_query_describe(const refit_query *query, refit_query_info *info,
                                  refit_error *error)
{
    RFT_REFUSE_IF(query == NULL || info == NULL || info->size < sizeof *info, error,
                  REFIT_ERR_INVALID, "refit_query_describe needs a query and info.size set");
    size_t size = info->size;
    *info = (refit_query_info){
        .size = size,
        .epoch = query->epoch,
        .version = query->version,
        .frame_bytes = query->frame_bytes,
        .sealed = query->sealed,
    };
    memcpy(info->digest, query->digest.bytes, sizeof info->digest);
    if (query->manifest == NULL) return REFIT_OK;
    info->weight_bytes = query->manifest->payload_bytes;
    info->tensors = query->manifest->count;
    memcpy(info->manifest, query->manifest->digest.bytes, sizeof info->manifest);
    return REFIT_OK;
}

refit_status refit_query_tensor(const refit_query *query, uint32_t index, refit_tensor *tensor,
                                uint64_t *digest, refit_error *error)
{
    RFT_REFUSE_IF(query == NULL, error, REFIT_ERR_INVALID, "there is no query: it is NULL");
    uint32_t count = query->manifest == NULL ? 0 : query->manifest->count;
    RFT_REFUSE_IF(index >= count, error, REFIT_ERR_NOT_FOUND,
                  "there is no tensor %u: the trainer has %u", index, count);
    RFT_REFUSE_IF(tensor != NULL && tensor->size < sizeof *tensor, error, REFIT_ERR_INVALID,
                  "tensor.size is %zu: set it to sizeof(refit_tensor), %zu", tensor->size,
                  sizeof *tensor);
    if (tensor != NULL) rft_manifest_describe(query->manifest, index, tensor);
    if (digest != NULL) *digest = query->digests == NULL ? 0 : query->digests[index];
    return REFIT_OK;
}
