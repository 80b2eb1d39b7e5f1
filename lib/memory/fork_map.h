/*
 * fork_map: memory of this process that forked children can read.
 *
 * It is a file without a name, mapped and shared: a write of the process after a fork never moves a
 * page, so what a device page-locked stays where it is, and nothing is copied for a child. The
 * mapping itself is kept from children (MADV_DONTFORK). In a child, the end of fork(2) maps the
 * file at the same addresses again, privately: the child reads the bytes that its parent has now,
 * and what it writes is its own copy of a page. Of what the child does not touch it has no page
 * tables.
 *
 * The memory lives until its process has closed the map and each child that was forked meanwhile
 * has ended or executed another program. Processes made without fork(2), such as by vfork(2) or a
 * bare clone(2), have nothing there.
 */
#ifndef RFT_FORK_MAP_H
#define RFT_FORK_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct rft_fork_map rft_fork_map;

/* Puts such memory in the place of [base, base + bytes), whole pages that the caller has mapped. On
 * failure the caller's mapping is as it was. REFIT_ERR_HOST_MEMORY; REFIT_ERR_SYSTEM if the kernel
 * gives no such memory. */
refit_status rft_fork_map_open(void *base, uint64_t bytes, rft_fork_map **out, refit_error *error);

/* Later children have nothing there. Unmaps nothing. NULL is allowed. */
void rft_fork_map_close(rft_fork_map *map);

/* May a file of this process have so many bytes? To write more ends it by a signal (ulimit -f). */
bool rft_file_fits(uint64_t bytes);

/* A file of `bytes` zeros in memory, which may be sealed; no program can be run from it, and no
 * other user reaches it. -1, with errno. */
int rft_memory_file(uint64_t bytes);

#endif
