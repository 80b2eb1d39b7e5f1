/* A trainer as a process: see trainer_process.h. An order is a byte, and answered in order. */
#include "tests/support/trainer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <refit/broadcast.h>

#include "base/clock.h"
#include "tests/support/sample_version.h"
#include "tests/support/test.h"

#define WAIT_MS   50000
#define FILES     16
#define FILL_MOST 65536

/* ---- The process itself: nothing is asserted here */

typedef struct serving {
    refit_publisher *publisher;
    int orders, answers;
    int files[FILL_MOST];
    uint32_t filled;
} serving;

static bool put(const serving *it, const void *bytes, size_t count)
{
    return write(it->answers, bytes, count) == (ssize_t)count;
}

static bool can_open_files(void)
{
    int files[FILES];
    uint32_t count = 0;
    while (count < FILES) {
        files[count] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (files[count] < 0) break;
        count++;
    }
    for (uint32_t i = 0; i < count; i++)
        close(files[i]);
    return count == FILES;
}

static bool answer(const serving *it)
{
    trainer_report report;
    struct rusage used;
    memset(&report, 0, sizeof report);
    refit_stats_init(&report.stats, sizeof report.stats);
    if (refit_publisher_stats(it->publisher, &report.stats, NULL) != REFIT_OK) return false;
    (void)getrusage(RUSAGE_SELF, &used);
    report.cpu_seconds = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                         (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    report.can_open = can_open_files();
    return put(it, &report, sizeof report);
}

static bool fill(serving *it)
{
    for (; it->filled < FILL_MOST; it->filled++) {
        it->files[it->filled] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (it->files[it->filled] < 0) break;
    }
    return put(it, "f", 1);
}

static bool empty(serving *it)
{
    while (it->filled > 0)
        close(it->files[--it->filled]);
    return put(it, "e", 1);
}

static bool free_lowest(serving *it, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        close(it->files[i]);
    memmove(it->files, it->files + count, (it->filled - count) * sizeof it->files[0]);
    it->filled -= count;
    return put(it, "l", 1);
}

static bool obey(serving *it, char order)
{
    if (order == '?') return answer(it);
    if (order >= '0' && order <= '9') return free_lowest(it, (uint32_t)(order - '0'));
    return order == 'f' ? fill(it) : empty(it);
}

static _Noreturn void serve(serving *it, const refit_config *config, uint32_t descriptors)
{
    struct rlimit limit;
    char order, endpoint[128] = "";
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    if (descriptors != 0) limit.rlim_cur = descriptors;
    bool fine =
        setrlimit(RLIMIT_NOFILE, &limit) == 0 &&
        refit_publisher_open(config->broadcast_endpoint, config, &it->publisher, NULL) ==
            REFIT_OK &&
        refit_publisher_declare(it->publisher, sample_tensors(), SAMPLE_TENSORS, NULL) == REFIT_OK;
    if (fine) strncpy(endpoint, refit_publisher_endpoint(it->publisher), sizeof endpoint - 1);
    fine = fine && put(it, endpoint, sizeof endpoint);
    while (fine && read(it->orders, &order, 1) == 1)
        fine = obey(it, order);
    (void)empty(it);
    refit_publisher_close(it->publisher);
    _exit(fine ? 0 : 1);
}

/* ---- What the test calls */

static void get(const trainer_process *trainer, void *room, size_t count)
{
    char *at = room;
    while (count > 0) {
        ssize_t got = read(trainer->answers, at, count);
        if (got <= 0) fail_msg("the trainer's process has ended");
        at += got;
        count -= (size_t)got;
    }
}

void trainer_process_start(trainer_process *trainer, const refit_config *config,
                           uint32_t descriptors)
{
    int orders[2], answers[2];
    (void)signal(SIGPIPE, SIG_IGN);
    memset(trainer, 0, sizeof *trainer);
    assert_int_equal(pipe2(orders, O_CLOEXEC), 0);
    assert_int_equal(pipe2(answers, O_CLOEXEC), 0);
    trainer->pid = fork();
    assert_true(trainer->pid >= 0);
    if (trainer->pid == 0) {
        static serving it;
        it = (serving){.orders = orders[0], .answers = answers[1]};
        close(orders[1]);
        close(answers[0]);
        serve(&it, config, descriptors);
    }
    close(orders[0]);
    close(answers[1]);
    trainer->orders = orders[1];
    trainer->answers = answers[0];
    get(trainer, trainer->endpoint, sizeof trainer->endpoint);
    const char *colon = strrchr(trainer->endpoint, ':');
    if (strncmp(trainer->endpoint, "tcp:", 4) == 0) trainer->port = (uint16_t)atoi(colon + 1);
}

static void order(const trainer_process *trainer, char what)
{
    char done;
    if (write(trainer->orders, &what, 1) != 1) fail_msg("the trainer's process has ended");
    if (what != '?') get(trainer, &done, 1);
}

trainer_report trainer_process_ask(trainer_process *trainer)
{
    trainer_report report;
    order(trainer, '?');
    get(trainer, &report, sizeof report);
    return report;
}

uint64_t trainer_process_await_at(trainer_process *trainer, const char *name, size_t offset,
                                  uint64_t least)
{
    uint64_t value;
    for (int64_t deadline = rft_deadline(WAIT_MS);; (void)poll(NULL, 0, 5)) {
        const trainer_report report = trainer_process_ask(trainer);
        memcpy(&value, (const char *)&report.stats + offset, sizeof value);
        if (value >= least) return value;
        if (rft_ms_until(deadline) == 0)
            fail_msg("%s is %llu, not %llu", name, (unsigned long long)value,
                     (unsigned long long)least);
    }
}

void trainer_process_fill(trainer_process *trainer)
{
    order(trainer, 'f');
}

void trainer_process_free(trainer_process *trainer, uint32_t count)
{
    order(trainer, (char)('0' + count));
}

void trainer_process_empty(trainer_process *trainer)
{
    order(trainer, 'e');
}

bool trainer_process_end(trainer_process *trainer)
{
    int status = -1;
    close(trainer->orders);
    close(trainer->answers);
    return waitpid(trainer->pid, &status, 0) == trainer->pid && status == 0;
}

void trainer_process_kill(trainer_process *trainer)
{
    assert_int_equal(kill(trainer->pid, SIGKILL), 0);
    assert_false(trainer_process_end(trainer));
}
