/* Half a megabyte of weights in the types that models have: several blocks of some, a part of one
 * of others, a tied pair, a scalar. */
#include "model.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "tests/support/seeded.h"

#define T(name_, dtype_, rank_, a, b, bytes_, alias)                                               \
    {                                                                                              \
        .size = sizeof(refit_tensor), .name = name_, .dtype = REFIT_##dtype_, .rank = rank_,       \
        .shape = {a, b}, .bytes = bytes_, .alias_of = alias                                        \
    }
#define OWN REFIT_NO_ALIAS

static const struct variant {
    uint32_t count;
    refit_tensor tensors[MODEL_TENSORS_MOST];
} variants[MODEL_VARIANTS] = {
    {7,
     {T("embed", BF16, 2, 300, 500, 300000, OWN), T("head", BF16, 2, 300, 500, 300000, 0),
      T("master", F32, 1, 20000, 0, 80000, OWN), T("codes", U8, 1, 70000, 0, 70000, OWN),
      T("half", F16, 2, 2, 17001, 68004, OWN), T("norm", BF16, 2, 3, 7, 42, OWN),
      T("scale", F32, 0, 0, 0, 4, OWN)}},
    {4,
     {T("embed", BF16, 2, 300, 501, 300600, OWN), T("master", F32, 1, 20000, 0, 80000, OWN),
      T("extra", I64, 1, 9000, 0, 72000, OWN), T("tied", I64, 1, 9000, 0, 72000, 2)}},
    {3,
     {T("packed", F4, 1, 131074, 0, 65537, OWN), T("embed", BF16, 1, 131072, 0, 262144, OWN),
      T("empty", F32, 1, 0, 0, 0, OWN)}},
};

const char *model_rate_name(model_rate rate)
{
    static const char *const names[RATE_COUNT] = {"nothing", "1/1000",   "1/100",
                                                  "1/10",    "a tensor", "everything"};
    return names[rate];
}

bool model_open(chaos_model *model, uint32_t variant, uint64_t seed)
{
    const struct variant *from = &variants[variant % MODEL_VARIANTS];
    memset(model, 0, sizeof *model);
    model->count = from->count;
    for (uint32_t i = 0; i < from->count; i++) {
        model->tensors[i] = from->tensors[i];
        uint32_t alias = from->tensors[i].alias_of;
        model->bytes[i] =
            alias != OWN ? model->bytes[alias] : calloc(1, from->tensors[i].bytes + 8);
        if (model->bytes[i] == NULL) return false;
    }
    model_step(model, RATE_ALL, seed);
    return true;
}

void model_close(chaos_model *model)
{
    for (uint32_t i = 0; i < model->count; i++) {
        if (model->tensors[i].alias_of == OWN) free(model->bytes[i]);
    }
    model->count = 0;
}

static void lessen(refit_tensor *least, const refit_tensor *other)
{
    if (other->rank < least->rank) least->rank = other->rank;
    for (uint32_t i = 0; i < least->rank; i++) {
        if (other->shape[i] < least->shape[i]) least->shape[i] = other->shape[i];
    }
}

/* Tensors of all variants, in order; NULL: that was the last. */
static const refit_tensor *tensor_of_all(uint32_t at)
{
    for (uint32_t i = 0; i < MODEL_VARIANTS; i++) {
        if (at < variants[i].count) return &variants[i].tensors[at];
        at -= variants[i].count;
    }
    return NULL;
}

static bool is_first(uint32_t at)
{
    for (uint32_t i = 0; i < at; i++) {
        if (strcmp(tensor_of_all(i)->name, tensor_of_all(at)->name) == 0) return false;
    }
    return true;
}

bool model_name(uint32_t at, refit_tensor *out)
{
    const refit_tensor *other;
    uint32_t first = 0;
    for (; tensor_of_all(first) != NULL; first++) {
        if (is_first(first) && at-- == 0) break;
    }
    if (tensor_of_all(first) == NULL) return false;
    *out = *tensor_of_all(first);
    for (uint32_t i = first; (other = tensor_of_all(i)) != NULL; i++) {
        if (strcmp(other->name, out->name) == 0) lessen(out, other);
    }
    return true;
}

const refit_tensor *model_find(const chaos_model *model, const char *name, uint32_t *at)
{
    for (uint32_t i = 0; i < model->count; i++) {
        *at = i;
        if (strcmp(model->tensors[i].name, name) == 0) return &model->tensors[i];
    }
    return NULL;
}

static void fill(unsigned char *bytes, uint64_t count, uint64_t *seed)
{
    for (uint64_t i = 0; i < count; i += 8) { /* there are 8 bytes to spare */
        uint64_t word = seeded_next(seed) * UINT64_C(0x9e3779b97f4a7c15);
        memcpy(bytes + i, &word, 8);
    }
}

/* Mostly by one unit in the last place, as training does; now and then anything. */
static void change_element(unsigned char *element, uint32_t width, uint64_t draw)
{
    uint64_t value = 0;
    memcpy(&value, element, width);
    value = draw % 16 == 0 ? draw : value + (draw % 2 != 0 ? 1 : UINT64_MAX);
    memcpy(element, &value, width);
}

static void change_some(chaos_model *model, uint32_t tensor, uint64_t one_of, uint64_t *seed)
{
    uint32_t bits = refit_dtype_bits(model->tensors[tensor].dtype);
    uint32_t width = bits < 8 ? 1 : bits / 8;
    uint64_t elements = model->tensors[tensor].bytes / width;
    for (uint64_t i = 0; i < elements / one_of; i++) {
        uint64_t at = seeded_below(seed, elements);
        change_element(model->bytes[tensor] + at * width, width, seeded_next(seed) >> 8);
    }
}

void model_step(chaos_model *model, model_rate rate, uint64_t seed)
{
    static const uint64_t one_of[RATE_COUNT] = {
        [RATE_FEW] = 1000, [RATE_SOME] = 100, [RATE_MANY] = 10};
    seed |= 1;
    uint32_t chosen = (uint32_t)seeded_below(&seed, model->count);
    for (uint32_t i = 0; i < model->count; i++) {
        if (model->tensors[i].alias_of != OWN) continue;
        if (rate == RATE_ALL || (rate == RATE_ONE && i == chosen)) {
            fill(model->bytes[i], model->tensors[i].bytes, &seed);
        } else if (one_of[rate] != 0) {
            change_some(model, i, one_of[rate], &seed);
        }
    }
}

uint64_t digest_add(uint64_t digest, const refit_tensor *tensor, const void *bytes)
{
    digest = XXH3_64bits_withSeed(tensor->name, strlen(tensor->name), digest);
    digest = XXH3_64bits_withSeed(tensor->shape, sizeof *tensor->shape * tensor->rank,
                                  digest + (uint64_t)tensor->dtype);
    return XXH3_64bits_withSeed(bytes, tensor->bytes, digest);
}

uint64_t model_digest(const chaos_model *model)
{
    uint64_t digest = DIGEST_EMPTY;
    for (uint32_t i = 0; i < model->count; i++)
        digest = digest_add(digest, &model->tensors[i], model->bytes[i]);
    return digest;
}
