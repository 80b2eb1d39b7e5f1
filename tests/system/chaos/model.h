/*
 * model: the trainer's weights, and how a step of training changes them. In some versions nothing
 * changes, in some a few elements, in some all of them, so that blocks travel in every mode that
 * the protocol has.
 */
#ifndef CHAOS_MODEL_H
#define CHAOS_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/broadcast.h>

#define MODEL_TENSORS_MOST 8
#define MODEL_VARIANTS     3
#define MODEL_LEAST_KIB    300u    /* every variant has more bytes */
#define MODEL_TENSOR_BYTES 300600u /* no tensor has more */
#define MODEL_NAMES_MOST   16      /* of all variants together */

typedef enum model_rate {
    RATE_NONE, /* nothing changes */
    RATE_FEW,  /* 1 element of 1,000 */
    RATE_SOME, /* 1 of 100 */
    RATE_MANY, /* 1 of 10 */
    RATE_ONE,  /* all of one tensor */
    RATE_ALL,  /* all of everything */
    RATE_COUNT,
} model_rate;

const char *model_rate_name(model_rate rate);

typedef struct chaos_model {
    uint32_t count;
    refit_tensor tensors[MODEL_TENSORS_MOST];
    unsigned char *bytes[MODEL_TENSORS_MOST]; /* of a tied tensor: those of the other */
} chaos_model;

/* `variant`: one of several lists of tensors. False: no memory. */
bool model_open(chaos_model *model, uint32_t variant, uint64_t seed);
void model_close(chaos_model *model);
/* Every name that a tensor has in some variant, once each, with what all tensors of the name have
 * room for: the fewest dimensions and the least of each, and the bytes of one of them. False: there
 * are no more. */
bool model_name(uint32_t at, refit_tensor *out);
/* NULL: none is known. */
const refit_tensor *model_find(const chaos_model *model, const char *name, uint32_t *at);
void model_step(chaos_model *model, model_rate rate, uint64_t seed);

/* Of names, types, shapes and bytes in order, by XXH3: nothing of the library's own digests. */
uint64_t model_digest(const chaos_model *model);
uint64_t digest_add(uint64_t digest, const refit_tensor *tensor, const void *bytes);
#define DIGEST_EMPTY UINT64_C(0x9e3779b97f4a7c15)

#endif
