/* name_index: from a name to its number, for 100,000 of them as for ten. */
#ifndef RFT_NAME_INDEX_H
#define RFT_NAME_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct rft_name {
    const char *text; /* borrowed; NULL: the slot is free */
    uint64_t hash;
} rft_name;

typedef struct rft_name_index {
    rft_name *slots; /* owned; a power of two of them, at most half taken */
    uint32_t room;
} rft_name_index;

/* Room for `count` names; afterwards adding up to so many allocates nothing. */
refit_status rft_name_index_reserve(rft_name_index *index, uint32_t count, refit_error *error);
void rft_name_index_reset(rft_name_index *index);
void rft_name_index_close(rft_name_index *index);

bool rft_name_index_has(const rft_name_index *index, const char *name);

/* `name` is not there yet, there is room, and it stays where it is as long as the index. */
void rft_name_index_add(rft_name_index *index, const char *name);

#endif
