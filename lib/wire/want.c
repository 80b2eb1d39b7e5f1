/*
 * Rows and blocks are both ranges of a tensor's bytes; what they have in common is walked run by
 * run, from the first row that reaches into the block.
 */
#include "wire/want.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

/* ---- The list as it travels */

static void write_rows(const rft_want_rows *rows, unsigned char entry[RFT_WANT_ENTRY_BYTES])
{
    rft_put_u32(entry, rows->tensor);
    rft_put_u64(entry + 4, rows->offset);
    rft_put_u64(entry + 12, rows->count);
    rft_put_u64(entry + 20, rows->stride);
    rft_put_u64(entry + 28, rows->bytes);
}

static rft_want_rows read_rows(const unsigned char *entry)
{
    return (rft_want_rows){rft_get_u32(entry), rft_get_u64(entry + 4), rft_get_u64(entry + 12),
                           rft_get_u64(entry + 20), rft_get_u64(entry + 28)};
}

/* Where rows end. False: there are none, they meet, or no tensor is so long. */
static bool find_end(const rft_want_rows *rows, uint64_t *end)
{
    uint64_t last;
    bool formed = rows->count > 0 && rows->bytes > 0 &&
                  (rows->count == 1 ? rows->stride == rows->bytes : rows->stride > rows->bytes);
    return formed && rft_mul_u64(rows->count - 1, rows->stride, &last) &&
           rft_add_u64(last, rows->offset, &last) && rft_add_u64(last, rows->bytes, end);
}

refit_status rft_want_append(rft_bytes *encoded, const rft_want_rows *rows, refit_error *error)
{
    unsigned char entry[RFT_WANT_ENTRY_BYTES];
    rft_want_rows added = *rows;
    uint64_t end = 0, before;
    if (added.count > 1 && added.stride == added.bytes)
        added = (rft_want_rows){rows->tensor, rows->offset, 1, rows->count * rows->bytes,
                                rows->count * rows->bytes};
    if (added.count == 1) added.stride = added.bytes;
    bool first = encoded->count == 0;
    unsigned char *last = first ? NULL : encoded->data + encoded->count - RFT_WANT_ENTRY_BYTES;
    rft_want_rows known = first ? (rft_want_rows){0} : read_rows(last);
    bool ordered =
        find_end(&added, &end) &&
        (first || known.tensor < added.tensor ||
         (known.tensor == added.tensor && find_end(&known, &before) && before <= added.offset));
    RFT_REFUSE_IF(!ordered, error, REFIT_ERR_INVALID,
                  "rows of tensor %u are empty, meet, or are not in order", rows->tensor);
    bool touch = !first && known.tensor == added.tensor && known.count == 1 && added.count == 1 &&
                 known.offset + known.bytes == added.offset;
    if (touch) {
        known.bytes += added.bytes;
        known.stride = known.bytes;
        write_rows(&known, last);
        return REFIT_OK;
    }
    write_rows(&added, entry);
    return rft_bytes_append(encoded, entry, sizeof entry, error);
}

bool rft_want_slice_next(const rft_want *want, const rft_limits *limits, rft_want_slice *slice)
{
    if (slice->begun && !slice->more) return false;
    uint32_t left = want->row_count - slice->next;
    uint32_t most = rft_message_entries(limits, RFT_WANT_ENTRY_BYTES);
    uint32_t count = left < most ? left : most;
    size_t at = (size_t)slice->next * RFT_WANT_ENTRY_BYTES;
    slice->begun = true;
    slice->from = slice->next;
    slice->rows = (rft_view){0};
    if (count > 0)
        slice->rows = (rft_view){want->encoded.data + at, (size_t)count * RFT_WANT_ENTRY_BYTES};
    slice->next += count;
    slice->more = slice->next < want->row_count;
    return true;
}

refit_status rft_want_slice_add(rft_bytes *list, const rft_want_slice *slice,
                                const rft_limits *limits, bool *whole, refit_error *error)
{
    *whole = false;
    if (slice->from == 0) rft_bytes_reset(list);
    if (list->count != (size_t)slice->from * RFT_WANT_ENTRY_BYTES) return REFIT_OK;
    RFT_REFUSE_IF(list->count + slice->rows.count > limits->manifest_bytes, error, REFIT_ERR_LIMIT,
                  "a list of rows is longer than limits.manifest_bytes allows");
    RFT_TRY(rft_bytes_append(list, slice->rows.data, slice->rows.count, error));
    *whole = !slice->more;
    return REFIT_OK;
}

/* ---- Opening */

static refit_status check_rows(const rft_manifest *manifest, const rft_want_rows *rows,
                               const rft_want_rows *before, refit_error *error)
{
    uint64_t end = 0, begin = 0;
    bool known = rows->tensor < manifest->count &&
                 manifest->tensors[rows->tensor].alias_of == REFIT_NO_ALIAS;
    bool within = known && find_end(rows, &end) && end <= manifest->tensors[rows->tensor].bytes;
    bool ordered =
        before == NULL || before->tensor < rows->tensor ||
        (before->tensor == rows->tensor && find_end(before, &begin) && begin <= rows->offset);
    bool apart = before == NULL || before->tensor != rows->tensor || before->count > 1 ||
                 rows->count > 1 || begin < rows->offset;
    RFT_REFUSE_IF(!within || !ordered || !apart, error, REFIT_ERR_PROTOCOL,
                  "a list of wanted bytes is not in order, or not of this version");
    return REFIT_OK;
}

static rft_want_part part_of(uint64_t wanted, uint64_t bytes)
{
    if (wanted == 0) return bytes == 0 ? RFT_WANT_ALL : RFT_WANT_NONE;
    return wanted == bytes ? RFT_WANT_ALL : RFT_WANT_SOME;
}

static void note_frames(rft_want *want)
{
    const rft_manifest *manifest = want->manifest;
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        const rft_frame_span *span = &manifest->frames[i];
        uint64_t wanted = 0, bytes = 0;
        for (uint32_t k = 0; k < span->blocks; k++) {
            const rft_block *block = &manifest->blocks[span->first_block + k];
            wanted += rft_want_block(want, block);
            bytes += block->bytes;
        }
        want->frames[i] = (unsigned char)part_of(wanted, bytes);
    }
}

static refit_status read_all(rft_want *want, rft_view encoded, refit_error *error)
{
    const rft_manifest *manifest = want->manifest;
    const unsigned char *entry = encoded.data;
    uint32_t tensor = 0;
    for (uint32_t i = 0; i < want->row_count; i++) {
        rft_want_rows *rows = &want->rows[i];
        *rows = read_rows(entry + (size_t)i * RFT_WANT_ENTRY_BYTES);
        RFT_TRY(check_rows(manifest, rows, i == 0 ? NULL : rows - 1, error));
        while (tensor <= rows->tensor)
            want->first[tensor++] = i;
        want->bytes += rows->count * rows->bytes;
    }
    while (tensor <= manifest->count)
        want->first[tensor++] = want->row_count;
    note_frames(want);
    return REFIT_OK;
}

refit_status rft_want_open(const rft_manifest *manifest, rft_view encoded, rft_want **out,
                           refit_error *error)
{
    uint64_t rows = encoded.count / RFT_WANT_ENTRY_BYTES;
    RFT_REFUSE_IF(encoded.count % RFT_WANT_ENTRY_BYTES != 0 || rows > UINT32_MAX, error,
                  REFIT_ERR_PROTOCOL, "a list of wanted bytes has %zu bytes", encoded.count);
    rft_want *want = rft_calloc(1, sizeof *want);
    RFT_REFUSE_IF(want == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for what a worker wants");
    *want = (rft_want){.manifest = manifest, .row_count = (uint32_t)rows};
    atomic_init(&want->users, 1);
    want->rows = rft_calloc((size_t)rows + 1, sizeof *want->rows);
    want->first = rft_calloc((size_t)manifest->count + 2, sizeof *want->first);
    want->frames = rft_calloc((size_t)manifest->frame_count + 1, sizeof *want->frames);
    bool room = want->rows != NULL && want->first != NULL && want->frames != NULL;
    refit_status status =
        room ? rft_bytes_append(&want->encoded, encoded.data, encoded.count, error)
             : rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for what a worker wants");
    if (status == REFIT_OK) status = read_all(want, encoded, error);
    if (status != REFIT_OK) {
        rft_want_release(want);
        return status;
    }
    want->digest = rft_digest128_of(encoded);
    *out = want;
    return REFIT_OK;
}

rft_want *rft_want_acquire(rft_want *want)
{
    if (want != NULL) atomic_fetch_add(&want->users, 1);
    return want;
}

void rft_want_release(rft_want *want)
{
    if (want == NULL || atomic_fetch_sub(&want->users, 1) > 1) return;
    rft_bytes_close(&want->encoded);
    rft_free(want->rows);
    rft_free(want->first);
    rft_free(want->frames);
    rft_free(want);
}

bool rft_want_is_last(const rft_want *want)
{
    return atomic_load(&want->users) == 1;
}

/* ---- Two together */

bool rft_want_equal(const rft_want *one, const rft_want *other)
{
    if (one == NULL || other == NULL) return one == other;
    return rft_digest128_equal(&one->digest, &other->digest);
}

static bool same_rows(const rft_want *one, const rft_want *other, uint32_t tensor)
{
    uint32_t count = one->first[tensor + 1] - one->first[tensor];
    if (other->first[tensor + 1] - other->first[tensor] != count) return false;
    for (uint32_t i = 0; i < count; i++) {
        const rft_want_rows *a = &one->rows[one->first[tensor] + i];
        const rft_want_rows *b = &other->rows[other->first[tensor] + i];
        bool same = a->offset == b->offset && a->count == b->count && a->stride == b->stride &&
                    a->bytes == b->bytes;
        if (!same) return false;
    }
    return true;
}

static refit_status append_all(const rft_want *want, uint32_t tensor, rft_bytes *encoded,
                               refit_error *error)
{
    for (uint32_t i = want->first[tensor]; i < want->first[tensor + 1]; i++)
        RFT_TRY(rft_want_append(encoded, &want->rows[i], error));
    return REFIT_OK;
}

static uint64_t end_of(const rft_want_rows *rows)
{
    return rows->offset + (rows->count - 1) * rows->stride + rows->bytes;
}

/* Rows that have both, and what is between them in each row. False: they are not alike. */
static bool join(const rft_want_rows *a, const rft_want_rows *b, rft_want_rows *out)
{
    if (a->count != b->count || (a->count > 1 && a->stride != b->stride)) return false;
    uint64_t begin = rft_min_u64(a->offset, b->offset);
    uint64_t a_end = a->offset + a->bytes, b_end = b->offset + b->bytes;
    uint64_t bytes = (a_end > b_end ? a_end : b_end) - begin;
    if (a->count > 1 && bytes > a->stride) return false;
    *out = (rft_want_rows){a->tensor, begin, a->count, a->stride, bytes};
    if (a->count == 1 || bytes == a->stride) { /* one after the other */
        out->bytes = end_of(out) - begin;
        out->count = 1;
        out->stride = out->bytes;
    }
    return true;
}

/* Rows of a tensor that have what both want of it, as the ranks of an engine: each has rows or
 * columns next to those of another. All of it where they are not alike. */
static refit_status append_joined(const rft_want *one, const rft_want *other, uint32_t tensor,
                                  rft_bytes *encoded, refit_error *error)
{
    uint32_t count = one->first[tensor + 1] - one->first[tensor];
    size_t before = encoded->count;
    uint64_t end = 0, bytes = one->manifest->tensors[tensor].bytes;
    const rft_want_rows whole = {tensor, 0, 1, bytes, bytes};
    rft_want_rows rows;
    bool alike = other->first[tensor + 1] - other->first[tensor] == count;
    for (uint32_t i = 0; alike && i < count; i++) {
        alike = join(&one->rows[one->first[tensor] + i], &other->rows[other->first[tensor] + i],
                     &rows) &&
                rows.offset >= end;
        if (!alike) break;
        end = end_of(&rows);
        RFT_TRY(rft_want_append(encoded, &rows, error));
    }
    if (alike) return REFIT_OK;
    encoded->count = before;
    return rft_want_append(encoded, &whole, error);
}

refit_status rft_want_merge(const rft_want *one, const rft_want *other, rft_bytes *encoded,
                            refit_error *error)
{
    const rft_manifest *manifest = one->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        bool first = one->first[i] < one->first[i + 1],
             second = other->first[i] < other->first[i + 1];
        if (first && second && !same_rows(one, other, i)) {
            RFT_TRY(append_joined(one, other, i, encoded, error));
        } else {
            RFT_TRY(append_all(first ? one : other, i, encoded, error));
        }
    }
    return REFIT_OK;
}

/* ---- What is wanted */

/* The last rows of a tensor that begin at `offset` or before; its first if none do. */
static uint32_t find_rows(const rft_want *want, uint32_t tensor, uint64_t offset)
{
    uint32_t low = want->first[tensor], high = want->first[tensor + 1];
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (want->rows[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

rft_want_walk rft_want_walk_begin(const rft_want *want, uint32_t tensor, uint64_t begin,
                                  uint64_t end)
{
    return (rft_want_walk){want->rows + find_rows(want, tensor, begin),
                           want->rows + want->first[tensor + 1], 0, begin, end};
}

/* The first row of `rows` that ends after `begin`. */
static uint64_t first_row(const rft_want_rows *rows, uint64_t begin)
{
    if (begin <= rows->offset) return 0;
    return (begin - rows->offset) / rows->stride;
}

bool rft_want_walk_next(rft_want_walk *walk, uint64_t *offset, uint64_t *bytes)
{
    for (; walk->rows < walk->last; walk->rows++, walk->row = 0) {
        const rft_want_rows *rows = walk->rows;
        if (walk->row == 0) walk->row = first_row(rows, walk->begin);
        while (walk->row < rows->count) {
            uint64_t begin = rows->offset + walk->row * rows->stride, end = begin + rows->bytes;
            if (begin >= walk->end) return false;
            walk->row++;
            if (begin < walk->begin) begin = walk->begin;
            if (end > walk->end) end = walk->end;
            if (begin >= end) continue;
            *offset = begin;
            *bytes = end - begin;
            return true;
        }
    }
    return false;
}

rft_want_part rft_want_frame(const rft_want *want, uint32_t sequence)
{
    return want == NULL ? RFT_WANT_ALL : (rft_want_part)want->frames[sequence];
}

static uint64_t count_range(const rft_want *want, uint32_t tensor, uint64_t begin, uint64_t end)
{
    uint64_t offset, bytes, sum = 0;
    rft_want_walk walk = rft_want_walk_begin(want, tensor, begin, end);
    while (rft_want_walk_next(&walk, &offset, &bytes))
        sum += bytes;
    return sum;
}

rft_want_part rft_want_tensor(const rft_want *want, uint32_t tensor)
{
    if (want == NULL) return RFT_WANT_ALL;
    const rft_manifest_tensor *tensors = want->manifest->tensors;
    if (tensors[tensor].alias_of != REFIT_NO_ALIAS) tensor = tensors[tensor].alias_of;
    uint64_t sum = 0;
    for (uint32_t i = want->first[tensor]; i < want->first[tensor + 1]; i++)
        sum += want->rows[i].count * want->rows[i].bytes;
    return part_of(sum, tensors[tensor].bytes);
}

bool rft_want_covers(const rft_want *want, uint32_t tensor, uint64_t offset, uint64_t bytes)
{
    if (want == NULL) return true;
    const rft_manifest_tensor *tensors = want->manifest->tensors;
    if (tensors[tensor].alias_of != REFIT_NO_ALIAS) tensor = tensors[tensor].alias_of;
    return count_range(want, tensor, offset, offset + bytes) == bytes;
}

static bool has_rows(const rft_want *want, const rft_want_rows *rows)
{
    if (want->first[rows->tensor] == want->first[rows->tensor + 1]) return false;
    const rft_want_rows *own = &want->rows[find_rows(want, rows->tensor, rows->offset)];
    bool within =
        own->count == 1 && own->offset <= rows->offset && end_of(rows) <= own->offset + own->bytes;
    bool wider = own->count == rows->count && own->stride == rows->stride &&
                 own->offset <= rows->offset &&
                 rows->offset + rows->bytes <= own->offset + own->bytes;
    return within || wider;
}

bool rft_want_includes(const rft_want *want, const rft_want *other)
{
    if (want == NULL || rft_want_equal(want, other)) return true;
    for (uint32_t i = 0; other != NULL && i < other->row_count; i++) {
        if (!has_rows(want, &other->rows[i])) return false;
    }
    return other != NULL;
}

/* ---- In both
 *
 * Runs are put back into rows, so that columns of a matrix stay one entry.
 */

typedef struct row_list {
    rft_bytes *encoded;
    rft_want_rows rows; /* not appended yet; count 0: none */
} row_list;

static refit_status flush_rows(row_list *list, refit_error *error)
{
    if (list->rows.count == 0) return REFIT_OK;
    RFT_TRY(rft_want_append(list->encoded, &list->rows, error));
    list->rows.count = 0;
    return REFIT_OK;
}

static refit_status add_run(row_list *list, uint32_t tensor, uint64_t offset, uint64_t bytes,
                            refit_error *error)
{
    rft_want_rows *rows = &list->rows;
    uint64_t last = rows->count == 0 ? 0 : rows->offset + (rows->count - 1) * rows->stride;
    bool alike = rows->count > 0 && rows->bytes == bytes && offset > last + bytes;
    if (alike && (rows->count == 1 || offset - last == rows->stride)) {
        rows->stride = offset - last;
        rows->count++;
        return REFIT_OK;
    }
    RFT_TRY(flush_rows(list, error));
    *rows = (rft_want_rows){tensor, offset, 1, bytes, bytes};
    return REFIT_OK;
}

/* A run of one want ends within one of the other, or the other way round: the walks take turns. */
static refit_status intersect_tensor(const rft_want *one, const rft_want *other, uint32_t tensor,
                                     rft_bytes *encoded, refit_error *error)
{
    row_list list = {.encoded = encoded};
    rft_want_walk walks[2] = {rft_want_walk_begin(one, tensor, 0, UINT64_MAX),
                              rft_want_walk_begin(other, tensor, 0, UINT64_MAX)};
    uint64_t begin[2], bytes[2];
    bool more = rft_want_walk_next(&walks[0], &begin[0], &bytes[0]) &&
                rft_want_walk_next(&walks[1], &begin[1], &bytes[1]);
    while (more) {
        uint64_t end[2] = {begin[0] + bytes[0], begin[1] + bytes[1]};
        uint64_t first = begin[0] > begin[1] ? begin[0] : begin[1];
        uint32_t shorter = end[0] <= end[1] ? 0 : 1;
        if (first < end[shorter])
            RFT_TRY(add_run(&list, tensor, first, end[shorter] - first, error));
        more = rft_want_walk_next(&walks[shorter], &begin[shorter], &bytes[shorter]);
    }
    return flush_rows(&list, error);
}

refit_status rft_want_intersect(const rft_want *one, const rft_want *other, rft_bytes *encoded,
                                refit_error *error)
{
    const rft_want *known = one == NULL ? other : one;
    for (uint32_t i = 0; i < known->manifest->count; i++) {
        bool equal = one == NULL || other == NULL || same_rows(one, other, i);
        RFT_TRY(equal ? append_all(known, i, encoded, error)
                      : intersect_tensor(one, other, i, encoded, error));
    }
    return REFIT_OK;
}

uint64_t rft_want_block(const rft_want *want, const rft_block *block)
{
    if (want == NULL) return block->bytes;
    return count_range(want, block->tensor, block->tensor_offset,
                       block->tensor_offset + block->bytes);
}

/* The runs of a block, each copied; one side goes on by the bytes copied, the other one by the
 * place in the tensor. */
static void copy_runs(const rft_want *want, const rft_block *block, const unsigned char *from,
                      bool from_gathered, unsigned char *to, bool to_gathered)
{
    uint64_t offset, bytes, done = 0, begin = block->tensor_offset;
    rft_want_walk walk = rft_want_walk_begin(want, block->tensor, begin, begin + block->bytes);
    while (rft_want_walk_next(&walk, &offset, &bytes)) {
        uint64_t place = block->offset + (offset - begin);
        memcpy(to + (to_gathered ? done : place), from + (from_gathered ? done : place), bytes);
        done += bytes;
    }
}

void rft_want_gather(const rft_want *want, const rft_block *block, const unsigned char *image,
                     unsigned char *out)
{
    copy_runs(want, block, image, false, out, true);
}

void rft_want_scatter(const rft_want *want, const rft_block *block, const unsigned char *from,
                      unsigned char *image)
{
    copy_runs(want, block, from, true, image, false);
}

void rft_want_copy(const rft_want *want, const rft_block *block, const unsigned char *from,
                   unsigned char *image)
{
    copy_runs(want, block, from, false, image, false);
}
