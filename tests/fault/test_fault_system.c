/* Each system call of a whole refit is refused once (memory, descriptors, threads, shared memory,
 * locking): the failure is returned or made up for, and the next refit succeeds. */
#include "tests/fault/ledger.h"
#include "tests/fault/sweep.h"
#include "tests/support/failing_alloc.h"

static void refuse_call(uint64_t nth)
{
    failing_alloc_begin(0);
    ledger_refuse(nth);
}

int main(void)
{
    static const refit_status known[] = {
        REFIT_ERR_BUSY, /* a lock that is refused is taken for a held one */
        REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_DEVICE,
        REFIT_ERR_PIN,         REFIT_ERR_SYSTEM,        REFIT_ERR_CALLBACK,
        REFIT_ERR_PEER,        REFIT_ERR_TIMEOUT,       REFIT_OK};
    const sweep calls = {"system calls", refuse_call, ledger_stop, known, ledger_refused};
    return sweep_run("fault_system", &calls);
}
