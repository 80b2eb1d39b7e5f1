/* driver_limits: what NVIDIA's driver does while a host function stands, by the driver alone.
 *
 * How much work a stream takes before a call waits, and which calls wait for a function that stands
 * on another stream. The fake driver's rules (tests/fake_cuda/fake_cuda.h) come from what the first
 * form of this program printed on an H100 with driver 580; this form has been compiled only. It
 * needs CUDA's headers:
 *
 *     nvcc -o driver_limits tests/gpu/driver_limits.c -lcuda && ./driver_limits
 *
 * Ends with 77 where there is no GPU.
 */
#define _GNU_SOURCE

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        CUresult result_ = (call);                                                                 \
        if (result_ != CUDA_SUCCESS) {                                                             \
            fprintf(stderr, "%s answered %d\n", #call, (int)result_);                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define MIB ((size_t)1 << 20)

static CUcontext context;
static CUdeviceptr device; /* 64 MiB */
static char *pinned;       /* 64 MiB */
static char *pageable;     /* 1 MiB */
static atomic_int gate;    /* 1: the function that stands goes on */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static CUdeviceptr at(const void *memory)
{
    return (CUdeviceptr)memory;
}

static void CUDA_CB stand(void *user)
{
    (void)user;
    while (!atomic_load(&gate))
        usleep(200);
}

static void CUDA_CB pass(void *user)
{
    (void)user;
}

/* A stream on which a host function stands until the gate is opened. */
static CUstream standing_stream(void)
{
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    atomic_store(&gate, 0);
    CHECK(cuLaunchHostFunc(stream, stand, NULL));
    usleep(5000);
    return stream;
}

/* ---- How much a stream takes ---- */

typedef CUresult (*put_work)(CUstream stream, CUevent event);

static CUresult put_fill(CUstream stream, CUevent event)
{
    (void)event;
    return cuMemsetD8Async(device, 1, 8, stream);
}

static CUresult put_in(CUstream stream, CUevent event)
{
    (void)event;
    return cuMemcpyAsync(device, at(pinned), 65536, stream);
}

static CUresult put_out(CUstream stream, CUevent event)
{
    (void)event;
    return cuMemcpyAsync(at(pinned), device, 64, stream);
}

static CUresult put_call(CUstream stream, CUevent event)
{
    (void)event;
    return cuLaunchHostFunc(stream, pass, NULL);
}

static CUresult put_record(CUstream stream, CUevent event)
{
    return cuEventRecord(event, stream);
}

static CUresult put_call_and_copy(CUstream stream, CUevent event)
{
    CUresult result = put_call(stream, event);
    return result == CUDA_SUCCESS ? put_in(stream, event) : result;
}

enum { PUTS_MOST = 20000 };

typedef struct putting {
    put_work put;
    CUstream stream;
    CUevent event;
    atomic_int done;
} putting;

static void *put_all(void *user)
{
    putting *it = user;
    CHECK(cuCtxSetCurrent(context));
    for (int i = 0; i < PUTS_MOST; i++) {
        CHECK(it->put(it->stream, it->event));
        atomic_store(&it->done, i + 1);
    }
    return NULL;
}

/* Until the count stays for 0.4 s, or all are there. */
static void print_depth(const char *name, put_work put)
{
    putting it = {.put = put, .stream = standing_stream()};
    pthread_t thread;
    int last = -1;
    CHECK(cuEventCreate(&it.event, CU_EVENT_DISABLE_TIMING));
    pthread_create(&thread, NULL, put_all, &it);
    for (int same = 0; same < 8 && last < PUTS_MOST;) {
        usleep(50000);
        int done = atomic_load(&it.done);
        same = done == last ? same + 1 : 0;
        last = done;
    }
    printf("a stream takes %5d of %s%s\n", last, name, last < PUTS_MOST ? "" : ", and more");
    atomic_store(&gate, 1);
    pthread_join(thread, NULL);
    CHECK(cuStreamSynchronize(it.stream));
    CHECK(cuEventDestroy(it.event));
    CHECK(cuStreamDestroy(it.stream));
}

/* ---- Which calls wait ---- */

typedef struct calling {
    CUstream standing; /* on which a function stands */
    CUstream other;
    CUdeviceptr memory;
    void *host;
    atomic_int done;
    CUresult result;
    CUresult (*call)(struct calling *it);
} calling;

static CUresult copy_on_host(calling *it)
{
    return cuMemcpyAsync(at(pinned), at(pinned + 4096), 64, it->standing);
}

static CUresult copy_from_pageable(calling *it)
{
    return cuMemcpyAsync(device, at(pageable), 64, it->other);
}

static CUresult copy_and_wait(calling *it)
{
    CUresult result = cuMemcpyAsync(device, at(pinned), 64, it->other);
    return result == CUDA_SUCCESS ? cuStreamSynchronize(it->other) : result;
}

static CUresult call_and_wait(calling *it)
{
    CUresult result = cuLaunchHostFunc(it->other, pass, NULL);
    return result == CUDA_SUCCESS ? cuStreamSynchronize(it->other) : result;
}

static CUresult alloc_device(calling *it)
{
    return cuMemAlloc(&it->memory, 64 * MIB);
}

static CUresult free_device(calling *it)
{
    return cuMemFree(it->memory);
}

static CUresult alloc_host(calling *it)
{
    return cuMemHostAlloc(&it->host, 64 * MIB, 0);
}

static CUresult free_host(calling *it)
{
    return cuMemFreeHost(it->host);
}

static CUresult pin(calling *it)
{
    return cuMemHostRegister(it->host, 64 * MIB, 0);
}

static CUresult unpin(calling *it)
{
    return cuMemHostUnregister(it->host);
}

static void *call_once(void *user)
{
    calling *it = user;
    CHECK(cuCtxSetCurrent(context));
    it->result = it->call(it);
    atomic_store(&it->done, 1);
    return NULL;
}

/* Has 0.7 s. */
static void print_waits(calling *it, const char *name, CUresult (*call)(calling *it))
{
    pthread_t thread;
    it->call = call;
    it->standing = standing_stream();
    CHECK(cuStreamCreate(&it->other, CU_STREAM_NON_BLOCKING));
    atomic_store(&it->done, 0);
    pthread_create(&thread, NULL, call_once, it);
    for (double start = now(); !atomic_load(&it->done) && now() - start < 0.7;)
        usleep(1000);
    printf("%-40s %s\n", name, atomic_load(&it->done) ? "returns" : "waits for the function");
    atomic_store(&gate, 1);
    pthread_join(thread, NULL);
    CHECK(it->result);
    CHECK(cuStreamSynchronize(it->standing));
    CHECK(cuStreamDestroy(it->standing));
    CHECK(cuStreamDestroy(it->other));
}

int main(void)
{
    CUdevice gpu;
    calling it = {0};
    void *room;
    if (cuInit(0) != CUDA_SUCCESS || cuDeviceGet(&gpu, 0) != CUDA_SUCCESS) return 77;
    CHECK(cuDevicePrimaryCtxRetain(&context, gpu));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc(&device, 64 * MIB));
    CHECK(cuMemHostAlloc((void **)&pinned, 64 * MIB, 0));
    pageable = calloc(1, MIB);
    if (pageable == NULL || posix_memalign(&room, 4096, 64 * MIB) != 0) return 1;
    memset(room, 1, 64 * MIB);

    print_depth("fills", put_fill);
    print_depth("copies in", put_in);
    print_depth("copies out", put_out);
    print_depth("host functions", put_call);
    print_depth("event records", put_record);
    print_depth("host functions, each with a copy", put_call_and_copy);

    print_waits(&it, "a copy on the host, on its stream", copy_on_host);
    print_waits(&it, "a copy of pageable memory", copy_from_pageable);
    print_waits(&it, "a copy, and a wait for it", copy_and_wait);
    print_waits(&it, "a host function, and a wait for it", call_and_wait);
    print_waits(&it, "cuMemAlloc", alloc_device);
    print_waits(&it, "cuMemFree", free_device);
    print_waits(&it, "cuMemHostAlloc", alloc_host);
    print_waits(&it, "cuMemFreeHost", free_host);
    it.host = room;
    print_waits(&it, "cuMemHostRegister", pin);
    print_waits(&it, "cuMemHostUnregister", unpin);
    free(room);
    free(pageable);
    CHECK(cuMemFreeHost(pinned));
    CHECK(cuMemFree(device));
    CHECK(cuDevicePrimaryCtxRelease(gpu));
    return 0;
}
