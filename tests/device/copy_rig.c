#include "tests/device/copy_rig.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/checked.h"

#define MARK 0x5a

copy_rig rig;

int rig_case_begin(void **state)
{
    rig.device = NULL;
    return cuda_case_begin(state);
}

int rig_case_end(void **state)
{
    if (rig.device != NULL) rig_close();
    return cuda_case_end(state);
}

void rig_case_again(void)
{
    (void)rig_case_end(NULL);
    (void)rig_case_begin(NULL);
}

static refit_device *open_device(const char *const *settings)
{
    refit_device *device = NULL;
    refit_config config;
    refit_error error = {0};
    refit_config_init(&config, sizeof config);
    for (; settings != NULL && *settings != NULL; settings++) {
        char key[64];
        const char *value = strchr(*settings, '=') + 1;
        size_t length = (size_t)(value - *settings) - 1;
        memcpy(key, *settings, length);
        key[length] = '\0';
        assert_ok(refit_config_set(&config, key, value, &error));
    }
    if (refit_device_open("cuda:0", &config, &device, &error) != REFIT_OK)
        fail_msg("%s", error.text);
    return device;
}

void rig_open(uint64_t bytes, const char *const *settings)
{
    void *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *memory;
    assert_ptr_not_equal(host, MAP_FAILED);
    rig = (copy_rig){.device = open_device(settings), .host = host, .bytes = bytes};
    assert_ok(refit_stream_open(rig.device, &rig.stream, &rig.error));
    assert_ok(refit_memory_alloc(rig.device, bytes, &memory, &rig.error));
    assert_ok(rft_device_host_pin(rig.device, rig.host, bytes, false, &rig.error));
    rig.memory = memory;
}

void rig_close(void)
{
    assert_ok(refit_stream_close(rig.device, rig.stream, &rig.error));
    rft_device_host_unpin(rig.device, rig.host, rig.bytes);
    assert_ok(refit_memory_free(rig.device, rig.memory, &rig.error));
    cuda_close(rig.device);
    munmap(rig.host, rig.bytes);
    free(rig.out);
    free(rig.back);
    rig.device = NULL;
}

void rig_lay(uint32_t count, uint64_t size, uint64_t host_gap, uint32_t slack, uint64_t memory_gap)
{
    assert_true(count * (size + rft_max_u64(host_gap, memory_gap)) <= rig.bytes);
    rig.count = count;
    rig.slack = slack;
    rig.out = realloc(rig.out, count * sizeof *rig.out);
    rig.back = realloc(rig.back, count * sizeof *rig.back);
    for (uint32_t i = 0; i < count; i++) {
        char *host = rig.host + i * (size + host_gap);
        char *memory = rig.memory + i * (size + memory_gap);
        rig.out[i] = (rft_copy){
            .to = host, .from = memory, .bytes = size, .slack = slack, .known_memory = true};
        rig.back[i] = (rft_copy){
            .to = memory, .from = host, .bytes = size, .slack = slack, .known_memory = true};
    }
}

copy_rig rig_part(uint32_t i, uint32_t parts)
{
    copy_rig part = rig;
    part.count = rig.count / parts;
    part.out += i * part.count;
    part.back += i * part.count;
    assert_ok(refit_stream_open(rig.device, &part.stream, &part.error));
    return part;
}

/* Never the mark. */
static char byte_of(uint64_t at, unsigned seed)
{
    char byte = (char)((at + 1 + seed * 7919u) * UINT64_C(0x9E3779B97F4A7C15) >> 56);
    return byte == MARK ? MARK + 1 : byte;
}

#define ROW 4096u

/* Bytes of copy i from its byte `at` on. A race cannot be had in a row on the stack, and a look at
 * each byte of it is what makes a thread sanitizer slow. */
__attribute__((no_sanitize("thread"))) static uint64_t
make_row(char row[ROW], uint32_t i, uint64_t at, uint64_t bytes, unsigned seed)
{
    uint64_t count = rft_min_u64(bytes - at, ROW);
    for (uint64_t k = 0; k < count; k++)
        row[k] = byte_of(i * 1000003u + at + k, seed);
    return count;
}

static char *memory_bytes(void)
{
    return fake_cuda_bytes((uintptr_t)rig.memory, rig.bytes);
}

static char *seen_at(const void *side)
{
    const char *at = side;
    if (at >= rig.host && at < rig.host + rig.bytes) return rig.host + (at - rig.host);
    return memory_bytes() + (at - rig.memory);
}

void rig_fill(bool out, unsigned seed)
{
    const rft_copy *copies = out ? rig.out : rig.back;
    memset(rig.host, MARK, rig.bytes);
    memset(memory_bytes(), MARK, rig.bytes);
    for (uint32_t i = 0; i < rig.count; i++) {
        char *from = seen_at(copies[i].from);
        for (uint64_t at = 0; at < copies[i].bytes; at += ROW) {
            char row[ROW];
            uint64_t count = make_row(row, i, at, copies[i].bytes, seed);
            memcpy(from + at, row, count);
        }
    }
}

/* From the end of copy i to the next one, or to the end. */
static void check_gap(const char *from, const char *end, uint64_t padding)
{
    char marks[ROW];
    from += rft_min_u64(padding, (uint64_t)(end - from));
    memset(marks, MARK, rft_min_u64((uint64_t)(end - from), ROW));
    while (from < end) {
        uint64_t count = rft_min_u64((uint64_t)(end - from), ROW);
        if (memcmp(from, marks, count) != 0) fail_msg("a byte outside all copies was written");
        from += count;
    }
}

void rig_check(bool out, unsigned seed)
{
    const rft_copy *copies = out ? rig.out : rig.back;
    const char *side_end = (out ? rig.host : memory_bytes()) + rig.bytes;
    for (uint32_t i = 0; i < rig.count; i++) {
        const char *to = seen_at(copies[i].to);
        bool last = i + 1 == rig.count;
        for (uint64_t at = 0; at < copies[i].bytes; at += ROW) {
            char row[ROW];
            uint64_t count = make_row(row, i, at, copies[i].bytes, seed);
            if (memcmp(to + at, row, count) != 0)
                fail_msg("copy %u, from byte %u on", i, (unsigned)at);
        }
        check_gap(to + copies[i].bytes, last ? side_end : seen_at(copies[i + 1].to),
                  out ? rig.slack : 0);
    }
}

refit_status rig_put(copy_rig *part, bool out, rft_copy_order order)
{
    const rft_copy *copies = out ? part->out : part->back;
    for (uint32_t first = 0; first < part->count; first += RIG_BATCH) {
        uint32_t count = part->count - first;
        RFT_TRY(rft_device_copy_batch(part->device, part->stream, copies + first,
                                      count < RIG_BATCH ? count : RIG_BATCH, order, &part->error));
    }
    return REFIT_OK;
}

void rig_wait(copy_rig *part)
{
    if (refit_stream_wait(part->device, part->stream, TIMEOUT_MS, &part->error) != REFIT_OK)
        fail_msg("%s", part->error.text);
}

static void go_one_way(bool out, unsigned seed)
{
    rig_fill(out, seed);
    if (rig_put(&rig, out, out ? RFT_COPY_STREAM : RFT_COPY_ANY) != REFIT_OK)
        fail_msg("%s", rig.error.text);
    rig_wait(&rig);
    rig_check(out, seed);
}

void rig_round(unsigned seed)
{
    go_one_way(true, seed);
    go_one_way(false, seed + 1);
}

uint64_t rig_small_bytes(void)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(rig.device, &info, NULL));
    return info.small_bytes;
}
