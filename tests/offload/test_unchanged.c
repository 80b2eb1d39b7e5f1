/* Regions that leave without a copy where they have not changed: what the image has counts only as
 * long as it is theirs, whatever failed in between, and bytes return exactly. */
#include "tests/offload/rig.h"

static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};
static const char *const verified[] = {"offload.verify=true", NULL};

/* How many bytes the offload has copied. */
static uint64_t leave(rig *on)
{
    rig_offload(on);
    return rig_stats(on).offload_bytes_last;
}

/* Back into memory that has nothing of it. */
static void come_back(rig *on)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        if (on->regions[at].memory != NULL && on->arena == NULL)
            test_fill(on->plain, on->regions[at].memory, 0xCC, on->regions[at].bytes);
    }
    rig_restore(on);
    rig_check_kept(on);
}

SCENE(what_has_not_changed_leaves_without_a_copy, .reuse = true)
{
    assert_int_equal(leave(on), rig_kept_bytes(on));
    come_back(on);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(leave(on), 0);
        come_back(on);
    }
}
SCENE_AGAIN(what_has_not_changed_leaves_without_a_copy, into_other_memory, .reuse = true,
            .memory = RIG_HOOKS)
SCENE_AGAIN(what_has_not_changed_leaves_without_a_copy, verified, .reuse = true,
            .settings = verified)
SCENE_AGAIN(what_has_not_changed_leaves_without_a_copy, in_an_arena, .reuse = true,
            .memory = RIG_ARENA)

SCENE(a_single_byte_is_a_change, .reuse = true)
{
    rig_region *region = &on->regions[3];
    leave(on);
    come_back(on);
    region->expected[region->bytes - 1] ^= 1;
    test_write(on->plain, region->memory, region->expected, region->bytes);
    assert_int_equal(leave(on), region->bytes);
    come_back(on);
    assert_int_equal(leave(on), 0);
    come_back(on);
}

/* The same bytes in another order, in words and within them. */
SCENE(bytes_that_changed_places_are_a_change, .reuse = true)
{
    rig_region *region = &on->regions[1];
    leave(on);
    come_back(on);
    for (uint64_t i = 0; i < region->bytes / 2; i++) {
        unsigned char first = region->expected[i], last = region->expected[region->bytes - 1 - i];
        region->expected[i] = last;
        region->expected[region->bytes - 1 - i] = first;
    }
    test_write(on->plain, region->memory, region->expected, region->bytes);
    assert_int_equal(leave(on), region->bytes);
    come_back(on);
}

SCENE(some_change_and_others_do_not, .reuse = true, .memory = RIG_HOOKS)
{
    leave(on);
    come_back(on);
    for (int round = 0; round < 40; round++) {
        uint64_t changed = 0;
        for (uint32_t at = 0; at < RIG_REGIONS; at++) {
            if (seeded_below(&on->random, 3) != 0) continue;
            rig_change(on, at);
            if (on->regions[at].policy == REFIT_KEEP) changed += on->regions[at].bytes;
        }
        assert_int_equal(leave(on), changed);
        come_back(on);
    }
}

/* What the image has is another plan's then, or gone. */
SCENE(a_new_plan_and_new_memory_have_nothing, .reuse = true)
{
    leave(on);
    come_back(on);
    assert_ok(unseal(on));
    assert_ok(seal(on));
    assert_int_equal(leave(on), rig_kept_bytes(on));
    come_back(on);
    assert_ok(trim(on));
    assert_int_equal(leave(on), rig_kept_bytes(on));
    come_back(on);
    assert_int_equal(leave(on), 0);
    come_back(on);
}

SCENE(pageable_memory_keeps_nothing, .reuse = true, .settings = pageable)
{
    for (int round = 0; round < 2; round++) {
        assert_int_equal(leave(on), rig_kept_bytes(on));
        come_back(on);
    }
}

static const fault faults[] = {
    {"a digest", FAULTY_DIGEST, REFIT_ERR_DEVICE, false},
    {"a copy", FAULTY_COPY_BATCH, REFIT_ERR_COPY, true},
    {"an event", FAULTY_EVENT_RECORD, REFIT_ERR_DEVICE, true},
};

/* A copy that did not come to its end has left something in the image. */
SCENE(after_a_failure_nothing_that_is_half_there_counts, .reuse = true)
{
    leave(on);
    come_back(on);
    for (size_t kind = 0; kind < COUNT_OF(faults); kind++) {
        for (uint32_t nth = 1; nth <= RIG_REGIONS; nth++) {
            rig_change(on, nth % RIG_REGIONS);
            rig_change(on, 8);
            order_fault(on->device, &faults[kind], nth);
            refit_status status = offload_all(on->offloader, &on->error);
            faulty_device_reset(on->device);
            if (status != REFIT_OK && rig_state(on) != REFIT_RESIDENT) rig_restore(on);
            if (rig_state(on) == REFIT_RESIDENT) {
                rig_check_kept(on);
                leave(on);
            }
            come_back(on);
        }
    }
}

SCENE(what_cannot_be_reused_is_refused, .unsealed = true)
{
    refit_region_id id;
    void *memory = rig_extra(on, 4096);
    static const uint16_t weights[1024];
    refit_region_desc desc = {.size = sizeof desc, .name = "x", .memory = memory, .bytes = 4096};
    desc.reuse = 2;
    assert_int_equal(refit_offloader_add(on->offloader, &desc, &id, &on->error), REFIT_ERR_INVALID);
    desc.reuse = 1;
    desc.policy = REFIT_ZERO;
    assert_int_equal(refit_offloader_add(on->offloader, &desc, &id, &on->error), REFIT_ERR_INVALID);
    desc.policy = REFIT_KEEP;
    desc.weights = weights;
    assert_int_equal(refit_offloader_add(on->offloader, &desc, &id, &on->error), REFIT_ERR_INVALID);
    assert_says(&on->error, "holds no masters");
    desc.weights = NULL;
    assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
}

int main(void)
{
    return test_run("unchanged");
}
