/*
 * Open addressing with linear probing, at most half full, grown by doubling. Names are never
 * removed one by one, so there are no tombstones. Knows nothing about regions.
 */
#include "offload/name_index.h"

#include <string.h>
#include <xxhash.h>

#include "base/alloc.h"

#define LEAST_ROOM 16
#define MOST_NAMES (UINT32_C(1) << 30)

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
    uint32_t room = index->room == 0 ? LEAST_ROOM : index->room;
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
