/*
 * archive_rig: an archive in a scratch folder, and versions whose bytes follow from their number.
 *
 * The tensors have everything that is odd about tensors: several blocks, a tied one, an empty one,
 * a scalar, four bits an element. Between two versions a few elements of the first tensor change,
 * all of the second's, and none of the others'.
 */
#ifndef ARCHIVE_RIG_H
#define ARCHIVE_RIG_H

#include <stdio.h>
#include <stdlib.h>

#include <refit/advanced/archive.h>

#include "tests/support/test.h"

#define RIG_TENSORS   7u
#define RIG_ORIGINALS 6u
#define RIG_EPOCH     UINT64_C(0x9f1c66a04b7de210)
#define RIG_OTHER     UINT64_C(0x0000000000000007)

typedef struct archive_rig {
    char root[64];
    char folder[80];
    refit_config config;
    uint32_t elements; /* of the first tensor */
    unsigned char *bytes[RIG_TENSORS];
    refit_tensor tensors[RIG_TENSORS];
    refit_weight weights[RIG_ORIGINALS];
    refit_archive *archive; /* open for writing */
} archive_rig;

/* Closes what is open first. `elements` of the first tensor: 10 for files of some hundred bytes,
 * 200000 for several frames. */
void rig_open(archive_rig *rig, uint32_t elements);
void rig_close(archive_rig *rig);
/* The writer alone. */
void rig_close_archive(archive_rig *rig);

/* A test opens the rig that is its state; it is closed afterwards. */
int rig_setup(void **state);
int rig_teardown(void **state);
#define RIG_TEST(test) TEST_ON(archive_rig *rig, test, rig_setup, rig_teardown)

/* Opens the rig and writes versions 1 to `versions` of RIG_EPOCH. */
void rig_open_with(archive_rig *rig, uint32_t elements, uint64_t versions);
/* The same, compressed. */
void rig_open_packed(archive_rig *rig, uint32_t elements, uint64_t versions);

/* Closes the archive and opens it again. */
void rig_reopen(archive_rig *rig);

/* Sets the weights to those of a version, and describes it for refit_archive_write. */
refit_archive_version rig_version(archive_rig *rig, uint64_t epoch, uint64_t version);

/* Writes and commits; fails the test if it cannot. */
void rig_keep(archive_rig *rig, uint64_t epoch, uint64_t version);

/* Writes and commits a version that a test has changed after rig_version. */
void rig_keep_this(archive_rig *rig, const refit_archive_version *version);

/* Reads a version back through an archive of its own; what it says, or the status. A version that
 * was read but is not what it was fails the test. */
refit_status rig_check(archive_rig *rig, uint64_t epoch, uint64_t version, refit_error *error);

/* Fails the test if the version cannot be read. */
void rig_expect(archive_rig *rig, uint64_t epoch, uint64_t version);

/* Opens the archive and describes file `index`. */
refit_archive_info rig_info(archive_rig *rig, uint32_t index);
uint32_t rig_count(archive_rig *rig);

/* The path of file `index`, in a buffer that the next call overwrites. */
const char *rig_path(archive_rig *rig, uint32_t index);

/* A whole file, to be freed, and back. */
unsigned char *rig_load(const char *path, size_t *count);
void rig_store(const char *path, const unsigned char *bytes, size_t count);

/* A file of the archive as it is, to be damaged; rig_put_back makes it whole again, and ends it. */
typedef struct kept_file {
    char path[160];
    unsigned char *bytes;
    size_t count;
} kept_file;

kept_file rig_take_file(archive_rig *rig, uint32_t index);
void rig_put_back(kept_file *file);

/* How many names the folder has, dots and the lock apart. */
uint32_t rig_names(archive_rig *rig);

#endif
