/*
 * Any bytes as a safetensors file. What is taken has its tensors one after the other, each as long
 * as its type and shape say, and they end where the file ends.
 */
#include "bindings/cli/safetensors.h"
#include "fuzz.h"

static void check_tensor(const refit_tensor *tensor)
{
    uint64_t bits = refit_dtype_bits(tensor->dtype);
    FUZZ_REQUIRE(bits != 0 && tensor->name != NULL && tensor->rank <= REFIT_RANK_MAX);
    /* Unsigned products may wrap, but where they do the reader must have refused. */
    for (uint32_t i = 0; i < tensor->rank; i++)
        bits *= tensor->shape[i];
    FUZZ_REQUIRE(bits == tensor->bytes * 8);
}

static void check_weights(const cli_weights *weights, size_t size)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < weights->count; i++) {
        check_tensor(&weights->tensors[i]);
        FUZZ_REQUIRE(weights->offsets[i] == weights->offsets[0] + total);
        FUZZ_REQUIRE(weights->tensors[i].bytes <= size - weights->offsets[i]);
        total += weights->tensors[i].bytes;
    }
    FUZZ_REQUIRE(total == weights->total);
    if (weights->count > 0) FUZZ_REQUIRE(weights->offsets[0] + total == size);
    FUZZ_REQUIRE(cli_weights_alike(weights, weights));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cli_weights weights;
    refit_error error;
    refit_status status = cli_weights_read(data, size, &weights, &error);
    if (status == REFIT_OK) {
        check_weights(&weights, size);
        cli_weights_close(&weights);
        fuzz_taken++;
    } else {
        FUZZ_REQUIRE(status == REFIT_ERR_INVALID || status == REFIT_ERR_UNSUPPORTED);
        FUZZ_REQUIRE(error.text[0] != '\0');
    }
    return 0;
}
