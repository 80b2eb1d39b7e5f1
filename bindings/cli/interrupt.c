/*
 * Signals.
 *
 * A handler has no argument of its own, so what it needs lies in two atomics: the signal that came,
 * and the subscriber to wake, for which refit_subscriber_wake is safe in a handler. SA_RESETHAND
 * makes a second signal end a command that does not come to its end.
 */
#include "interrupt.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_int caught;
static _Atomic(refit_subscriber *) sleeper;

static void handle(int number)
{
    atomic_store(&caught, number);
    refit_subscriber *subscriber = atomic_load(&sleeper);
    if (subscriber != NULL) refit_subscriber_wake(subscriber);
}

void cli_interrupt_catch(void)
{
    struct sigaction action = {.sa_handler = handle, .sa_flags = (int)SA_RESETHAND};
    (void)sigemptyset(&action.sa_mask);
    (void)sigaction(SIGINT, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
    (void)signal(SIGXFSZ, SIG_IGN);
}

int cli_interrupt_signal(void)
{
    return atomic_load(&caught);
}

void cli_interrupt_wakes(refit_subscriber *subscriber)
{
    atomic_store(&sleeper, subscriber);
    /* A signal may have come before there was a subscriber to wake. */
    if (subscriber != NULL && cli_interrupt_signal() != 0) refit_subscriber_wake(subscriber);
}
