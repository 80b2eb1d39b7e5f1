/* seeds: what the programs have in common that write seeds. */
#ifndef SEEDS_H
#define SEEDS_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void must(bool condition, const char *what)
{
    if (condition) return;
    (void)fprintf(stderr, "cannot %s\n", what);
    exit(1);
}

/* A file of these bytes in the folder. */
static inline void write_seed(const char *folder, const char *name, const void *bytes, size_t count)
{
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    must(file != NULL && fwrite(bytes, 1, count, file) == count && fclose(file) == 0, path);
}

#endif
