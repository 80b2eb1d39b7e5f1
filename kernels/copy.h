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

/* As rft_copy_bytes, for a piece of a copy that as a whole is too large for the caches: streams the
 * piece however small it is, where streaming pays at all. */
void rft_copy_piece(void *to, const void *from, size_t bytes);

#endif
