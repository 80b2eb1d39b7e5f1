/*
 * An update into destinations.
 *
 * All is checked before the first byte is written: names, sizes and types against the manifest, and
 * that two tensors which are one memory here are tied at the trainer's end, too. The bytes come
 * from a verified image; in the publisher's shared memory they may be overwritten under our eyes,
 * which the mark tells at the end. A destination equals the image where it was compared, so its
 * digest is only taken with broadcast.verify: always: over what is really there, device memory
 * included, up to the digest of the version.
 */
#include "broadcast/in_place.h"

#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "kernels/copy.h"
#include "kernels/digest.h"

#define NOTHING UINT32_MAX

/* ---- Binding */

refit_status rft_in_place_bind(rft_in_place *place, const refit_destination *list, uint32_t count,
                               const refit_config *config, refit_error *error)
{
    uint32_t *tensors = rft_calloc((size_t)count + 1, sizeof *tensors);
    RFT_REFUSE_IF(tensors == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u destinations",
                  count);
    refit_status status = rft_destinations_open(&place->to, list, count, config, error);
    if (status == REFIT_OK) {
        place->tensors = tensors;
    } else {
        rft_free(tensors);
    }
    return status;
}

void rft_in_place_unbind(rft_in_place *place)
{
    rft_rollback_reset(&place->old);
    rft_destinations_close(&place->to);
    rft_free(place->tensors);
    place->tensors = NULL;
    place->applied = false;
}

bool rft_in_place_is_bound(const rft_in_place *place)
{
    return place->tensors != NULL;
}

bool rft_in_place_is_torn(const rft_in_place *place)
{
    return !place->applied && !rft_rollback_is_empty(&place->old);
}

/* ---- What goes where */

/* What is to be written, and what is left over. */
typedef struct apply_plan {
    const rft_manifest *manifest;
    unsigned char *covered; /* per tensor; owned */
    uint64_t blocks;
    uint64_t bytes;
    uint32_t left; /* tensors without a destination */
    uint32_t first_left;
    const char *absent; /* a destination without a tensor; NULL: there is none */
} apply_plan;

static refit_status check_fit(const rft_destination *one, const rft_manifest_tensor *tensor,
                              refit_error *error)
{
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

/* Twins are one memory, so what is written there is noted with the first of them. */
static refit_status plan_one(rft_in_place *place, apply_plan *plan, const rft_destination *one,
                             refit_error *error)
{
    const rft_manifest *manifest = plan->manifest;
    uint32_t tensor = rft_manifest_find(manifest, one->name);
    if (tensor == NOTHING) return REFIT_OK;
    RFT_TRY(check_fit(one, &manifest->tensors[tensor], error));
    uint32_t original = original_of(manifest, tensor), *there = &place->tensors[one->twin];
    plan->covered[original] = 1;
    if (*there == original) return REFIT_OK;
    RFT_REFUSE_IF(*there != NOTHING, error, REFIT_ERR_INVALID,
                  "'%.100s' and '%.100s' have one memory here, but are two tensors in the version",
                  manifest->tensors[*there].name, one->name);
    *there = original;
    plan->blocks += manifest->tensors[original].blocks;
    plan->bytes += manifest->tensors[original].bytes;
    return REFIT_OK;
}

static void find_rest(const rft_in_place *place, apply_plan *plan)
{
    const rft_manifest *manifest = plan->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0 || plan->covered[i]) continue;
        if (plan->left++ == 0) plan->first_left = i;
    }
    for (uint32_t i = 0; i < place->to.count && plan->absent == NULL; i++) {
        const rft_destination *one = &place->to.list[i];
        if (one->bytes > 0 && place->tensors[one->twin] == NOTHING) plan->absent = one->name;
    }
}

static refit_status check_rest(const apply_plan *plan, refit_error *error)
{
    RFT_REFUSE_IF(plan->left > 0, error, REFIT_ERR_NOT_FOUND,
                  "%u tensors of the version have no destination, the first is '%.160s'",
                  plan->left, plan->manifest->tensors[plan->first_left].name);
    RFT_REFUSE_IF(plan->absent != NULL, error, REFIT_ERR_NOT_FOUND,
                  "the version has nothing for the destination of '%.160s'", plan->absent);
    return REFIT_OK;
}

static refit_status make_plan(rft_in_place *place, apply_plan *plan, bool strict,
                              refit_error *error)
{
    plan->covered = rft_calloc((size_t)plan->manifest->count + 1, 1);
    RFT_REFUSE_IF(plan->covered == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to look where %u tensors go", plan->manifest->count);
    for (uint32_t i = 0; i < place->to.count; i++)
        place->tensors[i] = NOTHING;
    for (uint32_t i = 0; i < place->to.count; i++)
        RFT_TRY(plan_one(place, plan, &place->to.list[i], error));
    find_rest(place, plan);
    return strict ? check_rest(plan, error) : REFIT_OK;
}

/* ---- Writing */

/* A run of blocks of one tensor, on its way. */
typedef struct apply_run {
    const rft_block *blocks;
    uint32_t count;
    uint64_t offset; /* in the tensor */
    uint64_t bytes;
} apply_run;

/* As many blocks, from the first on, as a window holds. */
static apply_run run_of(const rft_block *blocks, uint32_t most)
{
    apply_run run = {.blocks = blocks, .offset = blocks[0].tensor_offset};
    while (run.count < most && run.bytes + blocks[run.count].bytes <= RFT_WINDOW_BYTES)
        run.bytes += blocks[run.count++].bytes;
    return run;
}

static refit_status read_source(const rft_in_place *place, const rft_in_place_source *source,
                                const apply_run *run, const unsigned char **out, refit_error *error)
{
    const unsigned char *bytes = source->image->bytes + run->blocks[0].offset;
    *out = source->device == NULL ? bytes : place->to.source;
    if (source->device == NULL) return REFIT_OK;
    return refit_stream_copy(source->device, REFIT_STREAM_NONE, place->to.source, bytes, run->bytes,
                             error);
}

/* Bytes, where an element is not so many of them. */
static rft_delta_shape shape_of(const rft_manifest *manifest, const rft_block *block)
{
    uint32_t bits = refit_dtype_bits(manifest->tensors[block->tensor].dtype);
    uint32_t width = bits % 8 == 0 ? bits / 8 : 1;
    return (rft_delta_shape){(uint32_t)(block->bytes / width), width, RFT_DELTA_RAW};
}

/* Notes and changes the window; what of it was touched lies from *first to *end. */
static refit_status change_window(rft_in_place *place, uint32_t index,
                                  const rft_in_place_source *source, const apply_run *run,
                                  const unsigned char *from, unsigned char *window, uint64_t *first,
                                  uint64_t *end, refit_error *error)
{
    uint64_t at = 0;
    *first = *end = 0;
    for (uint32_t i = 0; i < run->count; at += run->blocks[i++].bytes) {
        const rft_block *block = &run->blocks[i];
        rft_note_place where = {index, block->tensor_offset};
        uint32_t changed;
        RFT_TRY(rft_rollback_change(&place->old, where,
                                    shape_of(source->image->catalog->manifest, block), window + at,
                                    from + at, &changed, error));
        if (changed == 0) continue;
        if (*end == 0) *first = at;
        *end = at + block->bytes;
    }
    return REFIT_OK;
}

static refit_status write_run(rft_in_place *place, uint32_t index,
                              const rft_in_place_source *source, const apply_run *run,
                              refit_error *error)
{
    const rft_destination *one = &place->to.list[index];
    const unsigned char *from;
    unsigned char *window;
    uint64_t first, end;
    RFT_TRY(read_source(place, source, run, &from, error));
    RFT_TRY(rft_destinations_fetch(&place->to, one, run->offset, run->bytes, &window, error));
    RFT_TRY(change_window(place, index, source, run, from, window, &first, &end, error));
    if (end == 0) return REFIT_OK;
    return rft_destinations_put(one, run->offset + first, window + first, end - first, error);
}

static refit_status write_tensor(rft_in_place *place, uint32_t index,
                                 const rft_in_place_source *source, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const rft_manifest_tensor *tensor = &manifest->tensors[place->tensors[index]];
    for (uint32_t done = 0; done < tensor->blocks;) {
        apply_run run =
            run_of(&manifest->blocks[tensor->first_block + done], tensor->blocks - done);
        RFT_TRY(write_run(place, index, source, &run, error));
        done += run.count;
    }
    return REFIT_OK;
}

/* ---- The digest of what is there */

static refit_status digest_source(const rft_in_place *place, const rft_in_place_source *source,
                                  const rft_manifest_tensor *tensor, uint64_t *sum,
                                  refit_error *error)
{
    *sum = 0;
    for (uint32_t done = 0; done < tensor->blocks;) {
        const rft_manifest *manifest = source->image->catalog->manifest;
        apply_run run =
            run_of(&manifest->blocks[tensor->first_block + done], tensor->blocks - done);
        const unsigned char *bytes;
        RFT_TRY(read_source(place, source, &run, &bytes, error));
        *sum += rft_digest_part(bytes, run.bytes, run.offset);
        done += run.count;
    }
    return REFIT_OK;
}

/* Of all tensors: what has no destination counts as it lies in the image, so that it is the
 * version's digest that comes of it. Where one has several, each is held against the first. */
static refit_status digest_tensors(const rft_in_place *place, const rft_in_place_source *source,
                                   uint64_t *digests, unsigned char *known, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    for (uint32_t i = 0; i < place->to.count; i++) {
        uint32_t tensor = place->tensors[i];
        if (tensor == NOTHING) continue;
        uint64_t sum;
        RFT_TRY(rft_destinations_digest(&place->to, &place->to.list[i], &sum, error));
        sum = rft_digest_finish(sum, manifest->tensors[tensor].bytes);
        RFT_REFUSE_IF(known[tensor] && digests[tensor] != sum, error, REFIT_ERR_CORRUPT,
                      "the destination of '%.160s' is not what was written there",
                      place->to.list[i].name);
        digests[tensor] = sum;
        known[tensor] = 1;
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (known[i] || manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(digest_source(place, source, &manifest->tensors[i], &digests[i], error));
        digests[i] = rft_digest_finish(digests[i], manifest->tensors[i].bytes);
    }
    return REFIT_OK;
}

/* rft_version_digest wants those of originals, in order. */
static refit_status check_digest(const rft_manifest *manifest, const rft_image *image,
                                 uint64_t *digests, refit_error *error)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of == REFIT_NO_ALIAS) digests[count++] = digests[i];
    }
    rft_digest128 digest = rft_version_digest(manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &image->held.digest), error, REFIT_ERR_CORRUPT,
                  "the digest of what was written is not that of version %llu",
                  (unsigned long long)image->held.version);
    return REFIT_OK;
}

static refit_status verify(const rft_in_place *place, const rft_in_place_source *source,
                           refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    uint64_t *digests = rft_calloc((size_t)manifest->count + 1, sizeof *digests);
    unsigned char *known = rft_calloc((size_t)manifest->count + 1, 1);
    refit_status status = REFIT_OK;
    if (digests == NULL || known == NULL) {
        status =
            rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for %u digests", manifest->count);
    }
    if (status == REFIT_OK) status = digest_tensors(place, source, digests, known, error);
    if (status == REFIT_OK) status = check_digest(manifest, source->image, digests, error);
    rft_free(digests);
    rft_free(known);
    return status;
}

/* ---- The verbs */

static refit_status write_all(rft_in_place *place, const rft_in_place_source *source,
                              const apply_plan *plan, refit_error *error)
{
    RFT_TRY(rft_rollback_prepare(&place->old, plan->blocks, plan->bytes, error));
    for (uint32_t i = 0; i < place->to.count; i++) {
        if (place->tensors[i] != NOTHING) RFT_TRY(write_tensor(place, i, source, error));
    }
    RFT_TRY(rft_destinations_flush(&place->to, error));
    RFT_REFUSE_IF(!rft_image_is_intact(source->image), error, REFIT_ERR_STALE,
                  "the trainer had turned this worker out and overwrites version %llu",
                  (unsigned long long)source->image->held.version);
    return source->verify ? verify(place, source, error) : REFIT_OK;
}

/* What failed is told; that it could not be taken back is told as well. */
static void take_back(rft_in_place *place, refit_error *error)
{
    refit_error why;
    if (rft_in_place_undo(place, &why) == REFIT_OK) return;
    rft_log(REFIT_LOG_ERROR, "a version was written in part, and could not be taken back: %s",
            why.text);
    if (error == NULL) return;
    refit_error first = *error;
    (void)rft_fail(error, (refit_status)first.status,
                   "%.110s; and it could not be taken back: %.100s", first.text, why.text);
}

refit_status rft_in_place_apply(rft_in_place *place, const rft_in_place_source *source,
                                uint32_t *left, refit_error *error)
{
    apply_plan plan = {.manifest = source->image->catalog->manifest};
    refit_status status = make_plan(place, &plan, left == NULL, error);
    rft_free(plan.covered);
    RFT_TRY(status);
    status = write_all(place, source, &plan, error);
    place->applied = status == REFIT_OK;
    if (status != REFIT_OK) {
        take_back(place, error);
    } else if (left != NULL) {
        *left = plan.left;
    }
    return status;
}

void rft_in_place_keep(rft_in_place *place)
{
    if (place->applied) rft_rollback_reset(&place->old);
    place->applied = false;
}

static refit_status undo_one(rft_in_place *place, const rft_note *note, refit_error *error)
{
    const rft_destination *one = &place->to.list[note->place.destination];
    uint64_t bytes = rft_note_bytes(note), offset = note->place.offset;
    unsigned char *window;
    RFT_TRY(rft_destinations_fetch(&place->to, one, offset, bytes, &window, error));
    rft_note_undo(note, window);
    return rft_destinations_put(one, offset, window, bytes, error);
}

refit_status rft_in_place_undo(rft_in_place *place, refit_error *error)
{
    place->applied = false;
    if (rft_rollback_is_empty(&place->old)) {
        rft_rollback_reset(&place->old);
        return REFIT_OK;
    }
    RFT_TRY(rft_destinations_repair(&place->to, error));
    rft_note note = {.next = place->old.last};
    while (note.next != UINT64_MAX) {
        rft_rollback_read(&place->old, note.next, &note);
        RFT_TRY(undo_one(place, &note, error));
    }
    RFT_TRY(rft_destinations_flush(&place->to, error));
    rft_rollback_reset(&place->old);
    return REFIT_OK;
}
