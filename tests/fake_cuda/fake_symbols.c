/*
 * The fake driver's one exported symbol of NVIDIA's: everything else is asked for by name and
 * version, by the rules of cuGetProcAddress.
 */
#include <string.h>

#include "fake_state.h"

typedef struct fake_entry {
    const char *name;
    int version;
    void (*function)(void);
} fake_entry;

static const fake_entry entries[] = {
#define FAKE_ENTRY(field, symbol, version, ...) {symbol, version, (void (*)(void))fake_cu_##field},
    FAKE_ALL_SYMBOLS(FAKE_ENTRY)
#undef FAKE_ENTRY
};

const char *fake_symbol_name(fake_symbol symbol)
{
    return entries[symbol].name;
}

/* The newest of the name that is not above the version; *exists: there is one at all. */
static const fake_entry *newest(const char *name, int version, bool *exists)
{
    const fake_entry *best = NULL;
    *exists = false;
    for (unsigned i = 0; i < FAKE_SYMBOLS; i++) {
        const fake_entry *entry = &entries[i];
        if (strcmp(entry->name, name) != 0 || entry->version > fake.version) continue;
        if (fake_script_hides(name, entry->version)) continue;
        *exists = true;
        if (entry->version > version) continue;
        if (best == NULL || entry->version > best->version) best = entry;
    }
    return best;
}

rft_cu_result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                                  int *found);

FAKE_EXPORTED rft_cu_result cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                                uint64_t flags, int *found)
{
    if (symbol == NULL || function == NULL || flags > 2) return RFT_CU_INVALID_VALUE;
    fake_lock();
    rft_cu_result result = version > fake.version ? RFT_CU_INVALID_VALUE : RFT_CU_SUCCESS;
    bool exists = false;
    const fake_entry *entry = result == 0 ? newest(symbol, version, &exists) : NULL;
    fake_unlock();
    /* POSIX lets a function's address travel so; ISO C has no cast for it. */
    if (result == RFT_CU_SUCCESS) *function = NULL;
    if (entry != NULL) memcpy(function, &entry->function, sizeof *function);
    if (found != NULL) {
        *found = RFT_CU_SYMBOL_FOUND;
        if (entry == NULL) *found = exists ? RFT_CU_SYMBOL_TOO_NEW : RFT_CU_SYMBOL_NOT_FOUND;
    }
    return result;
}
