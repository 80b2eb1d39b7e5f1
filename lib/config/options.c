/*
 * The option table.
 *
 * Everything that shows, reads or documents options is made from these rows: the defaults of
 * refit_config_init, the YAML reader, the environment, `refit config` and configs/refit.yaml. To
 * add an option, add its field to refit_config, append or insert its row here, and let
 * `refit config --defaults` write the file again. Independent of what the options do.
 */
#include "config/options.h"

#include <stddef.h>
#include <string.h>

#include <refit/advanced/window.h>

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define TIB ((uint64_t)1 << 40)

#define SECOND     1000u
#define HOUR       (3600u * SECOND)
#define BILLIONTHS 1000000000u

#define IN(member)      offsetof(refit_config, member), sizeof(((refit_config *)NULL)->member)
#define FLAG(value)     RFT_FLAG, value, 0, 1, "bool"
#define LONGEST(member) sizeof(((refit_config *)NULL)->member) - 1

const rft_option rft_options[] = {
    {"device", IN(device), RFT_TEXT, "auto", 0, LONGEST(device), "text",
     "Where tensors live: host, host:capacity=2GiB (no more than so much of it), cuda:0, or auto: "
     "the first GPU, or the host if there is none."},
    {"use_pinned_optimizer_offload", IN(use_pinned_optimizer_offload), FLAG("true"),
     "Optimizer states leave into one coalesced, page-locked arena. With false every tensor is "
     "copied by itself into pageable memory: slower, but no memory is locked."},

    {"offload.slab_bytes", IN(offload_slab_bytes), RFT_SIZE, "1GiB", 4 * KIB, 64 * GIB, "bytes",
     "The arena is registered with the device in pieces of at most this size, a power of two. "
     "Below 2GiB on Linux 6.11 to 6.13, which refuse more; larger means fewer registrations."},
    {"offload.alignment_bytes", IN(offload_alignment_bytes), RFT_SIZE, "512", 16, 2 * MIB, "bytes",
     "Where a region may begin inside the arena, a power of two. 512 suits DMA engines; regions "
     "below 16KiB then begin at multiples of 64 to 256. More holds for all regions: 4KiB lets a "
     "checkpoint writer use direct I/O."},
    {"offload.budget_bytes", IN(offload_budget_bytes), RFT_SIZE, "0", 0, 1024 * TIB, "bytes",
     "The most host memory that the arenas of one device may take together: of states, of steps on "
     "the CPU, of activations, of old elements while a version is applied. 0: offload.budget_share "
     "decides. Set it where several trainers share one machine."},
    {"offload.budget_share", IN(offload_budget_share), RFT_SHARE, "0.8", BILLIONTHS / 1000,
     BILLIONTHS, "share",
     "The part of the memory that machine and cgroup really have free that the arena may take. "
     "Lower it to leave room for data loaders that start later."},
    {"offload.pin", IN(offload_pin), RFT_CHOICE, "auto", 0, REFIT_PIN_OFF,
     "auto|require|prefer|off",
     "Whether the arena is page-locked. auto does what the device needs; require fails where it "
     "cannot be; prefer goes on with pageable memory and says so in the statistics."},
    {"offload.huge_pages", IN(offload_huge_pages), RFT_CHOICE, "auto", 0, REFIT_HUGE_PAGES_NEVER,
     "auto|always|never",
     "Huge pages make the first touch and the copies faster, unless memory is fragmented. auto "
     "finds out by a short probe, and asks for none where the kernel has none for memory that "
     "forked processes can read (before Linux 6.1, unless shmem_enabled in "
     "/sys/kernel/mm/transparent_hugepage lets them). always then takes memory that they cannot "
     "read: a forked checkpoint writer would end by a signal."},
    {"offload.numa", IN(offload_numa), RFT_NODE, "auto", 0, 1023 + 3, "auto|off|interleave|N",
     "The NUMA node of the arena. auto takes the device's own; a number forces one; off leaves it "
     "to the kernel."},
    {"offload.touch_threads", IN(offload_touch_threads), RFT_COUNT, "0", 0, 256, "threads",
     "Threads that touch the arena for the first time. 0: one per core, at most 8. Fewer where "
     "the cores have other work while the trainer starts."},
    {"offload.copy_threads", IN(offload_copy_threads), RFT_COUNT, "0", 0, 256, "threads",
     "Threads of the host device that share one batch of copies. 0: one per core, at most 8. More "
     "do not help once they saturate the memory."},
    {"offload.piece_bytes", IN(offload_piece_bytes), RFT_SIZE, "32MiB", 4 * KIB, 64 * GIB, "bytes",
     "Larger copies are cut into pieces of this size, so that a group that is needed first does "
     "not wait for a huge tensor. Smaller pieces cost more submissions."},
    {"offload.chunk_bytes", IN(offload_chunk_bytes), RFT_SIZE, "256MiB", 4 * KIB, 64 * GIB, "bytes",
     "Memory of an arena on a GPU comes and goes in chunks of this size, a power of two. Fewer "
     "chunks come and go faster; smaller ones give memory back although part of them stays."},
    {"offload.batch", IN(offload_batch), RFT_COUNT, "16384", 1, 65536, "copies",
     "The most copies in one submission. More keep a GPU's link busy with small copies; fewer let "
     "urgent copies of other streams in sooner. The host device takes at most 1024."},
    {"offload.verify", IN(offload_verify), FLAG("false"),
     "Digest every region when it is offloaded and check it when it is restored. It costs one more "
     "pass over the bytes each way; use it to find memory that is written while it is away."},
    {"offload.background", IN(offload_background), FLAG("false"),
     "Take the arena on a thread of its own, while the trainer loads its model; the first offload "
     "waits for it. Off where the cores and the driver have other work meanwhile."},
    {"offload.take_turns", IN(offload_take_turns), FLAG("true"),
     "Processes of one user on one machine do not take the memory that another is about to take: "
     "those for which too little is left wait until the others have their arenas. false: none "
     "waits, and they may meet the memory limit together."},
    {"offload.timeout_ms", IN(offload_timeout_ms), RFT_TIME, "1min", 1, 24 * HOUR, "ms",
     "A controller waits no longer for states to leave or to return; nor does an offload for the "
     "arena, or a process for others that take theirs first and get nowhere. Raise it for large "
     "arenas."},
    {"offload.rate_limit", IN(offload_rate_limit), RFT_SIZE, "0", 0, TIB, "bytes a second",
     "The most that one direction takes of the link, over steps of 50 ms: set it where collectives "
     "share "
     "the link. At least 1MiB; 0: all that it gives."},
    {"offload.small_bytes", IN(offload_small_bytes), RFT_SIZE, "0", 0, MIB, "bytes",
     "Smaller copies of a GPU are gathered by a kernel into a few large ones. 0: what a short "
     "measurement on the GPU shows to be best; 1: none is gathered."},
    {"offload.staging_bytes", IN(offload_staging_bytes), RFT_SIZE, "16MiB", MIB, GIB, "bytes",
     "The GPU memory in which small copies are gathered: two halves of this size, and twice that "
     "while states leave and return at once. It is taken at the first use and kept. An offloader "
     "takes one such half for the masters that pass through it (offload.masters), in windows for "
     "both directions together; a worker two, while it applies a version from host memory."},
    {"offload.window_bytes", IN(offload_window_bytes), RFT_SIZE, "256MiB", 64 * KIB, TIB, "bytes",
     "Device memory of one window, in which states that live on the host are stepped. Smaller "
     "windows take less memory; larger ones cost fewer steps of the optimizer."},
    {"offload.windows", IN(offload_windows), RFT_COUNT, "3", 1, REFIT_WINDOWS, "windows",
     "Windows in device memory at once. With 3, states arrive, are stepped and leave at the same "
     "time; 2 take less memory, and 1 does one thing after the other."},
    {"offload.masters", IN(offload_masters), RFT_CHOICE, "auto", 0, REFIT_MASTERS_WHOLE,
     "auto|whole",
     "How fp32 masters leave whose bf16 weights stay on the device: auto moves the 16 of 32 bits "
     "that the weights lack, and every bit returns; whole moves all."},
    {"offload.host_step_threads", IN(offload_host_step_threads), RFT_COUNT, "0", 0, 64, "threads",
     "Threads of this process that step parameters on the CPU. 0: an equal share of the CPUs of "
     "the "
     "cgroup, or the machine, for each of LOCAL_WORLD_SIZE ranks, and never more than the affinity "
     "has, nor the NUMA node of offload.host_step_bind."},
    {"offload.host_step_bind", IN(offload_host_step_bind), RFT_CHOICE, "node", 0,
     REFIT_HOST_STEP_BIND_NONE, "node|none",
     "The CPUs of these threads: node binds them to the NUMA node that holds the states; none "
     "leaves them to the kernel. The thread that steps stays where it is, and is one of them."},

    {"activations.host_bytes", IN(activations_host_bytes), RFT_SIZE, "0", 0, 1024 * TIB, "bytes",
     "Page-locked host memory for the activations that leave in the forward pass. What does not "
     "fit stays on the device. It has no default: set it where activations are to leave. It counts "
     "against offload.budget_bytes."},
    {"activations.min_bytes", IN(activations_min_bytes), RFT_SIZE, "64KiB", 1, TIB, "bytes",
     "Smaller saved tensors stay on the device: a copy of them costs more than it gives back."},
    {"activations.in_flight", IN(activations_in_flight), RFT_COUNT, "1", 1, 16, "groups",
     "The memory of a group (what one layer saves) is given back at most so many groups after its "
     "forward pass. More hide slower copies, and take more device memory."},
    {"activations.prefetch", IN(activations_prefetch), RFT_COUNT, "1", 0, 16, "groups",
     "So many groups are on their way back before the backward pass asks for them. More hide "
     "slower copies, and take more device memory; 0 brings each one when it is asked for."},
    {"activations.keep_last", IN(activations_keep_last), RFT_COUNT, "1", 0, 1024, "groups",
     "So many groups at the end of the forward pass never leave: the backward pass asks for them "
     "at once."},
    {"activations.aim", IN(activations_aim), RFT_CHOICE, "overlap", 0, REFIT_ACTIVATIONS_AIM_MEMORY,
     "overlap|memory",
     "overlap lets as much leave as can be copied while the layers compute, which two iterations "
     "measure; memory lets all leave, also where the step takes longer."},

    {"broadcast.endpoint", IN(broadcast_endpoint), RFT_TEXT, "user://refit", 0,
     LONGEST(broadcast_endpoint), "text",
     "Where the publisher binds and a subscriber connects. user://NAME is a socket that no other "
     "user reaches, NAME.sock in $XDG_RUNTIME_DIR/refit, /run/user/UID/refit or /tmp/refit-UID, "
     "the first that there can be: give each trainer of a user a name of its own; * is any that is "
     "free. ipc://PATH is one at a path. "
     "tcp://ADDRESS:PORT without keys (security.key) is open to every user of this machine, even "
     "at 127.0.0.1. inproc://NAME stays in the process. A subscriber also takes archive://FOLDER, "
     "and follows the archive in that folder."},
    {"broadcast.worker", IN(broadcast_worker), RFT_TEXT, "", 0, LONGEST(broadcast_worker), "text",
     "The name under which a subscriber appears in reports. Empty: host name, process id and a "
     "random part. Set it to the rank that your framework knows. With keys it begins with the name "
     "of the worker's key: KEY/NAME, unless NAME is KEY or begins so."},
    {"broadcast.shm", IN(broadcast_shm), RFT_CHOICE, "auto", 0, REFIT_SHM_OFF, "auto|require|off",
     "Workers on the publisher's host map its memory instead of receiving bytes. It is sealed: no "
     "other process can change it. A worker needs the publisher's user, /proc and PID namespace, "
     "and Linux 5.1. require fails where it is not to be had; off sends everything through "
     "sockets."},
    {"broadcast.host_image", IN(broadcast_host_image), RFT_CHOICE, "auto", 0, REFIT_HOST_IMAGE_OFF,
     "auto|off",
     "Workers of a host that is not the publisher's receive a version once: one of them gets its "
     "frames, and the others map its memory, as with broadcast.shm and under the same conditions. "
     "off, at either end, or broadcast.shm: off at a worker, lets each receive it for itself."},
    {"broadcast.gpu", IN(broadcast_gpu), RFT_CHOICE, "auto", 0, REFIT_GPU_STORE,
     "auto|require|off|store",
     "Workers on the trainer's own GPU read the weights in its memory: in the tensors themselves "
     "where those stay until the version is over, else in a copy. No copy is kept on the host "
     "while all workers are there. require takes no other workers. store keeps copies of all "
     "tensors on the GPU, for workers that come between two versions."},
    {"broadcast.gpu_bucket_bytes", IN(broadcast_gpu_bucket_bytes), RFT_SIZE, "256MiB", 0, TIB,
     "bytes",
     "The most memory of the GPU for copies in one slot with gpu: auto. A version that makes more "
     "on the way goes through that much, piece by piece, while it is written. 0 sends it over the "
     "host. At a worker: for the old elements of weights that a version is applied into; those "
     "beyond it move to the host. There at least 4MiB."},
    {"broadcast.slots", IN(broadcast_slots), RFT_COUNT, "2", 1, 2, "copies",
     "Copies of the weights that the publisher keeps. With 2, workers use one version in place "
     "while the next is written; 1 halves the memory and waits for them to let go."},
    {"broadcast.frame_bytes", IN(broadcast_frame_bytes), RFT_SIZE, "2MiB", 64 * KIB, GIB, "bytes",
     "Bytes in one frame, the unit of sending and of repair. Larger for fast links, smaller for "
     "lossy ones. At most limits.frame_bytes."},
    {"broadcast.window", IN(broadcast_window), RFT_COUNT, "8", 1, 4096, "frames",
     "Frames that a worker asks for ahead. It needs so many frames of memory; raise it for links "
     "with a long delay. Of frames of which little travels there may be up to 16 times as many. At "
     "most limits.window."},
    {"broadcast.commit", IN(broadcast_commit), RFT_CHOICE, "all", 0, REFIT_COMMIT_QUORUM,
     "all|quorum",
     "A version counts once every worker that was subscribed when it began has staged it, or, "
     "with quorum, once broadcast.quorum of them have."},
    {"broadcast.quorum", IN(broadcast_quorum), RFT_COUNT, "0", 0, 65536, "workers",
     "How many workers suffice with commit: quorum. 0 with commit: all."},
    {"broadcast.wait", IN(broadcast_wait), RFT_CHOICE, "applied", 0, REFIT_WAIT_NONE,
     "applied|staged|none",
     "What a commit waits for: until all workers run on the version; until all have it, while they "
     "go on with the one before, and each gets the newest one when it asks for the next; or for "
     "nothing, and the next version begins when all have this one."},
    {"broadcast.max_behind", IN(broadcast_max_behind), RFT_COUNT, "0", 0, 64, "versions",
     "Unless wait is applied, how many versions older than the newest one a worker may run on: a "
     "commit waits for those that are older, and evicts them after broadcast.commit_timeout_ms. 0: "
     "no bound."},
    {"broadcast.stage_timeout_ms", IN(broadcast_stage_timeout_ms), RFT_TIME, "1min", 1, 24 * HOUR,
     "ms",
     "From refit_publisher_commit, when all is written, until all have staged the version; a "
     "worker that has not by then is evicted. Allow for the size of the weights over the slowest "
     "link."},
    {"broadcast.commit_timeout_ms", IN(broadcast_commit_timeout_ms), RFT_TIME, "30s", 1, 24 * HOUR,
     "ms", "From the commit until all have applied it; allow for what the engine does to load it."},
    {"broadcast.heartbeat_ms", IN(broadcast_heartbeat_ms), RFT_TIME, "1s", 1, HOUR, "ms",
     "Time between two beats of a quiet connection, and between two looks into the folder of an "
     "archive that is followed."},
    {"broadcast.heartbeat_timeout_ms", IN(broadcast_heartbeat_timeout_ms), RFT_TIME, "5s", 1, HOUR,
     "ms",
     "Silence after which a peer counts as lost. Longer than broadcast.heartbeat_ms; raise it "
     "where machines pause for long."},
    {"broadcast.resend_limit", IN(broadcast_resend_limit), RFT_COUNT, "3", 0, 1000, "repeats",
     "How often a worker asks again for a frame that arrived damaged, before it gives up; one that "
     "asks more often is evicted."},
    {"broadcast.verify", IN(broadcast_verify), RFT_CHOICE, "auto", 0, REFIT_VERIFY_ALWAYS,
     "auto|always",
     "auto hashes again what travelled; always also what lies in shared memory, which only the "
     "publisher can change, for one more pass over the bytes in every worker."},
    {"broadcast.delta", IN(broadcast_delta), RFT_CHOICE, "auto", 0, REFIT_DELTA_NEVER,
     "auto|always|never",
     "Workers that receive through sockets and hold the version before get what changed in it, "
     "bit for bit. auto sends whole what changed too much to be worth coding (a block of bf16 of "
     "which half changed, a frame that would be no eighth smaller); always codes whatever is "
     "smaller, for slow links; never sends every version whole."},
    {"broadcast.compress", IN(broadcast_compress), RFT_CHOICE, "none", 0, REFIT_COMPRESS_ZSTD,
     "none|zstd",
     "What changed is short already; zstd takes a little more off it, for slow links. Versions "
     "that travel whole are not compressed. A worker that archives versions compresses its files "
     "so, anchors included."},
    {"broadcast.compress_level", IN(broadcast_compress_level), RFT_COUNT, "1", 1, 19, "zstd level",
     "Higher levels take far more time for little more."},
    {"broadcast.encode_threads", IN(broadcast_encode_threads), RFT_COUNT, "0", 0, 64, "threads",
     "Threads that find and code what changed, the publisher's own included; they start with the "
     "first version for which that is wanted. 0: one per core, at most 8."},
    {"broadcast.insecure", IN(broadcast_insecure), FLAG("false"),
     "Allow an address beyond this host without keys (security.key), on either side: all that "
     "reach the port can then read the weights, or pass for the trainer. Only inside a network "
     "that you trust."},
    {"broadcast.linger_ms", IN(broadcast_linger_ms), RFT_TIME, "500ms", 0, HOUR, "ms",
     "How long a socket that closes still tries to send what it has."},
    {"broadcast.idle_timeout_ms", IN(broadcast_idle_timeout_ms), RFT_TIME, "0", 0, 24 * HOUR, "ms",
     "A worker ends when it has heard no trainer for so long, counted from its start on. A trainer "
     "that trains for hours is heard all the time; one that was killed is not. Longer than "
     "broadcast.heartbeat_timeout_ms, and than a trainer takes to start; 0: it waits without end. "
     "The same holds for an archive that cannot be read."},

    {"limits.workers", IN(limits_workers), RFT_COUNT, "256", 1, 65536, "workers",
     "Workers that a publisher takes; more are refused."},
    {"limits.tensors", IN(limits_tensors), RFT_COUNT, "100000", 1, 16777216, "tensors",
     "Tensors in one manifest."},
    {"limits.rank", IN(limits_rank), RFT_COUNT, "8", 1, 8, "dimensions",
     "Dimensions of one tensor."},
    {"limits.name_bytes", IN(limits_name_bytes), RFT_COUNT, "512", 1, 65535, "bytes",
     "Length of a tensor's name."},
    {"limits.message_bytes", IN(limits_message_bytes), RFT_SIZE, "64KiB", 4 * KIB, 16 * MIB,
     "bytes", "Size of one message without its payload."},
    {"limits.manifest_bytes", IN(limits_manifest_bytes), RFT_SIZE, "16MiB", 4 * KIB, GIB, "bytes",
     "Size of a manifest. About 100 bytes a tensor are needed."},
    {"limits.frame_bytes", IN(limits_frame_bytes), RFT_SIZE, "16MiB", 64 * KIB, GIB, "bytes",
     "Size of a frame that is accepted; frames of another size than one's own are normal."},
    {"limits.version_bytes", IN(limits_version_bytes), RFT_SIZE, "4TiB", 1, 1024 * TIB, "bytes",
     "Size of all weights of a version: a worker reserves no more."},
    {"limits.window", IN(limits_window), RFT_COUNT, "64", 1, 4096, "frames",
     "Frames that one worker may ask for ahead; a publisher cuts larger wishes to it."},
    {"limits.blocks", IN(limits_blocks), RFT_COUNT, "16777216", 1, 1073741824, "blocks",
     "Blocks of 65,536 elements, or a tensor's rest, in one version. Both ends keep up to 64 bytes "
     "for each; the default suits a trillion parameters."},

    {"security.key", IN(security_key), RFT_TEXT, "", 0, LONGEST(security_key), "text",
     "The file with this side's own secret key, made by refit keygen. With keys (CURVE) all that "
     "travels is encrypted, and both sides know each other; an address beyond this host needs "
     "them. inproc uses none."},
    {"security.server_key", IN(security_server_key), RFT_TEXT, "", 0, LONGEST(security_server_key),
     "text",
     "Worker: the file with the trainer's public key. A trainer that does not have its secret half "
     "is not listened to."},
    {"security.allow", IN(security_allow), RFT_TEXT, "", 0, LONGEST(security_allow), "text",
     "Trainer: the folder with the public keys (NAME.public) of the workers that may come in. It "
     "is read again as it changes: the key of a new file is admitted, the workers of a removed one "
     "are evicted at once. A file that cannot be read for now (no descriptors left, a failing "
     "disk) "
     "keeps its key in. Names of workers begin with NAME."},

    {"archive.anchor_every", IN(archive_anchor_every), RFT_COUNT, "16", 1, 1000000, "versions",
     "An archive keeps every so many versions whole, and what changed between them. More means a "
     "smaller archive, and more files to read for one version; 1 keeps all of them whole."},
};

const size_t rft_option_count = sizeof rft_options / sizeof rft_options[0];

_Static_assert(sizeof rft_options / sizeof rft_options[0] <= REFIT_CONFIG_ORIGINS,
               "every option needs its origin byte");

const rft_option *rft_option_find(const char *key)
{
    for (size_t i = 0; i < rft_option_count; i++) {
        if (strcmp(rft_options[i].key, key) == 0) return &rft_options[i];
    }
    return NULL;
}

bool rft_option_within(const rft_option *option, size_t size)
{
    return option->offset + option->width <= size;
}

/* ---- The nearest name
 *
 * Edit distance with neighbouring swaps (optimal string alignment), over three rows on the stack.
 * It only serves error messages, so clarity counts and speed does not. */

#define WORD_MOST 127

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t rft_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length)
{
    size_t rows[3][WORD_MOST + 1];
    size_t *before = rows[0], *above = rows[1], *row = rows[2];
    a_length = least(a_length, WORD_MOST);
    b_length = least(b_length, WORD_MOST);
    for (size_t j = 0; j <= b_length; j++)
        above[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            row[j] = least(above[j - 1] + (a[i - 1] != b[j - 1]), least(above[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                row[j] = least(row[j], before[j - 2] + 1);
            }
        }
        size_t *free_row = before;
        before = above;
        above = row;
        row = free_row;
    }
    return above[b_length];
}

const char *rft_nearest_key(const char *word)
{
    const char *nearest = rft_options[0].key;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        const char *key = rft_options[i].key;
        size_t distance = rft_edit_distance(word, strlen(word), key, strlen(key));
        if (distance < best) {
            best = distance;
            nearest = key;
        }
    }
    return nearest;
}

const char *rft_nearest_section(const char *word, size_t *length)
{
    const char *nearest = "";
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        const char *dot = strrchr(rft_options[i].key, '.');
        if (dot == NULL) continue;
        size_t span = (size_t)(dot - rft_options[i].key);
        size_t distance = rft_edit_distance(word, strlen(word), rft_options[i].key, span);
        if (distance < best) {
            best = distance;
            nearest = rft_options[i].key;
            *length = span;
        }
    }
    return nearest;
}
