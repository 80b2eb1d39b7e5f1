/* Each allocation of a whole refit fails once: the call returns the failure or does without,
 * nothing leaks, no worker sees a torn version, and the next refit succeeds. */
#include "tests/fault/sweep.h"
#include "tests/support/failing_alloc.h"

static const char *what_failed(void)
{
    return "a failed allocation";
}

int main(void)
{
    /* The call that was refused memory says so; a call that waited for it reports a timeout or a
     * failure; and a hook of the caller returns only its number. */
    static const refit_status known[] = {REFIT_ERR_HOST_MEMORY, REFIT_ERR_PEER, REFIT_ERR_TIMEOUT,
                                         REFIT_ERR_CALLBACK, REFIT_OK};
    const sweep allocations = {"allocations", failing_alloc_begin, failing_alloc_stop, known,
                               what_failed};
    return sweep_run("fault_allocations", &allocations);
}
