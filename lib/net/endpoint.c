/*
 * Reading endpoints. Names are not resolved here: a host that is neither a loopback address nor
 * "localhost" counts as reachable from beyond, so a change in a resolver cannot let other
 * hosts in. Wildcards are beyond, too.
 */
#include "net/endpoint.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>

#include "base/random.h"
#include "base/text.h"
#include "net/ipc.h"
#include "trust/key.h"

#define LOOPBACK          "lo"
#define LOCK_SUFFIX_BYTES 8 /* room for ".lock" after an ipc path */
#define SOCKET_SUFFIX     ".sock"
#define ANY_PREFIX        "any-" /* of the names that a publisher is given for "*" */
#define PATH_ROOM         (sizeof((struct sockaddr_un *)NULL)->sun_path - LOCK_SUFFIX_BYTES)

_Static_assert(RFT_OWN_FOLDER_BYTES <= PATH_ROOM, "the own folder leaves a socket no room");

static const char *text_after(const char *text, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) == 0 ? text + length : NULL;
}

static bool host_is(const char *host, size_t length, const char *name)
{
    return strlen(name) == length && strncmp(host, name, length) == 0;
}

static bool host_is_local(const char *host, size_t length)
{
    static const char *const names[] = {"localhost", LOOPBACK, "[::1]"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (host_is(host, length, names[i])) return true;
    }
    char text[INET_ADDRSTRLEN];
    struct in_addr address;
    if (length >= sizeof text) return false;
    memcpy(text, host, length);
    text[length] = '\0';
    return inet_pton(AF_INET, text, &address) == 1 && ntohl(address.s_addr) >> 24 == 127;
}

/* Any free port is written as 0 or "*". */
static bool port_read(const char *port, uint32_t *out)
{
    *out = 0;
    if (strcmp(port, "*") == 0) return true;
    uint32_t number = 0;
    for (const char *digit = port; *digit != '\0'; digit++) {
        if (*digit < '0' || *digit > '9' || number > 6553) return false;
        number = number * 10 + (uint32_t)(*digit - '0');
    }
    *out = number;
    return *port != '\0' && number <= 65535;
}

static refit_status tcp_parse(rft_endpoint *endpoint, refit_error *error)
{
    const char *colon = strrchr(endpoint->rest, ':');
    uint32_t port = 0;
    RFT_REFUSE_IF(colon == NULL || colon == endpoint->rest || !port_read(colon + 1, &port), error,
                  REFIT_ERR_INVALID,
                  "endpoint \"%s\" needs a host and a port, as in tcp://127.0.0.1:5555",
                  endpoint->text);
    size_t length = (size_t)(colon - endpoint->rest);
    endpoint->ipv6 = endpoint->rest[0] == '[';
    RFT_REFUSE_IF(endpoint->ipv6 ? colon[-1] != ']' : memchr(endpoint->rest, ':', length) != NULL,
                  error, REFIT_ERR_INVALID,
                  "endpoint \"%s\" has more than one colon: an IPv6 address stands in brackets",
                  endpoint->text);
    RFT_REFUSE_IF(memchr(endpoint->rest, ' ', length) != NULL, error, REFIT_ERR_INVALID,
                  "endpoint \"%s\" has a space in its host: leave it out", endpoint->text);
    endpoint->local = host_is_local(endpoint->rest, length);
    endpoint->named = host_is(endpoint->rest, length, LOOPBACK);
    endpoint->open = port == 0 || endpoint->rest[0] == '*';
    return REFIT_OK;
}

static refit_status ipc_parse(rft_endpoint *endpoint, refit_error *error)
{
    const size_t room = PATH_ROOM;
    RFT_REFUSE_IF(endpoint->rest[0] == '@' || endpoint->rest[0] == '*', error, REFIT_ERR_INVALID,
                  "endpoint \"%s\" has no path in the file system, so nothing would guard it: "
                  "name a socket file, as in ipc:///run/refit.sock",
                  endpoint->text);
    RFT_REFUSE_IF(strlen(endpoint->rest) >= room, error, REFIT_ERR_INVALID,
                  "the path of endpoint \"%s\" is longer than %zu bytes: name a shorter one",
                  endpoint->text, room - 1);
    endpoint->local = true;
    return REFIT_OK;
}

static refit_status user_parse(rft_endpoint *endpoint, refit_error *error)
{
    endpoint->open = strcmp(endpoint->rest, "*") == 0;
    endpoint->local = true;
    RFT_REFUSE_IF(
        !endpoint->open && !rft_key_name_is_valid(endpoint->rest), error, REFIT_ERR_INVALID,
        "endpoint \"%s\" is not a name of at most %d letters, digits, '.', '_' and '-', not "
        "first '.' or '-', as in user://refit",
        endpoint->text, RFT_KEY_NAME_BYTES - 1);
    return REFIT_OK;
}

static refit_status rest_parse(rft_endpoint *endpoint, refit_error *error)
{
    size_t length = strlen(endpoint->rest);
    RFT_REFUSE_IF(length == 0, error, REFIT_ERR_INVALID, "endpoint \"%s\" names nothing after ://",
                  endpoint->text);
    RFT_REFUSE_IF(
        endpoint->rest[0] == ' ' || endpoint->rest[length - 1] == ' ', error, REFIT_ERR_INVALID,
        "endpoint \"%s\" begins or ends with a space after ://: leave it out", endpoint->text);
    if (endpoint->transport == RFT_TRANSPORT_TCP) return tcp_parse(endpoint, error);
    if (endpoint->transport == RFT_TRANSPORT_IPC) return ipc_parse(endpoint, error);
    if (endpoint->transport == RFT_TRANSPORT_USER) return user_parse(endpoint, error);
    endpoint->local = true;
    return REFIT_OK;
}

refit_status rft_endpoint_parse(const char *text, rft_endpoint *out, refit_error *error)
{
    static const char *const schemes[] = {
        [RFT_TRANSPORT_TCP] = "tcp://",
        [RFT_TRANSPORT_IPC] = "ipc://",
        [RFT_TRANSPORT_USER] = "user://",
        [RFT_TRANSPORT_INPROC] = "inproc://",
    };
    RFT_REFUSE_IF(strlen(text) >= sizeof out->text, error, REFIT_ERR_INVALID,
                  "the endpoint is longer than %zu bytes", sizeof out->text - 1);
    RFT_REFUSE_IF(!rft_text_is_clean(text, strlen(text)), error, REFIT_ERR_INVALID,
                  "endpoint \"%s\" has control characters or is not UTF-8", text);
    memset(out, 0, sizeof *out);
    strcpy(out->text, text);
    for (uint32_t i = 0; i < sizeof schemes / sizeof schemes[0]; i++) {
        out->rest = text_after(out->text, schemes[i]);
        out->transport = (rft_transport)i;
        if (out->rest != NULL) return rest_parse(out, error);
    }
    return rft_fail(error, REFIT_ERR_INVALID,
                    "endpoint \"%s\" is none of user://NAME, ipc://PATH, tcp://HOST:PORT and "
                    "inproc://NAME",
                    text);
}

/* One that no other process would choose. */
static refit_status make_name(char name[RFT_KEY_NAME_BYTES], refit_error *error)
{
    uint64_t unique;
    RFT_TRY(rft_random_u64(&unique, error));
    (void)snprintf(name, RFT_KEY_NAME_BYTES, ANY_PREFIX "%016" PRIx64, unique);
    return REFIT_OK;
}

/* REFIT_ERR_INVALID: the path is too long for a socket. */
static refit_status place_in(const char *folder, const char *name, rft_endpoint *out,
                             refit_error *error)
{
    char text[RFT_OWN_FOLDER_BYTES + RFT_KEY_NAME_BYTES + 16];
    (void)snprintf(text, sizeof text, "ipc://%s/%s" SOCKET_SUFFIX, folder, name);
    return rft_endpoint_parse(text, out, error);
}

refit_status rft_endpoint_place(rft_endpoint *endpoint, refit_error *error)
{
    char folder[RFT_OWN_FOLDER_BYTES], name[RFT_KEY_NAME_BYTES];
    bool any = endpoint->open;
    if (endpoint->transport != RFT_TRANSPORT_USER) return REFIT_OK;
    if (any)
        RFT_TRY(make_name(name, error));
    else
        strcpy(name, endpoint->rest); /* its length was checked */
    RFT_TRY(rft_own_folder_find(1 + strlen(name) + strlen(SOCKET_SUFFIX), folder, error));
    if (any) rft_ipc_sweep(folder, ANY_PREFIX);
    return place_in(folder, name, endpoint, error);
}

bool rft_endpoint_seek(const char *name, const rft_own_places *places, rft_endpoint *out)
{
    for (uint32_t i = 0; i < places->count; i++) {
        if (rft_own_places_has(places, i) &&
            place_in(places->paths[i], name, out, NULL) == REFIT_OK &&
            rft_ipc_is_listening(out->rest))
            return true;
    }
    return false;
}
