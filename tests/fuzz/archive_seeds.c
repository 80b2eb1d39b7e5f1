/*
 * Writes the seeds of fuzz_archive into the folder that it is given: an anchor, a delta of it and
 * one in which nothing changed, packed or not, each as it is, to be mended, and to be applied.
 */
#include <refit/advanced/archive.h>

#include "seeds.h"

#define FLAGS 4u /* sets of flags */

/* A byte of flags before what the file has. */
static void write_flagged(const char *from, const char *folder, const char *name, unsigned flags)
{
    static unsigned char bytes[1 + (1 << 16)];
    FILE *file = fopen(from, "rb");
    must(file != NULL, "open what was archived");
    bytes[0] = (unsigned char)flags;
    size_t count = 1 + fread(bytes + 1, 1, sizeof bytes - 1, file);
    (void)fclose(file);
    write_seed(folder, name, bytes, count);
}

static void write_seeds(const char *folder, const char *kept, const char *name, const char *way,
                        const refit_archive_info *info)
{
    char from[4096], seed[64];
    (void)snprintf(from, sizeof from, "%s/%s", kept, info->name);
    for (unsigned flags = 0; flags < FLAGS; flags++) {
        (void)snprintf(seed, sizeof seed, "%s2%s-%u", name, way, flags);
        write_flagged(from, folder, seed, flags);
    }
}

static void keep(refit_archive *archive, uint64_t version, const unsigned char *halves,
                 refit_archive_info *info)
{
    static const unsigned char odd[5] = "ZZZZZ"; /* as every byte of the target's base */
    const refit_tensor tensors[] = {
        {sizeof(refit_tensor), "halves", REFIT_BF16, 2, {90, 20}, 3600, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tied", REFIT_BF16, 1, {1800}, 3600, 0},
        {sizeof(refit_tensor), "odd", REFIT_U8, 1, {5}, 5, REFIT_NO_ALIAS},
    };
    const refit_weight weights[] = {{0, halves, 3600}, {2, odd, 5}};
    const refit_archive_version what = {sizeof what, 0x9f1c66a0, version, NULL,
                                        tensors,     weights,    3,       2};
    must(refit_archive_write(archive, &what, NULL) == REFIT_OK, "write a version");
    must(refit_archive_commit(archive, info, NULL) == REFIT_OK, "commit a version");
}

/* All of them, as one configuration writes them; `way` is part of their names. */
static void write_ways(const char *folder, const refit_config *config, const char *way)
{
    unsigned char halves[3600];
    char kept[] = "/tmp/archive-seeds-XXXXXX", command[64];
    refit_archive *archive;
    refit_archive_info info = {.size = sizeof info};
    must(mkdtemp(kept) != NULL, "make a folder");
    must(refit_archive_open(kept, REFIT_ARCHIVE_WRITE, config, &archive, NULL) == REFIT_OK, "open");
    memset(halves, 0x5a, sizeof halves);
    keep(archive, 1, halves, &info);
    write_seeds(folder, kept, "anchor", way, &info);
    for (size_t at = 0; at < sizeof halves; at += 6)
        halves[at] ^= 1;
    halves[301] ^= 0x40;
    keep(archive, 2, halves, &info);
    write_seeds(folder, kept, "delta", way, &info);
    keep(archive, 3, halves, &info);
    write_seeds(folder, kept, "same", way, &info);
    refit_archive_close(archive);
    (void)snprintf(command, sizeof command, "rm -r %s", kept);
    must(system(command) == 0, "remove the folder");
}

int main(int count, char **arguments)
{
    refit_config config;
    must(count == 2, "know where to: archive_seeds FOLDER");
    refit_config_init(&config, sizeof config);
    write_ways(arguments[1], &config, "");
    config.broadcast_compress = REFIT_COMPRESS_ZSTD;
    write_ways(arguments[1], &config, "-packed");
    return 0;
}
