/*
 * Following an archive: the folder is looked into every broadcast.heartbeat_ms, for other machines
 * write to it and no system tells of that. The newest version that can be had is put together and
 * delivered; those between are passed over.
 *
 *     look ─► which files ─► frame, frame, … ─► digested ─► waits ─► mailbox ─► the user decides
 *      ▲                              │                       │
 *      └──────────────────────────────┴── a file at fault     └── until the one before is decided
 *
 * A tick does one part of that, so decisions and the end of the subscriber wait for one frame at
 * most. It ends what it has begun before it looks again.
 *
 * A version is put together in an image of its own: from the newest that was, if the files since
 * build on it, or else from its anchor. While the user has one image and the other has a version
 * that the user has not taken, the newer one is put together in place of that.
 *
 * Only what the digests confirm is delivered. A file that cannot be used is named in the log once.
 * If it is damaged, it is passed over until it has changed; what is not there or cannot be read may
 * be had the next time. Meanwhile the newest version before it is taken.
 */
#include "subscriber/follower.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"

#define SCHEME     "archive://"
#define PATH_ROOM  4096u
#define GONE_BEATS 3 /* of broadcast.heartbeat_ms, until what is gone counts as replaced */

/* ---- Opening and closing */

const char *rft_follower_folder(const char *endpoint)
{
    const size_t length = sizeof SCHEME - 1;
    return strncmp(endpoint, SCHEME, length) == 0 ? endpoint + length : NULL;
}

/* The process may change its directory later. */
static refit_status make_absolute(const char *folder, char **out, refit_error *error)
{
    char here[PATH_ROOM] = "";
    RFT_REFUSE_IF(folder[0] == '\0', error, REFIT_ERR_INVALID,
                  "the endpoint names no folder after " SCHEME);
    if (folder[0] != '/' && getcwd(here, sizeof here) == NULL)
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno,
                            "cannot find out the directory that %.120s is in: %s", folder,
                            strerror(errno));
    const size_t room = strlen(here) + strlen(folder) + 2;
    *out = rft_calloc(room, 1);
    RFT_REFUSE_IF(*out == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a path");
    (void)snprintf(*out, room, "%s%s%s", here, here[0] == '\0' ? "" : "/", folder);
    return REFIT_OK;
}

static refit_status check_config(const refit_config *config, refit_error *error)
{
    const char *option = NULL;
    if (config->broadcast_shm == REFIT_SHM_REQUIRE) option = "broadcast.shm";
    if (config->broadcast_gpu == REFIT_GPU_REQUIRE) option = "broadcast.gpu";
    RFT_REFUSE_IF(option != NULL, error, REFIT_ERR_CONFIG,
                  "%s is require, and the versions of an archive are read from its files", option);
    return REFIT_OK;
}

refit_status rft_follower_open(rft_follower *follower, const char *folder,
                               const refit_config *config, const char *worker, rft_mailbox *mailbox,
                               int64_t now, refit_error *error)
{
    *follower = (rft_follower){
        .config = config,
        .mailbox = mailbox,
        .worker = worker,
        .limits = rft_limits_from(config),
        .next_look = now,
        .heard = now,
    };
    follower->limits.memory_bytes = rft_images_room();
    RFT_TRY(check_config(config, error));
    RFT_TRY(make_absolute(folder, &follower->folder, error));
    mailbox->endpoint = follower->folder;
    mailbox->archive = true;
    return REFIT_OK;
}

/* The version under way; its image is free again. */
static void drop_version(rft_follower *follower)
{
    rft_archive_chain_close(&follower->chain);
    rft_catalog_release(follower->catalog);
    rft_image_drop_use(follower->image, RFT_IMAGE_STAGED);
    follower->catalog = NULL;
    follower->image = NULL;
}

static void end_look(rft_follower *follower)
{
    drop_version(follower);
    refit_archive_close(follower->archive);
    follower->archive = NULL;
}

/* ---- Images */

static void hold(rft_follower *follower, rft_image *image)
{
    if (image != NULL) rft_image_add_use(image, RFT_IMAGE_BASE);
    rft_image_drop_use(follower->newest, RFT_IMAGE_BASE);
    follower->newest = image;
    follower->waits = image != NULL;
}

/* The version in the mailbox leaves it, if the user has not taken it. */
static bool withdraw(rft_follower *follower)
{
    if (follower->applying == NULL || !rft_mailbox_withdraw(follower->mailbox)) return false;
    rft_image_drop_use(follower->applying, RFT_IMAGE_LENT);
    follower->applying = NULL;
    return true;
}

/* Whether the newest version is not, or no longer, on its way to the user. Both images are in use:
 * so it is not the one that the user has decided on, for then the other would be free. */
static bool take_back(rft_follower *follower)
{
    if (follower->newest == NULL) return false;
    return follower->newest != follower->applying || withdraw(follower);
}

/* An image of the version's own, or that of a version that the user has not taken. What is found in
 * the latter is still that version, which the frames may build on. Memory of other tensors is given
 * back first. */
static refit_status take_image(rft_follower *follower, bool careful, refit_error *error)
{
    rft_images *images = &follower->images;
    rft_catalog *catalog = follower->catalog;
    const rft_image *newest = follower->newest;
    bool other =
        newest != NULL && newest->catalog->manifest->store_bytes != catalog->manifest->store_bytes;
    if (other && !careful && newest != follower->applying && newest != follower->open)
        hold(follower, NULL);
    if (other) rft_images_trim_private(images);
    refit_status status = rft_images_take_private(images, catalog, NULL, &follower->image, error);
    if (status != REFIT_ERR_BUSY || careful || !take_back(follower)) return status;
    hold(follower, NULL);
    return rft_images_take_private(images, catalog, NULL, &follower->image, error);
}

/* ---- Files at fault */

static rft_follower_fault describe(const rft_follower *follower, const rft_archive_entry *entry)
{
    struct stat found = {0};
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(entry, name);
    if (fstatat(follower->archive->folder.dir, name, &found, 0) != 0) found = (struct stat){0};
    return (rft_follower_fault){
        .entry = *entry,
        .inode = (uint64_t)found.st_ino,
        .bytes = (int64_t)found.st_size,
        .seconds = (int64_t)found.st_mtim.tv_sec,
        .nanoseconds = (int64_t)found.st_mtim.tv_nsec,
    };
}

/* The place of the note about the file, or where one would be put. */
static uint32_t find_place(const rft_follower *follower, const rft_archive_entry *entry)
{
    uint32_t low = 0, high = follower->fault_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (rft_archive_entry_compare(&follower->faults[middle]->entry, entry) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool has_note(const rft_follower *follower, uint32_t place, const rft_archive_entry *entry)
{
    return place < follower->fault_count &&
           rft_archive_entry_compare(&follower->faults[place]->entry, entry) == 0;
}

/* The fault that is known of the file as it is now, or NULL. */
static const rft_follower_fault *find_fault(const rft_follower *follower,
                                            const rft_archive_entry *entry)
{
    const uint32_t place = find_place(follower, entry);
    if (!has_note(follower, place, entry)) return NULL;
    const rft_follower_fault *fault = follower->faults[place];
    const rft_follower_fault now = describe(follower, entry);
    bool same = fault->inode == now.inode && fault->bytes == now.bytes &&
                fault->seconds == now.seconds && fault->nanoseconds == now.nanoseconds;
    return same ? fault : NULL;
}

static bool make_room(rft_follower *follower)
{
    if (follower->fault_count < follower->fault_room) return true;
    const uint32_t room = follower->fault_room == 0 ? 16 : follower->fault_room * 2;
    void *more = rft_realloc(follower->faults, room, sizeof(rft_follower_fault *));
    if (more == NULL) return false;
    follower->faults = more;
    follower->fault_room = room;
    return true;
}

/* In the place of an earlier note about the file. Without memory for it, the file is tried and
 * named again the next time. */
static void keep_fault(rft_follower *follower, const rft_follower_fault *fault)
{
    const uint32_t place = find_place(follower, &fault->entry);
    if (!has_note(follower, place, &fault->entry)) {
        rft_follower_fault *made = make_room(follower) ? rft_calloc(1, sizeof *made) : NULL;
        if (made == NULL) return;
        rft_follower_fault **at = &follower->faults[place];
        memmove(at + 1, at, (follower->fault_count++ - place) * sizeof(rft_follower_fault *));
        *at = made;
    }
    *follower->faults[place] = *fault;
}

/* `folder`: only of files that it no longer lists; NULL: all. */
static void forget_faults(rft_follower *follower, const rft_archive_folder *folder)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < follower->fault_count; i++) {
        rft_follower_fault *fault = follower->faults[i];
        const rft_archive_entry *entry = &fault->entry;
        if (folder != NULL &&
            rft_archive_folder_at(folder, entry->run, entry->version, entry->epoch) != NULL)
            follower->faults[kept++] = fault;
        else
            rft_free(fault);
    }
    follower->fault_count = kept;
}

static bool is_damage(refit_status status)
{
    return status == REFIT_ERR_CORRUPT || status == REFIT_ERR_UNSUPPORTED ||
           status == REFIT_ERR_LIMIT;
}

/* That of the newest file is what the user is told. */
static void say_fault(rft_follower *follower, const rft_follower_fault *fault)
{
    char *refusal = follower->report.refusal;
    if (refusal[0] == '\0') strcpy(refusal, fault->why);
}

static void note_fault(rft_follower *follower, const rft_archive_entry *entry,
                       const refit_error *why)
{
    const bool known = find_fault(follower, entry) != NULL;
    rft_follower_fault fault = describe(follower, entry);
    fault.damaged = is_damage((refit_status)why->status);
    rft_text_say(fault.why, sizeof fault.why, "%s: %s", follower->folder, why->text);
    follower->report.aborted += known ? 0 : 1;
    rft_log(known ? REFIT_LOG_DEBUG : REFIT_LOG_WARNING,
            "worker %s cannot use a file of its archive: %s", follower->worker, fault.why);
    say_fault(follower, &fault);
    keep_fault(follower, &fault);
}

void rft_follower_close(rft_follower *follower)
{
    end_look(follower);
    rft_images_close(&follower->images);
    forget_faults(follower, NULL);
    rft_free(follower->faults);
    rft_free(follower->folder);
    follower->faults = NULL;
    follower->folder = NULL;
}

/* ---- Which version */

/* The newest version that the user has or gets, and its run. */
static rft_version_id reached(const rft_follower *follower, uint32_t *run)
{
    const rft_image *image = follower->newest != NULL ? follower->newest : follower->applying;
    *run = image != NULL ? image->run : follower->before_run;
    return image != NULL ? image->id : follower->before;
}

/* Whether the archive has nothing of the trainer of the version that was reached, and nothing of a
 * later one either. */
static bool is_gone(const rft_follower *follower)
{
    uint32_t run;
    const rft_version_id at = reached(follower, &run);
    const rft_archive_folder *folder = &follower->archive->folder;
    if (at.version == 0 || folder->count == 0) return false;
    if (folder->entries[folder->count - 1].run > run) return false;
    for (uint32_t i = 0; i < folder->count; i++) {
        if (folder->entries[i].epoch == at.epoch) return false;
    }
    return true;
}

/* Whether the archive came to have the version after the one that was reached. If it has nothing of
 * that one's trainer any more, another archive may have taken its place, which counts runs from 1,
 * too. That is believed once it has lasted: a folder may lack a file for a moment. */
static bool is_newer(const rft_follower *follower, const rft_archive_entry *entry, int64_t now)
{
    uint32_t run;
    const rft_version_id at = reached(follower, &run);
    const int64_t beat = rft_after_ms(0, follower->config->broadcast_heartbeat_ms);
    if (at.version == 0) return true;
    if (entry->epoch == at.epoch) return entry->version > at.version;
    return entry->run > run || (follower->gone != 0 && now - follower->gone >= GONE_BEATS * beat);
}

/* What a version may build on. */
static const rft_archive_base *find_base(const rft_follower *follower, rft_archive_base *out)
{
    const rft_image *newest = follower->newest;
    if (newest == NULL) return NULL;
    *out = (rft_archive_base){newest->id, newest->catalog->manifest, newest->bytes};
    return out;
}

/* Whether one of the files from `first` to `last` is known to be damaged: `*damaged`. `*suspect`:
 * one of them could not be used before, for whatever reason. */
static bool has_damage(rft_follower *follower, const rft_archive_entry *first,
                       const rft_archive_entry *last, const rft_archive_entry **damaged,
                       bool *suspect)
{
    const rft_archive_entry *entries = follower->archive->folder.entries;
    const uint32_t from = (uint32_t)(first - entries);
    *suspect = false;
    for (uint32_t i = (uint32_t)(last - entries) + 1; i-- > from;) {
        const rft_archive_entry *entry = &entries[i];
        const rft_follower_fault *fault = find_fault(follower, entry);
        if (entry->epoch != last->epoch || fault == NULL) continue;
        *suspect = true;
        if (!fault->damaged) continue;
        *damaged = entry;
        say_fault(follower, fault);
        return true;
    }
    return false;
}

/* Begins to put the version of `last` together. REFIT_ERR_BUSY: there is no image for it. `*fault`:
 * the file that a failure is about; NULL: it is about none, or was told before. */
static refit_status begin(rft_follower *follower, const rft_archive_entry *last,
                          const rft_archive_entry **fault, refit_error *error)
{
    rft_archive_base base;
    const rft_archive_base *on = find_base(follower, &base);
    bool careful;
    if (has_damage(follower, last, last, fault, &careful)) return REFIT_ERR_CORRUPT;
    RFT_TRY(rft_archive_chain_first(follower->archive, last, on, fault, error));
    const rft_archive_entry *first = *fault;
    if (has_damage(follower, first, last, fault, &careful)) return REFIT_ERR_CORRUPT;
    refit_status status =
        rft_archive_chain_open(&follower->chain, follower->archive, first, last, on, error);
    *fault = follower->chain.entry;
    RFT_TRY(status);
    rft_manifest *manifest = rft_archive_chain_take_manifest(&follower->chain);
    if (manifest == NULL)
        follower->catalog = rft_catalog_acquire(follower->newest->catalog);
    else
        RFT_TRY(rft_catalog_open(manifest, &follower->catalog, error));
    follower->based = follower->chain.reader.header.base != 0;
    return take_image(follower, careful, error);
}

/* Begins with the newest of the files up to `count` that can be used. False: there is none. */
static bool choose(rft_follower *follower, uint32_t count, int64_t now)
{
    refit_error why = {0};
    const rft_archive_entry *entries = follower->archive->folder.entries;
    while (count > 0 && is_newer(follower, &entries[count - 1], now)) {
        const rft_archive_entry *fault = NULL;
        why.status = REFIT_OK;
        refit_status status = begin(follower, &entries[count - 1], &fault, &why);
        if (status == REFIT_OK) {
            follower->began = now;
            follower->report.state = RFT_SESSION_STAGING;
            return true;
        }
        drop_version(follower);
        if (status == REFIT_ERR_BUSY) return false;
        if (why.status != REFIT_OK) note_fault(follower, fault, &why);
        if (status == REFIT_ERR_HOST_MEMORY || status == REFIT_ERR_SYSTEM) return false;
        count = (uint32_t)(fault - entries);
    }
    return false;
}

/* ---- Looking into the folder */

static rft_session_state rest(const rft_follower *follower)
{
    if (follower->waits) return RFT_SESSION_STAGED;
    return follower->applying != NULL ? RFT_SESSION_APPLYING : RFT_SESSION_CURRENT;
}

static void look_at(rft_follower *follower, int64_t when)
{
    follower->next_look = when > follower->pause ? when : follower->pause;
}

static int64_t next_beat(const rft_follower *follower, int64_t now)
{
    return rft_after_ms(now, follower->config->broadcast_heartbeat_ms);
}

/* No look before that, whatever the user decides meanwhile. */
static void pause_until(rft_follower *follower, int64_t end)
{
    if (end > follower->pause) follower->pause = end;
    look_at(follower, end);
}

static void miss_folder(rft_follower *follower, const refit_error *why, int64_t now)
{
    char *refusal = follower->report.refusal;
    const uint32_t idle_ms = follower->config->broadcast_idle_timeout_ms;
    if (follower->report.state != RFT_SESSION_CONNECTING || strcmp(refusal, why->text) != 0) {
        rft_log(REFIT_LOG_WARNING, "worker %s waits for its archive: %s", follower->worker,
                why->text);
    }
    rft_text_say(refusal, sizeof follower->report.refusal, "%s", why->text);
    follower->report.state = RFT_SESSION_CONNECTING;
    follower->report.path = REFIT_PATH_NONE;
    if (idle_ms == 0 || now < rft_after_ms(follower->heard, idle_ms)) return;
    (void)rft_fail(&follower->report.final, REFIT_ERR_CLOSED,
                   "no archive could be read for %u ms (broadcast.idle_timeout_ms): %s", idle_ms,
                   why->text);
}

static void look(rft_follower *follower, int64_t now)
{
    refit_error why;
    look_at(follower, next_beat(follower, now));
    if (refit_archive_open(follower->folder, REFIT_ARCHIVE_READ, follower->config,
                           &follower->archive, &why) != REFIT_OK) {
        miss_folder(follower, &why, now);
        return;
    }
    forget_faults(follower, &follower->archive->folder);
    follower->archive->limits = follower->limits;
    follower->heard = now;
    follower->report.refusal[0] = '\0';
    follower->report.path = REFIT_PATH_ARCHIVE;
    follower->report.state = rest(follower);
    if (!is_gone(follower))
        follower->gone = 0;
    else if (follower->gone == 0)
        follower->gone = now;
    if (!choose(follower, follower->archive->folder.count, now)) end_look(follower);
}

/* ---- One version */

static void finish(rft_follower *follower, int64_t now)
{
    rft_image *image = follower->image;
    const rft_archive_header *header = &follower->chain.reader.header;
    image->id = (rft_version_id){header->epoch, header->version, header->digest};
    image->run = follower->chain.last->run;
    follower->report.epoch = header->epoch;
    follower->report.stage_seconds = rft_seconds(now - follower->began);
    hold(follower, image);
    end_look(follower);
    follower->report.state = rest(follower);
}

/* Bytes in memory that files do not fit to are not built on again: the user may have written there.
 * Then the anchor tells whether a file is at fault. */
static bool suspects_base(const rft_follower *follower, refit_status status)
{
    bool differs =
        status == REFIT_ERR_STALE || (status == REFIT_ERR_CORRUPT && follower->chain.framed);
    return differs && follower->based;
}

/* The next older version is tried. No file is read again before as much time has passed as it
 * took. */
static void fail(rft_follower *follower, const refit_error *why, int64_t now)
{
    const rft_archive_entry *fault = follower->chain.entry;
    const int64_t beat = next_beat(follower, now);
    const int64_t took = now - follower->began;
    uint32_t count = (uint32_t)(fault - follower->archive->folder.entries);
    if (suspects_base(follower, (refit_status)why->status)) {
        count = follower->archive->folder.count;
        if (follower->newest != NULL) hold(follower, NULL);
    } else {
        note_fault(follower, fault, why);
    }
    drop_version(follower);
    follower->report.state = rest(follower);
    pause_until(follower, now + took > beat ? now + took : beat);
    if (!choose(follower, count, now)) end_look(follower);
}

static void step(rft_follower *follower)
{
    refit_error why;
    bool done;
    const uint64_t before = follower->chain.bytes_read;
    refit_status status =
        rft_archive_chain_step(&follower->chain, rft_image_writable(follower->image), &done, &why);
    const int64_t now = rft_now();
    follower->report.bytes_received += follower->chain.bytes_read - before;
    if (status != REFIT_OK) {
        fail(follower, &why, now);
        return;
    }
    follower->heard = now;
    if (done) finish(follower, now);
}

/* In the place of one that the user has not taken. */
static void deliver(rft_follower *follower)
{
    rft_image *before = follower->applying, *image = follower->newest;
    rft_session_state state = follower->report.state;
    rft_image_add_use(image, RFT_IMAGE_LENT);
    follower->report.state = RFT_SESSION_APPLYING;
    if (before == NULL) {
        rft_mailbox_deliver(follower->mailbox, image, &follower->report);
    } else if (!rft_mailbox_replace(follower->mailbox, image, &follower->report)) {
        follower->report.state = state;
        rft_image_drop_use(image, RFT_IMAGE_LENT);
        return;
    }
    rft_image_drop_use(before, RFT_IMAGE_LENT);
    follower->applying = image;
    follower->waits = false;
}

/* ---- Time */

void rft_follower_tick(rft_follower *follower, int64_t now)
{
    if (follower->report.final.status != REFIT_OK) return;
    if (follower->archive != NULL)
        step(follower);
    else if (now >= follower->next_look)
        look(follower, now);
    if (follower->waits) deliver(follower);
}

int64_t rft_follower_tick_at(const rft_follower *follower)
{
    if (follower->report.final.status != REFIT_OK) return INT64_MAX;
    return follower->archive != NULL ? 0 : follower->next_look;
}

/* ---- The user */

/* The update stays open; what waits may follow it, and an image may be free now. */
static void end_decision(rft_follower *follower, int64_t now)
{
    follower->open = follower->applying;
    follower->applying = NULL;
    if (follower->report.state == RFT_SESSION_APPLYING) follower->report.state = rest(follower);
    look_at(follower, now);
}

static void set_before(rft_follower *follower, const rft_image *image)
{
    follower->before = image->id;
    follower->before_run = image->run;
}

static void accept(rft_follower *follower, int64_t now)
{
    set_before(follower, follower->applying);
    follower->report.version = follower->applying->id.version;
    follower->report.applied++;
    end_decision(follower, now);
}

/* What was refused and not kept is offered once more, read anew. */
static void refuse(rft_follower *follower, const rft_order *order, int64_t now)
{
    rft_image *image = follower->applying;
    rft_log(REFIT_LOG_WARNING, "worker %s refused version %" PRIu64 ": %s", follower->worker,
            image->id.version, order->reason);
    if (order->kept) {
        set_before(follower, image);
    } else {
        follower->before = (rft_version_id){0};
        follower->report.version = 0;
        if (follower->newest == image) hold(follower, NULL);
    }
    end_decision(follower, now);
    if (!order->kept) pause_until(follower, next_beat(follower, now));
}

static void release(rft_follower *follower, int64_t now)
{
    rft_image_drop_use(follower->open, RFT_IMAGE_LENT);
    follower->open = NULL;
    if (follower->next_look > now) look_at(follower, now);
}

void rft_follower_obey(rft_follower *follower, int64_t now)
{
    rft_order order;
    while (rft_mailbox_next_order(follower->mailbox, &order)) {
        if (order.kind == RFT_ORDER_RELEASE)
            release(follower, now);
        else if (follower->applying == NULL)
            continue;
        else if (order.kind == RFT_ORDER_REFUSE)
            refuse(follower, &order, now);
        else
            accept(follower, now);
    }
}

/* ---- The thread */

static void wait_for_something(const rft_follower *follower)
{
    struct pollfd item = {.fd = follower->mailbox->wake_fd, .events = POLLIN};
    (void)poll(&item, 1, rft_ms_until(rft_follower_tick_at(follower)));
    rft_wake_fd_clear(follower->mailbox->wake_fd);
}

void *rft_follower_run(void *user)
{
    rft_follower *follower = user;
    do {
        wait_for_something(follower);
        rft_follower_obey(follower, rft_now());
        rft_follower_tick(follower, rft_now());
    } while (rft_mailbox_publish(follower->mailbox, &follower->report));
    return NULL;
}
