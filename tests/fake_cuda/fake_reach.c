/*
 * From addresses to bytes: what lies at an address, which calls may read and write it, and whether
 * queued work uses it. Everything at an address is one span; a range may go on from one mapping
 * into the next, as long as both lie in one reservation, and over nothing else.
 */
#include "fake_stream.h"

fake_span *fake_span_at(uint64_t address)
{
    return (fake_span *)fake_tree_at(&fake.spans, address);
}

fake_span *fake_span_put(fake_kind kind, uint64_t base, uint64_t bytes, int device)
{
    fake_span *span = fake_new(sizeof *span);
    span->node.base = base;
    span->node.size = bytes;
    span->kind = kind;
    span->device = device;
    span->context = fake_current();
    span->serial = ++fake.serial;
    fake_tree_put(&fake.spans, &span->node);
    fake.kinds[kind]++;
    return span;
}

void fake_span_drop(fake_span *span, const char *verb)
{
    if (fake_streams_use(span->node.base, span->node.size)) {
        fake_violation("0x%llx is %s while queued work uses it",
                       (unsigned long long)span->node.base, verb);
    } else if (span->kind != FAKE_MAPPING) {
        fake_context_drain(fake_current());
    }
    fake_change();
    fake_tree_take(&fake.spans, &span->node);
    if (!span->foreign) fake.kinds[span->kind]--;
}

/* The first byte past its end. */
static uint64_t span_end(const fake_span *span)
{
    return span->node.base + span->node.size;
}

/* Mappings of one reservation follow each other to the end of the range. */
static bool mapped_to_end(const fake_span *span, uint64_t end)
{
    while (span_end(span) < end) {
        const fake_span *next = fake_span_at(span_end(span));
        if (next == NULL || next->kind != FAKE_MAPPING || next->shift != span->shift) return false;
        span = next;
    }
    return true;
}

/* The span at `at` holds the range, alone or with those that go on from it. */
static bool holds(const fake_span *span, uint64_t at, uint64_t bytes)
{
    if (bytes > UINT64_MAX - at) return false;
    if (at + bytes <= span_end(span)) return true;
    return span->kind == FAKE_MAPPING && mapped_to_end(span, at + bytes);
}

fake_side fake_side_of(uint64_t at, uint64_t bytes)
{
    const fake_span *span = fake_span_at(at);
    if (span != NULL) return holds(span, at, bytes) ? FAKE_SIDE_DRIVER : FAKE_SIDE_BAD;
    if (at == 0 || fake_space_has(at)) return FAKE_SIDE_BAD;
    /* Host memory that is not registered, but reaches into some that is. */
    if (fake_tree_overlap(&fake.spans, at, bytes) != NULL) return FAKE_SIDE_BAD;
    return FAKE_SIDE_PAGEABLE;
}

/* Every mapping in the range lets the device in. */
static bool allowed(const fake_span *span, uint64_t end)
{
    if (span->kind != FAKE_MAPPING) return true;
    for (; span != NULL && span->access; span = fake_span_at(span_end(span)))
        if (span_end(span) >= end) return true;
    return false;
}

static unsigned char *reach(const fake_span *span, uint64_t at, uint64_t bytes, bool write)
{
    if (span == NULL || !holds(span, at, bytes) || !allowed(span, at + bytes)) return NULL;
    if (write && span->read_only) return NULL;
    return (unsigned char *)(uintptr_t)(at + span->shift);
}

unsigned char *fake_reach_mapped(int device, uint64_t at, uint64_t bytes, bool write)
{
    const fake_span *span = fake_span_at(at);
    if (span == NULL || span->kind == FAKE_REGISTERED) return NULL; /* its alias is meant */
    if (span->device >= 0 && span->device != device && (span->peers & 1u << device) == 0)
        return NULL; /* a peer's */
    return reach(span, at, bytes, write);
}

unsigned char *fake_reach(uint64_t at, uint64_t bytes, bool write)
{
    if (fake_side_of(at, bytes) == FAKE_SIDE_PAGEABLE) return (unsigned char *)(uintptr_t)at;
    return reach(fake_span_at(at), at, bytes, write);
}

FAKE_EXPORTED bool fake_cuda_reaches(int device, rft_cu_ptr memory, size_t bytes)
{
    fake_lock();
    bool reached = fake_reach_mapped(device, memory, bytes, true) != NULL;
    fake_unlock();
    return reached;
}

FAKE_EXPORTED void *fake_cuda_bytes(rft_cu_ptr memory, size_t bytes)
{
    fake_lock();
    const fake_span *span = fake_span_at(memory);
    void *found = span != NULL ? fake_reach_mapped(span->device, memory, bytes, true) : NULL;
    fake_unlock();
    return found;
}
