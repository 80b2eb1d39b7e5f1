/* One order after the other; a new one ends the one before. */
#include "attacker.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"

bool attack_goes_on(const attack *what, int wait_ms)
{
    struct pollfd item = {.fd = what->part->line, .events = POLLIN};
    int left = rft_ms_until(what->until);
    if (left == 0) return false;
    return poll(&item, 1, wait_ms < left ? wait_ms : left) == 0;
}

static void carry_out(const actor_part *part, const chaos_note *order)
{
    attack what = {.part = part,
                   .manner = order->manner,
                   .worker = order->worker,
                   .seed = order->digest,
                   .until = rft_deadline(order->ms)};
    snprintf(what.endpoint, sizeof what.endpoint, "%s", order->text);
    switch ((attacker_role)part->number) {
    case ROLE_STRANGER: stranger_attack(&what); break;
    case ROLE_EVICTED: liar_attack(&what, true); break;
    case ROLE_LIAR: liar_attack(&what, false); break;
    case ROLES: break;
    }
}

int attacker_run(const actor_part *part)
{
    chaos_note order;
    actor_prepare(part);
    while (note_await(part->line, &order, -1) && order.kind != NOTE_QUIT) {
        if (order.kind == NOTE_ATTACK && order.ms > 0) carry_out(part, &order);
    }
    actor_leave(part);
    return 0;
}
