/*
 * fake_cuda: NVIDIA's driver interface on host memory, as a libcuda.so.1, and what tests may ask of
 * it. It stands for the driver, not for functions of ours: the library under test opens it as it
 * opens the real one.
 *
 * What it models
 * - Addresses. Device memory is address space without access rights; the bytes lie elsewhere, where
 *   only the driver's own work finds them. A process whose CPU touches a device pointer crashes.
 * - Copies: checked when they are called (INVALID_VALUE) and once more when the stream gets to them
 *   (ILLEGAL_ADDRESS, and the context is lost). Unregistered host memory is copied while the caller
 *   waits, and is counted. A copy from host memory to host memory is waited for too. A copy across
 * two registrations, or out of one, is INVALID_VALUE. Source order ANY reads when it is called, and
 * once more later: a source that differs is a violation.
 * - Registered memory, which kernels find at addresses of its own (cuMemHostGetDevicePointer), and
 *   so do batches of copies on a device that cannot use the host's (RFT_CU_ATTR_HOST_POINTERS).
 * - Streams: a thread and a queue each, events, the legacy stream and those that wait for it. A
 *   queue takes 1,024 pieces of work, and 56 host functions with other work between them; the call
 *   that brings one more waits. Host functions of all streams run one at a time. (The per-thread
 *   stream is one per context.)
 * - Calls that wait until the context has done its work: cuMemFree, cuMemFreeHost and
 *   cuMemHostUnregister.
 * - Contexts: a stack per thread, primary contexts that are counted, a lost context's answers.
 * - Memory that ends; virtual memory in granules; registrations; sharing with other processes on
 *   the same device; captures in global mode; kernels, by their C twins.
 * - Versions of symbols; drivers that lack some.
 * - Misuse that the real driver leaves undefined, or answers with a wait for the whole device, is
 *   recorded as a violation: handles used after their end, memory freed, unmapped or unregistered
 *   while queued work uses it, a context left with objects in it.
 *
 * What it does not
 * - Time: nothing here says how fast anything is. DMA, caches, page faults, the host's page locks.
 * - Memory of a device that is shared by processes: each process has all of it.
 * - Captured work: it is counted, not run, and makes no graph.
 * - What a lock hides: ThreadSanitizer sees every driver call as ordered after finished work.
 *
 * In the child of a fork every call answers NOT_INITIALIZED, as with the real one.
 *
 * For other processes: FAKE_CUDA_DEVICES (2), FAKE_CUDA_MEMORY (bytes per device, 67108864),
 * FAKE_CUDA_GRANULE (2097152), FAKE_CUDA_VERSION (13000) and FAKE_CUDA_SCRIPT, a list of
 * "SYMBOL:NTH:TIMES:RESULT" parted by commas (see fake_cuda_fail). All are read once, when the
 * library is loaded, and again by fake_cuda_reset.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>

#include "device/cuda/cuda_abi.h"

#define FAKE_CUDA_DEVICES_MOST 8

/* As after loading: no scripts, counters at zero, all objects gone, contexts as new. No thread may
 * be in a driver call. */
void fake_cuda_reset(void);

/* ---- The machine. Called before cuInit; the count and the version may change later as well. */
void fake_cuda_set_devices(int count);
void fake_cuda_set_version(int version);
void fake_cuda_set_memory(int device, uint64_t bytes); /* only while nothing is allocated there */
void fake_cuda_set_granule(uint64_t bytes);            /* a power of two, at least 4096 */
/* What cuDeviceGetAttribute answers; with `known` false, INVALID_VALUE. */
void fake_cuda_set_attribute(int device, int attribute, int value, bool known);
/* Memory is aligned to 256 bytes, as NVIDIA promises, and to no more. */
void fake_cuda_set_skew(bool on);
/* Whether a device can reach another's memory; at first it can. */
void fake_cuda_set_peers(bool on);
/* The driver lacks the symbol (in this version of it; 0: in all). */
void fake_cuda_hide(const char *symbol, int version);
/* A registration of more is refused with INVALID_VALUE, as where Linux caps one at 2 GB. */
void fake_cuda_set_register_cap(uint64_t bytes);
/* A batch of more crashes some drivers; here it fails with INVALID_VALUE and is a violation. */
void fake_cuda_set_batch_cap(uint64_t copies);
/* Others on the device use so much of its memory. */
void fake_cuda_set_taken(int device, uint64_t bytes);

/* ---- Faults. From the nth call from now on (1: the next), `times` calls of the symbol answer
 * `result`; all versions of a symbol have its name. "*" is every symbol but those that end
 * something or tell about errors: each of these calls may fail, and nothing is left behind. */
void fake_cuda_fail(const char *symbol, unsigned nth, unsigned times, rft_cu_result result);
/* As fake_cuda_fail, but the call succeeds, and the work that it queues fails when the stream gets
 * there; the context is lost. */
void fake_cuda_fail_later(const char *symbol, unsigned nth, rft_cu_result result);
/* The context is lost now. */
void fake_cuda_lose(int device, rft_cu_result result);
/* Calls of fake_cuda_fail and fake_cuda_fail_later are forgotten. */
void fake_cuda_forget_faults(void);

/* ---- Time. Queued work stands still until fake_cuda_go, or as many pieces of work as are let by
 * have run. */
void fake_cuda_stop(void);
void fake_cuda_go(void);
void fake_cuda_let(unsigned pieces);
/* One stream stands still. */
void fake_cuda_stop_stream(rft_cu_stream stream);
void fake_cuda_go_stream(rft_cu_stream stream);
/* Waits until no stream has work that may run. */
void fake_cuda_settle(void);

/* ---- What was done. */
uint64_t fake_cuda_calls(const char *symbol); /* NULL: all */
/* Calls on the legacy stream, by either of its names. */
uint64_t fake_cuda_legacy_calls(const char *symbol);
/* Copies from or to host memory that is not registered. */
uint64_t fake_cuda_pageable_copies(void);
/* Bytes of copies between host memory and a device's. */
uint64_t fake_cuda_link_bytes(void);
/* The most descriptors that a batch had. */
uint64_t fake_cuda_batch_most(void);

typedef struct fake_cuda_live {
    unsigned memories;      /* of cuMemAlloc */
    unsigned reservations;  /* of cuMemAddressReserve */
    unsigned physicals;     /* of cuMemCreate and imports */
    unsigned mappings;      /* of cuMemMap */
    unsigned registrations; /* of cuMemHostRegister */
    unsigned host_memories; /* of cuMemHostAlloc */
    unsigned imports;       /* of cuIpcOpenMemHandle */
    unsigned streams;
    unsigned events;
    unsigned libraries;
    unsigned contexts; /* retained, each once a retain */
} fake_cuda_live;

fake_cuda_live fake_cuda_alive(void);
/* The sum of all of them. */
unsigned fake_cuda_leaks(void);
uint64_t fake_cuda_used(int device); /* bytes */

unsigned fake_cuda_violations(void);
/* The latest, "" for none; the text is the calling thread's until it asks again. */
const char *fake_cuda_violation(void);
void fake_cuda_forgive(void);

/* ---- Memory and contexts that refit does not make itself. */
/* What a test may do with the bytes of device memory: where they lie, or NULL. */
void *fake_cuda_bytes(rft_cu_ptr memory, size_t bytes);
/* Whether work on a device may write there. (A range of several mappings: by the first's peers.) */
bool fake_cuda_reaches(int device, rft_cu_ptr memory, size_t bytes);
rft_cu_ptr fake_cuda_managed(int device, size_t bytes);
void fake_cuda_managed_free(rft_cu_ptr memory);
/* Memory of the device's, as PyTorch would allocate it: no counter sees it. */
rft_cu_ptr fake_cuda_memory(int device, size_t bytes);
void fake_cuda_memory_free(rft_cu_ptr memory);
/* Another context on the device, which is not its primary one; it lives until the reset. */
rft_cu_context fake_cuda_other_context(int device);
/* A stream in a context, as a caller brings it. Not among the live ones. */
rft_cu_stream fake_cuda_stream(rft_cu_context context, unsigned flags);
void fake_cuda_stream_free(rft_cu_stream stream);
rft_cu_context fake_cuda_primary(int device);
/* A capture in global mode on the stream, as torch.cuda.graph makes one; whether it is whole. */
void fake_cuda_capture_begin(rft_cu_stream stream);
bool fake_cuda_capture_end(rft_cu_stream stream);
int fake_cuda_capture_mode(void); /* of the calling thread */
/* How deep the calling thread's stack of contexts is. */
unsigned fake_cuda_depth(void);

#endif
