/* Says which refit it runs on, if that is the one it was compiled for. */
#include <refit.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    if (strcmp(refit_version(), REFIT_VERSION_STRING) != 0) return 1;
    return puts(refit_version()) < 0;
}
