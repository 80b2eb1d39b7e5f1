/* The fake driver keeps NVIDIA's rules of copies and of batches of them. */
#include <stdlib.h>

#include "fake_fixture.h"

DRIVER_TEST(pageable_memory_is_copied_while_the_caller_waits)
{
    char here[1000], back[1000] = {0};
    memset(here, 5, sizeof here);
    rft_cu_ptr there = device_memory(sizeof here);
    rft_cu_stream stream = open_stream();
    assert_cu(cu.copy(there, address_of(here), sizeof here, stream));
    assert_cu(cu.copy(address_of(back), there, sizeof back, stream));
    assert_memory_equal(here, back, sizeof here);
    assert_int_equal(fake_cuda_pageable_copies(), 2);
}

DRIVER_TEST(copies_keep_to_one_allocation_and_one_registration)
{
    char *host = calloc(1, 3 * 4096);
    assert_non_null(host);
    assert_cu(cu.host_register(host, 4096, 0));
    assert_cu(cu.host_register(host + 4096, 4096, 0));
    rft_cu_ptr memory = device_memory(8192);
    rft_cu_stream stream = open_stream();
    rft_cu_ptr from = address_of(host);
    refuses(INVALID_VALUE, cu.copy(memory, from + 2048, 4096, stream));
    refuses(INVALID_VALUE, cu.copy(memory, from + 6144, 4096, stream));
    refuses(INVALID_VALUE, cu.copy(memory + 4097, from, 4096, stream));
    refuses(INVALID_VALUE, cu.copy(memory, 0, 4096, stream));
    refuses(INVALID_VALUE, cu.fill(memory, 1, 8193, stream));
    assert_cu(cu.copy(memory, from + 4096, 4096, stream));
    assert_cu(cu.copy(memory, from, 0, stream));
    fake_cuda_settle();
    assert_cu(cu.host_unregister(host));
    assert_cu(cu.host_unregister(host + 4096));
    free(host);
}

DRIVER_TEST(memory_that_goes_before_the_work_is_a_violation_and_a_loss)
{
    rft_cu_ptr memory = device_memory(4096);
    rft_cu_stream stream = open_stream();
    fake_cuda_stop();
    assert_cu(cu.fill(memory, 1, 4096, stream));
    assert_cu(cu.memory_free(memory));
    assert_violations(1);
    fake_cuda_forgive();
    fake_cuda_go();
    fake_cuda_settle();
    refuses(ILLEGAL_ADDRESS, cu.stream_query(stream));
    refuses(ILLEGAL_ADDRESS, cu.stream_close(stream));
}

/* Three copies of 100 bytes each from `host` to `memory`. */
typedef struct batch {
    rft_cu_ptr to[3];
    rft_cu_ptr from[3];
    size_t bytes[3];
    rft_cu_copy_attributes attributes[2];
    size_t starts[2];
} batch;

static batch batch_of(rft_cu_ptr memory, const char *host, int order)
{
    batch made = {.attributes = {{.source_order = order}, {.source_order = order}}};
    for (unsigned i = 0; i < 3; i++) {
        made.to[i] = memory + 200 * i;
        made.from[i] = address_of(host + 100 * i);
        made.bytes[i] = 100;
    }
    return made;
}

static rft_cu_result put(batch *it, size_t attributes, rft_cu_stream stream)
{
    return cu.copy_batch(it->to, it->from, it->bytes, 3, it->attributes, it->starts, attributes,
                         stream);
}

DRIVER_TEST(a_batch_copies_all_of_its_entries)
{
    char *host = pinned_memory(300);
    rft_cu_ptr memory = device_memory(600);
    rft_cu_stream stream = open_stream();
    for (int i = 0; i < 300; i++)
        host[i] = (char)i;
    batch it = batch_of(memory, host, RFT_CU_SOURCE_STREAM);
    size_t failed = 7;
    assert_cu(put(&it, 1, stream));
    fake_cuda_settle();
    assert_memory_equal(fake_cuda_bytes(memory + 400, 100), host + 200, 100);
    assert_int_equal(fake_cuda_batch_most(), 3);
    assert_cu(cu.copy_batch_12080(it.to, it.from, it.bytes, 3, it.attributes, it.starts, 1, &failed,
                                  stream));
    fake_cuda_settle();
}

DRIVER_TEST(a_batch_takes_addresses_as_the_device_knows_them)
{
    rft_cu_ptr memory = device_memory(4096);
    rft_cu_stream stream = open_stream();
    char *host = pinned_memory(4096);
    fake_cuda_set_attribute(0, RFT_CU_ATTR_HOST_POINTERS, 0, true);
    assert_cu(cu.copy(memory, address_of(host), 100, stream));
    fake_cuda_settle();
    batch it = batch_of(memory, host, RFT_CU_SOURCE_STREAM);
    assert_cu(put(&it, 1, stream));
    fake_cuda_settle();
    refuses(ILLEGAL_ADDRESS, cu.stream_close(stream));
    refuses(ILLEGAL_ADDRESS, cu.memory_free(memory));
    refuses(ILLEGAL_ADDRESS, cu.host_unregister(host));
}

DRIVER_TEST(a_batch_is_refused_for_what_is_wrong_with_it)
{
    char *host = pinned_memory(300);
    rft_cu_ptr memory = device_memory(600);
    rft_cu_stream stream = open_stream();
    batch good = batch_of(memory, host, RFT_CU_SOURCE_STREAM), it = good;
    refuses(INVALID_VALUE, put(&it, 1, NULL));
    refuses(INVALID_VALUE, put(&it, 1, RFT_CU_STREAM_LEGACY));
    refuses(INVALID_VALUE, put(&it, 1, RFT_CU_STREAM_PER_THREAD));
    refuses(INVALID_VALUE, put(&it, 0, stream));
    refuses(INVALID_VALUE, put(&it, 2, stream)); /* both begin at 0 */
    it.starts[0] = 1;
    refuses(INVALID_VALUE, put(&it, 1, stream));
    it = good;
    it.attributes[0].source_order = 0;
    refuses(INVALID_VALUE, put(&it, 1, stream));
    it = good;
    it.bytes[1] = 0;
    refuses(INVALID_VALUE, put(&it, 1, stream));
    it = good;
    it.to[2] += 1000;
    size_t failed = 7;
    refuses(INVALID_VALUE, cu.copy_batch_12080(it.to, it.from, it.bytes, 3, it.attributes,
                                               it.starts, 1, &failed, stream));
    assert_int_equal(failed, 2);
    fake_cuda_set_batch_cap(2);
    refuses(INVALID_VALUE, put(&good, 1, stream));
    assert_violations(1);
    fake_cuda_forgive();
}

DRIVER_TEST(rows_are_refused_for_what_is_wrong_with_them)
{
    char *host = pinned_memory(300);
    rft_cu_ptr memory = device_memory(600);
    rft_cu_stream stream = open_stream();
    const rft_cu_copy_2d good = {.from_type = RFT_CU_MEMORY_HOST,
                                 .from_host = host,
                                 .from_pitch = 100,
                                 .to_type = RFT_CU_MEMORY_DEVICE,
                                 .to_device = memory,
                                 .to_pitch = 200,
                                 .width = 60,
                                 .height = 3};
    rft_cu_copy_2d it = good;
    for (int i = 0; i < 300; i++)
        host[i] = (char)i;
    assert_cu(cu.copy_2d(&good, stream));
    fake_cuda_settle();
    assert_memory_equal(fake_cuda_bytes(memory + 400, 60), host + 200, 60);
    it.width = 0;
    refuses(INVALID_VALUE, cu.copy_2d(&it, stream));
    it = good;
    it.from_pitch = 59;
    refuses(INVALID_VALUE, cu.copy_2d(&it, stream));
    it = good;
    it.to_pitch = (size_t)INT32_MAX + 1;
    refuses(INVALID_VALUE, cu.copy_2d(&it, stream));
    it = good;
    it.height = 4; /* beyond both */
    refuses(INVALID_VALUE, cu.copy_2d(&it, stream));
    it = good;
    it.to_type = RFT_CU_MEMORY_ARRAY;
    refuses(INVALID_VALUE, cu.copy_2d(&it, stream));
    refuses(INVALID_VALUE, cu.copy_2d(NULL, stream));
}

DRIVER_TEST(source_order_any_reads_when_it_is_called)
{
    char *host = pinned_memory(300);
    rft_cu_ptr memory = device_memory(600);
    rft_cu_stream stream = open_stream();
    batch it = batch_of(memory, host, RFT_CU_SOURCE_ANY);
    memset(host, 1, 300);
    fake_cuda_stop();
    assert_cu(put(&it, 1, stream));
    memset(host, 2, 300);
    fake_cuda_go();
    fake_cuda_settle();
    assert_int_equal(*(char *)fake_cuda_bytes(memory, 1), 1);
    assert_violations(3);
    fake_cuda_forgive();
    it = batch_of(memory, host, RFT_CU_SOURCE_STREAM);
    fake_cuda_stop();
    assert_cu(put(&it, 1, stream));
    memset(host, 3, 300);
    fake_cuda_go();
    fake_cuda_settle();
    assert_int_equal(*(char *)fake_cuda_bytes(memory, 1), 3);
}

int main(void)
{
    return test_run("fake_copies");
}
