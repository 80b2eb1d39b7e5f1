"""The C library's door for ctypes. Made by make_abi.py from lib/include; do not edit."""

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_longlong,
    c_size_t,
    c_ssize_t,
    c_ubyte,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Final

REFIT_OK: Final = 0
REFIT_ERR_INVALID: Final = 1
REFIT_ERR_STATE: Final = 2
REFIT_ERR_HOST_MEMORY: Final = 3
REFIT_ERR_DEVICE_MEMORY: Final = 4
REFIT_ERR_BUDGET: Final = 5
REFIT_ERR_PIN: Final = 6
REFIT_ERR_TIMEOUT: Final = 7
REFIT_ERR_CANCELLED: Final = 8
REFIT_ERR_COPY: Final = 9
REFIT_ERR_DEVICE: Final = 10
REFIT_ERR_UNSUPPORTED: Final = 11
REFIT_ERR_NOT_FOUND: Final = 12
REFIT_ERR_EXISTS: Final = 13
REFIT_ERR_BUSY: Final = 14
REFIT_ERR_IO: Final = 15
REFIT_ERR_CONFIG: Final = 16
REFIT_ERR_PROTOCOL: Final = 17
REFIT_ERR_LIMIT: Final = 18
REFIT_ERR_CORRUPT: Final = 19
REFIT_ERR_STALE: Final = 20
REFIT_ERR_PEER: Final = 21
REFIT_ERR_CLOSED: Final = 22
REFIT_ERR_CALLBACK: Final = 23
REFIT_ERR_SYSTEM: Final = 24
REFIT_ERR_SECURITY: Final = 25
REFIT_PIN_AUTO: Final = 0
REFIT_PIN_REQUIRE: Final = 1
REFIT_PIN_PREFER: Final = 2
REFIT_PIN_OFF: Final = 3
REFIT_HUGE_PAGES_AUTO: Final = 0
REFIT_HUGE_PAGES_ALWAYS: Final = 1
REFIT_HUGE_PAGES_NEVER: Final = 2
REFIT_MASTERS_AUTO: Final = 0
REFIT_MASTERS_WHOLE: Final = 1
REFIT_HOST_STEP_BIND_NODE: Final = 0
REFIT_HOST_STEP_BIND_NONE: Final = 1
REFIT_ACTIVATIONS_AIM_OVERLAP: Final = 0
REFIT_ACTIVATIONS_AIM_MEMORY: Final = 1
REFIT_SHM_AUTO: Final = 0
REFIT_SHM_REQUIRE: Final = 1
REFIT_SHM_OFF: Final = 2
REFIT_GPU_AUTO: Final = 0
REFIT_GPU_REQUIRE: Final = 1
REFIT_GPU_OFF: Final = 2
REFIT_GPU_STORE: Final = 3
REFIT_COMMIT_ALL: Final = 0
REFIT_COMMIT_QUORUM: Final = 1
REFIT_WAIT_APPLIED: Final = 0
REFIT_WAIT_STAGED: Final = 1
REFIT_WAIT_NONE: Final = 2
REFIT_HOST_IMAGE_AUTO: Final = 0
REFIT_HOST_IMAGE_OFF: Final = 1
REFIT_VERIFY_AUTO: Final = 0
REFIT_VERIFY_ALWAYS: Final = 1
REFIT_DELTA_AUTO: Final = 0
REFIT_DELTA_ALWAYS: Final = 1
REFIT_DELTA_NEVER: Final = 2
REFIT_COMPRESS_NONE: Final = 0
REFIT_COMPRESS_ZSTD: Final = 1
REFIT_CONFIG_DEFAULT: Final = 0
REFIT_CONFIG_FILE: Final = 1
REFIT_CONFIG_ENVIRONMENT: Final = 2
REFIT_CONFIG_EXPLICIT: Final = 3
REFIT_BOOL: Final = 1
REFIT_F4: Final = 2
REFIT_F6_E2M3: Final = 3
REFIT_F6_E3M2: Final = 4
REFIT_U8: Final = 5
REFIT_I8: Final = 6
REFIT_F8_E5M2: Final = 7
REFIT_F8_E4M3: Final = 8
REFIT_F8_E8M0: Final = 9
REFIT_I16: Final = 10
REFIT_U16: Final = 11
REFIT_F16: Final = 12
REFIT_BF16: Final = 13
REFIT_I32: Final = 14
REFIT_U32: Final = 15
REFIT_F32: Final = 16
REFIT_C64: Final = 17
REFIT_F64: Final = 18
REFIT_I64: Final = 19
REFIT_U64: Final = 20
REFIT_PATH_NONE: Final = 0
REFIT_PATH_SOCKET: Final = 1
REFIT_PATH_SHM: Final = 2
REFIT_PATH_CUDA_IPC: Final = 3
REFIT_PATH_NEIGHBOR: Final = 4
REFIT_PATH_ARCHIVE: Final = 5
REFIT_KEEP: Final = 0
REFIT_DISCARD: Final = 1
REFIT_ZERO: Final = 2
REFIT_PLACEMENT_DEVICE: Final = 0
REFIT_PLACEMENT_HOST: Final = 1
REFIT_OPEN: Final = 0
REFIT_RESIDENT: Final = 1
REFIT_OFFLOADING: Final = 2
REFIT_OFFLOADED: Final = 3
REFIT_RESTORING: Final = 4
REFIT_FAILED: Final = 5
REFIT_ON_DEVICE: Final = 0
REFIT_ON_HOST: Final = 1
REFIT_TRAINING: Final = 0
REFIT_CLEARED: Final = 1
REFIT_REFITTED: Final = 2
REFIT_RETURNING: Final = 3
REFIT_LOG_ERROR: Final = 0
REFIT_LOG_WARNING: Final = 1
REFIT_LOG_INFO: Final = 2
REFIT_LOG_DEBUG: Final = 3
REFIT_ARCHIVE_READ: Final = 0
REFIT_ARCHIVE_WRITE: Final = 1
REFIT_MASTER_NONE: Final = 0
REFIT_MASTER_FP32: Final = 1
REFIT_MASTER_REMAINDER: Final = 2
REFIT_ADAM: Final = 0
REFIT_ADAGRAD: Final = 1
REFIT_SGD: Final = 2
REFIT_LION: Final = 3
REFIT_PARAMETER_SUBMITTED: Final = 1
REFIT_PARAMETER_STEPPED: Final = 2
REFIT_PARAMETER_RETURNED: Final = 4
REFIT_PART_SAME_WINDOW: Final = 1
REFIT_PART_NEW: Final = 2
REFIT_CONFIG_ORIGINS: Final = 96
REFIT_RANK_MAX: Final = 8
REFIT_NO_ALIAS: Final = 4294967295
REFIT_TO_THE_END: Final = 18446744073709551615
REFIT_BOX_RANK_MAX: Final = 4
REFIT_GROUPS: Final = 64
REFIT_VERSION_MAJOR: Final = 0
REFIT_VERSION_MINOR: Final = 1
REFIT_VERSION_PATCH: Final = 0
REFIT_ACTIVATION_STAYS: Final = 4294967295
REFIT_CHANGED_UNKNOWN: Final = 18446744073709551615
REFIT_HOST_STATES: Final = 3
REFIT_EACH_PARAMETER: Final = 4294967295
REFIT_WINDOWS: Final = 4


class refit_error(Structure):
    __slots__ = ()
    _fields_ = [
        ("status", c_int32),
        ("subsystem", c_int32),
        ("text", c_char * 248),
    ]


class refit_config(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("origin", c_ubyte * 96),
        ("device", c_char * 64),
        ("use_pinned_optimizer_offload", c_uint8),
        ("offload_slab_bytes", c_uint64),
        ("offload_alignment_bytes", c_uint64),
        ("offload_budget_bytes", c_uint64),
        ("offload_budget_share", c_double),
        ("offload_pin", c_int32),
        ("offload_huge_pages", c_int32),
        ("offload_numa", c_int32),
        ("offload_touch_threads", c_uint32),
        ("offload_copy_threads", c_uint32),
        ("offload_piece_bytes", c_uint64),
        ("offload_chunk_bytes", c_uint64),
        ("offload_batch", c_uint32),
        ("offload_verify", c_uint8),
        ("offload_background", c_uint8),
        ("offload_take_turns", c_uint8),
        ("offload_timeout_ms", c_uint32),
        ("offload_rate_limit", c_uint64),
        ("offload_small_bytes", c_uint64),
        ("offload_staging_bytes", c_uint64),
        ("broadcast_endpoint", c_char * 256),
        ("broadcast_worker", c_char * 64),
        ("broadcast_shm", c_int32),
        ("broadcast_gpu", c_int32),
        ("broadcast_slots", c_uint32),
        ("broadcast_frame_bytes", c_uint64),
        ("broadcast_window", c_uint32),
        ("broadcast_commit", c_int32),
        ("broadcast_quorum", c_uint32),
        ("broadcast_stage_timeout_ms", c_uint32),
        ("broadcast_commit_timeout_ms", c_uint32),
        ("broadcast_heartbeat_ms", c_uint32),
        ("broadcast_heartbeat_timeout_ms", c_uint32),
        ("broadcast_resend_limit", c_uint32),
        ("broadcast_verify", c_int32),
        ("broadcast_delta", c_int32),
        ("broadcast_compress", c_int32),
        ("broadcast_compress_level", c_uint32),
        ("broadcast_encode_threads", c_uint32),
        ("broadcast_insecure", c_uint8),
        ("broadcast_linger_ms", c_uint32),
        ("broadcast_idle_timeout_ms", c_uint32),
        ("limits_workers", c_uint32),
        ("limits_tensors", c_uint32),
        ("limits_rank", c_uint32),
        ("limits_name_bytes", c_uint32),
        ("limits_message_bytes", c_uint64),
        ("limits_manifest_bytes", c_uint64),
        ("limits_frame_bytes", c_uint64),
        ("limits_version_bytes", c_uint64),
        ("limits_window", c_uint32),
        ("limits_blocks", c_uint32),
        ("security_key", c_char * 256),
        ("security_server_key", c_char * 256),
        ("security_allow", c_char * 256),
        ("archive_anchor_every", c_uint32),
        ("offload_window_bytes", c_uint64),
        ("offload_windows", c_uint32),
        ("offload_masters", c_int32),
        ("offload_host_step_threads", c_uint32),
        ("offload_host_step_bind", c_int32),
        ("activations_host_bytes", c_uint64),
        ("activations_min_bytes", c_uint64),
        ("activations_in_flight", c_uint32),
        ("activations_prefetch", c_uint32),
        ("activations_keep_last", c_uint32),
        ("activations_aim", c_int32),
        ("broadcast_gpu_bucket_bytes", c_uint64),
        ("broadcast_wait", c_int32),
        ("broadcast_max_behind", c_uint32),
        ("broadcast_host_image", c_int32),
    ]


class refit_option(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("key", c_char_p),
        ("value", c_char_p),
        ("default_value", c_char_p),
        ("unit", c_char_p),
        ("help", c_char_p),
        ("origin", c_int),
        ("range", c_char_p),
    ]


refit_option_fn = CFUNCTYPE(None, c_void_p, POINTER(refit_option))


class refit_stream_ref(Structure):
    __slots__ = ()
    _fields_ = [
        ("native", c_void_p),
    ]


class refit_device_info(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("kind", c_char * 16),
        ("name", c_char * 64),
        ("capacity_bytes", c_uint64),
        ("used_bytes", c_uint64),
        ("host_addressable", c_uint8),
        ("stable_arena", c_uint8),
        ("kernels", c_uint8),
        ("numa_node", c_int32),
        ("driver_version", c_int32),
        ("uuid", c_char * 48),
        ("small_bytes", c_uint64),
    ]


refit_stream_fn = CFUNCTYPE(None, c_void_p)


class refit_stats(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("offload_regions", c_uint64),
        ("offload_copies_per_cycle", c_uint64),
        ("offload_count", c_uint64),
        ("offload_bytes_total", c_uint64),
        ("offload_bytes_last", c_uint64),
        ("offload_reclaimed_bytes_last", c_uint64),
        ("offload_seconds_last", c_double),
        ("offload_blocked_seconds_last", c_double),
        ("restore_count", c_uint64),
        ("restore_bytes_total", c_uint64),
        ("restore_bytes_last", c_uint64),
        ("restore_seconds_last", c_double),
        ("restore_blocked_seconds_last", c_double),
        ("offload_failures", c_uint64),
        ("host_payload_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("host_pinned_bytes", c_uint64),
        ("host_pageable_bytes", c_uint64),
        ("host_huge_pages", c_uint64),
        ("host_pin_seconds", c_double),
        ("read_locks", c_uint64),
        ("publish_version", c_uint64),
        ("publish_count", c_uint64),
        ("publish_aborts", c_uint64),
        ("publish_bytes_last", c_uint64),
        ("publish_sent_bytes_total", c_uint64),
        ("publish_resent_frames", c_uint64),
        ("publish_same_blocks_last", c_uint64),
        ("publish_write_seconds_last", c_double),
        ("publish_stage_seconds_last", c_double),
        ("publish_commit_seconds_last", c_double),
        ("workers", c_uint64),
        ("workers_shm", c_uint64),
        ("workers_committed_last", c_uint64),
        ("workers_evicted", c_uint64),
        ("messages_refused", c_uint64),
        ("receive_version", c_uint64),
        ("receive_count", c_uint64),
        ("receive_aborts", c_uint64),
        ("receive_bytes_total", c_uint64),
        ("receive_bad_frames", c_uint64),
        ("receive_stage_seconds_last", c_double),
        ("cycles", c_uint64),
        ("cycle_failures", c_uint64),
        ("cycle_seconds_last", c_double),
        ("cycle_blocked_seconds_last", c_double),
        ("cycle_offload_seconds_last", c_double),
        ("cycle_publish_seconds_last", c_double),
        ("cycle_restore_seconds_last", c_double),
        ("cycle_wait_seconds_last", c_double),
        ("host_ready_bytes", c_uint64),
        ("workers_gpu", c_uint64),
        ("publish_shm_bytes_total", c_uint64),
        ("publish_gpu_bytes_total", c_uint64),
        ("publish_gpu_bytes", c_uint64),
        ("publish_pinned_bytes", c_uint64),
        ("publish_sparse_blocks_last", c_uint64),
        ("publish_dense_blocks_last", c_uint64),
        ("publish_changed_elements_last", c_uint64),
        ("publish_delta_bytes_last", c_uint64),
        ("publish_encode_seconds_last", c_double),
        ("receive_bound", c_uint64),
        ("receive_applied_bytes_total", c_uint64),
        ("receive_rollbacks", c_uint64),
        ("receive_apply_seconds_last", c_double),
        ("connections_unclaimed", c_uint64),
        ("connections_ended", c_uint64),
        ("connections_refused", c_uint64),
        ("connections_held_off", c_uint64),
        ("step_count", c_uint64),
        ("step_failures", c_uint64),
        ("step_in_bytes_last", c_uint64),
        ("step_out_bytes_last", c_uint64),
        ("step_seconds_last", c_double),
        ("step_blocked_seconds_last", c_double),
        ("window_bytes", c_uint64),
        ("host_step_in_bytes_last", c_uint64),
        ("host_step_out_bytes_last", c_uint64),
        ("host_step_bytes", c_uint64),
        ("host_step_count", c_uint64),
        ("host_step_failures", c_uint64),
        ("host_step_seconds_last", c_double),
        ("host_step_blocked_seconds_last", c_double),
        ("host_step_compute_seconds_last", c_double),
        ("activation_groups", c_uint64),
        ("activation_host_bytes", c_uint64),
        ("activation_used_bytes", c_uint64),
        ("activation_used_bytes_peak", c_uint64),
        ("activation_out_bytes_total", c_uint64),
        ("activation_in_bytes_total", c_uint64),
        ("activation_refused_bytes_total", c_uint64),
        ("activation_out_of_order", c_uint64),
        ("activation_reused", c_uint64),
        ("activation_failures", c_uint64),
        ("activation_blocked_seconds_total", c_double),
        ("workers_neighbor", c_uint64),
    ]


class refit_tensor(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("dtype", c_int),
        ("rank", c_uint32),
        ("shape", c_uint64 * 8),
        ("bytes", c_uint64),
        ("alias_of", c_uint32),
    ]


class refit_selection(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("rank", c_uint32),
        ("first", c_uint64 * 8),
        ("shape", c_uint64 * 8),
    ]


class refit_shards(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("coordinator", c_char_p),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("list", POINTER(refit_selection)),
        ("count", c_uint32),
    ]


class refit_weight(Structure):
    __slots__ = ()
    _fields_ = [
        ("tensor", c_uint32),
        ("memory", c_void_p),
        ("bytes", c_uint64),
    ]


class refit_worker_info(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char * 64),
        ("path", c_int),
        ("version", c_uint64),
        ("subscribed", c_uint8),
        ("member", c_uint8),
        ("committed", c_uint8),
        ("status", c_int),
        ("reason", c_char * 160),
    ]


class refit_subscriber_info(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("worker", c_char * 64),
        ("connected", c_uint8),
        ("path", c_int),
        ("epoch", c_uint64),
        ("version", c_uint64),
        ("state", c_char * 16),
    ]


class refit_destination(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("memory", c_void_p),
        ("bytes", c_uint64),
        ("device", c_void_p),
        ("dtype", c_int),
        ("cast", c_int),
    ]


class refit_box(Structure):
    __slots__ = ()
    _fields_ = [
        ("dtype", c_int),
        ("rank", c_uint32),
        ("shape", c_uint64 * 4),
        ("offset", c_uint64),
        ("from_strides", c_uint64 * 4),
        ("to_strides", c_uint64 * 4),
    ]


class refit_target(Structure):
    __slots__ = ()
    _fields_ = [
        ("tensor", c_uint32),
        ("memory", c_void_p),
        ("bytes", c_uint64),
        ("box", POINTER(refit_box)),
    ]


class refit_piece(Structure):
    __slots__ = ()
    _fields_ = [
        ("tensor", c_uint32),
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("memory", c_void_p),
    ]


class refit_region_desc(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("memory", c_void_p),
        ("bytes", c_uint64),
        ("policy", c_int),
        ("group", c_uint32),
        ("priority", c_int32),
        ("reserved", c_int32),
        ("placement", c_int),
        ("weights", POINTER(c_uint16)),
        ("reuse", c_uint32),
        ("reserved2", c_uint32),
    ]


class refit_region_info(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("memory", c_void_p),
        ("bytes", c_uint64),
        ("host_offset", c_uint64),
        ("policy", c_int),
        ("group", c_uint32),
        ("priority", c_int32),
        ("place", c_int),
        ("bound", c_uint8),
        ("in_arena", c_uint8),
        ("host_bytes", c_uint64),
    ]


class refit_memory_hooks(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("release", CFUNCTYPE(c_int, c_void_p, c_uint32, c_void_p, c_uint64)),
        ("acquire", CFUNCTYPE(c_int, c_void_p, c_uint32, c_uint64, POINTER(c_void_p))),
        ("user", c_void_p),
    ]


class refit_allocator(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("allocate", CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
        ("reallocate", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t)),
        ("release", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("user", c_void_p),
    ]


refit_log_fn = CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class refit_archive_version(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("epoch", c_uint64),
        ("version", c_uint64),
        ("digest", POINTER(c_ubyte)),
        ("tensors", POINTER(refit_tensor)),
        ("weights", POINTER(refit_weight)),
        ("count", c_uint32),
        ("weight_count", c_uint32),
    ]


class refit_archive_info(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char * 64),
        ("epoch", c_uint64),
        ("version", c_uint64),
        ("base", c_uint64),
        ("file_bytes", c_uint64),
        ("weight_bytes", c_uint64),
        ("elements", c_uint64),
        ("changed", c_uint64),
        ("tensors", c_uint32),
        ("blocks_same", c_uint32),
        ("blocks_sparse", c_uint32),
        ("blocks_dense", c_uint32),
        ("frames", c_uint32),
        ("frames_packed", c_uint32),
        ("digest", c_ubyte * 16),
        ("base_digest", c_ubyte * 16),
        ("manifest", c_ubyte * 16),
    ]


class refit_tensor_change(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("elements", c_uint64),
        ("changed", c_uint64),
        ("blocks_same", c_uint32),
        ("blocks_sparse", c_uint32),
        ("blocks_dense", c_uint32),
    ]


class refit_optimizer_options(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("optimizer", c_int32),
        ("decoupled", c_uint8),
        ("amsgrad", c_uint8),
        ("nesterov", c_uint8),
        ("maximize", c_uint8),
        ("lr", c_double),
        ("weight_decay", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("lr_decay", c_double),
        ("momentum", c_double),
        ("dampening", c_double),
        ("lr_is_tensor", c_uint8),
        ("reserved", c_uint8 * 7),
    ]


class refit_host_parameter(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("memory", c_void_p),
        ("elements", c_uint64),
        ("type", c_int32),
        ("gradient_type", c_int32),
        ("group", c_uint32),
        ("master", c_int32),
        ("master_region", c_uint32),
        ("state_count", c_uint32),
        ("states", c_uint32 * 3),
        ("reserved", c_uint32),
    ]


refit_sqrt_fn = CFUNCTYPE(None, c_int, POINTER(c_float), POINTER(c_float), c_longlong)


refit_sqrt_threads_fn = CFUNCTYPE(c_int, c_int)


class refit_query_info(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("epoch", c_uint64),
        ("version", c_uint64),
        ("weight_bytes", c_uint64),
        ("frame_bytes", c_uint64),
        ("tensors", c_uint32),
        ("sealed", c_uint8),
        ("digest", c_ubyte * 16),
        ("manifest", c_ubyte * 16),
    ]


class refit_window_part(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("region", c_uint32),
        ("flags", c_uint32),
        ("offset", c_uint64),
        ("bytes", c_uint64),
    ]


class refit_window_view(Structure):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("first", c_uint32),
        ("count", c_uint32),
        ("memory", POINTER(c_void_p)),
    ]


# What each function returns, and what it takes.
PROTOTYPES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "refit_status_name": (c_char_p, [
        c_int,
    ]),
    "refit_status_text": (c_char_p, [
        c_int,
    ]),
    "refit_config_init": (None, [
        POINTER(refit_config),
        c_size_t,
    ]),
    "refit_config_load": (c_int, [
        POINTER(refit_config),
        c_char_p,
        POINTER(refit_error),
    ]),
    "refit_config_load_env": (c_int, [
        POINTER(refit_config),
        POINTER(refit_error),
    ]),
    "refit_config_set": (c_int, [
        POINTER(refit_config),
        c_char_p,
        c_char_p,
        POINTER(refit_error),
    ]),
    "refit_config_check": (c_int, [
        POINTER(refit_config),
        POINTER(refit_error),
    ]),
    "refit_config_each": (None, [
        POINTER(refit_config),
        refit_option_fn,
        c_void_p,
    ]),
    "refit_device_open": (c_int, [
        c_char_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_device_close": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_device_describe": (c_int, [
        c_void_p,
        POINTER(refit_device_info),
        POINTER(refit_error),
    ]),
    "refit_memory_alloc": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_memory_free": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_stream_open": (c_int, [
        c_void_p,
        POINTER(refit_stream_ref),
        POINTER(refit_error),
    ]),
    "refit_stream_close": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_stream_wait": (c_int, [
        c_void_p,
        refit_stream_ref,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_stream_call": (c_int, [
        c_void_p,
        refit_stream_ref,
        refit_stream_fn,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_stream_copy": (c_int, [
        c_void_p,
        refit_stream_ref,
        c_void_p,
        c_void_p,
        c_uint64,
        POINTER(refit_error),
    ]),
    "refit_stream_cast_bf16": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(c_uint16),
        POINTER(c_float),
        c_uint64,
        POINTER(refit_error),
    ]),
    "refit_dtype_name": (c_char_p, [
        c_int,
    ]),
    "refit_dtype_bits": (c_uint32, [
        c_int,
    ]),
    "refit_dtype_parse": (c_int, [
        c_char_p,
        POINTER(c_int),
    ]),
    "refit_stats_init": (None, [
        POINTER(refit_stats),
        c_size_t,
    ]),
    "refit_stats_merge": (None, [
        POINTER(refit_stats),
        POINTER(refit_stats),
    ]),
    "refit_stats_json": (c_size_t, [
        POINTER(refit_stats),
        c_char_p,
        c_size_t,
    ]),
    "refit_stats_prometheus": (c_size_t, [
        POINTER(refit_stats),
        c_char_p,
        c_size_t,
    ]),
    "refit_tensor_digest": (c_uint64, [
        c_void_p,
        c_uint64,
    ]),
    "refit_version_digest": (c_int, [
        POINTER(refit_tensor),
        c_uint32,
        POINTER(c_uint64),
        c_ubyte * 16,
        POINTER(refit_error),
    ]),
    "refit_publisher_open": (c_int, [
        c_char_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_publisher_close": (None, [
        c_void_p,
    ]),
    "refit_publisher_end": (None, [
        c_void_p,
    ]),
    "refit_publisher_endpoint": (c_char_p, [
        c_void_p,
    ]),
    "refit_publisher_use_device": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_publisher_declare": (c_int, [
        c_void_p,
        POINTER(refit_tensor),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_publisher_shard": (c_int, [
        c_void_p,
        POINTER(refit_shards),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_publisher_set_wait": (c_int, [
        c_void_p,
        c_int,
        POINTER(refit_error),
    ]),
    "refit_publisher_cancel": (None, [
        c_void_p,
    ]),
    "refit_publisher_wait_workers": (c_int, [
        c_void_p,
        c_uint32,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_publisher_begin": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(refit_error),
    ]),
    "refit_publisher_write": (c_int, [
        c_void_p,
        c_uint32,
        c_void_p,
        c_uint64,
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_publisher_write_all": (c_int, [
        c_void_p,
        POINTER(refit_weight),
        c_uint32,
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_publisher_lend": (c_int, [
        c_void_p,
        POINTER(refit_weight),
        c_uint32,
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_publisher_commit": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_publisher_abort": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_publisher_version": (c_uint64, [
        c_void_p,
    ]),
    "refit_publisher_worker": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_worker_info),
        POINTER(refit_error),
    ]),
    "refit_publisher_stats": (c_int, [
        c_void_p,
        POINTER(refit_stats),
        POINTER(refit_error),
    ]),
    "refit_subscriber_open": (c_int, [
        c_char_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_subscriber_close": (None, [
        c_void_p,
    ]),
    "refit_subscriber_use_device": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_subscriber_select": (c_int, [
        c_void_p,
        POINTER(refit_selection),
        c_uint32,
        POINTER(c_ubyte),
        POINTER(refit_error),
    ]),
    "refit_subscriber_next": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_subscriber_wake": (None, [
        c_void_p,
    ]),
    "refit_subscriber_fd": (c_int, [
        c_void_p,
    ]),
    "refit_subscriber_describe": (c_int, [
        c_void_p,
        POINTER(refit_subscriber_info),
        POINTER(refit_error),
    ]),
    "refit_subscriber_stats": (c_int, [
        c_void_p,
        POINTER(refit_stats),
        POINTER(refit_error),
    ]),
    "refit_subscriber_bind": (c_int, [
        c_void_p,
        POINTER(refit_destination),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_subscriber_unbind": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_update_version": (c_uint64, [
        c_void_p,
    ]),
    "refit_update_epoch": (c_uint64, [
        c_void_p,
    ]),
    "refit_update_digest": (c_int, [
        c_void_p,
        c_ubyte * 16,
        POINTER(refit_error),
    ]),
    "refit_update_count": (c_uint32, [
        c_void_p,
    ]),
    "refit_update_manifest": (c_int, [
        c_void_p,
        c_ubyte * 16,
        POINTER(refit_error),
    ]),
    "refit_update_device": (c_void_p, [
        c_void_p,
    ]),
    "refit_update_tensor": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_tensor),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_update_places": (c_int, [
        c_void_p,
        POINTER(c_void_p),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_update_copy": (c_int, [
        c_void_p,
        POINTER(refit_target),
        c_uint32,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_update_is_streamed": (c_int, [
        c_void_p,
    ]),
    "refit_update_next_pieces": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(POINTER(refit_piece)),
        POINTER(c_uint32),
        POINTER(refit_error),
    ]),
    "refit_update_find": (c_int, [
        c_void_p,
        c_char_p,
        POINTER(c_uint32),
        POINTER(refit_error),
    ]),
    "refit_update_apply": (c_int, [
        c_void_p,
        POINTER(c_uint32),
        POINTER(refit_error),
    ]),
    "refit_update_accept": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_update_refuse": (c_int, [
        c_void_p,
        c_char_p,
        c_int,
        POINTER(refit_error),
    ]),
    "refit_update_retain": (c_int, [
        c_void_p,
        c_size_t,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_update_release": (None, [
        c_void_p,
    ]),
    "refit_update_close": (None, [
        c_void_p,
    ]),
    "refit_arena_open": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_arena_close": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_arena_alloc": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_arena_free": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_arena_piece": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_arena_add_stream": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_arena_remove_stream": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_arena_pin": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_arena_unpin": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_offloader_open": (c_int, [
        c_void_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_offloader_close": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_offloader_add": (c_int, [
        c_void_p,
        POINTER(refit_region_desc),
        POINTER(c_uint32),
        POINTER(refit_error),
    ]),
    "refit_offloader_add_each": (c_int, [
        c_void_p,
        POINTER(refit_region_desc),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_offloader_estimate": (c_int, [
        c_void_p,
        POINTER(c_uint64),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_offloader_set_memory": (c_int, [
        c_void_p,
        POINTER(refit_memory_hooks),
        POINTER(refit_error),
    ]),
    "refit_offloader_seal": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_offloader_prepare": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_offloader_unseal": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_offloader_clear": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_offloader_set_accumulating": (c_int, [
        c_void_p,
        c_int,
        POINTER(refit_error),
    ]),
    "refit_offloader_offload": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_offloader_wait": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_offloader_unbind": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_offloader_bind": (c_int, [
        c_void_p,
        c_uint32,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_offloader_bind_weights": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_uint16),
        POINTER(refit_error),
    ]),
    "refit_offloader_unbind_each": (c_int, [
        c_void_p,
        POINTER(c_uint32),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_offloader_bind_each": (c_int, [
        c_void_p,
        POINTER(c_uint32),
        POINTER(c_void_p),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_offloader_restore": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_offloader_get_state": (c_int, [
        c_void_p,
    ]),
    "refit_offloader_state_name": (c_char_p, [
        c_int,
    ]),
    "refit_offloader_count": (c_uint32, [
        c_void_p,
    ]),
    "refit_offloader_region": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_region_info),
        POINTER(refit_error),
    ]),
    "refit_offloader_stats": (c_int, [
        c_void_p,
        POINTER(refit_stats),
        POINTER(refit_error),
    ]),
    "refit_offloader_trim": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_future_wait": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_future_wait_group": (c_int, [
        c_void_p,
        c_uint32,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_future_done": (c_int, [
        c_void_p,
    ]),
    "refit_future_join": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_future_join_group": (c_int, [
        c_void_p,
        c_uint32,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_future_close": (None, [
        c_void_p,
    ]),
    "refit_read_lock_acquire": (c_int, [
        c_void_p,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_read_lock_read": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_read_lock_release": (None, [
        c_void_p,
    ]),
    "refit_controller_open": (c_int, [
        c_void_p,
        c_void_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_controller_add": (c_int, [
        c_void_p,
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_controller_close": (None, [
        c_void_p,
    ]),
    "refit_controller_offload": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_controller_publish": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(refit_weight),
        c_uint32,
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_controller_restore": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_controller_wait": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_controller_get_state": (c_int, [
        c_void_p,
    ]),
    "refit_controller_state_name": (c_char_p, [
        c_int,
    ]),
    "refit_controller_stats": (c_int, [
        c_void_p,
        POINTER(refit_stats),
        POINTER(refit_error),
    ]),
    "refit_set_allocator": (c_int, [
        POINTER(refit_allocator),
    ]),
    "refit_set_log": (None, [
        refit_log_fn,
        c_void_p,
        c_int,
    ]),
    "refit_log_ring_open": (c_int, [
        c_uint32,
        c_int,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_log_ring_set_level": (None, [
        c_void_p,
        c_int,
    ]),
    "refit_log_ring_count": (POINTER(c_uint64), [
        c_void_p,
    ]),
    "refit_log_ring_read": (c_int, [
        c_void_p,
        POINTER(c_int),
        c_char_p,
        c_size_t,
        POINTER(refit_error),
    ]),
    "refit_log_ring_lost": (c_uint64, [
        c_void_p,
    ]),
    "refit_log_ring_close": (None, [
        c_void_p,
    ]),
    "refit_keys_generate": (c_int, [
        c_char_p,
        c_char_p,
        c_int,
        POINTER(refit_error),
    ]),
    "refit_version": (c_char_p, []),
    "refit_activations_open": (c_int, [
        c_void_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_activations_close": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_activations_begin": (c_int, [
        c_void_p,
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_activations_add": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(c_void_p),
        POINTER(c_uint64),
        c_uint32,
        POINTER(c_uint32),
        POINTER(refit_error),
    ]),
    "refit_activations_commit": (c_int, [
        c_void_p,
        c_uint64,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_activations_join": (c_int, [
        c_void_p,
        c_uint64,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_activations_wait": (c_int, [
        c_void_p,
        c_uint64,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_activations_fetch": (c_int, [
        c_void_p,
        c_uint64,
        POINTER(c_void_p),
        c_uint32,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_activations_release": (c_int, [
        c_void_p,
        c_uint64,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_activations_stats": (c_int, [
        c_void_p,
        POINTER(refit_stats),
        POINTER(refit_error),
    ]),
    "refit_archive_open": (c_int, [
        c_char_p,
        c_int,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_archive_close": (None, [
        c_void_p,
    ]),
    "refit_archive_write": (c_int, [
        c_void_p,
        POINTER(refit_archive_version),
        POINTER(refit_error),
    ]),
    "refit_archive_commit": (c_int, [
        c_void_p,
        POINTER(refit_archive_info),
        POINTER(refit_error),
    ]),
    "refit_archive_abort": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_archive_prune": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_uint32),
        POINTER(refit_error),
    ]),
    "refit_archive_count": (c_uint32, [
        c_void_p,
    ]),
    "refit_archive_describe": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_archive_info),
        POINTER(refit_error),
    ]),
    "refit_archive_read": (c_int, [
        c_void_p,
        c_uint64,
        c_uint64,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_snapshot_open": (c_int, [
        c_char_p,
        POINTER(refit_config),
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_archive_outline": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_snapshot_close": (None, [
        c_void_p,
    ]),
    "refit_snapshot_describe": (c_int, [
        c_void_p,
        POINTER(refit_archive_info),
        POINTER(refit_error),
    ]),
    "refit_snapshot_count": (c_uint32, [
        c_void_p,
    ]),
    "refit_snapshot_tensor": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_tensor),
        POINTER(c_void_p),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_snapshot_change": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_tensor_change),
        POINTER(refit_error),
    ]),
    "refit_host_step_open": (c_int, [
        c_void_p,
        POINTER(refit_host_parameter),
        c_uint32,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_host_step_close": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_host_step_set_sqrt": (c_int, [
        c_void_p,
        refit_sqrt_fn,
        refit_sqrt_threads_fn,
        POINTER(refit_error),
    ]),
    "refit_host_step_load": (c_int, [
        c_void_p,
        c_int,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_host_step_begin": (c_int, [
        c_void_p,
        POINTER(refit_optimizer_options),
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_host_step_gradient": (c_int, [
        c_void_p,
        c_uint32,
        c_void_p,
        c_uint64,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_host_step_drop": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_host_step_refresh": (c_int, [
        c_void_p,
        c_uint32,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_host_step_norm": (c_int, [
        c_void_p,
        POINTER(c_double),
        POINTER(c_int),
        POINTER(refit_error),
    ]),
    "refit_host_step_run": (c_int, [
        c_void_p,
        c_double,
        c_double,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_host_step_skip": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_host_step_join": (c_int, [
        c_void_p,
        c_uint32,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_host_step_wait": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_host_step_progress": (c_uint32, [
        c_void_p,
        c_uint32,
    ]),
    "refit_host_step_parameter": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_host_step_region": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_query_open": (c_int, [
        c_char_p,
        POINTER(refit_config),
        c_uint32,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_query_close": (None, [
        c_void_p,
    ]),
    "refit_query_describe": (c_int, [
        c_void_p,
        POINTER(refit_query_info),
        POINTER(refit_error),
    ]),
    "refit_query_tensor": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_tensor),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_torch_attach": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_torch_detach": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_torch_alloc": (c_void_p, [
        c_ssize_t,
        c_int,
        c_void_p,
    ]),
    "refit_torch_free": (None, [
        c_void_p,
        c_ssize_t,
        c_int,
        c_void_p,
    ]),
    "refit_window_open": (c_int, [
        c_void_p,
        POINTER(c_void_p),
        POINTER(refit_error),
    ]),
    "refit_window_close": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_window_set_memory": (c_int, [
        c_void_p,
        c_void_p,
        c_uint64,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_window_measure": (c_int, [
        c_void_p,
        POINTER(refit_window_part),
        c_uint32,
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_window_begin": (c_int, [
        c_void_p,
        POINTER(refit_window_part),
        c_uint32,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_window_next": (c_int, [
        c_void_p,
        POINTER(refit_window_view),
        POINTER(refit_error),
    ]),
    "refit_window_place": (c_int, [
        c_void_p,
        c_uint32,
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_window_done": (c_int, [
        c_void_p,
        refit_stream_ref,
        POINTER(refit_error),
    ]),
    "refit_window_end": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
    "refit_window_wait": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(refit_error),
    ]),
    "refit_window_progress": (c_uint32, [
        c_void_p,
    ]),
    "refit_window_host": (c_int, [
        c_void_p,
        c_uint32,
        POINTER(c_void_p),
        POINTER(c_uint64),
        POINTER(refit_error),
    ]),
    "refit_window_trim": (c_int, [
        c_void_p,
        POINTER(refit_error),
    ]),
}
