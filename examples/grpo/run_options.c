/* run_options: getopt, and the configuration of refit under it. */
#include "run_options.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "or_die.h"
#include "states.h"

static const char help[] =
    "Usage: grpo [option …]\n"
    "Teaches a small network to add two digits by GRPO: one trainer, several rollout\n"
    "worker processes, and a device too small for the trainer's states and the\n"
    "inference engine's cache at once. refit makes room, hands over the new weights,\n"
    "and brings the states back.\n\n"
    "  --workers N      rollout worker processes (2)\n"
    "  --cycles N       refit cycles: publish, roll out, train (150)\n"
    "  --seed N         of the weights and of all sampling (1)\n"
    "  --target R       mean reward of the last 10 cycles to be reached, or the exit\n"
    "                   status is 1 (0.9; 0: any)\n"
    "  --device SPEC    where states, weights and cache live (host:capacity=…)\n"
    "  --config FILE    refit's configuration, as in configs/grpo.yaml\n"
    "  --json FILE      the lines as JSON objects too\n"
    "  --no-offload     leave the states on the device: ends out of memory\n"
    "  --check          train twice, with and without offload, and compare all bits\n"
    "  --help           this text\n";

enum { OPTION_WORKER = 256, OPTION_ENDPOINT };

static const struct option known[] = {
    {"workers", required_argument, NULL, 'w'},
    {"cycles", required_argument, NULL, 'c'},
    {"seed", required_argument, NULL, 's'},
    {"target", required_argument, NULL, 't'},
    {"device", required_argument, NULL, 'd'},
    {"config", required_argument, NULL, 'f'},
    {"json", required_argument, NULL, 'j'},
    {"no-offload", no_argument, NULL, 'n'},
    {"check", no_argument, NULL, 'k'},
    {"help", no_argument, NULL, 'h'},
    {"worker", required_argument, NULL, OPTION_WORKER},
    {"endpoint", required_argument, NULL, OPTION_ENDPOINT},
    {NULL, 0, NULL, 0},
};

static uint64_t number(const char *text, uint64_t least, uint64_t most)
{
    char *end = NULL;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] == '-' || end == text || *end != '\0' || value < least || value > most)
        die("\"%s\" is not a number from %llu to %llu; see grpo --help", text,
            (unsigned long long)least, (unsigned long long)most);
    return value;
}

static float fraction(const char *text)
{
    char *end = NULL;
    float value = strtof(text, &end);
    if (end == text || *end != '\0' || !(value >= 0.0f && value <= 1.0f))
        die("\"%s\" is not a reward from 0 to 1; see grpo --help", text);
    return value;
}

static void read_one(run_options *out, int option, const char *value)
{
    refit_error error;
    switch (option) {
    case 'w': out->workers = (uint32_t)number(value, 1, 16); break;
    case 'c': out->cycles = (uint32_t)number(value, 1, 100000); break;
    case 's': out->seed = number(value, 0, UINT32_MAX); break;
    case 't': out->target = fraction(value); break;
    case 'd': out->device = value; break;
    case 'f': or_die(refit_config_load(&out->config, value, &error), &error); break;
    case 'j': out->json = value; break;
    case 'n': out->offload = false; break;
    case 'k': out->check = true; break;
    case 'h': fputs(help, stdout); exit(0);
    case OPTION_WORKER:
        out->is_worker = true;
        out->worker_index = (uint32_t)number(value, 0, 15);
        break;
    case OPTION_ENDPOINT: out->worker_endpoint = value; break;
    default: exit(2); /* getopt has said what is wrong */
    }
}

void run_options_read(run_options *out, int argc, char **argv)
{
    refit_error error;
    *out = (run_options){.workers = 2,
                         .cycles = 150,
                         .seed = 1,
                         .target = 0.9f,
                         .offload = true,
                         .device = states_small_device};
    refit_config_init(&out->config, sizeof out->config);
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;)
        read_one(out, option, optarg);
    if (optind < argc) die("\"%s\" is no option; see grpo --help", argv[optind]);
    or_die(refit_config_load_env(&out->config, &error), &error);
}
