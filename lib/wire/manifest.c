/*
 * Manifests: a list of tensors, checked, with its layout and its digest.
 *
 *     refit_tensor[] ─┐
 *                     ├─► rft_listed_tensor ─► check, store ─► ties, names ─► partition ─► digest
 *     bytes ──────────┘
 *
 * Both sources are brought to one form and pass the same checks; only the status of a refusal
 * differs. The digest is that of the list as it travels, so both ends hash the same bytes.
 */
#include "wire/manifest.h"

#include <stdlib.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* the state's size, to keep it on the stack */
#include <xxhash.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/digest.h"

/* ---- Element types
 *
 * Names and sizes, from the one list in refit/broadcast.h. refit moves elements and never
 * interprets them, so a type is a name and a number of bits.
 */

const char *refit_dtype_name(refit_dtype dtype)
{
    switch (dtype) {
#define DTYPE_NAME(name, number, bits)                                                             \
    case REFIT_##name: return #name;
        REFIT_DTYPE_MAP(DTYPE_NAME)
#undef DTYPE_NAME
    }
    return NULL;
}

uint32_t refit_dtype_bits(refit_dtype dtype)
{
    switch (dtype) {
#define DTYPE_BITS(name, number, bits)                                                             \
    case REFIT_##name: return (bits);
        REFIT_DTYPE_MAP(DTYPE_BITS)
#undef DTYPE_BITS
    }
    return 0;
}

refit_status refit_dtype_parse(const char *name, refit_dtype *out)
{
    static const refit_dtype dtypes[] = {
#define DTYPE_ENTRY(name, number, bits) REFIT_##name,
        REFIT_DTYPE_MAP(DTYPE_ENTRY)
#undef DTYPE_ENTRY
    };
    if (name == NULL || out == NULL) return REFIT_ERR_INVALID;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(refit_dtype_name(dtypes[i]), name) != 0) continue;
        *out = dtypes[i];
        return REFIT_OK;
    }
    return REFIT_ERR_NOT_FOUND;
}

/* ---- The list of tensors as bytes
 *
 * One map a tensor, by the same tables and loops as messages (fields.h). Counting walks the bytes
 * without unpacking them, so that the caller can reserve exactly what it needs, after the limit has
 * been checked. Only the form is checked here.
 */

/* The map of the MANIFEST message around the list, with room to spare. */
#define MESSAGE_ROOM 256u

#define FIELD(kind, member) .type = RFT_FIELD_##kind, .offset = offsetof(rft_listed_tensor, member)

static const rft_field tensor_fields[] = {
    {"name", FIELD(TEXT, name)},
    {"dtype", FIELD(U32, dtype)},
    {"shape", FIELD(DIMS, shape)},
    {"bytes", FIELD(U64, bytes)},
    {"tied", FIELD(U32, original), .optional = true},
};

static const rft_fields tensor_table = {
    .name = "tensor",
    .count = sizeof tensor_fields / sizeof tensor_fields[0],
    .list = tensor_fields,
};

refit_status rft_tensor_list_append(const rft_listed_tensor *tensor, const rft_limits *limits,
                                    rft_bytes *out, refit_error *error)
{
    uint64_t taken = (uint64_t)out->count + MESSAGE_ROOM;
    uint64_t left = limits->manifest_bytes > taken ? limits->manifest_bytes - taken : 0;
    return rft_fields_encode(&tensor_table, tensor, limits, left, out, error);
}

static rft_view skip(rft_view view, size_t count)
{
    return (rft_view){(const unsigned char *)view.data + count, view.count - count};
}

static refit_status list_count(rft_view encoded, const rft_limits *limits, uint32_t *count,
                               refit_error *error)
{
    rft_walk_limits walk = rft_fields_walk_limits(limits);
    uint32_t found = 0;
    for (rft_view rest = encoded; rest.count > 0; found++) {
        size_t used;
        RFT_REFUSE_IF(found == limits->tensors, error, REFIT_ERR_LIMIT,
                      "the manifest has more tensors than limits.tensors allows: %u",
                      limits->tensors);
        RFT_TRY(rft_validate(rest, &walk, &used, error));
        rest = skip(rest, used);
    }
    *count = found;
    return REFIT_OK;
}

static refit_status list_take(rft_view *rest, const rft_limits *limits, rft_listed_tensor *out,
                              refit_error *error)
{
    rft_map map;
    size_t used;
    RFT_TRY(rft_map_open(*rest, limits, &map, &used, error));
    RFT_TRY(rft_map_read(&map, &tensor_table, limits, out, error));
    *rest = skip(*rest, used);
    return REFIT_OK;
}

/* The limits that a manifest is checked against, and the status of a breach. */
typedef struct manifest_rules {
    uint64_t frame_bytes;
    const rft_limits *limits;
    refit_status refusal; /* REFIT_ERR_INVALID for a caller's list, _PROTOCOL for a peer's */
    refit_error *error;
} manifest_rules;

/* ---- The rules of manifests
 *
 * One function each. They hold for a caller's list and for a peer's alike;
 * the rules' `refusal` is the status of a breach. Sizes above a configured limit are
 * REFIT_ERR_LIMIT on both sides. Names are sorted once, so duplicates are neighbours.
 */

#define SHOWN 80 /* bytes of a name in an error's sentence */

/* False if the number of elements or of bytes overflows. The number of bits may. */
static bool shape_bytes(const rft_dims *shape, uint32_t bits, uint64_t *out)
{
    uint64_t total = 1;
    for (uint32_t i = 0; i < shape->rank; i++) {
        if (shape->at[i] != 0) continue;
        *out = 0;
        return true;
    }
    for (uint32_t i = 0; i < shape->rank; i++) {
        if (!rft_mul_u64(total, shape->at[i], &total)) return false;
    }
    return rft_mul_u64(total / 8, bits, out) && rft_add_u64(*out, (total % 8 * bits + 7) / 8, out);
}

static refit_status check_name(rft_view name, const manifest_rules *rules)
{
    RFT_REFUSE_IF(name.count > rules->limits->name_bytes, rules->error, REFIT_ERR_LIMIT,
                  "a tensor's name has %zu bytes; limits.name_bytes allows %u", name.count,
                  rules->limits->name_bytes);
    RFT_REFUSE_IF(name.count == 0 || !rft_view_is_text(name), rules->error, rules->refusal,
                  "a tensor's name is empty or not UTF-8 without control characters");
    return REFIT_OK;
}

static refit_status check_tensor(const rft_listed_tensor *tensor, const manifest_rules *rules)
{
    RFT_TRY(check_name(tensor->name, rules));
    char name[SHOWN];
    rft_view_print(tensor->name, name, sizeof name);
    uint32_t bits = refit_dtype_bits((refit_dtype)tensor->dtype);
    RFT_REFUSE_IF(bits == 0, rules->error, rules->refusal, "tensor '%s': there is no dtype %u",
                  name, tensor->dtype);
    RFT_REFUSE_IF(tensor->shape.rank > rules->limits->rank, rules->error, REFIT_ERR_LIMIT,
                  "tensor '%s' has %u dimensions; limits.rank allows %u", name, tensor->shape.rank,
                  rules->limits->rank);
    uint64_t bytes;
    RFT_REFUSE_IF(!shape_bytes(&tensor->shape, bits, &bytes), rules->error, rules->refusal,
                  "tensor '%s': its shape has more elements or bytes than 64 bits can count", name);
    RFT_REFUSE_IF(bytes != tensor->bytes, rules->error, rules->refusal,
                  "tensor '%s': its shape and dtype make %llu bytes, not %llu", name,
                  (unsigned long long)bytes, (unsigned long long)tensor->bytes);
    return REFIT_OK;
}

static refit_status check_frame_bytes(const manifest_rules *rules)
{
    RFT_REFUSE_IF(rules->frame_bytes == 0, rules->error, rules->refusal,
                  "frames of 0 bytes carry nothing");
    RFT_REFUSE_IF(rules->frame_bytes > rules->limits->frame_bytes, rules->error, REFIT_ERR_LIMIT,
                  "frames of %llu bytes; limits.frame_bytes allows %llu",
                  (unsigned long long)rules->frame_bytes,
                  (unsigned long long)rules->limits->frame_bytes);
    return REFIT_OK;
}

static refit_status check_tie(const rft_manifest *manifest, uint32_t index,
                              const manifest_rules *rules)
{
    const rft_manifest_tensor *tensor = &manifest->tensors[index];
    if (tensor->alias_of == REFIT_NO_ALIAS) return REFIT_OK;
    RFT_REFUSE_IF(tensor->alias_of >= manifest->count, rules->error, rules->refusal,
                  "tensor '%.*s' is tied to number %u; there are %u", SHOWN, tensor->name,
                  tensor->alias_of, manifest->count);
    RFT_REFUSE_IF(tensor->alias_of == index, rules->error, rules->refusal,
                  "tensor '%.*s' is tied to itself: name the one that it shares bytes with", SHOWN,
                  tensor->name);
    const rft_manifest_tensor *original = &manifest->tensors[tensor->alias_of];
    RFT_REFUSE_IF(original->alias_of != REFIT_NO_ALIAS, rules->error, rules->refusal,
                  "tensor '%.*s' is tied to '%.*s', which is tied itself; name the original", SHOWN,
                  tensor->name, SHOWN, original->name);
    RFT_REFUSE_IF(original->dtype != tensor->dtype || original->bytes != tensor->bytes,
                  rules->error, rules->refusal,
                  "tensor '%.*s' is tied to '%.*s' but differs in dtype or bytes", SHOWN,
                  tensor->name, SHOWN, original->name);
    return REFIT_OK;
}

static refit_status check_ties(const rft_manifest *manifest, const manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->count; i++)
        RFT_TRY(check_tie(manifest, i, rules));
    return REFIT_OK;
}

static int name_compare(const void *a, const void *b)
{
    return strcmp(((const rft_manifest_name *)a)->name, ((const rft_manifest_name *)b)->name);
}

static refit_status check_names(rft_manifest *manifest, const manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->count; i++)
        manifest->index[i] = (rft_manifest_name){manifest->tensors[i].name, i};
    qsort(manifest->index, manifest->count, sizeof *manifest->index, name_compare);
    for (uint32_t i = 1; i < manifest->count; i++) {
        RFT_REFUSE_IF(name_compare(&manifest->index[i - 1], &manifest->index[i]) == 0, rules->error,
                      rules->refusal, "two tensors are named '%.*s'", SHOWN,
                      manifest->index[i].name);
    }
    return REFIT_OK;
}

/* ---- How a version is laid out and partitioned
 *
 * Pure arithmetic: tensors to offsets, tensors to blocks, blocks to frames.
 *
 *     store    [ tensor 0      |pad][ tensor 1 ][ tensor 2            |pad]
 *     blocks   [ 0  ][ 1  ][ 2]     [ 3        ][ 4  ][ 5  ][ 6  ][ 7]
 *     frames   [ 0                            ][ 1                    ]
 *
 * Before memory is reserved, everything is checked against limits.version_bytes, limits.blocks and,
 * where a version is to be held, the memory that the machine has. Both ends compute the same
 * numbers from the same list, so the partition is not sent.
 */

static refit_status refuse_size(const manifest_rules *rules)
{
    RFT_REFUSE_IF(rules->limits->memory_bytes != 0 &&
                      rules->limits->memory_bytes < rules->limits->version_bytes,
                  rules->error, REFIT_ERR_HOST_MEMORY,
                  "the tensors take more memory than this machine has, %llu bytes",
                  (unsigned long long)rules->limits->memory_bytes);
    return rft_fail(rules->error, REFIT_ERR_LIMIT,
                    "the tensors take more than limits.version_bytes allows: %llu",
                    (unsigned long long)rules->limits->version_bytes);
}

static refit_status place_original(rft_manifest *manifest, rft_manifest_tensor *tensor,
                                   const manifest_rules *rules)
{
    uint64_t end, most = rules->limits->version_bytes;
    if (rules->limits->memory_bytes != 0) most = rft_min_u64(most, rules->limits->memory_bytes);
    bool fits = rft_add_u64(manifest->store_bytes, tensor->bytes, &end) &&
                rft_align_u64(end, RFT_TENSOR_ALIGNMENT, &end) && end <= most;
    if (!fits) return refuse_size(rules);
    tensor->offset = manifest->store_bytes;
    tensor->block_bytes = (uint64_t)RFT_BLOCK_ELEMENTS / 8 * refit_dtype_bits(tensor->dtype);
    manifest->store_bytes = end;
    manifest->payload_bytes += tensor->bytes;
    manifest->originals++;
    return REFIT_OK;
}

static refit_status number_blocks(rft_manifest *manifest, rft_manifest_tensor *tensor,
                                  const manifest_rules *rules)
{
    uint64_t whole = tensor->bytes / tensor->block_bytes;
    uint64_t blocks = whole + (tensor->bytes % tensor->block_bytes != 0 ? 1 : 0);
    bool fits = blocks <= rules->limits->blocks - manifest->block_count;
    RFT_REFUSE_IF(!fits && rules->limits->blocks_told, rules->error, rules->refusal,
                  "the tensors make more blocks than the %u that there are", rules->limits->blocks);
    RFT_REFUSE_IF(!fits, rules->error, REFIT_ERR_LIMIT,
                  "the tensors make more blocks than limits.blocks allows: %u",
                  rules->limits->blocks);
    tensor->first_block = manifest->block_count;
    tensor->blocks = (uint32_t)blocks;
    manifest->block_count += tensor->blocks;
    return REFIT_OK;
}

static refit_status place_tensors(rft_manifest *manifest, const manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(place_original(manifest, tensor, rules));
        RFT_TRY(number_blocks(manifest, tensor, rules));
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of == REFIT_NO_ALIAS) continue;
        tensor->offset = manifest->tensors[tensor->alias_of].offset;
        tensor->block_bytes = manifest->tensors[tensor->alias_of].block_bytes;
    }
    manifest->store_bytes = rft_max_u64(manifest->store_bytes, RFT_TENSOR_ALIGNMENT);
    return REFIT_OK;
}

static void cut_tensor(rft_manifest *manifest, uint32_t index)
{
    const rft_manifest_tensor *tensor = &manifest->tensors[index];
    for (uint32_t i = 0; i < tensor->blocks; i++) {
        uint64_t start = i * tensor->block_bytes;
        manifest->blocks[tensor->first_block + i] = (rft_block){
            .tensor = index,
            .offset = tensor->offset + start,
            .bytes = rft_min_u64(tensor->block_bytes, tensor->bytes - start),
            .tensor_offset = start,
        };
    }
}

/* At least one element: a manifest of empty tensors has no blocks and no frames. */
static void *reserve(uint32_t count, size_t bytes)
{
    return rft_calloc(count == 0 ? 1 : count, bytes);
}

static refit_status cut_blocks(rft_manifest *manifest, const manifest_rules *rules)
{
    manifest->blocks = reserve(manifest->block_count, sizeof *manifest->blocks);
    RFT_REFUSE_IF(manifest->blocks == NULL, rules->error, REFIT_ERR_HOST_MEMORY,
                  "no memory for a manifest of %u blocks", manifest->block_count);
    for (uint32_t i = 0; i < manifest->count; i++)
        cut_tensor(manifest, i);
    return REFIT_OK;
}

/* The bytes from block `first` to the end of block `last`, padding between tensors included. */
static uint64_t span_bytes(const rft_manifest *manifest, uint32_t first, uint32_t last)
{
    const rft_block *end = &manifest->blocks[last];
    return end->offset + end->bytes - manifest->blocks[first].offset;
}

static rft_frame_span frame_from(const rft_manifest *manifest, uint32_t first, uint64_t frame_bytes)
{
    uint32_t last = first;
    while (last + 1 < manifest->block_count && last + 1 - first < RFT_FRAME_BLOCKS &&
           span_bytes(manifest, first, last + 1) <= frame_bytes)
        last++;
    return (rft_frame_span){
        .offset = manifest->blocks[first].offset,
        .bytes = span_bytes(manifest, first, last),
        .first_block = first,
        .blocks = last - first + 1,
    };
}

/* Counts the frames, and writes them where there is room for them. */
static uint32_t list_frames(const rft_manifest *manifest, uint64_t frame_bytes,
                            rft_frame_span *frames)
{
    uint32_t count = 0;
    for (uint32_t first = 0; first < manifest->block_count; count++) {
        rft_frame_span frame = frame_from(manifest, first, frame_bytes);
        if (frames != NULL) frames[count] = frame;
        first += frame.blocks;
    }
    return count;
}

static refit_status cut_frames(rft_manifest *manifest, const manifest_rules *rules)
{
    manifest->frame_bytes = rules->frame_bytes;
    manifest->frame_count = list_frames(manifest, rules->frame_bytes, NULL);
    manifest->frames = reserve(manifest->frame_count, sizeof *manifest->frames);
    RFT_REFUSE_IF(manifest->frames == NULL, rules->error, REFIT_ERR_HOST_MEMORY,
                  "no memory for a manifest of %u frames", manifest->frame_count);
    list_frames(manifest, rules->frame_bytes, manifest->frames);
    return REFIT_OK;
}

/* A frame larger than asked for is a single block; it must still be one that the other end takes.
 */
static refit_status check_frames(const rft_manifest *manifest, const manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        RFT_REFUSE_IF(manifest->frames[i].bytes > rules->limits->frame_bytes, rules->error,
                      REFIT_ERR_LIMIT, "a block of %llu bytes; limits.frame_bytes allows %llu",
                      (unsigned long long)manifest->frames[i].bytes,
                      (unsigned long long)rules->limits->frame_bytes);
    }
    return REFIT_OK;
}

static refit_status partition(rft_manifest *manifest, const manifest_rules *rules)
{
    RFT_TRY(place_tensors(manifest, rules));
    RFT_TRY(cut_blocks(manifest, rules));
    RFT_TRY(cut_frames(manifest, rules));
    return check_frames(manifest, rules);
}

/* ---- Digests
 *
 * The digests of 128 bits, of a list of tensors and of a version, and those of tensors as a seal
 * has them, a tensor each. XXH3-128 in its canonical byte order, so that every machine writes the
 * same bytes. The hashing state lives on the stack: nothing here can fail.
 */

static rft_digest128 canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    rft_digest128 digest;
    memcpy(digest.bytes, bytes.digest, sizeof digest.bytes);
    return digest;
}

rft_digest128 rft_digest128_of(rft_view bytes)
{
    return canonical(XXH3_128bits(bytes.data, bytes.count));
}

static void begin_version(XXH3_state_t *state, const rft_manifest *manifest)
{
    XXH3_INITSTATE(state);
    (void)XXH3_128bits_reset(state);
    (void)XXH3_128bits_update(state, manifest->digest.bytes, sizeof manifest->digest.bytes);
}

rft_digest128 rft_version_digest(const rft_manifest *manifest, const uint64_t *tensor_digests)
{
    XXH3_state_t state;
    begin_version(&state, manifest);
    for (uint32_t i = 0; i < manifest->originals; i++) {
        unsigned char bytes[8];
        rft_put_u64(bytes, tensor_digests[i]);
        (void)XXH3_128bits_update(&state, bytes, sizeof bytes);
    }
    return canonical(XXH3_128bits_digest(&state));
}

rft_digest128 rft_version_digest_encoded(const rft_manifest *manifest, rft_view tensor_digests)
{
    XXH3_state_t state;
    begin_version(&state, manifest);
    (void)XXH3_128bits_update(&state, tensor_digests.data, tensor_digests.count);
    return canonical(XXH3_128bits_digest(&state));
}

void rft_digests_by_tensor(const rft_manifest *manifest, const unsigned char *encoded,
                           uint64_t *by_tensor)
{
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        by_tensor[i] = rft_get_u64(encoded);
        encoded += 8;
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        uint32_t original = manifest->tensors[i].alias_of;
        if (original != REFIT_NO_ALIAS) by_tensor[i] = by_tensor[original];
    }
}

bool rft_digest128_equal(const rft_digest128 *a, const rft_digest128 *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* ---- The public functions ---- */

uint64_t refit_tensor_digest(const void *memory, uint64_t bytes)
{
    uint64_t sum = bytes == 0 ? 0 : rft_digest_part(memory, (size_t)bytes, 0);
    return rft_digest_finish(sum, bytes);
}

refit_status refit_version_digest(const refit_tensor *tensors, uint32_t count,
                                  const uint64_t *digests, unsigned char digest[16],
                                  refit_error *error)
{
    refit_config config; /* the partition of a version is not part of its digest */
    refit_config_init(&config, sizeof config);
    const rft_limits limits = rft_limits_from(&config);
    RFT_REFUSE_IF(digests == NULL || digest == NULL, error, REFIT_ERR_INVALID,
                  "refit_version_digest needs `digests` and `digest`");
    rft_manifest *manifest;
    RFT_TRY(
        rft_manifest_open(tensors, count, config.broadcast_frame_bytes, &limits, &manifest, error));
    rft_digest128 result = rft_version_digest(manifest, digests);
    rft_manifest_close(manifest);
    memcpy(digest, result.bytes, sizeof result.bytes);
    return REFIT_OK;
}

/* ---- The manifest */

/* Copies a checked entry; `names` is where its name goes. Returns where the next one goes. */
static char *store_tensor(rft_manifest_tensor *out, const rft_listed_tensor *tensor, char *names)
{
    memcpy(names, tensor->name.data, tensor->name.count);
    names[tensor->name.count] = '\0';
    *out = (rft_manifest_tensor){
        .name = names,
        .dtype = (refit_dtype)tensor->dtype,
        .rank = tensor->shape.rank,
        .bytes = tensor->bytes,
        .alias_of = tensor->original == 0 ? REFIT_NO_ALIAS : tensor->original - 1,
    };
    memcpy(out->shape, tensor->shape.at, tensor->shape.rank * sizeof out->shape[0]);
    return names + tensor->name.count + 1;
}

/* The common last part, once all tensors are stored and `encoded` is there. */
static refit_status finish(rft_manifest *manifest, const manifest_rules *rules)
{
    RFT_TRY(check_ties(manifest, rules));
    RFT_TRY(check_names(manifest, rules));
    RFT_TRY(partition(manifest, rules));
    manifest->digest = rft_digest128_of(rft_bytes_view(&manifest->encoded));
    return REFIT_OK;
}

static refit_status check_count(uint32_t count, const manifest_rules *rules)
{
    RFT_REFUSE_IF(count == 0, rules->error, rules->refusal,
                  "a manifest of no tensors: there must be at least one");
    RFT_REFUSE_IF(count > rules->limits->tensors, rules->error, REFIT_ERR_LIMIT,
                  "%u tensors; limits.tensors allows %u", count, rules->limits->tensors);
    return REFIT_OK;
}

/* `name_bytes`: of all names, their NULs included. */
static refit_status create(uint32_t count, uint64_t name_bytes, const manifest_rules *rules,
                           rft_manifest **out)
{
    rft_manifest *manifest = rft_calloc(1, sizeof *manifest);
    if (manifest != NULL) {
        manifest->count = count;
        manifest->tensors = rft_calloc(count, sizeof *manifest->tensors);
        manifest->index = rft_calloc(count, sizeof *manifest->index);
        manifest->names = rft_calloc(name_bytes, 1);
        if (manifest->tensors != NULL && manifest->index != NULL && manifest->names != NULL) {
            *out = manifest;
            return REFIT_OK;
        }
    }
    rft_manifest_close(manifest);
    return rft_fail(rules->error, REFIT_ERR_HOST_MEMORY, "no memory for a manifest of %u tensors",
                    count);
}

/* ---- From a caller's list ---- */

/* The largest refit_tensor.size that is accepted. */
#define STRUCT_BYTES_MOST 4096u

/* Callers step by the struct's size as they were compiled. */
static const refit_tensor *tensor_at(const refit_tensor *tensors, uint32_t index)
{
    const unsigned char *first = (const unsigned char *)tensors;
    return (const refit_tensor *)(const void *)(first + index * tensors->size);
}

static refit_status check_structs(const refit_tensor *tensors, uint32_t count,
                                  const manifest_rules *rules)
{
    RFT_REFUSE_IF(tensors == NULL && count != 0, rules->error, REFIT_ERR_INVALID,
                  "the list of tensors is NULL");
    RFT_REFUSE_IF(count != 0 && (tensors->size > STRUCT_BYTES_MOST ||
                                 tensors->size % _Alignof(refit_tensor) != 0),
                  rules->error, REFIT_ERR_INVALID,
                  "tensor 0: set its size to sizeof(refit_tensor)");
    for (uint32_t i = 0; i < count; i++) {
        RFT_REFUSE_IF(
            tensors->size < sizeof *tensors || tensor_at(tensors, i)->size != tensors->size,
            rules->error, REFIT_ERR_INVALID, "tensor %u: set its size to sizeof(refit_tensor)", i);
        RFT_REFUSE_IF(tensor_at(tensors, i)->name == NULL, rules->error, REFIT_ERR_INVALID,
                      "tensor %u has no name", i);
        RFT_REFUSE_IF(tensor_at(tensors, i)->rank > REFIT_RANK_MAX, rules->error, REFIT_ERR_INVALID,
                      "tensor %u has %u dimensions; at most %d are possible", i,
                      tensor_at(tensors, i)->rank, REFIT_RANK_MAX);
    }
    return REFIT_OK;
}

static uint64_t sum_names(const refit_tensor *tensors, uint32_t count)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += strlen(tensor_at(tensors, i)->name) + 1;
    return sum;
}

static rft_listed_tensor list_tensor(const refit_tensor *tensor)
{
    rft_listed_tensor listed = {
        .name = rft_view_text(tensor->name),
        .dtype = (uint32_t)tensor->dtype,
        .original = tensor->alias_of == REFIT_NO_ALIAS ? 0 : tensor->alias_of + 1,
        .shape.rank = tensor->rank,
        .bytes = tensor->bytes,
    };
    memcpy(listed.shape.at, tensor->shape, tensor->rank * sizeof tensor->shape[0]);
    return listed;
}

static refit_status fill_from_list(rft_manifest *manifest, const refit_tensor *tensors,
                                   const manifest_rules *rules)
{
    char *names = manifest->names;
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_listed_tensor listed = list_tensor(tensor_at(tensors, i));
        RFT_TRY(check_tensor(&listed, rules));
        RFT_TRY(rft_tensor_list_append(&listed, rules->limits, &manifest->encoded, rules->error));
        names = store_tensor(&manifest->tensors[i], &listed, names);
    }
    return finish(manifest, rules);
}

refit_status rft_manifest_open(const refit_tensor *tensors, uint32_t count, uint64_t frame_bytes,
                               const rft_limits *limits, rft_manifest **out, refit_error *error)
{
    const manifest_rules rules = {frame_bytes, limits, REFIT_ERR_INVALID, error};
    RFT_TRY(check_frame_bytes(&rules));
    RFT_TRY(check_count(count, &rules));
    RFT_TRY(check_structs(tensors, count, &rules));
    rft_manifest *manifest;
    RFT_TRY(create(count, sum_names(tensors, count), &rules, &manifest));
    refit_status status = fill_from_list(manifest, tensors, &rules);
    if (status == REFIT_OK)
        *out = manifest;
    else
        rft_manifest_close(manifest);
    return status;
}

/* ---- From the wire ---- */

static refit_status fill_from_bytes(rft_manifest *manifest, rft_view encoded,
                                    const manifest_rules *rules)
{
    char *names = manifest->names;
    rft_view rest = encoded;
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_listed_tensor listed;
        RFT_TRY(list_take(&rest, rules->limits, &listed, rules->error));
        RFT_TRY(check_tensor(&listed, rules));
        names = store_tensor(&manifest->tensors[i], &listed, names);
    }
    RFT_TRY(rft_bytes_append(&manifest->encoded, encoded.data, encoded.count, rules->error));
    return finish(manifest, rules);
}

refit_status rft_manifest_decode(rft_view encoded, uint64_t frame_bytes, const rft_limits *limits,
                                 rft_manifest **out, refit_error *error)
{
    const manifest_rules rules = {frame_bytes, limits, REFIT_ERR_PROTOCOL, error};
    RFT_TRY(check_frame_bytes(&rules));
    RFT_REFUSE_IF(encoded.count > limits->manifest_bytes, error, REFIT_ERR_LIMIT,
                  "a manifest of %zu bytes; limits.manifest_bytes allows %llu", encoded.count,
                  (unsigned long long)limits->manifest_bytes);
    uint32_t count = 0;
    RFT_TRY(list_count(encoded, limits, &count, error));
    RFT_TRY(check_count(count, &rules));
    rft_manifest *manifest;
    /* A name's entry is longer than the name and a NUL, so all names fit. */
    RFT_TRY(create(count, encoded.count, &rules, &manifest));
    refit_status status = fill_from_bytes(manifest, encoded, &rules);
    if (status == REFIT_OK)
        *out = manifest;
    else
        rft_manifest_close(manifest);
    return status;
}

void rft_manifest_close(rft_manifest *manifest)
{
    if (manifest == NULL) return;
    rft_free(manifest->tensors);
    rft_free(manifest->index);
    rft_free(manifest->names);
    rft_free(manifest->blocks);
    rft_free(manifest->frames);
    rft_bytes_close(&manifest->encoded);
    rft_free(manifest);
}

/* ---- What it tells ---- */

void rft_manifest_describe(const rft_manifest *manifest, uint32_t tensor, refit_tensor *out)
{
    const rft_manifest_tensor *from = &manifest->tensors[tensor];
    *out = (refit_tensor){
        .size = sizeof *out,
        .name = from->name,
        .dtype = from->dtype,
        .rank = from->rank,
        .bytes = from->bytes,
        .alias_of = from->alias_of,
    };
    memcpy(out->shape, from->shape, sizeof out->shape);
}

uint32_t rft_manifest_find(const rft_manifest *manifest, const char *name)
{
    const rft_manifest_name wanted = {name, 0};
    const rft_manifest_name *found =
        bsearch(&wanted, manifest->index, manifest->count, sizeof *manifest->index, name_compare);
    return found == NULL ? UINT32_MAX : found->tensor;
}
