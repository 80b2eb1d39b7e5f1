/*
 * The table of regions: an array in the order they were added, an index of their names and a tree
 * of their addresses, so that adding or binding one costs the logarithm of how many there are.
 * Knows addresses and names; where bytes are and when they move is the offloader's business.
 */
#include "offload/region.h"

#include <string.h>
#include <xxhash.h>

#include "base/alloc.h"
#include "base/checked.h"

/* ---- Names -----------------------------------------------------------------------------------
 * A hash table with open addressing and linear probing, at most half full, grown by doubling. Names
 * are never removed one by one, so there are no tombstones.
 */

#define LEAST_NAMES 16
#define MOST_NAMES  (UINT32_C(1) << 30)

static uint64_t hash_of(const char *name)
{
    return XXH3_64bits(name, strlen(name));
}

/* The slot that holds `name`, or the free one where it belongs. */
static rft_name *slot_of(const rft_name_index *index, const char *name, uint64_t hash)
{
    uint32_t mask = index->room - 1;
    uint32_t at = (uint32_t)hash & mask;
    while (index->slots[at].text != NULL &&
           (index->slots[at].hash != hash || strcmp(index->slots[at].text, name) != 0)) {
        at = (at + 1) & mask;
    }
    return &index->slots[at];
}

refit_status rft_name_index_reserve(rft_name_index *index, uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(count > MOST_NAMES, error, REFIT_ERR_LIMIT,
                  "%u regions are more than the %u "
                  "that one offloader takes: open a second one",
                  count, MOST_NAMES);
    uint32_t room = index->room == 0 ? LEAST_NAMES : index->room;
    while (room < 2 * count) {
        room *= 2;
    }
    if (room == index->room) return REFIT_OK;
    rft_name_index grown = {.room = room};
    grown.slots = rft_calloc(room, sizeof *grown.slots);
    RFT_REFUSE_IF(grown.slots == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the names of %u regions", count);
    for (uint32_t at = 0; at < index->room; at++) {
        rft_name *name = &index->slots[at];
        if (name->text != NULL) *slot_of(&grown, name->text, name->hash) = *name;
    }
    rft_free(index->slots);
    *index = grown;
    return REFIT_OK;
}

void rft_name_index_reset(rft_name_index *index)
{
    if (index->slots != NULL) memset(index->slots, 0, index->room * sizeof *index->slots);
}

void rft_name_index_close(rft_name_index *index)
{
    rft_free(index->slots);
    *index = (rft_name_index){0};
}

bool rft_name_index_has(const rft_name_index *index, const char *name)
{
    return index->room != 0 && slot_of(index, name, hash_of(name))->text != NULL;
}

void rft_name_index_add(rft_name_index *index, const char *name)
{
    uint64_t hash = hash_of(name);
    *slot_of(index, name, hash) = (rft_name){.text = name, .hash = hash};
}

/* ---- Addresses -------------------------------------------------------------------------------
 * A treap: a search tree by address that is also a heap by a hash of the span's number, which keeps
 * it shallow whatever order the addresses come in. Nodes lie in one array, so adding 100,000
 * regions costs a few milliseconds and binding one again allocates nothing.
 */

refit_status rft_span_tree_reserve(rft_span_tree *tree, uint32_t room, refit_error *error)
{
    if (room <= tree->room) return REFIT_OK;
    rft_span *spans = rft_realloc(tree->spans, room, sizeof *spans);
    RFT_REFUSE_IF(spans == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the addresses of %u regions", room);
    for (uint32_t id = tree->room; id < room; id++) {
        spans[id] = (rft_span){.left = RFT_NO_SPAN, .right = RFT_NO_SPAN};
    }
    tree->spans = spans;
    tree->room = room;
    return REFIT_OK;
}

void rft_span_tree_reset(rft_span_tree *tree)
{
    for (uint32_t id = 0; id < tree->room; id++) {
        tree->spans[id].held = false;
    }
    tree->root = RFT_NO_SPAN;
}

void rft_span_tree_close(rft_span_tree *tree)
{
    rft_free(tree->spans);
    *tree = (rft_span_tree){.root = RFT_NO_SPAN};
}

uint32_t rft_span_tree_find(const rft_span_tree *tree, uint64_t begin, uint64_t bytes)
{
    uint64_t end = begin + bytes;
    uint32_t at = tree->root;
    while (at != RFT_NO_SPAN) {
        const rft_span *span = &tree->spans[at];
        if (end <= span->begin) {
            at = span->left;
        } else if (begin >= span->end) {
            at = span->right;
        } else {
            break;
        }
    }
    return at;
}

/* The heap's key: a bijection that scatters neighbouring numbers, so no two are equal. */
static uint32_t rank_of(uint32_t id)
{
    uint32_t x = id;
    x = (x ^ (x >> 16)) * UINT32_C(0x7feb352d);
    x = (x ^ (x >> 15)) * UINT32_C(0x846ca68b);
    return x ^ (x >> 16);
}

/* Parts the tree below `at` into what begins below `begin` and the rest. */
static void split(rft_span *spans, uint32_t at, uint64_t begin, uint32_t *below, uint32_t *rest)
{
    while (at != RFT_NO_SPAN) {
        if (spans[at].begin < begin) {
            *below = at;
            below = &spans[at].right;
            at = spans[at].right;
        } else {
            *rest = at;
            rest = &spans[at].left;
            at = spans[at].left;
        }
    }
    *below = RFT_NO_SPAN;
    *rest = RFT_NO_SPAN;
}

/* Joins two trees at `link`; all of `low` lies below all of `high`. */
static void merge(rft_span *spans, uint32_t *link, uint32_t low, uint32_t high)
{
    while (low != RFT_NO_SPAN && high != RFT_NO_SPAN) {
        if (rank_of(low) > rank_of(high)) {
            *link = low;
            link = &spans[low].right;
            low = spans[low].right;
        } else {
            *link = high;
            link = &spans[high].left;
            high = spans[high].left;
        }
    }
    *link = low != RFT_NO_SPAN ? low : high;
}

void rft_span_tree_insert(rft_span_tree *tree, uint32_t id, uint64_t begin, uint64_t bytes)
{
    rft_span *spans = tree->spans;
    uint32_t *link = &tree->root;
    while (*link != RFT_NO_SPAN && rank_of(*link) > rank_of(id)) {
        link = begin < spans[*link].begin ? &spans[*link].left : &spans[*link].right;
    }
    spans[id] = (rft_span){.begin = begin, .end = begin + bytes, .held = true};
    split(spans, *link, begin, &spans[id].left, &spans[id].right);
    *link = id;
}

void rft_span_tree_remove(rft_span_tree *tree, uint32_t id)
{
    rft_span *spans = tree->spans;
    if (!spans[id].held) return;
    uint32_t *link = &tree->root;
    while (*link != id) {
        link = spans[id].begin < spans[*link].begin ? &spans[*link].left : &spans[*link].right;
    }
    merge(spans, link, spans[id].left, spans[id].right);
    spans[id].held = false;
}

/* ---- The table ---------------------------------------------------------------------------- */

#define LEAST_ROOM 32

void rft_region_table_open(rft_region_table *table, refit_device *device)
{
    *table = (rft_region_table){.device = device};
    rft_span_tree_reset(&table->spans);
}

void rft_region_table_close(rft_region_table *table)
{
    rft_region_table_clear(table);
    rft_name_index_close(&table->names);
    rft_span_tree_close(&table->spans);
    rft_free(table->items);
}

void rft_region_table_clear(rft_region_table *table)
{
    for (uint32_t id = 0; id < table->count; id++) {
        rft_region_detach(table, id);
        rft_free(table->items[id].name);
    }
    rft_name_index_reset(&table->names);
    rft_span_tree_reset(&table->spans);
    table->count = 0;
}

/* As much as the caller has, which may be older or newer: a field that it lacks is zero, which is
 * its default. */
static refit_status take_desc(const refit_region_desc *desc, refit_region_desc *full,
                              refit_error *error)
{
    RFT_REFUSE_IF(desc->size < offsetof(refit_region_desc, policy), error, REFIT_ERR_INVALID,
                  "refit_region_desc.size is %zu: set it to sizeof(refit_region_desc)", desc->size);
    *full = (refit_region_desc){0};
    memcpy(full, desc, rft_min_u64(desc->size, sizeof *full));
    return REFIT_OK;
}

static refit_status check_desc(const refit_region_desc *desc, refit_error *error)
{
    RFT_REFUSE_IF(desc->name == NULL || desc->name[0] == '\0', error, REFIT_ERR_INVALID,
                  "a region has no name: give it one for reports");
    RFT_REFUSE_IF(desc->bytes == 0, error, REFIT_ERR_INVALID,
                  "region %s has no bytes: leave empty storages out", desc->name);
    RFT_REFUSE_IF(desc->policy < REFIT_KEEP || desc->policy > REFIT_ZERO, error, REFIT_ERR_INVALID,
                  "region %s has policy %d: use REFIT_KEEP, REFIT_DISCARD or REFIT_ZERO",
                  desc->name, (int)desc->policy);
    RFT_REFUSE_IF(desc->placement != REFIT_PLACEMENT_DEVICE &&
                      desc->placement != REFIT_PLACEMENT_HOST,
                  error, REFIT_ERR_INVALID,
                  "region %s has placement %d: use REFIT_PLACEMENT_DEVICE or REFIT_PLACEMENT_HOST",
                  desc->name, (int)desc->placement);
    RFT_REFUSE_IF(desc->placement == REFIT_PLACEMENT_HOST &&
                      (desc->memory != NULL || desc->policy != REFIT_KEEP),
                  error, REFIT_ERR_INVALID,
                  "region %s lives on the host: it has no device memory, and policy REFIT_KEEP",
                  desc->name);
    RFT_REFUSE_IF(desc->reuse > 1 ||
                      (desc->reuse == 1 && (desc->policy != REFIT_KEEP || desc->weights != NULL ||
                                            desc->placement != REFIT_PLACEMENT_DEVICE)),
                  error, REFIT_ERR_INVALID,
                  "region %s has reuse %u: it is 0, or 1 for a region of the device with policy "
                  "REFIT_KEEP that holds no masters",
                  desc->name, desc->reuse);
    RFT_REFUSE_IF(desc->group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                  "region %s has group %u: groups are numbered 0 to %d", desc->name, desc->group,
                  REFIT_GROUPS - 1);
    return REFIT_OK;
}

refit_placement rft_region_table_placement(const rft_region_table *table)
{
    return table->count == 0 ? REFIT_PLACEMENT_DEVICE : table->placement;
}

/* Room for one more region in the array, the index and the tree. */
static refit_status reserve_one(rft_region_table *table, refit_error *error)
{
    if (table->count == table->room) {
        uint32_t room = table->room == 0 ? LEAST_ROOM : table->room * 2;
        RFT_TRY(rft_name_index_reserve(&table->names, room, error));
        RFT_TRY(rft_span_tree_reserve(&table->spans, room, error));
        rft_region *items = rft_realloc(table->items, room, sizeof *items);
        RFT_REFUSE_IF(items == NULL, error, REFIT_ERR_HOST_MEMORY,
                      "no host memory for the table of %u regions", room);
        table->items = items;
        table->room = room;
    }
    return REFIT_OK;
}

refit_status rft_region_table_add(rft_region_table *table, const refit_region_desc *given,
                                  refit_region_id *out, refit_error *error)
{
    refit_region_desc full;
    const refit_region_desc *desc = &full;
    RFT_TRY(take_desc(given, &full, error));
    RFT_TRY(check_desc(desc, error));
    RFT_REFUSE_IF(
        table->count > 0 && desc->placement != table->placement, error, REFIT_ERR_INVALID,
        "region %s has another placement than those before it: open an offloader for each",
        desc->name);
    RFT_REFUSE_IF(rft_name_index_has(&table->names, desc->name), error, REFIT_ERR_EXISTS,
                  "there is a region %s already: names are unique in an offloader", desc->name);
    RFT_TRY(reserve_one(table, error));

    uint32_t id = table->count;
    rft_region *region = &table->items[id];
    *region = (rft_region){.bytes = desc->bytes,
                           .group = desc->group,
                           .priority = desc->priority,
                           .policy = desc->policy,
                           .reuse = desc->reuse != 0,
                           .host_bytes = desc->bytes};
    region->name = rft_strdup(desc->name);
    RFT_REFUSE_IF(region->name == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the name of region %s", desc->name);
    bool on_host = desc->placement == REFIT_PLACEMENT_HOST;
    if (on_host) region->place = REFIT_ON_HOST;
    region->rewritten = on_host; /* no digest was taken of it */
    refit_status status = REFIT_OK;
    if (desc->weights != NULL) status = rft_region_set_weights(table, id, desc->weights, error);
    if (status == REFIT_OK && !on_host) status = rft_region_attach(table, id, desc->memory, error);
    if (status != REFIT_OK) {
        rft_free(region->name);
        return status;
    }
    rft_name_index_add(&table->names, region->name);
    table->placement = desc->placement;
    table->count++;
    *out = id;
    return REFIT_OK;
}

static refit_status check_address(const rft_region_table *table, refit_region_id id, void *memory,
                                  refit_error *error)
{
    const rft_region *region = &table->items[id];
    uint64_t begin = (uint64_t)(uintptr_t)memory;
    RFT_REFUSE_IF(memory == NULL, error, REFIT_ERR_INVALID,
                  "region %s has no memory: give its device address", region->name);
    RFT_REFUSE_IF(region->weights != NULL && begin % 4 != 0, error, REFIT_ERR_INVALID,
                  "region %s holds fp32 masters, which do not lie at %p: give an address that is a "
                  "multiple of 4",
                  region->name, memory);
    RFT_REFUSE_IF(!rft_span_exists(memory, region->bytes), error, REFIT_ERR_INVALID,
                  "region %s of %llu bytes at %p goes beyond the last address", region->name,
                  (unsigned long long)region->bytes, memory);
    uint32_t other = rft_span_tree_find(&table->spans, begin, region->bytes);
    RFT_REFUSE_IF(other != RFT_NO_SPAN, error, REFIT_ERR_EXISTS,
                  "region %s overlaps region %s: add each distinct storage once", region->name,
                  table->items[other].name);
    return REFIT_OK;
}

/* The address is free and of this device; if an arena holds it (`*arena`, entered) there is memory
 * after it. */
static refit_status prepare_address(const rft_region_table *table, refit_region_id id, void *memory,
                                    refit_arena **arena, rft_memory_range *allocation,
                                    refit_error *error)
{
    uint64_t bytes = table->items[id].bytes;
    RFT_TRY(check_address(table, id, memory, error));
    RFT_TRY(rft_arena_enter(table->device, memory, bytes, arena, error));
    if (*arena == NULL)
        return rft_device_memory_check(table->device, memory, bytes, allocation, error);
    *allocation = (rft_memory_range){.base = *arena};
    refit_status status = rft_arena_commit(*arena, memory, bytes, error);
    if (status != REFIT_OK) rft_arena_leave(*arena, memory);
    return status;
}

/* Binds the region to the piece that it already has: only makes sure that there is memory. */
static refit_status attach_again(rft_region *region, refit_error *error)
{
    RFT_TRY(rft_arena_commit(region->arena, region->memory, region->bytes, error));
    region->bound = true;
    return REFIT_OK;
}

refit_status rft_region_attach(rft_region_table *table, refit_region_id id, void *memory,
                               refit_error *error)
{
    rft_region *region = &table->items[id];
    if (region->arena != NULL && memory == region->memory) return attach_again(region, error);
    refit_arena *arena = NULL;
    rft_memory_range allocation = {0};
    rft_span_tree_remove(&table->spans, id);
    refit_status status = prepare_address(table, id, memory, &arena, &allocation, error);
    if (status != REFIT_OK) {
        if (region->memory != NULL) {
            rft_span_tree_insert(&table->spans, id, (uint64_t)(uintptr_t)region->memory,
                                 region->bytes);
        }
        return status;
    }
    rft_region_detach(table, id);
    rft_span_tree_insert(&table->spans, id, (uint64_t)(uintptr_t)memory, region->bytes);
    region->memory = memory;
    region->bound = true;
    region->arena = arena;
    region->allocation = allocation.base;
    table->address_changes++;
    return REFIT_OK;
}

refit_status rft_region_set_weights(rft_region_table *table, refit_region_id id,
                                    const uint16_t *weights, refit_error *error)
{
    rft_region *region = &table->items[id];
    uint64_t bytes = region->bytes / 2;
    RFT_REFUSE_IF(region->bytes % 4 != 0, error, REFIT_ERR_INVALID,
                  "region %s has weights, but its %llu bytes are not fp32 masters", region->name,
                  (unsigned long long)region->bytes);
    RFT_REFUSE_IF((uintptr_t)weights % 2 != 0 || !rft_span_exists(weights, bytes), error,
                  REFIT_ERR_INVALID,
                  "the weights of region %s cannot lie at %p: give the device address of %llu bf16 "
                  "numbers",
                  region->name, (const void *)weights, (unsigned long long)(bytes / 2));
    RFT_TRY(rft_device_memory_check(table->device, weights, bytes, NULL, error));
    region->weights = weights;
    return REFIT_OK;
}

void rft_region_detach(rft_region_table *table, refit_region_id id)
{
    rft_region *region = &table->items[id];
    rft_span_tree_remove(&table->spans, id);
    if (region->arena != NULL) rft_arena_leave(region->arena, region->memory);
    region->arena = NULL;
    region->memory = NULL;
    region->bound = false;
    table->address_changes++;
}
