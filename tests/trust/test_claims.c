/* Peers that claim the ids which ZeroMQ gives to peers without one: a peer that is given a claimed
 * id makes ZeroMQ abort. The claims here are those that would hit if the counter began where rand()
 * begins in every process that has seeded nothing. */
#include <stdlib.h>

#include <unistd.h>

#include <zmq.h>

#include "base/clock.h"
#include "net/socket.h"
#include "tests/support/key_fixture.h"
#include "tests/support/quick_config.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/test.h"
#include "tests/support/trainer_process.h"
#include "tests/support/zmtp_client.h"

#define WAIT_MS   50000
#define FIRST     0x6b8b4567u /* what generate_random() of libzmq makes of rand()'s first two */
#define CLAIMS    32u
#define ANONYMOUS 64u

static void wait_workers(trainer_process *trainer, uint64_t count)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(trainer).stats.workers != count && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    assert_int_equal(trainer_process_ask(trainer).stats.workers, count);
}

static void join_a_worker(trainer_process *trainer, const refit_config *config)
{
    rollout_thread member;
    rollouts_start(&member, trainer->endpoint, config, ROLLOUT_ACCEPT);
    wait_workers(trainer, 1);
    rollouts_stop(&member);
}

TEST(claims_of_the_first_numbers_end_nothing)
{
    trainer_process trainer;
    int fds[CLAIMS + ANONYMOUS];
    unsigned char id[ZMTP_ID_BYTES];
    refit_config config = quick_config();
    config.limits_workers = 256;
    srand(1); /* as in a process that has seeded nothing */
    trainer_process_start(&trainer, &config, 0);
    for (uint32_t i = 0; i < CLAIMS + ANONYMOUS; i++) {
        zmtp_number_id(FIRST + i, id);
        fds[i] = zmtp_open(trainer.port, i < CLAIMS ? id : NULL, sizeof id, WAIT_MS);
        assert_true(fds[i] >= 0);
    }
    join_a_worker(&trainer, &config);
    for (uint32_t i = 0; i < CLAIMS + ANONYMOUS; i++)
        close(fds[i]);
    assert_true(trainer_process_end(&trainer));
}

/* ---- With keys, by libzmq's own sockets */

static void *connect_with_key(void *context, const trainer_process *trainer,
                              const refit_config *config, uint32_t number)
{
    unsigned char id[ZMTP_ID_BYTES];
    const int none = 0;
    void *socket = zmq_socket(context, ZMQ_DEALER);
    assert_non_null(socket);
    zmtp_number_id(number, id);
    if (number != 0) assert_int_equal(zmq_setsockopt(socket, ZMQ_ROUTING_ID, id, sizeof id), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none), 0);
    assert_ok(rft_curve_join(socket, config, NULL));
    assert_int_equal(zmq_connect(socket, trainer->endpoint), 0);
    return socket;
}

static void wait_unclaimed(trainer_process *trainer, uint64_t count)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(trainer).stats.connections_unclaimed < count &&
           rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    assert_true(trainer_process_ask(trainer).stats.connections_unclaimed >= count);
}

TEST(claims_by_a_worker_with_a_key_end_nothing)
{
    trainer_process trainer;
    void *context = NULL, *sockets[CLAIMS + ANONYMOUS];
    refit_config config = quick_config(), own = quick_config();
    key_fixture smith = key_fixture_open();
    key_fixture_admit(&smith, "w0");
    key_fixture_equip_trainer(&smith, &config);
    key_fixture_equip_worker(&smith, "w0", &own);
    config.limits_workers = 256;
    srand(1); /* as in a process that has seeded nothing */
    trainer_process_start(&trainer, &config, 0);
    assert_ok(rft_context_acquire(&context, NULL));
    for (uint32_t i = 0; i < CLAIMS; i++)
        sockets[i] = connect_with_key(context, &trainer, &own, FIRST + i);
    wait_unclaimed(&trainer, CLAIMS);
    for (uint32_t i = CLAIMS; i < CLAIMS + ANONYMOUS; i++)
        sockets[i] = connect_with_key(context, &trainer, &own, 0);
    wait_unclaimed(&trainer, CLAIMS + ANONYMOUS);
    join_a_worker(&trainer, &own);
    for (uint32_t i = 0; i < CLAIMS + ANONYMOUS; i++)
        zmq_close(sockets[i]);
    rft_context_release(context);
    assert_true(trainer_process_end(&trainer));
    key_fixture_close(&smith);
}

/* ---- What else the answer rests on */

TEST(an_old_protocol_is_refused)
{
    static const unsigned char old[] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 5, 0, 0};
    trainer_process trainer;
    refit_config config = quick_config();
    trainer_process_start(&trainer, &config, 0);
    int fd = zmtp_connect(trainer.port, WAIT_MS);
    assert_true(fd >= 0);
    zmtp_say(fd, old, sizeof old);
    assert_true(zmtp_is_hung_up(fd, WAIT_MS));
    assert_int_equal(trainer_process_ask(&trainer).stats.connections_ended, 0);
    close(fd);
    assert_true(trainer_process_end(&trainer));
}

TEST(the_series_of_the_process_goes_on_where_it_was)
{
    void *context = NULL;
    srand(7);
    int first = rand(), second = rand();
    srand(7);
    assert_int_equal(rand(), first);
    assert_ok(rft_context_acquire(&context, NULL));
    void *socket = rft_context_router(context);
    assert_non_null(socket);
    assert_int_equal(rand(), second);
    zmq_close(socket);
    rft_context_release(context);
}

int main(void)
{
    return test_run("claims");
}
