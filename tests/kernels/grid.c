/*
 * A block's threads are started once a launch; between two blocks they meet, since what is shared
 * in one block is used again in the next. A warp meets by itself for an exchange.
 */
#include "tests/kernels/grid.h"

#include <pthread.h>
#include <stdlib.h>

#define WARP       32u
#define WARPS_MOST 8u

_Thread_local grid_index threadIdx, blockIdx;
grid_index blockDim, gridDim;

static pthread_barrier_t block_barrier, warp_barriers[WARPS_MOST];
static uint64_t exchanged[WARPS_MOST][WARP];

typedef struct thread {
    pthread_t handle;
    unsigned index;
    void (*kernel)(void *user);
    void *user;
} thread;

void grid_wait_block(void)
{
    (void)pthread_barrier_wait(&block_barrier);
}

uint64_t grid_exchange(uint64_t value, unsigned from)
{
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    exchanged[warp][lane] = value;
    (void)pthread_barrier_wait(&warp_barriers[warp]);
    if (from < WARP) value = exchanged[warp][from];
    (void)pthread_barrier_wait(&warp_barriers[warp]);
    return value;
}

static void *run(void *user)
{
    const thread *self = user;
    threadIdx.x = self->index;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
            self->kernel(self->user);
            grid_wait_block();
        }
    }
    return NULL;
}

static void need(int result)
{
    if (result != 0) abort();
}

void grid_launch(unsigned x, unsigned y, unsigned threads, void (*kernel)(void *user), void *user)
{
    static thread all[WARP * WARPS_MOST];
    gridDim = (grid_index){x, y, 1};
    blockDim = (grid_index){threads, 1, 1};
    need(pthread_barrier_init(&block_barrier, NULL, threads));
    for (unsigned warp = 0; warp < threads / WARP; warp++)
        need(pthread_barrier_init(&warp_barriers[warp], NULL, WARP));
    for (unsigned i = 0; i < threads; i++) {
        all[i] = (thread){.index = i, .kernel = kernel, .user = user};
        need(pthread_create(&all[i].handle, NULL, run, &all[i]));
    }
    for (unsigned i = 0; i < threads; i++)
        need(pthread_join(all[i].handle, NULL));
    for (unsigned warp = 0; warp < threads / WARP; warp++)
        (void)pthread_barrier_destroy(&warp_barriers[warp]);
    (void)pthread_barrier_destroy(&block_barrier);
}
