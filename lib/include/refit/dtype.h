/*
 * refit/dtype.h: element types of tensors.
 */
#ifndef REFIT_DTYPE_H
#define REFIT_DTYPE_H

#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types. Names and sizes are those of the safetensors format; refit never interprets
 * values. */
#define REFIT_DTYPE_MAP(X)                                                                         \
    X(BOOL, 1, 8)                                                                                  \
    X(F4, 2, 4)                                                                                    \
    X(F6_E2M3, 3, 6)                                                                               \
    X(F6_E3M2, 4, 6)                                                                               \
    X(U8, 5, 8)                                                                                    \
    X(I8, 6, 8)                                                                                    \
    X(F8_E5M2, 7, 8)                                                                               \
    X(F8_E4M3, 8, 8)                                                                               \
    X(F8_E8M0, 9, 8)                                                                               \
    X(I16, 10, 16)                                                                                 \
    X(U16, 11, 16)                                                                                 \
    X(F16, 12, 16)                                                                                 \
    X(BF16, 13, 16)                                                                                \
    X(I32, 14, 32)                                                                                 \
    X(U32, 15, 32)                                                                                 \
    X(F32, 16, 32)                                                                                 \
    X(C64, 17, 64)                                                                                 \
    X(F64, 18, 64)                                                                                 \
    X(I64, 19, 64)                                                                                 \
    X(U64, 20, 64)

typedef enum refit_dtype {
#define REFIT_DTYPE_ENUM(name, number, bits) REFIT_##name = (number),
    REFIT_DTYPE_MAP(REFIT_DTYPE_ENUM)
#undef REFIT_DTYPE_ENUM
} refit_dtype;

/* The type's name ("BF16"), a constant, or NULL. */
REFIT_API const char *refit_dtype_name(refit_dtype dtype);

/* Bits per element, or 0 for no such type. */
REFIT_API uint32_t refit_dtype_bits(refit_dtype dtype);

/*
 * Finds a type by name.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_dtype_parse(const char *name, refit_dtype *out);

#ifdef __cplusplus
}
#endif
#endif
