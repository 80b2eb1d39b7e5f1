/*
 * Names of files in folders that others write to, an allow list's and an archive's: a byte that
 * says which is meant, then a name; or, of an archive, the numbers that a name is made of. A name
 * that is taken leads nowhere else and is the only one of what it stands for.
 */
#include "archive/archive_folder.h"
#include "fuzz.h"
#include "trust/key.h"
#include "wire/bytes.h"

#define NUMBERS 20u
enum { KEY, ENTRY, MADE, KINDS };

static void check_key(const char *name)
{
    if (!rft_key_name_is_valid(name)) return;
    size_t length = strlen(name);
    FUZZ_REQUIRE(length > 0 && length < RFT_KEY_NAME_BYTES);
    FUZZ_REQUIRE(strchr(name, '/') == NULL && name[0] != '.' && name[0] != '-');
    for (size_t i = 0; i < length; i++)
        FUZZ_REQUIRE(name[i] > ' ' && name[i] <= '~');
}

static void check_entry(const char *name)
{
    char again[RFT_ARCHIVE_NAME];
    rft_archive_entry entry;
    if (!rft_archive_entry_parse(name, &entry)) return;
    rft_archive_entry_name(&entry, again);
    FUZZ_REQUIRE(strcmp(name, again) == 0);
    FUZZ_REQUIRE(entry.run != 0 && entry.version != 0 && entry.epoch != 0);
    fuzz_taken++;
}

static void check_made(const uint8_t *data)
{
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry read, entry = {.run = rft_get_u32(data),
                                     .version = rft_get_u64(data + 4),
                                     .epoch = rft_get_u64(data + 12)};
    rft_archive_entry_name(&entry, name);
    bool whole = entry.run != 0 && entry.version != 0 && entry.epoch != 0;
    FUZZ_REQUIRE(rft_archive_entry_parse(name, &read) == whole);
    FUZZ_REQUIRE(!whole || (read.run == entry.run && read.version == entry.version &&
                            read.epoch == entry.epoch));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fuzz_room room;
    if (size == 0) return 0;
    unsigned kind = data[0] % KINDS;
    if (kind == MADE) {
        if (size > NUMBERS) check_made(data + 1);
        return 0;
    }
    char *name = (char *)fuzz_room_take(&room, NULL, size);
    memcpy(name, data + 1, size - 1);
    name[size - 1] = '\0';
    if (kind == KEY)
        check_key(name);
    else
        check_entry(name);
    return 0;
}
