/*
 * An update into destinations: check that it fits, write the differences, verify where that is
 * wanted, and take back a failure.
 *
 * The bytes come from a verified image, but in the publisher's shared memory they may be
 * overwritten meanwhile: nothing here depends on their staying as they are, and the seqlock tells
 * at the end.
 */
#include "subscriber/in_place.h"

#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "device/device_uuid.h"
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/floats.h"
#include "wire/frame.h"

#define NO_TENSOR UINT32_MAX
#define PIECE     1024u

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
        place->config = config;
        place->old.ration.budget = config->offload_budget_bytes;
        place->held = place->overwritten = false;
        atomic_store(&place->figures.bound, count);
    } else {
        rft_free(tensors);
    }
    return status;
}

refit_status rft_in_place_unbind(rft_in_place *place, refit_error *error)
{
    if (rft_in_place_is_torn(place)) RFT_TRY(rft_in_place_undo(place, error));
    rft_in_place_close(place);
    return REFIT_OK;
}

void rft_in_place_close(rft_in_place *place)
{
    rft_rollback_reset(&place->old);
    if (!rft_gpu_exchange_close(place->gpu, rft_deadline(place->to.linger_ms)))
        rft_log(REFIT_LOG_ERROR, "a GPU does not end its work on destinations: it stays open");
    place->gpu = NULL;
    rft_destinations_close(&place->to);
    rft_free(place->tensors);
    place->tensors = NULL;
    place->applied = place->failed = false;
    place->held = place->overwritten = false;
    atomic_store(&place->figures.bound, 0);
}

bool rft_in_place_is_bound(const rft_in_place *place)
{
    return place->tensors != NULL;
}

/* Whether there are notes of old bytes. */
static bool is_noted(const rft_in_place *place)
{
    return !rft_rollback_is_empty(&place->old) || !rft_gpu_exchange_is_empty(place->gpu);
}

bool rft_in_place_is_torn(const rft_in_place *place)
{
    return !place->applied && (place->overwritten || is_noted(place));
}

/* One GPU may be open several times: all of them share its addresses. */
static bool is_on(const rft_port *port, refit_device *gpu)
{
    refit_device *device = rft_copy_queue_device(port->copy_queue);
    rft_device_caps theirs = rft_device_get_caps(gpu), ours = rft_device_get_caps(device);
    return device == gpu ||
           (!rft_uuid_is_none(ours.uuid) && rft_uuid_equal(ours.uuid, theirs.uuid));
}

bool rft_in_place_is_on(const rft_in_place *place, refit_device *gpu)
{
    for (uint32_t i = 0; i < place->to.port_count; i++) {
        if (is_on(&place->to.ports[i], gpu)) return true;
    }
    return false;
}

bool rft_in_place_await(const rft_in_place *place, uint32_t timeout_ms)
{
    return rft_gpu_exchange_await(place->gpu, timeout_ms);
}

bool rft_in_place_has_failed(const rft_in_place *place)
{
    return place->failed;
}

/*
 * ---- Conversion
 *
 * Elements of one floating-point type to those of another, for a worker whose tensors have another
 * type than the trainer's, as PyTorch's `to` does it: to nearest even; but every NaN that gets
 * shorter becomes 0x7FFF. Between F32, F16 and BF16. From one half type to the other it goes
 * through fp32, piece by piece: only the last step rounds.
 */

static bool is_known(refit_dtype dtype)
{
    return dtype == REFIT_F32 || dtype == REFIT_F16 || dtype == REFIT_BF16;
}

static bool converts(refit_dtype from, refit_dtype to)
{
    return from != to && is_known(from) && is_known(to);
}

static void widen(refit_dtype from, float *out, const uint16_t *in, size_t count)
{
    if (from == REFIT_BF16) {
        rft_floats_from_bf16(out, in, count);
    } else {
        rft_floats_from_half(out, in, count);
    }
}

static void narrow(refit_dtype to, uint16_t *out, const float *in, size_t count)
{
    if (to == REFIT_BF16) {
        rft_cast_bf16(out, in, count);
    } else {
        rft_floats_to_half(out, in, count);
    }
}

static void change_half(refit_dtype from, refit_dtype to, uint16_t *out, const uint16_t *in,
                        size_t count)
{
    float between[PIECE];
    for (size_t done = 0, piece; done < count; done += piece) {
        piece = count - done < PIECE ? count - done : PIECE;
        widen(from, between, in + done, piece);
        narrow(to, out + done, between, piece);
    }
}

/* Of types that `converts` allows. `out` and `in` are apart and aligned to their elements. */
static void convert(refit_dtype from, refit_dtype to, void *out, const void *in, size_t count)
{
    if (to == REFIT_F32) {
        widen(from, out, in, count);
    } else if (from == REFIT_F32) {
        narrow(to, out, in, count);
    } else {
        change_half(from, to, out, in, count);
    }
}

/*
 * ---- Runs
 *
 * A run is as many blocks of a tensor as a window of a device's memory holds.
 */

/* From the elements of a tensor to those of its destination. */
typedef struct apply_cast {
    refit_dtype from;
    refit_dtype to;
    uint32_t from_width; /* bytes of an element; 1 where nothing is converted, and of both */
    uint32_t to_width;
} apply_cast;

/* A run of blocks of one tensor, on its way. */
typedef struct apply_run {
    const rft_block *blocks;
    apply_cast cast;
    uint32_t count;
    uint64_t offset; /* in the tensor */
    uint64_t bytes;
} apply_run;

static apply_cast cast_of(const rft_bound_tensor *one, const rft_manifest_tensor *tensor)
{
    apply_cast none = {.from_width = 1, .to_width = 1};
    if (!one->cast || !converts(tensor->dtype, one->dtype)) return none;
    return (apply_cast){
        .from = tensor->dtype,
        .to = one->dtype,
        .from_width = refit_dtype_bits(tensor->dtype) / 8,
        .to_width = refit_dtype_bits(one->dtype) / 8,
    };
}

static bool casts(apply_cast cast)
{
    return cast.from != cast.to;
}

/* Bytes of the tensor, or an offset in it, as those of the destination. */
static uint64_t bytes_there(apply_cast cast, uint64_t bytes)
{
    return bytes / cast.from_width * cast.to_width;
}

static bool fits(const apply_run *run)
{
    uint64_t bytes = run->bytes + run->blocks[run->count].bytes;
    return bytes <= RFT_WINDOW_BYTES && bytes_there(run->cast, bytes) <= RFT_WINDOW_BYTES;
}

/* As many blocks, from the first on, as a window holds before and after they are converted, and
 * `most` at most. */
static apply_run run_of(const rft_block *blocks, uint32_t most, apply_cast cast)
{
    apply_run run = {.blocks = blocks, .cast = cast, .offset = blocks[0].tensor_offset};
    while (run.count < most && fits(&run))
        run.bytes += blocks[run.count++].bytes;
    return run;
}

/* Makes bytes of a tensor readable for the CPU: bytes on a device are fetched into `window`. */
static refit_status read_image(const rft_in_place_source *source, uint32_t tensor, uint64_t offset,
                               uint64_t bytes, unsigned char *window, const unsigned char **out,
                               refit_error *error)
{
    const unsigned char *from = rft_image_tensor(source->image, tensor) + offset;
    *out = source->device == NULL ? from : window;
    if (source->device == NULL) return REFIT_OK;
    return refit_stream_copy(source->device, REFIT_STREAM_NONE, window, from, bytes, error);
}

/* Makes the run readable for the CPU, as the destination is to have it, until the next call. */
static refit_status read_run(const rft_in_place *place, const rft_in_place_source *source,
                             const apply_run *run, const unsigned char **out, refit_error *error)
{
    const rft_block *first = &run->blocks[0];
    RFT_TRY(read_image(source, first->tensor, first->tensor_offset, run->bytes, place->to.source,
                       out, error));
    if (!casts(run->cast)) return REFIT_OK;
    convert(run->cast.from, run->cast.to, place->to.converted, *out,
            run->bytes / run->cast.from_width);
    *out = place->to.converted;
    return REFIT_OK;
}

/*
 * ---- The plan
 *
 * Decides which tensor of a version goes into which destination; they meet by name. Every objection
 * is raised here, before the first byte is written: names, sizes and types are the manifest's, and
 * two tensors which are one memory here are tied at the trainer's end, too, or have equal bytes in
 * this version, which are compared.
 */

/* The blocks to write, and the tensors and destinations that are left over. */
typedef struct apply_plan {
    const rft_manifest *manifest;
    const rft_want *want; /* what the worker selects; NULL: all */
    uint64_t blocks;      /* that the CPU writes */
    uint64_t bytes;
    uint64_t gpu_blocks; /* that kernels write */
    uint32_t left;       /* tensors without a destination */
    uint32_t first_left;
    const char *absent;     /* a destination without a tensor; NULL: there is none */
    unsigned char *covered; /* per tensor, while it is made */
    rft_memory_range last;  /* memory of the GPU that was checked last */
} apply_plan;

static refit_status check_fit(const rft_bound_tensor *one, const rft_manifest_tensor *tensor,
                              refit_error *error)
{
    apply_cast cast = cast_of(one, tensor);
    RFT_REFUSE_IF(one->cast && one->dtype != tensor->dtype && !casts(cast), error,
                  REFIT_ERR_INVALID,
                  "'%.140s' is %s, which is not converted to %s in place: only F32, F16 and BF16 "
                  "are, to each other",
                  one->name, refit_dtype_name(tensor->dtype), refit_dtype_name(one->dtype));
    RFT_REFUSE_IF(casts(cast) && one->bytes != bytes_there(cast, tensor->bytes), error,
                  REFIT_ERR_INVALID, "'%.160s' has %llu bytes as %s, and its destination %llu",
                  one->name, (unsigned long long)bytes_there(cast, tensor->bytes),
                  refit_dtype_name(one->dtype), (unsigned long long)one->bytes);
    if (casts(cast)) return REFIT_OK;
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
                            uint32_t one, uint32_t other, bool *equal, refit_error *error)
{
    const rft_manifest_tensor *tensors = source->image->catalog->manifest->tensors;
    const rft_manifest_tensor *a = &tensors[one], *b = &tensors[other];
    unsigned char *window = place->to.source;
    *equal = a->dtype == b->dtype && a->bytes == b->bytes;
    for (uint64_t done = 0, bytes; *equal && done < a->bytes; done += bytes) {
        const unsigned char *these, *those;
        bytes = a->bytes - done < COMPARE_BYTES ? a->bytes - done : COMPARE_BYTES;
        RFT_TRY(read_image(source, one, done, bytes, window, &these, error));
        RFT_TRY(read_image(source, other, done, bytes, window + COMPARE_BYTES, &those, error));
        *equal = memcmp(these, those, bytes) == 0;
    }
    return REFIT_OK;
}

/* The digests of tensors do not come this far, and a read of both costs less than writing one. */
static refit_status check_equal(const rft_in_place *place, const rft_in_place_source *source,
                                uint32_t tensor, const rft_bound_tensor *two, uint32_t other,
                                refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    bool equal;
    RFT_TRY(compare(place, source, tensor, other, &equal, error));
    RFT_REFUSE_IF(!equal, error, REFIT_ERR_INVALID,
                  "'%.64s' and '%.64s' have one memory here, but differ in the version: untie them "
                  "here, so that each has its own memory, or tie them at the trainer",
                  manifest->tensors[tensor].name, two->name);
    return REFIT_OK;
}

/* Code of the GPU reads and writes there: from the image on the same GPU, or in host memory. */
static bool goes_by_kernel(const rft_in_place_source *source, const rft_bound_tensor *one,
                           const rft_manifest_tensor *tensor)
{
    return one->port != NULL && one->port->by_kernel && one->bytes > 0 &&
           (source->device == NULL || source->device == source->gpu) &&
           !casts(cast_of(one, tensor));
}

/* Twins are one memory, so the tensor that is written there is noted with the first of them. */
static refit_status plan_one(rft_in_place *place, const rft_in_place_source *source,
                             apply_plan *plan, const rft_bound_tensor *one, refit_error *error)
{
    const rft_manifest *manifest = plan->manifest;
    uint32_t tensor = rft_manifest_find(manifest, one->name);
    if (tensor == UINT32_MAX) return REFIT_OK;
    RFT_REFUSE_IF(rft_want_tensor(plan->want, tensor) != RFT_WANT_ALL, error, REFIT_ERR_NOT_FOUND,
                  "'%.160s' was not selected, or not all of it", one->name);
    RFT_TRY(check_fit(one, &manifest->tensors[tensor], error));
    uint32_t original = original_of(manifest, tensor), *there = &place->tensors[one->twin];
    plan->covered[original] = 1;
    if (*there == original) return REFIT_OK;
    if (*there != NO_TENSOR) return check_equal(place, source, *there, one, original, error);
    *there = original;
    if (goes_by_kernel(source, one, &manifest->tensors[original])) {
        plan->gpu_blocks += manifest->tensors[original].blocks;
        return rft_device_memory_check_next(source->gpu, one->memory, one->bytes, &plan->last,
                                            error);
    }
    plan->blocks += manifest->tensors[original].blocks;
    plan->bytes += one->bytes;
    return REFIT_OK;
}

static void find_rest(const rft_in_place *place, apply_plan *plan)
{
    const rft_manifest *manifest = plan->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0 || plan->covered[i]) continue;
        if (rft_want_tensor(plan->want, i) != RFT_WANT_ALL) continue;
        if (plan->left++ == 0) plan->first_left = i;
    }
    for (uint32_t i = 0; i < place->to.count && plan->absent == NULL; i++) {
        const rft_bound_tensor *one = &place->to.list[i];
        if (one->bytes > 0 && place->tensors[one->twin] == NO_TENSOR) plan->absent = one->name;
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

static refit_status plan_fill(rft_in_place *place, const rft_in_place_source *source,
                              apply_plan *plan, bool strict, refit_error *error)
{
    for (uint32_t i = 0; i < place->to.count; i++)
        place->tensors[i] = NO_TENSOR;
    for (uint32_t i = 0; i < place->to.count; i++)
        RFT_TRY(plan_one(place, source, plan, &place->to.list[i], error));
    find_rest(place, plan);
    return strict ? check_rest(plan, error) : REFIT_OK;
}

/* Fills place->tensors as well: NO_TENSOR where nothing is to be written. `strict`: tensors and
 * destinations that are left over are REFIT_ERR_NOT_FOUND. REFIT_ERR_INVALID (it does not fit),
 * REFIT_ERR_HOST_MEMORY, and the errors of the source's device. */
static refit_status plan_make(rft_in_place *place, const rft_in_place_source *source, bool strict,
                              apply_plan *plan, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    *plan = (apply_plan){.manifest = manifest, .want = source->image->catalog->want};
    plan->covered = rft_calloc((size_t)manifest->count + 1, 1);
    RFT_REFUSE_IF(plan->covered == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to look where %u tensors go", manifest->count);
    refit_status status = plan_fill(place, source, plan, strict, error);
    rft_free(plan->covered);
    plan->covered = NULL;
    return status;
}

/* ---- Writing */

/* Of a block as it is in the destination. */
static rft_delta_shape shape_of(const rft_in_place_source *source, const apply_run *run,
                                const rft_block *block)
{
    rft_delta_shape shape = rft_sparse_shape(source->image->catalog->manifest, block);
    if (casts(run->cast)) shape.width = run->cast.to_width;
    return shape;
}

/* Of destinations that hold no version: there is nothing to go back to. */
static uint32_t overwrite(rft_delta_shape shape, void *block, const void *after)
{
    uint32_t changed = rft_delta_count(shape, block, after);
    if (changed > 0) memcpy(block, after, (size_t)shape.elements * shape.width);
    return changed;
}

static refit_status change_block(rft_in_place *place, rft_note_place where, rft_delta_shape shape,
                                 void *block, const void *after, uint32_t *changed,
                                 refit_error *error)
{
    if (place->held)
        return rft_rollback_change(&place->old, where, shape, block, after, changed, error);
    *changed = overwrite(shape, block, after);
    return REFIT_OK;
}

/* Notes and changes the window; the changed part lies from *first to *end. */
static refit_status change_window(rft_in_place *place, uint32_t index,
                                  const rft_in_place_source *source, const apply_run *run,
                                  const unsigned char *from, unsigned char *window, uint64_t *first,
                                  uint64_t *end, refit_error *error)
{
    uint64_t at = 0, bytes;
    *first = *end = 0;
    for (uint32_t i = 0; i < run->count; i++, at += bytes) {
        const rft_block *block = &run->blocks[i];
        rft_note_place where = {index, bytes_there(run->cast, block->tensor_offset)};
        rft_delta_shape shape = shape_of(source, run, block);
        uint32_t changed;
        bytes = bytes_there(run->cast, block->bytes);
        RFT_TRY(change_block(place, where, shape, window + at, from + at, &changed, error));
        if (changed == 0) continue;
        place->changed += (uint64_t)changed * shape.width;
        if (*end == 0) *first = at;
        *end = at + bytes;
    }
    return REFIT_OK;
}

static refit_status write_run(rft_in_place *place, uint32_t index,
                              const rft_in_place_source *source, const apply_run *run,
                              refit_error *error)
{
    const rft_bound_tensor *one = &place->to.list[index];
    const unsigned char *from;
    unsigned char *window;
    uint64_t first, end;
    uint64_t offset = bytes_there(run->cast, run->offset);
    RFT_TRY(read_run(place, source, run, &from, error));
    RFT_TRY(rft_destinations_fetch(&place->to, one, offset, bytes_there(run->cast, run->bytes),
                                   &window, error));
    RFT_TRY(change_window(place, index, source, run, from, window, &first, &end, error));
    if (end == 0) return REFIT_OK;
    return rft_destinations_put(one, offset + first, window + first, end - first, error);
}

/* Writes destination `index` by place->tensors. Done when rft_destinations_flush says so; on
 * failure the notes tell the changes. */
static refit_status write_tensor(rft_in_place *place, uint32_t index,
                                 const rft_in_place_source *source, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const rft_manifest_tensor *tensor = &manifest->tensors[place->tensors[index]];
    apply_cast cast = cast_of(&place->to.list[index], tensor);
    for (uint32_t done = 0; done < tensor->blocks;) {
        apply_run run =
            run_of(&manifest->blocks[tensor->first_block + done], tensor->blocks - done, cast);
        RFT_TRY(write_run(place, index, source, &run, error));
        done += run.count;
    }
    return REFIT_OK;
}

/* ---- Writing on a GPU */

/* The tensor that goes into a destination; NULL: none. */
static const rft_manifest_tensor *written_there(const rft_in_place *place,
                                                const rft_manifest *manifest, uint32_t index)
{
    uint32_t tensor = place->tensors[index];
    return tensor == NO_TENSOR ? NULL : &manifest->tensors[tensor];
}

static void list_blocks(rft_in_place *place, const rft_in_place_source *source, uint32_t index,
                        const rft_manifest_tensor *tensor)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const unsigned char *from = rft_image_tensor(source->image, place->tensors[index]);
    for (uint32_t i = 0; i < tensor->blocks; i++) {
        const rft_block *block = &manifest->blocks[tensor->first_block + i];
        rft_gpu_exchange_add(place->gpu, place->to.list[index].memory + block->tensor_offset,
                             from + block->tensor_offset, rft_sparse_shape(manifest, block));
    }
}

/* The blocks that kernels are to write. Nothing is written yet. */
static refit_status list_for_gpu(rft_in_place *place, const rft_in_place_source *source,
                                 const apply_plan *plan, refit_error *error)
{
    RFT_REFUSE_IF(plan->gpu_blocks > UINT32_MAX, error, REFIT_ERR_LIMIT,
                  "%llu blocks are too many for one list", (unsigned long long)plan->gpu_blocks);
    if (place->gpu == NULL)
        RFT_TRY(rft_gpu_exchange_open(source->gpu, place->config, &place->gpu, error));
    RFT_TRY(rft_gpu_exchange_begin(place->gpu, (uint32_t)plan->gpu_blocks, error));
    for (uint32_t i = 0; i < place->to.count; i++) {
        const rft_manifest_tensor *tensor = written_there(place, plan->manifest, i);
        if (tensor == NULL || !goes_by_kernel(source, &place->to.list[i], tensor)) continue;
        list_blocks(place, source, i, tensor);
    }
    return REFIT_OK;
}

static refit_status write_on_gpu(rft_in_place *place, const rft_in_place_source *source,
                                 refit_error *error)
{
    const rft_exchange_way way = {
        .noted = place->held, .from_host = source->device == NULL, .pinning = source->pinning};
    return rft_gpu_exchange_run(place->gpu, &way, &place->changed, error);
}

/*
 * ---- Verifying
 *
 * A destination equals the image where it was compared, so this is for images that the trainer may
 * have changed meanwhile (lent on a GPU), and for broadcast.verify: always: the digests of the
 * bytes in the destinations, a device's memory included.
 */

static refit_status digest_source(const rft_in_place *place, const rft_in_place_source *source,
                                  const rft_manifest_tensor *tensor, apply_cast cast, uint64_t *sum,
                                  refit_error *error)
{
    *sum = 0;
    for (uint32_t done = 0; done < tensor->blocks;) {
        const rft_manifest *manifest = source->image->catalog->manifest;
        apply_run run =
            run_of(&manifest->blocks[tensor->first_block + done], tensor->blocks - done, cast);
        const unsigned char *bytes;
        RFT_TRY(read_run(place, source, &run, &bytes, error));
        *sum += rft_digest_part(bytes, bytes_there(cast, run.bytes), bytes_there(cast, run.offset));
        done += run.count;
    }
    return REFIT_OK;
}

/* What verifying finds out. */
typedef struct apply_digests {
    uint64_t *there;       /* per destination: the sum of its bytes */
    unsigned char *wanted; /* per destination: whether it is to be read */
    uint64_t *tensors;     /* per tensor: its digest */
    unsigned char *known;  /* per tensor */
} apply_digests;

static bool is_converted(const rft_in_place *place, const rft_manifest *manifest, uint32_t index)
{
    return casts(cast_of(&place->to.list[index], &manifest->tensors[place->tensors[index]]));
}

static refit_status refuse_written(const rft_bound_tensor *one, refit_error *error)
{
    return rft_fail(error, REFIT_ERR_CORRUPT,
                    "the destination of '%.160s' does not hold the written bytes", one->name);
}

/* Converted bytes are compared with the image converted once more. */
static refit_status check_converted(const rft_in_place *place, const rft_in_place_source *source,
                                    uint32_t index, uint64_t sum, refit_error *error)
{
    uint64_t expected;
    const rft_bound_tensor *one = &place->to.list[index];
    const rft_manifest_tensor *tensor =
        &source->image->catalog->manifest->tensors[place->tensors[index]];
    RFT_TRY(digest_source(place, source, tensor, cast_of(one, tensor), &expected, error));
    return sum == expected ? REFIT_OK : refuse_written(one, error);
}

/* All that was written, where it lies. Converted bytes say nothing of the trainer's. */
static refit_status digest_written(const rft_in_place *place, const rft_in_place_source *source,
                                   apply_digests *all, refit_error *error)
{
    for (uint32_t i = 0; i < place->to.count; i++) {
        if (place->tensors[i] == NO_TENSOR) continue;
        all->wanted[i] =
            source->verify || !is_converted(place, source->image->catalog->manifest, i);
    }
    return rft_destinations_digest(&place->to, all->wanted, all->there, error);
}

/* Where one tensor has several destinations, each is compared with the first. */
static refit_status digest_tensors(const rft_in_place *place, const rft_in_place_source *source,
                                   apply_digests *all, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    for (uint32_t i = 0; i < place->to.count; i++) {
        uint32_t tensor = place->tensors[i];
        if (!all->wanted[i]) continue;
        if (is_converted(place, manifest, i)) {
            RFT_TRY(check_converted(place, source, i, all->there[i], error));
            continue;
        }
        uint64_t sum = rft_digest_finish(all->there[i], manifest->tensors[tensor].bytes);
        if (all->known[tensor] && all->tensors[tensor] != sum)
            return refuse_written(&place->to.list[i], error);
        all->tensors[tensor] = sum;
        all->known[tensor] = 1;
    }
    return REFIT_OK;
}

/* A trainer that changes tensors which it has lent, or was killed and replaced, is found out here:
 * SEAL had their digests, and the version's follows from these. */
static refit_status check_lent(const rft_in_place_source *source, const apply_digests *all,
                               refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        RFT_REFUSE_IF(all->known[i] && all->tensors[i] != source->image->gpu->digests[i], error,
                      REFIT_ERR_CORRUPT, "'%.160s' was changed by the trainer while it was read",
                      manifest->tensors[i].name);
    }
    return REFIT_OK;
}

/* One without a destination counts as it lies in the image, so that the result is the version's
 * digest. */
static refit_status digest_rest(const rft_in_place *place, const rft_in_place_source *source,
                                apply_digests *all, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const apply_cast none = {.from_width = 1, .to_width = 1};
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (all->known[i] || manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(digest_source(place, source, &manifest->tensors[i], none, &all->tensors[i], error));
        all->tensors[i] = rft_digest_finish(all->tensors[i], manifest->tensors[i].bytes);
    }
    return REFIT_OK;
}

/* rft_version_digest takes the digests of originals, in order. */
static refit_status check_digest(const rft_manifest *manifest, const rft_image *image,
                                 uint64_t *digests, refit_error *error)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of == REFIT_NO_ALIAS) digests[count++] = digests[i];
    }
    rft_digest128 digest = rft_version_digest(manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &image->id.digest), error, REFIT_ERR_CORRUPT,
                  "the written bytes do not have the digest of version %llu",
                  (unsigned long long)image->id.version);
    return REFIT_OK;
}

static refit_status check_all(const rft_in_place *place, const rft_in_place_source *source,
                              apply_digests *all, refit_error *error)
{
    const rft_image *image = source->image;
    RFT_TRY(digest_written(place, source, all, error));
    RFT_TRY(digest_tensors(place, source, all, error));
    if (image->gpu != NULL) return check_lent(source, all, error);
    RFT_TRY(digest_rest(place, source, all, error));
    return check_digest(image->catalog->manifest, image, all->tensors, error);
}

/* Reads all that was written, where it lies. REFIT_ERR_CORRUPT: it is not the version;
 * REFIT_ERR_HOST_MEMORY, and the device's errors. */
static refit_status verify_digests(const rft_in_place *place, const rft_in_place_source *source,
                                   refit_error *error)
{
    size_t tensors = source->image->catalog->manifest->count + (size_t)1;
    size_t count = place->to.count + (size_t)1;
    apply_digests all = {.there = rft_calloc(count, sizeof *all.there),
                         .wanted = rft_calloc(count, 1),
                         .tensors = rft_calloc(tensors, sizeof *all.tensors),
                         .known = rft_calloc(tensors, 1)};
    bool taken =
        all.there != NULL && all.wanted != NULL && all.tensors != NULL && all.known != NULL;
    refit_status status = taken ? check_all(place, source, &all, error)
                                : rft_fail(error, REFIT_ERR_HOST_MEMORY,
                                           "no memory for %zu digests", count + tensors);
    rft_free(all.there);
    rft_free(all.wanted);
    rft_free(all.tensors);
    rft_free(all.known);
    return status;
}

/* ---- The verbs */

static refit_status check_seqlock(const rft_in_place_source *source, refit_error *error)
{
    RFT_REFUSE_IF(!rft_image_is_intact(source->image), error, REFIT_ERR_STALE,
                  "the trainer has evicted this worker and overwrites version %llu",
                  (unsigned long long)source->image->id.version);
    return REFIT_OK;
}

/* Planning and verifying read the image as well: a mismatch there may be the next version. */
static refit_status plan_all(rft_in_place *place, const rft_in_place_source *source, bool strict,
                             apply_plan *plan, refit_error *error)
{
    refit_status status = plan_make(place, source, strict, plan, error);
    if (status == REFIT_ERR_INVALID) RFT_TRY(check_seqlock(source, error));
    return status;
}

static refit_status verify(const rft_in_place *place, const rft_in_place_source *source,
                           refit_error *error)
{
    refit_status status = verify_digests(place, source, error);
    if (status == REFIT_ERR_CORRUPT) RFT_TRY(check_seqlock(source, error));
    return status;
}

/* What an earlier apply left half written is put right before old bytes are noted. */
static refit_status prepare(rft_in_place *place, const apply_plan *plan, refit_error *error)
{
    if (is_noted(place)) RFT_TRY(rft_destinations_repair(&place->to, error));
    if (!place->applied) RFT_TRY(rft_gpu_exchange_undo(place->gpu, error));
    if (!place->held || plan->blocks == 0) return REFIT_OK;
    return rft_rollback_prepare(&place->old, plan->blocks, plan->bytes, error);
}

static refit_status write_all(rft_in_place *place, const rft_in_place_source *source,
                              const apply_plan *plan, refit_error *error)
{
    RFT_TRY(prepare(place, plan, error));
    if (plan->gpu_blocks > 0) RFT_TRY(list_for_gpu(place, source, plan, error));
    place->overwritten = !place->held;
    if (plan->gpu_blocks > 0) RFT_TRY(write_on_gpu(place, source, error));
    for (uint32_t i = 0; i < place->to.count; i++) {
        const rft_manifest_tensor *tensor = written_there(place, plan->manifest, i);
        if (tensor == NULL || goes_by_kernel(source, &place->to.list[i], tensor)) continue;
        RFT_TRY(write_tensor(place, i, source, error));
    }
    RFT_TRY(rft_destinations_flush(&place->to, error));
    RFT_TRY(check_seqlock(source, error));
    return source->verify || source->image->gpu != NULL ? verify(place, source, error) : REFIT_OK;
}

/* The error tells the failure, and also that it could not be taken back. */
static void take_back(rft_in_place *place, refit_error *error)
{
    refit_error why;
    if (rft_in_place_undo(place, &why) == REFIT_OK) return;
    rft_log(REFIT_LOG_ERROR, "a version was written in part, and could not be taken back: %s",
            why.text);
    if (error == NULL) return;
    refit_error first = *error;
    (void)rft_fail(error, (refit_status)first.status, "%s; and it could not be taken back: %s",
                   first.text, why.text);
}

refit_status rft_in_place_apply(rft_in_place *place, const rft_in_place_source *source,
                                uint32_t *left, refit_error *error)
{
    apply_plan plan;
    int64_t began = rft_now();
    place->changed = 0;
    for (uint32_t i = 0; i < place->to.port_count; i++)
        place->to.ports[i].by_kernel =
            source->gpu != NULL && is_on(&place->to.ports[i], source->gpu);
    refit_status status = plan_all(place, source, left == NULL, &plan, error);
    if (status == REFIT_OK) status = write_all(place, source, &plan, error);
    place->applied = status == REFIT_OK;
    place->failed = !place->applied;
    if (status != REFIT_OK) {
        take_back(place, error);
        return status;
    }
    atomic_fetch_add(&place->figures.bytes, place->changed);
    atomic_store(&place->figures.last_ns, rft_now() - began);
    if (left != NULL) *left = plan.left;
    return REFIT_OK;
}

void rft_in_place_forget(rft_in_place *place)
{
    place->failed = false;
}

void rft_in_place_keep(rft_in_place *place)
{
    if (!rft_in_place_is_bound(place)) return;
    if (place->applied) rft_rollback_reset(&place->old);
    if (place->applied) rft_gpu_exchange_reset(place->gpu);
    place->held = true;
    place->applied = place->overwritten = false;
}

static refit_status undo_one(rft_in_place *place, const rft_note *note, refit_error *error)
{
    const rft_bound_tensor *one = &place->to.list[note->place.destination];
    uint64_t bytes = rft_note_bytes(note), offset = note->place.offset;
    unsigned char *window;
    RFT_TRY(rft_destinations_fetch(&place->to, one, offset, bytes, &window, error));
    rft_note_undo(note, window);
    return rft_destinations_put(one, offset, window, bytes, error);
}

refit_status rft_in_place_undo(rft_in_place *place, refit_error *error)
{
    place->applied = false;
    bool noted = is_noted(place);
    if (noted) RFT_TRY(rft_destinations_repair(&place->to, error)); /* waits for digests, too */
    RFT_TRY(rft_gpu_exchange_undo(place->gpu, error));
    if (!noted) {
        rft_rollback_reset(&place->old);
        return REFIT_OK;
    }
    rft_note note = {.next = rft_rollback_is_empty(&place->old) ? UINT64_MAX : place->old.last};
    while (note.next != UINT64_MAX) {
        rft_rollback_read(&place->old, note.next, &note);
        RFT_TRY(undo_one(place, &note, error));
    }
    RFT_TRY(rft_destinations_flush(&place->to, error));
    rft_rollback_reset(&place->old);
    atomic_fetch_add(&place->figures.taken_back, 1);
    return REFIT_OK;
}

void rft_in_place_report(const rft_in_place *place, refit_stats *stats)
{
    const rft_in_place_figures *figures = &place->figures;
    stats->receive_bound += atomic_load(&figures->bound);
    stats->receive_applied_bytes_total += atomic_load(&figures->bytes);
    stats->receive_rollbacks += atomic_load(&figures->taken_back);
    stats->receive_apply_seconds_last = (double)atomic_load(&figures->last_ns) * 1e-9;
}
