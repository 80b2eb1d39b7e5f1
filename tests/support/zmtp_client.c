/* ZMTP by hand: see zmtp_client.h. */
#include "tests/support/zmtp_client.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

#define GREETING_BYTES 64

void zmtp_number_id(uint32_t number, unsigned char id[ZMTP_ID_BYTES])
{
    id[0] = 0;
    for (int i = 0; i < 4; i++)
        id[1 + i] = (unsigned char)(number >> (24 - 8 * i));
}

int zmtp_knock(uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EINPROGRESS) {
        return fd;
    }
    close(fd);
    return -1;
}

int zmtp_connect(uint16_t port, int timeout_ms)
{
    int failed = 0;
    socklen_t room = sizeof failed;
    int fd = zmtp_knock(port);
    struct pollfd item = {.fd = fd, .events = POLLOUT};
    if (fd < 0) return -1;
    if (poll(&item, 1, timeout_ms) <= 0 ||
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &room) != 0 || failed != 0) {
        close(fd);
        return -1;
    }
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

void zmtp_say(int fd, const void *bytes, size_t count)
{
    const unsigned char *at = bytes;
    while (count > 0) {
        ssize_t put = send(fd, at, count, MSG_NOSIGNAL);
        if (put <= 0) return;
        at += put;
        count -= (size_t)put;
    }
}

void zmtp_greet(int fd, const char *mechanism, size_t count)
{
    unsigned char greeting[GREETING_BYTES] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0};
    memcpy(greeting + 12, mechanism, strlen(mechanism));
    zmtp_say(fd, greeting, count);
}

static size_t put_property(unsigned char *to, const char *name, const void *value, size_t bytes)
{
    size_t length = strlen(name);
    to[0] = (unsigned char)length;
    memcpy(to + 1, name, length);
    memset(to + 1 + length, 0, 3);
    to[4 + length] = (unsigned char)bytes;
    if (bytes > 0) memcpy(to + 5 + length, value, bytes);
    return 5 + length + bytes;
}

void zmtp_say_ready(int fd, const void *id, size_t id_bytes)
{
    unsigned char command[400];
    size_t count = 2;
    zmtp_greet(fd, "NULL", GREETING_BYTES);
    memcpy(command + count, "\5READY", 6);
    count += 6;
    count += put_property(command + count, "Socket-Type", "DEALER", 6);
    if (id != NULL) count += put_property(command + count, "Identity", id, id_bytes);
    command[0] = 4; /* a short command */
    command[1] = (unsigned char)(count - 2);
    zmtp_say(fd, command, count);
}

static bool hear(int fd, void *room, size_t count, int64_t deadline)
{
    unsigned char *at = room;
    while (count > 0) {
        struct pollfd item = {.fd = fd, .events = POLLIN};
        if (poll(&item, 1, rft_ms_until(deadline)) <= 0) return false;
        ssize_t got = recv(fd, at, count, 0);
        if (got <= 0) return false;
        at += got;
        count -= (size_t)got;
    }
    return true;
}

/* Waits until the other end has said all that belongs to its handshake. False: it hung up, or said
 * nothing in time. */
static bool hear_ready(int fd, int timeout_ms)
{
    unsigned char room[256];
    int64_t deadline = rft_deadline((uint32_t)timeout_ms);
    return hear(fd, room, GREETING_BYTES, deadline) && hear(fd, room, 2, deadline) &&
           room[0] == 4 && hear(fd, room + 2, room[1], deadline) &&
           memcmp(room + 2, "\5READY", 6) == 0;
}

int zmtp_open(uint16_t port, const void *id, size_t id_bytes, int timeout_ms)
{
    int fd = zmtp_connect(port, timeout_ms);
    if (fd < 0) return -1;
    zmtp_say_ready(fd, id, id_bytes);
    if (hear_ready(fd, timeout_ms)) return fd;
    close(fd);
    return -1;
}

bool zmtp_is_hung_up(int fd, int timeout_ms)
{
    char room[4096];
    int64_t deadline = rft_deadline((uint32_t)timeout_ms);
    struct pollfd item = {.fd = fd, .events = POLLIN};
    do {
        if (poll(&item, 1, rft_ms_until(deadline)) <= 0) continue;
        ssize_t got = recv(fd, room, sizeof room, 0);
        if (got == 0 || (got < 0 && errno == ECONNRESET)) return true;
    } while (rft_ms_until(deadline) > 0);
    return false;
}
