/*
 * safetensors: weights in a file, as the safetensors format lays them out.
 *
 *     8 bytes   length of the header, little-endian
 *     header    JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
 *     data      the tensors' bytes, one after the other, no hole and no overlap
 *
 * The optional "__metadata__" of a header is checked and then left out: a refit version is its
 * tensors. The values are never looked at.
 */
#ifndef CLI_SAFETENSORS_H
#define CLI_SAFETENSORS_H

#include <refit/broadcast.h>

/* Longer headers are refused, as the reference implementation does. */
#define CLI_SAFETENSORS_HEADER_MOST ((uint64_t)100000000)
#define CLI_SAFETENSORS_METADATA    "__metadata__"

typedef struct cli_weights {
    uint32_t count;
    refit_tensor *tensors; /* in the order of their bytes; names borrowed from `header` */
    uint64_t *offsets;     /* of each tensor's bytes, from the beginning of the file */
    uint64_t total;        /* bytes of all tensors */
    void *header;          /* the JSON that holds the names; NULL when closed */
    int file;              /* or -1 if it was read from memory */
} cli_weights;

/*
 * Opens a file and checks all of its header before anything is used. The tensors' bytes are read
 * later: replace files by renaming, not by writing into them. REFIT_ERR_IO, REFIT_ERR_INVALID (not
 * safetensors), REFIT_ERR_UNSUPPORTED (more than refit carries), REFIT_ERR_HOST_MEMORY.
 */
refit_status cli_weights_open(const char *path, cli_weights *out, refit_error *error);

/* As cli_weights_open, from memory, which is not used after the call. */
refit_status cli_weights_read(const void *memory, uint64_t bytes, cli_weights *out,
                              refit_error *error);

/* Reads the bytes of tensor `index` of an opened file. REFIT_ERR_IO, also where the file was cut
 * short since it was opened. */
refit_status cli_weights_load(const cli_weights *weights, uint32_t index, void *memory,
                              refit_error *error);

void cli_weights_close(cli_weights *weights);

/* Whether both have the same tensors, apart from their bytes. */
int cli_weights_alike(const cli_weights *a, const cli_weights *b);

#endif
