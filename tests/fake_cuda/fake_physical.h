/* fake_physical: memory of a device without addresses of its own. */
#ifndef FAKE_PHYSICAL_H
#define FAKE_PHYSICAL_H

#include "fake_stream.h"

typedef struct fake_physical {
    fake_node node; /* in fake.physicals, while its handle is not released */
    fake_device *device;
    uint64_t bytes;
    uint64_t charged; /* to the device; 0 for what was imported */
    int file;
    int types;      /* in which it may be exported */
    unsigned users; /* its handle and its mappings */
} fake_physical;

bool fake_granular(uint64_t number);
/* NULL, and a violation, for what is not a handle. */
fake_physical *fake_physical_find(rft_cu_handle handle);
/* One of its users has no more need of it. */
void fake_physical_leave(fake_physical *physical);

#endif
