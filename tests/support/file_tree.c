/* Temporary folders: made with mkdtemp, removed depth first. */
#include "tests/support/file_tree.h"
#include "tests/support/test.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

file_tree file_tree_open(void)
{
    file_tree tree = {"/tmp/refit-tree-XXXXXX"};
    assert_non_null(mkdtemp(tree.root));
    return tree;
}

void file_tree_write(const file_tree *tree, const char *path, const char *text)
{
    char full[512];
    assert_in_range(snprintf(full, sizeof full, "%s%s", tree->root, path), 1, sizeof full - 1);
    for (char *at = strchr(full + strlen(tree->root) + 1, '/'); at != NULL;
         at = strchr(at + 1, '/')) {
        *at = '\0';
        assert_true(mkdir(full, 0700) == 0 || errno == EEXIST);
        *at = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *place)
{
    (void)info;
    (void)kind;
    (void)place;
    return remove(path);
}

void file_tree_close(file_tree *tree)
{
    assert_int_equal(nftw(tree->root, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}
