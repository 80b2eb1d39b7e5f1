/*
 * Locks and areas are kept in short lists: a publisher has two locks, and PyTorch's allocator some
 * tens of allocations. A version counts on both until it is released, whatever becomes of the image
 * that it came with, because the GPU may still read there.
 */
#include "subscriber/gpu_memory.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "wire/message.h"

/* ---- Areas */

static bool is_same_share(const rft_share *a, const rft_share *b)
{
    return memcmp(a->handle, b->handle, sizeof a->handle) == 0 && a->offset == b->offset &&
           a->bytes == b->bytes && a->address == b->address && a->id == b->id;
}

static rft_gpu_area *area_find(const rft_gpu_memory *memory, const rft_share *share)
{
    rft_gpu_area *area = memory->areas;
    while (area != NULL && !is_same_share(&area->share, share))
        area = area->next;
    return area;
}

static refit_status area_open(rft_gpu_memory *memory, const rft_share *share, rft_gpu_area **out,
                              refit_error *error)
{
    void *mapped = NULL;
    rft_gpu_area *area = rft_calloc(1, sizeof *area);
    RFT_REFUSE_IF(area == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to map a GPU's");
    refit_status status = rft_device_share_map(memory->device, share, &mapped, error);
    if (status != REFIT_OK) {
        rft_free(area);
        return status;
    }
    area->share = *share;
    area->memory = mapped;
    area->next = memory->areas;
    memory->areas = area;
    *out = area;
    return REFIT_OK;
}

static void area_close(rft_gpu_memory *memory, rft_gpu_area **at)
{
    rft_gpu_area *area = *at;
    *at = area->next;
    rft_device_share_unmap(memory->device, area->memory);
    rft_free(area);
}

/* ---- Locks */

static void lock_close(rft_gpu_memory *memory, rft_gpu_lock *lock)
{
    for (rft_gpu_area **at = &memory->areas; *at != NULL;) {
        if ((*at)->lock == lock && (*at)->versions == 0) {
            area_close(memory, at);
        } else {
            at = &(*at)->next;
        }
    }
    rft_share_lock_close(&lock->share_lock);
    *lock = (rft_gpu_lock){0};
}

/* Whether an area that was named under it last is in use: the lock must not be given back. */
static bool is_needed(const rft_gpu_memory *memory, const rft_gpu_lock *lock)
{
    if (lock->versions > 0) return true;
    for (const rft_gpu_area *area = memory->areas; area != NULL; area = area->next) {
        if (area->lock == lock && area->versions > 0) return true;
    }
    return false;
}

void rft_gpu_memory_trim(rft_gpu_memory *memory, bool retired)
{
    for (uint32_t i = 0; i < RFT_GPU_LOCKS_MOST; i++) {
        rft_gpu_lock *lock = &memory->locks[i];
        if (!lock->open || is_needed(memory, lock)) continue;
        if (!retired || rft_seqlock_is_retired(rft_share_lock_seqlock(&lock->share_lock)))
            lock_close(memory, lock);
    }
}

static rft_gpu_lock *lock_find(rft_gpu_memory *memory, const char *name)
{
    for (uint32_t i = 0; i < RFT_GPU_LOCKS_MOST; i++) {
        rft_gpu_lock *lock = &memory->locks[i];
        if (lock->open && strcmp(lock->share_lock.segment.name, name) == 0) return lock;
    }
    return NULL;
}

/* An empty place, or one that nothing needs. NULL: there is none. */
static rft_gpu_lock *lock_make_place(rft_gpu_memory *memory)
{
    rft_gpu_lock *unneeded = NULL;
    rft_gpu_memory_trim(memory, true);
    for (uint32_t i = 0; i < RFT_GPU_LOCKS_MOST; i++) {
        rft_gpu_lock *lock = &memory->locks[i];
        if (!lock->open) return lock;
        if (!is_needed(memory, lock)) unneeded = lock;
    }
    if (unneeded != NULL) lock_close(memory, unneeded);
    return unneeded;
}

static refit_status lock_get(rft_gpu_memory *memory, const char *name, rft_gpu_lock **out,
                             refit_error *error)
{
    *out = lock_find(memory, name);
    if (*out != NULL) return REFIT_OK;
    rft_gpu_lock *lock = lock_make_place(memory);
    RFT_REFUSE_IF(lock == NULL, error, REFIT_ERR_BUSY,
                  "the GPU still reads all of the publisher's memory that is mapped");
    RFT_TRY(rft_share_lock_hold(&lock->share_lock, name, error));
    lock->open = true;
    *out = lock;
    return REFIT_OK;
}

/* ---- A version */

static void version_free(rft_gpu_version *version)
{
    for (uint32_t i = 0; i < version->area_count; i++)
        version->areas[i]->versions--;
    version->lock->versions--;
    rft_free(version->areas);
    rft_free(version->tensors);
    rft_free(version->digests);
    rft_free(version);
}

static rft_gpu_version *version_open(rft_gpu_lock *lock, uint32_t tensors, size_t area_count)
{
    rft_gpu_version *version = rft_calloc(1, sizeof *version);
    if (version == NULL) return NULL;
    version->users = 1;
    version->lock = lock;
    lock->versions++;
    version->areas = rft_calloc(area_count + 1, sizeof *version->areas);
    version->tensors = rft_calloc((size_t)tensors + 1, sizeof *version->tensors);
    version->digests = rft_calloc((size_t)tensors + 1, sizeof *version->digests);
    if (version->areas != NULL && version->tensors != NULL && version->digests != NULL)
        return version;
    version_free(version);
    return NULL;
}

/* An allocation that was freed may have the handle of the one that took its place: the device must
 * not take the mapping of the one for the other. */
static refit_status drop_stale(rft_gpu_memory *memory, const rft_share *share, refit_error *error)
{
    for (rft_gpu_area **at = &memory->areas; *at != NULL;) {
        rft_gpu_area *area = *at;
        bool stale = memcmp(area->share.handle, share->handle, sizeof share->handle) == 0 &&
                     area->share.id != share->id;
        RFT_REFUSE_IF(stale && area->versions > 0, error, REFIT_ERR_BUSY,
                      "memory that the trainer has freed is still read here");
        if (stale) {
            area_close(memory, at);
        } else {
            at = &area->next;
        }
    }
    return REFIT_OK;
}

static refit_status take_areas(rft_gpu_memory *memory, rft_gpu_version *version, rft_view areas,
                               refit_error *error)
{
    for (size_t at = 0; at < areas.count; at += RFT_SHARE_BYTES) {
        rft_share share;
        RFT_TRY(rft_share_read((rft_view){(const unsigned char *)areas.data + at, RFT_SHARE_BYTES},
                               &share, error));
        rft_gpu_area *area = area_find(memory, &share);
        if (area == NULL) RFT_TRY(drop_stale(memory, &share, error));
        if (area == NULL) RFT_TRY(area_open(memory, &share, &area, error));
        version->areas[version->area_count++] = area;
        area->versions++;
        area->named = true;
        area->lock = version->lock;
    }
    return REFIT_OK;
}

/* Where so many bytes begin, by their place as LEND and PIECES have it; false: in no area. */
static bool find_place(const rft_gpu_version *version, const unsigned char *place, uint64_t bytes,
                       const unsigned char **out)
{
    uint32_t number = rft_get_u32(place);
    uint64_t offset = rft_get_u64(place + 4), end;
    bool fits = number < version->area_count && offset % RFT_PLACE_ALIGNMENT == 0 &&
                rft_add_u64(offset, bytes, &end) && end <= version->areas[number]->share.bytes;
    if (fits) *out = version->areas[number]->memory + offset;
    return fits;
}

static refit_status find_tensors(rft_gpu_version *version, const rft_manifest *manifest,
                                 rft_view places, refit_error *error)
{
    const unsigned char *at = places.data;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        const unsigned char *place = at;
        at += RFT_PLACE_BYTES;
        if (tensor->bytes == 0) continue;
        RFT_REFUSE_IF(!find_place(version, place, tensor->bytes, &version->tensors[i]), error,
                      REFIT_ERR_PROTOCOL,
                      "'%.160s' cannot lie where the publisher says in the GPU's memory",
                      tensor->name);
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        uint32_t alias = manifest->tensors[i].alias_of;
        if (alias != REFIT_NO_ALIAS) version->tensors[i] = version->tensors[alias];
    }
    return REFIT_OK;
}

static refit_status find_pieces(rft_gpu_version *version, rft_view list, refit_error *error)
{
    const unsigned char *at = list.data;
    for (size_t i = 0; i < list.count / RFT_PIECE_BYTES; i++, at += RFT_PIECE_BYTES) {
        uint64_t bytes = rft_get_u64(at + 12 + RFT_PLACE_BYTES);
        RFT_REFUSE_IF(!find_place(version, at + 4, bytes, &version->tensors[i]), error,
                      REFIT_ERR_PROTOCOL,
                      "piece %zu cannot lie where the publisher says in the GPU's memory", i);
    }
    return REFIT_OK;
}

/* Unmaps what LENDs under this lock named before, and the last one did not. The memory of the other
 * slot stays mapped for its next version. */
static void drop_unnamed(rft_gpu_memory *memory, const rft_gpu_lock *lock)
{
    for (rft_gpu_area **at = &memory->areas; *at != NULL;) {
        if ((*at)->lock == lock && !(*at)->named && (*at)->versions == 0) {
            area_close(memory, at);
        } else {
            at = &(*at)->next;
        }
    }
}

/* For so many tensors or pieces. `*out` is there on a failure, too, but where there is no memory
 * for it. */
static refit_status map_areas(rft_gpu_memory *memory, const char *lock, rft_view areas,
                              uint32_t tensors, rft_gpu_version **out, refit_error *error)
{
    rft_gpu_lock *held;
    RFT_TRY(lock_get(memory, lock, &held, error));
    rft_gpu_version *version = version_open(held, tensors, areas.count / RFT_SHARE_BYTES);
    RFT_REFUSE_IF(version == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to map a GPU's");
    for (rft_gpu_area *area = memory->areas; area != NULL; area = area->next)
        area->named = false;
    *out = version;
    return take_areas(memory, version, areas, error);
}

/* The caller of map gets it, or it is undone. */
static refit_status finish_map(rft_gpu_memory *memory, rft_gpu_version *version,
                               refit_status status, rft_gpu_version **out)
{
    if (version == NULL) return status;
    const rft_gpu_lock *lock = version->lock;
    if (status == REFIT_OK) {
        *out = version;
    } else {
        version_free(version);
    }
    drop_unnamed(memory, lock);
    return status;
}

refit_status rft_gpu_memory_map(rft_gpu_memory *memory, const rft_manifest *manifest,
                                const char *lock, rft_view areas, rft_view places,
                                rft_gpu_version **out, refit_error *error)
{
    rft_gpu_version *version = NULL;
    RFT_REFUSE_IF(places.count != (size_t)manifest->originals * RFT_PLACE_BYTES, error,
                  REFIT_ERR_PROTOCOL, "%zu bytes say where %u tensors lie in the GPU's memory",
                  places.count, manifest->originals);
    refit_status status = map_areas(memory, lock, areas, manifest->count, &version, error);
    if (status == REFIT_OK) status = find_tensors(version, manifest, places, error);
    return finish_map(memory, version, status, out);
}

refit_status rft_gpu_memory_map_pieces(rft_gpu_memory *memory, const char *lock, rft_view areas,
                                       rft_view list, rft_gpu_version **out, refit_error *error)
{
    rft_gpu_version *version = NULL;
    uint32_t pieces = (uint32_t)(list.count / RFT_PIECE_BYTES);
    refit_status status = map_areas(memory, lock, areas, pieces, &version, error);
    if (status == REFIT_OK) status = find_pieces(version, list, error);
    return finish_map(memory, version, status, out);
}

void rft_gpu_version_seal(rft_gpu_version *version, const rft_manifest *manifest, rft_view digests)
{
    rft_digests_by_tensor(manifest, digests.data, version->digests);
}

rft_gpu_version *rft_gpu_version_acquire(rft_gpu_version *version)
{
    version->users++;
    return version;
}

void rft_gpu_version_release(rft_gpu_version *version)
{
    if (version == NULL || --version->users > 0) return;
    version_free(version);
}

/* ---- Reading */

const rft_seqlock *rft_gpu_version_seqlock(const rft_gpu_version *version)
{
    return rft_share_lock_seqlock(&version->lock->share_lock);
}

void rft_gpu_version_unread(rft_gpu_version *version)
{
    if (!version->reading) return;
    version->reading = false;
    if (--version->lock->readers == 0) rft_share_lock_unread(&version->lock->share_lock);
}

refit_status rft_gpu_version_read(rft_gpu_version *version, uint64_t generation, refit_error *error)
{
    RFT_TRY(rft_share_lock_read(&version->lock->share_lock, error));
    version->lock->readers++;
    version->reading = true;
    if (rft_seqlock_holds(rft_gpu_version_seqlock(version), generation)) return REFIT_OK;
    rft_gpu_version_unread(version);
    return rft_fail(error, REFIT_ERR_STALE,
                    "the publisher has evicted this worker and writes over the version");
}

refit_status rft_gpu_memory_probe(rft_gpu_memory *memory, const rft_share *share,
                                  refit_error *error)
{
    void *mapped;
    RFT_TRY(rft_device_share_map(memory->device, share, &mapped, error));
    rft_device_share_unmap(memory->device, mapped);
    return REFIT_OK;
}
