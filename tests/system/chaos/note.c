/* Packets of one size on a socket pair: no part of one is ever read or written. */
#include "note.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#define SEND_MS 60000

bool note_send(int line, const chaos_note *note)
{
    for (;;) {
        ssize_t sent = send(line, note, sizeof *note, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == (ssize_t)sizeof *note) return true;
        if (sent < 0 && errno == EINTR) continue;
        struct pollfd item = {.fd = line, .events = POLLOUT};
        if (sent >= 0 || errno != EAGAIN || poll(&item, 1, SEND_MS) == 0) return false;
    }
}

int note_receive(int line, chaos_note *note)
{
    for (;;) {
        ssize_t got = recv(line, note, sizeof *note, MSG_DONTWAIT);
        if (got == (ssize_t)sizeof *note) return 1;
        if (got < 0 && errno == EINTR) continue;
        return got < 0 && errno == EAGAIN ? 0 : -1;
    }
}

bool note_await(int line, chaos_note *note, int timeout_ms)
{
    int got;
    while ((got = note_receive(line, note)) == 0) {
        struct pollfd item = {.fd = line, .events = POLLIN};
        if (poll(&item, 1, timeout_ms) == 0) return false;
    }
    return got > 0;
}
