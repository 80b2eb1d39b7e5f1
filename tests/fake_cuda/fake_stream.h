/* fake_stream: queues of work, each with a thread that begins with the first piece. */
#ifndef FAKE_STREAM_H
#define FAKE_STREAM_H

#include "fake_state.h"

/* One recording of an event: a place in a stream. */
typedef struct fake_mark {
    unsigned users; /* the event, if it is its latest, and queued work */
    fake_context *context;
    bool done;
    int64_t time; /* when it was done */
} fake_mark;

typedef struct fake_event {
    fake_node node; /* in fake.events */
    fake_context *context;
    unsigned flags;
    fake_mark *latest; /* NULL: never recorded */
    bool captured;     /* recorded last in a capture */
} fake_event;

typedef struct fake_copy {
    uint64_t to;
    uint64_t from;
    uint64_t bytes;
    unsigned char *early; /* what the source was when it was called, or NULL */
} fake_copy;

/* A piece of work. `run` is called with the lock held. */
typedef struct fake_op {
    struct fake_op *next;
    rft_cu_result (*run)(struct fake_op *op);
    bool (*ready)(const struct fake_op *op); /* NULL: always */
    void (*drop)(struct fake_op *op);        /* NULL: nothing to be given back */
    bool (*uses)(const struct fake_op *op, uint64_t base, uint64_t bytes); /* NULL: nothing */
    bool always; /* also after the context is lost */
    bool apart;  /* a host function with other work before it */
    uint64_t serial;
    rft_cu_result fault; /* scripted */
    /* of the several kinds */
    fake_copy *copies;
    size_t count;
    unsigned char value;
    fake_mark *mark;
    rft_cu_host_fn function;
    void *user;
    uint64_t numbers[7];
    int device;
} fake_op;

typedef struct fake_stream {
    fake_node node;           /* in fake.streams, while it has a handle */
    struct fake_stream *next; /* in the list of all that have not ended */
    fake_context *context;
    unsigned flags;
    bool foreign; /* made by a test or the driver: not counted */
    bool legacy;
    bool closing;
    bool started;
    bool stopped; /* by a test */
    bool busy;    /* its first piece runs */
    fake_op *first;
    fake_op *last;
    unsigned length; /* of its queue */
    unsigned calls;  /* host functions in it that are apart */
    uint64_t done;   /* the serial of the last piece that has run */
    int capture;     /* RFT_CU_CAPTURE_* */
} fake_stream;

/* The stream of a handle, the special ones as well, for a call that puts work there; NULL and the
 * answer if it is none of this context's. */
fake_stream *fake_stream_for(fake_call *call, rft_cu_stream handle, rft_cu_result *result);
/* Any live stream. */
fake_stream *fake_stream_find(fake_call *call, rft_cu_stream handle);

fake_op *fake_op_new(rft_cu_result (*run)(fake_op *op));
/* Queues it. Takes it. */
void fake_stream_put(fake_stream *stream, fake_op *op, const fake_call *call);
/* Waits until it has run all that it has now. */
void fake_stream_drain(fake_stream *stream);
/* Waits until all streams of the context have run what they have now. */
void fake_context_drain(const fake_context *context);
bool fake_streams_use(uint64_t base, uint64_t bytes);
fake_stream *fake_streams_first(void);
void fake_streams_reset(void);

/* ---- fake_capture.c */
/* May this thread make a call that a capture forbids? The answer, and the captures are broken. */
rft_cu_result fake_capture_check(void);
/* Before work is put on the stream: false, and the answer is *result, if it is not to be queued. */
bool fake_capture_takes(fake_stream *stream, rft_cu_result *result);

#endif
