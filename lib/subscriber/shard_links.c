/*
 * The list of links: who has which rows of the manifest.
 *
 * That the rows tile the tensors is checked by their number of bytes when a version is offered:
 * bytes that two ranks have, or none, show in the tensors' digests at the latest.
 */
#include "subscriber/shard_links.h"

#include <string.h>

#include "base/alloc.h"

/* ---- Opening and closing */

void rft_shard_links_init(rft_shard_links *links, const refit_config *config,
                          const rft_limits *limits, const char *worker, uint64_t instance,
                          rft_fetch_counts *counts)
{
    *links = (rft_shard_links){.common = {.config = config,
                                          .limits = limits,
                                          .worker = worker,
                                          .counts = counts,
                                          .instance = instance}};
}

void rft_shard_links_close(rft_shard_links *links)
{
    for (uint32_t i = 0; i < links->count; i++)
        rft_shard_link_close(links->list[i]);
    rft_free(links->list);
    links->list = NULL;
    links->count = 0;
    rft_shard_links_set_catalog(links, NULL);
}

void rft_shard_links_follow(rft_shard_links *links, uint64_t epoch, uint64_t frame_bytes)
{
    if (links->common.epoch != epoch) rft_shard_links_close(links);
    links->common.epoch = epoch;
    links->common.frame_bytes = frame_bytes;
}

rft_shard_link *rft_shard_links_find(const rft_shard_links *links, uint32_t rank)
{
    return rank < links->count ? links->list[rank] : NULL;
}

void rft_shard_links_set_catalog(rft_shard_links *links, rft_catalog *catalog)
{
    for (uint32_t i = 0; i < links->count; i++)
        if (links->list[i] != NULL) rft_shard_link_set_rows(links->list[i], NULL);
    links->told = 0;
    rft_catalog_release(links->catalog);
    links->catalog = catalog == NULL ? NULL : rft_catalog_acquire(catalog);
}

/* ---- The list */

/* Ends the link to a rank, if there is one. `lost`: the version under way was to have frames from
 * there. */
static void leave(rft_shard_links *links, uint32_t rank, const char *why, int64_t now,
                  refit_error *lost)
{
    rft_shard_link *link = links->list[rank];
    if (link == NULL) return;
    (void)rft_shard_link_lose(link, why, now, lost);
    links->told -= link->rows != NULL;
    rft_shard_link_close(link);
    links->list[rank] = NULL;
}

/* With the first SHARD of a manifest there may be another number of ranks. */
static refit_status set_count(rft_shard_links *links, uint32_t ranks, int64_t now,
                              refit_error *lost, refit_error *error)
{
    RFT_REFUSE_IF(links->told > 0 && ranks != links->count, error, REFIT_ERR_PROTOCOL,
                  "one of %u ranks is told among %u", ranks, links->count);
    if (ranks == links->count) return REFIT_OK;
    rft_shard_link **list = rft_calloc(ranks, sizeof(rft_shard_link *));
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u ranks", ranks);
    for (uint32_t i = ranks; i < links->count; i++)
        leave(links, i, "there are fewer ranks from now on", now, lost);
    for (uint32_t i = 0; i < ranks && i < links->count; i++)
        list[i] = links->list[i];
    rft_free(links->list);
    links->list = list;
    links->count = ranks;
    return REFIT_OK;
}

static bool is_at(const rft_shard_link *link, rft_view endpoint)
{
    return strlen(link->endpoint) == endpoint.count &&
           (endpoint.count == 0 || memcmp(link->endpoint, endpoint.data, endpoint.count) == 0);
}

/* Takes the rows. A rank at another endpoint has another link. */
static refit_status put_rows(rft_shard_links *links, const rft_message *shard, rft_want *rows,
                             int64_t now, refit_error *lost, refit_error *error)
{
    uint32_t rank = shard->as.shard.rank;
    rft_shard_link **place = &links->list[rank];
    if (*place != NULL && !is_at(*place, shard->as.shard.endpoint))
        leave(links, rank, "it is at another endpoint from now on", now, lost);
    if (*place == NULL) {
        RFT_TRY(
            rft_shard_link_open(&links->common, shard, ++links->serial, rows, now, place, error));
        links->told++;
        return REFIT_OK;
    }
    links->told += (*place)->rows == NULL;
    rft_shard_link_set_rows(*place, rows);
    return REFIT_OK;
}

static refit_status check_shard(const rft_message *shard, refit_error *error)
{
    RFT_REFUSE_IF(shard->as.shard.rank >= shard->as.shard.ranks, error, REFIT_ERR_PROTOCOL,
                  "rank %u of %u ranks is told", shard->as.shard.rank, shard->as.shard.ranks);
    RFT_REFUSE_IF(shard->as.shard.endpoint.count >= RFT_ENDPOINT_BYTES, error, REFIT_ERR_PROTOCOL,
                  "an endpoint of more than %d bytes is told", RFT_ENDPOINT_BYTES - 1);
    return REFIT_OK;
}

refit_status rft_shard_links_put(rft_shard_links *links, const rft_message *shard, int64_t now,
                                 refit_error *error)
{
    rft_want *rows = NULL;
    bool known = links->catalog != NULL &&
                 rft_digest128_equal(&links->catalog->manifest->digest, &shard->as.shard.manifest);
    if (!known) return REFIT_OK;
    RFT_TRY(check_shard(shard, error));
    RFT_TRY(rft_want_open(links->catalog->manifest, shard->as.shard.rows, &rows, error));
    refit_error lost = {.status = REFIT_OK};
    refit_status status = set_count(links, shard->as.shard.ranks, now, &lost, error);
    if (status == REFIT_OK) status = put_rows(links, shard, rows, now, &lost, error);
    if (status != REFIT_OK) {
        rft_want_release(rows);
        return status;
    }
    return lost.status == REFIT_OK ? REFIT_OK
                                   : rft_fail(error, (refit_status)lost.status, "%s", lost.text);
}

static uint64_t count_bytes(const rft_manifest *manifest)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < manifest->count; i++)
        if (manifest->tensors[i].alias_of == REFIT_NO_ALIAS) bytes += manifest->tensors[i].bytes;
    return bytes;
}

refit_status rft_shard_links_check(const rft_shard_links *links, uint32_t ranks, refit_error *error)
{
    uint64_t bytes = 0;
    bool all = links->catalog != NULL && links->count == ranks && links->told == ranks;
    RFT_REFUSE_IF(!all, error, REFIT_ERR_PROTOCOL,
                  "a version of %u ranks is offered, and what %u of them publish is told", ranks,
                  links->told);
    for (uint32_t i = 0; i < ranks; i++)
        bytes += links->list[i]->rows->bytes;
    uint64_t tensors = count_bytes(links->catalog->manifest);
    RFT_REFUSE_IF(bytes != tensors, error, REFIT_ERR_PROTOCOL,
                  "%u ranks publish %llu bytes of tensors that have %llu", ranks,
                  (unsigned long long)bytes, (unsigned long long)tensors);
    return REFIT_OK;
}

/* ---- One version */

refit_status rft_shard_links_begin(rft_shard_links *links, const rft_fetch_plan *plan,
                                   refit_error *error)
{
    bool known = links->catalog == plan->catalog && links->told == links->count;
    RFT_REFUSE_IF(!known, error, REFIT_ERR_PEER,
                  "the ranks publish another manifest since version %llu was offered",
                  (unsigned long long)plan->version);
    for (uint32_t i = 0; i < links->count; i++)
        RFT_TRY(rft_shard_link_begin(links->list[i], plan, error));
    return REFIT_OK;
}

void rft_shard_links_pull(rft_shard_links *links, uint64_t base, rft_view have)
{
    for (uint32_t i = 0; i < links->count; i++)
        rft_shard_link_pull(links->list[i], base, have);
}

void rft_shard_links_end(rft_shard_links *links)
{
    for (uint32_t i = 0; i < links->count; i++)
        if (links->list[i] != NULL) rft_shard_link_end(links->list[i]);
}

bool rft_shard_links_have(const rft_shard_links *links, uint32_t sequence)
{
    for (uint32_t i = 0; i < links->count; i++) {
        const rft_shard_link *link = links->list[i];
        bool lacks =
            rft_shard_link_lacks(link) && !rft_reassembly_has(link->fetch.reassembly, sequence);
        if (lacks) return false;
    }
    return true;
}

bool rft_shard_links_are_complete(const rft_shard_links *links)
{
    for (uint32_t i = 0; i < links->count; i++)
        if (rft_shard_link_lacks(links->list[i])) return false;
    return true;
}

void rft_shard_links_take_placed(rft_shard_links *links, uint32_t sequence,
                                 const unsigned char *image)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (rft_shard_link_is_fetching(links->list[i]))
            rft_reassembly_take_placed(links->list[i]->fetch.reassembly, sequence, image);
    }
}

/* ---- Time */

refit_status rft_shard_links_tick(rft_shard_links *links, int64_t now, refit_error *error)
{
    refit_error why = {.status = REFIT_OK}, next;
    for (uint32_t i = 0; i < links->count; i++) {
        if (links->list[i] == NULL) continue;
        refit_status status = rft_shard_link_tick(links->list[i], now, &next);
        if (status != REFIT_OK && why.status == REFIT_OK) why = next;
    }
    return why.status == REFIT_OK ? REFIT_OK
                                  : rft_fail(error, (refit_status)why.status, "%s", why.text);
}

int64_t rft_shard_links_tick_at(const rft_shard_links *links)
{
    int64_t at = INT64_MAX;
    for (uint32_t i = 0; i < links->count; i++) {
        if (links->list[i] == NULL) continue;
        int64_t next = rft_shard_link_tick_at(links->list[i]);
        if (next < at) at = next;
    }
    return at;
}
