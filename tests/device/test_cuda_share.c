/*
 * Memory of a GPU in two processes: what one exports the other maps, once and for as long as it has
 * a user; and only memory that the driver confirms is mapped, whatever a share says.
 *
 * Called with a word the program is the other process: it does what it is told, a letter a step,
 * and answers each with a status.
 */
#include "tests/device/cuda_case.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/twin.h"

#define BYTES 10240u

/* ---- The other process */

typedef struct order {
    char verb; /* 'm'ap, 'r'ead, 'u'nmap */
    rft_share share;
} order;

typedef struct answer {
    refit_status status;
    unsigned imports; /* that its driver has open */
    unsigned char bytes[BYTES];
} answer;

static void obey(refit_device *device, const order *told, void **mapped, answer *made)
{
    if (told->verb == 'm') made->status = rft_device_share_map(device, &told->share, mapped, NULL);
    if (told->verb == 'r')
        made->status = refit_stream_copy(device, REFIT_STREAM_NONE, made->bytes, *mapped,
                                         told->share.bytes, NULL);
    if (told->verb == 'u') rft_device_share_unmap(device, *mapped);
    made->imports = fake_cuda_alive().imports;
}

static int be_the_other(void)
{
    refit_device *device = NULL;
    order told;
    answer said;
    void *mapped = NULL;
    if (refit_device_open("cuda:0", NULL, &device, NULL) != REFIT_OK) return 2;
    while (fread(&told, sizeof told, 1, stdin) == 1) {
        memset(&said, 0, sizeof said);
        obey(device, &told, &mapped, &said);
        if (fwrite(&said, sizeof said, 1, stdout) != 1 || fflush(stdout) != 0) return 3;
    }
    return refit_device_close(device, NULL) == REFIT_OK && fake_cuda_leaks() == 0 &&
                   fake_cuda_violations() == 0
               ? 0
               : 4;
}

/* ---- This one */

static const char *program;

static answer said;

static const answer *tell(const twin *other, char verb, const rft_share *share)
{
    order told;
    memset(&told, 0, sizeof told); /* its padding, too, goes through the pipe */
    told.verb = verb;
    told.share = *share;
    twin_say(other, &told, sizeof told);
    twin_hear(other, &said, sizeof said);
    return &said;
}

#define HALF (BYTES / 2)

static unsigned char *memory; /* of the device */
static unsigned char bytes[BYTES];
static rft_share second_half;

static int begin(void **state)
{
    void *taken = NULL;
    (void)gpu_case_begin(state);
    for (unsigned i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)(i * 7 + (i >> 8));
    assert_ok(refit_memory_alloc(gpu, BYTES, &taken, NULL));
    memory = taken;
    assert_ok(refit_stream_copy(gpu, REFIT_STREAM_NONE, memory, bytes, BYTES, NULL));
    assert_ok(rft_device_share_export(gpu, memory + HALF, HALF, &second_half, NULL));
    return 0;
}

static int end(void **state)
{
    assert_ok(refit_memory_free(gpu, memory, NULL));
    return gpu_case_end(state);
}

#define SHARE_TEST(name) TEST_WITH(name, begin, end)

SHARE_TEST(another_process_reads_what_one_exports)
{
    twin other = twin_start(program, "other");
    assert_ok(tell(&other, 'm', &second_half)->status);
    assert_ok(tell(&other, 'r', &second_half)->status);
    assert_memory_equal(said.bytes, bytes + HALF, HALF);
    assert_int_equal(tell(&other, 'u', &second_half)->imports, 0);
    assert_int_equal(twin_leave(&other), 0);
}

SHARE_TEST(an_allocation_is_opened_once_however_often_it_is_asked_for)
{
    rft_share whole;
    assert_ok(rft_device_share_export(gpu, memory, BYTES, &whole, NULL));
    twin other = twin_start(program, "other");
    assert_int_equal(tell(&other, 'm', &second_half)->imports, 1);
    assert_int_equal(tell(&other, 'm', &whole)->imports, 1);
    assert_int_equal(tell(&other, 'u', &whole)->imports, 1);
    assert_ok(tell(&other, 'r', &whole)->status);
    assert_memory_equal(said.bytes, bytes, BYTES);
    assert_int_equal(tell(&other, 'u', &whole)->imports, 0);
    assert_int_equal(twin_leave(&other), 0);
}

SHARE_TEST(what_is_still_mapped_is_unmapped_when_the_device_closes)
{
    twin other = twin_start(program, "other");
    assert_int_equal(tell(&other, 'm', &second_half)->imports, 1);
    assert_int_equal(twin_leave(&other), 0);
}

SHARE_TEST(an_importer_that_is_killed_holds_nothing)
{
    twin other = twin_start(program, "other");
    assert_ok(tell(&other, 'm', &second_half)->status);
    twin_kill(&other); /* the driver would complain of the free that follows */
}

SHARE_TEST(in_the_process_that_exported_it_the_memory_is_given_as_it_is)
{
    refit_device *second = cuda_open();
    void *mapped = NULL;
    assert_ok(rft_device_share_map(gpu, &second_half, &mapped, NULL));
    assert_ptr_equal(mapped, memory + HALF);
    rft_device_share_unmap(gpu, mapped);
    assert_ok(rft_device_share_map(second, &second_half, &mapped, NULL));
    assert_ptr_equal(mapped, memory + HALF);
    rft_device_share_unmap(second, mapped);
    cuda_close(second);
    assert_int_equal(fake_cuda_calls("cuIpcOpenMemHandle"), 0);
}

/* Maps here what a share says that differs from the right one in one thing. */
static refit_status map_here(rft_share share, refit_error *error)
{
    void *mapped = NULL;
    refit_status status = rft_device_share_map(gpu, &share, &mapped, error);
    assert_null(mapped);
    return status;
}

SHARE_TEST(memory_of_another_gpu_is_refused_by_both_names)
{
    refit_device_info info = {.size = sizeof info};
    refit_error error;
    rft_share share = second_half;
    share.uuid[3] ^= 0x40;
    assert_ok(refit_device_describe(gpu, &info, NULL));
    assert_invalid(map_here(share, &error));
    assert_non_null(strstr(error.text, info.uuid));
    assert_non_null(strstr(strstr(error.text, "GPU-") + 4, "GPU-"));
}

SHARE_TEST(bytes_beyond_the_allocation_are_refused)
{
    const uint64_t spans[][2] = {
        {HALF, HALF + 1}, {BYTES, 1}, {UINT64_MAX, HALF}, {HALF, UINT64_MAX}, {BYTES + 1, 0},
    };
    twin other = twin_start(program, "other");
    for (size_t i = 0; i < COUNT_OF(spans); i++) {
        rft_share share = second_half;
        share.offset = spans[i][0];
        share.bytes = spans[i][1];
        assert_invalid(map_here(share, NULL));
        assert_invalid(tell(&other, 'm', &share)->status);
        assert_int_equal(said.imports, 0);
    }
    assert_int_equal(twin_leave(&other), 0);
}

/* The address is only a hint: without a handle that fits, it leads nowhere. */
SHARE_TEST(a_false_address_or_handle_maps_nothing)
{
    void *private_memory = NULL;
    assert_ok(refit_memory_alloc(gpu, BYTES, &private_memory, NULL));
    rft_share other_address = second_half, other_handle = second_half, nonsense = second_half;
    other_address.address ^= (uintptr_t)private_memory ^ (uintptr_t)memory;
    other_handle.handle[20] ^= 1;
    nonsense.address = 1;
    memset(nonsense.handle, 0xff, sizeof nonsense.handle);
    assert_int_not_equal(map_here(other_address, NULL), REFIT_OK);
    assert_int_not_equal(map_here(other_handle, NULL), REFIT_OK);
    assert_int_not_equal(map_here(nonsense, NULL), REFIT_OK);
    assert_ok(refit_memory_free(gpu, private_memory, NULL));
}

/* In another container a process may have this one's number, and so the same addresses and handles:
 * its memory is another all the same. The driver takes it for this one's, and refuses it. */
SHARE_TEST(a_process_of_the_same_number_is_another)
{
    rft_share theirs = second_half;
    theirs.address ^= UINT64_C(0x100000000); /* of another PID namespace */
    assert_refused(map_here(theirs, error), REFIT_ERR_DEVICE, "--pid=host");
    theirs.address = (uintptr_t)memory; /* of none */
    assert_int_not_equal(map_here(theirs, NULL), REFIT_OK);
}

SHARE_TEST(memory_that_is_gone_cannot_be_mapped)
{
    void *gone = NULL;
    rft_share share;
    assert_ok(refit_memory_alloc(gpu, BYTES, &gone, NULL));
    assert_ok(rft_device_share_export(gpu, gone, BYTES, &share, NULL));
    assert_ok(refit_memory_free(gpu, gone, NULL));
    assert_int_not_equal(map_here(share, NULL), REFIT_OK);
}

SHARE_TEST(memory_that_cannot_be_exported_says_why)
{
    rft_share share;
    refit_error error;
    unsigned char host[64];
    rft_cu_ptr managed = fake_cuda_managed(0, 4096);
    assert_invalid(rft_device_share_export(gpu, host, sizeof host, &share, &error));
    assert_int_not_equal(
        rft_device_share_export(gpu, (void *)(uintptr_t)managed, 4096, &share, &error), REFIT_OK);
    assert_invalid(rft_device_share_export(gpu, memory, BYTES + 1, &share, &error));
    fake_cuda_managed_free(managed);
}

SHARE_TEST(virtual_memory_is_refused_by_the_name_that_pytorch_gives_it)
{
    void *base = NULL;
    uint64_t granule = 0;
    rft_share share;
    if (rft_device_reserve(gpu, 1, &base, &granule, NULL) == REFIT_ERR_UNSUPPORTED) skip();
    rft_device_unreserve(gpu, base, 1);
    assert_ok(rft_device_reserve(gpu, granule, &base, &granule, NULL));
    assert_ok(rft_device_commit(gpu, base, granule, NULL));
    assert_refused(rft_device_share_export(gpu, base, granule, &share, error),
                   REFIT_ERR_UNSUPPORTED, "expandable_segments");
    rft_device_unreserve(gpu, base, granule);
}

SHARE_TEST(a_failure_of_the_driver_is_returned)
{
    rft_share share;
    refit_error error;
    const char *const exports[] = {"cuPointerGetAttributes", "cuMemGetAddressRange",
                                   "cuIpcGetMemHandle"};
    for (size_t i = 0; i < 3; i++) {
        fake_cuda_fail(exports[i], 1, 1, RFT_CU_UNKNOWN);
        assert_int_not_equal(rft_device_share_export(gpu, memory, BYTES, &share, &error), REFIT_OK);
        assert_true(error.subsystem == RFT_CU_UNKNOWN);
    }
    assert_ok(rft_device_share_export(gpu, memory, BYTES, &share, NULL));
}

SHARE_TEST(an_import_that_fails_halfway_leaves_nothing_open)
{
    assert_int_equal(setenv("FAKE_CUDA_SCRIPT", "cuMemGetAddressRange:2:1:999", 1), 0);
    twin other = twin_start(program, "other");
    unsetenv("FAKE_CUDA_SCRIPT");
    assert_int_not_equal(tell(&other, 'm', &second_half)->status, REFIT_OK);
    assert_int_equal(said.imports, 0);
    assert_ok(tell(&other, 'm', &second_half)->status);
    assert_int_equal(said.imports, 1);
    assert_int_equal(twin_leave(&other), 0);
}

SHARE_TEST(a_driver_without_sharing_is_unsupported)
{
    rft_share share;
    void *mapped = NULL;
    fake_cuda_hide("cuIpcOpenMemHandle", 0);
    refit_device *device = cuda_open();
    assert_false(rft_device_get_caps(device).shares);
    assert_true(rft_device_get_caps(gpu).shares);
    assert_int_equal(rft_device_share_export(device, memory, BYTES, &share, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_share_map(device, &second_half, &mapped, NULL),
                     REFIT_ERR_UNSUPPORTED);
    cuda_close(device);
}

int main(int argc, char **argv)
{
    if (argc > 1) return be_the_other();
    program = argv[0];
    return test_run("cuda_share");
}
