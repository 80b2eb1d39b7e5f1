/*
 * bench_cuda: the driver, opened by its library's name and asked for each function by name and
 * version (cuGetProcAddress_v2). The declarations are this file's own, so that the baselines do not
 * depend on refit's; numbers and layouts are NVIDIA's binary interface.
 */
#include "bench_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct location {
    int type; /* 1: a device */
    int id;
} location;

typedef struct allocation {
    int type; /* 1: pinned */
    int handle_types;
    location where;
    void *win32;
    unsigned char flags[8];
} allocation;

typedef struct access {
    location where;
    int flags; /* 3: read and write */
} access;

typedef unsigned long long address;

/* X(field, "symbol", version, arguments…) */
#define SYMBOLS(X)                                                                                 \
    X(init, "cuInit", 2000, unsigned)                                                              \
    X(get_device, "cuDeviceGet", 2000, int *, int)                                                 \
    X(retain, "cuDevicePrimaryCtxRetain", 7000, void **, int)                                      \
    X(release, "cuDevicePrimaryCtxRelease", 11000, int)                                            \
    X(push, "cuCtxPushCurrent", 4000, void *)                                                      \
    X(pop, "cuCtxPopCurrent", 4000, void **)                                                       \
    X(wait_device, "cuCtxSynchronize", 2000, void)                                                 \
    X(info, "cuMemGetInfo", 3020, size_t *, size_t *)                                              \
    X(alloc, "cuMemAlloc", 3020, address *, size_t)                                                \
    X(free, "cuMemFree", 3020, address)                                                            \
    X(pin, "cuMemHostAlloc", 2020, void **, size_t, unsigned)                                      \
    X(unpin, "cuMemFreeHost", 2000, void *)                                                        \
    X(copy, "cuMemcpyAsync", 4000, address, address, size_t, void *)                               \
    X(fill, "cuMemsetD8Async", 3020, address, unsigned char, size_t, void *)                       \
    X(stream_open, "cuStreamCreateWithPriority", 5050, void **, unsigned, int)                     \
    X(stream_close, "cuStreamDestroy", 4000, void *)                                               \
    X(wait, "cuStreamSynchronize", 2000, void *)                                                   \
    X(granularity, "cuMemGetAllocationGranularity", 10020, size_t *, const allocation *, int)      \
    X(reserve, "cuMemAddressReserve", 10020, address *, size_t, size_t, address,                   \
      unsigned long long)                                                                          \
    X(unreserve, "cuMemAddressFree", 10020, address, size_t)                                       \
    X(create, "cuMemCreate", 10020, address *, size_t, const allocation *, unsigned long long)     \
    X(destroy, "cuMemRelease", 10020, address)                                                     \
    X(map, "cuMemMap", 10020, address, size_t, size_t, address, unsigned long long)                \
    X(unmap, "cuMemUnmap", 10020, address, size_t)                                                 \
    X(allow, "cuMemSetAccess", 10020, address, size_t, const access *, size_t)

struct bench_cuda {
    void *library;
    int ordinal;
    int device; /* the context is retained and current */
    void *stream;
    size_t granule;
    char why[128];
#define FIELD(field, symbol, at, ...) int (*field)(__VA_ARGS__);
    SYMBOLS(FIELD)
#undef FIELD
};

typedef int (*find_function)(const char *symbol, void **function, int version, uint64_t flags,
                             int *found);

int bench_cuda_ordinal(const char *spec)
{
    if (spec == NULL || strncmp(spec, "cuda", 4) != 0) return -1;
    return spec[4] == ':' ? atoi(spec + 5) : 0;
}

static bool check(bench_cuda *cuda, int result, const char *call)
{
    if (result == 0) return true;
    snprintf(cuda->why, sizeof cuda->why, "the baseline's %s answered CUDA error %d", call, result);
    return false;
}

static bool find(bench_cuda *cuda, find_function get, const char *symbol, int version, void *field)
{
    void *function = NULL;
    int found = 0;
    if (get(symbol, &function, version, 0, &found) != 0 || function == NULL) {
        snprintf(cuda->why, sizeof cuda->why, "the driver has no %s", symbol);
        return false;
    }
    memcpy(field, &function, sizeof function);
    return true;
}

static bool load(bench_cuda *cuda)
{
    find_function get;
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = cuda->library != NULL ? dlsym(cuda->library, "cuGetProcAddress_v2") : NULL;
    if (symbol == NULL) {
        snprintf(cuda->why, sizeof cuda->why, "there is no CUDA driver that knows CUDA 12");
        return false;
    }
    memcpy(&get, &symbol, sizeof get);
#define FIND(field, name, at, ...)                                                                 \
    if (!find(cuda, get, name, at, &cuda->field)) return false;
    SYMBOLS(FIND)
#undef FIND
    return true;
}

static allocation on_device(const bench_cuda *cuda)
{
    return (allocation){.type = 1, .where = {.type = 1, .id = cuda->device}};
}

static bool start(bench_cuda *cuda)
{
    void *context;
    if (!check(cuda, cuda->init(0), "cuInit")) return false;
    if (!check(cuda, cuda->get_device(&cuda->device, cuda->ordinal), "cuDeviceGet")) return false;
    if (!check(cuda, cuda->retain(&context, cuda->device), "cuDevicePrimaryCtxRetain"))
        return false;
    if (check(cuda, cuda->push(context), "cuCtxPushCurrent")) {
        allocation kind = on_device(cuda);
        if (check(cuda, cuda->granularity(&cuda->granule, &kind, 0),
                  "cuMemGetAllocationGranularity"))
            if (check(cuda, cuda->stream_open(&cuda->stream, 1, 0), "cuStreamCreate")) return true;
        cuda->pop(&context);
    }
    cuda->release(cuda->device);
    return false;
}

bench_cuda *bench_cuda_open(int ordinal, char *why, size_t room)
{
    bench_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        snprintf(why, room, "out of memory");
        return NULL;
    }
    cuda->ordinal = ordinal;
    if (load(cuda) && start(cuda)) return cuda;
    snprintf(why, room, "%s", cuda->why);
    if (cuda->library != NULL) dlclose(cuda->library);
    free(cuda);
    return NULL;
}

void bench_cuda_close(bench_cuda *cuda)
{
    void *context;
    if (cuda == NULL) return;
    cuda->stream_close(cuda->stream);
    cuda->pop(&context);
    cuda->release(cuda->device);
    dlclose(cuda->library);
    free(cuda);
}

const char *bench_cuda_why(const bench_cuda *cuda)
{
    return cuda->why;
}

uint64_t bench_cuda_free_bytes(const bench_cuda *cuda)
{
    size_t free_bytes = 0, total;
    return cuda->info(&free_bytes, &total) == 0 ? free_bytes : 0;
}

void *bench_cuda_alloc(bench_cuda *cuda, uint64_t bytes)
{
    address memory = 0;
    return check(cuda, cuda->alloc(&memory, bytes), "cuMemAlloc") ? (void *)(uintptr_t)memory
                                                                  : NULL;
}

bool bench_cuda_free(bench_cuda *cuda, void *memory)
{
    return check(cuda, cuda->free((uintptr_t)memory), "cuMemFree");
}

void *bench_cuda_pin(bench_cuda *cuda, uint64_t bytes)
{
    void *memory = NULL;
    return check(cuda, cuda->pin(&memory, bytes, 0), "cuMemHostAlloc") ? memory : NULL;
}

bool bench_cuda_unpin(bench_cuda *cuda, void *memory)
{
    return check(cuda, cuda->unpin(memory), "cuMemFreeHost");
}

bool bench_cuda_copy(bench_cuda *cuda, void *to, const void *from, uint64_t bytes)
{
    int result = cuda->copy((uintptr_t)to, (uintptr_t)from, bytes, cuda->stream);
    return check(cuda, result, "cuMemcpyAsync");
}

bool bench_cuda_fill(bench_cuda *cuda, void *memory, int value, uint64_t bytes)
{
    int result = cuda->fill((uintptr_t)memory, (unsigned char)value, bytes, cuda->stream);
    return check(cuda, result, "cuMemsetD8Async");
}

bool bench_cuda_wait(bench_cuda *cuda)
{
    return check(cuda, cuda->wait(cuda->stream), "cuStreamSynchronize");
}

bool bench_cuda_wait_device(bench_cuda *cuda)
{
    return check(cuda, cuda->wait_device(), "cuCtxSynchronize");
}

void *bench_cuda_stream(const bench_cuda *cuda)
{
    return cuda->stream;
}

uint64_t bench_cuda_granule(const bench_cuda *cuda)
{
    return cuda->granule;
}

void *bench_cuda_reserve(bench_cuda *cuda, uint64_t bytes)
{
    address at = 0;
    int result = cuda->reserve(&at, bytes, 0, 0, 0);
    return check(cuda, result, "cuMemAddressReserve") ? (void *)(uintptr_t)at : NULL;
}

bool bench_cuda_map(bench_cuda *cuda, void *at, uint64_t bytes)
{
    allocation kind = on_device(cuda);
    access both = {.where = kind.where, .flags = 3};
    address handle;
    if (!check(cuda, cuda->create(&handle, bytes, &kind, 0), "cuMemCreate")) return false;
    bool mapped = check(cuda, cuda->map((uintptr_t)at, bytes, 0, handle, 0), "cuMemMap");
    cuda->destroy(handle); /* the mapping keeps the memory */
    return mapped && check(cuda, cuda->allow((uintptr_t)at, bytes, &both, 1), "cuMemSetAccess");
}

bool bench_cuda_unmap(bench_cuda *cuda, void *at, uint64_t bytes)
{
    return check(cuda, cuda->unmap((uintptr_t)at, bytes), "cuMemUnmap");
}

bool bench_cuda_unreserve(bench_cuda *cuda, void *at, uint64_t bytes)
{
    return check(cuda, cuda->unreserve((uintptr_t)at, bytes), "cuMemAddressFree");
}
