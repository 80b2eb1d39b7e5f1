/* Device memory, through a copy on the calling thread. */
#include "tests/support/test_device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool test_on_cuda(void)
{
    return getenv("REFIT_TEST_CUDA") != NULL;
}

bool test_on_real_gpu(void)
{
    const char *asked = getenv("REFIT_TEST_CUDA");
    return asked != NULL && strcmp(asked, "real") == 0;
}

/* A real driver takes a while to make a GPU's context and to end it, which a test that opens a
 * device a thousand times would spend its time on: one is held until the process ends. */
static void hold_context(void)
{
    static bool held;
    int (*init)(unsigned) = NULL;
    int (*retain)(void **, int) = NULL;
    void *context;
    if (held || !test_on_real_gpu()) return;
    held = true;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) return; /* the device will say why */
    void *functions[] = {dlsym(library, "cuInit"), dlsym(library, "cuDevicePrimaryCtxRetain")};
    memcpy(&init, &functions[0], sizeof init);
    memcpy(&retain, &functions[1], sizeof retain);
    if (init == NULL || retain == NULL || init(0) != 0) return;
    (void)retain(&context, 0);
}

const char *test_device_spec(const char *host)
{
    static char spec[64];
    hold_context();
    assert_memory_equal(host, "host", 4);
    if (test_on_cuda()) snprintf(spec, sizeof spec, "cuda:0%s", host + 4);
    return test_on_cuda() ? spec : host;
}

refit_status test_device_open(const char *host, refit_device **out, refit_error *error)
{
    return refit_device_open(test_device_spec(host), NULL, out, error);
}

/* NULL: the driver in use, if any, has no such function. */
static void *function_of_driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL) return NULL;
    void *function = dlsym(library, name);
    dlclose(library);
    return function;
}

bool test_device_quiet(void)
{
    const char *(*violation)(void);
    void (*forgive)(void);
    void *functions[] = {function_of_driver("fake_cuda_violation"),
                         function_of_driver("fake_cuda_forgive")};
    if (functions[0] == NULL) return true;
    memcpy(&violation, &functions[0], sizeof violation);
    memcpy(&forgive, &functions[1], sizeof forgive);
    if (test_on_real_gpu()) {
        print_error("REFIT_TEST_CUDA=real, but the driver in use is the fake one\n");
        return false;
    }
    if (violation()[0] == '\0') return true;
    print_error("the driver's rules were broken: %s\n", violation());
    forgive();
    return false;
}

unsigned test_device_left(void)
{
    unsigned (*leaks)(void);
    void *function = function_of_driver("fake_cuda_leaks");
    if (function == NULL) return 0;
    memcpy(&leaks, &function, sizeof leaks);
    return leaks();
}

static void copy(refit_device *device, void *to, const void *from, uint64_t count)
{
    refit_error error;
    refit_status status = refit_stream_copy(device, REFIT_STREAM_NONE, to, from, count, &error);
    /* An allocation that a test lets fail fails once, and this one was not meant. */
    if (status == REFIT_ERR_HOST_MEMORY)
        status = refit_stream_copy(device, REFIT_STREAM_NONE, to, from, count, &error);
    if (status != REFIT_OK) print_error("%s\n", error.text);
    assert_int_equal(status, REFIT_OK);
}

void test_write(refit_device *device, void *memory, const void *bytes, uint64_t count)
{
    copy(device, memory, bytes, count);
}

void test_read(refit_device *device, void *bytes, const void *memory, uint64_t count)
{
    copy(device, bytes, memory, count);
}

void test_fill(refit_device *device, void *memory, int value, uint64_t count)
{
    void *bytes = malloc(count);
    assert_non_null(bytes);
    memset(bytes, value, count);
    copy(device, memory, bytes, count);
    free(bytes);
}

uint64_t test_alike(refit_device *device, const void *memory, const void *bytes, uint64_t count)
{
    unsigned char *read = malloc(count);
    assert_non_null(read);
    copy(device, read, memory, count);
    uint64_t alike = memcmp(read, bytes, count) == 0 ? count : 0;
    while (alike < count && read[alike] == ((const unsigned char *)bytes)[alike])
        alike++;
    free(read);
    return alike;
}

static uint64_t whole_pages(uint64_t count)
{
    return (count + 4095) / 4096 * 4096;
}

void *test_host_alloc(refit_device *device, uint64_t count)
{
    void *memory = NULL;
    assert_int_equal(posix_memalign(&memory, 4096, whole_pages(count)), 0);
    if (rft_device_get_caps(device).needs_pinned) {
        assert_int_equal(rft_device_host_pin(device, memory, whole_pages(count), false, NULL),
                         REFIT_OK);
    }
    return memory;
}

void test_host_free(refit_device *device, void *memory, uint64_t count)
{
    if (rft_device_get_caps(device).needs_pinned) {
        rft_device_host_unpin(device, memory, whole_pages(count));
    }
    free(memory);
}
