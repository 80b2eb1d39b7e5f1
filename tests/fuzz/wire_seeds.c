/*
 * Writes the seeds of the wire's fuzz targets: FOLDER/message, FOLDER/manifest, FOLDER/frame and
 * FOLDER/codec, which must exist. Run it again after a change of the message tables.
 */
#include "tests/fuzz/frame_manifest.h"
#include "tests/fuzz/seeds.h"
#include "tests/support/seeded.h"
#include "tests/wire/tensor_samples.h"
#include "tests/wire/wire_samples.h"
#include "wire/frame.h"
#include "wire/reassembly.h"

static void write_for(const char *folder, const char *target, const char *name, rft_view bytes)
{
    char path[1024];
    (void)snprintf(path, sizeof path, "%s/%s", folder, target);
    write_seed(path, name, bytes.data, bytes.count);
}

static void add(rft_bytes *seed, const void *bytes, size_t count)
{
    must(rft_bytes_append(seed, bytes, count, NULL) == REFIT_OK, "hold a seed");
}

static void write_message(const char *folder, const rft_message *message, const char *size)
{
    char name[64];
    (void)snprintf(name, sizeof name, "%s-%s", rft_message_kind_name(message->kind), size);
    rft_bytes encoded = sample_encode(message);
    write_for(folder, "message", name, rft_bytes_view(&encoded));
    rft_bytes_close(&encoded);
}

static void write_messages(const char *folder)
{
    for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        rft_message small = sample_small(kind);
        rft_message large = sample_large(kind);
        write_message(folder, &small, "small");
        write_message(folder, &large, "large");
    }
    write_for(folder, "message", "bomb-array", bytes_view("\xdd\x10\x00\x00\x00", 5));
    write_for(folder, "message", "bomb-map", bytes_view("\xdf\x10\x00\x00\x00", 5));
    write_for(folder, "message", "bomb-text", bytes_view("\xdb\xff\xff\xff\xff", 5));
    write_for(folder, "message", "bomb-nested", bytes_view("\x81\xa1k\x91\x91\x91\x91\x91\x91", 9));
}

static void write_manifest(const char *folder, uint32_t count, uint64_t most_elements)
{
    uint64_t seed = count + most_elements;
    refit_tensor tensors[64];
    sample_tensors(&seed, tensors, count, most_elements);
    rft_manifest *manifest = sample_manifest(tensors, count, 65536);
    rft_bytes seed_bytes = {0};
    char name[64];
    (void)snprintf(name, sizeof name, "tensors-%u-%llu", count, (unsigned long long)most_elements);
    add(&seed_bytes, "\xff\x0f", 2);
    add(&seed_bytes, manifest->encoded.data, manifest->encoded.count);
    write_for(folder, "manifest", name, rft_bytes_view(&seed_bytes));
    rft_bytes_close(&seed_bytes);
    rft_manifest_close(manifest);
}

static void write_manifests(const char *folder)
{
    for (uint32_t count = 1; count <= 16; count *= 2) {
        write_manifest(folder, count, 1);
        write_manifest(folder, count, 1000);
        write_manifest(folder, count, 1 << 20);
    }
    write_for(folder, "manifest", "bomb", bytes_view("\xff\x0f\x85\xdd\x10\x00\x00\x00", 8));
}

/* Flags: 1 the right length, 2 the right hash, 4 with a base, 8 starts over, 16 the right digests,
 * 32 packed.
 * The version has six blocks in three frames (3, 1 and 2 blocks). */
static void write_dense_frames(const char *folder)
{
    const rft_view seeds[] = {
        bytes_view("\x03\x00\x03\x00\x01\x00\x00\x00\x00\x00"
                   "\x03\x01\x01\x00\x02\x00\x00\x00"
                   "\x03\x02\x02\x00\x03\x00\x00\x00\x00",
                   27),
        bytes_view("\x0f\x02\x02\x00\x01\x00\x00\x01\x01"
                   "\x03\x00\x03\x00\x02\x00\x00\x01\x00\x01"
                   "\x03\x01\x01\x00\x03\x00\x00\x01",
                   27),
        bytes_view("\x01\x00\x03\x00\x01\x00\x00\x00\x00\x00", 10),
        bytes_view("\x02\x00\x03\xff\x01\x00\x00\x00\x00\x00", 10),
        bytes_view("\x03\x00\x03\x00\x01\x00\x00\x00\x00\x03", 10),
        bytes_view("\x03\xff\x00\x00\x01\x00\x00", 7),
    };
    for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        char name[32];
        (void)snprintf(name, sizeof name, "frames-%zu", i);
        write_for(folder, "frame", name, seeds[i]);
    }
}

/* One frame of which `every` so many bytes changed, by `step`, as its publisher codes it. */
static void write_coded_frame(const char *folder, uint32_t sequence, uint32_t every,
                              unsigned char step, rft_frame_codec *codec)
{
    rft_manifest *manifest = frame_manifest_open();
    unsigned char *images = malloc(2 * manifest->store_bytes), *image = images;
    must(images != NULL, "hold two versions");
    memset(images, FRAME_BASE_BYTE, 2 * manifest->store_bytes);
    for (uint64_t at = 3; at < manifest->store_bytes; at += every)
        image[at] = (unsigned char)(image[at] + step);
    const rft_frame_source source = {
        .image = image, .base = images + manifest->store_bytes, .codec = codec};
    rft_bytes modes = {0}, scratch = {0}, seed = {0};
    rft_frame frame;
    must(rft_frame_encode(manifest, sequence, &source, &modes, &scratch, &frame, NULL) == REFIT_OK,
         "encode a frame");
    size_t planes = frame.packed ? sizeof frame.planes : 0, given = planes + frame.payload.count;
    unsigned char head[7] = {0x0f, (unsigned char)sequence, (unsigned char)modes.count};
    if (frame.packed) head[0] = 0x2f;
    head[5] = (unsigned char)given;
    head[6] = (unsigned char)(given >> 8);
    add(&seed, head, sizeof head);
    add(&seed, modes.data, modes.count);
    add(&seed, frame.planes, planes);
    add(&seed, frame.payload.data, frame.payload.count);
    char name[48];
    (void)snprintf(name, sizeof name, "%s-%u-%u-%u", frame.packed ? "packed" : "sparse", sequence,
                   every, step);
    write_for(folder, "frame", name, rft_bytes_view(&seed));
    rft_bytes_close(&modes);
    rft_bytes_close(&scratch);
    rft_bytes_close(&seed);
    free(images);
    rft_manifest_close(manifest);
}

static void write_frames(const char *folder)
{
    write_dense_frames(folder);
    rft_frame_codec *codec = NULL;
    if (rft_frame_codec_open(3, &codec, NULL) != REFIT_OK) exit(1);
    for (int packed = 0; packed < 2; packed++) {
        rft_frame_codec *with = packed != 0 ? codec : NULL;
        write_coded_frame(folder, 0, 400, 1, with);
        write_coded_frame(folder, 1, 2000, 7, with);
        write_coded_frame(folder, 2, 6, 1, with);
        write_coded_frame(folder, 2, 50, 40, with);
        write_coded_frame(folder, 2, 14, 0x85, with);
    }
    rft_frame_codec_close(codec);
}

/* Its blocks' parts go to the planes that they travel in. */
static void add_block(const rft_manifest *manifest, const rft_block *block,
                      const unsigned char *base, const unsigned char *image,
                      rft_bytes planes[RFT_PACK_PLANES])
{
    static unsigned char coded[1 << 20];
    unsigned char entry[RFT_SPARSE_ENTRY_BYTES];
    const unsigned char *next = coded;
    rft_sparse sparse;
    if (!rft_sparse_encode(manifest, block, 0, base + block->offset, image + block->offset, coded,
                           &sparse))
        exit(1);
    rft_sparse_write_entry(&sparse, entry);
    add(&planes[0], entry, sizeof entry);
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++, next += sparse.delta.bytes[i - 1])
        add(&planes[1 + i], next, sparse.delta.bytes[i]);
}

/* Flags of a plane: 1 compressed by the target, 2 its length is told. */
static void write_planes(const char *folder, uint32_t sequence, uint32_t every, unsigned char flags)
{
    rft_manifest *manifest = frame_manifest_open();
    const rft_frame_span *span = &manifest->frames[sequence];
    rft_bytes planes[RFT_PACK_PLANES] = {{0}}, seed = {0};
    unsigned char head[2] = {(unsigned char)sequence, 0};
    unsigned char *images = malloc(2 * manifest->store_bytes), *image = images;
    must(images != NULL, "hold two versions");
    memset(images, FRAME_BASE_BYTE, 2 * manifest->store_bytes);
    for (uint64_t at = 3; at < manifest->store_bytes; at += every)
        image[at] ^= 1;
    for (uint32_t i = 0; i < span->blocks; i++)
        add_block(manifest, &manifest->blocks[span->first_block + i],
                  images + manifest->store_bytes, image, planes);
    add(&seed, head, sizeof head);
    for (uint32_t i = 0; i < RFT_PACK_PLANES; i++) {
        const unsigned char plane[4] = {flags, (unsigned char)planes[i].count,
                                        (unsigned char)(planes[i].count >> 8), 0};
        add(&seed, plane, sizeof plane);
        add(&seed, planes[i].data, planes[i].count);
        rft_bytes_close(&planes[i]);
    }
    char name[48];
    (void)snprintf(name, sizeof name, "planes-%u-%u-%u", sequence, every, flags);
    write_for(folder, "frame_codec", name, rft_bytes_view(&seed));
    rft_bytes_close(&seed);
    free(images);
    rft_manifest_close(manifest);
}

static void write_packed(const char *folder)
{
    for (unsigned char flags = 0; flags < 4; flags++) {
        write_planes(folder, 1, 2000, flags);
        write_planes(folder, 2, 14, flags);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    write_messages(argv[1]);
    write_manifests(argv[1]);
    write_frames(argv[1]);
    write_packed(argv[1]);
    return 0;
}
