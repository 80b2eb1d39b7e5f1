/* cuda_abi_calls: the driver table of refit beside NVIDIA's own types of the same functions. */
#ifndef CUDA_ABI_CALLS_H
#define CUDA_ABI_CALLS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct abi_call {
    const char *field;
    const char *type; /* NVIDIA's name for it: "PFN_cuInit_v2000" */
    bool same;
} abi_call;

extern const abi_call abi_calls[];
extern const size_t abi_call_count;

#endif
