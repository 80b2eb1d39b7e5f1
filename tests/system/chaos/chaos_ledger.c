/* Plain bookkeeping. */
#include "chaos_ledger.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include <refit/status.h>

static bool complain(char complaint[LEDGER_COMPLAINT], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool complain(char complaint[LEDGER_COMPLAINT], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(complaint, LEDGER_COMPLAINT, format, arguments);
    va_end(arguments);
    return false;
}

ledger_entry *ledger_find(ledger *of, uint64_t number)
{
    for (uint32_t i = of->count; i > 0; i--) {
        if (of->entries[i - 1].number == number) return &of->entries[i - 1];
    }
    return NULL;
}

ledger_entry *ledger_add(ledger *of, uint64_t number, uint32_t trainer)
{
    bool room = of->count < sizeof of->entries / sizeof *of->entries;
    if (!room || ledger_find(of, number) != NULL) return NULL;
    ledger_entry *made = &of->entries[of->count++];
    *made = (ledger_entry){.number = number, .trainer = trainer};
    return made;
}

bool ledger_accepts(ledger *of, uint32_t worker, uint64_t number, uint64_t digest,
                    char complaint[LEDGER_COMPLAINT])
{
    ledger_entry *entry = ledger_find(of, number);
    if (entry == NULL || !entry->written)
        return complain(complaint,
                        "w%" PRIu32 " accepted version %" PRIu64 ", which no trainer wrote", worker,
                        number);
    entry->accepted |= 1u << worker;
    if (entry->fate == ENTRY_ABORTED)
        return complain(complaint, "w%" PRIu32 " accepted version %" PRIu64 ", which was aborted",
                        worker, number);
    uint64_t expected = entry->parts[worker] != 0 ? entry->parts[worker] : entry->digest;
    if (expected != digest)
        return complain(complaint,
                        "w%" PRIu32 " accepted version %" PRIu64 " with the bytes %016" PRIx64
                        " instead of %016" PRIx64,
                        worker, number, digest, expected);
    return true;
}

static bool ends_well(const ledger_result *result, char complaint[LEDGER_COMPLAINT])
{
    if (result->committed != result->number)
        return complain(complaint,
                        "version %" PRIu64 " was committed, but the trainer is at %" PRIu64,
                        result->number, result->committed);
    uint32_t needed = result->quorum != 0 ? result->quorum : result->counted;
    if (!result->late && result->applied < needed)
        return complain(complaint,
                        "version %" PRIu64 " was committed with %" PRIu32 " of %" PRIu32 " workers",
                        result->number, result->applied, needed);
    return true;
}

bool ledger_ends(ledger *of, const ledger_result *result, char complaint[LEDGER_COMPLAINT])
{
    ledger_entry *entry = ledger_find(of, result->number);
    if (entry == NULL) return complain(complaint, "a version ends that never began");
    bool committed = result->committed == result->number;
    entry->fate = committed ? ENTRY_COMMITTED : ENTRY_ABORTED;
    if (!committed && result->committed != result->before)
        return complain(complaint,
                        "version %" PRIu64 " failed, and the trainer went from %" PRIu64
                        " to %" PRIu64,
                        result->number, result->before, result->committed);
    if (!committed && entry->accepted != 0)
        return complain(complaint, "version %" PRIu64 " was aborted, but workers %#x accepted it",
                        result->number, entry->accepted);
    if ((result->names & ~entry->announced) != 0)
        return complain(complaint,
                        "version %" PRIu64 " counts workers %#x, of which only %#x accepted it",
                        result->number, result->names, entry->announced);
    return result->status != REFIT_OK || ends_well(result, complaint);
}
