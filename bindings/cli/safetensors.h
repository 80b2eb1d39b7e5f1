/*
 * safetensors: weights in a file, as the safetensors format lays them out.
 *
 *     8 bytes   length of the header, little-endian
 *     header    JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
 *     data      the tensors' bytes, one behind the other, no hole and no overlap
 *
 * The optional "__metadata__" of a header is checked and then left out: a refit version is its
 * tensors. The values are never looked at.
 */
#ifndef CLI_SAFETENSORS_H
#define CLI_SAFETENSORS_H

#include <refit/broadcast.h>

/* Longer headers are refused: with 100 bytes a tensor this is room for 160,000 of them. */
#define CLI_SAFETENSORS_HEADER_MOST ((uint64_t)16 << 20)
#define CLI_SAFETENSORS_METADATA    "__metadata__"

typedef struct cli_weights {
    uint32_t count;
    refit_tensor *tensors; /* in the order of their bytes; names borrowed from `header` */
    const void **bytes;    /* of each tensor, in the file's memory */
    uint64_t total;        /* bytes of all tensors */
    void *header;          /* the JSON that holds the names */
    void *map;             /* the file, or NULL if the memory is the caller's */
    uint64_t map_bytes;
} cli_weights;

/*
 * Maps a file and checks all of its header before anything is used. A file that somebody cuts short
 * while it is mapped ends the process (SIGBUS): replace files by renaming. REFIT_ERR_IO,
 * REFIT_ERR_INVALID (not safetensors), REFIT_ERR_UNSUPPORTED (more than refit carries),
 * REFIT_ERR_HOST_MEMORY.
 */
refit_status cli_weights_open(const char *path, cli_weights *out, refit_error *error);

/* Likewise from memory that the caller keeps until close. */
refit_status cli_weights_read(const void *memory, uint64_t bytes, cli_weights *out,
                              refit_error *error);

void cli_weights_close(cli_weights *weights);

/* Whether both have the same tensors, apart from their bytes. */
int cli_weights_alike(const cli_weights *a, const cli_weights *b);

#endif
