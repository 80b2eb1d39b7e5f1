/*
 * refit/advanced/query.h: which version a publisher holds, asked by an observer.
 *
 *     refit_query_open(endpoint, NULL, 5000, &query, &error);
 *     refit_query_describe(query, &info, &error);
 *     refit_query_tensor(query, index, &tensor, &digest, &error);
 *     refit_query_close(query);
 *
 * A monitor, a test or an operator asks this way. A query has the answer of one moment, and is used
 * by one thread at a time.
 */
#ifndef REFIT_ADVANCED_QUERY_H
#define REFIT_ADVANCED_QUERY_H

#include <refit/broadcast.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a publisher holds, asked once. */
typedef struct refit_query refit_query;

/*
 * Asks the publisher at `endpoint` (NULL: broadcast.endpoint) which version it holds. The caller is
 * no subscriber: no version waits for it, no report names it, and no weights travel. `config` may
 * be NULL; security.* counts as for a subscriber. A publisher answers 64 observers in a second, and
 * none of them twice. Blocks for the answer, at most `timeout_ms`.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: no publisher answers
 * - REFIT_ERR_PEER: it refuses
 * - REFIT_ERR_PROTOCOL, REFIT_ERR_LIMIT, REFIT_ERR_CORRUPT
 * - those of refit_subscriber_open
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_query_open(const char *endpoint,
                                                         const refit_config *config,
                                                         uint32_t timeout_ms, refit_query **out,
                                                         refit_error *error);

/* NULL is allowed. */
REFIT_API void refit_query_close(refit_query *query);

typedef struct refit_query_info {
    size_t size;                /* sizeof(refit_query_info), set by the caller */
    uint64_t epoch;             /* of the trainer */
    uint64_t version;           /* committed; 0: none */
    uint64_t weight_bytes;      /* of the tensors that are declared */
    uint64_t frame_bytes;       /* as it cuts versions */
    uint32_t tensors;           /* tied ones included; 0: none is declared */
    uint8_t sealed;             /* 1: digests of the version are known */
    unsigned char digest[16];   /* of the version */
    unsigned char manifest[16]; /* of the list of tensors */
} refit_query_info;

/*
 * Describes it.
 *
 * Errors:
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_query_describe(const refit_query *query,
                                                             refit_query_info *info,
                                                             refit_error *error);

/*
 * Tensor `index`: what it is, borrowed until refit_query_close, and the digest of its bytes (0 if
 * not known), each of which may be NULL.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_query_tensor(const refit_query *query, uint32_t index,
                                                           refit_tensor *tensor, uint64_t *digest,
                                                           refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
