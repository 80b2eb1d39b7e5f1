/* fake_queue: the work that streams have, and the threads that do it. */
#ifndef FAKE_QUEUE_H
#define FAKE_QUEUE_H

#include "fake_stream.h"

/* A stream begins; it ends when it has run all that it has, and is freed then. */
void fake_queue_add(fake_stream *stream);
void fake_queue_close(fake_stream *stream);

/* Whether no stream of the context has work. */
bool fake_queue_empty(const fake_context *context);

#endif
