/* A child of a fork opens ZAP domains of its own, although another thread of its parent held a
 * lock: while the handler looks at the folder, and while a domain opens. */
#include <stdatomic.h>
#include <stdlib.h>

#include <semaphore.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <zmq.h>

#include <refit/host.h>

#include "base/thread.h"
#include "net/socket.h"
#include "net/zap.h"
#include "tests/support/key_fixture.h"
#include "tests/support/test.h"

#define WAIT_S  50
#define CHILD_S 50u

/* ---- Where a thread is held */

static atomic_bool held_next; /* the next thread that comes by */
static sem_t is_held, may_go;

static void pass(void)
{
    if (!atomic_exchange(&held_next, false)) return;
    (void)sem_post(&is_held);
    (void)sem_wait(&may_go);
}

static void wait_held(void)
{
    struct timespec until;
    assert_int_equal(clock_gettime(CLOCK_REALTIME, &until), 0);
    until.tv_sec += WAIT_S;
    assert_int_equal(sem_timedwait(&is_held, &until), 0);
}

static void *allocate(void *user, size_t bytes)
{
    (void)user;
    pass();
    return malloc(bytes);
}

static void *reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    return realloc(block, bytes);
}

static void release(void *user, void *block)
{
    (void)user;
    free(block);
}

int __real_zmq_bind(void *socket, const char *endpoint);
int __wrap_zmq_bind(void *socket, const char *endpoint);

int __wrap_zmq_bind(void *socket, const char *endpoint)
{
    pass();
    return __real_zmq_bind(socket, endpoint);
}

/* ---- Domains */

typedef struct domain {
    char folder[256];
    void *context;
    rft_zap *zap;
    refit_status status;
} domain;

static void *open_domain(void *user)
{
    domain *it = user;
    it->status = rft_context_acquire(&it->context, NULL);
    if (it->status != REFIT_OK) return NULL;
    it->status = rft_zap_open(it->context, it->folder, &it->zap, NULL);
    if (it->status != REFIT_OK) rft_context_release(it->context);
    return NULL;
}

static void close_domain(domain *it)
{
    assert_ok(it->status);
    rft_zap_close(it->zap);
    rft_context_release(it->context);
}

/* The alarm ends a child that waits without end. */
static _Noreturn void be_a_child(const domain *parents)
{
    domain mine = *parents;
    (void)alarm(CHILD_S);
    (void)open_domain(&mine);
    if (mine.status != REFIT_OK) _exit(1);
    rft_zap_close(mine.zap);
    rft_context_release(mine.context);
    _exit(0);
}

static void fork_a_child(const domain *parents)
{
    int status = -1;
    wait_held();
    pid_t child = fork();
    if (child == 0) be_a_child(parents);
    assert_int_equal(sem_post(&may_go), 0);
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* The folder has changed, so the handler needs memory for what it reads. */
TEST(a_child_forked_while_the_handler_looks_opens_a_domain)
{
    const refit_allocator allocator = {sizeof allocator, allocate, reallocate, release, NULL};
    domain it = {0};
    key_fixture smith = key_fixture_open();
    key_fixture_make(&smith, "w0");
    key_fixture_path(&smith, "allow", it.folder);
    assert_ok(refit_set_allocator(&allocator));
    (void)open_domain(&it);
    assert_ok(it.status);
    atomic_store(&held_next, true);
    key_fixture_allow(&smith, "w0");
    fork_a_child(&it);
    close_domain(&it);
    assert_ok(refit_set_allocator(NULL));
    key_fixture_close(&smith);
}

TEST(a_child_forked_while_a_domain_opens_opens_its_own)
{
    rft_thread thread;
    domain it = {0};
    key_fixture smith = key_fixture_open();
    key_fixture_path(&smith, "allow", it.folder);
    atomic_store(&held_next, true);
    assert_ok(rft_thread_start(&thread, "opener", open_domain, &it, NULL));
    fork_a_child(&it);
    rft_thread_join(thread);
    close_domain(&it);
    key_fixture_close(&smith);
}

static int setup(void **state)
{
    return sem_init(&is_held, 0, 0) != 0 || sem_init(&may_go, 0, 0) != 0;
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    return 77; /* it takes the first thread of a forked child for one of the parent's, and stops */
#elif defined(__SANITIZE_ADDRESS__)
    return 77; /* GCC's allocator keeps a lock that another thread holds at a fork */
#endif
    return test_run_within("zap_fork", setup, NULL);
}
