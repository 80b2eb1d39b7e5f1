/*
 * A rank in a process of its own, by commands (children.h): it reads one command a line and answers
 * each with one line, "STATUS words". It ends with its input.
 *
 *     open PID FILE RANK GPU SETTING   fault NTH   seal   cycle TIMES   check   close
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"
#include "rank.h"

static test_node *node;
static test_rank rank;

static refit_status do_open(int words[4], const char *setting)
{
    const char *const settings[] = {setting, NULL};
    node = node_join(words[0], words[1]);
    if (node == NULL) return REFIT_ERR_SYSTEM;
    return rank_open(&rank, node, (unsigned)words[2], words[3], settings);
}

static refit_status do_cycle(int times)
{
    refit_status status = REFIT_OK;
    for (int i = 0; i < times && status == REFIT_OK; i++)
        status = rank_cycle(&rank);
    return status;
}

/* Nothing is left on either GPU, and no rule of the driver was broken. */
static refit_status do_close(void)
{
    refit_status status = rank_close(&rank);
    if (status != REFIT_OK) return status;
    snprintf(rank.error.text, sizeof rank.error.text, "%u objects are left; %s", fake_cuda_leaks(),
             fake_cuda_violation());
    return fake_cuda_leaks() + fake_cuda_violations() == 0 ? REFIT_OK : REFIT_ERR_CORRUPT;
}

static refit_status obey(char *line)
{
    int words[4] = {0};
    char verb[16] = "", setting[64] = "";
    sscanf(line, "%15s %d %d %d %d %63s", verb, &words[0], &words[1], &words[2], &words[3],
           setting);
    if (strcmp(verb, "open") == 0) return do_open(words, setting);
    if (strcmp(verb, "seal") == 0) return rank_seal(&rank);
    if (strcmp(verb, "cycle") == 0) return do_cycle(words[0]);
    if (strcmp(verb, "check") == 0) return rank_check(&rank);
    if (strcmp(verb, "close") == 0) return do_close();
    if (strcmp(verb, "fault") != 0) return REFIT_ERR_INVALID;
    fake_cuda_fail("cuMemHostRegister", (unsigned)words[0], 1, RFT_CU_OUT_OF_MEMORY);
    return REFIT_OK;
}

int main(void)
{
    char line[512];
    while (fgets(line, sizeof line, stdin) != NULL) {
        refit_status status = obey(line);
        printf("%s %s\n", refit_status_name(status), status == REFIT_OK ? "" : rank.error.text);
        fflush(stdout);
    }
    node_leave(node);
    return 0;
}
