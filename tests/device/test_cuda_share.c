/*
 * Memory of a GPU in two processes: what one exports the other maps, once and for as long as it has
 * a user; and only memory that the driver confirms is mapped, whatever a share says.
 *
 * Called with a word the program is the other process: it does what it is told, a letter a step,
 * and answers each with a status.
 */
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/device.h"
#include "fake_cuda.h"
#include "tests/support/test.h"

#define BYTES 10240u

extern char **environ;

/* ---- The other process */

typedef struct order {
    char verb; /* 'm'ap, 'r'ead, 'u'nmap */
    rft_share share;
} order;

typedef struct answer {
    refit_status status;
    unsigned imports; /* that its driver has open */
    char text[256];
    unsigned char bytes[BYTES];
} answer;

static void obey(refit_device *device, const order *told, void **mapped, answer *said)
{
    refit_error error = {0};
    if (told->verb == 'm') {
        said->status = rft_device_share_map(device, &told->share, mapped, &error);
    } else if (told->verb == 'r') {
        said->status = refit_stream_copy(device, REFIT_STREAM_NONE, said->bytes, *mapped,
                                         told->share.bytes, &error);
    } else {
        rft_device_share_unmap(device, *mapped);
        said->status = REFIT_OK;
    }
    memcpy(said->text, error.text,
           sizeof said->text < sizeof error.text ? sizeof said->text : sizeof error.text);
    said->imports = fake_cuda_alive().imports;
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

static const char *program; /* its path; under valgrind, /proc/self/exe is another */

typedef struct other_process {
    pid_t pid;
    FILE *to;
    FILE *from;
    answer said;
} other_process;

static void other_start(other_process *other)
{
    int to[2], from[2];
    char *words[] = {"test_cuda_share", "other", NULL};
    posix_spawn_file_actions_t actions;
    assert_int_equal(pipe2(to, O_CLOEXEC), 0);
    assert_int_equal(pipe2(from, O_CLOEXEC), 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from[1], 1);
    assert_int_equal(posix_spawn(&other->pid, program, &actions, NULL, words, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    other->to = fdopen(to[1], "w");
    other->from = fdopen(from[0], "r");
    assert_true(other->to != NULL && other->from != NULL);
}

static const answer *tell(other_process *other, char verb, const rft_share *share)
{
    order told;
    memset(&told, 0, sizeof told); /* its padding, too, goes through the pipe */
    told.verb = verb;
    told.share = *share;
    assert_int_equal(fwrite(&told, sizeof told, 1, other->to), 1);
    assert_int_equal(fflush(other->to), 0);
    assert_int_equal(fread(&other->said, sizeof other->said, 1, other->from), 1);
    return &other->said;
}

static void other_leave(other_process *other)
{
    int how;
    fclose(other->to);
    assert_int_equal(waitpid(other->pid, &how, 0), other->pid);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
    fclose(other->from);
}

static void other_kill(other_process *other)
{
    assert_int_equal(kill(other->pid, SIGKILL), 0);
    assert_int_equal(waitpid(other->pid, NULL, 0), other->pid);
    fclose(other->to);
    fclose(other->from);
}

typedef struct scene {
    refit_device *device;
    unsigned char *memory; /* of the device */
    unsigned char bytes[BYTES];
    rft_share share; /* of its second half */
} scene;

#define HALF (BYTES / 2)

static int set_up(void **state)
{
    scene *on = calloc(1, sizeof *on);
    void *memory = NULL;
    refit_error error;
    fake_cuda_reset();
    if (on == NULL || refit_device_open("cuda:0", NULL, &on->device, &error) != REFIT_OK) return -1;
    for (unsigned i = 0; i < BYTES; i++) {
        on->bytes[i] = (unsigned char)(i * 7 + (i >> 8));
    }
    assert_ok(refit_memory_alloc(on->device, BYTES, &memory, NULL));
    on->memory = memory;
    assert_ok(refit_stream_copy(on->device, REFIT_STREAM_NONE, memory, on->bytes, BYTES, NULL));
    assert_ok(rft_device_share_export(on->device, on->memory + HALF, HALF, &on->share, NULL));
    *state = on;
    return 0;
}

static int tear_down(void **state)
{
    scene *on = *state;
    assert_ok(refit_memory_free(on->device, on->memory, NULL));
    assert_ok(refit_device_close(on->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    free(on);
    return 0;
}

static void another_process_reads_what_one_exports(void **state)
{
    scene *on = *state;
    other_process other;
    other_start(&other);
    assert_ok(tell(&other, 'm', &on->share)->status);
    assert_ok(tell(&other, 'r', &on->share)->status);
    assert_memory_equal(other.said.bytes, on->bytes + HALF, HALF);
    assert_int_equal(tell(&other, 'u', &on->share)->imports, 0);
    other_leave(&other);
}

static void an_allocation_is_opened_once_however_often_it_is_asked_for(void **state)
{
    scene *on = *state;
    rft_share whole;
    other_process other;
    assert_ok(rft_device_share_export(on->device, on->memory, BYTES, &whole, NULL));
    other_start(&other);
    assert_int_equal(tell(&other, 'm', &on->share)->imports, 1);
    assert_int_equal(tell(&other, 'm', &whole)->imports, 1);
    assert_int_equal(tell(&other, 'u', &whole)->imports, 1);
    assert_ok(tell(&other, 'r', &whole)->status);
    assert_memory_equal(other.said.bytes, on->bytes, BYTES);
    assert_int_equal(tell(&other, 'u', &whole)->imports, 0);
    other_leave(&other);
}

static void what_is_still_mapped_is_unmapped_when_the_device_closes(void **state)
{
    scene *on = *state;
    other_process other;
    other_start(&other);
    assert_int_equal(tell(&other, 'm', &on->share)->imports, 1);
    other_leave(&other);
}

static void an_importer_that_is_killed_holds_nothing(void **state)
{
    scene *on = *state;
    other_process other;
    other_start(&other);
    assert_ok(tell(&other, 'm', &on->share)->status);
    other_kill(&other); /* the driver would complain of the free that follows */
}

static void in_the_process_that_exported_it_the_memory_is_given_as_it_is(void **state)
{
    scene *on = *state;
    refit_device *second = NULL;
    void *mapped = NULL;
    assert_ok(refit_device_open("cuda:0", NULL, &second, NULL));
    assert_ok(rft_device_share_map(on->device, &on->share, &mapped, NULL));
    assert_ptr_equal(mapped, on->memory + HALF);
    rft_device_share_unmap(on->device, mapped);
    assert_ok(rft_device_share_map(second, &on->share, &mapped, NULL));
    assert_ptr_equal(mapped, on->memory + HALF);
    rft_device_share_unmap(second, mapped);
    assert_ok(refit_device_close(second, NULL));
    assert_int_equal(fake_cuda_calls("cuIpcOpenMemHandle"), 0);
}

/* Maps here what a share says that differs from the right one in one thing. */
static refit_status map_here(const scene *on, rft_share share, refit_error *error)
{
    void *mapped = NULL;
    refit_status status = rft_device_share_map(on->device, &share, &mapped, error);
    assert_null(mapped);
    return status;
}

static void memory_of_another_gpu_is_refused_by_both_names(void **state)
{
    scene *on = *state;
    refit_device_info info = {.size = sizeof info};
    refit_error error;
    rft_share share = on->share;
    share.uuid[3] ^= 0x40;
    assert_ok(refit_device_describe(on->device, &info, NULL));
    assert_invalid(map_here(on, share, &error));
    assert_non_null(strstr(error.text, info.uuid));
    assert_non_null(strstr(strstr(error.text, "GPU-") + 4, "GPU-"));
}

static void bytes_beyond_the_allocation_are_refused(void **state)
{
    scene *on = *state;
    const uint64_t spans[][2] = {
        {HALF, HALF + 1}, {BYTES, 1}, {UINT64_MAX, HALF}, {HALF, UINT64_MAX}, {BYTES + 1, 0},
    };
    other_process other;
    other_start(&other);
    for (size_t i = 0; i < COUNT_OF(spans); i++) {
        rft_share share = on->share;
        share.offset = spans[i][0];
        share.bytes = spans[i][1];
        assert_invalid(map_here(on, share, NULL));
        assert_invalid(tell(&other, 'm', &share)->status);
        assert_int_equal(other.said.imports, 0);
    }
    other_leave(&other);
}

/* The address is only a hint: without a handle that fits, it leads nowhere. */
static void a_false_address_or_handle_maps_nothing(void **state)
{
    scene *on = *state;
    void *private_memory = NULL;
    assert_ok(refit_memory_alloc(on->device, BYTES, &private_memory, NULL));
    rft_share other_address = on->share, other_handle = on->share, nonsense = on->share;
    other_address.address ^= (uintptr_t)private_memory ^ (uintptr_t)on->memory;
    other_handle.handle[20] ^= 1;
    nonsense.address = 1;
    memset(nonsense.handle, 0xff, sizeof nonsense.handle);
    assert_int_not_equal(map_here(on, other_address, NULL), REFIT_OK);
    assert_int_not_equal(map_here(on, other_handle, NULL), REFIT_OK);
    assert_int_not_equal(map_here(on, nonsense, NULL), REFIT_OK);
    assert_ok(refit_memory_free(on->device, private_memory, NULL));
}

/* In another container a process may have this one's number, and so the same addresses and handles:
 * its memory is another all the same. The driver takes it for this one's, and refuses it. */
static void a_process_of_the_same_number_is_another(void **state)
{
    scene *on = *state;
    rft_share theirs = on->share;
    theirs.address ^= UINT64_C(0x100000000); /* of another PID namespace */
    assert_refused(map_here(on, theirs, error), REFIT_ERR_DEVICE, "--pid=host");
    theirs.address = (uintptr_t)on->memory; /* of none */
    assert_int_not_equal(map_here(on, theirs, NULL), REFIT_OK);
}

static void memory_that_is_gone_cannot_be_mapped(void **state)
{
    scene *on = *state;
    void *memory = NULL;
    rft_share share;
    assert_ok(refit_memory_alloc(on->device, BYTES, &memory, NULL));
    assert_ok(rft_device_share_export(on->device, memory, BYTES, &share, NULL));
    assert_ok(refit_memory_free(on->device, memory, NULL));
    assert_int_not_equal(map_here(on, share, NULL), REFIT_OK);
}

static void memory_that_cannot_be_exported_says_why(void **state)
{
    scene *on = *state;
    rft_share share;
    refit_error error;
    unsigned char host[64];
    rft_cu_ptr managed = fake_cuda_managed(0, 4096);
    assert_invalid(rft_device_share_export(on->device, host, sizeof host, &share, &error));
    assert_int_not_equal(
        rft_device_share_export(on->device, (void *)(uintptr_t)managed, 4096, &share, &error),
        REFIT_OK);
    assert_invalid(rft_device_share_export(on->device, on->memory, BYTES + 1, &share, &error));
    fake_cuda_managed_free(managed);
}

static void virtual_memory_is_refused_by_the_name_that_pytorch_gives_it(void **state)
{
    scene *on = *state;
    void *base = NULL;
    uint64_t granule = 0;
    rft_share share;
    if (rft_device_reserve(on->device, 1, &base, &granule, NULL) == REFIT_ERR_UNSUPPORTED) skip();
    rft_device_unreserve(on->device, base, 1);
    assert_ok(rft_device_reserve(on->device, granule, &base, &granule, NULL));
    assert_ok(rft_device_commit(on->device, base, granule, NULL));
    assert_refused(rft_device_share_export(on->device, base, granule, &share, error),
                   REFIT_ERR_UNSUPPORTED, "expandable_segments");
    rft_device_unreserve(on->device, base, granule);
}

static void a_failure_of_the_driver_is_returned(void **state)
{
    scene *on = *state;
    rft_share share;
    refit_error error;
    const char *const exports[] = {"cuPointerGetAttributes", "cuMemGetAddressRange",
                                   "cuIpcGetMemHandle"};
    for (size_t i = 0; i < 3; i++) {
        fake_cuda_fail(exports[i], 1, 1, RFT_CU_UNKNOWN);
        assert_int_not_equal(rft_device_share_export(on->device, on->memory, BYTES, &share, &error),
                             REFIT_OK);
        assert_true(error.subsystem == RFT_CU_UNKNOWN);
    }
    assert_ok(rft_device_share_export(on->device, on->memory, BYTES, &share, NULL));
}

static void an_import_that_fails_halfway_leaves_nothing_open(void **state)
{
    scene *on = *state;
    other_process other;
    assert_int_equal(setenv("FAKE_CUDA_SCRIPT", "cuMemGetAddressRange:2:1:999", 1), 0);
    other_start(&other);
    unsetenv("FAKE_CUDA_SCRIPT");
    assert_int_not_equal(tell(&other, 'm', &on->share)->status, REFIT_OK);
    assert_int_equal(other.said.imports, 0);
    assert_ok(tell(&other, 'm', &on->share)->status);
    assert_int_equal(other.said.imports, 1);
    other_leave(&other);
}

static void a_driver_without_sharing_is_unsupported(void **state)
{
    scene *on = *state;
    rft_share share;
    void *mapped = NULL;
    refit_device *device = NULL;
    fake_cuda_hide("cuIpcOpenMemHandle", 0);
    assert_ok(refit_device_open("cuda:0", NULL, &device, NULL));
    assert_false(rft_device_get_caps(device).shares);
    assert_true(rft_device_get_caps(on->device).shares);
    assert_int_equal(rft_device_share_export(device, on->memory, BYTES, &share, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_share_map(device, &on->share, &mapped, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_device_close(device, NULL));
}

#define SHARE_TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(int argc, char **argv)
{
    if (argc > 1) return be_the_other();
    program = argv[0];
    const struct CMUnitTest tests[] = {
        SHARE_TEST(another_process_reads_what_one_exports),
        SHARE_TEST(an_allocation_is_opened_once_however_often_it_is_asked_for),
        SHARE_TEST(what_is_still_mapped_is_unmapped_when_the_device_closes),
        SHARE_TEST(an_importer_that_is_killed_holds_nothing),
        SHARE_TEST(in_the_process_that_exported_it_the_memory_is_given_as_it_is),
        SHARE_TEST(memory_of_another_gpu_is_refused_by_both_names),
        SHARE_TEST(bytes_beyond_the_allocation_are_refused),
        SHARE_TEST(a_false_address_or_handle_maps_nothing),
        SHARE_TEST(a_process_of_the_same_number_is_another),
        SHARE_TEST(memory_that_is_gone_cannot_be_mapped),
        SHARE_TEST(memory_that_cannot_be_exported_says_why),
        SHARE_TEST(virtual_memory_is_refused_by_the_name_that_pytorch_gives_it),
        SHARE_TEST(a_failure_of_the_driver_is_returned),
        SHARE_TEST(an_import_that_fails_halfway_leaves_nothing_open),
        SHARE_TEST(a_driver_without_sharing_is_unsupported),
    };
    return cmocka_run_group_tests_name("cuda_share", tests, NULL, NULL);
}
