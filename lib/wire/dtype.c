/*
 * Element types: names and sizes, from the one list in refit/broadcast.h. refit moves elements and
 * never interprets them, so a type is a name and a number of bits.
 */
#include <string.h>

#include <refit/broadcast.h>

#include "base/error.h"

const char *refit_dtype_name(refit_dtype dtype)
{
    switch (dtype) {
#define DTYPE_NAME(name, number, bits)                                                             \
    case REFIT_##name: return #name;
        REFIT_DTYPE_MAP(DTYPE_NAME)
#undef DTYPE_NAME
    }
    return NULL;
}

uint32_t refit_dtype_bits(refit_dtype dtype)
{
    switch (dtype) {
#define DTYPE_BITS(name, number, bits)                                                             \
    case REFIT_##name: return (bits);
        REFIT_DTYPE_MAP(DTYPE_BITS)
#undef DTYPE_BITS
    }
    return 0;
}

refit_status refit_dtype_parse(const char *name, refit_dtype *out)
{
    static const refit_dtype dtypes[] = {
#define DTYPE_ENTRY(name, number, bits) REFIT_##name,
        REFIT_DTYPE_MAP(DTYPE_ENTRY)
#undef DTYPE_ENTRY
    };
    if (name == NULL || out == NULL) return REFIT_ERR_INVALID;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(refit_dtype_name(dtypes[i]), name) != 0) continue;
        *out = dtypes[i];
        return REFIT_OK;
    }
    return REFIT_ERR_NOT_FOUND;
}
