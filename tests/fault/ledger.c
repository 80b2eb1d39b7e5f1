/*
 * The system calls that the library links against, counted. Only calls from code that is linked
 * into the program come by here; those of libzmq, of the C library and of the sanitizers do not.
 *
 * Any thread calls in, so everything is atomic.
 */
#include "tests/fault/ledger.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "tests/support/descriptors.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

static atomic_uint_fast64_t requests;
static atomic_uint_fast64_t refused_nth; /* 0: none */
static _Atomic(const char *) refused;
static atomic_int_fast64_t mapped; /* bytes */
static int descriptors;            /* at ledger_open */

static bool is_refused(const char *call)
{
    if (atomic_fetch_add(&requests, 1) + 1 != atomic_load(&refused_nth)) return false;
    atomic_store(&refused, call);
    return true;
}

void ledger_refuse(uint64_t nth)
{
    atomic_store(&requests, 0);
    atomic_store(&refused_nth, nth);
    atomic_store(&refused, "");
}

bool ledger_stop(void)
{
    uint64_t nth = atomic_exchange(&refused_nth, 0);
    return nth != 0 && atomic_load(&requests) >= nth;
}

const char *ledger_refused(void)
{
    const char *call = atomic_load(&refused);
    return call == NULL ? "" : call;
}

/* A driver keeps descriptors from its first use to the end of the process. */
static void use_driver(void)
{
    refit_device *device;
    refit_stream_ref stream;
    void *memory;
    if (!test_on_cuda()) return;
    assert_ok(test_device_open("host", &device, NULL));
    assert_ok(refit_memory_alloc(device, 1, &memory, NULL));
    assert_ok(refit_stream_open(device, &stream, NULL));
    assert_ok(refit_stream_close(device, stream, NULL));
    assert_ok(refit_memory_free(device, memory, NULL));
    assert_ok(refit_device_close(device, NULL));
}

void ledger_open(void)
{
    use_driver();
    descriptors = count_descriptors();
    atomic_store(&mapped, 0);
}

void ledger_check(void)
{
    assert_int_equal(atomic_load(&mapped), 0);
    assert_int_equal(count_descriptors(), descriptors);
}

/* ---- The calls */

static int64_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (int64_t)((bytes + page - 1) / page * page);
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    if (is_refused("mmap")) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *memory = __real_mmap(at, bytes, protection, flags, fd, offset);
    /* With MAP_FIXED it takes the place of what was counted before. */
    if (memory != MAP_FAILED && (flags & MAP_FIXED) == 0) {
        atomic_fetch_add(&mapped, whole_pages(bytes));
    }
    return memory;
}

int __real_munmap(void *memory, size_t bytes);
int __wrap_munmap(void *memory, size_t bytes);

int __wrap_munmap(void *memory, size_t bytes)
{
    atomic_fetch_sub(&mapped, whole_pages(bytes));
    return __real_munmap(memory, bytes);
}

/* A call that fails with -1 and errno. */
#define REFUSABLE(call, code, parameters, ...)                                                     \
    int __real_##call parameters;                                                                  \
    int __wrap_##call parameters;                                                                  \
    int __wrap_##call parameters                                                                   \
    {                                                                                              \
        if (!is_refused(#call)) return __real_##call(__VA_ARGS__);                                 \
        errno = (code);                                                                            \
        return -1;                                                                                 \
    }

REFUSABLE(mlock, ENOMEM, (const void *memory, size_t bytes), memory, bytes)
REFUSABLE(memfd_create, EMFILE, (const char *name, unsigned flags), name, flags)
REFUSABLE(flock, ENOLCK, (int fd, int operation), fd, operation)
REFUSABLE(socket, EMFILE, (int domain, int type, int protocol), domain, type, protocol)
REFUSABLE(bind, EACCES, (int fd, const struct sockaddr *at, socklen_t bytes), fd, at, bytes)
REFUSABLE(listen, EADDRINUSE, (int fd, int backlog), fd, backlog)
REFUSABLE(eventfd, EMFILE, (unsigned count, int flags), count, flags)

/* A call that returns its error. */
#define RETURNING(call, code, parameters, ...)                                                     \
    int __real_##call parameters;                                                                  \
    int __wrap_##call parameters;                                                                  \
    int __wrap_##call parameters                                                                   \
    {                                                                                              \
        return is_refused(#call) ? (code) : __real_##call(__VA_ARGS__);                            \
    }

RETURNING(posix_fallocate, ENOSPC, (int fd, off_t offset, off_t bytes), fd, offset, bytes)
RETURNING(pthread_create, EAGAIN,
          (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *), void *user),
          thread, attributes, run, user)
RETURNING(pthread_mutex_init, ENOMEM,
          (pthread_mutex_t * mutex, const pthread_mutexattr_t *attributes), mutex, attributes)
RETURNING(pthread_cond_init, ENOMEM, (pthread_cond_t * cond, const pthread_condattr_t *attributes),
          cond, attributes)
