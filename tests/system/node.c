/* A made-up machine, in memory that its ranks share. */
#include "node.h"

#include <stdio.h>
#include <string.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/machine_lock.h"
#include "memory/procfile.h"
#include "memory/slab_pins.h"

#define HELD_MS 120000 /* no test holds a rank as long; should the test be gone, it goes on */

static _Thread_local test_node *here;
static _Thread_local unsigned self;
static _Thread_local bool has_lock, asked, looked, has_claim;

/* ---- The node */

static test_node *map(int file)
{
    void *node = mmap(NULL, sizeof(test_node), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return node != MAP_FAILED ? node : NULL;
}

test_node *node_open(long long free_bytes, int *file)
{
    *file = memfd_create("node", MFD_CLOEXEC);
    test_node *node = *file >= 0 && ftruncate(*file, sizeof(test_node)) == 0 ? map(*file) : NULL;
    if (node == NULL) return NULL;
    atomic_store(&node->free_bytes, free_bytes);
    atomic_store(&node->least, free_bytes);
    return node;
}

test_node *node_join(int pid, int file)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
    int own = open(path, O_RDWR | O_CLOEXEC);
    if (own < 0) return NULL;
    test_node *node = map(own);
    close(own);
    return node;
}

void node_leave(test_node *node)
{
    if (node != NULL) (void)munmap(node, sizeof *node);
    here = NULL;
}

void node_enter(test_node *node, unsigned rank)
{
    here = node;
    self = rank;
}

void node_bury(test_node *node, unsigned rank)
{
    atomic_fetch_add(&node->free_bytes, atomic_exchange(&node->taken[rank], 0));
    atomic_store(&node->standing, 0);
}

static void take(long long bytes)
{
    long long left = atomic_fetch_sub(&here->free_bytes, bytes) - bytes;
    long long least = atomic_load(&here->least);
    atomic_fetch_add(&here->taken[self], bytes);
    while (left < least && !atomic_compare_exchange_weak(&here->least, &least, left)) {
    }
}

static void drop(long long bytes)
{
    atomic_fetch_sub(&here->taken[self], bytes);
    atomic_fetch_add(&here->free_bytes, bytes);
}

/* ---- Turns */

refit_status __real_rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                          rft_cancel_token *token, refit_error *error);
refit_status __wrap_rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                          rft_cancel_token *token, refit_error *error);
bool __real_rft_machine_lock_claimed(rft_machine_lock *machine_lock, uint64_t *bytes);
bool __wrap_rft_machine_lock_claimed(rft_machine_lock *machine_lock, uint64_t *bytes);
refit_status __real_rft_machine_lock_retry(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                           rft_cancel_token *token, refit_error *error);
refit_status __wrap_rft_machine_lock_retry(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                           rft_cancel_token *token, refit_error *error);
void __real_rft_machine_lock_claim(rft_machine_lock *machine_lock, uint64_t bytes);
void __wrap_rft_machine_lock_claim(rft_machine_lock *machine_lock, uint64_t bytes);
void __real_rft_machine_lock_give(rft_machine_lock *machine_lock);
void __wrap_rft_machine_lock_give(rft_machine_lock *machine_lock);
void __real_rft_cancel_token_pause(rft_cancel_token *token, int64_t deadline);
void __wrap_rft_cancel_token_pause(rft_cancel_token *token, int64_t deadline);

static void enter_lock(void)
{
    has_lock = true;
    asked = looked = has_claim = false;
    if (atomic_fetch_add(&here->inside, 1) != 0) atomic_fetch_add(&here->together, 1);
}

static void leave_lock(void)
{
    if (has_lock) atomic_fetch_sub(&here->inside, 1);
    has_lock = false;
}

refit_status __wrap_rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                          rft_cancel_token *token, refit_error *error)
{
    refit_status status = __real_rft_machine_lock_take(machine_lock, timeout_ms, token, error);
    if (status == REFIT_OK) enter_lock();
    return status;
}

bool __wrap_rft_machine_lock_claimed(rft_machine_lock *machine_lock, uint64_t *bytes)
{
    asked = true;
    return __real_rft_machine_lock_claimed(machine_lock, bytes);
}

refit_status __wrap_rft_machine_lock_retry(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                           rft_cancel_token *token, refit_error *error)
{
    leave_lock();
    refit_status status = __real_rft_machine_lock_retry(machine_lock, timeout_ms, token, error);
    if (status == REFIT_OK) enter_lock();
    return status;
}

void __wrap_rft_machine_lock_claim(rft_machine_lock *machine_lock, uint64_t bytes)
{
    bool in_order = has_lock && looked;
    leave_lock();
    __real_rft_machine_lock_claim(machine_lock, bytes);
    has_claim = in_order && machine_lock->claim != NULL;
}

void __wrap_rft_machine_lock_give(rft_machine_lock *machine_lock)
{
    leave_lock();
    has_claim = false;
    __real_rft_machine_lock_give(machine_lock);
}

void __wrap_rft_cancel_token_pause(rft_cancel_token *token, int64_t deadline)
{
    if (atomic_load(&token->in_line)) atomic_fetch_add(&here->waits, 1);
    __real_rft_cancel_token_pause(token, deadline);
}

/* ---- What is free */

bool __real_rft_procfile_read(const char *path, char *text, size_t room);
bool __wrap_rft_procfile_read(const char *path, char *text, size_t room);

bool __wrap_rft_procfile_read(const char *path, char *text, size_t room)
{
    if (strstr(path, "/cgroup") != NULL) return false;
    if (strcmp(path, "/proc/meminfo") != 0) return __real_rft_procfile_read(path, text, room);
    long long bytes = atomic_load(&here->free_bytes);
    snprintf(text, room, "MemAvailable: %lld kB\n", bytes > 0 ? bytes / 1024 : 0);
    looked = asked;
    return true;
}

/* ---- The image's memory */

refit_status __real_rft_slab_pins_take(rft_slab_pins *pins, refit_pin wanted,
                                       rft_cancel_token *token, refit_error *error);
refit_status __wrap_rft_slab_pins_take(rft_slab_pins *pins, refit_pin wanted,
                                       rft_cancel_token *token, refit_error *error);
void __real_rft_slab_pins_drop(rft_slab_pins *pins);
void __wrap_rft_slab_pins_drop(rft_slab_pins *pins);

static void stand(void)
{
    int64_t deadline = rft_deadline(HELD_MS);
    atomic_fetch_add(&here->standing, 1);
    while (atomic_load(&here->held) && rft_now() < deadline)
        (void)poll(NULL, 0, 1);
    atomic_fetch_sub(&here->standing, 1);
}

refit_status __wrap_rft_slab_pins_take(rft_slab_pins *pins, refit_pin wanted,
                                       rft_cancel_token *token, refit_error *error)
{
    if (!has_claim) atomic_fetch_add(&here->unclaimed, 1);
    if (atomic_load(&here->held)) stand();
    atomic_fetch_add(&here->takings, 1);
    take((long long)pins->bytes);
    refit_status status = __real_rft_slab_pins_take(pins, wanted, token, error);
    if (status != REFIT_OK) drop((long long)pins->bytes);
    return status;
}

void __wrap_rft_slab_pins_drop(rft_slab_pins *pins)
{
    if (pins->pinned > 0) drop((long long)pins->bytes);
    __real_rft_slab_pins_drop(pins);
}
