/*
 * ledger: what the library takes from the operating system, and has not given back.
 *
 * The linker puts it between the library and the calls that take memory, descriptors and threads
 * (--wrap, in CMakeLists.txt): it counts them, and can refuse the n-th. What the sanitizers
 * cannot see is seen here: a mapping, a descriptor.
 *
 *     ledger_open();
 *     ... everything is opened, fails, and is closed ...
 *     ledger_check();                 fails the test if anything is still taken
 */
#ifndef LEDGER_H
#define LEDGER_H

#include <stdbool.h>
#include <stdint.h>

/* Begins to count; no refit object is open. */
void ledger_open(void);

/* Fails the test unless all was given back since ledger_open: mapped bytes and descriptors. */
void ledger_check(void);

/* The n-th request from now on is refused with the error that is usual for its kind; 0: none. */
void ledger_refuse(uint64_t nth);

/* Refuses none from now on. True if the n-th request came before. */
bool ledger_stop(void);

/* The call that was refused last, for messages; "" if there was none. */
const char *ledger_refused(void);

#endif
