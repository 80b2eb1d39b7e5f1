/* fake_tree: address ranges that do not overlap, ordered, with their objects found by address. */
#ifndef FAKE_TREE_H
#define FAKE_TREE_H

#include <stddef.h>
#include <stdint.h>

/* The first member of what is kept in a tree. */
typedef struct fake_node {
    uint64_t base;
    uint64_t size;
    uint32_t priority;
    struct fake_node *left;
    struct fake_node *right;
} fake_node;

typedef struct fake_tree {
    fake_node *root;
    unsigned count;
} fake_tree;

void fake_tree_put(fake_tree *tree, fake_node *node);
void fake_tree_take(fake_tree *tree, fake_node *node);
/* The first that ends after the address. */
fake_node *fake_tree_from(const fake_tree *tree, uint64_t address);
/* The one that holds the address. */
fake_node *fake_tree_at(const fake_tree *tree, uint64_t address);
/* The first of those that overlap the range. */
fake_node *fake_tree_overlap(const fake_tree *tree, uint64_t base, uint64_t size);

#endif
