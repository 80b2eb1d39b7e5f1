/*
 * refit/host.h: what refit takes from the process that uses it: an allocator for its own small
 * structures, and a function for its log lines. Both have defaults; most programs set neither.
 */
#ifndef REFIT_HOST_H
#define REFIT_HOST_H

#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The allocator for refit's own bookkeeping (never for tensors or the arena). All three functions
 * or none; they must be callable from any thread and follow malloc, realloc and free, `user` first.
 * refit copies the struct.
 */
typedef struct refit_allocator {
    size_t size; /* sizeof(refit_allocator) */
    void *(*allocate)(void *user, size_t bytes);
    void *(*reallocate)(void *user, void *block, size_t bytes);
    void (*release)(void *user, void *block);
    void *user;
} refit_allocator;

/*
 * Installs an allocator for the whole process; NULL brings malloc back. Call it before any other
 * refit call. Does not block. Not thread-safe against other refit calls.
 *
 * Errors:
 * - REFIT_ERR_STATE: a refit object exists
 * - REFIT_ERR_INVALID: a function is missing
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_set_allocator(const refit_allocator *allocator);

typedef enum refit_log_level {
    REFIT_LOG_ERROR = 0,
    REFIT_LOG_WARNING = 1,
    REFIT_LOG_INFO = 2,
    REFIT_LOG_DEBUG = 3,
} refit_log_level;

/* One finished line without a newline. `line` is borrowed for the call. It may come from refit's
 * service threads, so it must be thread-safe, return soon, and not call refit. */
typedef void (*refit_log_fn)(void *user, refit_log_level level, const char *line);

/*
 * Sets the function that gets log lines, and the level from which on. refit prints nothing by
 * itself: without a function (the default, or NULL) it is silent. Replaces the one before; when the
 * call returns the old function is no longer running. May wait for a line that is being written.
 * Any thread but the log function's.
 */
REFIT_API void refit_set_log(refit_log_fn function, void *user, refit_log_level most);

/*
 * Lines kept until they are read, for programs that cannot be called from any thread at any time,
 * such as Python. A ring and the function of refit_set_log get the same lines, each from a level of
 * its own on; there may be several rings.
 */
typedef struct refit_log_ring refit_log_ring;

/*
 * Opens one with room for `lines` lines of at most 400 bytes, its NUL among them. When it is full,
 * further lines are counted and lost. A forked child's is empty and goes on. The caller closes it.
 * Does not block. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID: 0 lines
 * - REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_log_ring_open(uint32_t lines, refit_log_level most,
                                                            refit_log_ring **out,
                                                            refit_error *error);

/*
 * Sets the level from which on it keeps lines, from now on. Any thread. May wait for a line that is
 * being written, as the functions below do.
 */
REFIT_API void refit_log_ring_set_level(refit_log_ring *ring, refit_log_level most);

/*
 * A counter that grows with every line that is kept or lost, so that new lines are seen without a
 * call. Read it as one 8-byte word; valid until refit_log_ring_close. Does not block. Any thread.
 */
REFIT_API const uint64_t *refit_log_ring_count(const refit_log_ring *ring);

/*
 * Takes the oldest line out of it, as much of it as `room` bytes hold, with a NUL. Any thread.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND: there is none
 * - REFIT_ERR_INVALID: without room
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_log_ring_read(refit_log_ring *ring,
                                                            refit_log_level *level, char *line,
                                                            size_t room, refit_error *error);

/* How many lines were lost since this was last asked. Any thread. */
REFIT_API uint64_t refit_log_ring_lost(refit_log_ring *ring);

/* Ends it, with the lines in it; NULL is allowed. Any thread, once no other uses it. */
REFIT_API void refit_log_ring_close(refit_log_ring *ring);

#ifdef __cplusplus
}
#endif
#endif
