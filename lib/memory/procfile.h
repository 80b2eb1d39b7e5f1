/*
 * procfile: the small text files in which the kernel tells what there is (/proc, /sys). Read whole,
 * into the caller's memory, never more than there is room for.
 */
#ifndef RFT_PROCFILE_H
#define RFT_PROCFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RFT_PROCFILE_ROOM 8192 /* longer files are cut; what is looked for stands further up */

/* Reads up to `room` - 1 bytes and ends them with NUL. False if the file cannot be read. */
bool rft_procfile_read(const char *path, char *text, size_t room);

/* The decimal number at the start of `text`, blanks before it allowed. False without one ("max"),
 * or if it is 2^64 or more. */
bool rft_procfile_number(const char *text, uint64_t *out);

/* The number after `key` in the line that starts with it: "MemFree:  12 kB", "inactive_file 12".
 */
bool rft_procfile_find(const char *text, const char *key, uint64_t *out);

/* Is `number` in a list of numbers and ranges: "0-3,8,10-11"? */
bool rft_procfile_lists(const char *text, uint64_t number);

/* How many numbers such a list has. 0 for what is none. */
uint64_t rft_procfile_count(const char *text);

#endif
