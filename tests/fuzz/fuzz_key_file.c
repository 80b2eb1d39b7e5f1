/*
 * Any bytes as a key file: a byte that says which half is wanted and the file's mode, then the
 * text. A key that is taken stands in the text as it prints, and only a file that is closed to
 * others gives one; the first forty characters are also read as a key without a file.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"
#include "trust/key.h"

#define IS_SECRET 1u
#define TEXT_MOST 2048u /* what is longer than a key file may be is refused all the same */

/* By the bits above: closed, and what lets others read or write. */
static const mode_t modes[] = {0600, 0600, 0644, 0640, 0620, 0602, 0666, 0400};

static void check_characters(const char *text, size_t count)
{
    rft_key key;
    char again[RFT_KEY_TEXT];
    if (count > RFT_KEY_CHARS) count = RFT_KEY_CHARS;
    if (!rft_key_parse(text, count, &key)) return;
    rft_key_print(&key, again);
    FUZZ_REQUIRE(count == RFT_KEY_CHARS && memcmp(again, text, count) == 0);
}

static char path[64]; /* of the file that all inputs are written to */

static void remove_file(void)
{
    (void)unlink(path);
}

/* In memory where there is some. */
static int make_file(void)
{
    static const char *const places[] = {"/dev/shm/fuzz-key-XXXXXX", "/tmp/fuzz-key-XXXXXX"};
    int file = -1;
    for (size_t i = 0; i < 2 && file < 0; i++) {
        (void)snprintf(path, sizeof path, "%s", places[i]);
        file = mkostemp(path, O_CLOEXEC);
    }
    FUZZ_REQUIRE(file >= 0 && atexit(remove_file) == 0);
    return file;
}

static void write_file(const uint8_t *text, size_t count, mode_t mode)
{
    static int file = -1;
    if (file < 0) file = make_file();
    FUZZ_REQUIRE(fchmod(file, mode) == 0);
    FUZZ_REQUIRE(pwrite(file, text, count, 0) == (ssize_t)count);
    FUZZ_REQUIRE(ftruncate(file, (off_t)count) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char printed[RFT_KEY_TEXT];
    rft_key key;
    refit_error error = {0};
    if (size == 0 || size > TEXT_MOST) return 0;
    const char *text = (const char *)data + 1;
    size_t count = size - 1;
    rft_key_half half = (data[0] & IS_SECRET) != 0 ? RFT_KEY_SECRET : RFT_KEY_PUBLIC;
    mode_t mode = modes[data[0] >> 1 & 7];
    bool open_to_others = (mode & (half == RFT_KEY_SECRET ? 077 : 022)) != 0;
    check_characters(text, count);
    write_file(data + 1, count, mode);
    refit_status status = rft_key_file_read(AT_FDCWD, path, half, &key, &error);
    if (status == REFIT_OK) {
        rft_key_print(&key, printed);
        FUZZ_REQUIRE(!open_to_others && memmem(text, count, printed, RFT_KEY_CHARS) != NULL);
        fuzz_taken++;
    } else {
        FUZZ_REQUIRE(status == REFIT_ERR_SECURITY || status == REFIT_ERR_CONFIG);
        FUZZ_REQUIRE(status == REFIT_ERR_SECURITY || !open_to_others);
        FUZZ_REQUIRE(error.text[0] != '\0');
    }
    return 0;
}
