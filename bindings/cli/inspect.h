/* inspect: shows versions, files and archives, as text or as JSON. */
#ifndef CLI_INSPECT_H
#define CLI_INSPECT_H

#include <jansson.h>
#include <refit/advanced/archive.h>
#include <refit/advanced/query.h>

/* 32 digits and NUL. */
const char *cli_digest_text(const unsigned char digest[16], char text[33]);

/* The description of an archive's file. */
void cli_inspect_print_file(const refit_archive_info *info);
json_t *cli_inspect_json_file(const refit_archive_info *info);

/* The same in one line of a list, whose columns the first call names. */
void cli_inspect_print_columns(void);
void cli_inspect_print_line(const refit_archive_info *info);

/* The answer of a publisher to a query. */
void cli_inspect_print_query(const char *endpoint, const refit_query_info *info);
json_t *cli_inspect_json_query(const char *endpoint, const refit_query_info *info);

/* Which columns a table of tensors has beside their names. */
typedef enum cli_columns {
    CLI_COLUMNS_BYTES,   /* of a version: size, digest, type and shape */
    CLI_COLUMNS_CHANGE,  /* of one change: share, blocks by mode, digest */
    CLI_COLUMNS_CHANGES, /* of many changes: share, blocks, size */
} cli_columns;

/* A tensor, as a line of the table; as an object. `digest` and `change` are NULL where there is
 * none to tell. */
void cli_inspect_print_table(cli_columns columns);
void cli_inspect_print_tensor(cli_columns columns, const refit_tensor *tensor,
                              const uint64_t *digest, const refit_tensor_change *change);
json_t *cli_inspect_json_tensor(const refit_tensor *tensor, const uint64_t *digest,
                                const refit_tensor_change *change);

/* Prints the object on one line and releases it. An exit status. */
int cli_inspect_print_json(json_t *object);

#endif
