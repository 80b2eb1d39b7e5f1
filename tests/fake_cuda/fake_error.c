/*
 * The names and words of the driver's answers.
 */
#include <stddef.h>

#include "fake_state.h"

static const struct fake_word {
    rft_cu_result result;
    const char *name;
    const char *text;
} words[] = {
    {RFT_CU_SUCCESS, "CUDA_SUCCESS", "no error"},
    {RFT_CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {RFT_CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {RFT_CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {RFT_CU_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {RFT_CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {RFT_CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {RFT_CU_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {RFT_CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {RFT_CU_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {RFT_CU_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {RFT_CU_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE",
     "uncorrectable ECC error encountered"},
    {RFT_CU_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {RFT_CU_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {RFT_CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {RFT_CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {RFT_CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {RFT_CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {RFT_CU_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {RFT_CU_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {RFT_CU_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {RFT_CU_ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {RFT_CU_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {RFT_CU_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {RFT_CU_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {RFT_CU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {RFT_CU_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {RFT_CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {RFT_CU_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {RFT_CU_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {RFT_CU_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {RFT_CU_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {RFT_CU_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {RFT_CU_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {RFT_CU_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const struct fake_word *word_of(rft_cu_result result)
{
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (words[i].result == result) return &words[i];
    return NULL;
}

rft_cu_result fake_cu_get_error_name(rft_cu_result result, const char **name)
{
    fake_call call;
    rft_cu_result answer = fake_begin(&call, FAKE_get_error_name, FAKE_NEEDS_NOTHING);
    const struct fake_word *word = word_of(result);
    if (answer == RFT_CU_SUCCESS) *name = word != NULL ? word->name : NULL;
    if (answer == RFT_CU_SUCCESS && word == NULL) answer = RFT_CU_INVALID_VALUE;
    return fake_end(&call, answer);
}

rft_cu_result fake_cu_get_error_string(rft_cu_result result, const char **text)
{
    fake_call call;
    rft_cu_result answer = fake_begin(&call, FAKE_get_error_string, FAKE_NEEDS_NOTHING);
    const struct fake_word *word = word_of(result);
    if (answer == RFT_CU_SUCCESS) *text = word != NULL ? word->text : NULL;
    if (answer == RFT_CU_SUCCESS && word == NULL) answer = RFT_CU_INVALID_VALUE;
    return fake_end(&call, answer);
}
