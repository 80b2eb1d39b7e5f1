/* Tests open and close the scene that they are linked with. */
#include "tests/offload/offload.h"

int set_up(void **state)
{
    *state = open_scene(*state);
    return 0;
}

int tear_down(void **state)
{
    close_scene(*state);
    return 0;
}
