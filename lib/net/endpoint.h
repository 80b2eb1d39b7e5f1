/*
 * endpoint: an address as text, parsed and checked: tcp, ipc, user and inproc only; and whether it
 * can be reached from beyond this host.
 */
#ifndef RFT_ENDPOINT_H
#define RFT_ENDPOINT_H

#include <stdbool.h>

#include "base/error.h"
#include "trust/trusted_path.h"

#define RFT_ENDPOINT_BYTES 256

typedef enum rft_transport {
    RFT_TRANSPORT_TCP,
    RFT_TRANSPORT_IPC,
    RFT_TRANSPORT_USER, /* an ipc path in the folder of this user's own */
    RFT_TRANSPORT_INPROC,
} rft_transport;

typedef struct rft_endpoint {
    rft_transport transport;
    char text[RFT_ENDPOINT_BYTES]; /* as given */
    const char *rest;              /* in `text`, after "://": host and port, path, or name */
    bool ipv6;                     /* tcp: a literal address in brackets */
    bool open;  /* any free port or name, or all addresses, is meant: to bind only */
    bool named; /* tcp: the loopback interface by its name, which binding alone understands:
                   connecting would ask a resolver for a host of that name */
    bool local; /* it cannot be reached from another host */
} rft_endpoint;

/* REFIT_ERR_INVALID says which part cannot be read. `out->rest` points into `out`: do not copy it.
 */
refit_status rft_endpoint_parse(const char *text, rft_endpoint *out, refit_error *error);

/* To bind, makes the ipc endpoint of one of RFT_TRANSPORT_USER: NAME.sock in the user's own folder,
 * which is made if it is not there; for "*" a name that is free, and the files of such names that
 * dead processes left are removed. Others stay as they are. What rft_own_folder_find answers. */
refit_status rft_endpoint_place(rft_endpoint *endpoint, refit_error *error);

/* To connect, gives the ipc endpoint of user://`name` at the first of the user's own folders in
 * which a process listens. False: a process listens in none, and `out` is not to be used. */
bool rft_endpoint_seek(const char *name, const rft_own_places *places, rft_endpoint *out);

#endif
