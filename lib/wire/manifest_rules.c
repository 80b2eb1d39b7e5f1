/*
 * The rules of manifests, one function each. They hold for a caller's list and for a peer's alike;
 * the rules' `refusal` says whose fault a breach is. Sizes above a configured limit are
 * REFIT_ERR_LIMIT on both sides. Names are sorted once, so duplicates are neighbours.
 */
#include "wire/manifest_rules.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

#define SHOWN 80 /* bytes of a name in an error's sentence */

/* False if the number of elements or of bytes overflows. The number of bits may. */
static bool shape_bytes(const rft_dims *shape, uint32_t bits, uint64_t *out)
{
    uint64_t total = 1;
    for (uint32_t i = 0; i < shape->rank; i++) {
        if (shape->at[i] != 0) continue;
        *out = 0;
        return true;
    }
    for (uint32_t i = 0; i < shape->rank; i++) {
        if (!rft_mul_u64(total, shape->at[i], &total)) return false;
    }
    return rft_mul_u64(total / 8, bits, out) && rft_add_u64(*out, (total % 8 * bits + 7) / 8, out);
}

static refit_status check_name(rft_view name, const rft_manifest_rules *rules)
{
    RFT_REFUSE_IF(name.count > rules->limits->name_bytes, rules->error, REFIT_ERR_LIMIT,
                  "a tensor's name has %zu bytes; limits.name_bytes allows %u", name.count,
                  rules->limits->name_bytes);
    RFT_REFUSE_IF(name.count == 0 || !rft_view_is_text(name), rules->error, rules->refusal,
                  "a tensor's name is empty or not UTF-8 without control characters");
    return REFIT_OK;
}

refit_status rft_rules_check_tensor(const rft_listed_tensor *tensor,
                                    const rft_manifest_rules *rules)
{
    RFT_TRY(check_name(tensor->name, rules));
    char name[SHOWN];
    rft_view_print(tensor->name, name, sizeof name);
    uint32_t bits = refit_dtype_bits((refit_dtype)tensor->dtype);
    RFT_REFUSE_IF(bits == 0, rules->error, rules->refusal, "tensor '%s': there is no dtype %u",
                  name, tensor->dtype);
    RFT_REFUSE_IF(tensor->shape.rank > rules->limits->rank, rules->error, REFIT_ERR_LIMIT,
                  "tensor '%s' has %u dimensions; limits.rank allows %u", name, tensor->shape.rank,
                  rules->limits->rank);
    uint64_t bytes;
    RFT_REFUSE_IF(!shape_bytes(&tensor->shape, bits, &bytes), rules->error, rules->refusal,
                  "tensor '%s': its shape has more elements or bytes than 64 bits can count", name);
    RFT_REFUSE_IF(bytes != tensor->bytes, rules->error, rules->refusal,
                  "tensor '%s': its shape and dtype make %llu bytes, not %llu", name,
                  (unsigned long long)bytes, (unsigned long long)tensor->bytes);
    return REFIT_OK;
}

refit_status rft_rules_check_frame_bytes(const rft_manifest_rules *rules)
{
    RFT_REFUSE_IF(rules->frame_bytes == 0, rules->error, rules->refusal,
                  "frames of 0 bytes carry nothing");
    RFT_REFUSE_IF(rules->frame_bytes > rules->limits->frame_bytes, rules->error, REFIT_ERR_LIMIT,
                  "frames of %llu bytes; limits.frame_bytes allows %llu",
                  (unsigned long long)rules->frame_bytes,
                  (unsigned long long)rules->limits->frame_bytes);
    return REFIT_OK;
}

static refit_status check_tie(const rft_manifest *manifest, uint32_t index,
                              const rft_manifest_rules *rules)
{
    const rft_manifest_tensor *tensor = &manifest->tensors[index];
    if (tensor->alias_of == REFIT_NO_ALIAS) return REFIT_OK;
    RFT_REFUSE_IF(tensor->alias_of >= manifest->count, rules->error, rules->refusal,
                  "tensor '%.*s' is tied to number %u; there are %u", SHOWN, tensor->name,
                  tensor->alias_of, manifest->count);
    RFT_REFUSE_IF(tensor->alias_of == index, rules->error, rules->refusal,
                  "tensor '%.*s' is tied to itself: name the one that it shares bytes with", SHOWN,
                  tensor->name);
    const rft_manifest_tensor *original = &manifest->tensors[tensor->alias_of];
    RFT_REFUSE_IF(original->alias_of != REFIT_NO_ALIAS, rules->error, rules->refusal,
                  "tensor '%.*s' is tied to '%.*s', which is tied itself; name the original", SHOWN,
                  tensor->name, SHOWN, original->name);
    RFT_REFUSE_IF(original->dtype != tensor->dtype || original->bytes != tensor->bytes,
                  rules->error, rules->refusal,
                  "tensor '%.*s' is tied to '%.*s' but differs in dtype or bytes", SHOWN,
                  tensor->name, SHOWN, original->name);
    return REFIT_OK;
}

refit_status rft_rules_check_ties(const rft_manifest *manifest, const rft_manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->count; i++)
        RFT_TRY(check_tie(manifest, i, rules));
    return REFIT_OK;
}

refit_status rft_rules_check_names(rft_manifest *manifest, const rft_manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->count; i++)
        manifest->index[i] = (rft_manifest_name){manifest->tensors[i].name, i};
    qsort(manifest->index, manifest->count, sizeof *manifest->index, rft_manifest_name_compare);
    for (uint32_t i = 1; i < manifest->count; i++) {
        RFT_REFUSE_IF(rft_manifest_name_compare(&manifest->index[i - 1], &manifest->index[i]) == 0,
                      rules->error, rules->refusal, "two tensors are named '%.*s'", SHOWN,
                      manifest->index[i].name);
    }
    return REFIT_OK;
}
