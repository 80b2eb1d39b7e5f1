/*
 * bench_versions: the weights that a benchmark publishes, version after version.
 *
 * With a density, two images made by bench_updates take turns, so each version differs from the one
 * before in that share of its bf16 elements. Without a density all elements of a version are new,
 * and no block equals that of the version before.
 */
#ifndef BENCH_VERSIONS_H
#define BENCH_VERSIONS_H

#include <stdint.h>

#include <refit/broadcast.h>

/* Versions that come before the counted rounds. */
enum { BENCH_FRESH_VERSIONS = 2 };

/* The bytes of the images, as a multiple of the bytes of a version. */
enum { BENCH_VERSIONS_IMAGES = 2 };

typedef struct bench_versions {
    uint64_t bytes;  /* of BENCH_TENSORS equal tensors */
    double density;  /* what came of the density that was asked for; 0: none was */
    char *images[2]; /* the second one is NULL without a density */
    uint32_t turn;
} bench_versions;

/* `bytes` are rounded down. On failure bench_versions_close gives back what there is. */
refit_status bench_versions_open(uint64_t bytes, double density, bench_versions *out,
                                 refit_error *error);
void bench_versions_close(bench_versions *versions);

/* Makes the next one. */
void bench_versions_next(bench_versions *versions);

/* The round of `version`, counted from 1. The first versions are cold: while they are published the
 * slots and both images of each worker are touched for the first time. */
uint32_t bench_versions_round(uint32_t version);

/* The figures of one version. */
typedef struct bench_version_figures {
    double seconds;      /* of the publisher, from begin until commit returned */
    refit_stats stats;   /* of the publisher, after it */
    uint64_t sent_bytes; /* payload of this version, through sockets, to all workers */
} bench_version_figures;

/* Publishes it as it is now. `out` holds what the version before left there, or zeroes. */
refit_status bench_versions_publish(const bench_versions *versions, refit_publisher *publisher,
                                    bench_version_figures *out, refit_error *error);

#endif
