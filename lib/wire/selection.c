/*
 * A box becomes rows: the dimensions from the last one that is cut on to the innermost follow each
 * other, so a row is that much; the rows of the dimension outside of it are one stride apart, as
 * are those of dimensions further out that are whole; what remains outside makes further lists of
 * rows. All are sorted by their place. Where boxes of a tensor meet, all of it is wanted.
 */
#include "wire/selection.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

/* ---- Opening */

static refit_status check(const refit_selection *one, uint32_t index, refit_error *error)
{
    RFT_REFUSE_IF(one->size < sizeof *one || one->name == NULL || one->name[0] == '\0', error,
                  REFIT_ERR_INVALID,
                  "selection %u has no name, or not the size of a refit_selection", index);
    RFT_REFUSE_IF(one->rank > REFIT_RANK_MAX, error, REFIT_ERR_INVALID,
                  "the selection of '%.80s' has %u dimensions", one->name, one->rank);
    for (uint32_t i = 0; i < one->rank; i++)
        RFT_REFUSE_IF(one->shape[i] == 0, error, REFIT_ERR_INVALID,
                      "the selection of '%.80s' is empty", one->name);
    return REFIT_OK;
}

static refit_status copy_list(rft_selection *selection, const refit_selection *list, uint32_t count,
                              refit_error *error)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        RFT_TRY(check(&list[i], i, error));
        bytes += strlen(list[i].name) + 1;
    }
    selection->list = rft_calloc((size_t)count + 1, sizeof *selection->list);
    selection->names = rft_calloc(1, bytes + 1);
    RFT_REFUSE_IF(selection->list == NULL || selection->names == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for a selection of %u tensors", count);
    char *name = selection->names;
    for (uint32_t i = 0; i < count; i++) {
        selection->list[i] = list[i];
        selection->list[i].name = strcpy(name, list[i].name);
        name += strlen(name) + 1;
    }
    selection->count = count;
    return REFIT_OK;
}

refit_status rft_selection_open(const refit_selection *list, uint32_t count, rft_selection **out,
                                refit_error *error)
{
    rft_selection *selection = rft_calloc(1, sizeof *selection);
    RFT_REFUSE_IF(selection == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a selection");
    refit_status status = copy_list(selection, list, count, error);
    if (status != REFIT_OK) {
        rft_selection_close(selection);
        return status;
    }
    *out = selection;
    return REFIT_OK;
}

void rft_selection_close(rft_selection *selection)
{
    if (selection == NULL) return;
    rft_free(selection->list);
    rft_free(selection->names);
    rft_free(selection);
}

/* ---- From boxes to rows */

/* Rows in the order in which they were found. */
typedef struct row_list {
    rft_want_rows *rows; /* owned */
    size_t count;
    size_t room;
} row_list;

static refit_status add(row_list *list, const rft_want_rows *rows, refit_error *error)
{
    if (list->count == list->room) {
        size_t room = list->room * 2 + 64;
        rft_want_rows *grown = rft_realloc(list->rows, room, sizeof *grown);
        RFT_REFUSE_IF(grown == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a selection");
        list->rows = grown;
        list->room = room;
    }
    list->rows[list->count++] = *rows;
    return REFIT_OK;
}

/* The box with all dimensions of the tensor, and their lengths. */
static refit_status fit_box(const rft_manifest_tensor *tensor, const refit_selection *one,
                            refit_selection *box, refit_error *error)
{
    bool within = one->rank <= tensor->rank;
    *box = *one;
    box->rank = tensor->rank;
    for (uint32_t i = 0; within && i < tensor->rank; i++) {
        uint64_t length = tensor->shape[i];
        if (i >= one->rank) box->first[i] = 0;
        within = box->first[i] < length;
        if (within && (i >= one->rank || one->shape[i] == REFIT_TO_THE_END))
            box->shape[i] = length - box->first[i];
        within = within && box->shape[i] <= length - box->first[i];
    }
    RFT_REFUSE_IF(!within, error, REFIT_ERR_INVALID,
                  "the selection of '%.80s' is not within the tensor as the trainer has it",
                  tensor->name);
    return REFIT_OK;
}

/* In bits, of elements that follow each other; widened to whole bytes. */
static rft_want_rows widen(uint32_t tensor, uint64_t first, uint64_t count, uint64_t stride,
                           uint64_t length, uint64_t bits)
{
    bool even = bits % 8 == 0;
    uint64_t begin = first * bits / 8, end = ((first + length) * bits + 7) / 8;
    if (even || count == 1)
        return (rft_want_rows){tensor, begin, count, stride * bits / 8, end - begin};
    end = ((first + (count - 1) * stride + length) * bits + 7) /
          8; /* rows of odd bits: all between */
    return (rft_want_rows){tensor, begin, 1, end - begin, end - begin};
}

/* The dimensions of a box as rows. */
typedef struct box_shape {
    uint32_t cut;                     /* the innermost dimension that is cut; 0 if none is */
    uint32_t outer;                   /* dimensions before it make lists of rows */
    uint64_t strides[REFIT_RANK_MAX]; /* in elements */
} box_shape;

static bool is_cut(const rft_manifest_tensor *tensor, const refit_selection *box, uint32_t i)
{
    return box->shape[i] != tensor->shape[i];
}

static box_shape shape_of(const rft_manifest_tensor *tensor, const refit_selection *box)
{
    box_shape shape = {0};
    uint64_t stride = 1;
    for (uint32_t i = tensor->rank; i-- > 0;) {
        shape.strides[i] = stride;
        stride *= tensor->shape[i];
        if (is_cut(tensor, box, i) && shape.cut == 0) shape.cut = i;
    }
    shape.outer = shape.cut == 0 ? 0 : shape.cut - 1;
    while (shape.outer > 0 && !is_cut(tensor, box, shape.outer))
        shape.outer--; /* whole dimensions go on in one stride */
    return shape;
}

static refit_status add_box(row_list *list, const rft_manifest *manifest, uint32_t index,
                            const refit_selection *one, refit_error *error)
{
    refit_selection fitted;
    const refit_selection *box = &fitted;
    const rft_manifest_tensor *tensor = &manifest->tensors[index];
    uint32_t original = tensor->alias_of == REFIT_NO_ALIAS ? index : tensor->alias_of;
    uint64_t bits = refit_dtype_bits(tensor->dtype), lists = 1;
    if (tensor->bytes == 0) return REFIT_OK;
    if (one->rank == 0) {
        const rft_want_rows all = {original, 0, 1, tensor->bytes, tensor->bytes};
        return add(list, &all, error);
    }
    RFT_TRY(fit_box(tensor, one, &fitted, error));
    box_shape shape = shape_of(tensor, box);
    uint64_t length = box->shape[shape.cut] * shape.strides[shape.cut];
    uint64_t stride = shape.cut == 0 ? length : shape.strides[shape.cut - 1];
    uint64_t count = 1;
    for (uint32_t i = shape.outer; i < shape.cut; i++)
        count *= box->shape[i];
    for (uint32_t i = 0; i < shape.outer; i++)
        lists *= box->shape[i];
    for (uint64_t k = 0; k < lists; k++) {
        uint64_t first = 0, left = k;
        for (uint32_t i = shape.outer; i-- > 0;) {
            first += (box->first[i] + left % box->shape[i]) * shape.strides[i];
            left /= box->shape[i];
        }
        for (uint32_t i = shape.outer; i <= shape.cut; i++)
            first += box->first[i] * shape.strides[i];
        const rft_want_rows rows = widen(original, first, count, stride, length, bits);
        RFT_TRY(add(list, &rows, error));
    }
    return REFIT_OK;
}

/* ---- From names to tensors */

static bool begins(const char *name, const char *pattern)
{
    return strncmp(name, pattern, strlen(pattern) - 1) == 0;
}

static refit_status add_named(row_list *list, const rft_manifest *manifest,
                              const refit_selection *one, bool *found, refit_error *error)
{
    *found = false;
    if (one->name[strlen(one->name) - 1] != '*') {
        uint32_t index = rft_manifest_find(manifest, one->name);
        *found = index != UINT32_MAX;
        return *found ? add_box(list, manifest, index, one, error) : REFIT_OK;
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (!begins(manifest->tensors[i].name, one->name)) continue;
        *found = true;
        RFT_TRY(add_box(list, manifest, i, one, error));
    }
    return REFIT_OK;
}

static int compare(const void *one, const void *other)
{
    const rft_want_rows *a = one, *b = other;
    if (a->tensor != b->tensor) return a->tensor < b->tensor ? -1 : 1;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->count * a->bytes < b->count * b->bytes ? -1
                                                     : a->count * a->bytes > b->count * b->bytes;
}

/* Those of one tensor; all of it where they meet. */
static refit_status append_tensor(const rft_manifest *manifest, const rft_want_rows *rows,
                                  size_t count, rft_bytes *encoded, refit_error *error)
{
    size_t before = encoded->count;
    uint64_t end = 0;
    bool meet = false;
    for (size_t i = 0; i < count && !meet; i++) {
        meet = i > 0 && rows[i].offset < end;
        end = rows[i].offset + (rows[i].count - 1) * rows[i].stride + rows[i].bytes;
    }
    for (size_t i = 0; i < count && !meet; i++)
        RFT_TRY(rft_want_append(encoded, &rows[i], error));
    if (!meet) return REFIT_OK;
    uint64_t bytes = manifest->tensors[rows->tensor].bytes;
    const rft_want_rows all = {rows->tensor, 0, 1, bytes, bytes};
    encoded->count = before;
    return rft_want_append(encoded, &all, error);
}

static refit_status encode(const rft_manifest *manifest, row_list *list, rft_bytes *encoded,
                           refit_error *error)
{
    if (list->count > 0) qsort(list->rows, list->count, sizeof *list->rows, compare);
    for (size_t i = 0, next; i < list->count; i = next) {
        next = i + 1;
        while (next < list->count && list->rows[next].tensor == list->rows[i].tensor)
            next++;
        RFT_TRY(append_tensor(manifest, &list->rows[i], next - i, encoded, error));
    }
    return REFIT_OK;
}

static refit_status add_all(row_list *list, const rft_manifest *manifest, refit_error *error)
{
    const refit_selection all = {.size = sizeof all};
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of == REFIT_NO_ALIAS)
            RFT_TRY(add_box(list, manifest, i, &all, error));
    }
    return REFIT_OK;
}

static refit_status add_selected(row_list *list, const rft_selection *selection,
                                 const rft_manifest *manifest, const char **missing,
                                 refit_error *error)
{
    if (selection->bound && !rft_digest128_equal(&selection->manifest, &manifest->digest))
        return add_all(list, manifest, error);
    for (uint32_t i = 0; i < selection->count; i++) {
        bool found;
        RFT_TRY(add_named(list, manifest, &selection->list[i], &found, error));
        if (!found && *missing == NULL) *missing = selection->list[i].name;
    }
    return REFIT_OK;
}

refit_status rft_selection_resolve(const rft_selection *selection, const rft_manifest *manifest,
                                   rft_want **out, const char **missing, refit_error *error)
{
    row_list list = {0};
    rft_bytes encoded = {0};
    *missing = NULL;
    refit_status status = add_selected(&list, selection, manifest, missing, error);
    if (status == REFIT_OK) status = encode(manifest, &list, &encoded, error);
    if (status == REFIT_OK) status = rft_want_open(manifest, rft_bytes_view(&encoded), out, error);
    rft_bytes_close(&encoded);
    rft_free(list.rows);
    return status;
}
