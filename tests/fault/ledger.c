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

/* ---- The calls. Each has the prototype of its namesake. */

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

int __real_mlock(const void *memory, size_t bytes);
int __wrap_mlock(const void *memory, size_t bytes);

int __wrap_mlock(const void *memory, size_t bytes)
{
    if (is_refused("mlock")) {
        errno = ENOMEM;
        return -1;
    }
    return __real_mlock(memory, bytes);
}

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);

int __wrap_memfd_create(const char *name, unsigned flags)
{
    if (is_refused("memfd_create")) {
        errno = EMFILE;
        return -1;
    }
    return __real_memfd_create(name, flags);
}

int __real_posix_fallocate(int fd, off_t offset, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes);

int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes)
{
    if (is_refused("posix_fallocate")) return ENOSPC;
    return __real_posix_fallocate(fd, offset, bytes);
}

int __real_flock(int fd, int operation);
int __wrap_flock(int fd, int operation);

int __wrap_flock(int fd, int operation)
{
    if (is_refused("flock")) {
        errno = ENOLCK;
        return -1;
    }
    return __real_flock(fd, operation);
}

int __real_socket(int domain, int type, int protocol);
int __wrap_socket(int domain, int type, int protocol);

int __wrap_socket(int domain, int type, int protocol)
{
    if (is_refused("socket")) {
        errno = EMFILE;
        return -1;
    }
    return __real_socket(domain, type, protocol);
}

int __real_bind(int fd, const struct sockaddr *address, socklen_t bytes);
int __wrap_bind(int fd, const struct sockaddr *address, socklen_t bytes);

int __wrap_bind(int fd, const struct sockaddr *address, socklen_t bytes)
{
    if (is_refused("bind")) {
        errno = EACCES;
        return -1;
    }
    return __real_bind(fd, address, bytes);
}

int __real_listen(int fd, int backlog);
int __wrap_listen(int fd, int backlog);

int __wrap_listen(int fd, int backlog)
{
    if (is_refused("listen")) {
        errno = EADDRINUSE;
        return -1;
    }
    return __real_listen(fd, backlog);
}

int __real_eventfd(unsigned int count, int flags);
int __wrap_eventfd(unsigned int count, int flags);

int __wrap_eventfd(unsigned int count, int flags)
{
    if (is_refused("eventfd")) {
        errno = EMFILE;
        return -1;
    }
    return __real_eventfd(count, flags);
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user)
{
    if (is_refused("pthread_create")) return EAGAIN;
    return __real_pthread_create(thread, attributes, run, user);
}

int __real_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);

int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    if (is_refused("pthread_mutex_init")) return ENOMEM;
    return __real_pthread_mutex_init(mutex, attributes);
}

int __real_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes);
int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes);

int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes)
{
    if (is_refused("pthread_cond_init")) return ENOMEM;
    return __real_pthread_cond_init(cond, attributes);
}
