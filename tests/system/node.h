/*
 * node: the host memory of a machine that the test has made up, and its ranks are on. What a rank's
 * library is told is free there is what is left after what all of them have touched; and the node
 * sees whether two ever had the lock together, or memory was taken that was not claimed.
 *
 * It lies between the library and its own files by the linker (NODE_WRAPS in CMakeLists.txt): where
 * the machine-wide lock is taken and given back and bytes are claimed, what /proc/meminfo says, and
 * where the image's memory is touched and dropped.
 */
#ifndef NODE_H
#define NODE_H

#include <stdatomic.h>
#include <stdbool.h>

#define NODE_RANKS 4

typedef struct test_node {
    atomic_llong free_bytes;
    atomic_llong least;   /* that was ever free; below 0 they have met the limit */
    atomic_int inside;    /* ranks that have the lock */
    atomic_int together;  /* how often one was not alone */
    atomic_int unclaimed; /* memory taken without a claim after a look at what is free */
    atomic_int waits;     /* how often one found too little, or the lock taken */
    atomic_int takings;   /* images touched */
    atomic_bool held;     /* while true, a rank stops between its claim and its first touch */
    atomic_int standing;  /* ranks that have stopped there */
    atomic_llong taken[NODE_RANKS]; /* by rank */
} test_node;

/* The file that one test makes and other processes find by its pid and number; no name is left. */
test_node *node_open(long long free_bytes, int *file);
test_node *node_join(int pid, int file);
void node_leave(test_node *node);

/* From now on memory that the library takes on this thread counts for that rank of that node. */
void node_enter(test_node *node, unsigned rank);

/* Frees the memory of a killed rank, as the kernel does. */
void node_bury(test_node *node, unsigned rank);

#endif
