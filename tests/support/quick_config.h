/* A configuration for tests: small sizes, and timeouts long enough for a process that is stalled
 * for ten seconds. A test in which a peer is to be lost sets its own, shorter one. Waits of tests
 * are longer than the silence (50 s), for a message that ends a connection may be lost. */
#ifndef QUICK_CONFIG_H
#define QUICK_CONFIG_H

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <refit/config.h>

/* Any free port of a loopback address of this process alone: once it is closed, it can be bound
 * again, for no other process is given a port there. */
static inline void own_tcp(char endpoint[64])
{
    unsigned self = (unsigned)getpid(); /* of 22 bits at most */
    (void)snprintf(endpoint, 64, "tcp://127.%u.%u.%u:0", 1 + (self >> 16), self >> 8 & 0xff,
                   self & 0xff);
}

static inline refit_config quick_config(void)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    strcpy(config.device, "host");
    strcpy(config.broadcast_endpoint, "tcp://127.0.0.1:0");
    config.broadcast_slots = 1;
    config.broadcast_frame_bytes = 256 * 1024;
    config.broadcast_window = 4;
    config.broadcast_stage_timeout_ms = 30000;
    config.broadcast_commit_timeout_ms = 30000;
    config.broadcast_heartbeat_ms = 100;
    config.broadcast_heartbeat_timeout_ms = 20000;
    config.broadcast_resend_limit = 3;
    config.broadcast_linger_ms = 15000;
    config.limits_workers = 16;
    config.limits_tensors = 1000;
    config.limits_rank = 8;
    config.limits_name_bytes = 256;
    config.limits_message_bytes = 64 * 1024;
    config.limits_manifest_bytes = 1024 * 1024;
    config.limits_frame_bytes = 16 * 1024 * 1024;
    config.limits_version_bytes = UINT64_C(1) << 30;
    config.limits_window = 64;
    return config;
}

#endif
