/* A worker that sends false messages, and one that goes on after it was evicted. Both use the
 * library's channel and messages, so that what they send is well formed. */
#include <stdio.h>
#include <string.h>

#include "attacker.h"
#include "base/clock.h"
#include "net/channel.h"
#include "store/segment.h"
#include "tests/support/seeded.h"
#include "wire/message.h"

#define TURN_MS          15
#define HEAR_MOST        64u
#define SAY_EACH         4u /* messages a turn, of those that are said without end */
#define ASK_FRAMES       32u
#define LIAR_IMAGE_BYTES ((uint64_t)8 << 20) /* more than any version has */

typedef struct liar {
    const attack *what;
    refit_config config;
    rft_limits limits;
    rft_channel *channel;
    rft_bytes scratch;
    uint64_t seed;
    char name[64];
    uint64_t instance;
    bool welcome;  /* it has been answered */
    bool evicting; /* it is to be evicted, and sends HELLO only once */
    bool revoked;  /* its key is off the list */
    uint32_t joins;
    uint64_t epoch;
    uint64_t offered;
    uint64_t committed;
    char place[RFT_SEGMENT_PLACE_BYTES]; /* where its images are, as it says */
    rft_segment image;                   /* LIAR_SHARES: empty, and never filled */
    rft_digest128 digest;                /* of the last seal */
    bool sealed;
} liar;

static uint32_t draw(liar *the, uint32_t bound)
{
    return (uint32_t)seeded_below(&the->seed, bound);
}

/* ---- Saying */

static void say(liar *the, const rft_message *message)
{
    rft_bytes_reset(&the->scratch);
    if (rft_message_encode(message, &the->limits, &the->scratch, NULL) != REFIT_OK) return;
    (void)rft_channel_send(the->channel, NULL, rft_bytes_view(&the->scratch), NULL, NULL);
}

static void say_hello(liar *the)
{
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(the->name);
    message.as.hello.instance = the->instance;
    message.as.hello.host = rft_view_text("elsewhere");
    message.as.hello.observer = the->what->manner == LIAR_OBSERVES;
    message.as.hello.window = 1 + draw(the, 8);
    message.as.hello.delta = draw(the, 2) == 0;
    message.as.hello.image = rft_view_text(the->place);
    if (the->what->manner == LIAR_FUTURE)
        message.as.hello.held =
            (rft_version_id){the->epoch, UINT64_MAX - draw(the, 2), the->digest};
    say(the, &message);
}

static void say_join(liar *the)
{
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = the->epoch;
    say(the, &message);
    the->joins++;
}

static void say_beat(liar *the, uint64_t staged)
{
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.staged = staged;
    say(the, &message);
}

/* STAGED, COMMITTED. */
static void say_digest(liar *the, rft_message_kind kind, uint64_t version, bool right)
{
    rft_message message = {.kind = kind};
    message.as.staged.version = version;
    message.as.staged.digest = the->digest;
    if (!right)
        message.as.staged.digest.bytes[draw(the, 16)] ^= (unsigned char)(1 + draw(the, 255));
    say(the, &message);
}

static void say_released(liar *the, uint64_t version)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = version;
    say(the, &message);
}

static void say_failed(liar *the, uint64_t version)
{
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = version;
    message.as.failed.code = 1 + draw(the, 25);
    message.as.failed.kept = draw(the, 2) == 0;
    message.as.failed.reason = rft_view_text("it says so");
    say(the, &message);
}

static void ask_for_frames(liar *the, uint64_t version)
{
    unsigned char sequences[ASK_FRAMES * 4];
    rft_message pull = {.kind = RFT_PULL};
    rft_message again = {.kind = RFT_RESEND};
    for (uint32_t i = 0; i < ASK_FRAMES; i++)
        rft_put_u32(sequences + (size_t)i * 4, i % 8 == 7 ? draw(the, UINT32_MAX) : draw(the, 4));
    const char *const images[] = {"", "nonsense", "/proc/1/fd/3:77", the->image.name};
    pull.as.pull.image = rft_view_text(images[draw(the, 4)]);
    if (draw(the, 4) == 0) pull.as.pull.have = (rft_view){sequences, 1 + draw(the, 16)};
    pull.as.pull.version = again.as.resend.version = version;
    pull.as.pull.credits = the->limits.window;
    again.as.resend.sequences = (rft_view){sequences, sizeof sequences};
    say(the, &pull);
    say(the, &again);
}

static uint64_t draw_version(liar *the)
{
    const uint64_t versions[] = {the->offered, the->offered + 1, the->committed, 1, UINT64_MAX};
    return versions[draw(the, 5)];
}

/* Any message of a worker, or of a trainer. */
static void say_anything(liar *the)
{
    uint64_t version = draw_version(the);
    switch (draw(the, 10)) {
    case 0: say_hello(the); break;
    case 1: say_join(the); break;
    case 2: say_beat(the, version); break;
    case 3: say_digest(the, RFT_STAGED, version, draw(the, 2) == 0); break;
    case 4: say_digest(the, RFT_COMMITTED, version, draw(the, 2) == 0); break;
    case 5: say_released(the, version); break;
    case 6: say_failed(the, version); break;
    case 7: ask_for_frames(the, version); break;
    case 8: {
        rft_message message = {.kind = RFT_COMMIT};
        message.as.commit.version = version;
        say(the, &message);
        break;
    }
    default: {
        unsigned char bytes[32];
        for (uint32_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (unsigned char)draw(the, 256);
        (void)rft_channel_send(the->channel, NULL, (rft_view){bytes, sizeof bytes}, NULL, NULL);
    }
    }
}

/* ---- Hearing */

static void answer_seal(liar *the, const rft_message *seal)
{
    uint64_t version = seal->as.seal.version;
    the->digest = seal->as.seal.digest;
    the->sealed = true;
    switch ((liar_manner)the->what->manner) {
    case LIAR_WRONG_DIGESTS: say_digest(the, RFT_STAGED, version, draw(the, 4) == 0); break;
    case LIAR_FUTURE: say_digest(the, RFT_STAGED, version + 1 + draw(the, 3), true); break;
    case LIAR_OUT_OF_ORDER:
        say_digest(the, RFT_COMMITTED, version, true);
        say_released(the, version);
        say_digest(the, RFT_STAGED, version, true);
        say_digest(the, RFT_STAGED, version, true);
        break;
    case LIAR_TAKES_BACK:
        say_digest(the, RFT_STAGED, version, true);
        if (draw(the, 2) == 0) say_failed(the, version);
        break;
    case LIAR_SHARES:
        if (draw(the, 2) == 0) say_digest(the, RFT_STAGED, version, true);
        break;
    default: break;
    }
}

static void answer_commit(liar *the, uint64_t version)
{
    the->committed = version;
    if (the->what->manner == LIAR_WRONG_DIGESTS) say_digest(the, RFT_COMMITTED, version, false);
    if (the->what->manner == LIAR_TAKES_BACK) say_failed(the, version);
    if (the->what->manner == LIAR_FUTURE) say_digest(the, RFT_COMMITTED, version + 1, true);
    if (the->what->manner == LIAR_OUT_OF_ORDER) {
        say_digest(the, RFT_COMMITTED, version, true);
        say_digest(the, RFT_COMMITTED, version, true);
        say_digest(the, RFT_STAGED, version, true);
    }
}

static void answer(liar *the, const rft_message *message)
{
    switch (message->kind) {
    case RFT_WELCOME:
        the->epoch = message->as.welcome.epoch;
        the->welcome = true;
        if (the->what->manner != LIAR_OBSERVES) say_join(the);
        break;
    case RFT_REFUSE:
    case RFT_BYE: the->welcome = the->evicting && the->joins > 0; break;
    case RFT_OFFER: the->offered = message->as.offer.version; break;
    case RFT_SEAL: answer_seal(the, message); break;
    case RFT_COMMIT: answer_commit(the, message->as.commit.version); break;
    default: break;
    }
}

static void hear(liar *the)
{
    rft_envelope envelope;
    rft_message message;
    for (uint32_t i = 0; i < HEAR_MOST; i++) {
        if (rft_channel_receive(the->channel, &envelope, NULL) == REFIT_ERR_TIMEOUT) return;
        if (rft_message_decode(envelope.message, &the->limits, &message, NULL) == REFIT_OK)
            answer(the, &message);
    }
}

/* ---- Turns */

static void speak(liar *the)
{
    switch ((liar_manner)the->what->manner) {
    case LIAR_ANYTHING:
        for (uint32_t i = 0; i < SAY_EACH; i++)
            say_anything(the);
        break;
    case LIAR_CLAIMS_NAMES:
        the->instance = 1 + draw(the, 4);
        say_hello(the);
        say_digest(the, RFT_COMMITTED, draw_version(the), true);
        break;
    case LIAR_SHARES:
    case LIAR_ABSURD_COUNTS: ask_for_frames(the, the->offered == 0 ? 1 : the->offered); break;
    case LIAR_OBSERVES:
        for (uint32_t i = 0; i < SAY_EACH; i++)
            say_hello(the);
        break;
    case LIAR_SILENT: break;
    default: say_beat(the, 0); break;
    }
}

/* Where there are keys its own is taken off the list, else it breaks the protocol; and then it says
 * whatever it would say if it were still there. */
static void be_evicted(liar *the)
{
    if (the->joins == 0 || the->evicting) {
        if (the->evicting) say_anything(the);
        return;
    }
    the->evicting = true;
    if (the->what->part->smith != NULL) {
        key_fixture_revoke(the->what->part->smith, ATTACKER_EVICTED);
        the->revoked = true;
    } else {
        const rft_message never = {.kind = RFT_COMMIT, .as.commit.version = 1};
        say(the, &never);
    }
}

/* Its own place, or that of the other user's workers: "machine/user/namespace". */
static void claim_place(liar *the)
{
    char own[RFT_SEGMENT_PLACE_BYTES];
    rft_segment_place(own);
    const char *user = strchr(own, '/'), *space = strrchr(own, '/');
    snprintf(the->place, sizeof the->place, "%s", own);
    if (user == NULL || !the->what->part->plan->users || draw(the, 2) == 0) return;
    snprintf(the->place, sizeof the->place, "%.*s/%u%s", (int)(user - own), own, OTHER_USER, space);
}

static bool open_liar(liar *the, const attack *what, bool is_evicted)
{
    const actor_part *part = what->part;
    const char *own = is_evicted ? ATTACKER_EVICTED : ATTACKER_LIAR;
    *the = (liar){.what = what, .seed = what->seed | 1, .instance = what->seed | 1};
    bool claims = !is_evicted && what->manner == LIAR_CLAIMS_NAMES;
    if (claims)
        snprintf(the->name, sizeof the->name, "w%u", what->worker);
    else
        snprintf(the->name, sizeof the->name, "%s", own);
    bool shares = what->manner == LIAR_SHARES || what->manner == LIAR_ANYTHING;
    if (shares) claim_place(the);
    if (shares) (void)rft_segment_create_growing(&the->image, LIAR_IMAGE_BYTES, 0, NULL);
    if (actor_configure(part, false, &the->config, NULL) != REFIT_OK) return false;
    the->limits = rft_limits_from(&the->config);
    if (part->smith != NULL) key_fixture_equip_worker(part->smith, own, &the->config);
    return rft_channel_connect(what->endpoint, &the->config, &the->channel, NULL) == REFIT_OK;
}

void liar_attack(const attack *what, bool is_evicted)
{
    liar the;
    if (!open_liar(&the, what, is_evicted)) return;
    while (attack_goes_on(what, 0)) {
        rft_channel_poll(the.channel, -1, TURN_MS);
        hear(&the);
        if (!the.welcome) {
            say_hello(&the);
        } else if (is_evicted) {
            be_evicted(&the);
        } else {
            speak(&the);
        }
        if (the.welcome && !attack_goes_on(what, TURN_MS)) break;
    }
    if (the.revoked) key_fixture_allow(what->part->smith, ATTACKER_EVICTED);
    rft_channel_close(the.channel);
    rft_bytes_close(&the.scratch);
    rft_segment_close(&the.image);
}
