/*
 * Versions as text and as JSON, in one form for files, archives and publishers.
 *
 * Tables have the numbers first and the names last, because names have any length: with most names
 * a line fits 80 columns.
 *
 * Digests are hexadecimal texts in JSON as well, as are epochs: numbers of 64 bits do not survive
 * every reader of JSON.
 */
#include "inspect.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli.h"
#include "progress.h"

const char *cli_digest_text(const unsigned char digest[16], char text[33])
{
    for (int i = 0; i < 16; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return text;
}

static double share(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0.0 : (double)part / (double)whole;
}

static void print_kind(const refit_archive_info *info)
{
    if (info->base == 0)
        (void)fputs("anchor", stdout);
    else
        (void)printf("delta of %" PRIu64, info->base);
}

#define SHARE_TEXT 16

/* "1.42 %"; "?" if it is unknown. */
static const char *share_text(uint64_t changed, uint64_t elements, char text[SHARE_TEXT])
{
    const double percent = 100 * share(changed, elements);
    const char *format = changed > 0 && percent < 0.01 ? "<%.2f %%" : "%.2f %%";
    if (changed == REFIT_CHANGED_UNKNOWN) return "?";
    (void)snprintf(text, SHARE_TEXT, format, percent < 0.01 && changed > 0 ? 0.01 : percent);
    return text;
}

void cli_inspect_print_columns(void)
{
    (void)puts("number  changed same sparse dense      kept file");
}

void cli_inspect_print_line(const refit_archive_info *info)
{
    char kept[CLI_SIZE_TEXT], changed[SHARE_TEXT];
    (void)printf("%6" PRIu64 " %8s %4u %6u %5u %9s %s\n", info->version,
                 info->base == 0 ? "anchor" : share_text(info->changed, info->elements, changed),
                 info->blocks_same, info->blocks_sparse, info->blocks_dense,
                 cli_size_text(info->file_bytes, kept), info->name);
}

void cli_inspect_print_file(const refit_archive_info *info)
{
    char size[CLI_SIZE_TEXT], kept[CLI_SIZE_TEXT], digest[33];
    (void)printf("file      %s, %s\n", info->name, cli_size_text(info->file_bytes, kept));
    (void)printf("version   %" PRIu64 " of epoch %016" PRIx64 ", ", info->version, info->epoch);
    print_kind(info);
    (void)printf("\nweights   %s in %u tensors\n", cli_size_text(info->weight_bytes, size),
                 info->tensors);
    (void)printf("changed   %.4g %% of %" PRIu64 " elements\n",
                 100 * share(info->changed, info->elements), info->elements);
    (void)printf("blocks    %u same, %u sparse, %u dense", info->blocks_same, info->blocks_sparse,
                 info->blocks_dense);
    (void)printf(", in %u frame%s, %u compressed\n", info->frames, info->frames == 1 ? "" : "s",
                 info->frames_packed);
    (void)printf("digest    %s\n", cli_digest_text(info->digest, digest));
    if (info->base != 0) {
        (void)printf("base      %s\n", cli_digest_text(info->base_digest, digest));
    }
    (void)printf("manifest  %s\n", cli_digest_text(info->manifest, digest));
}

static json_t *json_hex(uint64_t number)
{
    char text[17];
    (void)snprintf(text, sizeof text, "%016" PRIx64, number);
    return json_string(text);
}

static json_t *json_digest(const unsigned char digest[16])
{
    char text[33];
    return json_string(cli_digest_text(digest, text));
}

json_t *cli_inspect_json_file(const refit_archive_info *info)
{
    json_t *object = json_pack("{s:s, s:s, s:o, s:I, s:I, s:I, s:I}", "kind",
                               info->base == 0 ? "anchor" : "delta", "file", info->name, "epoch",
                               json_hex(info->epoch), "version", (json_int_t)info->version, "base",
                               (json_int_t)info->base, "file_bytes", (json_int_t)info->file_bytes,
                               "weight_bytes", (json_int_t)info->weight_bytes);
    json_t *content = json_pack(
        "{s:I, s:I, s:f, s:i, s:{s:i, s:i, s:i}, s:i, s:i, s:o, s:o, s:o}", "elements",
        (json_int_t)info->elements, "changed", (json_int_t)info->changed, "density",
        share(info->changed, info->elements), "tensor_count", (int)info->tensors, "blocks", "same",
        (int)info->blocks_same, "sparse", (int)info->blocks_sparse, "dense",
        (int)info->blocks_dense, "frames", (int)info->frames, "frames_compressed",
        (int)info->frames_packed, "digest", json_digest(info->digest), "base_digest",
        json_digest(info->base_digest), "manifest", json_digest(info->manifest));
    (void)json_object_update(object, content);
    json_decref(content);
    return object;
}

/* A publisher that has committed nothing has no digest yet. */
void cli_inspect_print_query(const char *endpoint, const refit_query_info *info)
{
    char size[CLI_SIZE_TEXT], digest[33];
    (void)printf("endpoint  %s\n", endpoint);
    if (info->version == 0)
        (void)printf("version   none yet, of epoch %016" PRIx64 "\n", info->epoch);
    else
        (void)printf("version   %" PRIu64 " of epoch %016" PRIx64 "\n", info->version, info->epoch);
    (void)printf("weights   %s in %u tensors\n", cli_size_text(info->weight_bytes, size),
                 info->tensors);
    if (info->version > 0)
        (void)puts(
            "changed   not known: a publisher tells what it holds; inspect an archive of it");
    if (info->sealed) (void)printf("digest    %s\n", cli_digest_text(info->digest, digest));
    if (info->tensors > 0) {
        (void)printf("manifest  %s\n", cli_digest_text(info->manifest, digest));
    }
}

json_t *cli_inspect_json_query(const char *endpoint, const refit_query_info *info)
{
    json_t *object =
        json_pack("{s:s, s:s, s:o, s:I, s:I, s:I, s:i}", "kind", "publisher", "endpoint", endpoint,
                  "epoch", json_hex(info->epoch), "version", (json_int_t)info->version,
                  "weight_bytes", (json_int_t)info->weight_bytes, "frame_bytes",
                  (json_int_t)info->frame_bytes, "tensor_count", (int)info->tensors);
    (void)json_object_set_new(object, "digest",
                              info->sealed ? json_digest(info->digest) : json_null());
    (void)json_object_set_new(object, "density", json_null()); /* nor blocks: it is not told */
    (void)json_object_set_new(object, "manifest",
                              info->tensors > 0 ? json_digest(info->manifest) : json_null());
    return object;
}

void cli_inspect_print_table(cli_columns columns)
{
    static const char *const names[] = {
        [CLI_COLUMNS_BYTES] = "     size  digest            tensor",
        [CLI_COLUMNS_CHANGE] = " changed  same sparse dense  digest            tensor",
        [CLI_COLUMNS_CHANGES] = " changed   same  sparse   dense       size  tensor",
    };
    (void)puts(names[columns]);
}

static void print_shape(const refit_tensor *tensor)
{
    (void)printf("  %s [", refit_dtype_name(tensor->dtype));
    for (uint32_t i = 0; i < tensor->rank; i++)
        (void)printf("%s%" PRIu64, i == 0 ? "" : ", ", tensor->shape[i]);
    (void)putchar(']');
}

void cli_inspect_print_tensor(cli_columns columns, const refit_tensor *tensor,
                              const uint64_t *digest, const refit_tensor_change *change)
{
    char size[CLI_SIZE_TEXT], changed[SHARE_TEXT], text[17] = "-";
    (void)cli_size_text(tensor->bytes, size);
    if (digest != NULL) (void)snprintf(text, sizeof text, "%016" PRIx64, *digest);
    if (columns == CLI_COLUMNS_BYTES) {
        (void)printf("%9s  %-16s  %s", size, text, tensor->name);
        print_shape(tensor);
    } else if (columns == CLI_COLUMNS_CHANGE) {
        (void)printf("%8s %5u %6u %5u  %-16s  %s",
                     share_text(change->changed, change->elements, changed), change->blocks_same,
                     change->blocks_sparse, change->blocks_dense, text, tensor->name);
    } else {
        (void)printf("%8s %6u %7u %7u  %9s  %s",
                     share_text(change->changed, change->elements, changed), change->blocks_same,
                     change->blocks_sparse, change->blocks_dense, size, tensor->name);
    }
    (void)puts(tensor->alias_of == REFIT_NO_ALIAS ? "" : "  tied");
}

static void add_change(json_t *object, const refit_tensor_change *change)
{
    const bool known = change->changed != REFIT_CHANGED_UNKNOWN;
    (void)json_object_set_new(object, "elements", json_integer((json_int_t)change->elements));
    (void)json_object_set_new(object, "changed",
                              known ? json_integer((json_int_t)change->changed) : json_null());
    (void)json_object_set_new(object, "density",
                              known ? json_real(share(change->changed, change->elements))
                                    : json_null());
    (void)json_object_set_new(object, "blocks",
                              json_pack("{s:i, s:i, s:i}", "same", (int)change->blocks_same,
                                        "sparse", (int)change->blocks_sparse, "dense",
                                        (int)change->blocks_dense));
}

json_t *cli_inspect_json_tensor(const refit_tensor *tensor, const uint64_t *digest,
                                const refit_tensor_change *change)
{
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->rank; i++)
        (void)json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
    json_t *object = json_pack("{s:s, s:s, s:o, s:I, s:o}", "name", tensor->name, "dtype",
                               refit_dtype_name(tensor->dtype), "shape", shape, "bytes",
                               (json_int_t)tensor->bytes, "digest",
                               digest == NULL ? json_null() : json_hex(*digest));
    if (tensor->alias_of != REFIT_NO_ALIAS) {
        (void)json_object_set_new(object, "tied_to", json_integer(tensor->alias_of));
    }
    if (change != NULL) add_change(object, change);
    return object;
}

int cli_inspect_print_json(json_t *object)
{
    char *text = json_dumps(object, JSON_COMPACT);
    json_decref(object);
    if (text == NULL) return cli_complain(CLI_FAILED, "no memory for the JSON text");
    (void)puts(text);
    free(text);
    return CLI_DONE;
}
