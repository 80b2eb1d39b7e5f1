/*
 * Replays the inputs of an archive (tar's format ustar) through a fuzz target, without a fuzzer: an
 * ordinary test, by any compiler. Each input is read into memory of exactly its size, so that
 * valgrind and sanitizers see a read past its end. Its name is printed before it is replayed: the
 * last name is that of the input that crashed. An archive without inputs is a failure, and one of
 * which the target takes no input: then nothing was tested, or nothing but refusals.
 */
#include <errno.h>

#include "fuzz.h"

typedef struct tar_header {
    char name[100], mode[8], user[8], group[8], size[12], time[12], sum[8], type, link[100];
    char magic[5], rest[250];
} tar_header;

/* The sum of a header's bytes, with spaces in place of the sum itself. */
static unsigned long sum_of(const tar_header *header)
{
    const unsigned char *bytes = (const unsigned char *)header;
    const size_t from = offsetof(tar_header, sum), to = offsetof(tar_header, type);
    unsigned long sum = 0;
    for (size_t i = 0; i < sizeof *header; i++)
        sum += i >= from && i < to ? ' ' : bytes[i];
    return sum;
}

static const char *replay_one(FILE *archive, const tar_header *header)
{
    size_t size = strtoul(header->size, NULL, 8);
    uint8_t *data = malloc(size == 0 ? 1 : size);
    if (data == NULL) return "has an input that is larger than memory";
    if (fread(data, 1, size, archive) != size) {
        free(data);
        return "is cut off in an input";
    }
    printf("replaying %.*s\n", (int)sizeof header->name, header->name);
    (void)fflush(stdout);
    (void)LLVMFuzzerTestOneInput(data, size);
    free(data);
    long padding = (long)(-size % sizeof *header);
    return fseek(archive, padding, SEEK_CUR) == 0 ? NULL : "cannot be read";
}

/* Gives what is wrong with the archive, or NULL. */
static const char *replay_all(FILE *archive, unsigned *replayed)
{
    tar_header header;
    while (fread(&header, sizeof header, 1, archive) == 1) {
        if (header.name[0] == '\0') return *replayed == 0 ? "has no inputs" : NULL;
        if (memcmp(header.magic, "ustar", sizeof header.magic) != 0) return "is not a tar archive";
        if (strtoul(header.sum, NULL, 8) != sum_of(&header)) return "has a damaged header";
        if (header.type != '0') return "has an entry that is not a file";
        const char *wrong = replay_one(archive, &header);
        if (wrong != NULL) return wrong;
        (*replayed)++;
    }
    return "is cut off";
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s ARCHIVE\n", argv[0]);
        return 2;
    }
    FILE *archive = fopen(argv[1], "rb");
    if (archive == NULL) {
        (void)fprintf(stderr, "%s cannot be opened: %s\n", argv[1], strerror(errno));
        return 2;
    }
    unsigned replayed = 0;
    const char *wrong = replay_all(archive, &replayed);
    (void)fclose(archive);
    if (wrong == NULL && fuzz_taken == 0) wrong = "has no input that the target takes";
    if (wrong != NULL) (void)fprintf(stderr, "%s %s\n", argv[1], wrong);
    printf("%u inputs of %s replayed, %u taken\n", replayed, argv[1], fuzz_taken);
    return wrong != NULL;
}
