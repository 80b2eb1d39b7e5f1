/*
 * Stand-ins for the optional slots that a device leaves empty, so that no caller ever tests a slot
 * for NULL. They know neither the device nor its state.
 */
#include "device/device.h"

static refit_status refuse(refit_error *error, const char *what)
{
    return rft_fail(error, REFIT_ERR_UNSUPPORTED, "this kind of device has no %s", what);
}

static bool never_lost(void *self)
{
    (void)self;
    return false;
}

static refit_status no_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                               refit_error *error)
{
    (void)self;
    (void)bytes;
    (void)out;
    (void)granule;
    return refuse(error, "arenas with stable addresses");
}

static refit_status no_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    (void)self;
    (void)base;
    (void)bytes;
    return refuse(error, "arenas with stable addresses");
}

static refit_status no_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                refit_error *error)
{
    (void)freed;
    return no_commit(self, base, bytes, error);
}

/* Without a check the caller is believed. Such a device copies across any memory that lies side by
 * side. */
static refit_status no_memory_check(void *self, const void *memory, uint64_t bytes,
                                    rft_memory_range *allocation, refit_error *error)
{
    (void)self;
    (void)memory;
    (void)bytes;
    (void)error;
    *allocation = (rft_memory_range){0};
    return REFIT_OK;
}

static refit_status no_digest(void *self, refit_stream_ref stream, const void *memory,
                              uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)memory;
    (void)bytes;
    (void)offset;
    (void)sum;
    return refuse(error, "digests of its own");
}

static refit_status no_digest_list(void *self, refit_stream_ref stream, rft_digest_job *jobs,
                                   uint32_t count, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)jobs;
    (void)count;
    return refuse(error, "digests of its own");
}

static refit_status no_copy_rows(void *self, refit_stream_ref stream, const rft_rows *rows,
                                 refit_error *error)
{
    (void)self;
    (void)stream;
    (void)rows;
    return refuse(error, "copies of rows");
}

static refit_status no_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                 const float *from, uint64_t count, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)to;
    (void)from;
    (void)count;
    return refuse(error, "casts");
}

static refit_status no_master(void *self, refit_stream_ref stream, const rft_master_job *job,
                              refit_error *error)
{
    (void)self;
    (void)stream;
    (void)job;
    return refuse(error, "kernels for masters");
}

static refit_status no_delta_exchange(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                      uint32_t count, const rft_delta_notes *notes,
                                      refit_error *error)
{
    (void)self;
    (void)stream;
    (void)jobs;
    (void)count;
    (void)notes;
    return refuse(error, "kernels for deltas");
}

static refit_status no_delta_apply(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                   uint32_t count, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)jobs;
    (void)count;
    return refuse(error, "kernels for deltas");
}

static refit_status no_share_export(void *self, const void *memory, uint64_t bytes, rft_share *out,
                                    refit_error *error)
{
    (void)self;
    (void)memory;
    (void)bytes;
    (void)out;
    return refuse(error, "memory that other processes can map");
}

static refit_status no_share_map(void *self, const rft_share *share, void **out, refit_error *error)
{
    (void)self;
    (void)share;
    (void)out;
    return refuse(error, "memory that other processes can map");
}

static void no_share_unmap(void *self, void *memory)
{
    (void)self;
    (void)memory;
}

static void no_range(void *self, void *base, uint64_t bytes)
{
    (void)self;
    (void)base;
    (void)bytes;
}

static refit_status no_host_pin(void *self, void *memory, uint64_t bytes, bool read_only,
                                refit_error *error)
{
    (void)self;
    (void)memory;
    (void)bytes;
    (void)read_only;
    return refuse(error, "page-locked host memory");
}

static refit_status no_stream_call(void *self, refit_stream_ref stream, refit_stream_fn function,
                                   void *user, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)function;
    (void)user;
    return refuse(error, "calls in stream order");
}

#define FILL(slot, stand_in)                                                                       \
    if (ops->slot == NULL) ops->slot = (stand_in)

static void fill(rft_device_ops *ops)
{
    FILL(is_lost, never_lost);
    FILL(memory_check, no_memory_check);
    FILL(reserve, no_reserve);
    FILL(commit, no_commit);
    FILL(decommit, no_decommit);
    FILL(unreserve, no_range);
    FILL(host_pin, no_host_pin);
    FILL(host_unpin, no_range);
    FILL(stream_call, no_stream_call);
    FILL(copy_rows, no_copy_rows);
    FILL(digest, no_digest);
    FILL(digest_list, no_digest_list);
    FILL(cast_bf16, no_cast_bf16);
    FILL(master_encode, no_master);
    FILL(master_decode, no_master);
    FILL(delta_exchange, no_delta_exchange);
    FILL(delta_apply, no_delta_apply);
    FILL(share_export, no_share_export);
    FILL(share_map, no_share_map);
    FILL(share_unmap, no_share_unmap);
}

#define REQUIRE(slot)                                                                              \
    RFT_REFUSE_IF(ops->slot == NULL, error, REFIT_ERR_INVALID,                                     \
                  "a device without " #slot " cannot be made: fill the slot")

refit_status rft_device_fill_optional(rft_device_ops *ops, refit_error *error)
{
    REQUIRE(close);
    REQUIRE(describe);
    REQUIRE(caps);
    REQUIRE(memory_alloc);
    REQUIRE(memory_free);
    REQUIRE(stream_open);
    REQUIRE(stream_close);
    REQUIRE(copy_batch);
    REQUIRE(zero);
    REQUIRE(event_open);
    REQUIRE(event_close);
    REQUIRE(event_record);
    REQUIRE(event_join);
    REQUIRE(event_wait);
    fill(ops);
    return REFIT_OK;
}
