/*
 * Replays a folder of inputs through a fuzz target, without a fuzzer: an ordinary test, by any
 * compiler. Each input is read into memory of exactly its size, so that valgrind and sanitizers see
 * a read past its end. An empty folder is a failure, and one of which the target takes no input:
 * then nothing was tested, or nothing but refusals.
 */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

static uint8_t *read_whole(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) return NULL;
    uint8_t *data = NULL;
    if (fseek(file, 0, SEEK_END) == 0 && ftell(file) >= 0) {
        *size = (size_t)ftell(file);
        rewind(file);
        data = malloc(*size == 0 ? 1 : *size);
        if (data != NULL && fread(data, 1, *size, file) != *size) {
            free(data);
            data = NULL;
        }
    }
    (void)fclose(file);
    return data;
}

static int replay_file(const char *folder, const char *name)
{
    char path[4096];
    size_t size = 0;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    uint8_t *data = read_whole(path, &size);
    if (data == NULL) {
        (void)fprintf(stderr, "cannot read %s\n", path);
        return 1;
    }
    (void)LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
    if (folder == NULL) {
        (void)fprintf(stderr, "usage: %s FOLDER (one that can be read)\n", argv[0]);
        return 2;
    }
    int replayed = 0;
    int failed = 0;
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        if (entry->d_name[0] == '.') continue;
        failed += replay_file(argv[1], entry->d_name);
        replayed++;
    }
    (void)closedir(folder);
    printf("%d inputs replayed from %s, %u taken\n", replayed, argv[1], fuzz_taken);
    return replayed == 0 || fuzz_taken == 0 || failed != 0;
}
