/*
 * Memory of cuMemAlloc shown to other processes on the same device. A handle says which process has
 * which file open, and where in it the allocation lies; the process that opens it maps those pages
 * of the file. A read lock on them tells the exporter, which must not free them before, that they
 * are in use; it goes with the importer's process, whatever ends that.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_stream.h"

#define PAGE  UINT64_C(4096)
#define MAGIC UINT64_C(0x63706966616b65)

/* What the 64 bytes of a handle are. */
typedef struct fake_ticket {
    uint64_t magic;
    uint64_t offset;
    uint64_t bytes;
    uint64_t serial; /* of the allocation: each has a handle of its own */
    rft_cu_uuid uuid;
    int process;
    int file;
} fake_ticket;

_Static_assert(sizeof(fake_ticket) <= sizeof(rft_cu_ipc_handle), "a ticket fits a handle");

static rft_cu_result export(rft_cu_ipc_handle *handle, rft_cu_ptr memory)
{
    const fake_span *span = fake_span_at(memory);
    if (span == NULL || span->kind != FAKE_MEMORY) return RFT_CU_INVALID_VALUE;
    const fake_device *device = &fake.devices[span->device];
    fake_ticket ticket = {
        .magic = MAGIC,
        .offset = span->node.base - device->heap,
        .bytes = span->node.size,
        .serial = span->serial,
        .uuid = device->uuid,
        .process = (int)getpid(),
        .file = device->heap_file,
    };
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ticket, sizeof ticket);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_ipc_export(rft_cu_ipc_handle *handle, rft_cu_ptr memory)
{
    FAKE_CALL(ipc_export, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(handle == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = export(handle, memory);
    return fake_end(&call, result);
}

static bool lock_pages(int file, const fake_ticket *ticket)
{
    struct flock range = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    range.l_start = (off_t)ticket->offset;
    range.l_len = (off_t)ticket->bytes;
    return fcntl(file, F_OFD_SETLK, &range) == 0;
}

bool fake_ipc_imported(int file, uint64_t offset, uint64_t bytes)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    range.l_start = (off_t)offset;
    range.l_len = (off_t)bytes;
    return fcntl(file, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

/* Maps the pages that hold the allocation. `file` is the importer's own. */
static rft_cu_result map(const fake_ticket *ticket, int file, fake_device *device, fake_span **out)
{
    uint64_t in_page = ticket->offset % PAGE;
    uint64_t size = (in_page + ticket->bytes + PAGE - 1) / PAGE * PAGE;
    uint64_t base = fake_space_open(size, 0x200000, 0);
    if (base == 0) return RFT_CU_OUT_OF_MEMORY;
    if (!lock_pages(file, ticket) ||
        !fake_space_back(base, size, size, file, ticket->offset - in_page)) {
        fake_space_close(base, size);
        return RFT_CU_MAP_FAILED;
    }
    *out = fake_span_put(FAKE_IMPORT, base + in_page, ticket->bytes, device->ordinal);
    (*out)->shift = size;
    (*out)->file = file;
    (*out)->imports = 1;
    return RFT_CU_SUCCESS;
}

static fake_span *opened(const rft_cu_ipc_handle *handle)
{
    for (fake_node *node = fake_tree_from(&fake.spans, 0); node != NULL;
         node = fake_tree_from(&fake.spans, node->base + node->size)) {
        fake_span *span = (fake_span *)node;
        if (span->kind == FAKE_IMPORT && memcmp(&span->exported, handle, sizeof *handle) == 0)
            return span;
    }
    return NULL;
}

static rft_cu_result import(const rft_cu_ipc_handle *handle, fake_device *device, fake_span **out)
{
    fake_ticket ticket;
    memcpy(&ticket, handle, sizeof ticket);
    if (ticket.magic != MAGIC) return RFT_CU_INVALID_VALUE;
    if (ticket.process == (int)getpid()) return RFT_CU_INVALID_CONTEXT;
    if (memcmp(&ticket.uuid, &device->uuid, sizeof ticket.uuid) != 0) return RFT_CU_INVALID_VALUE;
    *out = opened(handle);
    if (*out != NULL) {
        (*out)->imports++;
        return RFT_CU_SUCCESS;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket.process, ticket.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return RFT_CU_INVALID_HANDLE; /* the exporter is gone */
    rft_cu_result result = map(&ticket, file, device, out);
    if (result == RFT_CU_SUCCESS) (*out)->exported = *handle;
    if (result != RFT_CU_SUCCESS) close(file);
    return result;
}

rft_cu_result fake_cu_ipc_import(rft_cu_ptr *memory, rft_cu_ipc_handle handle, unsigned flags)
{
    fake_call call;
    fake_span *span = NULL;
    rft_cu_result result = fake_begin(&call, FAKE_ipc_import, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(memory == NULL || flags != RFT_CU_IPC_LAZY_PEER_ACCESS, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = import(&handle, call.context->device, &span);
    if (result == RFT_CU_SUCCESS) *memory = span->node.base;
    return fake_end(&call, result);
}

static rft_cu_result forget(rft_cu_ptr memory)
{
    fake_span *span = fake_span_at(memory);
    if (span == NULL || span->kind != FAKE_IMPORT || span->node.base != memory) {
        fake_violation("cuIpcCloseMemHandle of 0x%llx, which was not opened", memory);
        return RFT_CU_INVALID_VALUE;
    }
    if (--span->imports > 0) return RFT_CU_SUCCESS;
    fake_span_drop(span, "closed");
    close(span->file);
    fake_space_close(memory / PAGE * PAGE, span->shift);
    free(span);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_ipc_close(rft_cu_ptr memory)
{
    FAKE_CALL(ipc_close, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        rft_cu_result closed = forget(memory);
        if (result == RFT_CU_SUCCESS) result = closed;
    }
    return fake_end(&call, result);
}

void fake_ipc_reset(void)
{
    for (fake_node *node = fake_tree_from(&fake.spans, 0); node != NULL;
         node = fake_tree_from(&fake.spans, node->base + node->size))
        if (((fake_span *)node)->kind == FAKE_IMPORT) close(((fake_span *)node)->file);
}
