/* A process that has found the port: bytes on TCP, at best those of ZMTP. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "attacker.h"
#include "tests/support/seeded.h"
#include "tests/support/zmtp_client.h"

#define KNOCKS_MOST 24u /* connections at once */
#define KNOCK_MS    10
#define NOTHING     4000u
#define GREETING    64u
/* From where libzmq counts the ids that it gives itself, unless it is kept from that: what a
 * program's rand() gives first. */
#define FIRST_ID     UINT32_C(0x6b8b4567)
#define WORKERS_EVER 64u /* that a trainer may have met when the stranger comes */

static int knock(const attack *what)
{
    char host[64] = "";
    const char *port = strrchr(what->endpoint, ':');
    struct sockaddr_in name = {.sin_family = AF_INET};
    if (port == NULL || port - what->endpoint - 6 >= (ptrdiff_t)sizeof host) return -1;
    memcpy(host, what->endpoint + 6, (size_t)(port - what->endpoint - 6)); /* after tcp:// */
    name.sin_port = htons((uint16_t)strtoul(port + 1, NULL, 10));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool there = fd >= 0 && inet_pton(AF_INET, host, &name.sin_addr) == 1 &&
                 connect(fd, (struct sockaddr *)&name, sizeof name) == 0;
    if (there) (void)fcntl(fd, F_SETFL, O_NONBLOCK); /* it says what the other end takes at once */
    if (there || fd < 0) return fd;
    close(fd);
    return -1;
}

static void say_nothing(int fd, uint64_t *seed)
{
    unsigned char bytes[NOTHING];
    size_t count = 1 + seeded_below(seed, NOTHING);
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(seeded_next(seed) >> 8);
    if (count >= 10 && count % 2 == 0)
        memcpy(bytes, "\xff\0\0\0\0\0\0\0\1\x7f", 10); /* ZMTP begins so */
    zmtp_say(fd, bytes, count);
}

/* Most of them what libzmq would give the next workers, as far as one can guess. */
static void claim_id(int fd, uint64_t *seed)
{
    unsigned char id[ZMTP_ID_BYTES];
    zmtp_number_id(FIRST_ID + (uint32_t)seeded_below(seed, WORKERS_EVER), id);
    if (seeded_below(seed, 4) == 0) id[0] = (unsigned char)(1 + seeded_below(seed, 255));
    zmtp_say_ready(fd, id, sizeof id);
}

static void say_garbage(int fd, uint64_t *seed)
{
    unsigned char message[2 + 60] = {0, 60};
    for (uint32_t i = 2; i < sizeof message; i++)
        message[i] = (unsigned char)(seeded_next(seed) >> 8);
    zmtp_say(fd, message, sizeof message);
}

static void say_parts(int fd)
{
    static const unsigned char part[2 + 8] = {1, 8};
    for (uint32_t i = 0; i < 64; i++)
        zmtp_say(fd, part, sizeof part);
}

static void begin(const attack *what, int fd, uint64_t *seed)
{
    static const char *const mechanisms[] = {"NULL", "CURVE", "PLAIN", "GSSAPI"};
    const char *mechanism = mechanisms[seeded_below(seed, 4)];
    switch ((stranger_manner)what->manner) {
    case STRANGER_SAYS_NOTHING: say_nothing(fd, seed); break;
    case STRANGER_HALF_OPEN: break;
    case STRANGER_HALF_GREETS: zmtp_greet(fd, mechanism, seeded_below(seed, GREETING)); break;
    case STRANGER_GREETS_WRONGLY:
        zmtp_greet(fd, mechanism, GREETING);
        say_nothing(fd, seed);
        break;
    case STRANGER_PLAIN:
    case STRANGER_MUTE:
    case STRANGER_ENDLESS: zmtp_say_ready(fd, NULL, 0); break;
    case STRANGER_CLAIMS_IDS: claim_id(fd, seed); break;
    case STRANGER_MANNERS: break;
    }
}

static void go_on(const attack *what, int fd, uint64_t *seed)
{
    if (what->manner == STRANGER_PLAIN || what->manner == STRANGER_CLAIMS_IDS)
        say_garbage(fd, seed);
    if (what->manner == STRANGER_ENDLESS) say_parts(fd);
}

void stranger_attack(const attack *what)
{
    int fds[KNOCKS_MOST];
    uint64_t seed = what->seed | 1;
    for (uint32_t i = 0; i < KNOCKS_MOST; i++)
        fds[i] = -1;
    for (uint32_t turn = 0; attack_goes_on(what, KNOCK_MS); turn++) {
        int *fd = &fds[turn % KNOCKS_MOST];
        if (*fd >= 0) close(*fd);
        *fd = knock(what);
        if (*fd >= 0) begin(what, *fd, &seed);
        for (uint32_t i = 0; i < KNOCKS_MOST; i++) {
            if (fds[i] >= 0) go_on(what, fds[i], &seed);
        }
    }
    for (uint32_t i = 0; i < KNOCKS_MOST; i++) {
        if (fds[i] >= 0) close(fds[i]);
    }
}
