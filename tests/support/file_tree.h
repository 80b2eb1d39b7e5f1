/* A temporary folder of made-up files, for code that reads /proc and /sys below a root. */
#ifndef FILE_TREE_H
#define FILE_TREE_H

typedef struct file_tree {
    char root[64];
} file_tree;

/* Fails the test if the folder cannot be made. */
file_tree file_tree_open(void);

/* Writes `text` to root + `path` ("/proc/meminfo"), making the folders on the way. */
void file_tree_write(const file_tree *tree, const char *path, const char *text);

/* Removes everything. */
void file_tree_close(file_tree *tree);

#endif
