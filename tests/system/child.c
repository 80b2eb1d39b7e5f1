/*
 * A trainer or a worker in a process of its own, by commands: it reads one command a line and
 * answers each with one line, "STATUS words". Public headers only. It ends with its input.
 *
 * With REFIT_TEST_CUDA set both are on GPU 0: the trainer's weights lie there, and a worker reads
 * them there.
 *
 *     trainer ENDPOINT SHM SLOTS [KEY=VALUE]   wait N MS   begin   write SEED   commit
 *     version
 *     worker ENDPOINT SHM   next MS   accept   release   describe
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <refit.h>

#define TENSORS 3u
#define LARGE   (700u * 1024)

static refit_publisher *publisher;
static refit_subscriber *subscriber;
static refit_update *update;
static unsigned char model[LARGE];
static refit_device *device; /* NULL: weights lie in `model` */
static void *weights;        /* on the device, LARGE */

static const refit_tensor tensors[TENSORS] = {
    {sizeof(refit_tensor), "large", REFIT_U8, 1, {LARGE}, LARGE, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "tied", REFIT_U8, 1, {LARGE}, LARGE, 0},
    {sizeof(refit_tensor), "small", REFIT_BF16, 2, {3, 7}, 42, REFIT_NO_ALIAS},
};

static void answer(refit_status status, const char *words)
{
    printf("%s %s\n", refit_status_name(status), words);
    fflush(stdout);
}

static void answer_error(refit_status status, const refit_error *error)
{
    answer(status, status == REFIT_OK ? "" : error->text);
}

static uint64_t fnv(uint64_t hash, const unsigned char *bytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
    return hash;
}

/* Small sizes. A peer that is lost is noticed after twelve seconds, so that none is lost that the
 * machine holds up for ten. `more`: "key=value", or empty. */
static refit_status configure(refit_config *config, const char *shm, const char *slots, char *more,
                              refit_error *error)
{
    char *equals = strchr(more, '=');
    const char *const values[][2] = {
        {"broadcast.shm", shm},
        {"broadcast.slots", slots},
        {"broadcast.frame_bytes", "64KiB"},
        {"broadcast.heartbeat_ms", "100ms"},
        {"broadcast.heartbeat_timeout_ms", "12s"},
        {"broadcast.stage_timeout_ms", "60s"},
        {"broadcast.commit_timeout_ms", "60s"},
        {"broadcast.linger_ms", "12s"},
        {more, equals == NULL ? "" : equals + 1},
    };
    size_t count = sizeof values / sizeof *values - (equals == NULL);
    if (equals != NULL) *equals = '\0';
    refit_config_init(config, sizeof *config);
    for (size_t i = 0; i < count; i++) {
        refit_status status = refit_config_set(config, values[i][0], values[i][1], error);
        if (status != REFIT_OK) return status;
    }
    return REFIT_OK;
}

/* ---- The device */

static refit_status open_device(const refit_config *config, refit_error *error)
{
    if (getenv("REFIT_TEST_CUDA") == NULL) return REFIT_OK;
    return refit_device_open("cuda:0", config, &device, error);
}

/* Whether the fake driver, if it is in use, has seen a violation. */
static bool driver_complains(void)
{
    const char *(*violation)(void);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *function = library != NULL ? dlsym(library, "fake_cuda_violation") : NULL;
    if (function == NULL) return false;
    memcpy(&violation, &function, sizeof violation);
    if (violation()[0] == '\0') return false;
    fprintf(stderr, "the driver's rules were broken: %s\n", violation());
    return true;
}

static bool close_device(void)
{
    bool closed = device == NULL || refit_memory_free(device, weights, NULL) == REFIT_OK;
    return closed && refit_device_close(device, NULL) == REFIT_OK && !driver_complains();
}

/* ---- As a trainer */

static refit_status use_device(const refit_config *config, refit_error *error)
{
    refit_status status = open_device(config, error);
    if (status != REFIT_OK || device == NULL) return status;
    status = refit_memory_alloc(device, LARGE, &weights, error);
    return status == REFIT_OK ? refit_publisher_use_device(publisher, device, error) : status;
}

static void do_trainer(char *const words[5])
{
    refit_config config;
    refit_error error;
    refit_status status = configure(&config, words[2], words[3], words[4], &error);
    if (status == REFIT_OK) status = refit_publisher_open(words[1], &config, &publisher, &error);
    if (status == REFIT_OK) status = use_device(&config, &error);
    if (status == REFIT_OK) status = refit_publisher_declare(publisher, tensors, TENSORS, &error);
    answer(status, status == REFIT_OK ? refit_publisher_endpoint(publisher) : error.text);
}

static void do_wait(char *const words[5])
{
    refit_error error;
    uint32_t count = (uint32_t)strtoul(words[1], NULL, 10);
    uint32_t timeout_ms = (uint32_t)strtoul(words[2], NULL, 10);
    answer_error(refit_publisher_wait_workers(publisher, count, timeout_ms, &error), &error);
}

static void do_begin(char *const words[5])
{
    refit_error error;
    (void)words;
    answer_error(refit_publisher_begin(publisher, 0, &error), &error);
}

static void do_write(char *const words[5])
{
    refit_error error;
    refit_status status = REFIT_OK;
    uint64_t seed = strtoull(words[1], NULL, 10), hash = 7;
    char text[32];
    for (uint64_t i = 0; i < LARGE; i++)
        model[i] = (unsigned char)(i * 7 + (i >> 10) + seed * 13);
    if (device != NULL)
        status = refit_stream_copy(device, REFIT_STREAM_NONE, weights, model, LARGE, &error);
    const void *from = device != NULL ? weights : model;
    bool lends = strcmp(words[2], "lend") == 0;
    for (uint32_t i = 0; i < TENSORS && status == REFIT_OK; i++) {
        const refit_weight weight = {i, from, tensors[i].bytes};
        hash = fnv(hash, model, tensors[i].bytes);
        if (tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        status =
            lends ? refit_publisher_lend(publisher, &weight, 1, device, REFIT_STREAM_NONE, &error)
                  : refit_publisher_write(publisher, i, from, weight.bytes, device,
                                          REFIT_STREAM_NONE, &error);
    }
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    answer(status, status == REFIT_OK ? text : error.text);
}

static void do_commit(char *const words[5])
{
    refit_error error;
    (void)words;
    answer_error(refit_publisher_commit(publisher, &error), &error);
}

static void do_version(char *const words[5])
{
    char text[32];
    (void)words;
    snprintf(text, sizeof text, "%" PRIu64, refit_publisher_version(publisher));
    answer(REFIT_OK, text);
}

/* ---- As a worker */

static void do_worker(char *const words[5])
{
    refit_config config;
    refit_error error;
    refit_status status = configure(&config, words[2], "2", words[4], &error);
    if (status == REFIT_OK) status = refit_subscriber_open(words[1], &config, &subscriber, &error);
    if (status == REFIT_OK) status = open_device(&config, &error);
    if (status == REFIT_OK && device != NULL)
        status = refit_subscriber_use_device(subscriber, device, &error);
    answer_error(status, &error);
}

/* Adds a tensor of the update, wherever it lies. */
static refit_status fnv_tensor(uint32_t at, uint64_t *hash, refit_error *error)
{
    refit_tensor tensor = {.size = sizeof tensor};
    refit_device *where = refit_update_device(update);
    const void *bytes = NULL;
    refit_status status = refit_update_tensor(update, at, &tensor, &bytes, error);
    if (status == REFIT_OK && where != NULL) {
        status = refit_stream_copy(where, REFIT_STREAM_NONE, model, bytes, tensor.bytes, error);
        bytes = model;
    }
    if (status == REFIT_OK) *hash = fnv(*hash, bytes, tensor.bytes);
    return status;
}

/* Piece by piece, to the host. */
static refit_status fetch_pieces(unsigned char held[TENSORS][LARGE], refit_error *error)
{
    const refit_piece *pieces;
    uint32_t count = 0;
    refit_status status;
    do {
        status = refit_update_next_pieces(update, 60000, &pieces, &count, error);
        for (uint32_t i = 0; status == REFIT_OK && i < count; i++)
            status = refit_stream_copy(device, REFIT_STREAM_NONE,
                                       held[pieces[i].tensor] + pieces[i].offset, pieces[i].memory,
                                       pieces[i].bytes, error);
    } while (status == REFIT_OK && count > 0);
    return status;
}

static refit_status fnv_streamed(uint64_t *hash, refit_error *error)
{
    static unsigned char held[TENSORS][LARGE];
    refit_status status = fetch_pieces(held, error);
    for (uint32_t i = 0; status == REFIT_OK && i < TENSORS; i++) {
        uint32_t original = tensors[i].alias_of == REFIT_NO_ALIAS ? i : tensors[i].alias_of;
        *hash = fnv(*hash, held[original], tensors[i].bytes);
    }
    return status;
}

/* A version that may come piece by piece; nothing of it is read yet. */
static void do_arrive(char *const words[5])
{
    refit_error error;
    uint32_t timeout_ms = (uint32_t)strtoul(words[1], NULL, 10);
    answer_error(refit_subscriber_next(subscriber, timeout_ms, &update, &error), &error);
}

static void do_fetch(char *const words[5])
{
    refit_error error = {0};
    char text[64];
    uint64_t hash = 7;
    (void)words;
    refit_status status =
        refit_update_is_streamed(update) ? fnv_streamed(&hash, &error) : REFIT_ERR_UNSUPPORTED;
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    answer(status, status == REFIT_OK ? text : error.text);
}

static void do_next(char *const words[5])
{
    refit_error error;
    char text[64];
    uint64_t hash = 7;
    uint32_t timeout_ms = (uint32_t)strtoul(words[1], NULL, 10);
    refit_status status = refit_subscriber_next(subscriber, timeout_ms, &update, &error);
    for (uint32_t i = 0; status == REFIT_OK && i < refit_update_count(update); i++)
        status = fnv_tensor(i, &hash, &error);
    snprintf(text, sizeof text, "%016" PRIx64 " %" PRIu64, hash,
             status == REFIT_OK ? refit_update_version(update) : 0);
    answer(status, status == REFIT_OK ? text : error.text);
}

static void do_accept(char *const words[5])
{
    refit_error error;
    (void)words;
    answer_error(refit_update_accept(update, &error), &error);
}

static void do_release(char *const words[5])
{
    (void)words;
    refit_update_close(update);
    update = NULL;
    answer(REFIT_OK, "");
}

static void do_describe(char *const words[5])
{
    refit_subscriber_info info = {.size = sizeof info};
    refit_error error;
    char text[128];
    (void)words;
    refit_status status = refit_subscriber_describe(subscriber, &info, &error);
    snprintf(text, sizeof text, "%s %" PRIu64 " %" PRIu64 " %d", info.state, info.version,
             info.epoch, (int)info.path);
    answer(status, status == REFIT_OK ? text : error.text);
}

/* ---- Commands */

static const struct command {
    const char *name;
    void (*run)(char *const words[5]);
} commands[] = {
    {"trainer", do_trainer}, {"wait", do_wait},         {"begin", do_begin},
    {"write", do_write},     {"commit", do_commit},     {"version", do_version},
    {"worker", do_worker},   {"next", do_next},         {"accept", do_accept},
    {"release", do_release}, {"describe", do_describe}, {"arrive", do_arrive},
    {"fetch", do_fetch},
};

static void obey(char *line)
{
    char *words[5] = {"", "", "", "", ""};
    char *rest = NULL;
    uint32_t count = 0;
    for (char *word = strtok_r(line, " \n", &rest); word != NULL && count < 5;
         word = strtok_r(NULL, " \n", &rest)) {
        words[count++] = word;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(commands[i].name, words[0]) == 0) {
            commands[i].run(words);
            return;
        }
    }
    answer(REFIT_ERR_INVALID, "no such command");
}

int main(void)
{
    char line[512];
    while (fgets(line, sizeof line, stdin) != NULL)
        obey(line);
    refit_subscriber_close(subscriber);
    refit_publisher_close(publisher);
    return close_device() ? 0 : 1;
}
