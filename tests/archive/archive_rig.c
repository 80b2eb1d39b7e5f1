#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "archive_rig.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

static void describe_tensors(archive_rig *rig)
{
    const uint64_t n = rig->elements;
    const refit_tensor tensors[RIG_TENSORS] = {
        {sizeof(refit_tensor), "embed", REFIT_BF16, 1, {n}, 2 * n, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "norm", REFIT_F32, 2, {3, 3}, 36, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "head", REFIT_BF16, 1, {n}, 2 * n, 0},
        {sizeof(refit_tensor), "empty", REFIT_F32, 1, {0}, 0, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "packed", REFIT_F4, 1, {7}, 4, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "scalar", REFIT_I64, 0, {0}, 8, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "bytes", REFIT_U8, 1, {3 * n}, 3 * n, REFIT_NO_ALIAS},
    };
    memcpy(rig->tensors, tensors, sizeof tensors);
    uint32_t next = 0;
    for (uint32_t i = 0; i < RIG_TENSORS; i++) {
        rig->bytes[i] = calloc(1, (size_t)tensors[i].bytes + 1);
        assert_non_null(rig->bytes[i]);
        if (tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        rig->weights[next++] = (refit_weight){i, rig->bytes[i], tensors[i].bytes};
    }
}

static void open_archive(archive_rig *rig)
{
    assert_done(
        refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &rig->archive, error));
}

void rig_open(archive_rig *rig, uint32_t elements)
{
    if (rig->root[0] != '\0') rig_close(rig);
    *rig = (archive_rig){.config = quick_config(), .elements = elements};
    rig->config.broadcast_frame_bytes = 64 * 1024;
    rig->config.archive_anchor_every = 4;
    strcpy(rig->root, "/tmp/refit-archive-XXXXXX");
    assert_non_null(mkdtemp(rig->root));
    (void)snprintf(rig->folder, sizeof rig->folder, "%s/kept", rig->root);
    describe_tensors(rig);
    open_archive(rig);
}

void rig_open_with(archive_rig *rig, uint32_t elements, uint64_t versions)
{
    rig_open(rig, elements);
    for (uint64_t version = 1; version <= versions; version++)
        rig_keep(rig, RIG_EPOCH, version);
}

void rig_reopen(archive_rig *rig)
{
    refit_archive_close(rig->archive);
    open_archive(rig);
}

void rig_close(archive_rig *rig)
{
    char command[128];
    refit_archive_close(rig->archive);
    for (uint32_t i = 0; i < RIG_TENSORS; i++)
        free(rig->bytes[i]);
    (void)snprintf(command, sizeof command, "rm -rf %s", rig->root);
    assert_int_equal(system(command), 0);
    memset(rig, 0, sizeof *rig);
}

int rig_setup(void **state)
{
    static archive_rig rig;
    *state = &rig;
    return 0;
}

int rig_teardown(void **state)
{
    archive_rig *rig = *state;
    if (rig->root[0] != '\0') rig_close(rig);
    return 0;
}

void rig_close_archive(archive_rig *rig)
{
    refit_archive_close(rig->archive);
    rig->archive = NULL;
}

void rig_open_packed(archive_rig *rig, uint32_t elements, uint64_t versions)
{
    rig_open(rig, elements);
    rig->config.broadcast_compress = REFIT_COMPRESS_ZSTD;
    rig_reopen(rig);
    for (uint64_t version = 1; version <= versions; version++)
        rig_keep(rig, RIG_EPOCH, version);
}

refit_archive_version rig_version(archive_rig *rig, uint64_t epoch, uint64_t version)
{
    for (uint32_t i = 0; i < RIG_TENSORS; i++)
        for (uint64_t at = 0; at < rig->tensors[i].bytes; at++)
            rig->bytes[i][at] = (unsigned char)(at * 7 + i + epoch);
    for (uint64_t at = 0; at < rig->tensors[0].bytes; at += 2)
        if (at % 200 == 2 * (version % 100)) rig->bytes[0][at] ^= (unsigned char)version;
    for (uint64_t at = 0; at < rig->tensors[1].bytes; at++)
        rig->bytes[1][at] ^= (unsigned char)(version * 31);
    return (refit_archive_version){
        .size = sizeof(refit_archive_version),
        .epoch = epoch,
        .version = version,
        .tensors = rig->tensors,
        .weights = rig->weights,
        .count = RIG_TENSORS,
        .weight_count = RIG_ORIGINALS,
    };
}

void rig_keep(archive_rig *rig, uint64_t epoch, uint64_t version)
{
    const refit_archive_version what = rig_version(rig, epoch, version);
    rig_keep_this(rig, &what);
}

void rig_keep_this(archive_rig *rig, const refit_archive_version *version)
{
    assert_done(refit_archive_write(rig->archive, version, error));
    assert_done(refit_archive_commit(rig->archive, NULL, error));
}

static refit_archive *open_to_read(archive_rig *rig)
{
    refit_archive *archive;
    assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL));
    return archive;
}

static void compare_tensors(archive_rig *rig, const refit_snapshot *snapshot)
{
    assert_int_equal(refit_snapshot_count(snapshot), RIG_TENSORS);
    for (uint32_t i = 0; i < RIG_TENSORS; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        assert_ok(refit_snapshot_tensor(snapshot, i, &tensor, &bytes, NULL, NULL));
        const refit_tensor *expected = &rig->tensors[i];
        assert_string_equal(tensor.name, expected->name);
        assert_int_equal(tensor.dtype, expected->dtype);
        assert_int_equal(tensor.rank, expected->rank);
        assert_int_equal(tensor.alias_of, expected->alias_of);
        assert_int_equal(tensor.bytes, expected->bytes);
        assert_int_equal((uintptr_t)bytes % 64, 0);
        uint32_t original = expected->alias_of == REFIT_NO_ALIAS ? i : expected->alias_of;
        assert_memory_equal(bytes, rig->bytes[original], (size_t)tensor.bytes);
    }
}

refit_status rig_check(archive_rig *rig, uint64_t epoch, uint64_t version, refit_error *error)
{
    refit_archive *archive = open_to_read(rig);
    refit_snapshot *snapshot = NULL;
    refit_status status = refit_archive_read(archive, epoch, version, &snapshot, error);
    refit_archive_close(archive); /* a snapshot is its own */
    if (status != REFIT_OK) return status;
    (void)rig_version(rig, epoch, version);
    compare_tensors(rig, snapshot);
    refit_snapshot_close(snapshot);
    return REFIT_OK;
}

void rig_expect(archive_rig *rig, uint64_t epoch, uint64_t version)
{
    assert_done(rig_check(rig, epoch, version, error));
}

refit_archive_info rig_info(archive_rig *rig, uint32_t index)
{
    refit_archive_info info = {.size = sizeof info};
    refit_archive *archive = open_to_read(rig);
    assert_done(refit_archive_describe(archive, index, &info, error));
    refit_archive_close(archive);
    return info;
}

uint32_t rig_count(archive_rig *rig)
{
    refit_archive *archive = open_to_read(rig);
    uint32_t count = refit_archive_count(archive);
    refit_archive_close(archive);
    return count;
}

const char *rig_path(archive_rig *rig, uint32_t index)
{
    static char path[160];
    const refit_archive_info info = rig_info(rig, index);
    (void)snprintf(path, sizeof path, "%s/%s", rig->folder, info.name);
    return path;
}

unsigned char *rig_load(const char *path, size_t *count)
{
    struct stat found;
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &found), 0);
    unsigned char *bytes = malloc((size_t)found.st_size + 1);
    assert_non_null(bytes);
    *count = fread(bytes, 1, (size_t)found.st_size, file);
    assert_int_equal(*count, found.st_size);
    (void)fclose(file);
    return bytes;
}

/* Over what is there: some file systems write a file to the disk when it was made empty first. */
void rig_store(const char *path, const unsigned char *bytes, size_t count)
{
    int file = open(path, O_WRONLY | O_CREAT, 0666);
    assert_true(file >= 0);
    assert_int_equal(pwrite(file, bytes, count, 0), count);
    assert_int_equal(ftruncate(file, (off_t)count), 0);
    assert_int_equal(close(file), 0);
}

kept_file rig_take_file(archive_rig *rig, uint32_t index)
{
    kept_file file;
    (void)snprintf(file.path, sizeof file.path, "%s", rig_path(rig, index));
    file.bytes = rig_load(file.path, &file.count);
    return file;
}

void rig_put_back(kept_file *file)
{
    rig_store(file->path, file->bytes, file->count);
    free(file->bytes);
    *file = (kept_file){0};
}

uint32_t rig_names(archive_rig *rig)
{
    uint32_t count = 0;
    DIR *folder = opendir(rig->folder);
    assert_non_null(folder);
    for (const struct dirent *found; (found = readdir(folder)) != NULL;) {
        bool own = strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0;
        count += own || strcmp(found->d_name, ".lock") == 0 ? 0 : 1;
    }
    (void)closedir(folder);
    return count;
}
