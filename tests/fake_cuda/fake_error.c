/*
 * The names and words of the driver's answers.
 */
#include <stddef.h>

#include "fake_state.h"

#define WORD(name) RFT_CU_##name, "CUDA_ERROR_" #name

static const struct fake_word {
    rft_cu_result result;
    const char *name;
    const char *text;
} words[] = {
    {RFT_CU_SUCCESS, "CUDA_SUCCESS", "no error"},
    {WORD(INVALID_VALUE), "invalid argument"},
    {WORD(OUT_OF_MEMORY), "out of memory"},
    {WORD(NOT_INITIALIZED), "initialization error"},
    {WORD(DEVICE_UNAVAILABLE), "CUDA-capable device(s) is/are busy or unavailable"},
    {WORD(NO_DEVICE), "no CUDA-capable device is detected"},
    {WORD(INVALID_DEVICE), "invalid device ordinal"},
    {WORD(INVALID_IMAGE), "device kernel image is invalid"},
    {WORD(INVALID_CONTEXT), "invalid device context"},
    {WORD(MAP_FAILED), "mapping of buffer object failed"},
    {WORD(NO_BINARY_FOR_GPU), "no kernel image is available for execution on the device"},
    {WORD(ECC_UNCORRECTABLE), "uncorrectable ECC error encountered"},
    {WORD(UNSUPPORTED_PTX_VERSION), "the provided PTX was compiled with an unsupported toolchain."},
    {WORD(OPERATING_SYSTEM), "OS call failed or operation not supported on this OS"},
    {WORD(INVALID_HANDLE), "invalid resource handle"},
    {WORD(NOT_FOUND), "named symbol not found"},
    {WORD(NOT_READY), "device not ready"},
    {WORD(ILLEGAL_ADDRESS), "an illegal memory access was encountered"},
    {WORD(LAUNCH_OUT_OF_RESOURCES), "too many resources requested for launch"},
    {WORD(LAUNCH_TIMEOUT), "the launch timed out and was terminated"},
    {WORD(CONTEXT_IS_DESTROYED), "context is destroyed"},
    {WORD(ASSERT), "device-side assert triggered"},
    {WORD(HOST_MEMORY_ALREADY_REGISTERED),
     "part or all of the requested memory range is already mapped"},
    {WORD(HOST_MEMORY_NOT_REGISTERED), "pointer does not correspond to a registered memory region"},
    {WORD(MISALIGNED_ADDRESS), "misaligned address"},
    {WORD(LAUNCH_FAILED), "unspecified launch failure"},
    {WORD(NOT_PERMITTED), "operation not permitted"},
    {WORD(NOT_SUPPORTED), "operation not supported"},
    {WORD(SYSTEM_DRIVER_MISMATCH),
     "system has unsupported display driver / cuda driver combination"},
    {WORD(STREAM_CAPTURE_UNSUPPORTED), "operation not permitted when stream is capturing"},
    {WORD(STREAM_CAPTURE_INVALIDATED), "operation failed due to a previous error during capture"},
    {WORD(STREAM_CAPTURE_ISOLATION), "dependency created on uncaptured work in another stream"},
    {WORD(STREAM_CAPTURE_IMPLICIT),
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {WORD(CAPTURED_EVENT),
     "operation not permitted on an event last recorded in a capturing stream"},
    {WORD(UNKNOWN), "unknown error"},
};

static const struct fake_word *word_of(rft_cu_result result)
{
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (words[i].result == result) return &words[i];
    return NULL;
}

/* The answer's name, or its text. */
static rft_cu_result tell(rft_cu_result answer, rft_cu_result result, bool name, const char **out)
{
    const struct fake_word *word = word_of(result);
    if (answer != RFT_CU_SUCCESS) return answer;
    *out = word == NULL ? NULL : name ? word->name : word->text;
    return word == NULL ? RFT_CU_INVALID_VALUE : RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_get_error_name(rft_cu_result answer, const char **name)
{
    FAKE_CALL(get_error_name, FAKE_NEEDS_NOTHING);
    return fake_end(&call, tell(result, answer, true, name));
}

rft_cu_result fake_cu_get_error_string(rft_cu_result answer, const char **text)
{
    FAKE_CALL(get_error_string, FAKE_NEEDS_NOTHING);
    return fake_end(&call, tell(result, answer, false, text));
}
