/*
 * file_size_limit: for a while no file may grow beyond so many bytes, so that no shared memory can
 * be had, as if /dev/shm were full. It holds for the whole process.
 */
#ifndef FILE_SIZE_LIMIT_H
#define FILE_SIZE_LIMIT_H

#include <signal.h>
#include <sys/resource.h>

/* Returns what the limit was. */
static inline struct rlimit file_size_limit_to(rlim_t bytes)
{
    struct rlimit before, tight;
    (void)signal(SIGXFSZ, SIG_IGN);
    (void)getrlimit(RLIMIT_FSIZE, &before);
    tight = before;
    tight.rlim_cur = bytes;
    (void)setrlimit(RLIMIT_FSIZE, &tight);
    return before;
}

static inline void file_size_limit_back(const struct rlimit *before)
{
    (void)setrlimit(RLIMIT_FSIZE, before);
    (void)signal(SIGXFSZ, SIG_DFL);
}

#endif
