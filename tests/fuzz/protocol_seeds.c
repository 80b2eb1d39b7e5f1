/*
 * Writes the seeds of fuzz_protocol into the folder that it is given: versions under each setting,
 * what ends a version or a connection, each kind of lie, and steps drawn at random.
 */
#include "protocol_bench.h"
#include "protocol_steps.h"
#include "seeds.h"
#include "tests/support/seeded.h"

#define SEED_MOST    64u /* steps */
#define RANDOM_SEEDS 12u
#define HUNDRED_MS   3u /* of a STEP_TIME */

typedef struct seed_input {
    uint8_t settings[SETTINGS];
    step steps[SEED_MOST];
    uint32_t count;
} seed_input;

static void add(seed_input *input, step_kind what, unsigned peer, unsigned amount, unsigned seed)
{
    must(input->count < SEED_MOST, "hold so many steps");
    input->steps[input->count++] =
        (step){(uint8_t)what, (uint8_t)peer, (uint8_t)amount, (uint8_t)seed};
}

/* A whole one: written, staged, committed, taken, accepted. */
static void add_version(seed_input *input)
{
    add(input, STEP_TRAINER, 0, 7, 7);
    add(input, STEP_ALL_ARRIVES, 0, 0, 0);
    add(input, STEP_TIME, 0, HUNDRED_MS, 0);
    add(input, STEP_ALL_ARRIVES, 0, 0, 0);
}

static seed_input begin(unsigned settings)
{
    return (seed_input){.settings = {(uint8_t)settings, SET_ALL_JOINED}};
}

static void write_input(const char *folder, const char *name, const seed_input *input)
{
    write_seed(folder, name, input, offsetof(seed_input, steps) + input->count * sizeof(step));
}

/* ---- What is right */

static void write_versions(const char *folder)
{
    static const struct {
        const char *name;
        unsigned settings;
    } kinds[] = {
        {"versions-plain", 0},
        {"versions-keys", SET_KEYS},
        {"versions-two-slots", SET_TWO_SLOTS},
        {"versions-quorum", SET_QUORUM(1u)},
        {"versions-shared-memory", SET_SHM | SET_TWO_SLOTS},
        {"versions-keys-shared", SET_SHM | SET_TWO_SLOTS | SET_KEYS},
        {"versions-neighbors", SET_NEIGHBORS | SET_TWO_SLOTS},
        {"versions-parts", SET_TWO_SLOTS | SET_PARTS << 8},
        {"versions-parts-delta", SET_DELTA | SET_TWO_SLOTS | SET_PARTS << 8},
        {"versions-parts-shared", SET_SHM | SET_TWO_SLOTS | SET_PARTS << 8},
        {"versions-neighbors-parts", SET_NEIGHBORS | SET_TWO_SLOTS | SET_PARTS << 8},
        {"versions-neighbors-quorum", SET_NEIGHBORS | SET_QUORUM(1u) | SET_DELTA},
        {"versions-verify", SET_VERIFY | SET_SHM | SET_TWO_SLOTS},
        {"versions-delta", SET_DELTA | SET_TWO_SLOTS},
        {"versions-staged", SET_TWO_SLOTS | SET_STAGED << 8},
        {"versions-staged-shared", SET_SHM | SET_TWO_SLOTS | (SET_STAGED | SET_BEHIND(1u)) << 8},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        seed_input input = begin(kinds[i].settings & 0xff);
        input.settings[1] |= (uint8_t)(kinds[i].settings >> 8);
        if ((kinds[i].settings & SET_DELTA) != 0) input.settings[1] |= SET_ZSTD;
        for (int version = 0; version < 3; version++)
            add_version(&input);
        write_input(folder, kinds[i].name, &input);
    }
}

/* ---- What ends early */

static void write_cancelled(const char *folder)
{
    seed_input input = begin(SET_TWO_SLOTS);
    add_version(&input);
    add(&input, STEP_TRAINER, 0, 3, 1);
    add(&input, STEP_RARE, 0, RARE_ABORT, 0);
    add(&input, STEP_TRAINER, 0, 0, 0);
    add(&input, STEP_TRAINER, 0, 7, 1);
    add(&input, STEP_RARE, 0, RARE_CANCEL, 0);
    add_version(&input);
    write_input(folder, "cancel-and-abort", &input);
}

/* One worker refuses and keeps what it has; another has nothing left. */
static void write_refused(const char *folder)
{
    seed_input input = begin(0);
    add(&input, STEP_TRAINER, 0, 7, 7);
    add(&input, STEP_ALL_ARRIVES, 0, 1, 0);
    add(&input, STEP_USER, 0, 0, 0);
    add(&input, STEP_USER, 0, 2, 0);
    add(&input, STEP_USER, 1, 0, 0);
    add(&input, STEP_USER, 1, 3, 0);
    add(&input, STEP_USER, 2, 0, 0);
    add(&input, STEP_TIME, 0, 7, 0);
    add_version(&input);
    write_input(folder, "refused", &input);
}

static void write_evicted(const char *folder)
{
    seed_input input = begin(SET_KEYS | SET_TWO_SLOTS);
    add_version(&input);
    add(&input, STEP_RARE, 0, RARE_KEY_ENDS, 0);
    add(&input, STEP_UP, 0, 3, 0);
    add(&input, STEP_TRAINER, 0, 7, 3);
    add(&input, STEP_ALL_ARRIVES, 0, 0, 0);
    add(&input, STEP_RARE, 0, RARE_KEYS_COUNT, 0);
    add_version(&input);
    write_input(folder, "evicted", &input);
}

static void write_broken_lines(const char *folder)
{
    seed_input input = begin(SET_TWO_SLOTS);
    add(&input, STEP_TRAINER, 0, 3, 1);
    add(&input, STEP_LINK, 0, 0, 0);
    add(&input, STEP_FRAMES, 0, 2, 0);
    add(&input, STEP_DOWN, 1, 3, 0);
    add(&input, STEP_LINK, 1, 1, 0);
    add(&input, STEP_TIME, 0, 6, 0);
    add_version(&input);
    write_input(folder, "lines-break", &input);
}

static void write_departures(const char *folder)
{
    seed_input input = begin(SET_TWO_SLOTS);
    add_version(&input);
    add(&input, STEP_LEAVES, 0, 0, 0);
    add(&input, STEP_TRAINER, 0, 7, 1);
    add(&input, STEP_LEAVES, 1, 1, 0);
    add_version(&input);
    write_input(folder, "workers-leave", &input);

    input = begin(SET_TWO_SLOTS);
    add_version(&input);
    add(&input, STEP_RARE, 0, RARE_RESTART, 0);
    add_version(&input);
    add(&input, STEP_RARE, 0, RARE_RESTART, 1);
    add_version(&input);
    write_input(folder, "trainer-restarts", &input);
}

/* ---- Lies */

static const struct {
    const char *name;
    unsigned settings;
} liars[] = {{"plain", 0},
             {"keys", SET_KEYS | SET_TWO_SLOTS},
             {"shared", SET_SHM | SET_TWO_SLOTS},
             {"neighbors", SET_NEIGHBORS | SET_TWO_SLOTS | SET_QUORUM(1u)}};

static void add_lie(seed_input *input, unsigned kind, unsigned amount, unsigned seed)
{
    add(input, STEP_LIE, kind * LIARS, amount, seed);
}

/* A liar joins, and takes part in versions. */
static void write_member(const char *folder, const char *name, unsigned settings)
{
    seed_input input = begin(settings);
    for (unsigned i = 0; i < 8; i++) {
        add_lie(&input, RFT_HELLO, i, 3 * i);
        add_lie(&input, RFT_JOIN, i, i);
        add(&input, STEP_TRAINER, 0, 7, i);
        add_lie(&input, RFT_STAGED, i, 5 * i);
        add_lie(&input, RFT_COMMITTED, i, 7 * i);
        add(&input, STEP_ALL_ARRIVES, 0, 0, 0);
    }
    write_input(folder, name, &input);
}

static void write_all_kinds(const char *folder, const char *name, unsigned settings)
{
    seed_input input = begin(settings);
    add_lie(&input, RFT_HELLO, 0, 0);
    add_lie(&input, RFT_JOIN, 0, 0);
    add_version(&input);
    for (unsigned kind = 0; kind < RFT_MESSAGE_KINDS; kind++)
        add_lie(&input, kind, kind, 40 + kind);
    add_version(&input);
    write_input(folder, name, &input);
}

static void write_damaged(const char *folder)
{
    seed_input input = begin(SET_TWO_SLOTS);
    add_version(&input);
    for (unsigned i = 0; i < 12; i++)
        add(&input, STEP_DAMAGED, 0, i, i);
    add_version(&input);
    write_input(folder, "damaged", &input);
}

static void write_lied_to(const char *folder)
{
    seed_input input = begin(SET_TWO_SLOTS);
    add_version(&input);
    for (unsigned kind = 0; kind < RFT_MESSAGE_KINDS; kind++)
        add(&input, STEP_LIE_DOWN, kind * HONEST, kind, 17 * kind + 1);
    add_version(&input);
    write_input(folder, "worker-lied-to", &input);
}

static void write_lies(const char *folder)
{
    char name[64];
    for (size_t i = 0; i < sizeof liars / sizeof liars[0]; i++) {
        (void)snprintf(name, sizeof name, "liar-%s", liars[i].name);
        write_member(folder, name, liars[i].settings);
        (void)snprintf(name, sizeof name, "liar-all-kinds-%s", liars[i].name);
        write_all_kinds(folder, name, liars[i].settings);
    }
    write_damaged(folder);
    write_lied_to(folder);
}

/* ---- Chance: every other one with keys */

static void write_random(const char *folder)
{
    uint64_t seed = 13;
    for (unsigned i = 0; i < RANDOM_SEEDS; i++) {
        char name[64];
        seed_input input = begin((unsigned)seeded_below(&seed, 256));
        input.settings[0] = (uint8_t)((input.settings[0] & ~SET_KEYS) | i % 2);
        input.settings[1] |= (uint8_t)(seeded_below(&seed, 128) & 0x71);
        for (unsigned k = 0; k < 20 + 2 * i; k++) {
            uint64_t drawn = seeded_next(&seed) >> 32;
            add(&input, (step_kind)(drawn % STEP_KINDS), drawn >> 8 & 255, drawn >> 16 & 255,
                drawn >> 24 & 255);
        }
        (void)snprintf(name, sizeof name, "random-%02u", i);
        write_input(folder, name, &input);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    write_versions(argv[1]);
    write_cancelled(argv[1]);
    write_refused(argv[1]);
    write_evicted(argv[1]);
    write_broken_lines(argv[1]);
    write_departures(argv[1]);
    write_lies(argv[1]);
    write_random(argv[1]);
    return 0;
}
