/*
 * A treap: a binary tree by address that random priorities keep shallow. Ranges do not overlap, so
 * that order by base is order by end.
 */
#include "fake_tree.h"

static fake_node *joined(fake_node *left, fake_node *right)
{
    if (left == NULL) return right;
    if (right == NULL) return left;
    if (left->priority > right->priority) {
        left->right = joined(left->right, right);
        return left;
    }
    right->left = joined(left, right->left);
    return right;
}

static void part(fake_node *root, uint64_t base, fake_node **below, fake_node **above)
{
    if (root == NULL) {
        *below = *above = NULL;
    } else if (root->base < base) {
        part(root->right, base, &root->right, above);
        *below = root;
    } else {
        part(root->left, base, below, &root->left);
        *above = root;
    }
}

/* The address, well mixed: the tree's shape depends on it alone. */
static uint32_t mixed(uint64_t base)
{
    base = (base ^ (base >> 31)) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(base >> 32);
}

void fake_tree_put(fake_tree *tree, fake_node *node)
{
    fake_node *below, *above;
    part(tree->root, node->base, &below, &above);
    node->priority = mixed(node->base);
    node->left = node->right = NULL;
    tree->root = joined(joined(below, node), above);
    tree->count++;
}

void fake_tree_take(fake_tree *tree, fake_node *node)
{
    fake_node **link = &tree->root;
    while (*link != node)
        link = node->base < (*link)->base ? &(*link)->left : &(*link)->right;
    *link = joined(node->left, node->right);
    tree->count--;
}

fake_node *fake_tree_from(const fake_tree *tree, uint64_t address)
{
    fake_node *found = NULL;
    for (fake_node *node = tree->root; node != NULL;) {
        if (node->base + node->size > address) {
            found = node;
            node = node->left;
        } else {
            node = node->right;
        }
    }
    return found;
}

fake_node *fake_tree_at(const fake_tree *tree, uint64_t address)
{
    fake_node *node = fake_tree_from(tree, address);
    return node != NULL && node->base <= address ? node : NULL;
}

fake_node *fake_tree_overlap(const fake_tree *tree, uint64_t base, uint64_t size)
{
    fake_node *node = fake_tree_from(tree, base);
    return node != NULL && node->base < base + size ? node : NULL;
}
