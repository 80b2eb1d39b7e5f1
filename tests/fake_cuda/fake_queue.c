/*
 * Queues: each stream has a list of work and, from the first piece on, a thread that runs it in
 * order. A piece waits for the gate that tests close, for events, and, by the rule of the legacy
 * stream, for work of other streams that was queued before it.
 */
#include "fake_queue.h"

#include <signal.h>
#include <stdlib.h>

/* What a stream takes, by the first form of tests/gpu/driver_limits.c on an H100 with driver 580:
 * so many pieces of work, and so many host functions with other work between them. The call that
 * brings one more waits. */
#define DEPTH 1024u
#define CALLS 56u

/* Guarded by fake.lock. */
static fake_stream *streams; /* all that have not ended */
static unsigned threads;
static bool calling; /* a host function runs: they have one thread of the driver's */
static bool stopped; /* by fake_cuda_stop */
static unsigned let; /* pieces that may pass nevertheless */
static bool ending;  /* a reset: work is dropped, threads end */

fake_stream *fake_streams_first(void)
{
    return streams;
}

void fake_queue_add(fake_stream *stream)
{
    stream->next = streams;
    streams = stream;
}

static void finish(fake_stream *stream)
{
    fake_stream **link = &streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    free(stream);
}

void fake_queue_close(fake_stream *stream)
{
    stream->closing = true;
    if (stream->started) {
        fake_wake();
    } else {
        finish(stream);
    }
}

fake_op *fake_op_new(rft_cu_result (*run)(fake_op *op))
{
    fake_op *op = fake_new(sizeof *op);
    op->run = run;
    return op;
}

static void drop(fake_op *op)
{
    if (op->drop != NULL) op->drop(op);
    free(op);
}

/* The legacy stream and the blocking streams of a context wait for each other. */
static bool waits_for(const fake_stream *stream, const fake_stream *other)
{
    if (stream == other || stream->context != other->context || other->first == NULL) return false;
    if (stream->legacy == other->legacy) return false;
    const fake_stream *blocking = stream->legacy ? other : stream;
    if ((blocking->flags & RFT_CU_STREAM_NON_BLOCKING) != 0) return false;
    return other->first->serial < stream->first->serial;
}

static bool after_others(const fake_stream *stream)
{
    for (const fake_stream *other = streams; other != NULL; other = other->next)
        if (waits_for(stream, other)) return true;
    return false;
}

/* Its first piece could run, but for the gate. */
static bool runnable(const fake_stream *stream)
{
    const fake_op *op = stream->first;
    if (op == NULL || stream->stopped) return false;
    if (op->function != NULL && calling) return false;
    if (stream->context->lost != RFT_CU_SUCCESS) return true;
    return (op->ready == NULL || op->ready(op)) && !after_others(stream);
}

static bool passes(const fake_stream *stream)
{
    return runnable(stream) && (!stopped || let > 0);
}

static void run_first(fake_stream *stream)
{
    fake_op *op = stream->first;
    fake_context *context = stream->context;
    if (stopped) let--;
    stream->busy = true;
    calling = calling || op->function != NULL;
    rft_cu_result result = op->fault;
    if (op->always || (result == RFT_CU_SUCCESS && context->lost == RFT_CU_SUCCESS)) {
        rft_cu_result own = op->run(op);
        if (result == RFT_CU_SUCCESS) result = own;
    }
    if (result != RFT_CU_SUCCESS) fake_lose(context, result);
    stream->busy = false;
    stream->done = op->serial;
    stream->first = op->next;
    if (stream->first == NULL) stream->last = NULL;
    stream->length--;
    if (op->function != NULL) calling = false;
    if (op->apart) stream->calls--;
    drop(op);
    fake_wake();
}

static void *serve(void *user)
{
    fake_stream *stream = user;
    fake_lock();
    while (!ending && !(stream->closing && stream->first == NULL)) {
        if (passes(stream)) {
            run_first(stream);
        } else {
            fake_wait();
        }
    }
    while (stream->first != NULL) {
        fake_op *op = stream->first;
        stream->first = op->next;
        drop(op);
    }
    if (!ending) finish(stream);
    threads--;
    fake_wake();
    fake_unlock();
    return NULL;
}

static void start(fake_stream *stream)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, serve, stream) != 0) abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_detach(thread);
    stream->started = true;
    threads++;
}

/* A host function with other work before it. */
static bool is_apart(const fake_stream *stream, const fake_op *op)
{
    return op->function != NULL && stream->last != NULL && stream->last->function == NULL;
}

void fake_stream_put(fake_stream *stream, fake_op *op, const fake_call *call)
{
    while (stream->length >= DEPTH || (is_apart(stream, op) && stream->calls >= CALLS))
        fake_wait();
    stream->length++;
    op->apart = is_apart(stream, op);
    if (op->apart) stream->calls++;
    op->fault = call->later;
    op->serial = ++fake.serial;
    if (stream->last != NULL) {
        stream->last->next = op;
    } else {
        stream->first = op;
    }
    stream->last = op;
    if (!stream->started) start(stream);
    fake_wake();
}

void fake_stream_drain(fake_stream *stream)
{
    uint64_t last = stream->last != NULL ? stream->last->serial : 0;
    while (stream->done < last)
        fake_wait();
}

void fake_context_drain(const fake_context *context)
{
    uint64_t last = fake.serial;
    fake_stream *stream = streams;
    while (stream != NULL) {
        bool before =
            stream->context == context && stream->first != NULL && stream->first->serial <= last;
        if (before) fake_wait();
        stream = before ? streams : stream->next;
    }
}

bool fake_streams_use(uint64_t base, uint64_t bytes)
{
    for (const fake_stream *stream = streams; stream != NULL; stream = stream->next) {
        if (stream->context->lost != RFT_CU_SUCCESS) continue; /* it will not run */
        for (const fake_op *op = stream->first; op != NULL; op = op->next)
            if (op->uses != NULL && op->uses(op, base, bytes)) return true;
    }
    return false;
}

void fake_streams_reset(void)
{
    ending = true;
    fake_wake();
    while (threads > 0)
        fake_wait();
    ending = stopped = false;
    let = 0;
    while (streams != NULL) {
        fake_stream *stream = streams;
        if (!stream->closing) fake_tree_take(&fake.streams, &stream->node);
        finish(stream);
    }
    fake.own_streams = 0;
}

static void set_gate(bool closed, unsigned pieces)
{
    fake_lock();
    stopped = closed;
    let = closed ? let + pieces : 0;
    fake_wake();
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_stop(void)
{
    set_gate(true, 0);
}

FAKE_EXPORTED void fake_cuda_go(void)
{
    set_gate(false, 0);
}

FAKE_EXPORTED void fake_cuda_let(unsigned pieces)
{
    set_gate(true, pieces);
}

bool fake_queue_empty(const fake_context *context)
{
    for (const fake_stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->context == context && stream->first != NULL) return false;
    return true;
}

static bool settled(void)
{
    for (const fake_stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->busy || passes(stream)) return false;
    return true;
}

FAKE_EXPORTED void fake_cuda_settle(void)
{
    fake_lock();
    while (!settled())
        fake_wait();
    fake_unlock();
}
