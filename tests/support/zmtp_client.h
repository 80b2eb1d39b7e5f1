/*
 * zmtp_client: ZMTP 3.0 without keys by hand (RFC 23), for what libzmq's own sockets do not do:
 * stop in the middle, or claim any routing id. Nothing here fails a test by itself.
 */
#ifndef ZMTP_CLIENT_H
#define ZMTP_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZMTP_ID_BYTES 5

/* The id that libzmq makes of this number. */
void zmtp_number_id(uint32_t number, unsigned char id[ZMTP_ID_BYTES]);

/* Begins to connect to the loopback address, and does not wait; -1: it cannot. */
int zmtp_knock(uint16_t port);

/* Connects to the loopback address; -1: not within `timeout_ms`. */
int zmtp_connect(uint16_t port, int timeout_ms);

/* Sends as much as the other end takes; it may hang up in the middle. */
void zmtp_say(int fd, const void *bytes, size_t count);

/* So many bytes of the greeting that names a mechanism; all of it has 64. */
void zmtp_greet(int fd, const char *mechanism, size_t count);

/* Says all that a DEALER says up to the end of its handshake, with this id; NULL: with none. */
void zmtp_say_ready(int fd, const void *id, size_t id_bytes);

/* All of it; -1: it did not come about. */
int zmtp_open(uint16_t port, const void *id, size_t id_bytes, int timeout_ms);

/* Whether the other end hangs up in time. */
bool zmtp_is_hung_up(int fd, int timeout_ms);

#endif
