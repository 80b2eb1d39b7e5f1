/*
 * Manifests: a list of tensors, checked, with its layout and its digest.
 *
 *     refit_tensor[] ─┐
 *                     ├─► rft_listed_tensor ─► check, store ─► ties, names ─► cut ─► digest
 *     bytes ──────────┘
 *
 * Both ways in meet at one form and pass the same checks; only the status of a refusal differs. The
 * digest is that of the list as it travels, so both ends hash the same bytes.
 */
#include "wire/manifest.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "wire/cut.h"
#include "wire/manifest_rules.h"

/* Copies a checked entry; `names` is where its name goes. Returns where the next one goes. */
static char *store_tensor(rft_manifest_tensor *out, const rft_listed_tensor *tensor, char *names)
{
    memcpy(names, tensor->name.data, tensor->name.count);
    names[tensor->name.count] = '\0';
    *out = (rft_manifest_tensor){
        .name = names,
        .dtype = (refit_dtype)tensor->dtype,
        .rank = tensor->shape.rank,
        .bytes = tensor->bytes,
        .alias_of = tensor->original == 0 ? REFIT_NO_ALIAS : tensor->original - 1,
    };
    memcpy(out->shape, tensor->shape.at, tensor->shape.rank * sizeof out->shape[0]);
    return names + tensor->name.count + 1;
}

/* What both ways in have in common once all tensors are stored and `encoded` is there. */
static refit_status finish(rft_manifest *manifest, const rft_manifest_rules *rules)
{
    RFT_TRY(rft_rules_check_ties(manifest, rules));
    RFT_TRY(rft_rules_check_names(manifest, rules));
    RFT_TRY(rft_manifest_cut(manifest, rules));
    manifest->digest = rft_digest128_of(rft_bytes_view(&manifest->encoded));
    return REFIT_OK;
}

static refit_status check_count(uint32_t count, const rft_manifest_rules *rules)
{
    RFT_REFUSE_IF(count == 0, rules->error, rules->refusal,
                  "a manifest of no tensors: there must be at least one");
    RFT_REFUSE_IF(count > rules->limits->tensors, rules->error, REFIT_ERR_LIMIT,
                  "%u tensors; limits.tensors allows %u", count, rules->limits->tensors);
    return REFIT_OK;
}

/* `name_bytes`: of all names, their NULs included. */
static refit_status create(uint32_t count, uint64_t name_bytes, const rft_manifest_rules *rules,
                           rft_manifest **out)
{
    rft_manifest *manifest = rft_calloc(1, sizeof *manifest);
    if (manifest != NULL) {
        manifest->count = count;
        manifest->tensors = rft_calloc(count, sizeof *manifest->tensors);
        manifest->index = rft_calloc(count, sizeof *manifest->index);
        manifest->names = rft_calloc(name_bytes, 1);
        if (manifest->tensors != NULL && manifest->index != NULL && manifest->names != NULL) {
            *out = manifest;
            return REFIT_OK;
        }
    }
    rft_manifest_close(manifest);
    return rft_fail(rules->error, REFIT_ERR_HOST_MEMORY, "no memory for a manifest of %u tensors",
                    count);
}

/* ---- From a caller's list ---- */

/* No list is stepped through by more. */
#define STRUCT_BYTES_MOST 4096u

/* Callers step by the struct's size as they were compiled. */
static const refit_tensor *tensor_at(const refit_tensor *tensors, uint32_t index)
{
    const unsigned char *first = (const unsigned char *)tensors;
    return (const refit_tensor *)(const void *)(first + index * tensors->size);
}

static refit_status check_structs(const refit_tensor *tensors, uint32_t count,
                                  const rft_manifest_rules *rules)
{
    RFT_REFUSE_IF(tensors == NULL && count != 0, rules->error, REFIT_ERR_INVALID,
                  "the list of tensors is NULL");
    RFT_REFUSE_IF(count != 0 && (tensors->size > STRUCT_BYTES_MOST ||
                                 tensors->size % _Alignof(refit_tensor) != 0),
                  rules->error, REFIT_ERR_INVALID,
                  "tensor 0: set its size to sizeof(refit_tensor)");
    for (uint32_t i = 0; i < count; i++) {
        RFT_REFUSE_IF(
            tensors->size < sizeof *tensors || tensor_at(tensors, i)->size != tensors->size,
            rules->error, REFIT_ERR_INVALID, "tensor %u: set its size to sizeof(refit_tensor)", i);
        RFT_REFUSE_IF(tensor_at(tensors, i)->name == NULL, rules->error, REFIT_ERR_INVALID,
                      "tensor %u has no name", i);
        RFT_REFUSE_IF(tensor_at(tensors, i)->rank > REFIT_RANK_MAX, rules->error, REFIT_ERR_INVALID,
                      "tensor %u has %u dimensions; at most %d are possible", i,
                      tensor_at(tensors, i)->rank, REFIT_RANK_MAX);
    }
    return REFIT_OK;
}

static uint64_t sum_names(const refit_tensor *tensors, uint32_t count)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += strlen(tensor_at(tensors, i)->name) + 1;
    return sum;
}

static rft_listed_tensor list_tensor(const refit_tensor *tensor)
{
    rft_listed_tensor listed = {
        .name = rft_view_text(tensor->name),
        .dtype = (uint32_t)tensor->dtype,
        .original = tensor->alias_of == REFIT_NO_ALIAS ? 0 : tensor->alias_of + 1,
        .shape.rank = tensor->rank,
        .bytes = tensor->bytes,
    };
    memcpy(listed.shape.at, tensor->shape, tensor->rank * sizeof tensor->shape[0]);
    return listed;
}

static refit_status fill_from_list(rft_manifest *manifest, const refit_tensor *tensors,
                                   const rft_manifest_rules *rules)
{
    char *names = manifest->names;
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_listed_tensor listed = list_tensor(tensor_at(tensors, i));
        RFT_TRY(rft_rules_check_tensor(&listed, rules));
        RFT_TRY(rft_tensor_list_append(&listed, rules->limits, &manifest->encoded, rules->error));
        names = store_tensor(&manifest->tensors[i], &listed, names);
    }
    return finish(manifest, rules);
}

refit_status rft_manifest_open(const refit_tensor *tensors, uint32_t count, uint64_t frame_bytes,
                               const rft_limits *limits, rft_manifest **out, refit_error *error)
{
    const rft_manifest_rules rules = {frame_bytes, limits, REFIT_ERR_INVALID, error};
    RFT_TRY(rft_rules_check_frame_bytes(&rules));
    RFT_TRY(check_count(count, &rules));
    RFT_TRY(check_structs(tensors, count, &rules));
    rft_manifest *manifest;
    RFT_TRY(create(count, sum_names(tensors, count), &rules, &manifest));
    refit_status status = fill_from_list(manifest, tensors, &rules);
    if (status == REFIT_OK)
        *out = manifest;
    else
        rft_manifest_close(manifest);
    return status;
}

/* ---- From the wire ---- */

static refit_status fill_from_bytes(rft_manifest *manifest, rft_view encoded,
                                    const rft_manifest_rules *rules)
{
    char *names = manifest->names;
    rft_view rest = encoded;
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_listed_tensor listed;
        RFT_TRY(rft_tensor_list_take(&rest, rules->limits, &listed, rules->error));
        RFT_TRY(rft_rules_check_tensor(&listed, rules));
        names = store_tensor(&manifest->tensors[i], &listed, names);
    }
    RFT_TRY(rft_bytes_append(&manifest->encoded, encoded.data, encoded.count, rules->error));
    return finish(manifest, rules);
}

refit_status rft_manifest_decode(rft_view encoded, uint64_t frame_bytes, const rft_limits *limits,
                                 rft_manifest **out, refit_error *error)
{
    const rft_manifest_rules rules = {frame_bytes, limits, REFIT_ERR_PROTOCOL, error};
    RFT_TRY(rft_rules_check_frame_bytes(&rules));
    RFT_REFUSE_IF(encoded.count > limits->manifest_bytes, error, REFIT_ERR_LIMIT,
                  "a manifest of %zu bytes; limits.manifest_bytes allows %llu", encoded.count,
                  (unsigned long long)limits->manifest_bytes);
    uint32_t count;
    RFT_TRY(rft_tensor_list_count(encoded, limits, &count, error));
    RFT_TRY(check_count(count, &rules));
    rft_manifest *manifest;
    /* A name's entry is longer than the name and a NUL, so all names fit. */
    RFT_TRY(create(count, encoded.count, &rules, &manifest));
    refit_status status = fill_from_bytes(manifest, encoded, &rules);
    if (status == REFIT_OK)
        *out = manifest;
    else
        rft_manifest_close(manifest);
    return status;
}

void rft_manifest_close(rft_manifest *manifest)
{
    if (manifest == NULL) return;
    rft_free(manifest->tensors);
    rft_free(manifest->index);
    rft_free(manifest->names);
    rft_free(manifest->blocks);
    rft_free(manifest->frames);
    rft_bytes_close(&manifest->encoded);
    rft_free(manifest);
}

/* ---- What it tells ---- */

void rft_manifest_describe(const rft_manifest *manifest, uint32_t tensor, refit_tensor *out)
{
    const rft_manifest_tensor *from = &manifest->tensors[tensor];
    *out = (refit_tensor){
        .size = sizeof *out,
        .name = from->name,
        .dtype = from->dtype,
        .rank = from->rank,
        .bytes = from->bytes,
        .alias_of = from->alias_of,
    };
    memcpy(out->shape, from->shape, sizeof out->shape);
}

int rft_manifest_name_compare(const void *a, const void *b)
{
    return strcmp(((const rft_manifest_name *)a)->name, ((const rft_manifest_name *)b)->name);
}

uint32_t rft_manifest_find(const rft_manifest *manifest, const char *name)
{
    const rft_manifest_name wanted = {name, 0};
    const rft_manifest_name *found = bsearch(&wanted, manifest->index, manifest->count,
                                             sizeof *manifest->index, rft_manifest_name_compare);
    return found == NULL ? UINT32_MAX : found->tensor;
}
