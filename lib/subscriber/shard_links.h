/*
 * shard_links: a worker's links to the publishers that share the tensors, as SHARD names them.
 *
 * The list is of one manifest: each rank says which rows it publishes, and all of them together are
 * every tensor. A link lives as long as the list names its rank at its endpoint and the coordinator
 * is the same; with another manifest it stays, and its rows are to be told again. No socket, no
 * clock, no thread.
 */
#ifndef RFT_SHARD_LINKS_H
#define RFT_SHARD_LINKS_H

#include "subscriber/shard_link.h"

typedef struct rft_shard_links {
    rft_link_common common;
    rft_catalog *catalog;  /* acquired; that the rows are of; NULL: there is no manifest */
    rft_shard_link **list; /* owned; by rank; NULL: that rank was not told */
    uint32_t count;        /* of the ranks; 0: none was told */
    uint32_t told;         /* of them, those whose rows are known */
    uint64_t serial;       /* of the last link */
} rft_shard_links;

/* All is borrowed until close. */
void rft_shard_links_init(rft_shard_links *links, const refit_config *config,
                          const rft_limits *limits, const char *worker, uint64_t instance,
                          rft_fetch_counts *counts);
void rft_shard_links_close(rft_shard_links *links);

/* What WELCOME of the coordinator says. With another epoch all links end. */
void rft_shard_links_follow(rft_shard_links *links, uint64_t epoch, uint64_t frame_bytes);
/* The coordinator has sent a manifest: the rows are to be told again. NULL: it is none. */
void rft_shard_links_set_catalog(rft_shard_links *links, rft_catalog *catalog);
/* Takes a SHARD of the manifest; another one is passed over. REFIT_ERR_PROTOCOL: it contradicts
 * the manifest, or the list; REFIT_ERR_PEER: the rank is at another endpoint, and was to send
 * frames of the version under way; REFIT_ERR_HOST_MEMORY. */
refit_status rft_shard_links_put(rft_shard_links *links, const rft_message *shard, int64_t now,
                                 refit_error *error);
/* REFIT_ERR_PROTOCOL: not all of `ranks` were told, or their rows are not all of the tensors. */
refit_status rft_shard_links_check(const rft_shard_links *links, uint32_t ranks,
                                   refit_error *error);

/* One version, over all links: as the functions of one. REFIT_ERR_PEER: the list is of another
 * manifest meanwhile. */
refit_status rft_shard_links_begin(rft_shard_links *links, const rft_fetch_plan *plan,
                                   refit_error *error);
void rft_shard_links_pull(rft_shard_links *links, uint64_t base, rft_view have);
void rft_shard_links_end(rft_shard_links *links);
/* Whether all that is wanted of the frame, or of the version, is there. */
bool rft_shard_links_have(const rft_shard_links *links, uint32_t sequence);
bool rft_shard_links_are_complete(const rft_shard_links *links);
/* rft_reassembly_take_placed for each. */
void rft_shard_links_take_placed(rft_shard_links *links, uint32_t sequence,
                                 const unsigned char *image);

/* NULL: there is no link to that rank. */
rft_shard_link *rft_shard_links_find(const rft_shard_links *links, uint32_t rank);

/* Acts on the time, and reports the first failure. */
refit_status rft_shard_links_tick(rft_shard_links *links, int64_t now, refit_error *error);
int64_t rft_shard_links_tick_at(const rft_shard_links *links);

#endif
