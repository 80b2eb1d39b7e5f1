/* Where secret keys are while they are read, written and handed to ZeroMQ: in memory that is
 * locked, in no core dump, in no forked child, and wiped before it is given back. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <zmq.h>

#include <refit/broadcast.h>

#include "tests/support/key_fixture.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"
#include "trust/key.h"

#define COUNT 100u

/* Whether the mapping of this address has the flag (of VmFlags in smaps). */
static bool has_flag(const void *address, const char *flag)
{
    char line[512];
    bool inside = false, found = false;
    FILE *maps = fopen("/proc/self/smaps", "re");
    if (maps == NULL) return false;
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            inside = (unsigned long)address >= begin && (unsigned long)address < end;
        if (inside && strncmp(line, "VmFlags:", 8) == 0) found = strstr(line, flag) != NULL;
    }
    fclose(maps);
    return found;
}

static bool is_kept_out(const void *address)
{
    return has_flag(address, " dd") && has_flag(address, " dc");
}

/* ---- What passes through the calls that secrets pass through */

static struct {
    unsigned passed; /* secrets that did */
    unsigned open;   /* of them, those that were in other memory */
    const unsigned char *watched;
    unsigned unwiped;
} seen;

static void note(const void *secret)
{
    seen.passed++;
    seen.open += !is_kept_out(secret);
}

static bool is_secret_file(int fd)
{
    char link[64], path[512];
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t count = readlink(link, path, sizeof path - 1);
    if (count <= 0) return false;
    path[count] = '\0';
    return strstr(path, ".secret") != NULL;
}

ssize_t __real_read(int fd, void *to, size_t count);
ssize_t __real_write(int fd, const void *from, size_t count);
int __real_zmq_setsockopt(void *socket, int option, const void *value, size_t bytes);
int __real_munmap(void *memory, size_t bytes);
ssize_t __wrap_read(int fd, void *to, size_t count);
ssize_t __wrap_write(int fd, const void *from, size_t count);
int __wrap_zmq_setsockopt(void *socket, int option, const void *value, size_t bytes);
int __wrap_munmap(void *memory, size_t bytes);

ssize_t __wrap_read(int fd, void *to, size_t count)
{
    if (is_secret_file(fd)) note(to);
    return __real_read(fd, to, count);
}

ssize_t __wrap_write(int fd, const void *from, size_t count)
{
    if (is_secret_file(fd)) note(from);
    return __real_write(fd, from, count);
}

int __wrap_zmq_setsockopt(void *socket, int option, const void *value, size_t bytes)
{
    if (option == ZMQ_CURVE_SECRETKEY) note(value);
    return __real_zmq_setsockopt(socket, option, value, bytes);
}

int __wrap_munmap(void *memory, size_t bytes)
{
    const unsigned char *begin = memory;
    if (seen.watched > begin && seen.watched < begin + bytes) {
        for (uint32_t i = 0; i < COUNT; i++)
            seen.unwiped += seen.watched[i] != 0;
        seen.watched = NULL;
    }
    return __real_munmap(memory, bytes);
}

static void forget_seen(void)
{
    memset(&seen, 0, sizeof seen);
}

/* ---- The memory */

static bool may_lock(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false; /* they let no memory be locked */
#else
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
    return limit.rlim_cur >= 65536;
#endif
}

TEST(secrets_stay_in_this_process)
{
    void *secret = NULL;
    forget_seen();
    assert_ok(rft_secret_open(COUNT, &secret, NULL));
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(((unsigned char *)secret)[i], 0);
    assert_true(is_kept_out(secret));
    if (may_lock()) assert_true(has_flag(secret, " lo"));
    memset(secret, 7, COUNT);
    seen.watched = secret;
    rft_secret_close(secret, COUNT);
    assert_null(seen.watched);
    assert_int_equal(seen.unwiped, 0);
    rft_secret_close(NULL, COUNT);
}

TEST(without_leave_to_lock_it_goes_on)
{
    struct rlimit before, none;
    assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &before), 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &none), 0);
    void *secret = NULL;
    assert_ok(rft_secret_open(COUNT, &secret, NULL));
    assert_true(is_kept_out(secret));
    rft_secret_close(secret, COUNT);
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

/* The pages before and after it cannot be read, so a read that runs on from other memory ends. */
TEST(its_neighbouring_pages_cannot_be_read)
{
    const long page = sysconf(_SC_PAGESIZE);
    const long places[] = {-1, page};
    void *secret = NULL;
    assert_ok(rft_secret_open(COUNT, &secret, NULL));
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        int status = 0;
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            const volatile unsigned char *at = (unsigned char *)secret + places[i];
            const struct rlimit no_core = {0, 0};
            (void)setrlimit(RLIMIT_CORE, &no_core);
            (void)signal(SIGSEGV, SIG_DFL); /* cmocka would end the test instead */
            _exit(*at & 0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    rft_secret_close(secret, COUNT);
}

/* ---- Keys */

TEST(key_files_are_read_and_written_there)
{
    forget_seen();
    key_fixture smith = key_fixture_open(); /* makes the trainer's */
    key_fixture_admit(&smith, "w0");
    assert_true(seen.passed >= 2);
    assert_int_equal(seen.open, 0);

    refit_config config = quick_config(), own = quick_config();
    refit_publisher *publisher = NULL;
    refit_subscriber *subscriber = NULL;
    key_fixture_equip_trainer(&smith, &config);
    key_fixture_equip_worker(&smith, "w0", &own);
    forget_seen();
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &config, &publisher, NULL));
    assert_true(seen.passed >= 2); /* from the file, to ZeroMQ */
    assert_int_equal(seen.open, 0);
    forget_seen();
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(publisher), &own, &subscriber, NULL));
    assert_true(seen.passed >= 2);
    assert_int_equal(seen.open, 0);
    refit_subscriber_close(subscriber);
    refit_publisher_close(publisher);
    key_fixture_close(&smith);
}

int main(void)
{
    return test_run("secret");
}
