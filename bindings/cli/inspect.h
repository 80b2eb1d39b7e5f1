/* inspect: what versions, files and archives are, in words or as JSON. */
#ifndef CLI_INSPECT_H
#define CLI_INSPECT_H

#include <jansson.h>
#include <refit/archive.h>

/* 32 digits and NUL. */
const char *cli_digest_text(const unsigned char digest[16], char text[33]);

/* What an archive's file says about itself. */
void cli_inspect_print_file(const refit_archive_info *info);
json_t *cli_inspect_json_file(const refit_archive_info *info);

/* The same in one line, for a list. */
void cli_inspect_print_line(const refit_archive_info *info);

/* What a publisher says of itself. */
void cli_inspect_print_glance(const char *endpoint, const refit_glance_info *info);
json_t *cli_inspect_json_glance(const char *endpoint, const refit_glance_info *info);

/* A tensor, in one line; as an object. */
void cli_inspect_print_tensor(const refit_tensor *tensor, uint64_t digest);
json_t *cli_inspect_json_tensor(const refit_tensor *tensor, uint64_t digest);

/* Prints the object on one line and releases it. An exit status. */
int cli_inspect_print_json(json_t *object);

#endif
