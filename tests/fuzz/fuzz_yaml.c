/*
 * Any bytes as a configuration. What is taken leaves every option within its range and reads back
 * from its own print; what is refused says so on one line.
 */
#include <string.h>

#include "config/options.h"
#include "config/yaml.h"
#include "fuzz.h"

static void check_option(const rft_option *option, const refit_config *config)
{
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
    refit_config config;
    refit_error error = {0};
    refit_config_init(&config, sizeof config);
    const rft_yaml_source source = {.name = "fuzz.yaml",
                                    .text = (const char *)data,
                                    .bytes = size,
                                    .caller_size = sizeof config};
    refit_status status = rft_yaml_read(&source, &config, &error);
    if (status != REFIT_OK) {
        FUZZ_REQUIRE(status == REFIT_ERR_CONFIG);
        FUZZ_REQUIRE(strncmp(error.text, "fuzz.yaml:", 10) == 0);
        FUZZ_REQUIRE(strchr(error.text, '\n') == NULL);
    }
    for (size_t i = 0; i < rft_option_count; i++)
        check_option(&rft_options[i], &config);
    return 0;
}
