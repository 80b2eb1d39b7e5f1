/*
 * ZeroMQ asserts what it has no answer to, and a failed assertion aborts the process. Four of them
 * are reached by a process that is short of something, as the trainer's may be at any time:
 *
 *   - accept(2) at an ipc endpoint, in all of 4.3: EMFILE is not among the errors that it expects
 *     (at tcp it is; errors of the network that the system reports there are not).
 *   - getifaddrs(3), which looks for an interface of the name that a tcp endpoint binds, be it a
 *     number: for want of a descriptor, or where a sandbox has no netlink.
 *   - epoll_create1(2) for each of a context's two threads.
 *   - pthread_create(3) for these.
 *
 * Accepting. No look at the free descriptors comes soon enough: a process opens a thousand files
 * within a millisecond, on any thread, and accept takes whichever number is free at that moment.
 * ZeroMQ takes no connection that was accepted elsewhere, so refit cannot accept in its place, and
 * to hand all bytes on between two sockets would cost two descriptors and a copy. A higher limit
 * would be used up like the first one. So the call itself is led through here: the entry of accept4
 * in libzmq's table of imports is replaced, and an error that ZeroMQ does not expect becomes ENFILE
 * or ECONNABORTED, which it does. It then tells the monitor, and connections.c does the rest as for
 * tcp. This holds for all sockets of that libzmq in the process, none of which could want to abort;
 * so what holds this code stays loaded for as long as they may call it.
 * A libzmq that is part of this program or library imports nothing: a bundled one is compiled to
 * call what is here; for another one, and where the table cannot be written or is of another kind
 * of machine, what connections.c keeps free has to do.
 *
 * Interfaces are looked for by way of here likewise: an error becomes EOPNOTSUPP, after which
 * ZeroMQ takes the address for a number.
 *
 * Contexts. What a context begins with is tried out right before, and given back: as many
 * descriptors, and two threads at once. What remains: that another thread of the process takes what
 * was given back, in the microseconds between.
 */
#include "net/shortage.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <zmq.h>

#include "base/thread.h"

#define DESCRIPTORS 16 /* a context takes 5, a socket with a monitor 3; some more for the rest */
#define THREADS     2

#if defined(__x86_64__)
#define IMPORTED_CALL R_X86_64_JUMP_SLOT
#define IMPORTED_DATA R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define IMPORTED_CALL R_AARCH64_JUMP_SLOT
#define IMPORTED_DATA R_AARCH64_GLOB_DAT
#endif

/* ---- What ZeroMQ calls. The entries of this library lead to the system still. */

int rft_shortage_accept(int listener, struct sockaddr *address, socklen_t *room, int flags)
{
    int fd = accept4(listener, address, room, flags);
    if (fd >= 0) return fd;
    switch (errno) {
    case EAGAIN:
    case EINTR:
    case ECONNABORTED:
    case ENFILE:
    case EBADF:
    case EFAULT:
    case EINVAL:
    case ENOTSOCK: break;
    case EMFILE:
    case ENOBUFS:
    case ENOMEM: errno = ENFILE; break;
    default: errno = ECONNABORTED; break; /* of a connection that the network ended */
    }
    return -1;
}

/* ZeroMQ tries again after ECONNREFUSED. */
int rft_shortage_interfaces(struct ifaddrs **list)
{
    int result = getifaddrs(list);
    if (result != 0 && errno != ECONNREFUSED) errno = EOPNOTSUPP;
    return result;
}

/* ---- How it comes to call that */

#if defined(IMPORTED_CALL)

static const struct led {
    const char *name;
    void (*to)(void);
} all_led[] = {
    {"accept4", (void (*)(void))rft_shortage_accept},
    {"getifaddrs", (void (*)(void))rft_shortage_interfaces},
};

/* The library that ZeroMQ's functions lie in, and what its dynamic section says. */
typedef struct library {
    uintptr_t wanted, own; /* addresses in ZeroMQ and in here */
    ElfW(Addr) base;
    uintptr_t sealed, sealed_end; /* what is read-only since the library was loaded */
    const ElfW(Dyn) * about;
    const ElfW(Sym) * symbols;
    const char *names;
} library;

static bool holds(const struct dl_phdr_info *object, uintptr_t address)
{
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        uintptr_t from = object->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && address >= from && address - from < part->p_memsz)
            return true;
    }
    return false;
}

static int find(struct dl_phdr_info *object, size_t size, void *user)
{
    library *out = user;
    (void)size;
    if (!holds(object, out->wanted)) return 0;
    for (int i = 0; i < object->dlpi_phnum && !holds(object, out->own); i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        out->base = object->dlpi_addr;
        if (part->p_type == PT_DYNAMIC)
            out->about = (const ElfW(Dyn) *)(object->dlpi_addr + part->p_vaddr);
        if (part->p_type != PT_GNU_RELRO) continue;
        out->sealed = object->dlpi_addr + part->p_vaddr;
        out->sealed_end = out->sealed + part->p_memsz;
    }
    return 1;
}

static ElfW(Xword) number_of(const library *in, ElfW(Sxword) tag)
{
    for (const ElfW(Dyn) *at = in->about; at->d_tag != DT_NULL; at++)
        if (at->d_tag == tag) return at->d_un.d_val;
    return 0;
}

/* glibc's loader has made these absolute, others have not. */
static const void *place_of(const library *in, ElfW(Sxword) tag)
{
    ElfW(Addr) place = number_of(in, tag);
    if (place != 0 && place < in->base) place += in->base;
    return (const void *)place; /* NOLINT(performance-no-int-to-ptr) */
}

static void lead(const library *in, uintptr_t entry, void (*here)(void))
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *from = (void *)(entry / page * page);         /* NOLINT(performance-no-int-to-ptr) */
    _Atomic uintptr_t *to = (_Atomic uintptr_t *)entry; /* NOLINT(performance-no-int-to-ptr) */
    bool sealed = entry >= in->sealed && entry < in->sealed_end;
    if (sealed && mprotect(from, page, PROT_READ | PROT_WRITE) != 0) return;
    atomic_store(to, (uintptr_t)here);
    if (sealed) (void)mprotect(from, page, PROT_READ);
}

static void lead_all_here(const library *in, const ElfW(Rela) * list, size_t bytes)
{
    for (size_t i = 0; list != NULL && i < bytes / sizeof *list; i++) {
        ElfW(Xword) kind = ELF64_R_TYPE(list[i].r_info);
        const char *name = in->names + in->symbols[ELF64_R_SYM(list[i].r_info)].st_name;
        if (kind != IMPORTED_CALL && kind != IMPORTED_DATA) continue;
        for (size_t at = 0; at < sizeof all_led / sizeof all_led[0]; at++)
            if (strcmp(name, all_led[at].name) == 0)
                lead(in, in->base + list[i].r_offset, all_led[at].to);
    }
}

/* Of a program, which cannot go, there is no such file to open. */
static void stay_loaded(void)
{
    Dl_info own;
    if (dladdr((const void *)(uintptr_t)rft_shortage_accept, &own) != 0 && own.dli_fname != NULL)
        (void)dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

void rft_shortage_guard(void)
{
    static atomic_bool done;
    library zmq = {.wanted = (uintptr_t)zmq_ctx_new, .own = (uintptr_t)rft_shortage_accept};
    if (atomic_exchange(&done, true)) return;
    (void)dl_iterate_phdr(find, &zmq);
    if (zmq.about == NULL) return;
    zmq.symbols = place_of(&zmq, DT_SYMTAB);
    zmq.names = place_of(&zmq, DT_STRTAB);
    if (zmq.symbols == NULL || zmq.names == NULL) return;
    stay_loaded();
    lead_all_here(&zmq, place_of(&zmq, DT_JMPREL), number_of(&zmq, DT_PLTRELSZ));
    lead_all_here(&zmq, place_of(&zmq, DT_RELA), number_of(&zmq, DT_RELASZ));
}

#else

void rft_shortage_guard(void)
{
}

#endif

/* ---- Contexts */

static refit_status probe_descriptors(refit_error *error)
{
    int fds[DESCRIPTORS];
    int count = 0, code = 0;
    for (; count < DESCRIPTORS && code == 0; count += code == 0) {
        fds[count] = eventfd(0, EFD_CLOEXEC);
        if (fds[count] < 0) code = errno;
    }
    for (int i = 0; i < count; i++)
        close(fds[i]);
    if (code == 0) return REFIT_OK;
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code,
                        "ZeroMQ needs %d descriptors to begin with, and the process may open %d "
                        "more (%s): close files, or raise the limit (ulimit -n)",
                        DESCRIPTORS, count, strerror(code));
}

static void *wait_for_wake(void *wake)
{
    eventfd_t word;
    (void)eventfd_read(*(const int *)wake, &word);
    return NULL;
}

static refit_status probe_threads(refit_error *error)
{
    refit_error why;
    rft_thread threads[THREADS];
    int count = 0, wake = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    refit_status status = REFIT_OK;
    if (wake < 0) return probe_descriptors(error); /* another thread has just taken them */
    for (; count < THREADS && status == REFIT_OK; count += status == REFIT_OK)
        status = rft_thread_start(&threads[count], "refit-probe", wait_for_wake, &wake, &why);
    (void)eventfd_write(wake, THREADS);
    for (int i = 0; i < count; i++)
        rft_thread_join(threads[i]);
    close(wake);
    if (status == REFIT_OK) return status;
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, why.subsystem,
                        "ZeroMQ needs %d threads, and the process may start %d more (%s): raise "
                        "its limits of processes (ulimit -u, pids.max) and of memory (ulimit -v)",
                        THREADS, count, strerror(why.subsystem));
}

refit_status rft_shortage_probe(refit_error *error)
{
    RFT_TRY(probe_descriptors(error));
    return probe_threads(error);
}
