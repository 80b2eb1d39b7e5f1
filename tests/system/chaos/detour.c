/* The C library's connect a second time, which libzmq finds first. All of 127.0.0.0/8 is this
 * machine: a quarter of it for each rank. */
#include "detour.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define QUARTER 22 /* bits of the address within one */

static struct in_addr home;
static uint16_t leads[RANKS_MOST];

struct in_addr detour_address(struct in_addr run, uint32_t rank)
{
    uint32_t all = ntohl(run.s_addr);
    uint32_t quarter = ((all >> QUARTER) + rank) & (RANKS_MOST - 1);
    uint32_t within = all & ((1u << QUARTER) - 1);
    return (struct in_addr){htonl((INADDR_LOOPBACK & 0xff000000u) | quarter << QUARTER | within)};
}

void detour_take(struct in_addr run, const uint16_t ports[RANKS_MOST])
{
    home = run;
    memcpy(leads, ports, sizeof leads);
}

static void lead(struct sockaddr_in *to)
{
    for (uint32_t i = 1; i < RANKS_MOST; i++) {
        if (leads[i] == 0 || to->sin_addr.s_addr != detour_address(home, i).s_addr) continue;
        to->sin_addr = home;
        to->sin_port = htons(leads[i]);
        return;
    }
}

/* By another name than the headers have, which give it a union of glibc's for an address. */
__attribute__((visibility("default"))) int detour_connect(int fd, const struct sockaddr *address,
                                                          socklen_t bytes) __asm__("connect");

int detour_connect(int fd, const struct sockaddr *address, socklen_t bytes)
{
    struct sockaddr_in to;
    if (address->sa_family != AF_INET || bytes < sizeof to)
        return (int)syscall(SYS_connect, fd, address, bytes);
    memcpy(&to, address, sizeof to);
    lead(&to);
    return (int)syscall(SYS_connect, fd, &to, sizeof to);
}
