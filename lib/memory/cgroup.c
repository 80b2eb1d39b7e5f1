/*
 * The levels of control groups: the path of the process in /proc/self/cgroup, and the files of each
 * level on the way up. Knows nothing of what the files bound.
 */
#include "memory/cgroup.h"

#include <stdio.h>
#include <string.h>

#include "memory/procfile.h"

#define PATH_ROOM 4608 /* a cgroup path has at most 4096 bytes */

bool rft_cgroup_read(const rft_cgroup_level *level, const char *name, char *text)
{
    char file[PATH_ROOM];
    int length =
        snprintf(file, sizeof file, "%s%s%s/%s", level->root, level->mount, level->path, name);
    return length > 0 && (size_t)length < sizeof file &&
           rft_procfile_read(file, text, RFT_PROCFILE_ROOM);
}

bool rft_cgroup_read_below(const char *root, const char *name, char *text)
{
    char file[PATH_ROOM];
    int length = snprintf(file, sizeof file, "%s%s", root, name);
    return length > 0 && (size_t)length < sizeof file &&
           rft_procfile_read(file, text, RFT_PROCFILE_ROOM);
}

static bool lists_controller(const char *list, size_t length, const char *controller)
{
    size_t wanted = strlen(controller);
    if (wanted == 0) return length == 0;
    for (const char *at = list; at < list + length; at += strcspn(at, ",:") + 1) {
        if (strcspn(at, ",:") == wanted && strncmp(at, controller, wanted) == 0) return true;
    }
    return false;
}

/* Finds the path in the line "4:memory:/a/b" or "0::/a/b"; "" if there is none, and for "/". */
static void find_path(const char *text, const char *controller, char *path, size_t room)
{
    path[0] = '\0';
    for (const char *line = text; *line != '\0'; line += strspn(line, "\n")) {
        size_t end = strcspn(line, "\n");
        const char *list = memchr(line, ':', end);
        const char *found =
            list == NULL ? NULL : memchr(list + 1, ':', end - (size_t)(list + 1 - line));
        line += end;
        if (found == NULL) continue;
        size_t length = (size_t)(line - (found + 1));
        if (!lists_controller(list + 1, (size_t)(found - list - 1), controller)) continue;
        if (length >= room || length < 2) return;
        memcpy(path, found + 1, length);
        path[length] = '\0';
        return;
    }
}

void rft_cgroup_each(const char *root, const char *mount, const char *controller,
                     rft_cgroup_visit visit, void *user)
{
    char text[RFT_PROCFILE_ROOM], path[PATH_ROOM];
    if (!rft_cgroup_read_below(root, "/proc/self/cgroup", text)) text[0] = '\0';
    find_path(text, controller, path, sizeof path);
    const rft_cgroup_level level = {root, mount, path};
    for (;;) {
        visit(&level, user);
        char *slash = strrchr(path, '/');
        if (slash == NULL) return;
        *slash = '\0';
    }
}
