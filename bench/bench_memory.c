/*
 * bench_memory: how large a benchmark may be. What it takes is counted in all that it and its
 * baselines hold at once; what is free is judged as the library judges it for its arena.
 */
#include <inttypes.h>

#include "bench.h"
#include "cli.h"
#include "memory/budget.h"
#include "progress.h"

/* Three quarters of what is free: the rest is for the process itself, and for who else asks. */
static uint64_t room(void)
{
    refit_config config;
    rft_budget budget;
    refit_config_init(&config, sizeof config);
    if (rft_budget_read("", &config, 0, &budget, NULL) != REFIT_OK) return UINT64_MAX;
    return budget.free_bytes / 4 * 3;
}

uint64_t bench_memory_for(uint64_t wanted, uint64_t copies)
{
    char asked[CLI_SIZE_TEXT], there[CLI_SIZE_TEXT], taken[CLI_SIZE_TEXT];
    const uint64_t fits = room() / copies;
    if (wanted <= fits) return wanted;
    if (wanted != UINT64_MAX) {
        (void)cli_complain(CLI_DONE,
                           "%s are taken %" PRIu64 " times, and there is room for %s: %s are "
                           "measured",
                           cli_size_text(wanted, asked), copies,
                           cli_size_text(fits * copies, there), cli_size_text(fits, taken));
    }
    return fits;
}

refit_status bench_memory_check(uint64_t bytes, uint64_t copies, refit_error *error)
{
    char asked[CLI_SIZE_TEXT], there[CLI_SIZE_TEXT];
    const uint64_t fits = room() / copies;
    if (bytes <= fits) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0,
                      "%s of tensors are taken %" PRIu64 " times, and there is room for %s: list "
                      "less, or end something",
                      cli_size_text(bytes, asked), copies, cli_size_text(fits * copies, there));
}
