/*
 * refit/host.h: what refit borrows from the process it lives in: memory for its own small
 * structures, and a place to say things. Both have defaults; most programs need neither.
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
 * refit call: it answers REFIT_ERR_STATE while a refit object exists, and REFIT_ERR_INVALID if a
 * function is missing. Does not block. Not thread-safe against other refit calls. Since 0.1.
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
 * Where refit says things, and from which level on. refit prints nothing by itself: without a
 * function (the default, or NULL) it is silent. Replaces the one before; when the call returns the
 * old function is no longer running. May wait for a line that is being written. Any thread but the
 * log function's. Since 0.1.
 */
REFIT_API void refit_set_log(refit_log_fn function, void *user, refit_log_level most);

#ifdef __cplusplus
}
#endif
#endif
