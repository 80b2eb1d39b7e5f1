/* Regions: what is refused, what a seal fixes, and how regions are planned again. */
#include "tests/offload/rig.h"

#include <stdio.h>

#include "tests/support/failing_alloc.h"

static const char *const roomy[] = {"offload.budget_bytes=16MiB", NULL};
static const char *const tight[] = {"offload.budget_bytes=64KiB", NULL};
static const char *const pageable[] = {"offload.budget_bytes=64KiB",
                                       "use_pinned_optimizer_offload=false", NULL};

static refit_region_desc desc_of(const char *name, void *memory, uint64_t bytes)
{
    return (refit_region_desc){
        .size = sizeof(refit_region_desc), .name = name, .memory = memory, .bytes = bytes};
}

/* What makes a good description bad, and the words of the refusal. */
typedef struct bad_region {
    const char *name;
    void (*spoil)(const rig *on, refit_region_desc *desc);
    refit_status status;
    const char *words;
} bad_region;

#define SPOIL(what, ...)                                                                           \
    static void what(const rig *on, refit_region_desc *desc)                                       \
    {                                                                                              \
        (void)on;                                                                                  \
        __VA_ARGS__;                                                                               \
    }

SPOIL(short_struct, desc->size = offsetof(refit_region_desc, policy) - 1)
SPOIL(no_name, desc->name = NULL)
SPOIL(empty_name, desc->name = "")
SPOIL(taken_name, desc->name = "state.3")
SPOIL(no_memory, desc->memory = NULL)
SPOIL(no_bytes, desc->bytes = 0)
SPOIL(all_bytes, desc->bytes = UINT64_MAX)
SPOIL(too_many_bytes, desc->bytes = UINT64_C(1) << 62)
SPOIL(unknown_policy, desc->policy = (refit_policy)3)
SPOIL(unknown_group, desc->group = REFIT_GROUPS)
SPOIL(overlap, desc->memory = (char *)on->regions[3].memory + on->regions[3].bytes - 1,
      desc->bytes = 1)

static const bad_region bad_regions[] = {
    {"a struct that is too short", short_struct, REFIT_ERR_INVALID, "size"},
    {"no name", no_name, REFIT_ERR_INVALID, "no name"},
    {"an empty name", empty_name, REFIT_ERR_INVALID, "no name"},
    {"a name that is taken", taken_name, REFIT_ERR_EXISTS, "state.3"},
    {"no memory", no_memory, REFIT_ERR_INVALID, "region new"},
    {"no bytes", no_bytes, REFIT_ERR_INVALID, "region new"},
    {"all bytes that there are", all_bytes, REFIT_ERR_INVALID, "region new"},
    {"more bytes than the device has", too_many_bytes, REFIT_ERR_INVALID, "region new"},
    {"a policy that there is not", unknown_policy, REFIT_ERR_INVALID, "policy 3"},
    {"a group that there is not", unknown_group, REFIT_ERR_INVALID, "group"},
    {"a byte of another region", overlap, REFIT_ERR_EXISTS, "state.3"},
};

static refit_status add(rig *on, const refit_region_desc *desc, refit_region_id *id)
{
    return refit_offloader_add(on->offloader, desc, id, &on->error);
}

SCENE(bad_regions_are_refused, .unsealed = true)
{
    refit_region_id id = 999;
    const refit_region_desc good = desc_of("new", rig_extra(on, 64), 64);
    for (size_t i = 0; i < COUNT_OF(bad_regions); i++) {
        const bad_region *it = &bad_regions[i];
        refit_region_desc desc = good;
        it->spoil(on, &desc);
        refit_status status = add(on, &desc, &id);
        if (status != it->status || strstr(on->error.text, it->words) == NULL) {
            fail_msg("%s: %s: %s", it->name, refit_status_name(status), on->error.text);
        }
        assert_int_equal(on->error.status, status);
        assert_int_equal(id, 999);
        assert_int_equal(refit_offloader_count(on->offloader), RIG_REGIONS);
    }
    assert_ok(add(on, &good, &id));
    assert_int_equal(id, RIG_REGIONS);
    assert_invalid(add(on, NULL, &id));
    assert_invalid(refit_offloader_add(NULL, &good, &id, NULL));
}

SCENE(thousands_of_regions_are_added_and_sealed, .unsealed = true)
{
    enum { COUNT = 20000, BYTES = 16 };
    static char bytes[COUNT * BYTES];
    char *memory = rig_extra(on, sizeof bytes);
    assert_ok(clear(on));
    for (uint32_t i = 0; i < COUNT; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer.%u.exp_avg", i);
        (void)rig_add(on, name, memory + (uint64_t)i * 7919 % COUNT * BYTES, BYTES);
    }
    memset(bytes, 0x5A, sizeof bytes);
    test_write(on->plain, memory, bytes, sizeof bytes);
    assert_ok(seal(on));
    rig_offload(on);
    test_fill(on->plain, memory, 0, sizeof bytes);
    rig_restore(on);
    assert_device_equal(on->plain, memory, bytes, sizeof bytes);
}

/* No two are neighbours, so each is a copy of its own, and none is done before all are queued. (A
 * GPU's queue is shorter: there the caller would wait for work that stands.) */
SCENE(a_stream_queues_the_copies_of_scattered_regions, .unsealed = true)
{
    enum { COUNT = 120000 };
    if (test_on_cuda()) skip();
    char *memory = rig_extra(on, COUNT * 2);
    assert_ok(clear(on));
    for (uint32_t i = 0; i < COUNT; i++) {
        char name[32];
        snprintf(name, sizeof name, "expert.%u", i);
        (void)rig_add(on, name, memory + i * 2, 1);
    }
    assert_ok(seal(on));
    faulty_device_stop(on->device);
    assert_ok(offload(on));
    faulty_device_go(on->device);
    assert_ok(finish(on));
}

SCENE(region_is_described, .memory = RIG_ARENA)
{
    refit_region_info info = rig_region_info(on, 2);
    assert_string_equal(info.name, "state.2");
    assert_ptr_equal(info.memory, on->regions[2].memory);
    assert_int_equal(info.bytes, on->regions[2].bytes);
    assert_int_equal(info.host_offset % 512, 0);
    assert_int_equal(info.group, 2);
    assert_int_equal(info.priority, -20);
    assert_int_equal(info.place, REFIT_ON_DEVICE);
    assert_int_equal(info.bound, 1);
    assert_int_equal(info.in_arena, 1);
    rig_offload(on);
    info = rig_region_info(on, 2);
    assert_null(info.memory);
    assert_int_equal(info.place, REFIT_ON_HOST);
    assert_int_equal(info.bound, 0);
    assert_int_equal(refit_offloader_region(on->offloader, RIG_REGIONS, &info, &on->error),
                     REFIT_ERR_NOT_FOUND);
    info.size = 4;
    assert_invalid(refit_offloader_region(on->offloader, 0, &info, &on->error));
    rig_restore(on);
}

/* As a caller compiled against another refit gives it: its struct ends earlier, or goes on with
 * what is not known here. In memory of exactly that size, which shows what is read. */
static void put_desc(char *to, refit_region_desc full, size_t size)
{
    full.size = size;
    memset(to, 0xff, size);
    memcpy(to, &full, size < sizeof full ? size : sizeof full);
}

SCENE(a_shorter_or_longer_description_adds_a_region, .unsealed = true)
{
    refit_region_id id;
    char *memory = rig_extra(on, 3);
    const size_t sizes_of[] = {offsetof(refit_region_desc, policy),
                               offsetof(refit_region_desc, priority),
                               sizeof(refit_region_desc) + 24};
    for (size_t i = 0; i < 3; i++) {
        char name[2] = {(char)('a' + i), '\0'};
        refit_region_desc full = desc_of(name, &memory[i], 1);
        full.policy = REFIT_ZERO;
        full.group = 7;
        full.priority = 9;
        char *given = test_malloc(sizes_of[i]);
        put_desc(given, full, sizes_of[i]);
        assert_ok(add(on, (void *)given, &id));
        test_free(given);
        refit_region_info info = rig_region_info(on, id);
        assert_string_equal(info.name, name);
        assert_int_equal(info.policy, i == 0 ? REFIT_KEEP : REFIT_ZERO);
        assert_int_equal(info.group, i == 0 ? 0 : 7);
        assert_int_equal(info.priority, i == 2 ? 9 : 0);
    }
}

static refit_status add_each(rig *on, const void *list, uint32_t count)
{
    return refit_offloader_add_each(on->offloader, list, count, &on->error);
}

SCENE(many_are_added_in_one_call_up_to_one_that_fails, .unsealed = true)
{
    char *memory = rig_extra(on, 40);
    refit_region_desc list[] = {desc_of("a", memory, 8), desc_of("b", memory + 8, 8),
                                desc_of("state.3", memory + 16, 8), desc_of("c", memory + 24, 8)};
    list[1].policy = REFIT_ZERO;
    list[1].priority = -4;
    assert_ok(add_each(on, list, 0));
    assert_ok(add_each(on, NULL, 0));
    assert_int_equal(add_each(on, list, 4), REFIT_ERR_EXISTS);
    assert_says(&on->error, "state.3");
    assert_int_equal(refit_offloader_count(on->offloader), RIG_REGIONS + 2);
    assert_string_equal(rig_region_info(on, RIG_REGIONS).name, "a");
    assert_int_equal(rig_region_info(on, RIG_REGIONS + 1).policy, REFIT_ZERO);
    assert_int_equal(rig_region_info(on, RIG_REGIONS + 1).priority, -4);
    assert_ok(add_each(on, &list[3], 1));
    assert_invalid(add_each(on, NULL, 1));
    assert_invalid(refit_offloader_add_each(NULL, list, 1, NULL));
    assert_ok(seal(on));
    assert_int_equal(add_each(on, list, 1), REFIT_ERR_STATE);
    assert_int_equal(refit_offloader_count(on->offloader), RIG_REGIONS + 3);
}

SCENE(a_list_is_gone_through_by_the_size_of_its_descriptions, .unsealed = true)
{
    const size_t known = sizeof(refit_region_desc);
    const size_t sizes_of[] = {offsetof(refit_region_desc, policy), known, known + 24};
    char *memory = rig_extra(on, 9);
    for (size_t i = 0; i < 3; i++) {
        char *given = test_malloc(3 * sizes_of[i]);
        char names[3][2];
        for (size_t at = 0; at < 3; at++) {
            names[at][0] = (char)('a' + 3 * i + at);
            names[at][1] = '\0';
            put_desc(given + at * sizes_of[i], desc_of(names[at], &memory[3 * i + at], 1),
                     sizes_of[i]);
        }
        assert_ok(add_each(on, given, 3));
        assert_int_equal(add_each(on, given, 2), REFIT_ERR_EXISTS); /* the name of the first */
        test_free(given);
    }
    assert_int_equal(refit_offloader_count(on->offloader), RIG_REGIONS + 9);
    assert_ptr_equal(rig_region_info(on, RIG_REGIONS + 8).memory, &memory[8]);
    refit_region_desc list[] = {desc_of("x", memory, 1), desc_of("y", memory, 1)};
    list[1].size -= 8;
    assert_ok(clear(on));
    assert_invalid(add_each(on, list, 2));
    assert_says(&on->error, "region 1");
    list[0].size = sizeof list[0] + 1;
    assert_invalid(add_each(on, list, 1));
    assert_int_equal(refit_offloader_count(on->offloader), 1);
}

SCENE(a_shorter_or_longer_description_reads_a_region, .memory = RIG_ARENA)
{
    const size_t known = sizeof(refit_region_info);
    refit_region_info full = rig_region_info(on, 2);
    const size_t sizes_of[] = {offsetof(refit_region_info, host_offset),
                               offsetof(refit_region_info, in_arena), known, known + 24};
    for (size_t i = 0; i < 4; i++) {
        size_t shared = sizes_of[i] < known ? sizes_of[i] : known;
        full.size = sizes_of[i];
        refit_region_info *given = test_malloc(sizes_of[i]);
        memset(given, 0x5a, sizes_of[i]);
        given->size = sizes_of[i];
        assert_ok(refit_offloader_region(on->offloader, 2, given, &on->error));
        assert_memory_equal(given, &full, shared < 58 ? shared : 58); /* then there is padding */
        for (size_t at = shared; at < sizes_of[i]; at++)
            assert_int_equal(((char *)given)[at], 0x5a);
        test_free(given);
    }
    full.size = offsetof(refit_region_info, host_offset) - 1;
    assert_invalid(refit_offloader_region(on->offloader, 2, &full, NULL));
}

SCENE(seal_ends_adding_until_unseal, 0)
{
    refit_region_id id;
    char *memory = rig_extra(on, 64);
    const refit_region_desc desc = desc_of("late", memory, 64);
    assert_ok(seal(on));
    assert_int_equal(add(on, &desc, &id), REFIT_ERR_STATE);
    assert_int_equal(clear(on), REFIT_ERR_STATE);
    uint64_t host_bytes = rig_stats(on).host_bytes;
    assert_ok(unseal(on));
    assert_int_equal(rig_state(on), REFIT_OPEN);
    assert_int_equal(rig_stats(on).host_bytes, host_bytes);
    assert_ok(add(on, &desc, &id));
    assert_ok(seal(on));
    test_fill(on->plain, memory, 7, 64);
    rig_offload(on);
    test_fill(on->plain, memory, 0, 64);
    rig_restore(on);
    assert_device_equal(on->plain, memory + 63, "\7", 1);
    rig_check_bytes(on, true);
}

/* Without regions the offloader cycles, too. */
SCENE(cleared_regions_free_their_names_and_addresses, .memory = RIG_ARENA, .unsealed = true)
{
    assert_int_equal(refit_arena_close(on->arena, &on->error), REFIT_ERR_BUSY);
    assert_ok(clear(on));
    assert_int_equal(refit_offloader_count(on->offloader), 0);
    assert_ok(seal(on));
    rig_offload(on);
    rig_restore(on);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_ok(unseal(on));
    assert_int_equal(rig_add(on, "state.0", on->regions[0].memory, on->regions[0].bytes), 0);
}

SCENE(estimate_names_need_and_budget, .settings = roomy, .unsealed = true)
{
    uint64_t need, budget;
    assert_ok(refit_offloader_estimate(on->offloader, &need, &budget, &on->error));
    assert_true(need >= rig_kept_bytes(on));
    assert_true(need < 2 * rig_kept_bytes(on));
    assert_int_equal(budget, 16 << 20);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_invalid(refit_offloader_estimate(on->offloader, NULL, &budget, &on->error));
}

SCENE(beyond_the_budget_nothing_is_sealed, .settings = tight, .unsealed = true)
{
    assert_int_equal(seal(on), REFIT_ERR_BUDGET);
    assert_says(&on->error, "budget");
    assert_int_equal(rig_state(on), REFIT_OPEN);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    rig_check_bytes(on, false);
}
SCENE_AGAIN(beyond_the_budget_nothing_is_sealed, pageable, .settings = pageable, .unsealed = true)

SCENE(trim_gives_host_memory_back_and_offload_takes_it_again, .memory = RIG_HOOKS)
{
    uint64_t host_bytes = rig_stats(on).host_bytes;
    assert_true(host_bytes > 0);
    rig_offload(on);
    assert_int_equal(trim(on), REFIT_ERR_STATE);
    rig_restore(on);
    assert_ok(trim(on));
    assert_ok(trim(on));
    assert_int_equal(rig_stats(on).host_bytes, 0);
    rig_offload(on);
    assert_int_equal(rig_stats(on).host_bytes, host_bytes);
    rig_restore(on);
    rig_check_bytes(on, true);
}

/* Opens, adds three regions, seals, offloads and read locks; the first failure. */
static refit_status live(refit_offloader *offloader, void **memory, refit_error *error)
{
    for (uint32_t i = 0; i < 3; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        refit_region_id id;
        refit_region_desc desc = desc_of(name, memory[i], 1000);
        RFT_TRY(refit_offloader_add(offloader, &desc, &id, error));
    }
    RFT_TRY(refit_offloader_seal(offloader, error));
    RFT_TRY(refit_offloader_prepare(offloader, TIMEOUT_MS, error));
    RFT_TRY(offload_all(offloader, error));
    refit_read_lock *taken;
    RFT_TRY(refit_read_lock_acquire(offloader, &taken, error));
    refit_read_lock_release(taken);
    return REFIT_OK;
}

static refit_status live_once(refit_device *device, bool background, refit_error *error)
{
    void *memory[3] = {NULL};
    refit_config config;
    refit_offloader *offloader;
    refit_config_init(&config, sizeof config);
    config.offload_take_turns = 0;
    config.offload_background = background ? 1 : 0;
    RFT_TRY(refit_offloader_open(device, &config, &offloader, error));
    refit_status status = REFIT_OK;
    for (uint32_t i = 0; i < 3 && status == REFIT_OK; i++)
        status = refit_memory_alloc(device, 1000, &memory[i], error);
    if (status == REFIT_OK) status = live(offloader, memory, error);
    assert_ok(refit_offloader_close(offloader, NULL));
    for (uint32_t i = 0; i < 3; i++)
        assert_ok(refit_memory_free(device, memory[i], NULL));
    return status;
}

/* Also while host memory is taken in the background. */
TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    for (int background = 0; background < 2; background++) {
        bool came = true;
        for (uint64_t nth = 1; came; nth++) {
            refit_error error = {0};
            refit_device *device = NULL;
            failing_alloc_begin(nth);
            refit_status status = test_device_open("host", &device, &error);
            if (status == REFIT_OK) status = live_once(device, background > 0, &error);
            assert_ok(refit_device_close(device, NULL));
            came = failing_alloc_end();
            assert_true(came || nth > 10);
            if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
            assert_true(status == REFIT_OK || (came && error.status == REFIT_ERR_HOST_MEMORY));
            /* A GPU's device does without some of them. */
            assert_true(status != REFIT_OK || !came || test_on_cuda());
        }
    }
}

int main(void)
{
    return test_run("regions");
}
