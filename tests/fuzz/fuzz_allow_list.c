/*
 * A folder of files as an allow list. The input is a list of files:
 *
 *     what | mode | bytes of the name | bytes of the text | name… | text…
 *
 * `what` says whether the name gets its ending here and whether the text is 32 bytes that are
 * written as a key file would have them, so that some keys are allowed at all. Exactly those are
 * allowed whose file has a key file's name, a mode that lets no other user write, and one key; and
 * none is once the files are gone.
 */
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"
#include "trust/allow_list.h"

#define HEADER     4u
#define FILES_MOST 4u
#define HAS_ENDING 1u
#define IS_KEY     2u

static const mode_t modes[] = {0644, 0600, 0444, 0664, 0646, 0604};

typedef struct scene {
    char path[64];
    int folder;
    unsigned made;
    char names[FILES_MOST][NAME_MAX + 1];
} scene;

/* One of its own for every input, in memory where there is some: the list looks at times, too. */
static void open_scene(scene *s)
{
    static const char *const places[] = {"/dev/shm/fuzz-allow-XXXXXX", "/tmp/fuzz-allow-XXXXXX"};
    memset(s, 0, sizeof *s);
    for (size_t i = 0; i < 2 && s->folder <= 0; i++) {
        (void)snprintf(s->path, sizeof s->path, "%s", places[i]);
        if (mkdtemp(s->path) != NULL) s->folder = open(s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    FUZZ_REQUIRE(s->folder > 0);
}

static void remove_files(scene *s)
{
    for (unsigned i = 0; i < s->made; i++)
        FUZZ_REQUIRE(unlinkat(s->folder, s->names[i], 0) == 0);
    s->made = 0;
}

static void close_scene(scene *s)
{
    remove_files(s);
    (void)close(s->folder);
    FUZZ_REQUIRE(rmdir(s->path) == 0);
}

/* False: no file can have this name, or one has it. */
static bool make_file(scene *s, const char *name, mode_t mode, const void *text, size_t count)
{
    if (s->made == FILES_MOST || name[0] == '\0' || strchr(name, '/') != NULL) return false;
    int file = openat(s->folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return false;
    FUZZ_REQUIRE(write(file, text, count) == (ssize_t)count);
    FUZZ_REQUIRE(fchmod(file, mode) == 0 && close(file) == 0);
    strcpy(s->names[s->made++], name);
    return true;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns how many bytes of input the file took. */
static size_t take_file(scene *s, const uint8_t *at, size_t left)
{
    char name[256 + sizeof ".public"], text[64];
    size_t named = smaller(at[2], left - HEADER), count = smaller(at[3], left - HEADER - named);
    const void *written = at + HEADER + named;
    size_t used = HEADER + named + count;
    memcpy(name, at + HEADER, named);
    strcpy(name + named, (at[0] & HAS_ENDING) != 0 ? rft_key_suffix(RFT_KEY_PUBLIC) : "");
    if ((at[0] & IS_KEY) != 0 && count >= RFT_KEY_BYTES) {
        rft_key key;
        memcpy(key.bytes, written, RFT_KEY_BYTES);
        rft_key_print(&key, text);
        written = text;
        count = RFT_KEY_CHARS;
    }
    if (strlen(name) <= NAME_MAX)
        (void)make_file(s, name, modes[at[1] % (sizeof modes / sizeof modes[0])], written, count);
    return used;
}

/* Whether the file should let a key in, and which. */
static bool read_made(const scene *s, unsigned file, char key_text[RFT_KEY_TEXT])
{
    char name[NAME_MAX + 1];
    rft_key key;
    const char *suffix = rft_key_suffix(RFT_KEY_PUBLIC);
    size_t length = strlen(s->names[file]), tail = strlen(suffix);
    if (length < tail || strcmp(s->names[file] + length - tail, suffix) != 0) return false;
    memcpy(name, s->names[file], length - tail);
    name[length - tail] = '\0';
    if (!rft_key_name_is_valid(name)) return false;
    if (rft_key_file_read(s->folder, s->names[file], RFT_KEY_PUBLIC, &key, NULL) != REFIT_OK)
        return false;
    rft_key_print(&key, key_text);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    scene s;
    rft_allow_list *list;
    char key[RFT_KEY_TEXT], name[RFT_KEY_NAME_BYTES];
    uint32_t expected = 0;
    open_scene(&s);
    while (size >= HEADER) {
        size_t used = take_file(&s, data, size);
        data += used;
        size -= used;
    }
    FUZZ_REQUIRE(rft_allow_list_open(s.path, &list, NULL) == REFIT_OK);
    for (unsigned i = 0; i < s.made; i++) {
        if (!read_made(&s, i, key)) continue;
        FUZZ_REQUIRE(rft_allow_list_has(list, key, name) && rft_key_name_is_valid(name));
        expected++;
        fuzz_taken++;
    }
    FUZZ_REQUIRE(rft_allow_list_count(list) == expected);
    remove_files(&s);
    rft_allow_list_refresh(list);
    FUZZ_REQUIRE(rft_allow_list_count(list) == 0);
    rft_allow_list_close(list);
    close_scene(&s);
    return 0;
}
