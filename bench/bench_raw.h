/*
 * bench_raw: a plain ZeroMQ socket that sends the same frames and does nothing else: the
 * transport's own ceiling. ROUTER to DEALER, zero-copy sends, credits; the receiver drops what it
 * gets.
 */
#ifndef BENCH_RAW_H
#define BENCH_RAW_H

#include <stdbool.h>
#include <stdint.h>

typedef struct bench_raw bench_raw;

/* Binds `address` (as ZeroMQ takes it; port 0 or *: any free one) and takes `bytes` to send. NULL:
 * not to be had. */
bench_raw *bench_raw_open(const char *address, uint64_t bytes, uint64_t frame_bytes,
                          uint32_t window);
const char *bench_raw_endpoint(const bench_raw *raw);
void bench_raw_close(bench_raw *raw);

/* Waits until `workers` have said hello. */
bool bench_raw_wait(bench_raw *raw, uint32_t workers);

/* Sends all bytes to every worker and waits until each has said that it has them; seconds, or a
 * negative number. */
double bench_raw_send(bench_raw *raw, uint32_t workers);

/* The worker's side: true once its standard input has ended, which is how the benchmark stops it.
 */
bool bench_input_ended(void);

/* The worker's side: receives until its standard input ends. Returns an exit status. */
int bench_raw_receive(const char *endpoint, uint64_t bytes, uint32_t window);

#endif
