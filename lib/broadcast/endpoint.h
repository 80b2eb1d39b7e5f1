/*
 * endpoint: an address as text, taken apart and held against the rules: tcp, ipc and inproc only,
 * and nothing beyond this host without leave.
 */
#ifndef RFT_ENDPOINT_H
#define RFT_ENDPOINT_H

#include <stdbool.h>

#include "base/error.h"

#define RFT_ENDPOINT_BYTES 256

typedef enum rft_transport {
    RFT_TRANSPORT_TCP,
    RFT_TRANSPORT_IPC,
    RFT_TRANSPORT_INPROC,
} rft_transport;

typedef struct rft_endpoint {
    rft_transport transport;
    char text[RFT_ENDPOINT_BYTES]; /* as given */
    const char *rest;              /* in `text`, behind "://": host and port, path, or name */
    bool ipv6;                     /* tcp: a literal address in brackets */
    bool open;  /* tcp: any free port, or all addresses, is meant: to bind only */
    bool named; /* tcp: the loopback interface by its name, which binding alone understands:
                   connecting would ask a resolver for a host of that name */
    bool local; /* it cannot be reached from another host */
} rft_endpoint;

/* REFIT_ERR_INVALID says which part cannot be read. `out->rest` points into `out`: do not copy it.
 */
refit_status rft_endpoint_parse(const char *text, rft_endpoint *out, refit_error *error);

#endif
