/* The version that this library was built as. */
#include <refit/version.h>

const char *refit_version(void)
{
    return REFIT_VERSION_STRING;
}
