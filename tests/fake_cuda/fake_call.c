/*
 * What all calls of the fake driver have in common: the lock, counters, scripted answers, and the
 * checks that come before a call's own.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_stream.h"

fake_state fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static __thread bool in_callback;

/* Guarded by fake.lock. */
static struct fake_figures {
    uint64_t calls[FAKE_SYMBOLS];
    uint64_t legacy[FAKE_SYMBOLS];
    uint64_t pageable;
    uint64_t link; /* bytes */
    uint64_t batch;
    unsigned violations;
    char violation[256];
} figures;

void fake_lock(void)
{
    pthread_mutex_lock(&fake.lock);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&fake.lock);
}

void fake_wake(void)
{
    pthread_cond_broadcast(&fake.changed);
}

void fake_wait(void)
{
    pthread_cond_wait(&fake.changed, &fake.lock);
}

void fake_touch(void)
{
    while (fake.changing > 0)
        fake_wait();
    fake.touching++;
    fake_unlock();
}

void fake_touched(void)
{
    fake_lock();
    if (--fake.touching == 0) fake_wake();
}

void fake_change(void)
{
    fake.changing++;
    while (fake.touching > 0)
        fake_wait();
    fake.changing--;
    fake_wake();
}

void fake_set_in_callback(bool on)
{
    in_callback = on;
}

static rft_cu_result checked(fake_call *call, unsigned needs)
{
    rft_cu_result scripted = fake_script_answer(fake_symbol_name(call->symbol), &call->later);
    if (scripted != RFT_CU_SUCCESS) return scripted;
    if (in_callback) return RFT_CU_NOT_PERMITTED;
    if ((needs & FAKE_NEEDS_INIT) == 0) return RFT_CU_SUCCESS;
    if (fake.process != getpid()) return RFT_CU_NOT_INITIALIZED;
    if ((needs & FAKE_NEEDS_CONTEXT) != FAKE_NEEDS_CONTEXT) return RFT_CU_SUCCESS;
    call->context = fake_current();
    if (call->context == NULL) return RFT_CU_INVALID_CONTEXT;
    if (!call->context->alive) return RFT_CU_CONTEXT_IS_DESTROYED;
    if (call->context->lost != RFT_CU_SUCCESS) return call->context->lost;
    return (needs & FAKE_UNSAFE) != 0 ? fake_capture_check() : RFT_CU_SUCCESS;
}

rft_cu_result fake_begin(fake_call *call, fake_symbol symbol, unsigned needs)
{
    *call = (fake_call){.symbol = symbol};
    fake_lock();
    figures.calls[symbol]++;
    return checked(call, needs);
}

rft_cu_result fake_end(const fake_call *call, rft_cu_result result)
{
    (void)call;
    fake_unlock();
    return result;
}

bool fake_ends(const fake_call *call, rft_cu_result result)
{
    if (result == RFT_CU_SUCCESS) return true;
    return call->context != NULL && call->context->lost == result;
}

void *fake_new(size_t bytes)
{
    void *memory = calloc(1, bytes > 0 ? bytes : 1);
    if (memory != NULL) return memory;
    fputs("the fake driver has no memory for its accounting\n", stderr);
    abort();
}

/* Handles are odd addresses that nothing lies at, each far from the last. */
uint64_t fake_handle(fake_tree *tree, fake_node *node)
{
    node->base = UINT64_C(0xFA0000000001) + ++fake.handles * 64;
    node->size = 1;
    fake_tree_put(tree, node);
    return node->base;
}

void *fake_object(const fake_tree *tree, uint64_t handle, const char *what)
{
    fake_node *node = fake_tree_at(tree, handle);
    if (node == NULL) fake_violation("0x%llx is no %s", (unsigned long long)handle, what);
    return node;
}

void fake_violation(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(figures.violation, sizeof figures.violation, format, arguments);
    va_end(arguments);
    figures.violations++;
}

void fake_count_legacy(const fake_call *call)
{
    figures.legacy[call->symbol]++;
}

void fake_count_link(uint64_t bytes)
{
    figures.link += bytes;
}

void fake_count_pageable(void)
{
    figures.pageable++;
}

void fake_count_batch(size_t count)
{
    if (count > figures.batch) figures.batch = count;
}

void fake_calls_reset(void)
{
    memset(&figures, 0, sizeof figures);
}

static uint64_t sum_of(const uint64_t *counts, const char *symbol)
{
    uint64_t sum = 0;
    fake_lock();
    for (unsigned i = 0; i < FAKE_SYMBOLS; i++)
        if (symbol == NULL || strcmp(symbol, fake_symbol_name((fake_symbol)i)) == 0)
            sum += counts[i];
    fake_unlock();
    return sum;
}

FAKE_EXPORTED uint64_t fake_cuda_calls(const char *symbol)
{
    return sum_of(figures.calls, symbol);
}

FAKE_EXPORTED uint64_t fake_cuda_legacy_calls(const char *symbol)
{
    return sum_of(figures.legacy, symbol);
}

FAKE_EXPORTED uint64_t fake_cuda_link_bytes(void)
{
    fake_lock();
    uint64_t bytes = figures.link;
    fake_unlock();
    return bytes;
}

FAKE_EXPORTED uint64_t fake_cuda_pageable_copies(void)
{
    fake_lock();
    uint64_t copies = figures.pageable;
    fake_unlock();
    return copies;
}

FAKE_EXPORTED uint64_t fake_cuda_batch_most(void)
{
    fake_lock();
    uint64_t most = figures.batch;
    fake_unlock();
    return most;
}

FAKE_EXPORTED unsigned fake_cuda_violations(void)
{
    fake_lock();
    unsigned violations = figures.violations;
    fake_unlock();
    return violations;
}

FAKE_EXPORTED const char *fake_cuda_violation(void)
{
    static __thread char text[sizeof figures.violation];
    fake_lock();
    memcpy(text, figures.violation, sizeof text);
    fake_unlock();
    return text;
}

FAKE_EXPORTED void fake_cuda_forgive(void)
{
    fake_lock();
    figures.violations = 0;
    figures.violation[0] = '\0';
    fake_unlock();
}
