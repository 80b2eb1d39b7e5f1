/* The example that lib/include/refit.h shows, compiled and run as it stands there. */
#include <refit.h>

int main(void)
{
#include "tour_body.h"
    return 0;
}
