/*
 * Any bytes as a configuration. What is taken leaves every option within its range and reads back
 * from its own print; what is refused says so on one line.
 */
#include <string.h>

#include "config/config.h"
#include "config/options.h"
#include "fuzz.h"

/* What the text has set; the others are as they always are. */
static void check_option(const rft_option *option, const refit_config *config)
{
    if (config->origin[option - rft_options] == REFIT_CONFIG_DEFAULT) return;
    char printed[RFT_VALUE_TEXT];
    char again[RFT_VALUE_TEXT];
    refit_config copy = *config;
    FUZZ_REQUIRE(rft_option_check(option, config, NULL) == REFIT_OK);
    rft_option_print(option, config, printed);
    FUZZ_REQUIRE(rft_option_parse(option, printed, &copy, NULL) == REFIT_OK);
    rft_option_print(option, &copy, again);
    FUZZ_REQUIRE(strcmp(printed, again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static refit_config plain;
    refit_error error = {0};
    if (plain.size == 0) refit_config_init(&plain, sizeof plain);
    refit_config config = plain;
    refit_status status =
        rft_config_read_text("fuzz.yaml", (const char *)data, size, sizeof config, &config, &error);
    if (status != REFIT_OK) {
        FUZZ_REQUIRE(status == REFIT_ERR_CONFIG);
        FUZZ_REQUIRE(strncmp(error.text, "fuzz.yaml:", 10) == 0);
        FUZZ_REQUIRE(strchr(error.text, '\n') == NULL);
    }
    fuzz_taken += status == REFIT_OK;
    for (size_t i = 0; i < rft_option_count; i++)
        check_option(&rft_options[i], &config);
    return 0;
}
