/* refit/version.h: which refit this is. */
#ifndef REFIT_VERSION_H
#define REFIT_VERSION_H

#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define REFIT_VERSION_MAJOR  0
#define REFIT_VERSION_MINOR  1
#define REFIT_VERSION_PATCH  0
#define REFIT_VERSION_STRING "0.1.0"

/*
 * The version of the library that is loaded, as "MAJOR.MINOR.PATCH"; a constant. It can differ from
 * REFIT_VERSION_STRING, which is that of the header. Any thread.
 */
REFIT_API const char *refit_version(void);

#ifdef __cplusplus
}
#endif
#endif
