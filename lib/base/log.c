/*
 * The log function, and the rings that keep lines until their readers take them. One lock makes
 * replacing the function safe: once refit_set_log has returned, the old one is not running. The log
 * is process-wide, like stderr, which it replaces.
 *
 * A fork while another thread logs would leave the child with a lock that no thread releases: the
 * child gets a new lock. Its rings are emptied, because their lines are the parent's to report.
 * Each change of a ring and of their list takes effect with one store, so that a fork finds them
 * whole.
 */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#include <pthread.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/text.h"
#include "base/thread.h"

#define LINE_ROOM 400

typedef struct ring_line {
    refit_log_level level;
    char text[LINE_ROOM];
} ring_line;

struct refit_log_ring {
    refit_log_ring *next;
    int most;        /* the most verbose level that it hears */
    uint32_t room;   /* lines */
    uint64_t put;    /* lines that came in, ever */
    uint64_t taken;  /* of those, out again */
    uint64_t missed; /* that found it full, since the last question */
    uint64_t count;  /* all that came; its readers hold no lock */
    ring_line lines[];
};

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static refit_log_fn sink; /* guarded by guard, like what follows, rings and all */
static void *sink_user;
static int sink_most = -1; /* -1: there is no function */
static refit_log_ring *rings;
static atomic_int loudest =
    -1; /* the most verbose level that the function or a ring takes; -1: none */

/* In the child of a fork, which has no other thread yet. */
static void renew_guard(void)
{
    static const rft_mutex unlocked = PTHREAD_MUTEX_INITIALIZER;
    guard = unlocked;
    for (refit_log_ring *ring = rings; ring != NULL; ring = ring->next) {
        ring->taken = ring->put;
        ring->missed = 0;
    }
}

/* If there is no memory for the handler, a child may still find the lock held. */
static void prepare_for_forks(void)
{
    static atomic_bool prepared;
    if (!atomic_exchange(&prepared, true)) (void)pthread_atfork(NULL, NULL, renew_guard);
}

/* The lock held. */
static void measure_loudest(void)
{
    int most = sink_most;
    for (const refit_log_ring *ring = rings; ring != NULL; ring = ring->next) {
        if (ring->most > most) most = ring->most;
    }
    atomic_store(&loudest, most);
}

void refit_set_log(refit_log_fn function, void *user, refit_log_level most)
{
    prepare_for_forks();
    rft_lock(&guard);
    sink_most = -1; /* a child that is forked meanwhile does not call it */
    sink = function;
    sink_user = user;
    sink_most = function == NULL ? -1 : (int)most;
    measure_loudest();
    rft_unlock(&guard);
}

/* ---- Rings -------------------------------------------------------------------------------- */

refit_status refit_log_ring_open(uint32_t lines, refit_log_level most, refit_log_ring **out,
                                 refit_error *error)
{
    RFT_REFUSE_IF(lines == 0, error, REFIT_ERR_INVALID, "a log ring needs room for a line");
    prepare_for_forks();
    refit_log_ring *ring = rft_calloc(1, sizeof *ring + (size_t)lines * sizeof *ring->lines);
    RFT_REFUSE_IF(ring == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for %u lines of log",
                  lines);
    ring->room = lines;
    ring->most = (int)most;
    rft_lock(&guard);
    ring->next = rings;
    rings = ring;
    measure_loudest();
    rft_unlock(&guard);
    *out = ring;
    return REFIT_OK;
}

void refit_log_ring_close(refit_log_ring *ring)
{
    if (ring == NULL) return;
    rft_lock(&guard);
    refit_log_ring **link = &rings;
    while (*link != ring)
        link = &(*link)->next;
    *link = ring->next;
    measure_loudest();
    rft_unlock(&guard);
    rft_free(ring);
}

void refit_log_ring_set_level(refit_log_ring *ring, refit_log_level most)
{
    rft_lock(&guard);
    ring->most = (int)most;
    measure_loudest();
    rft_unlock(&guard);
}

const uint64_t *refit_log_ring_count(const refit_log_ring *ring)
{
    return &ring->count;
}

refit_status refit_log_ring_read(refit_log_ring *ring, refit_log_level *level, char *line,
                                 size_t room, refit_error *error)
{
    RFT_REFUSE_IF(room == 0, error, REFIT_ERR_INVALID, "there is no room for a line of the log");
    rft_lock(&guard);
    bool found = ring->taken < ring->put;
    if (found) {
        const ring_line *oldest = &ring->lines[ring->taken % ring->room];
        *level = oldest->level;
        rft_text_fit(oldest->text, strlen(oldest->text), line, room);
        ring->taken++;
    }
    rft_unlock(&guard);
    RFT_REFUSE_IF(!found, error, REFIT_ERR_NOT_FOUND, "no line of the log is left to read");
    return REFIT_OK;
}

uint64_t refit_log_ring_lost(refit_log_ring *ring)
{
    rft_lock(&guard);
    uint64_t missed = ring->missed;
    ring->missed = 0;
    rft_unlock(&guard);
    return missed;
}

/* The lock held. */
static void keep_line(refit_log_ring *ring, refit_log_level level, const char *line)
{
    if (ring->put - ring->taken < ring->room) {
        ring_line *next = &ring->lines[ring->put % ring->room];
        next->level = level;
        memcpy(next->text, line, strlen(line) + 1);
        ring->put++;
    } else {
        ring->missed++;
    }
    __atomic_store_n(&ring->count, ring->count + 1, __ATOMIC_RELEASE);
}

/* ---- Logging ------------------------------------------------------------------------ */

void rft_log(refit_log_level level, const char *format, ...)
{
    if ((int)level > atomic_load(&loudest)) return;
    char line[LINE_ROOM];
    va_list arguments;
    va_start(arguments, format);
    rft_text_say_list(line, sizeof line, format, arguments);
    va_end(arguments);
    rft_lock(&guard);
    for (refit_log_ring *ring = rings; ring != NULL; ring = ring->next) {
        if ((int)level <= ring->most) keep_line(ring, level, line);
    }
    if ((int)level <= sink_most) sink(sink_user, level, line);
    rft_unlock(&guard);
}
