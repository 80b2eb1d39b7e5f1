/*
 * The fake driver keeps NVIDIA's rules of memory that several processes have. Called with a word,
 * the program is the other process: "export" shows memory, "import" opens what it is shown.
 */
#include <unistd.h>

#include "fake_fixture.h"
#include "tests/support/twin.h"

/* ---- The other process: orders are letters on stdin, answers go to stdout. */

static bool say(const void *answer, size_t bytes)
{
    return write(STDOUT_FILENO, answer, bytes) == (ssize_t)bytes;
}

static int be_exporter(void)
{
    rft_cu_ipc_handle handle;
    rft_cu_ptr memory;
    char end;
    if (cu.memory_alloc(&memory, 4096) != 0 || cu.ipc_export(&handle, memory) != 0) return 2;
    if (!say(&handle, sizeof handle)) return 3;
    return read(STDIN_FILENO, &end, 1) == 0 ? 0 : 4;
}

static int obey(char order, const rft_cu_ipc_handle *handle, rft_cu_ptr *memory)
{
    if (order == 'o') return cu.ipc_import(memory, *handle, RFT_CU_IPC_LAZY_PEER_ACCESS);
    if (order == 'c') return cu.ipc_close(*memory);
    char *bytes = fake_cuda_bytes(*memory, 1);
    if (bytes == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    if (order == 'w') *bytes = 77;
    return order == 'r' ? *bytes : RFT_CU_SUCCESS;
}

static int be_importer(void)
{
    rft_cu_ipc_handle handle;
    rft_cu_ptr memory = 0;
    char order;
    if (read(STDIN_FILENO, &handle, sizeof handle) != (ssize_t)sizeof handle) return 2;
    while (read(STDIN_FILENO, &order, 1) == 1) {
        int answer = obey(order, &handle, &memory);
        if (!say(&answer, sizeof answer)) return 3;
    }
    return fake_cuda_violations() == 0 ? 0 : 4;
}

/* ---- This one */

static const char *program;

static int ask(const twin *other, char order)
{
    int answer = 0;
    twin_say(other, &order, 1);
    twin_hear(other, &answer, sizeof answer);
    return answer;
}

static twin importer_of(rft_cu_ptr memory)
{
    rft_cu_ipc_handle handle;
    twin other = twin_start(program, "import");
    assert_cu(cu.ipc_export(&handle, memory));
    twin_say(&other, &handle, sizeof handle);
    return other;
}

DRIVER_TEST(a_handle_is_of_the_whole_allocation)
{
    rft_cu_ptr memory = device_memory(8192), next = device_memory(8192);
    rft_cu_ipc_handle first, within, other;
    assert_cu(cu.ipc_export(&first, memory));
    assert_cu(cu.ipc_export(&within, memory + 5000));
    assert_cu(cu.ipc_export(&other, next));
    assert_memory_equal(&first, &within, sizeof first);
    assert_memory_not_equal(&first, &other, sizeof first);
    refuses(INVALID_VALUE, cu.ipc_export(&first, address_of(&first)));
}

DRIVER_TEST(a_process_cannot_open_what_it_exported)
{
    rft_cu_ptr memory = device_memory(8192), again;
    rft_cu_ipc_handle handle;
    assert_cu(cu.ipc_export(&handle, memory));
    refuses(INVALID_CONTEXT, cu.ipc_import(&again, handle, RFT_CU_IPC_LAZY_PEER_ACCESS));
}

DRIVER_TEST(another_process_has_the_same_bytes)
{
    (void)device_memory(100); /* so that the next is not at a page */
    rft_cu_ptr memory = device_memory(8192);
    char *bytes = fake_cuda_bytes(memory, 8192);
    bytes[0] = 33;
    twin other = importer_of(memory + 17);
    assert_int_equal(ask(&other, 'o'), RFT_CU_SUCCESS);
    assert_int_equal(ask(&other, 'r'), 33);
    assert_int_equal(ask(&other, 'w'), RFT_CU_SUCCESS);
    assert_int_equal(bytes[0], 77);
    /* Opened twice, it is there until it is closed twice. */
    assert_int_equal(ask(&other, 'o'), RFT_CU_SUCCESS);
    assert_int_equal(ask(&other, 'c'), RFT_CU_SUCCESS);
    assert_int_equal(ask(&other, 'r'), 77);
    assert_int_equal(ask(&other, 'c'), RFT_CU_SUCCESS);
    assert_int_equal(ask(&other, 'r'), RFT_CU_ILLEGAL_ADDRESS);
    assert_int_equal(twin_leave(&other), 0);
}

DRIVER_TEST(memory_freed_while_another_process_has_it_is_a_violation)
{
    rft_cu_ptr memory = device_memory(8192), neighbour = device_memory(8192);
    twin other = importer_of(memory);
    assert_int_equal(ask(&other, 'o'), RFT_CU_SUCCESS);
    assert_cu(cu.memory_free(neighbour));
    assert_violations(0);
    assert_cu(cu.memory_free(memory));
    assert_violations(1);
    fake_cuda_forgive();
    assert_int_equal(twin_leave(&other), 0);
}

DRIVER_TEST(a_killed_process_has_nothing_open)
{
    rft_cu_ptr memory = device_memory(8192);
    twin other = importer_of(memory);
    assert_int_equal(ask(&other, 'o'), RFT_CU_SUCCESS);
    twin_kill(&other);
}

DRIVER_TEST(what_is_opened_is_on_the_current_device)
{
    rft_cu_context second, popped;
    rft_cu_ipc_handle handle;
    rft_cu_ptr memory, base;
    size_t bytes;
    twin other = twin_start(program, "export");
    twin_hear(&other, &handle, sizeof handle);
    assert_cu(cu.context_retain(&second, 1));
    assert_cu(cu.context_push(second));
    refuses(INVALID_VALUE, cu.ipc_import(&memory, handle, RFT_CU_IPC_LAZY_PEER_ACCESS));
    assert_cu(cu.context_pop(&popped));
    assert_cu(cu.context_release(1));
    refuses(INVALID_VALUE, cu.ipc_import(&memory, handle, 0));
    assert_cu(cu.ipc_import(&memory, handle, RFT_CU_IPC_LAZY_PEER_ACCESS));
    assert_cu(cu.memory_range(&base, &bytes, memory + 10));
    assert_int_equal(base, memory);
    assert_int_equal(bytes, 4096);
    assert_int_equal(fake_cuda_alive().imports, 1);
    refuses(INVALID_VALUE, cu.memory_free(memory));
    assert_cu(cu.ipc_close(memory));
    refuses(INVALID_VALUE, cu.ipc_close(memory));
    assert_violations(2);
    fake_cuda_forgive();
    assert_int_equal(twin_leave(&other), 0);
    refuses(INVALID_HANDLE, cu.ipc_import(&memory, handle, RFT_CU_IPC_LAZY_PEER_ACCESS));
}

static int be_the_other(const char *part)
{
    void *state = NULL;
    set_up(&state);
    return strcmp(part, "export") == 0 ? be_exporter() : be_importer();
}

int main(int count, char **words)
{
    if (count > 1) return be_the_other(words[1]);
    program = words[0];
    return test_run("fake_ipc");
}
