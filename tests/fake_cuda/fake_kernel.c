/*
 * Images and kernels: any image is taken (a script says otherwise), and what is launched is the C
 * twin of the kernel, on the stream's thread, once every address that it would meet on the GPU has
 * been found to be one.
 */
#include <stdlib.h>
#include <string.h>

#include "fake_stream.h"
#include "kernels/cast.h"
#include "kernels/delta_exchange.h"
#include "kernels/delta_job.h"
#include "kernels/digest.h"
#include "kernels/digest_job.h"
#include "kernels/master.h"
#include "kernels/pack.h"

typedef struct kernel_kind {
    const char *name;
    unsigned arguments;
    size_t sizes[7]; /* of each argument */
    rft_cu_result (*run)(fake_op *op);
    bool (*uses)(const fake_op *op, uint64_t base, uint64_t bytes);
} kernel_kind;

typedef struct fake_kernel {
    fake_node node; /* in fake.kernels */
    uint64_t library;
    const kernel_kind *kind;
} fake_kernel;

/* The table at `entries`, with the addresses of the bytes in it, or NULL. */
static rft_pack_entry *translated(int device, uint64_t entries, uint64_t count)
{
    const uint64_t size = sizeof(rft_pack_entry);
    const unsigned char *table = fake_reach_mapped(device, entries, count * size, false);
    if (table == NULL) return NULL;
    rft_pack_entry *copy = fake_new(count * size);
    memcpy(copy, table, count * size);
    for (uint64_t i = 0; i < count; i++) {
        if (copy[i].bytes == 0) continue;
        copy[i].to =
            (uint64_t)(uintptr_t)fake_reach_mapped(device, copy[i].to, copy[i].bytes, true);
        copy[i].from =
            (uint64_t)(uintptr_t)fake_reach_mapped(device, copy[i].from, copy[i].bytes, false);
        if (copy[i].to != 0 && copy[i].from != 0) continue;
        free(copy);
        return NULL;
    }
    return copy;
}

static rft_cu_result pack_run(fake_op *op)
{
    uint32_t count = (uint32_t)op->numbers[1];
    if (count == 0) return RFT_CU_SUCCESS;
    rft_pack_entry *entries = translated(op->device, op->numbers[0], count);
    if (entries == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    fake_touch();
    rft_pack(entries, count);
    fake_touched();
    free(entries);
    return RFT_CU_SUCCESS;
}

/* A table in host memory stands there already; what one on the device will say is not known yet. */
static bool pack_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    const uint64_t size = sizeof(rft_pack_entry);
    uint64_t at = op->numbers[0], count = (uint32_t)op->numbers[1];
    if (fake_meets(at, count * size, base, bytes)) return true;
    const fake_span *span = fake_span_at(at);
    if (span == NULL || (span->kind != FAKE_HOST && span->kind != FAKE_REGISTERED)) return false;
    const unsigned char *table = fake_reach_mapped(op->device, at, count * size, false);
    for (uint64_t i = 0; table != NULL && i < count; i++) {
        rft_pack_entry entry;
        memcpy(&entry, table + i * size, size);
        if (fake_meets(entry.to, entry.bytes, base, bytes)) return true;
        if (fake_meets(entry.from, entry.bytes, base, bytes)) return true;
    }
    return false;
}

static rft_cu_result cast_run(fake_op *op)
{
    uint64_t count = op->numbers[2];
    if (count == 0) return RFT_CU_SUCCESS;
    void *to = fake_reach_mapped(op->device, op->numbers[0], count * sizeof(uint16_t), true);
    const void *from = fake_reach_mapped(op->device, op->numbers[1], count * sizeof(float), false);
    if (to == NULL || from == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    fake_touch();
    rft_cast_bf16(to, from, count);
    fake_touched();
    return RFT_CU_SUCCESS;
}

static bool cast_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    return fake_meets(op->numbers[0], op->numbers[2] * sizeof(uint16_t), base, bytes) ||
           fake_meets(op->numbers[1], op->numbers[2] * sizeof(float), base, bytes);
}

static rft_cu_result digest_run(fake_op *op)
{
    uint64_t bytes = op->numbers[1], offset = op->numbers[2], sum;
    static const unsigned char nothing[1];
    const void *data =
        bytes > 0 ? fake_reach_mapped(op->device, op->numbers[0], bytes, false) : nothing;
    unsigned char *out = fake_reach_mapped(op->device, op->numbers[3], sizeof sum, true);
    if (data == NULL || out == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    if (op->numbers[3] % sizeof sum != 0) return RFT_CU_MISALIGNED_ADDRESS;
    fake_touch();
    memcpy(&sum, out, sizeof sum);
    sum += rft_digest_part(data, bytes, offset);
    memcpy(out, &sum, sizeof sum);
    fake_touched();
    return RFT_CU_SUCCESS;
}

static bool digest_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    return fake_meets(op->numbers[0], op->numbers[1], base, bytes) ||
           fake_meets(op->numbers[3], sizeof(uint64_t), base, bytes);
}

/* One job, at addresses that the GPU reaches. */
static rft_cu_result digest_job_run(int device, rft_digest_job *job)
{
    rft_digest_job here = *job;
    if (job->bytes == 0) return RFT_CU_SUCCESS;
    if (job->to % 8 != 0) return RFT_CU_MISALIGNED_ADDRESS;
    here.from = (uintptr_t)fake_reach_mapped(device, job->from, job->bytes, false);
    if (job->to != 0) here.to = (uintptr_t)fake_reach_mapped(device, job->to, job->bytes, true);
    if (here.from == 0 || (job->to != 0 && here.to == 0)) return RFT_CU_ILLEGAL_ADDRESS;
    fake_touch();
    rft_digest_list(&here, 1);
    fake_touched();
    job->sum = here.sum;
    return RFT_CU_SUCCESS;
}

/* Arguments: jobs, count. A GPU would not do all of the jobs where they have too few chunks. */
static rft_cu_result digest_list_run(fake_op *op)
{
    uint64_t count = (uint32_t)op->numbers[1], end = 0;
    if (op->numbers[0] % 8 != 0) return RFT_CU_MISALIGNED_ADDRESS;
    unsigned char *table =
        fake_reach_mapped(op->device, op->numbers[0], count * sizeof(rft_digest_job), true);
    for (uint64_t i = 0; table != NULL && i < count; i++) {
        rft_digest_job job;
        memcpy(&job, table + i * sizeof job, sizeof job);
        if (job.end < end + RFT_DIGEST_CHUNKS(job.bytes)) return RFT_CU_LAUNCH_FAILED;
        end = job.end;
        rft_cu_result result = digest_job_run(op->device, &job);
        if (result != RFT_CU_SUCCESS) return result;
        memcpy(table + i * sizeof job, &job, sizeof job);
    }
    return table == NULL ? RFT_CU_ILLEGAL_ADDRESS : RFT_CU_SUCCESS;
}

/* What the jobs name is not known before they run. */
static bool digest_list_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    uint64_t count = (uint32_t)op->numbers[1];
    return fake_meets(op->numbers[0], count * sizeof(rft_digest_job), base, bytes);
}

/* Arguments: master, weights, coded, elements, room, then result, then compares. False: an address
 * is none of the GPU's. */
static bool master_job(const fake_op *op, bool decodes, bool checks, rft_master_job *job)
{
    const uint64_t *at = op->numbers;
    static rft_master_result nothing;
    uint32_t room = (uint32_t)at[4];
    *job = (rft_master_job){.elements = at[3], .room = room, .result = &nothing};
    job->compares = decodes && at[6] != 0;
    job->master = fake_reach_mapped(op->device, at[0], 4 * at[3], decodes && !job->compares);
    job->weights = fake_reach_mapped(op->device, at[1], 2 * at[3], false);
    job->coded = fake_reach_mapped(op->device, at[2], rft_master_bytes(at[3], room), !decodes);
    if (checks) job->result = (void *)fake_reach_mapped(op->device, at[5], 8, true);
    return job->master != NULL && job->weights != NULL && job->coded != NULL && job->result != NULL;
}

static rft_cu_result master_do(const fake_op *op, bool decodes, bool checks,
                               void (*kernel)(const rft_master_job *job))
{
    rft_master_job job;
    if (op->numbers[3] == 0) return RFT_CU_SUCCESS;
    if (!master_job(op, decodes, checks, &job)) return RFT_CU_ILLEGAL_ADDRESS;
    if (op->numbers[0] % 4 != 0 || op->numbers[1] % 2 != 0 || op->numbers[2] % 16 != 0)
        return RFT_CU_MISALIGNED_ADDRESS;
    fake_touch();
    kernel(&job);
    fake_touched();
    return RFT_CU_SUCCESS;
}

static rft_cu_result master_split_run(fake_op *op)
{
    return master_do(op, false, false, rft_master_split);
}

static rft_cu_result master_list_run(fake_op *op)
{
    return master_do(op, false, true, rft_master_list);
}

static rft_cu_result master_join_run(fake_op *op)
{
    return master_do(op, true, true, rft_master_join);
}

static bool master_split_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    const uint64_t *at = op->numbers;
    uint64_t coded = rft_master_bytes(at[3], (uint32_t)at[4]);
    return fake_meets(at[0], 4 * at[3], base, bytes) || fake_meets(at[1], 2 * at[3], base, bytes) ||
           fake_meets(at[2], coded, base, bytes);
}

static bool master_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    return master_split_uses(op, base, bytes) || fake_meets(op->numbers[5], 8, base, bytes);
}

/* The bytes of a job's block. */
static uint64_t delta_bytes(const rft_delta_job *job)
{
    return (uint64_t)job->shape.elements * job->shape.width;
}

/* A block as it was noted whole. */
static bool delta_restore(int device, rft_delta_job *job)
{
    uint64_t bytes = delta_bytes(job);
    void *block = fake_reach_mapped(device, job->after, bytes, true);
    const void *from = fake_reach_mapped(device, job->coded, bytes, false);
    if (block == NULL || from == NULL) return false;
    fake_touch();
    memcpy(block, from, bytes);
    fake_touched();
    job->good = 1;
    return true;
}

/* One job, at addresses that the GPU reaches; false: one of them is none. */
static bool delta_apply_one(int device, rft_delta_job *job)
{
    if (job->whole != 0) return delta_restore(device, job);
    if (job->entry.changed == 0) { /* brings back nothing */
        job->good = 0;
        return true;
    }
    unsigned char *after = fake_reach_mapped(device, job->after, delta_bytes(job), true);
    unsigned char *coded = fake_reach_mapped(device, job->coded, job->entry.total, false);
    if (after == NULL || coded == NULL) return false;
    fake_touch();
    job->good = rft_delta_apply(job->shape, &job->entry, coded, after);
    fake_touched();
    return true;
}

static rft_cu_result delta_apply_run(fake_op *op)
{
    uint64_t count = (uint32_t)op->numbers[1];
    if (count == 0) return RFT_CU_SUCCESS;
    if (op->numbers[0] % sizeof(uint64_t) != 0) return RFT_CU_MISALIGNED_ADDRESS;
    unsigned char *table =
        fake_reach_mapped(op->device, op->numbers[0], count * sizeof(rft_delta_job), true);
    for (uint64_t i = 0; table != NULL && i < count; i++) {
        rft_delta_job job;
        memcpy(&job, table + i * sizeof job, sizeof job);
        if (!delta_apply_one(op->device, &job)) return RFT_CU_ILLEGAL_ADDRESS;
        memcpy(table + i * sizeof job, &job, sizeof job);
    }
    return table == NULL ? RFT_CU_ILLEGAL_ADDRESS : RFT_CU_SUCCESS;
}

/* Where the notes of exchanges go, at addresses that the GPU reaches and those of its own. */
typedef struct fake_notes {
    uint64_t at; /* 0: nothing is noted */
    unsigned char *memory, *used;
    uint64_t room;
} fake_notes;

/* `note` of `bytes` is what the block was, which is `now` from now on. */
static void delta_put(const fake_notes *notes, rft_delta_job *job, unsigned char *block,
                      const unsigned char *now, const unsigned char *note, uint64_t bytes)
{
    uint64_t used = 0, taken = (bytes + 15) / 16 * 16;
    if (notes->at != 0 && bytes > 0) {
        memcpy(&used, notes->used, sizeof used);
        uint64_t after = used + taken;
        memcpy(notes->used, &after, sizeof after);
    }
    job->good = notes->at == 0 || used + taken <= notes->room;
    if (job->good && notes->at != 0 && bytes > 0) {
        memcpy(notes->memory + used, note, bytes);
        job->coded = notes->at + used;
    }
    if (job->good) memcpy(block, now, delta_bytes(job));
    if (job->good) return;
    job->entry = (rft_delta_entry){0};
    job->whole = 0;
    job->coded = 0;
}

static bool delta_exchange_one(int device, const fake_notes *notes, rft_delta_job *job)
{
    uint64_t bytes = delta_bytes(job);
    job->shape.kind = RFT_DELTA_RAW;
    unsigned char *block = fake_reach_mapped(device, job->after, bytes, true);
    const unsigned char *from = fake_reach_mapped(device, job->before, bytes, false);
    if (block == NULL || from == NULL) return false;
    unsigned char *now = fake_new(bytes), *note = fake_new(rft_delta_bound(job->shape));
    fake_touch();
    memcpy(now, block, bytes);
    bool coded = rft_delta_exchange(job->shape, now, from, note, &job->entry);
    job->whole = !coded && job->entry.changed > 0;
    if (job->whole) job->entry = (rft_delta_entry){.changed = job->entry.changed};
    delta_put(notes, job, block, now, note, coded ? job->entry.total : job->whole ? bytes : 0);
    fake_touched();
    free(now);
    free(note);
    return true;
}

/* Arguments: jobs, count, memory, room, used. */
static rft_cu_result delta_exchange_run(fake_op *op)
{
    const uint64_t *at = op->numbers;
    uint64_t count = (uint32_t)at[1];
    fake_notes notes = {.at = at[2], .room = at[3]};
    if (count == 0) return RFT_CU_SUCCESS;
    if (at[0] % 8 != 0 || at[2] % 16 != 0) return RFT_CU_MISALIGNED_ADDRESS;
    unsigned char *table =
        fake_reach_mapped(op->device, at[0], count * sizeof(rft_delta_job), true);
    if (notes.at != 0) {
        notes.memory = fake_reach_mapped(op->device, at[2], at[3], true);
        notes.used = fake_reach_mapped(op->device, at[4], sizeof(uint64_t), true);
        if (notes.memory == NULL || notes.used == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    }
    for (uint64_t i = 0; table != NULL && i < count; i++) {
        rft_delta_job job;
        memcpy(&job, table + i * sizeof job, sizeof job);
        if (!delta_exchange_one(op->device, &notes, &job)) return RFT_CU_ILLEGAL_ADDRESS;
        memcpy(table + i * sizeof job, &job, sizeof job);
    }
    return table == NULL ? RFT_CU_ILLEGAL_ADDRESS : RFT_CU_SUCCESS;
}

static bool delta_exchange_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    const uint64_t *at = op->numbers;
    return fake_meets(at[0], (uint32_t)at[1] * sizeof(rft_delta_job), base, bytes) ||
           fake_meets(at[2], at[3], base, bytes) ||
           fake_meets(at[4], sizeof(uint64_t), base, bytes);
}

/* What the jobs name is not known before they run. */
static bool delta_uses(const fake_op *op, uint64_t base, uint64_t bytes)
{
    uint64_t count = (uint32_t)op->numbers[1];
    return fake_meets(op->numbers[0], count * sizeof(rft_delta_job), base, bytes);
}

static const kernel_kind kinds[] = {
    {"rft_pack_kernel", 2, {8, 4}, pack_run, pack_uses},
    {"rft_cast_kernel", 3, {8, 8, 8}, cast_run, cast_uses},
    {"rft_digest_kernel", 4, {8, 8, 8, 8}, digest_run, digest_uses},
    {"rft_digest_list_kernel", 2, {8, 4}, digest_list_run, digest_list_uses},
    {"rft_master_split_kernel", 5, {8, 8, 8, 8, 4}, master_split_run, master_split_uses},
    {"rft_master_list_kernel", 6, {8, 8, 8, 8, 4, 8}, master_list_run, master_uses},
    {"rft_master_join_kernel", 7, {8, 8, 8, 8, 4, 8, 4}, master_join_run, master_uses},
    {"rft_delta_exchange_kernel", 5, {8, 4, 8, 8, 8}, delta_exchange_run, delta_exchange_uses},
    {"rft_delta_apply_kernel", 2, {8, 4}, delta_apply_run, delta_uses},
};

rft_cu_result fake_cu_library_load(rft_cu_library *library, const void *image, int *jit_options,
                                   void **jit_values, unsigned jit_count, int *options,
                                   void **values, unsigned count)
{
    fake_call call;
    (void)jit_options;
    (void)jit_values;
    (void)options;
    (void)values;
    rft_cu_result result = fake_begin(&call, FAKE_library_load, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(library == NULL || image == NULL || jit_count + count > 64,
                   RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        fake_node *node = fake_new(sizeof *node);
        *library = (rft_cu_library)(uintptr_t)fake_handle(&fake.libraries, node);
    }
    return fake_end(&call, result);
}

/* 0: every library's. */
static void drop_kernels(uint64_t library)
{
    fake_node *node = fake_tree_from(&fake.kernels, 0);
    while (node != NULL) {
        fake_kernel *kernel = (fake_kernel *)node;
        node = fake_tree_from(&fake.kernels, node->base + node->size);
        if (library != 0 && kernel->library != library) continue;
        fake_tree_take(&fake.kernels, &kernel->node);
        free(kernel);
    }
}

rft_cu_result fake_cu_library_unload(rft_cu_library library)
{
    FAKE_CALL(library_unload, FAKE_NEEDS_INIT);
    if (fake_ends(&call, result)) {
        uint64_t handle = (uint64_t)(uintptr_t)library;
        fake_node *node = fake_object(&fake.libraries, handle, "library");
        if (node == NULL) result = RFT_CU_INVALID_HANDLE;
        if (node != NULL) {
            drop_kernels(handle);
            fake_tree_take(&fake.libraries, node);
            free(node);
        }
    }
    return fake_end(&call, result);
}

static rft_cu_result find(rft_cu_kernel *out, uint64_t library, const char *name)
{
    if (fake_object(&fake.libraries, library, "library") == NULL) return RFT_CU_INVALID_HANDLE;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strcmp(kinds[i].name, name) != 0) continue;
        fake_kernel *kernel = fake_new(sizeof *kernel);
        kernel->library = library;
        kernel->kind = &kinds[i];
        *out = (rft_cu_kernel)(uintptr_t)fake_handle(&fake.kernels, &kernel->node);
        return RFT_CU_SUCCESS;
    }
    return RFT_CU_NOT_FOUND;
}

rft_cu_result fake_cu_library_kernel(rft_cu_kernel *kernel, rft_cu_library library,
                                     const char *name)
{
    FAKE_CALL(library_kernel, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(kernel == NULL || name == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = find(kernel, (uint64_t)(uintptr_t)library, name);
    return fake_end(&call, result);
}

/* The kernel in the current context; here it is the kernel itself. */
rft_cu_result fake_cu_kernel_function(rft_cu_kernel *function, rft_cu_kernel kernel)
{
    FAKE_CALL(kernel_function, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(function == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        uint64_t handle = (uint64_t)(uintptr_t)kernel;
        if (fake_object(&fake.kernels, handle, "kernel") == NULL) result = RFT_CU_INVALID_HANDLE;
    }
    if (result == RFT_CU_SUCCESS) *function = kernel;
    return fake_end(&call, result);
}

rft_cu_result fake_cu_function_load(rft_cu_kernel function)
{
    FAKE_CALL(function_load, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS) {
        uint64_t handle = (uint64_t)(uintptr_t)function;
        if (fake_object(&fake.kernels, handle, "kernel") == NULL) result = RFT_CU_INVALID_HANDLE;
    }
    return fake_end(&call, result);
}

/* Arguments are read when it is launched, in the sizes that the kernel has. */
static void read_arguments(fake_op *op, const kernel_kind *kernel, void **arguments)
{
    for (unsigned i = 0; i < kernel->arguments; i++) {
        uint32_t narrow;
        if (kernel->sizes[i] == sizeof narrow) {
            memcpy(&narrow, arguments[i], sizeof narrow);
            op->numbers[i] = narrow;
        } else {
            memcpy(&op->numbers[i], arguments[i], sizeof op->numbers[i]);
        }
    }
}

rft_cu_result fake_cu_launch(rft_cu_kernel kernel, unsigned grid_x, unsigned grid_y,
                             unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                             unsigned shared, rft_cu_stream stream, void **arguments, void **extra)
{
    FAKE_CALL(launch, FAKE_NEEDS_CONTEXT);
    uint64_t block = (uint64_t)block_x * block_y * block_z;
    if (result == RFT_CU_SUCCESS &&
        (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_y > 65535 || grid_z > 65535 ||
         block == 0 || block > 1024 || shared > 49152 || arguments == NULL || extra != NULL))
        result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) {
        const fake_kernel *found =
            fake_object(&fake.kernels, (uint64_t)(uintptr_t)kernel, "kernel");
        if (found == NULL) result = RFT_CU_INVALID_HANDLE;
        fake_stream *target = found != NULL ? fake_stream_for(&call, stream, &result) : NULL;
        if (target != NULL) {
            fake_op *op = fake_op_new(found->kind->run);
            op->uses = found->kind->uses;
            op->device = call.context->device->ordinal;
            read_arguments(op, found->kind, arguments);
            fake_stream_put(target, op, &call);
        }
    }
    return fake_end(&call, result);
}

void fake_kernels_reset(void)
{
    drop_kernels(0);
    while (fake.libraries.root != NULL) {
        fake_node *node = fake.libraries.root;
        fake_tree_take(&fake.libraries, node);
        free(node);
    }
}
