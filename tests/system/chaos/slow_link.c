/* By the commands that an administrator would use. */
#include "slow_link.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_rate(const char *rate)
{
    return rate[0] != '\0' && strlen(rate) < 16 && strspn(rate, "0123456789kmgbit") == strlen(rate);
}

/* $1: the namespace; $2: this end's address; $3: the other's; $4: the rate. */
static const char script[] =
    "exec >/dev/null 2>&1; set -e\n"
    "ip netns add $1\n"
    "ip link add $1 type veth peer name eth0 netns $1\n"
    "ip addr add $2/30 dev $1; ip link set $1 up\n"
    "ip -n $1 addr add $3/30 dev eth0; ip -n $1 link set eth0 up; ip -n $1 link set lo up\n"
    "tc qdisc add dev $1 root tbf rate $4 burst 64k latency 100ms\n"
    "tc -n $1 qdisc add dev eth0 root tbf rate $4 burst 64k latency 100ms\n";

bool slow_link_open(slow_link *link, const char *rate)
{
    char command[sizeof script + 128], other[32];
    unsigned self = (unsigned)getpid();
    memset(link, 0, sizeof *link);
    if (geteuid() != 0 || !is_rate(rate)) return false;
    snprintf(link->space, sizeof link->space, "rftc%x", self); /* 15 letters at most */
    unsigned net[] = {192 + (self >> 14 & 0x3f), self >> 6 & 0xff, (self & 0x3f) * 4};
    snprintf(link->address, sizeof link->address, "10.%u.%u.%u", net[0], net[1], net[2] + 1);
    snprintf(other, sizeof other, "10.%u.%u.%u", net[0], net[1], net[2] + 2);
    snprintf(command, sizeof command, "set -- %s %s %s %s; %s", link->space, link->address, other,
             rate, script);
    if (system(command) == 0) return true;
    slow_link_close(link);
    return false;
}

void slow_link_close(slow_link *link)
{
    char command[128];
    if (link->space[0] == '\0') return;
    snprintf(command, sizeof command, "exec >/dev/null 2>&1; ip link del %s; ip netns del %s; true",
             link->space, link->space);
    if (system(command) != 0) fprintf(stderr, "the namespace %s is left\n", link->space);
    link->space[0] = '\0';
}

bool slow_link_enter(const slow_link *link)
{
    char path[64];
    snprintf(path, sizeof path, "/run/netns/%s", link->space);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0) return false;
    bool entered = setns(space, CLONE_NEWNET) == 0;
    close(space);
    return entered;
}
