/*
 * fake_state: everything the fake driver knows, under one lock.
 *
 * Every call into the driver is fake_begin … fake_end, which take and give back the lock; what has
 * no other word about it runs with the lock held. Bytes move without it: between fake_touch and
 * fake_touched no address range ends (a call that ends one waits in fake_change), so that what was
 * found by fake_reach stays.
 */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include "device/cuda/cuda_driver.h"
#include "fake_cuda.h"
#include "fake_tree.h"

#define FAKE_EXPORTED __attribute__((visibility("default")))

/* What refit calls, and what only programs beside it do: waits that it has no use for. */
#define FAKE_ALL_SYMBOLS(R)                                                                        \
    RFT_CUDA_SYMBOLS(R, R)                                                                         \
    R(stream_wait, "cuStreamSynchronize", 2000, rft_cu_stream stream)                              \
    R(context_wait, "cuCtxSynchronize", 2000, void)

/* The symbols, numbered: FAKE_init, FAKE_memory_alloc, … */
typedef enum fake_symbol {
#define FAKE_NUMBER(field, ...) FAKE_##field,
    FAKE_ALL_SYMBOLS(FAKE_NUMBER)
#undef FAKE_NUMBER
        FAKE_SYMBOLS
} fake_symbol;

/* What follows each: fake_cu_init, fake_cu_memory_alloc, … */
#define FAKE_DECLARE(field, symbol, version, ...) rft_cu_result fake_cu_##field(__VA_ARGS__);
FAKE_ALL_SYMBOLS(FAKE_DECLARE)
#undef FAKE_DECLARE

const char *fake_symbol_name(fake_symbol symbol);

typedef struct fake_device fake_device;

typedef struct fake_context {
    fake_node node; /* in fake.contexts */
    fake_device *device;
    unsigned retained;        /* of a primary one */
    bool alive;               /* calls work */
    rft_cu_result lost;       /* what every call answers from now on */
    rft_cu_stream special[2]; /* the legacy stream and the per-thread one, once used */
} fake_context;

struct fake_device {
    int ordinal;
    uint64_t total;
    uint64_t used;
    uint64_t taken; /* by others */
    rft_cu_uuid uuid;
    int attributes[256];
    bool known[256];
    fake_context *primary;
    /* What cuMemAlloc allocates from: addresses without rights, and the same length of a file
     * after them. 0: not yet made. */
    uint64_t heap;
    uint64_t heap_size;
    uint64_t heap_next; /* where the next search begins, so that addresses come back late */
    int heap_file;
};

/* What lies at an address. */
typedef enum fake_kind {
    FAKE_MEMORY,     /* cuMemAlloc */
    FAKE_MAPPING,    /* cuMemMap */
    FAKE_IMPORT,     /* cuIpcOpenMemHandle */
    FAKE_MANAGED,    /* cuMemAllocManaged, by the tests */
    FAKE_REGISTERED, /* cuMemHostRegister */
    FAKE_HOST,       /* cuMemHostAlloc */
    FAKE_ALIAS,      /* where the device finds what is registered */
} fake_kind;

#define FAKE_KINDS 7

typedef struct fake_span {
    fake_node node; /* in fake.spans */
    fake_kind kind;
    int device;
    fake_context *context;
    uint64_t shift; /* from an address to its bytes */
    uint64_t serial;
    struct fake_physical *physical; /* of a mapping */
    bool access;                    /* of a mapping: set */
    unsigned peers;                 /* of a mapping: a bit for each other device let in */
    bool foreign;                   /* made by a test: not counted */
    bool read_only;
    struct fake_span *alias;    /* of a registration, once asked for */
    unsigned imports;           /* of an import: how often it was opened */
    rft_cu_ipc_handle exported; /* of an import: what was opened */
    int file;                   /* of an import: its own hold on it */
} fake_span;

typedef struct fake_state {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* after any change that a thread may wait for */
    pid_t process;          /* 0: cuInit was not called */
    int version;
    int device_count;
    fake_device devices[FAKE_CUDA_DEVICES_MOST];
    uint64_t granule;
    bool skew;
    bool no_peers; /* no device reaches another's memory */
    uint64_t register_cap;
    uint64_t batch_cap;

    fake_tree spans;
    fake_tree reservations;
    /* Objects by their handles, which are numbers that never come back. */
    fake_tree contexts;
    fake_tree streams;
    fake_tree events;
    fake_tree physicals;
    fake_tree libraries;
    fake_tree kernels;
    uint64_t handles;           /* the last number given */
    uint64_t serial;            /* of the last piece of work, allocation, … */
    unsigned kinds[FAKE_KINDS]; /* spans that count, by kind */
    unsigned own_streams;       /* streams that count */

    unsigned touching; /* threads that move bytes */
    unsigned changing; /* threads that want to end an address range */
} fake_state;

extern fake_state fake;

/* ---- fake_call.c: what all calls have in common. */
typedef struct fake_call {
    fake_symbol symbol;
    fake_context *context; /* the current one, if asked for */
    rft_cu_result later;   /* the work that this call queues fails with this */
} fake_call;

/* What a call needs. */
#define FAKE_NEEDS_NOTHING 0u
#define FAKE_NEEDS_INIT    1u
#define FAKE_NEEDS_CONTEXT 3u
#define FAKE_UNSAFE        4u /* a capture in global mode forbids it */

/* Locks; what it answers is the answer of the call, unless SUCCESS. fake_end unlocks and gives its
 * argument back. */
rft_cu_result fake_begin(fake_call *call, fake_symbol symbol, unsigned needs);
rft_cu_result fake_end(const fake_call *call, rft_cu_result result);
/* The beginning of a call, with `call` and `result`, and what it refuses. */
#define FAKE_CALL(field, needs)                                                                    \
    fake_call call;                                                                                \
    rft_cu_result result = fake_begin(&call, FAKE_##field, needs)
#define FAKE_REFUSE_IF(condition, answer)                                                          \
    do {                                                                                           \
        if (result == RFT_CU_SUCCESS && (condition)) result = (answer);                            \
    } while (0)
/* A call that ends an object does so: it may, or it only may not because the context is lost. (The
 * real driver keeps such objects until the process ends; here the accounting show that they were
 * ended.)
 */
bool fake_ends(const fake_call *call, rft_cu_result result);
void fake_lock(void);
void fake_unlock(void);
void fake_wake(void);
void fake_wait(void);
/* The lock is free between these two. */
void fake_touch(void);
void fake_touched(void);
/* No bytes move and none begin to, until the lock is given back. */
void fake_change(void);
void fake_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Memory of the fake's own, zeroed; it ends the process where there is none. */
void *fake_new(size_t bytes);
uint64_t fake_handle(fake_tree *tree, fake_node *node);
/* The object of a handle; a violation if it is gone. */
void *fake_object(const fake_tree *tree, uint64_t handle, const char *what);
/* Are there bytes of the one range in the other? */
static inline bool fake_meets(uint64_t at, uint64_t bytes, uint64_t base, uint64_t size)
{
    return at < base + size && base < at + bytes;
}

/* Host functions run with it set, and calls are refused. */
void fake_set_in_callback(bool on);
void fake_calls_reset(void);
void fake_count_legacy(const fake_call *call);
void fake_count_pageable(void);
void fake_count_link(uint64_t bytes);
void fake_count_batch(size_t count);

/* ---- fake_script.c */
bool fake_script_hides(const char *symbol, int version);
/* The answer that a script gives to this call, or SUCCESS; or what comes later. */
rft_cu_result fake_script_answer(const char *symbol, rft_cu_result *later);
void fake_script_reset(void);

/* ---- fake_context.c, fake_device.c */
fake_context *fake_current(void);
fake_device *fake_device_of(rft_cu_device device);
void fake_contexts_reset(void);
void fake_lose(fake_context *context, rft_cu_result result);

/* ---- fake_space.c: addresses without rights. 0: there are none. The bytes lie after them, as far
 * again. */
uint64_t fake_space_open(uint64_t bytes, uint64_t alignment, uint64_t wish);
void fake_space_close(uint64_t base, uint64_t bytes);
/* Maps the bytes of a file to addresses; takes them away. */
bool fake_space_back(uint64_t at, uint64_t shift, uint64_t bytes, int file, uint64_t offset);
void fake_space_bare(uint64_t at, uint64_t shift, uint64_t bytes);
int fake_space_file(uint64_t bytes);
bool fake_space_has(uint64_t address); /* it is the device's, in use or not */
void fake_space_reset(void);

/* ---- fake_reach.c: from addresses to bytes. */
typedef enum fake_side { FAKE_SIDE_BAD, FAKE_SIDE_DRIVER, FAKE_SIDE_PAGEABLE } fake_side;

/* What a copy finds at [at, at + bytes) when it is called. */
fake_side fake_side_of(uint64_t at, uint64_t bytes);
/* The bytes at an address, or NULL: nothing may be read (or written) there. */
unsigned char *fake_reach(uint64_t at, uint64_t bytes, bool write);
/* The same for a kernel on the device, to which only its own addresses mean anything. */
unsigned char *fake_reach_mapped(int device, uint64_t at, uint64_t bytes, bool write);
fake_span *fake_span_at(uint64_t address);
fake_span *fake_span_put(fake_kind kind, uint64_t base, uint64_t bytes, int device);
/* Takes it out of the accounting; a violation where queued work uses it. */
void fake_span_drop(fake_span *span, const char *verb);

/* ---- fake_memory.c, fake_host.c, fake_vmm.c, fake_ipc.c, fake_event.c, fake_kernel.c */
void fake_memory_reset(void);
void fake_host_reset(void);
void fake_vmm_reset(void);
void fake_physicals_reset(void);
void fake_ipc_reset(void);
/* Another process has bytes of that range of the file open. */
bool fake_ipc_imported(int file, uint64_t offset, uint64_t bytes);
void fake_events_reset(void);
void fake_kernels_reset(void);

#endif
