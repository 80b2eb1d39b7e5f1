/*
 * Keys as socket options. A socket has one mechanism: with CURVE it talks to no peer without.
 *
 * A secret is in memory of secret.h until ZeroMQ has its copy.
 */
#include "net/curve.h"

#include <fcntl.h>
#include <string.h>

#include <refit/keys.h>

#include <zmq.h>

#include "trust/key_file.h"
#include "trust/secret.h"

/* ZeroMQ 4.3 knows it in every build, but its header names it to some only. One that does not know
 * it refuses it, and so does rft_curve_serve. */
#if !defined(ZMQ_ZAP_ENFORCE_DOMAIN)
#define ZMQ_ZAP_ENFORCE_DOMAIN 93
#endif

static refit_status check_curve(refit_error *error)
{
    RFT_REFUSE_IF(zmq_has("curve") != 1, error, REFIT_ERR_UNSUPPORTED,
                  "the ZeroMQ here was built without CURVE, so there are no keys: install a libzmq "
                  "with libsodium");
    return REFIT_OK;
}

static refit_status fail_zmq(const char *what, int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "%s: %s", what, zmq_strerror(code));
}

refit_status rft_curve_make_pair(rft_key *public_key, rft_key *secret_key, refit_error *error)
{
    char public_text[RFT_KEY_TEXT];
    void *secret_text = NULL;
    RFT_TRY(check_curve(error));
    RFT_TRY(rft_secret_open(RFT_KEY_TEXT, &secret_text, error));
    bool made = zmq_curve_keypair(public_text, secret_text) == 0 &&
                rft_key_parse(public_text, RFT_KEY_CHARS, public_key) &&
                rft_key_parse(secret_text, RFT_KEY_CHARS, secret_key);
    int code = zmq_errno();
    rft_secret_close(secret_text, RFT_KEY_TEXT);
    return made ? REFIT_OK : fail_zmq("ZeroMQ made no key pair", code, error);
}

static refit_status read_key(const char *path, rft_key_half half, rft_key *out, refit_error *error)
{
    return rft_key_file_read(AT_FDCWD, path, half, out, error);
}

static bool set_key(void *socket, int option, const rft_key *key)
{
    return zmq_setsockopt(socket, option, key->bytes, sizeof key->bytes) == 0;
}

static refit_status serve_with(void *socket, const refit_config *config, const char *domain,
                               rft_key *secret, refit_error *error)
{
    const int on = 1;
    RFT_TRY(read_key(config->security_key, RFT_KEY_SECRET, secret, error));
    /* Both: a domain that is not enforced, and an enforced one that is empty, let everybody in. */
    bool set = zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, domain, strlen(domain)) == 0 &&
               zmq_setsockopt(socket, ZMQ_ZAP_ENFORCE_DOMAIN, &on, sizeof on) == 0 &&
               zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &on, sizeof on) == 0 &&
               set_key(socket, ZMQ_CURVE_SECRETKEY, secret);
    return set ? REFIT_OK : fail_zmq("the trainer's key could not be used", zmq_errno(), error);
}

refit_status rft_curve_serve(void *socket, const refit_config *config, const char *domain,
                             refit_error *error)
{
    void *secret = NULL;
    RFT_TRY(check_curve(error));
    RFT_TRY(rft_secret_open(sizeof(rft_key), &secret, error));
    refit_status status = serve_with(socket, config, domain, secret, error);
    rft_secret_close(secret, sizeof(rft_key));
    return status;
}

typedef struct own_pair {
    rft_key secret;
    rft_key open; /* its public half */
    char secret_text[RFT_KEY_TEXT];
    char open_text[RFT_KEY_TEXT];
} own_pair;

/* The public half follows from the secret one. */
static bool complete_pair(own_pair *own)
{
    rft_key_print(&own->secret, own->secret_text);
    return zmq_curve_public(own->open_text, own->secret_text) == 0 &&
           rft_key_parse(own->open_text, RFT_KEY_CHARS, &own->open);
}

static refit_status join_with(void *socket, const refit_config *config, own_pair *own,
                              refit_error *error)
{
    rft_key server;
    RFT_TRY(read_key(config->security_server_key, RFT_KEY_PUBLIC, &server, error));
    RFT_TRY(read_key(config->security_key, RFT_KEY_SECRET, &own->secret, error));
    bool set = complete_pair(own) && set_key(socket, ZMQ_CURVE_SERVERKEY, &server) &&
               set_key(socket, ZMQ_CURVE_PUBLICKEY, &own->open) &&
               set_key(socket, ZMQ_CURVE_SECRETKEY, &own->secret);
    return set ? REFIT_OK : fail_zmq("the worker's key could not be used", zmq_errno(), error);
}

refit_status rft_curve_join(void *socket, const refit_config *config, refit_error *error)
{
    void *own = NULL;
    RFT_TRY(check_curve(error));
    RFT_REFUSE_IF(config->security_server_key[0] == '\0', error, REFIT_ERR_CONFIG,
                  "security.key is set but security.server_key is not: a worker with keys needs "
                  "the trainer's public one");
    RFT_TRY(rft_secret_open(sizeof(own_pair), &own, error));
    refit_status status = join_with(socket, config, own, error);
    rft_secret_close(own, sizeof(own_pair));
    return status;
}

/* ---- Pairs as files */

refit_status refit_keys_generate(const char *folder, const char *name, int replace,
                                 refit_error *error)
{
    rft_key public_key;
    void *secret_key = NULL;
    RFT_REFUSE_IF(folder == NULL || name == NULL || folder[0] == '\0', error, REFIT_ERR_INVALID,
                  "keys need a folder and a name");
    RFT_TRY(rft_secret_open(sizeof(rft_key), &secret_key, error));
    refit_status status = rft_curve_make_pair(&public_key, secret_key, error);
    if (status == REFIT_OK)
        status = rft_key_files_write(folder, name, &public_key, secret_key, replace != 0, error);
    rft_secret_close(secret_key, sizeof(rft_key));
    return status;
}
