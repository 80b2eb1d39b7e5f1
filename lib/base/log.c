/*
 * The log hook. One lock makes replacing the function safe: once refit_set_log has returned, the
 * old one is not running. Process-wide by nature, like stderr, which it replaces.
 *
 * A fork while another thread says something would leave the child the lock held for ever: the
 * child gets it anew.
 */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>

#include <pthread.h>

#include "base/text.h"
#include "base/thread.h"

static rft_mutex guard = PTHREAD_MUTEX_INITIALIZER;
static refit_log_fn sink;       /* guarded by guard */
static void *sink_user;         /* guarded by guard */
static atomic_int loudest = -1; /* the most verbose level that anybody hears; -1: nobody listens */

/* In the child of a fork, which has no other thread yet. */
static void renew_guard(void)
{
    static const rft_mutex unlocked = PTHREAD_MUTEX_INITIALIZER;
    guard = unlocked;
}

/* Without memory for it forks are as dangerous as they were. */
static void prepare_for_forks(void)
{
    static atomic_bool prepared;
    if (!atomic_exchange(&prepared, true)) (void)pthread_atfork(NULL, NULL, renew_guard);
}

void refit_set_log(refit_log_fn function, void *user, refit_log_level most)
{
    prepare_for_forks();
    rft_lock(&guard);
    atomic_store(&loudest, -1); /* a child that is forked meanwhile hears nothing */
    sink = function;
    sink_user = user;
    atomic_store(&loudest, function == NULL ? -1 : (int)most);
    rft_unlock(&guard);
}

void rft_log(refit_log_level level, const char *format, ...)
{
    if ((int)level > atomic_load(&loudest)) return;
    char line[400];
    va_list arguments;
    va_start(arguments, format);
    rft_text_say_list(line, sizeof line, format, arguments);
    va_end(arguments);
    rft_lock(&guard);
    if (sink != NULL) sink(sink_user, level, line);
    rft_unlock(&guard);
}
