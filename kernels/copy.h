/*
 * copy: moves bytes at the speed of the memory. Streaming (non-temporal) stores for what is too
 * large for the caches, plain ones below; the widest vectors that this CPU has, chosen once at run
 * time.
 */
#ifndef RFT_KERNEL_COPY_H
#define RFT_KERNEL_COPY_H

#include <stddef.h>

/* Like memcpy; when it returns, other threads that are told so see the bytes (fenced). */
void rft_copy_bytes(void *to, const void *from, size_t bytes);

/* Likewise for a piece of something that as a whole is too large for the caches: streams it however
 * small it is, where that pays at all. */
void rft_copy_piece(void *to, const void *from, size_t bytes);

#endif
