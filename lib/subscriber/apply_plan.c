/* Tensors and destinations meet by name. */
#include "subscriber/apply_plan.h"

#include <string.h>

#include "base/alloc.h"
#include "subscriber/apply_write.h"

static refit_status check_fit(const rft_destination *one, const rft_manifest_tensor *tensor,
                              refit_error *error)
{
    rft_apply_cast cast = rft_apply_cast_of(one, tensor);
    RFT_REFUSE_IF(one->cast && one->dtype != tensor->dtype && !rft_apply_casts(cast), error,
                  REFIT_ERR_INVALID,
                  "'%.140s' is %s, which is not converted to %s in place: only F32, F16 and BF16 "
                  "are, to each other",
                  one->name, refit_dtype_name(tensor->dtype), refit_dtype_name(one->dtype));
    RFT_REFUSE_IF(rft_apply_casts(cast) && one->bytes != rft_apply_there(cast, tensor->bytes),
                  error, REFIT_ERR_INVALID,
                  "'%.160s' has %llu bytes as %s, and its destination %llu", one->name,
                  (unsigned long long)rft_apply_there(cast, tensor->bytes),
                  refit_dtype_name(one->dtype), (unsigned long long)one->bytes);
    if (rft_apply_casts(cast)) return REFIT_OK;
    RFT_REFUSE_IF(one->bytes != tensor->bytes, error, REFIT_ERR_INVALID,
                  "'%.160s' has %llu bytes, and its destination %llu", one->name,
                  (unsigned long long)tensor->bytes, (unsigned long long)one->bytes);
    RFT_REFUSE_IF((int)one->dtype != 0 && one->dtype != tensor->dtype, error, REFIT_ERR_INVALID,
                  "'%.160s' is %s, and its destination %s", one->name,
                  refit_dtype_name(tensor->dtype), refit_dtype_name(one->dtype));
    return REFIT_OK;
}

static uint32_t original_of(const rft_manifest *manifest, uint32_t tensor)
{
    uint32_t alias = manifest->tensors[tensor].alias_of;
    return alias == REFIT_NO_ALIAS ? tensor : alias;
}

/* ---- Two tensors for one memory */

#define COMPARE_BYTES (RFT_WINDOW_BYTES / 2)

static refit_status compare(const rft_in_place *place, const rft_in_place_source *source,
                            const rft_manifest_tensor *a, const rft_manifest_tensor *b, bool *equal,
                            refit_error *error)
{
    unsigned char *window = place->to.source;
    *equal = a->dtype == b->dtype && a->bytes == b->bytes;
    for (uint64_t done = 0, bytes; *equal && done < a->bytes; done += bytes) {
        const unsigned char *one, *other;
        bytes = a->bytes - done < COMPARE_BYTES ? a->bytes - done : COMPARE_BYTES;
        RFT_TRY(rft_apply_read(source, a->offset + done, bytes, window, &one, error));
        RFT_TRY(
            rft_apply_read(source, b->offset + done, bytes, window + COMPARE_BYTES, &other, error));
        *equal = memcmp(one, other, bytes) == 0;
    }
    return REFIT_OK;
}

/* The digests of tensors do not come this far, and a read of both costs less than writing one. */
static refit_status check_equal(const rft_in_place *place, const rft_in_place_source *source,
                                uint32_t tensor, const rft_destination *two, uint32_t other,
                                refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    bool equal;
    RFT_TRY(compare(place, source, &manifest->tensors[tensor], &manifest->tensors[other], &equal,
                    error));
    RFT_REFUSE_IF(!equal, error, REFIT_ERR_INVALID,
                  "'%.64s' and '%.64s' have one memory here, but differ in the version: untie them "
                  "here, so that each has its own memory, or tie them at the trainer",
                  manifest->tensors[tensor].name, two->name);
    return REFIT_OK;
}

/* ---- The plan */

/* Twins are one memory, so what is written there is noted with the first of them. */
static refit_status plan_one(rft_in_place *place, const rft_in_place_source *source,
                             rft_apply_plan *plan, const rft_destination *one, refit_error *error)
{
    const rft_manifest *manifest = plan->manifest;
    uint32_t tensor = rft_manifest_find(manifest, one->name);
    if (tensor == UINT32_MAX) return REFIT_OK;
    RFT_TRY(check_fit(one, &manifest->tensors[tensor], error));
    uint32_t original = original_of(manifest, tensor), *there = &place->tensors[one->twin];
    plan->covered[original] = 1;
    if (*there == original) return REFIT_OK;
    if (*there != RFT_NO_TENSOR) return check_equal(place, source, *there, one, original, error);
    *there = original;
    plan->blocks += manifest->tensors[original].blocks;
    plan->bytes += one->bytes;
    return REFIT_OK;
}

static void find_rest(const rft_in_place *place, rft_apply_plan *plan)
{
    const rft_manifest *manifest = plan->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0 || plan->covered[i]) continue;
        if (plan->left++ == 0) plan->first_left = i;
    }
    for (uint32_t i = 0; i < place->to.count && plan->absent == NULL; i++) {
        const rft_destination *one = &place->to.list[i];
        if (one->bytes > 0 && place->tensors[one->twin] == RFT_NO_TENSOR) plan->absent = one->name;
    }
}

static refit_status check_rest(const rft_apply_plan *plan, refit_error *error)
{
    RFT_REFUSE_IF(plan->left > 0, error, REFIT_ERR_NOT_FOUND,
                  "%u tensors of the version have no destination, the first is '%.160s'",
                  plan->left, plan->manifest->tensors[plan->first_left].name);
    RFT_REFUSE_IF(plan->absent != NULL, error, REFIT_ERR_NOT_FOUND,
                  "the version has nothing for the destination of '%.160s'", plan->absent);
    return REFIT_OK;
}

static refit_status make(rft_in_place *place, const rft_in_place_source *source,
                         rft_apply_plan *plan, bool strict, refit_error *error)
{
    for (uint32_t i = 0; i < place->to.count; i++)
        place->tensors[i] = RFT_NO_TENSOR;
    for (uint32_t i = 0; i < place->to.count; i++)
        RFT_TRY(plan_one(place, source, plan, &place->to.list[i], error));
    find_rest(place, plan);
    return strict ? check_rest(plan, error) : REFIT_OK;
}

refit_status rft_apply_plan_make(rft_in_place *place, const rft_in_place_source *source,
                                 bool strict, rft_apply_plan *plan, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    *plan = (rft_apply_plan){.manifest = manifest};
    plan->covered = rft_calloc((size_t)manifest->count + 1, 1);
    RFT_REFUSE_IF(plan->covered == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to look where %u tensors go", manifest->count);
    refit_status status = make(place, source, plan, strict, error);
    rft_free(plan->covered);
    plan->covered = NULL;
    return status;
}
