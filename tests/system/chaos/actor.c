/* The allocator counts blocks; a leak of the library shows as blocks left after everything closed.
 */
#include "actor.h"

#include <dirent.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clocks.h"

static atomic_llong blocks;
static int log_line = -1;

static void *count_allocate(void *user, size_t bytes)
{
    (void)user;
    void *block = malloc(bytes);
    if (block != NULL) atomic_fetch_add(&blocks, 1);
    return block;
}

static void *count_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    void *moved = realloc(block, bytes);
    if (block == NULL && moved != NULL) atomic_fetch_add(&blocks, 1);
    return moved;
}

static void count_release(void *user, void *block)
{
    (void)user;
    if (block != NULL) atomic_fetch_sub(&blocks, 1);
    free(block);
}

static void send_log(void *user, refit_log_level level, const char *line)
{
    (void)user;
    chaos_note note = {.kind = NOTE_LOG, .status = (int32_t)level};
    snprintf(note.text, sizeof note.text, "%s", line);
    (void)note_send(log_line, &note);
}

void actor_prepare(const actor_part *part)
{
    static const refit_allocator counting = {sizeof counting, count_allocate, count_reallocate,
                                             count_release, NULL};
    if (refit_set_allocator(&counting) != REFIT_OK) abort();
    log_line = part->line;
    refit_set_log(send_log, NULL, REFIT_LOG_INFO);
}

static refit_status set_number(refit_config *config, const char *key, uint32_t number,
                               const char *unit, refit_error *error)
{
    char text[32];
    snprintf(text, sizeof text, "%u%s", number, unit);
    return refit_config_set(config, key, text, error);
}

refit_status actor_configure(const actor_part *part, bool shm, refit_config *config,
                             refit_error *error)
{
    const chaos_plan *plan = part->plan;
    const struct {
        const char *key;
        uint32_t number;
        const char *unit;
    } numbers[] = {
        {"broadcast.slots", plan->slots, ""},
        {"broadcast.frame_bytes", plan->frame_kib, "KiB"},
        {"broadcast.window", plan->window, ""},
        {"broadcast.heartbeat_ms", ACTOR_HEARTBEAT, "ms"},
        {"broadcast.heartbeat_timeout_ms", ACTOR_HEARTBEAT_TIMEOUT, "ms"},
        {"broadcast.stage_timeout_ms", ACTOR_STAGE_TIMEOUT, "ms"},
        {"broadcast.commit_timeout_ms", ACTOR_COMMIT_TIMEOUT, "ms"},
        {"broadcast.linger_ms", ACTOR_LINGER, "ms"},
        {"broadcast.quorum", plan->quorum, ""},
        {"broadcast.encode_threads", plan->encoders, ""},
        {"broadcast.gpu_bucket_bytes", plan->bucket_kib, "KiB"},
    };
    refit_config_init(config, sizeof *config);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        refit_status status =
            set_number(config, numbers[i].key, numbers[i].number, numbers[i].unit, error);
        if (status != REFIT_OK) return status;
    }
    const char *const texts[][2] = {
        {"broadcast.shm", shm ? "auto" : "off"},
        {"broadcast.delta", plan->delta},
        {"broadcast.compress", plan->zstd ? "zstd" : "none"},
        {"broadcast.commit", plan->quorum != 0 ? "quorum" : "all"},
        {"broadcast.wait", plan->late ? "staged" : "applied"},
        {"broadcast.verify", plan->verify_always ? "always" : "auto"},
        {"broadcast.gpu", plan->gpu_stores ? "store" : "auto"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        refit_status status = refit_config_set(config, texts[i][0], texts[i][1], error);
        if (status != REFIT_OK) return status;
    }
    return REFIT_OK;
}

/* ---- Resources */

#define PLANT_BLOCK ((size_t)64 << 10) /* less than malloc maps by itself */
#define PLANT_MOST  256

static uint32_t count_descriptors(void)
{
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL) return 0;
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

static void add_segment(resources *out, const char *line)
{
    out->segments += strstr(line, "/memfd:refit ") != NULL;
}

static void add_resident(resources *out, const char *line)
{
    if (strncmp(line, "RssAnon:", 8) == 0) out->resident = strtoull(line + 8, NULL, 10) * 1024;
}

static void read_lines(const char *path, void (*each)(resources *out, const char *line),
                       resources *out)
{
    char line[512];
    FILE *lines = fopen(path, "r");
    if (lines == NULL) return;
    while (fgets(line, sizeof line, lines) != NULL)
        each(out, line);
    fclose(lines);
}

/* malloc keeps what was freed, which depends on the order in which its neighbours are. */
static void count(const actor_part *part, bool (*is_steady)(const void *who), const void *who)
{
    chaos_note counted = {.kind = NOTE_COUNTED};
    bool steady = is_steady(who);
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
    counted.count.descriptors = count_descriptors();
    read_lines("/proc/self/maps", add_segment, &counted.count);
    read_lines("/proc/self/status", add_resident, &counted.count);
    counted.flags = steady && is_steady(who);
    (void)note_send(part->line, &counted);
}

/* The last block stays in use, so that malloc keeps those before it although they are free. */
static void plant(const chaos_note *order)
{
    static void *planted[PLANT_MOST];
    size_t blocks_planted = (size_t)order->amount / PLANT_BLOCK;
    if (blocks_planted > PLANT_MOST) blocks_planted = PLANT_MOST;
    for (size_t i = 0; i < blocks_planted; i++) {
        planted[i] = malloc(PLANT_BLOCK);
        if (planted[i] == NULL) abort();
        memset(planted[i], 1, PLANT_BLOCK);
    }
    for (size_t i = 0; order->fate == PLANT_FREED && i + 1 < blocks_planted; i++) {
        free(planted[i]);
        planted[i] = NULL;
    }
}

void actor_obey(const actor_part *part, const chaos_note *order, bool (*is_steady)(const void *who),
                const void *who)
{
    if (order->kind == NOTE_COUNT) count(part, is_steady, who);
    if (order->kind == NOTE_PLANT) plant(order);
}

void actor_leave(const actor_part *part)
{
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
    const chaos_note gone = {.kind = NOTE_GONE, .amount = (uint64_t)atomic_load(&blocks)};
    (void)note_send(part->line, &gone);
}
