/*
 * What tests of windows and of masters stand on: a device that can be told to fail, regions that
 * live on the host, or on the device, and what every byte of them must be after any steps.
 *
 *     scene *on = open_scene(&(opening){.windows = "3"});
 *     step_all(on);                                all parts of the list visit the device
 *     check_image(on);                             each byte was stepped once
 *     close_scene(on);                             nothing is lost, nothing has leaked
 *
 * SCENE(name, .windows = "3") is a test `on` such a scene.
 */
#ifndef OFFLOAD_WINDOWS_H
#define OFFLOAD_WINDOWS_H

#include <refit/advanced/window.h>

#include "kernels/master.h"
#include "tests/offload/offload.h"

#define REGIONS_MOST 10
#define PARTS_MOST   96
#define UNIT         ((uint64_t)RFT_MASTER_UNIT * 4) /* bytes of masters that are coded as one */

typedef enum scene_kind {
    STATES,  /* ten regions, one larger than a slab, one of a single byte */
    MASTERS, /* fp32 masters: three are coded, one is too small for that, one has no weights */
    LITTLE,  /* the same with less: one unit each, three windows in all */
    THREE,   /* of a slab and a bit each, page-locked, each in a group of its own */
    MIXED,   /* of all sizes, in three groups */
    MIXED_MASTERS, /* the same; the first two are masters and have weights */
} scene_kind;

/* How a test's scene is. */
struct opening {
    scene_kind kind;
    const char *windows;         /* NULL: 2 */
    const char *const *settings; /* more of them, as set_each takes them */
    const char *device;          /* NULL: host */
    bool empty;                  /* the regions hold zeros, and the list is empty */
    bool unsealed;               /* there is no window; implies empty */
    bool on_device;              /* the regions live there, filled; there is no window */
};

struct scene {
    scene_kind kind;
    bool on_device;
    refit_device *device;
    refit_device *plain; /* the one in it, for the test's own copies */
    refit_config config;
    refit_offloader *offloader;
    refit_window *window;
    refit_stream_ref stream;
    const uint64_t *bytes; /* of each region */
    uint32_t regions;
    uint32_t coded; /* the first so many; 0: none are masters */
    unsigned char *expected[REGIONS_MOST];
    uint16_t *rounded[REGIONS_MOST]; /* the weights, on the host */
    void *weights[REGIONS_MOST];     /* the weights, on the device; NULL: none */
    void *memory[REGIONS_MOST];      /* of regions that are bound */
    refit_window_part parts[PARTS_MOST];
    void *born[PARTS_MOST]; /* memory of parts that are born */
    uint32_t count;
    uint32_t windows; /* of the last step */
    refit_window_view view;
    uint64_t spared;  /* of each part's weights, the first so many are a rounding; */
    uint64_t spoiled; /* then so many are none */
    uint64_t seed;
    refit_error error;
};

/* Adds the regions. */
refit_status add_regions(scene *on);

/* Seals, and opens the window, if there is one. */
void seal(scene *on);

/* The offloader and its window again, with one setting more. The regions hold zeros. */
void reopen_with(scene *on, const char *setting);

/* New bytes in all regions; the list is all of them. */
void fill(scene *on);

/* Waits for what leaves. */
void settle(scene *on);

/* Every byte is what it must be: in the image, once all has left; on the device, where bound. */
void check_image(scene *on);
void check_region(scene *on, const refit_read_lock *lock, uint32_t region);
void check_device(scene *on);

/* Lists of parts. */
void add_part(scene *on, uint32_t region, uint32_t flags, uint64_t offset, uint64_t bytes);
void list_part(scene *on, uint32_t region, uint32_t flags, uint64_t offset, uint64_t bytes);
void list_all(scene *on, uint32_t flags);

/* A region in parts of so many bytes, after what is listed. */
void add_parts(scene *on, uint32_t region, uint64_t most);

/* Some regions, in parts with bytes left out between, some together, some born. */
void list_some(scene *on, bool with_born);

/* Of parts that are coded, or are not; `born`: of those that are born, too. */
uint64_t bytes_of_list(const scene *on, bool coded, bool born);

/* The calls of a step. */
refit_status begin(scene *on);
refit_status next(scene *on);
refit_status done(scene *on);
refit_status end(scene *on);
refit_status wait_for(scene *on, uint32_t timeout_ms);

/* What a step makes of a part in plain arrays. */
unsigned char stepped(unsigned char byte, uint64_t at);
void new_bytes(scene *on, const refit_window_part *part);

/* Steps the window that next has handed out, whose bytes are what they must be. */
void step_window(scene *on);

/* next, which is OK, and step_window. */
void step_next(scene *on);

/* Steps `most` windows; true if there are more. */
bool step_windows(scene *on, uint32_t most);

/* Steps all windows after begin, and ends the step. */
void step_rest(scene *on);
void step_all(scene *on);

/* Steps of STATES or of LITTLE meet each failure in turn; each part is stepped once all the same.
 */
void fail_each(scene_kind kind);

/* Calls it until it succeeds; how often it failed. */
#define UNTIL_OK(on, failures, call)                                                               \
    do {                                                                                           \
        for (uint32_t tries = 0; (call) != REFIT_OK; tries++) {                                    \
            if (tries >= 4) print_error("%s: %s\n", #call, (on)->error.text);                      \
            assert_true(tries < 4);                                                                \
            (failures)++;                                                                          \
        }                                                                                          \
    } while (0)

/* Takes and frees a read lock. */
refit_status try_read_lock(scene *on);

/* New bytes in regions that are on the device, and weights of them. */
void renew(scene *on);

/* Weights that are not a rounding: so many of the region's first. */
void spoil(scene *on, uint32_t region, uint64_t count);

/* Changes a weight, or changes it back. */
void change_weight(scene *on, uint32_t region, uint64_t element);

/* The memory of regions has none of their bytes. */
void scrub(scene *on);

/* Binds device memory to all regions, which holds none of their bytes. */
void bind_all(scene *on);
void unbind_all(scene *on);

#endif
