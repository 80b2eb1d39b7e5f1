/*
 * The configuration struct: filled, changed, shown, checked.
 *
 * Callers may have been compiled against a shorter or longer refit_config. So nothing works on the
 * caller's struct itself: it is taken into a full copy of ours, changed there, and given back up to
 * the caller's size once everything has succeeded. That also makes each change all or nothing.
 */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "config/config.h"
#include "config/options.h"

/* ---- The struct --------------------------------------------------------------------------- */

/* The first release's options began after these; no caller is shorter. */
#define SMALLEST offsetof(refit_config, offload_slab_bytes)

static void fill_defaults(refit_config *full)
{
    memset(full, 0, sizeof *full);
    full->size = sizeof *full;
    for (size_t i = 0; i < rft_option_count; i++) {
        /* A test reads every default; one that cannot be read would leave 0. */
        (void)rft_option_parse(&rft_options[i], rft_options[i].standard, full, NULL);
    }
}

/* Writes the caller's part of `full` and leaves its size field alone. */
void rft_config_give(refit_config *config, const refit_config *full)
{
    const size_t head = sizeof config->size;
    size_t size = config->size < sizeof *full ? config->size : sizeof *full;
    memcpy((char *)config + head, (const char *)full + head, size - head);
}

void refit_config_init(refit_config *config, size_t size)
{
    if (config == NULL || size < SMALLEST) return;
    refit_config full;
    fill_defaults(&full);
    memset(config, 0, size);
    config->size = size;
    rft_config_give(config, &full);
}

refit_status rft_config_take(const refit_config *config, refit_config *full, refit_error *error)
{
    RFT_REFUSE_IF(config == NULL, error, REFIT_ERR_INVALID, "config is NULL");
    RFT_REFUSE_IF(config->size < SMALLEST, error, REFIT_ERR_INVALID,
                  "config has size %zu: call refit_config_init before anything else", config->size);
    fill_defaults(full);
    memcpy(full->origin, config->origin, sizeof full->origin);
    for (size_t i = 0; i < rft_option_count; i++) {
        const rft_option *option = &rft_options[i];
        if (!rft_option_within(option, config->size)) continue;
        memcpy((char *)full + option->offset, (const char *)config + option->offset, option->width);
    }
    return REFIT_OK;
}

refit_status rft_config_resolve(const refit_config *config, refit_config *own, refit_error *error)
{
    refit_config full;
    if (config == NULL) {
        fill_defaults(&full);
    } else {
        RFT_TRY(refit_config_check(config, error));
        RFT_TRY(rft_config_take(config, &full, error));
    }
    *own = full;
    return REFIT_OK;
}

refit_status rft_config_assign(refit_config *full, size_t caller_size, const rft_option *option,
                               const char *text, refit_config_origin origin, refit_error *error)
{
    RFT_REFUSE_IF(!rft_option_within(option, caller_size), error, REFIT_ERR_CONFIG,
                  "%s is newer than this program: compile it against the current refit/config.h",
                  option->key);
    RFT_TRY(rft_option_parse(option, text, full, error));
    full->origin[option - rft_options] = (unsigned char)origin;
    return REFIT_OK;
}

refit_status refit_config_set(refit_config *config, const char *key, const char *value,
                              refit_error *error)
{
    RFT_REFUSE_IF(key == NULL || value == NULL, error, REFIT_ERR_INVALID, "%s is NULL",
                  key == NULL ? "key" : "value");
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    const rft_option *option = rft_option_find(key);
    RFT_REFUSE_IF(option == NULL, error, REFIT_ERR_NOT_FOUND,
                  "there is no option %.80s: the nearest is %s", key, rft_nearest_key(key));
    RFT_TRY(rft_config_assign(&full, config->size, option, value, REFIT_CONFIG_EXPLICIT, error));
    rft_config_give(config, &full);
    return REFIT_OK;
}

static void show(const rft_option *option, const refit_config *full, refit_option_fn function,
                 void *user)
{
    char value[RFT_VALUE_TEXT], range[RFT_RANGE_TEXT];
    rft_option_print(option, full, value);
    rft_option_range(option, range);
    const refit_option shown = {
        .size = sizeof shown,
        .key = option->key,
        .value = value,
        .default_value = option->standard,
        .unit = option->unit,
        .help = option->help,
        .origin = (refit_config_origin)full->origin[option - rft_options],
        .range = range,
    };
    function(user, &shown);
}

void refit_config_each(const refit_config *config, refit_option_fn function, void *user)
{
    refit_config full;
    if (function == NULL || rft_config_take(config, &full, NULL) != REFIT_OK) return;
    for (size_t i = 0; i < rft_option_count; i++) {
        if (rft_option_within(&rft_options[i], config->size)) {
            show(&rft_options[i], &full, function, user);
        }
    }
}

/* ---- What fits together ----------------------------------------------------------------------
 * What single values cannot show: that they fit together.
 *
 * First every value by itself, because a program may have written the struct by hand; then the
 * pairs. Each sentence names both keys and says how to mend it.
 */

/* Below that a single step would take seconds. */
#define LEAST_RATE (UINT64_C(1) << 20)

static refit_status check_offload(const refit_config *config, refit_error *error)
{
    RFT_REFUSE_IF(!rft_is_power_of_two(config->offload_slab_bytes), error, REFIT_ERR_CONFIG,
                  "offload.slab_bytes cannot be %" PRIu64 ": it must be a power of two",
                  config->offload_slab_bytes);
    RFT_REFUSE_IF(!rft_is_power_of_two(config->offload_chunk_bytes), error, REFIT_ERR_CONFIG,
                  "offload.chunk_bytes cannot be %" PRIu64 ": it must be a power of two",
                  config->offload_chunk_bytes);
    RFT_REFUSE_IF(!rft_is_power_of_two(config->offload_alignment_bytes), error, REFIT_ERR_CONFIG,
                  "offload.alignment_bytes cannot be %" PRIu64 ": it must be a power of two",
                  config->offload_alignment_bytes);
    RFT_REFUSE_IF(config->offload_slab_bytes < config->offload_alignment_bytes, error,
                  REFIT_ERR_CONFIG,
                  "offload.slab_bytes (%" PRIu64 ") is below offload.alignment_bytes (%" PRIu64
                  "): raise the one or lower the other",
                  config->offload_slab_bytes, config->offload_alignment_bytes);
    RFT_REFUSE_IF(!config->use_pinned_optimizer_offload && config->offload_pin == REFIT_PIN_REQUIRE,
                  error, REFIT_ERR_CONFIG,
                  "offload.pin is require but use_pinned_optimizer_offload is false, the pageable "
                  "path: change one of them");
    RFT_REFUSE_IF(config->offload_rate_limit != 0 && config->offload_rate_limit < LEAST_RATE, error,
                  REFIT_ERR_CONFIG,
                  "offload.rate_limit cannot be %" PRIu64
                  ": it must be 0 or at least 1MiB a second",
                  config->offload_rate_limit);
    return REFIT_OK;
}

static refit_status check_commit(const refit_config *config, refit_error *error)
{
    if (config->broadcast_commit == REFIT_COMMIT_ALL) {
        RFT_REFUSE_IF(config->broadcast_quorum != 0, error, REFIT_ERR_CONFIG,
                      "broadcast.quorum is %" PRIu32 " but broadcast.commit is all: set commit to "
                      "quorum, or quorum to 0",
                      config->broadcast_quorum);
        return REFIT_OK;
    }
    RFT_REFUSE_IF(config->broadcast_quorum == 0 ||
                      config->broadcast_quorum > config->limits_workers,
                  error, REFIT_ERR_CONFIG,
                  "broadcast.quorum is %" PRIu32 " but broadcast.commit is quorum: it must be 1 to "
                  "limits.workers (%" PRIu32 ")",
                  config->broadcast_quorum, config->limits_workers);
    return REFIT_OK;
}

static refit_status check_broadcast(const refit_config *config, refit_error *error)
{
    RFT_REFUSE_IF(config->broadcast_frame_bytes > config->limits_frame_bytes, error,
                  REFIT_ERR_CONFIG,
                  "broadcast.frame_bytes (%" PRIu64 ") is above limits.frame_bytes (%" PRIu64
                  "): lower the one or raise the other",
                  config->broadcast_frame_bytes, config->limits_frame_bytes);
    RFT_REFUSE_IF(config->broadcast_window > config->limits_window, error, REFIT_ERR_CONFIG,
                  "broadcast.window (%" PRIu32 ") is above limits.window (%" PRIu32
                  "): lower the one or raise the other",
                  config->broadcast_window, config->limits_window);
    RFT_REFUSE_IF(config->broadcast_heartbeat_ms >= config->broadcast_heartbeat_timeout_ms, error,
                  REFIT_ERR_CONFIG,
                  "broadcast.heartbeat_ms (%" PRIu32 ") must be below "
                  "broadcast.heartbeat_timeout_ms (%" PRIu32 "): a peer would count as lost "
                  "between two beats",
                  config->broadcast_heartbeat_ms, config->broadcast_heartbeat_timeout_ms);
    RFT_REFUSE_IF(config->broadcast_idle_timeout_ms != 0 &&
                      config->broadcast_idle_timeout_ms <= config->broadcast_heartbeat_timeout_ms,
                  error, REFIT_ERR_CONFIG,
                  "broadcast.idle_timeout_ms (%" PRIu32 ") must be 0 or above "
                  "broadcast.heartbeat_timeout_ms (%" PRIu32 "): a worker would end before a "
                  "trainer counts as lost; allow more silence, or lower the heartbeat timeout",
                  config->broadcast_idle_timeout_ms, config->broadcast_heartbeat_timeout_ms);
    RFT_REFUSE_IF(config->limits_message_bytes > config->limits_manifest_bytes, error,
                  REFIT_ERR_CONFIG,
                  "limits.message_bytes (%" PRIu64 ") is above limits.manifest_bytes (%" PRIu64
                  "): a manifest is the largest message",
                  config->limits_message_bytes, config->limits_manifest_bytes);
    RFT_REFUSE_IF(config->broadcast_gpu == REFIT_GPU_REQUIRE &&
                      config->broadcast_shm == REFIT_SHM_OFF,
                  error, REFIT_ERR_CONFIG,
                  "broadcast.gpu is require but broadcast.shm is off: the publisher knows through "
                  "shared memory which workers read its GPU's, so change one of them");
    RFT_REFUSE_IF(config->broadcast_wait != REFIT_WAIT_APPLIED && config->broadcast_slots < 2,
                  error, REFIT_ERR_CONFIG,
                  "broadcast.slots is 1 but broadcast.wait is not applied: workers use one version "
                  "while the next one is written, so set slots to 2");
    return check_commit(config, error);
}

/* Half of what keys need would look safe and not be. */
static refit_status check_security(const refit_config *config, refit_error *error)
{
    bool key = config->security_key[0] != '\0';
    bool server = config->security_server_key[0] != '\0';
    bool allow = config->security_allow[0] != '\0';
    RFT_REFUSE_IF(!key && server, error, REFIT_ERR_CONFIG,
                  "security.server_key is set but security.key is not: a worker needs a secret key "
                  "of its own, too (refit keygen)");
    RFT_REFUSE_IF(!key && allow, error, REFIT_ERR_CONFIG,
                  "security.allow is set but security.key is not: a trainer needs a secret key of "
                  "its own, too (refit keygen)");
    RFT_REFUSE_IF(key && !server && !allow, error, REFIT_ERR_CONFIG,
                  "security.key is set alone: a trainer needs security.allow, too, and a worker "
                  "security.server_key");
    return REFIT_OK;
}

refit_status refit_config_check(const refit_config *config, refit_error *error)
{
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    for (size_t i = 0; i < rft_option_count; i++) {
        RFT_TRY(rft_option_check(&rft_options[i], &full, error));
    }
    RFT_TRY(check_offload(&full, error));
    RFT_TRY(check_security(&full, error));
    return check_broadcast(&full, error);
}
