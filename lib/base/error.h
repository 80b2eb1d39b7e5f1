/*
 * How errors are made and passed on: the one macro family.
 *
 *     RFT_REFUSE_IF(count == 0, error, REFIT_ERR_INVALID, "no tensors: declare at least one");
 *     RFT_TRY(rft_layout_open(...));
 *     RFT_TRY_GOTO(rft_image_begin(...), close_layout); the label names what it undoes
 *     status = rft_keep_first(status, close_it());      in teardown: the first failure is kept
 */
#ifndef RFT_ERROR_H
#define RFT_ERROR_H

#include <refit/status.h>

/* Room for every sentence that an error has, NUL included. */
#define RFT_SENTENCE_BYTES sizeof(((refit_error *)NULL)->text)

/* Fills `error` (may be NULL) and returns `status`. `subsystem` is errno or another library's code.
 * The sentence is fitted (base/text.h): a long one loses its middle and keeps its advice; names of
 * files, keys and peers, which come from elsewhere, stay on its line. `error->text` may be among
 * the arguments. */
refit_status rft_fail_sub(refit_error *error, refit_status status, int subsystem,
                          const char *format, ...) REFIT_PRINTF(4, 5);

/* Tells the static analyser, which sees one file at a time, that a failure is never REFIT_OK. */
#ifdef __clang_analyzer__
#define rft_fail_sub(error, status, ...)                                                           \
    ((void)rft_fail_sub((error), (status), __VA_ARGS__), (status))
#endif

#define rft_fail(error, status, ...) rft_fail_sub((error), (status), 0, __VA_ARGS__)

#define RFT_REFUSE_IF(condition, error, status, ...)                                               \
    do {                                                                                           \
        if (condition) return rft_fail((error), (status), __VA_ARGS__);                            \
    } while (0)

#define RFT_TRY(call)                                                                              \
    do {                                                                                           \
        refit_status rft_try_status = (call);                                                      \
        if (rft_try_status != REFIT_OK) return rft_try_status;                                     \
    } while (0)

/* For functions with a local `status` and labels that undo. */
#define RFT_TRY_GOTO(call, label)                                                                  \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != REFIT_OK) goto label;                                                        \
    } while (0)

static inline refit_status rft_keep_first(refit_status first, refit_status next)
{
    return first != REFIT_OK ? first : next;
}

#endif
