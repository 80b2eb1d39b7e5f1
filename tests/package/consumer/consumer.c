/* Opens a device, and says which refit it runs on, if that is the one it was compiled for. */
#include <refit.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    refit_device *device;
    if (refit_device_open("host:capacity=1MiB", NULL, &device, NULL) != REFIT_OK) return 1;
    if (refit_device_close(device, NULL) != REFIT_OK) return 1;
    if (strcmp(refit_version(), REFIT_VERSION_STRING) != 0) return 1;
    return puts(refit_version()) < 0;
}
