/*
 * refit/status.h: what a call answers.
 *
 * Every refit call that can fail returns a refit_status. The last argument of
 * most calls is an optional refit_error that the caller owns: pass NULL if the
 * status is enough. Results come through pointers and are written only when
 * the call returns REFIT_OK.
 */
#ifndef REFIT_STATUS_H
#define REFIT_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(REFIT_BUILDING) && !defined(REFIT_STATIC)
#define REFIT_API __attribute__((visibility("default")))
#else
#define REFIT_API
#endif

/* The compiler warns when a status is dropped: a refit call that failed has left the object in a
 * state that the next call wants to know about. */
#define REFIT_MUST_CHECK                 __attribute__((warn_unused_result))
#define REFIT_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))

/*
 * The one list of statuses: enum, names, texts and the exceptions of language bindings are all
 * made from it. Numbers are part of the ABI: new ones are appended, none is ever reused.
 *   X(NAME, number, "what it means")
 */
#define REFIT_STATUS_MAP(X)                                                                        \
    X(OK, 0, "success")                                                                            \
    X(ERR_INVALID, 1, "an argument is not valid")                                                  \
    X(ERR_STATE, 2, "the object is in the wrong state for this call")                              \
    X(ERR_HOST_MEMORY, 3, "no host memory")                                                        \
    X(ERR_DEVICE_MEMORY, 4, "no device memory")                                                    \
    X(ERR_BUDGET, 5, "the host memory budget does not allow it")                                   \
    X(ERR_PIN, 6, "host memory could not be page-locked")                                          \
    X(ERR_TIMEOUT, 7, "the deadline passed")                                                       \
    X(ERR_CANCELLED, 8, "the operation was cancelled")                                             \
    X(ERR_COPY, 9, "a copy could not be started")                                                  \
    X(ERR_DEVICE, 10, "the device or its driver failed")                                           \
    X(ERR_UNSUPPORTED, 11, "not supported by this build, device or file")                          \
    X(ERR_NOT_FOUND, 12, "no such thing")                                                          \
    X(ERR_EXISTS, 13, "it exists already")                                                         \
    X(ERR_BUSY, 14, "in use by another object, process or user")                                   \
    X(ERR_IO, 15, "reading or writing failed")                                                     \
    X(ERR_CONFIG, 16, "the configuration is not valid")                                            \
    X(ERR_PROTOCOL, 17, "a message broke the protocol")                                            \
    X(ERR_LIMIT, 18, "a configured limit was reached")                                             \
    X(ERR_CORRUPT, 19, "the bytes do not match their digest")                                      \
    X(ERR_STALE, 20, "it belongs to an older version or epoch")                                    \
    X(ERR_PEER, 21, "a worker failed or was lost")                                                 \
    X(ERR_CLOSED, 22, "the other side has closed")                                                 \
    X(ERR_CALLBACK, 23, "a callback of the caller failed")                                         \
    X(ERR_SYSTEM, 24, "the operating system refused")                                              \
    X(ERR_SECURITY, 25, "refused for safety")

typedef enum refit_status {
#define REFIT_STATUS_ENUM(name, number, text) REFIT_##name = (number),
    REFIT_STATUS_MAP(REFIT_STATUS_ENUM)
#undef REFIT_STATUS_ENUM
} refit_status;

/*
 * What went wrong, in detail. Owned by the caller, written by refit only when a call fails.
 * Its size never changes, so it needs no size field.
 */
typedef struct refit_error {
    int32_t status; /* the refit_status that the call returned */
    int32_t
        subsystem;  /* the code below it: errno, a ZeroMQ errno, a CUresult; 0 if there is none */
    char text[248]; /* one sentence: what failed, and what to do; always NUL-terminated */
} refit_error;

/*
 * The status's name without its prefix ("ERR_TIMEOUT"), a constant. Never NULL: an unknown number
 * gives "ERR_UNKNOWN". Any thread.
 */
REFIT_API const char *refit_status_name(refit_status status);

/* The status in a few words ("the deadline passed"), a constant. Never NULL. Any thread. */
REFIT_API const char *refit_status_text(refit_status status);

#ifdef __cplusplus
}
#endif
#endif
