/*
 * Makes the safetensors files that the tests of the command need, good and bad ones.
 *
 *     make_safetensors all SEED FILE           every dtype, odd shapes, empty tensors, scalars
 *     make_safetensors big SEED BYTES FILE     one U8 tensor among small ones
 *     make_safetensors many 0 COUNT FILE       so many empty tensors
 *     make_safetensors named 0 BYTES FILE      one empty tensor whose name has so many bytes
 *     make_safetensors raw LENGTH HEADER DATA FILE
 *         LENGTH as the first 8 bytes ("-": that of HEADER), HEADER as it is, DATA zero bytes
 *
 * Knows nothing of refit: what the command writes is compared with what is made here.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tensor_sample {
    const char *name, *dtype, *shape;
    uint64_t bytes;
} tensor_sample;

static const tensor_sample samples[] = {
    {"bool", "BOOL", "[3,5]", 15},
    {"empty before", "U8", "[0]", 0},
    {"f4", "F4", "[6]", 3},
    {"f6 e2m3", "F6_E2M3", "[4]", 3},
    {"f6 e3m2", "F6_E3M2", "[2,4]", 6},
    {"u8", "U8", "[7]", 7},
    {"i8", "I8", "[1,1,1,1,1,1,1,9]", 9},
    {"f8 e5m2", "F8_E5M2", "[5]", 5},
    {"f8 e4m3", "F8_E4M3", "[70001]", 70001},
    {"f8 e8m0", "F8_E8M0", "[3]", 3},
    {"i16", "I16", "[3]", 6},
    {"u16", "U16", "[3]", 6},
    {"f16", "F16", "[2,2]", 8},
    {"model.layers.0.weight", "BF16", "[513,257]", 263682},
    {"i32", "I32", "[]", 4},
    {"u32", "U32", "[2]", 8},
    {"f32", "F32", "[300,200]", 240000},
    {"c64", "C64", "[2]", 16},
    {"f64", "F64", "[3]", 24},
    {"i64", "I64", "[3]", 24},
    {"empty, of many dimensions", "F32", "[4,0,2]", 0},
    {"u64 with \\\"quotes\\\" and \\\\", "U64", "[3]", 24},
    {"größe", "U8", "[1]", 1},
};

static void put(FILE *file, const void *bytes, size_t count)
{
    if (count > 0 && fwrite(bytes, 1, count, file) != count) {
        perror("make_safetensors");
        exit(1);
    }
}

static void put_length(FILE *file, uint64_t length)
{
    for (int i = 0; i < 8; i++) {
        unsigned char byte = (unsigned char)(length >> (8 * i));
        put(file, &byte, 1);
    }
}

/* Bytes that differ by seed and place: xorshift64. */
static void put_noise(FILE *file, uint64_t seed, uint64_t count)
{
    uint64_t word = seed * 0x9e3779b97f4a7c15u + 1;
    unsigned char block[8192];
    while (count > 0) {
        size_t length = count < sizeof block ? (size_t)count : sizeof block;
        for (size_t i = 0; i < length; i++) {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            block[i] = (unsigned char)(word >> 32);
        }
        put(file, block, length);
        count -= length;
    }
}

static void add_entry(char *header, size_t room, const tensor_sample *sample, uint64_t *end)
{
    size_t used = strlen(header);
    (void)snprintf(header + used, room - used,
                   "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%" PRIu64 ",%" PRIu64
                   "]}",
                   used > 1 ? "," : "", sample->name, sample->dtype, sample->shape, *end,
                   *end + sample->bytes);
    *end += sample->bytes;
}

static void put_file(FILE *file, const tensor_sample *list, size_t count, uint64_t seed)
{
    char header[8192] = "{";
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++)
        add_entry(header, sizeof header - 16, &list[i], &end);
    strcat(header, "}");
    while (strlen(header) % 8 != 0)
        strcat(header, " ");
    put_length(file, strlen(header));
    put(file, header, strlen(header));
    put_noise(file, seed, end);
}

static void put_big(FILE *file, uint64_t seed, uint64_t bytes)
{
    char shape[32];
    (void)snprintf(shape, sizeof shape, "[%" PRIu64 "]", bytes);
    const tensor_sample list[] = {
        {"first", "BF16", "[3]", 6}, {"big", "U8", shape, bytes}, {"last", "F32", "[2]", 8}};
    put_file(file, list, 3, seed);
}

/* What no header of a fixed size has room for: `count` empty tensors, or one with a long name. */
static void put_empty(FILE *file, uint64_t count, uint64_t name_bytes)
{
    const char *value = "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}";
    char *header = malloc(count * (name_bytes + strlen(value) + 2) + 2), *at = header;
    if (header == NULL) exit(1);
    for (uint64_t i = 0; i < count; i++)
        at += sprintf(at, "%c\"%0*" PRIu64 "%s", i == 0 ? '{' : ',', (int)name_bytes, i, value);
    *at++ = '}';
    put_length(file, (uint64_t)(at - header));
    put(file, header, (size_t)(at - header));
    free(header);
}

static void put_raw(FILE *file, const char *length, const char *header, uint64_t data)
{
    put_length(file, strcmp(length, "-") == 0 ? strlen(header) : strtoull(length, NULL, 10));
    put(file, header, strlen(header));
    for (; data > 0; data--)
        put(file, "", 1);
}

int main(int count, char **arguments)
{
    FILE *file = count > 3 ? fopen(arguments[count - 1], "wb") : NULL;
    if (file == NULL) {
        (void)fprintf(stderr, "make_safetensors: %s\n", count > 3 ? strerror(errno) : "usage");
        return 2;
    }
    const uint64_t seed = strtoull(arguments[2], NULL, 10);
    if (strcmp(arguments[1], "all") == 0) {
        put_file(file, samples, sizeof samples / sizeof samples[0], seed);
    } else if (strcmp(arguments[1], "big") == 0) {
        put_big(file, seed, strtoull(arguments[3], NULL, 10));
    } else if (strcmp(arguments[1], "many") == 0) {
        put_empty(file, strtoull(arguments[3], NULL, 10), 8);
    } else if (strcmp(arguments[1], "named") == 0) {
        put_empty(file, 1, strtoull(arguments[3], NULL, 10));
    } else {
        put_raw(file, arguments[2], arguments[3], strtoull(arguments[4], NULL, 10));
    }
    return fclose(file) == 0 ? 0 : 1;
}
