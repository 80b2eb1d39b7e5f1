/*
 * other_user: what another user of the machine does, in a child process of the test, which must be
 * root. The child reports with other_ready, and goes on until it is told to go.
 */
#ifndef OTHER_USER_H
#define OTHER_USER_H

#include <stdbool.h>
#include <sys/types.h>

typedef struct other_user {
    pid_t pid;
    int line;
} other_user;

/* The child's part of it. */
typedef struct other_self {
    int line;
} other_self;

/* Whether this process may become another user. */
bool other_user_can_be(void);

/* Whether no other process has claimed that user; it is this process's until its end. */
bool other_user_claim(uid_t user);

/* Waits for other_ready; fails the test if the child ended, or after 50 seconds. */
void other_user_await(other_user *other);
/* Starts `act` as that user, without other groups, and awaits it; what it returns is whether all
 * went well. It must use no assertion of cmocka. */
other_user other_user_ready(uid_t user, bool (*act)(const other_self *self, const void *with),
                            const void *with);
/* Ends a wait in other_until_told. */
void other_user_tell(other_user *other);
/* Ends the wait in other_until_told, waits for the end of the process, and fails the test unless it
 * succeeded. */
void other_user_end(other_user *other);
/* Starts, and ends. */
void other_user_do(uid_t user, bool (*act)(const other_self *self, const void *with),
                   const void *with);

/* In the child. False: the test is over. */
bool other_ready(const other_self *self);
bool other_until_told(const other_self *self);

/* In the child: prints a complaint and returns false if it does not hold. */
#define other_holds(condition) other_check((condition), #condition, __FILE__, __LINE__)
bool other_check(bool holds, const char *what, const char *file, int line);

#endif
