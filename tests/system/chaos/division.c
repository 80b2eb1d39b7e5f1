/* Every rank draws the parts of all of them, so that all agree; so does the trainer what a worker
 * takes. */
#include "division.h"

#include <string.h>

#include "tests/support/seeded.h"

typedef enum division_manner {
    DIVIDE_NOT, /* one rank has all of it */
    DIVIDE_ROWS,
    DIVIDE_COLUMNS,
    DIVIDE_GRID, /* two by two */
    DIVISION_MANNERS,
} division_manner;

/* Where the parts of `length` elements begin and end. Of four bits an element there are whole
 * bytes.
 */
static void draw_cuts(uint64_t length, uint32_t count, uint64_t step, uint64_t *seed,
                      uint64_t cuts[RANKS_MOST + 1])
{
    cuts[0] = 0;
    cuts[count] = length;
    for (uint32_t i = 1; i < count; i++) {
        uint64_t cut = seeded_below(seed, length / step + 1) * step;
        uint32_t at = i;
        for (; at > 1 && cuts[at - 1] > cut; at--)
            cuts[at] = cuts[at - 1];
        cuts[at] = cut;
    }
}

static division_manner draw_manner(const refit_tensor *tensor, uint32_t ranks, uint64_t *seed)
{
    division_manner manner = (division_manner)seeded_below(seed, DIVISION_MANNERS);
    if (manner == DIVIDE_GRID && ranks != RANKS_MOST) manner = DIVIDE_ROWS;
    if (manner > DIVIDE_ROWS && tensor->rank < 2) manner = DIVIDE_ROWS;
    return tensor->rank == 0 || tensor->bytes == 0 ? DIVIDE_NOT : manner;
}

/* Whether the rank has something of it. */
static bool draw_part(const refit_tensor *tensor, uint32_t rank, uint32_t ranks, uint64_t *seed,
                      division_part *part)
{
    uint64_t cuts[RANKS_MOST + 1], across[RANKS_MOST + 1];
    uint64_t step = refit_dtype_bits(tensor->dtype) < 8 ? 2 : 1;
    division_manner manner = draw_manner(tensor, ranks, seed);
    uint32_t owner = (uint32_t)seeded_below(seed, ranks), row = rank, column = rank;
    if (manner == DIVIDE_NOT) return owner == rank;
    uint32_t count = manner == DIVIDE_GRID ? 2 : ranks;
    draw_cuts(tensor->shape[0], count, step, seed, cuts);
    draw_cuts(tensor->shape[1], count, step, seed, across);
    if (manner == DIVIDE_GRID) {
        row = rank / 2;
        column = rank % 2;
    }
    part->rank = manner == DIVIDE_ROWS ? 1 : 2;
    part->first[0] = manner == DIVIDE_COLUMNS ? 0 : cuts[row];
    part->shape[0] = manner == DIVIDE_COLUMNS ? tensor->shape[0] : cuts[row + 1] - cuts[row];
    part->first[1] = manner == DIVIDE_ROWS ? 0 : across[column];
    part->shape[1] = manner == DIVIDE_ROWS ? tensor->shape[1] : across[column + 1] - across[column];
    return part->shape[0] > 0 && (part->rank == 1 || part->shape[1] > 0);
}

uint32_t division_draw(const chaos_model *model, uint64_t seed, uint32_t rank, uint32_t ranks,
                       division_part parts[MODEL_TENSORS_MOST])
{
    uint32_t count = 0;
    seed |= 1;
    for (uint32_t i = 0; i < model->count; i++) {
        const refit_tensor *tensor = &model->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        parts[count] = (division_part){.tensor = i};
        count += draw_part(tensor, rank, ranks, &seed, &parts[count]);
    }
    return count;
}

/* ---- What a worker takes */

/* Some of `length` elements, in whole steps. */
static void draw_range(uint64_t length, uint64_t step, uint64_t *seed, uint64_t *first,
                       uint64_t *count)
{
    *first = seeded_below(seed, length / step) * step;
    *count = (1 + seeded_below(seed, (length - *first) / step)) * step;
}

/* Whether it takes something of it. */
static bool draw_selected(const refit_tensor *tensor, uint64_t *seed, division_part *part)
{
    uint64_t step = refit_dtype_bits(tensor->dtype) < 8 ? 2 : 1;
    uint64_t manner = seeded_below(seed, 5);
    part->name = tensor->name;
    if (manner < 2 || tensor->rank == 0 || tensor->bytes == 0) return manner != 0;
    part->rank = manner == 2 || tensor->rank < 2 ? 1 : 2;
    draw_range(tensor->shape[0], step, seed, &part->first[0], &part->shape[0]);
    if (part->rank == 1) return true;
    draw_range(tensor->shape[1], step, seed, &part->first[1], &part->shape[1]);
    if (manner == 3) { /* whole columns */
        part->first[0] = 0;
        part->shape[0] = REFIT_TO_THE_END;
    }
    return true;
}

uint32_t division_select(uint64_t seed, division_part parts[MODEL_NAMES_MOST])
{
    uint32_t count = 0;
    refit_tensor tensor;
    seed |= 1;
    for (uint32_t i = 0; model_name(i, &tensor); i++) {
        parts[count] = (division_part){0};
        count += draw_selected(&tensor, &seed, &parts[count]);
    }
    return count;
}

/* ---- Parts */

refit_selection division_selection(const division_part *part, const char *name)
{
    refit_selection one = {.size = sizeof one, .name = name, .rank = part->rank};
    memcpy(one.first, part->first, sizeof part->first);
    memcpy(one.shape, part->shape, sizeof part->shape);
    return one;
}

static uint64_t rows_of(const refit_tensor *tensor, const division_part *part)
{
    return part->shape[0] == REFIT_TO_THE_END ? tensor->shape[0] - part->first[0] : part->shape[0];
}

/* Elements of the tensor in one of its rows, and of the part. */
static uint64_t row_elements(const refit_tensor *tensor)
{
    return tensor->rank < 2 ? 1 : tensor->shape[1];
}

static uint64_t part_elements(const refit_tensor *tensor, const division_part *part)
{
    return part->rank < 2 ? row_elements(tensor) : part->shape[1];
}

uint64_t division_bytes(const refit_tensor *tensor, const division_part *part)
{
    uint64_t bits = refit_dtype_bits(tensor->dtype);
    if (part->rank == 0) return tensor->bytes;
    return rows_of(tensor, part) * part_elements(tensor, part) * bits / 8;
}

void division_gather(const refit_tensor *tensor, const unsigned char *from,
                     const division_part *part, unsigned char *to)
{
    uint64_t bits = refit_dtype_bits(tensor->dtype), row = row_elements(tensor) * bits / 8;
    if (part->rank < 2) {
        memcpy(to, from + part->first[0] * row_elements(tensor) * bits / 8,
               division_bytes(tensor, part));
        return;
    }
    uint64_t width = part->shape[1] * bits / 8, rows = rows_of(tensor, part);
    for (uint64_t i = 0; i < rows; i++)
        memcpy(to + i * width, from + (part->first[0] + i) * row + part->first[1] * bits / 8,
               width);
}

uint64_t division_digest(uint64_t digest, const refit_tensor *tensor, const unsigned char *from,
                         const division_part *part)
{
    static unsigned char gathered[MODEL_TENSOR_BYTES];
    refit_tensor taken = *tensor;
    taken.bytes = division_bytes(tensor, part);
    division_gather(tensor, from, part, gathered);
    return digest_add(digest, &taken, gathered);
}
