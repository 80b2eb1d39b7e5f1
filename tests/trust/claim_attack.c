/*
 * The attack of test_claims without knowing the counter: for as long as is asked, connections that
 * claim ids at random and are held, and connections without an id, as many as the trainer takes.
 * A worker that has joined stays meanwhile.
 *
 *     claim_attack SECONDS [keys]
 *
 * With `keys`, the attacker has a worker's key. Prints what it did and the time that a hit would
 * take on average: the numbers there are, by the peers that stood at once and by handshakes a
 * second, both once the burst was used up. Fails if the trainer ended or the worker was lost.
 */
#include <stdio.h>
#include <stdlib.h>

#include <unistd.h>

#include <zmq.h>

#include "base/clock.h"
#include "net/socket.h"
#include "tests/support/crew.h"
#include "tests/support/locksmith.h"
#include "tests/support/quick_config.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "tests/support/trainer_process.h"
#include "tests/support/zmtp_client.h"

#define TRY_MS  1000
#define HELD    512u
#define WAIT_MS 50000

static int seconds = 5;
static bool with_keys;

typedef struct attack {
    trainer_process trainer;
    locksmith smith;
    refit_config own;
    void *context;
    uint64_t seed;
    uint64_t claims, anonymous, refused;
    uint64_t standing_most;
    uint64_t late, late_since;          /* handshakes in the burst, and when that was over */
    uint64_t standing_late, late_looks; /* summed up since then */
    int plain[HELD];
    void *sealed[HELD];
} attack;

/* ---- One connection */

static bool open_plain(attack *it, uint32_t place, const unsigned char *id)
{
    if (it->plain[place] > 0) close(it->plain[place]);
    it->plain[place] = zmtp_open(it->trainer.port, id, id == NULL ? 0 : ZMTP_ID_BYTES, TRY_MS);
    return it->plain[place] >= 0;
}

static bool hear_success(void *monitor)
{
    uint16_t event = 0;
    uint32_t value;
    int64_t deadline = rft_deadline(TRY_MS);
    zmq_pollitem_t item = {.socket = monitor, .events = ZMQ_POLLIN};
    while (event != ZMQ_EVENT_HANDSHAKE_SUCCEEDED && rft_ms_until(deadline) > 0) {
        (void)zmq_poll(&item, 1, rft_ms_until(deadline));
        (void)rft_monitor_read(monitor, &event, &value);
    }
    return event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
}

static bool open_sealed(attack *it, uint32_t place, const unsigned char *id)
{
    void *monitor = NULL;
    const int none = 0;
    if (it->sealed[place] != NULL) zmq_close(it->sealed[place]);
    void *socket = it->sealed[place] = zmq_socket(it->context, ZMQ_DEALER);
    assert_non_null(socket);
    if (id != NULL) (void)zmq_setsockopt(socket, ZMQ_ROUTING_ID, id, ZMTP_ID_BYTES);
    (void)zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none);
    assert_ok(rft_curve_join(socket, &it->own, NULL));
    assert_ok(rft_monitor_open(it->context, socket, ZMQ_EVENT_HANDSHAKE_SUCCEEDED, &monitor, NULL));
    assert_int_equal(zmq_connect(socket, it->trainer.endpoint), 0);
    bool done = hear_success(monitor);
    rft_monitor_close(monitor, socket);
    return done;
}

static void try_one(attack *it, uint64_t number)
{
    unsigned char id[ZMTP_ID_BYTES];
    bool claims = number % 2 == 0;
    zmtp_number_id((uint32_t)seeded_next(&it->seed), id);
    uint32_t place = (uint32_t)(number % HELD);
    bool done = with_keys ? open_sealed(it, place, claims ? id : NULL)
                          : open_plain(it, place, claims ? id : NULL);
    it->refused += !done;
    it->claims += done && claims;
    it->anonymous += done && !claims;
}

/* ---- All of it */

static void look(attack *it)
{
    trainer_report report = trainer_process_ask(&it->trainer);
    uint64_t standing = report.stats.workers + report.stats.connections_unclaimed;
    if (standing > it->standing_most) it->standing_most = standing;
    if (report.stats.connections_held_off > 0 && it->late_since == 0) {
        it->late_since = (uint64_t)rft_now();
        it->late = it->claims + it->anonymous;
    }
    it->standing_late += it->late_since == 0 ? 0 : standing;
    it->late_looks += it->late_since != 0;
    assert_int_equal(report.stats.workers, 1);
}

static void say_what_happened(const attack *it, int64_t began)
{
    const double numbers = 4294967296.0;
    uint64_t done = it->claims + it->anonymous;
    printf("claim_attack: %s, %.0f s: %llu claims, %llu without an id, %llu refused; at most %llu "
           "peers at once\n",
           with_keys ? "with a worker's key" : "without keys", rft_seconds(rft_now() - began),
           (unsigned long long)it->claims, (unsigned long long)it->anonymous,
           (unsigned long long)it->refused, (unsigned long long)it->standing_most);
    if (it->late_looks == 0 || done == it->late) return;
    double rate = (double)(done - it->late) / rft_seconds(rft_now() - (int64_t)it->late_since);
    double standing = (double)it->standing_late / (double)it->late_looks;
    printf("claim_attack: once the burst was used up %.2f handshakes/s and %.0f peers at once: a "
           "hit takes %.0f days\n",
           rate, standing, numbers / standing / rate / 86400);
}

static void attack_open(attack *it)
{
    refit_config config = quick_config();
    it->own = quick_config();
    it->seed = (uint64_t)rft_now() | 1;
    config.limits_workers = 256;
    if (with_keys) {
        it->smith = locksmith_open();
        locksmith_admit(&it->smith, "w0");
        locksmith_equip_trainer(&it->smith, &config);
        locksmith_equip_worker(&it->smith, "w0", &it->own);
    }
    trainer_process_start(&it->trainer, &config, 0);
    assert_ok(rft_context_acquire(&it->context, NULL));
}

static void attack_close(attack *it)
{
    for (uint32_t i = 0; i < HELD; i++) {
        if (it->plain[i] > 0) close(it->plain[i]);
        if (it->sealed[i] != NULL) zmq_close(it->sealed[i]);
    }
    rft_context_release(it->context);
    assert_true(trainer_process_end(&it->trainer));
    if (with_keys) locksmith_close(&it->smith);
}

static void wait_for_the_worker(attack *it)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(&it->trainer).stats.workers == 0 && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
}

static void claims_at_random_end_nothing(void **state)
{
    static attack it;
    crew_member member;
    attack_open(&it);
    crew_start(&member, it.trainer.endpoint, &it.own, CREW_ACCEPT);
    wait_for_the_worker(&it);
    int64_t began = rft_now();
    for (uint64_t number = 0; rft_seconds(rft_now() - began) < seconds; number++) {
        try_one(&it, number);
        if (number % 64 == 0 || it.late_since != 0) look(&it);
    }
    look(&it);
    say_what_happened(&it, began);
    crew_stop(&member);
    attack_close(&it);
}

int main(int argc, char **argv)
{
    if (argc > 1) seconds = atoi(argv[1]);
    with_keys = argc > 2 && strcmp(argv[2], "keys") == 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(claims_at_random_end_nothing)};
    return cmocka_run_group_tests_name("claim_attack", tests, NULL, NULL);
}
