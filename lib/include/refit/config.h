/*
 * refit/config.h: every choice that refit leaves to its user.
 *
 * A refit_config is a plain struct that the caller owns; objects copy what they need when they are
 * opened. refit_config_init fills in the defaults; then, each over the one before: a YAML file, the
 * environment (REFIT_OFFLOAD_SLAB_BYTES=..., the key in capitals with '_' for '.'), explicit
 * values. configs/refit.yaml names every key with its unit, default and reason.
 *
 *     refit_config config;
 *     refit_config_init(&config, sizeof config);
 *     status = refit_config_load(&config, "configs/grpo.yaml", &error);
 */
#ifndef REFIT_CONFIG_H
#define REFIT_CONFIG_H

#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the host memory for offloaded bytes is locked. */
typedef enum refit_pin {
    REFIT_PIN_AUTO = 0,    /* what the device needs: CUDA requires it, the host device prefers it */
    REFIT_PIN_REQUIRE = 1, /* REFIT_ERR_PIN if it cannot be page-locked */
    REFIT_PIN_PREFER = 2,  /* pageable if it must be; the statistics say so */
    REFIT_PIN_OFF = 3,     /* pageable */
} refit_pin;

typedef enum refit_huge_pages {
    REFIT_HUGE_PAGES_AUTO = 0, /* used where a short probe shows that they come cheap */
    REFIT_HUGE_PAGES_ALWAYS = 1,
    REFIT_HUGE_PAGES_NEVER = 2,
} refit_huge_pages;

/* Which NUMA node the arena is placed on: one of these, or a node number >= 0. */
#define REFIT_NUMA_AUTO       (-1) /* the device's node; interleaved where that node is short */
#define REFIT_NUMA_OFF        (-2) /* wherever the kernel puts it */
#define REFIT_NUMA_INTERLEAVE (-3) /* spread over all nodes */

typedef enum refit_masters {
    REFIT_MASTERS_AUTO = 0,  /* regions with weights leave as what the weights lack */
    REFIT_MASTERS_WHOLE = 1, /* as they are */
} refit_masters;

typedef enum refit_host_step_bind {
    REFIT_HOST_STEP_BIND_NODE = 0, /* threads compute on the node that holds the states */
    REFIT_HOST_STEP_BIND_NONE = 1,
} refit_host_step_bind;

typedef enum refit_activations_aim {
    REFIT_ACTIVATIONS_AIM_OVERLAP = 0, /* as many as can leave during the compute */
    REFIT_ACTIVATIONS_AIM_MEMORY = 1,  /* all leave that can */
} refit_activations_aim;

typedef enum refit_shm {
    REFIT_SHM_AUTO = 0, /* same-host workers share memory; where one cannot, the report says why */
    REFIT_SHM_REQUIRE = 1, /* an error where it is not available */
    REFIT_SHM_OFF = 2,     /* everything travels through sockets */
} refit_shm;

typedef enum refit_gpu {
    REFIT_GPU_AUTO = 0, /* workers on the trainer's own GPU read its memory there; others do not */
    REFIT_GPU_REQUIRE = 1, /* no other worker is taken, and no host copy of the weights is kept */
    REFIT_GPU_OFF = 2,     /* weights reach workers through host memory only */
    REFIT_GPU_STORE = 3, /* as auto, but nothing is lent: workers that come late are served, too */
} refit_gpu;

typedef enum refit_commit_policy {
    REFIT_COMMIT_ALL = 0,    /* every worker that was subscribed when the version began */
    REFIT_COMMIT_QUORUM = 1, /* at least broadcast.quorum of them */
} refit_commit_policy;

typedef enum refit_wait {
    REFIT_WAIT_APPLIED = 0, /* until all workers run on the version */
    REFIT_WAIT_STAGED = 1,  /* until they have it; each switches when it asks for the next one */
    REFIT_WAIT_NONE = 2,    /* for nothing: the next version begins when they have this one */
} refit_wait;

typedef enum refit_host_image {
    REFIT_HOST_IMAGE_AUTO = 0, /* workers of a host receive a version once, where they can */
    REFIT_HOST_IMAGE_OFF = 1,  /* each for itself */
} refit_host_image;

typedef enum refit_verify {
    REFIT_VERIFY_AUTO = 0,   /* bytes that travelled are hashed again by the worker */
    REFIT_VERIFY_ALWAYS = 1, /* bytes in shared memory and on a shared GPU too */
} refit_verify;

typedef enum refit_delta {
    REFIT_DELTA_AUTO = 0,   /* workers that hold the version before get what changed */
    REFIT_DELTA_ALWAYS = 1, /* the same, however little that saves */
    REFIT_DELTA_NEVER = 2,  /* every version travels whole */
} refit_delta;

typedef enum refit_compress {
    REFIT_COMPRESS_NONE = 0,
    REFIT_COMPRESS_ZSTD = 1, /* what changed, plane by plane */
} refit_compress;

#define REFIT_CONFIG_ORIGINS 96 /* room for one origin byte per option */

/* Where a value came from. */
typedef enum refit_config_origin {
    REFIT_CONFIG_DEFAULT = 0,
    REFIT_CONFIG_FILE = 1,
    REFIT_CONFIG_ENVIRONMENT = 2,
    REFIT_CONFIG_EXPLICIT = 3,
} refit_config_origin;

typedef struct refit_config {
    size_t size;                                /* sizeof(refit_config), set by refit_config_init */
    unsigned char origin[REFIT_CONFIG_ORIGINS]; /* kept by refit: see refit_config_each */

    char device[64]; /* device: "auto", "host", "host:capacity=2GiB", "cuda:0" */
    uint8_t use_pinned_optimizer_offload; /* 0: the plain per-tensor pageable path */

    /* offload.* */
    uint64_t offload_slab_bytes;      /* one page-lock registration covers one slab */
    uint64_t offload_alignment_bytes; /* of regions inside the arena; a power of two */
    uint64_t offload_budget_bytes;    /* most host memory for the arena; 0: by share */
    double offload_budget_share;      /* of the memory that machine and cgroup really have free */
    int32_t offload_pin;              /* refit_pin */
    int32_t offload_huge_pages;       /* refit_huge_pages */
    int32_t offload_numa;             /* REFIT_NUMA_* or a node */
    uint32_t
        offload_touch_threads; /* for the first touch of the arena; 0: one per core, at most 8 */
    uint32_t offload_copy_threads; /* host device: threads that share one batch of copies; 0: one
                                      per core, at most 8 */
    uint64_t offload_piece_bytes;  /* larger copies are cut, so that small ones are not held up */
    uint64_t offload_chunk_bytes;  /* memory of arenas on a GPU comes and goes in such; a power of
                                      two */
    uint32_t offload_batch;        /* most copies in one submission */
    uint8_t offload_verify;      /* digest each region when it leaves and compare when it is back */
    uint8_t offload_background;  /* a seal returns while the arena is still being taken */
    uint8_t offload_take_turns;  /* an arena does not take what another process of the user is about
                                    to take */
    uint32_t offload_timeout_ms; /* bounds each wait: for states to leave or return, for the
                                    arena, for others that take theirs */
    uint64_t offload_rate_limit; /* bytes a second of copies in one direction; 0: no limit */
    uint64_t offload_small_bytes;   /* CUDA: smaller copies are gathered by a kernel; 0: measured */
    uint64_t offload_staging_bytes; /* CUDA: device memory for that, each of two halves; and on any
                                       device for the masters on their way, once */

    /* broadcast.* */
    char broadcast_endpoint[256]; /* where the publisher binds and a subscriber connects */
    char broadcast_worker[64]; /* subscriber's name; empty: host name, process id, a random part */
    int32_t broadcast_shm;     /* refit_shm */
    int32_t broadcast_gpu;     /* refit_gpu */
    uint32_t broadcast_slots;  /* copies of the weights in the store: 1 or 2 */
    uint64_t broadcast_frame_bytes;          /* bytes of one frame */
    uint32_t broadcast_window;               /* whole frames a worker asks for ahead */
    int32_t broadcast_commit;                /* refit_commit_policy */
    uint32_t broadcast_quorum;               /* workers, with commit: quorum */
    uint32_t broadcast_stage_timeout_ms;     /* from commit() until all have staged */
    uint32_t broadcast_commit_timeout_ms;    /* from the commit until all have applied */
    uint32_t broadcast_heartbeat_ms;         /* between two beats */
    uint32_t broadcast_heartbeat_timeout_ms; /* silence after which a peer counts as lost */
    uint32_t broadcast_resend_limit;         /* repeats of one frame before the worker gives up */
    int32_t broadcast_verify;                /* refit_verify */
    int32_t broadcast_delta;                 /* refit_delta */
    int32_t broadcast_compress;              /* refit_compress */
    uint32_t broadcast_compress_level;       /* of zstd */
    uint32_t broadcast_encode_threads;       /* for what changed; 0: one per core, at most 8 */
    uint8_t broadcast_insecure;              /* allow an address beyond this host without keys */
    uint32_t broadcast_linger_ms; /* a closing socket tries no longer to send what it still has */
    uint32_t broadcast_idle_timeout_ms; /* a worker ends when it has heard no trainer for so long;
                                           0: never */

    /* limits.* : checked before memory is reserved */
    uint32_t limits_workers;
    uint32_t limits_tensors;
    uint32_t limits_rank; /* dimensions of a tensor */
    uint32_t limits_name_bytes;
    uint64_t limits_message_bytes;
    uint64_t limits_manifest_bytes;
    uint64_t limits_frame_bytes;
    uint64_t limits_version_bytes;
    uint32_t limits_window;
    uint32_t limits_blocks; /* of 65,536 elements, in one version */

    /* security.* : keys (refit/keys.h); none of them is set where no keys are used */
    char security_key[256];        /* file with the own secret key */
    char security_server_key[256]; /* worker: file with the trainer's public key */
    char security_allow[256];      /* trainer: folder with the workers' public keys */

    /* archive.* */
    uint32_t archive_anchor_every; /* versions, from one that is kept whole to the next */

    /* offload.* : states that visit the device in windows (refit/advanced/window.h) */
    uint64_t offload_window_bytes; /* device memory of one window */
    uint32_t offload_windows;      /* windows in device memory at once */
    int32_t offload_masters;       /* refit_masters */

    /* offload.* : states that the CPU steps (refit/advanced/host_step.h) */
    uint32_t offload_host_step_threads; /* 0: this rank's share of the CPUs */
    int32_t offload_host_step_bind;     /* refit_host_step_bind */

    /* activations.* : saved tensors that leave in the forward pass (refit/advanced/activations.h).
     * The library reads host_bytes; the others are for what forms the groups */
    uint64_t activations_host_bytes; /* of the arena; 0: not given */
    uint64_t activations_min_bytes;  /* smaller tensors stay */
    uint32_t activations_in_flight;  /* groups whose memory may still be there after their pass */
    uint32_t activations_prefetch;   /* groups that return before they are asked for */
    uint32_t activations_keep_last;  /* groups at the end of the forward pass that stay */
    int32_t activations_aim;         /* refit_activations_aim */

    /* broadcast.* : on the trainer's GPU */
    uint64_t broadcast_gpu_bucket_bytes; /* for tensors that cannot be lent; of each slot */

    /* broadcast.* : workers that switch when it suits them */
    int32_t broadcast_wait;        /* refit_wait */
    uint32_t broadcast_max_behind; /* versions, unless wait is applied; 0: no bound */
    int32_t broadcast_host_image;  /* refit_host_image */
} refit_config;

/*
 * Fills in the defaults. `size` is sizeof(refit_config) as the caller was compiled; a smaller one
 * than the library's writes only so many bytes. Does nothing for NULL or a size that cannot hold
 * the first fields. Does not block.
 */
REFIT_API void refit_config_init(refit_config *config, size_t size);

/*
 * Reads a YAML file over what is there. Unknown keys are refused with line, column and the nearest
 * known key; a value out of range with its range. `include: FILE`, which must come first, reads
 * that file (relative to this one) before the rest. What is not a regular file (a FIFO, a device)
 * is refused. On failure `config` is unchanged. Reads the file (blocks). Any thread, one at a time
 * per config.
 *
 * Errors:
 * - REFIT_ERR_INVALID: no path
 * - REFIT_ERR_IO, REFIT_ERR_CONFIG, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_config_load(refit_config *config, const char *path,
                                                          refit_error *error);

/*
 * Takes every REFIT_* variable of the environment that names a key; one that names none is refused,
 * with the nearest key, but for REFIT_LIBRARY, which is the Python package's. On failure `config`
 * is unchanged. Does not block; the environment must not change meanwhile.
 *
 * Errors:
 * - REFIT_ERR_CONFIG
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_config_load_env(refit_config *config,
                                                              refit_error *error);

/*
 * Sets one key from text, in the units that the file takes ("1GiB", "30s", "true"). On failure
 * `config` is unchanged. Does not block.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND: with the nearest key
 * - REFIT_ERR_CONFIG
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_config_set(refit_config *config, const char *key,
                                                         const char *value, refit_error *error);

/*
 * Checks what single values cannot show: that they fit together (a frame under its limit, a quorum
 * with its policy, …). Every open does it; call it to know earlier. Does not block.
 *
 * Errors:
 * - REFIT_ERR_CONFIG
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_config_check(const refit_config *config,
                                                           refit_error *error);

/* One option as refit_config_each shows it. All strings are borrowed for the call. */
typedef struct refit_option {
    size_t size;
    const char *key;           /* "offload.slab_bytes" */
    const char *value;         /* the effective value, as the file would say it */
    const char *default_value; /* as text, too */
    const char *unit;          /* "bytes", "ms", "bool", "auto|always|never", … */
    const char *help;          /* why one would change it */
    refit_config_origin origin;
    const char *range; /* "4KiB to 64GiB"; empty where the unit says it all */
} refit_option;

typedef void (*refit_option_fn)(void *user, const refit_option *option);

/* Calls `function` for every option, in the order of configs/refit.yaml, on the caller's thread. */
REFIT_API void refit_config_each(const refit_config *config, refit_option_fn function, void *user);

#ifdef __cplusplus
}
#endif
#endif
