/* Structs that cross the door keep their sizes and offsets: a program compiled against these
 * headers runs with the next library. New fields go to the end. The numbers are those of LP64
 * systems. */
#include <refit.h>
#include <refit/advanced/activations.h>
#include <refit/advanced/archive.h>
#include <refit/advanced/arena.h>
#include <refit/advanced/host_step.h>
#include <refit/advanced/query.h>
#include <refit/advanced/torch.h>
#include <refit/advanced/window.h>

#include "tests/support/test.h"

typedef struct place {
    const char *name;
    size_t is;
    size_t should_be;
} place;

#define SIZE(type, bytes)          "sizeof " #type, sizeof(type), (bytes)
#define OFFSET(type, field, bytes) #type "." #field, offsetof(type, field), (bytes)

static const place places[] = {
    {SIZE(refit_error, 256)},
    {OFFSET(refit_error, status, 0)},
    {OFFSET(refit_error, subsystem, 4)},
    {OFFSET(refit_error, text, 8)},

    {SIZE(refit_allocator, 40)},
    {OFFSET(refit_allocator, size, 0)},
    {OFFSET(refit_allocator, allocate, 8)},
    {OFFSET(refit_allocator, reallocate, 16)},
    {OFFSET(refit_allocator, release, 24)},
    {OFFSET(refit_allocator, user, 32)},

    {SIZE(refit_config, 1584)},
    {OFFSET(refit_config, size, 0)},
    {OFFSET(refit_config, origin, 8)},
    {OFFSET(refit_config, device, 104)},
    {OFFSET(refit_config, use_pinned_optimizer_offload, 168)},
    {OFFSET(refit_config, offload_slab_bytes, 176)},
    {OFFSET(refit_config, offload_alignment_bytes, 184)},
    {OFFSET(refit_config, offload_budget_bytes, 192)},
    {OFFSET(refit_config, offload_budget_share, 200)},
    {OFFSET(refit_config, offload_pin, 208)},
    {OFFSET(refit_config, offload_huge_pages, 212)},
    {OFFSET(refit_config, offload_numa, 216)},
    {OFFSET(refit_config, offload_touch_threads, 220)},
    {OFFSET(refit_config, offload_copy_threads, 224)},
    {OFFSET(refit_config, offload_piece_bytes, 232)},
    {OFFSET(refit_config, offload_chunk_bytes, 240)},
    {OFFSET(refit_config, offload_batch, 248)},
    {OFFSET(refit_config, offload_verify, 252)},
    {OFFSET(refit_config, offload_background, 253)},
    {OFFSET(refit_config, offload_take_turns, 254)},
    {OFFSET(refit_config, offload_timeout_ms, 256)},
    {OFFSET(refit_config, offload_rate_limit, 264)},
    {OFFSET(refit_config, offload_small_bytes, 272)},
    {OFFSET(refit_config, offload_staging_bytes, 280)},
    {OFFSET(refit_config, broadcast_endpoint, 288)},
    {OFFSET(refit_config, broadcast_worker, 544)},
    {OFFSET(refit_config, broadcast_shm, 608)},
    {OFFSET(refit_config, broadcast_gpu, 612)},
    {OFFSET(refit_config, broadcast_slots, 616)},
    {OFFSET(refit_config, broadcast_frame_bytes, 624)},
    {OFFSET(refit_config, broadcast_window, 632)},
    {OFFSET(refit_config, broadcast_commit, 636)},
    {OFFSET(refit_config, broadcast_quorum, 640)},
    {OFFSET(refit_config, broadcast_stage_timeout_ms, 644)},
    {OFFSET(refit_config, broadcast_commit_timeout_ms, 648)},
    {OFFSET(refit_config, broadcast_heartbeat_ms, 652)},
    {OFFSET(refit_config, broadcast_heartbeat_timeout_ms, 656)},
    {OFFSET(refit_config, broadcast_resend_limit, 660)},
    {OFFSET(refit_config, broadcast_verify, 664)},
    {OFFSET(refit_config, broadcast_delta, 668)},
    {OFFSET(refit_config, broadcast_compress, 672)},
    {OFFSET(refit_config, broadcast_compress_level, 676)},
    {OFFSET(refit_config, broadcast_encode_threads, 680)},
    {OFFSET(refit_config, broadcast_insecure, 684)},
    {OFFSET(refit_config, broadcast_linger_ms, 688)},
    {OFFSET(refit_config, broadcast_idle_timeout_ms, 692)},
    {OFFSET(refit_config, limits_workers, 696)},
    {OFFSET(refit_config, limits_tensors, 700)},
    {OFFSET(refit_config, limits_rank, 704)},
    {OFFSET(refit_config, limits_name_bytes, 708)},
    {OFFSET(refit_config, limits_message_bytes, 712)},
    {OFFSET(refit_config, limits_manifest_bytes, 720)},
    {OFFSET(refit_config, limits_frame_bytes, 728)},
    {OFFSET(refit_config, limits_version_bytes, 736)},
    {OFFSET(refit_config, limits_window, 744)},
    {OFFSET(refit_config, limits_blocks, 748)},
    {OFFSET(refit_config, security_key, 752)},
    {OFFSET(refit_config, security_server_key, 1008)},
    {OFFSET(refit_config, security_allow, 1264)},
    {OFFSET(refit_config, archive_anchor_every, 1520)},
    {OFFSET(refit_config, offload_window_bytes, 1528)},
    {OFFSET(refit_config, offload_windows, 1536)},
    {OFFSET(refit_config, offload_masters, 1540)},
    {OFFSET(refit_config, offload_host_step_threads, 1544)},
    {OFFSET(refit_config, offload_host_step_bind, 1548)},
    {OFFSET(refit_config, activations_host_bytes, 1552)},
    {OFFSET(refit_config, activations_min_bytes, 1560)},
    {OFFSET(refit_config, activations_in_flight, 1568)},
    {OFFSET(refit_config, activations_prefetch, 1572)},
    {OFFSET(refit_config, activations_keep_last, 1576)},
    {OFFSET(refit_config, activations_aim, 1580)},

    {SIZE(refit_option, 64)},
    {OFFSET(refit_option, size, 0)},
    {OFFSET(refit_option, key, 8)},
    {OFFSET(refit_option, value, 16)},
    {OFFSET(refit_option, default_value, 24)},
    {OFFSET(refit_option, unit, 32)},
    {OFFSET(refit_option, help, 40)},
    {OFFSET(refit_option, origin, 48)},
    {OFFSET(refit_option, range, 56)},

    {SIZE(refit_stream_ref, 8)},
    {OFFSET(refit_stream_ref, native, 0)},

    {SIZE(refit_device_info, 176)},
    {OFFSET(refit_device_info, size, 0)},
    {OFFSET(refit_device_info, kind, 8)},
    {OFFSET(refit_device_info, name, 24)},
    {OFFSET(refit_device_info, capacity_bytes, 88)},
    {OFFSET(refit_device_info, used_bytes, 96)},
    {OFFSET(refit_device_info, host_addressable, 104)},
    {OFFSET(refit_device_info, stable_arena, 105)},
    {OFFSET(refit_device_info, kernels, 106)},
    {OFFSET(refit_device_info, numa_node, 108)},
    {OFFSET(refit_device_info, driver_version, 112)},
    {OFFSET(refit_device_info, uuid, 116)},
    {OFFSET(refit_device_info, small_bytes, 168)},

    {SIZE(refit_region_desc, 64)},
    {OFFSET(refit_region_desc, size, 0)},
    {OFFSET(refit_region_desc, name, 8)},
    {OFFSET(refit_region_desc, memory, 16)},
    {OFFSET(refit_region_desc, bytes, 24)},
    {OFFSET(refit_region_desc, policy, 32)},
    {OFFSET(refit_region_desc, group, 36)},
    {OFFSET(refit_region_desc, priority, 40)},
    {OFFSET(refit_region_desc, placement, 48)},
    {OFFSET(refit_region_desc, weights, 56)},

    {SIZE(refit_region_info, 72)},
    {OFFSET(refit_region_info, size, 0)},
    {OFFSET(refit_region_info, name, 8)},
    {OFFSET(refit_region_info, memory, 16)},
    {OFFSET(refit_region_info, bytes, 24)},
    {OFFSET(refit_region_info, host_offset, 32)},
    {OFFSET(refit_region_info, policy, 40)},
    {OFFSET(refit_region_info, group, 44)},
    {OFFSET(refit_region_info, priority, 48)},
    {OFFSET(refit_region_info, place, 52)},
    {OFFSET(refit_region_info, bound, 56)},
    {OFFSET(refit_region_info, in_arena, 57)},
    {OFFSET(refit_region_info, host_bytes, 64)},

    {SIZE(refit_memory_hooks, 32)},
    {OFFSET(refit_memory_hooks, size, 0)},
    {OFFSET(refit_memory_hooks, release, 8)},
    {OFFSET(refit_memory_hooks, acquire, 16)},
    {OFFSET(refit_memory_hooks, user, 24)},

    {SIZE(refit_tensor, 104)},
    {OFFSET(refit_tensor, size, 0)},
    {OFFSET(refit_tensor, name, 8)},
    {OFFSET(refit_tensor, dtype, 16)},
    {OFFSET(refit_tensor, rank, 20)},
    {OFFSET(refit_tensor, shape, 24)},
    {OFFSET(refit_tensor, bytes, 88)},
    {OFFSET(refit_tensor, alias_of, 96)},

    {SIZE(refit_worker_info, 256)},
    {OFFSET(refit_worker_info, size, 0)},
    {OFFSET(refit_worker_info, name, 8)},
    {OFFSET(refit_worker_info, path, 72)},
    {OFFSET(refit_worker_info, version, 80)},
    {OFFSET(refit_worker_info, subscribed, 88)},
    {OFFSET(refit_worker_info, member, 89)},
    {OFFSET(refit_worker_info, committed, 90)},
    {OFFSET(refit_worker_info, status, 92)},
    {OFFSET(refit_worker_info, reason, 96)},

    {SIZE(refit_subscriber_info, 112)},
    {OFFSET(refit_subscriber_info, size, 0)},
    {OFFSET(refit_subscriber_info, worker, 8)},
    {OFFSET(refit_subscriber_info, connected, 72)},
    {OFFSET(refit_subscriber_info, path, 76)},
    {OFFSET(refit_subscriber_info, epoch, 80)},
    {OFFSET(refit_subscriber_info, version, 88)},
    {OFFSET(refit_subscriber_info, state, 96)},

    {SIZE(refit_weight, 24)},
    {OFFSET(refit_weight, tensor, 0)},
    {OFFSET(refit_weight, memory, 8)},
    {OFFSET(refit_weight, bytes, 16)},

    {SIZE(refit_query_info, 80)},
    {OFFSET(refit_query_info, size, 0)},
    {OFFSET(refit_query_info, epoch, 8)},
    {OFFSET(refit_query_info, version, 16)},
    {OFFSET(refit_query_info, weight_bytes, 24)},
    {OFFSET(refit_query_info, frame_bytes, 32)},
    {OFFSET(refit_query_info, tensors, 40)},
    {OFFSET(refit_query_info, sealed, 44)},
    {OFFSET(refit_query_info, digest, 45)},
    {OFFSET(refit_query_info, manifest, 61)},

    {SIZE(refit_destination, 48)},
    {OFFSET(refit_destination, size, 0)},
    {OFFSET(refit_destination, name, 8)},
    {OFFSET(refit_destination, memory, 16)},
    {OFFSET(refit_destination, bytes, 24)},
    {OFFSET(refit_destination, device, 32)},
    {OFFSET(refit_destination, dtype, 40)},
    {OFFSET(refit_destination, cast, 44)},

    {SIZE(refit_archive_version, 56)},
    {OFFSET(refit_archive_version, size, 0)},
    {OFFSET(refit_archive_version, epoch, 8)},
    {OFFSET(refit_archive_version, version, 16)},
    {OFFSET(refit_archive_version, digest, 24)},
    {OFFSET(refit_archive_version, tensors, 32)},
    {OFFSET(refit_archive_version, weights, 40)},
    {OFFSET(refit_archive_version, count, 48)},
    {OFFSET(refit_archive_version, weight_count, 52)},

    {SIZE(refit_archive_info, 200)},
    {OFFSET(refit_archive_info, size, 0)},
    {OFFSET(refit_archive_info, name, 8)},
    {OFFSET(refit_archive_info, epoch, 72)},
    {OFFSET(refit_archive_info, version, 80)},
    {OFFSET(refit_archive_info, base, 88)},
    {OFFSET(refit_archive_info, file_bytes, 96)},
    {OFFSET(refit_archive_info, weight_bytes, 104)},
    {OFFSET(refit_archive_info, elements, 112)},
    {OFFSET(refit_archive_info, changed, 120)},
    {OFFSET(refit_archive_info, tensors, 128)},
    {OFFSET(refit_archive_info, blocks_same, 132)},
    {OFFSET(refit_archive_info, blocks_sparse, 136)},
    {OFFSET(refit_archive_info, blocks_dense, 140)},
    {OFFSET(refit_archive_info, frames, 144)},
    {OFFSET(refit_archive_info, frames_packed, 148)},
    {OFFSET(refit_archive_info, digest, 152)},
    {OFFSET(refit_archive_info, base_digest, 168)},
    {OFFSET(refit_archive_info, manifest, 184)},

    {SIZE(refit_window_part, 32)},
    {OFFSET(refit_window_part, region, 8)},
    {OFFSET(refit_window_part, flags, 12)},
    {OFFSET(refit_window_part, offset, 16)},
    {OFFSET(refit_window_part, bytes, 24)},

    {SIZE(refit_window_view, 24)},
    {OFFSET(refit_window_view, first, 8)},
    {OFFSET(refit_window_view, count, 12)},
    {OFFSET(refit_window_view, memory, 16)},

    {SIZE(refit_optimizer_options, 88)},
    {OFFSET(refit_optimizer_options, optimizer, 8)},
    {OFFSET(refit_optimizer_options, decoupled, 12)},
    {OFFSET(refit_optimizer_options, maximize, 15)},
    {OFFSET(refit_optimizer_options, lr, 16)},
    {OFFSET(refit_optimizer_options, dampening, 72)},
    {OFFSET(refit_optimizer_options, lr_is_tensor, 80)},

    {SIZE(refit_host_parameter, 72)},
    {OFFSET(refit_host_parameter, name, 8)},
    {OFFSET(refit_host_parameter, memory, 16)},
    {OFFSET(refit_host_parameter, elements, 24)},
    {OFFSET(refit_host_parameter, type, 32)},
    {OFFSET(refit_host_parameter, gradient_type, 36)},
    {OFFSET(refit_host_parameter, group, 40)},
    {OFFSET(refit_host_parameter, master, 44)},
    {OFFSET(refit_host_parameter, master_region, 48)},
    {OFFSET(refit_host_parameter, state_count, 52)},
    {OFFSET(refit_host_parameter, states, 56)},

    {SIZE(refit_tensor_change, 40)},
    {OFFSET(refit_tensor_change, size, 0)},
    {OFFSET(refit_tensor_change, elements, 8)},
    {OFFSET(refit_tensor_change, changed, 16)},
    {OFFSET(refit_tensor_change, blocks_same, 24)},
    {OFFSET(refit_tensor_change, blocks_sparse, 28)},
    {OFFSET(refit_tensor_change, blocks_dense, 32)},

    {SIZE(refit_stats, 768)},
    {OFFSET(refit_stats, size, 0)},
    {OFFSET(refit_stats, offload_regions, 8)},
    {OFFSET(refit_stats, join_seconds_last, 400)},
    {OFFSET(refit_stats, host_ready_bytes, 408)},
    {OFFSET(refit_stats, publish_pinned_bytes, 448)},
    {OFFSET(refit_stats, publish_encode_seconds_last, 488)},
    {OFFSET(refit_stats, receive_apply_seconds_last, 520)},
    {OFFSET(refit_stats, connections_held_off, 552)},
    {OFFSET(refit_stats, step_count, 560)},
    {OFFSET(refit_stats, window_bytes, 608)},
    {OFFSET(refit_stats, host_step_bytes, 632)},
    {OFFSET(refit_stats, host_step_count, 640)},
    {OFFSET(refit_stats, host_step_compute_seconds_last, 672)},
    {OFFSET(refit_stats, activation_groups, 680)},
    {OFFSET(refit_stats, activation_failures, 752)},
    {OFFSET(refit_stats, activation_blocked_seconds_total, 760)},
};

TEST(every_struct_keeps_its_places)
{
    if (sizeof(void *) != 8) skip();
    size_t moved = 0;
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        if (places[i].is == places[i].should_be) continue;
        print_error("%s is %zu and was %zu\n", places[i].name, places[i].is, places[i].should_be);
        moved++;
    }
    assert_int_equal(moved, 0);
}

int main(void)
{
    return test_run("struct_layout");
}
