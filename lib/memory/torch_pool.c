/*
 * PyTorch's two entry points, and the table from a device's number to its arena.
 *
 * PyTorch passes a device's number and nothing else, so the table is state of the process; one lock
 * guards it. No call to an arena is made under that lock, since it may take its time: `calls` keeps
 * the arena attached meanwhile. Failures cannot be returned, so they are logged.
 */
#include <inttypes.h>
#include <string.h>

#include <refit/advanced/torch.h>

#include "base/log.h"
#include "memory/device_arena.h"

#define DEVICES_MOST 64

typedef struct torch_slot {
    refit_arena *arena; /* NULL: none is attached */
    uint64_t pieces;    /* that PyTorch has */
    uint32_t calls;     /* that are under way */
} torch_slot;

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static torch_slot slots[DEVICES_MOST]; /* by the device's number; guarded by guard */

/* ---- The table --------------------------------------------------------------------------- */

static refit_status find_slot(const refit_arena *arena, torch_slot **out, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    int ordinal = rft_device_get_caps(rft_arena_device(arena)).ordinal;
    RFT_REFUSE_IF(ordinal < 0 || ordinal >= DEVICES_MOST, error, REFIT_ERR_LIMIT,
                  "arenas are attached for devices 0 to %d, and this is %d", DEVICES_MOST - 1,
                  ordinal);
    *out = &slots[ordinal];
    return REFIT_OK;
}

refit_status refit_torch_attach(refit_arena *arena, refit_error *error)
{
    torch_slot *slot;
    RFT_TRY(find_slot(arena, &slot, error));
    rft_lock(&guard);
    bool taken = slot->arena != NULL;
    if (!taken) {
        slot->arena = arena;
        rft_arena_set_attached(arena, true);
    }
    rft_unlock(&guard);
    RFT_REFUSE_IF(taken, error, REFIT_ERR_EXISTS,
                  "an arena is attached for this device already: PyTorch's allocator has no room "
                  "for a second; detach it first");
    return REFIT_OK;
}

refit_status refit_torch_detach(refit_arena *arena, refit_error *error)
{
    torch_slot *slot;
    RFT_TRY(find_slot(arena, &slot, error));
    rft_lock(&guard);
    bool attached = slot->arena == arena;
    uint64_t pieces = slot->pieces;
    bool busy = attached && (pieces > 0 || slot->calls > 0);
    if (attached && !busy) {
        slot->arena = NULL;
        rft_arena_set_attached(arena, false);
    }
    rft_unlock(&guard);
    RFT_REFUSE_IF(!attached, error, REFIT_ERR_NOT_FOUND, "the arena is not attached");
    RFT_REFUSE_IF(busy, error, REFIT_ERR_BUSY,
                  "PyTorch still has %" PRIu64 " pieces of the arena: drop the tensors and the "
                  "MemPool, then call torch.cuda.empty_cache()",
                  pieces);
    return REFIT_OK;
}

/* The arena, which stays attached until end_call; NULL if there is none. */
static refit_arena *begin_call(int device)
{
    if (device < 0 || device >= DEVICES_MOST) return NULL;
    rft_lock(&guard);
    refit_arena *arena = slots[device].arena;
    if (arena != NULL) slots[device].calls++;
    rft_unlock(&guard);
    return arena;
}

static void end_call(int device, bool gave, bool took)
{
    rft_lock(&guard);
    torch_slot *slot = &slots[device];
    slot->calls--;
    slot->pieces += gave;
    if (slot->pieces > 0) slot->pieces -= took;
    rft_unlock(&guard);
}

/* ---- The entry points -------------------------------------------------------------------- */

/* PyTorch's default stream is 0: on CUDA the legacy stream, whose handle is 1. */
static refit_stream_ref stream_of(const refit_arena *arena, void *stream)
{
    bool cuda = strcmp(rft_arena_device(arena)->ops.kind, "cuda") == 0;
    if (stream == NULL && cuda) stream = (void *)(uintptr_t)1;
    return (refit_stream_ref){stream};
}

static refit_status take_piece(refit_arena *arena, uint64_t bytes, void *stream, void **out,
                               refit_error *error)
{
    rft_arena_sweep(arena);
    RFT_TRY(refit_arena_add_stream(arena, stream_of(arena, stream), error));
    return refit_arena_alloc(arena, bytes, out, error);
}

void *refit_torch_alloc(ptrdiff_t size, int device, void *stream)
{
    void *memory = NULL;
    refit_error error = {0};
    if (size <= 0) return NULL;
    refit_arena *arena = begin_call(device);
    if (arena == NULL) {
        rft_log(REFIT_LOG_ERROR,
                "PyTorch asks for memory of device %d, and no arena is attached for it", device);
        return NULL;
    }
    refit_status status = take_piece(arena, (uint64_t)size, stream, &memory, &error);
    end_call(device, status == REFIT_OK, false);
    if (status == REFIT_OK) return memory;
    rft_log(REFIT_LOG_WARNING, "no memory for PyTorch on device %d: %s", device, error.text);
    return NULL;
}

/* If the arena cannot take note of the stream, the memory stays until the arena closes. `*took`:
 * whether the piece was PyTorch's. */
static refit_status give_piece(refit_arena *arena, void *memory, void *stream, bool *took,
                               refit_error *error)
{
    *took = true;
    RFT_TRY(refit_arena_add_stream(arena, stream_of(arena, stream), error));
    refit_status status = rft_arena_abandon(arena, memory, error);
    *took = status != REFIT_ERR_INVALID;
    return status;
}

void refit_torch_free(void *memory, ptrdiff_t size, int device, void *stream)
{
    (void)size;
    bool took = false;
    refit_error error = {0};
    if (memory == NULL) return;
    refit_arena *arena = begin_call(device);
    if (arena == NULL) {
        rft_log(REFIT_LOG_ERROR,
                "PyTorch gives back %p on device %d, for which no arena is attached", memory,
                device);
        return;
    }
    refit_status status = give_piece(arena, memory, stream, &took, &error);
    end_call(device, false, took);
    if (status == REFIT_OK) return;
    rft_log(REFIT_LOG_WARNING, "memory of PyTorch on device %d stays for now: %s", device,
            error.text);
}
