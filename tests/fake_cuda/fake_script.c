/*
 * What tests tell the fake driver to do wrong: symbols that it lacks, calls that fail, work that
 * fails later. Rules are few and are looked through in order; the first that fires answers.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_state.h"

#define RULES_MOST 64

typedef struct fake_rule {
    char symbol[64];
    unsigned skip;  /* so many calls pass first */
    unsigned times; /* so many are answered */
    rft_cu_result result;
    bool later;
} fake_rule;

typedef struct fake_hidden {
    char symbol[64];
    int version;
} fake_hidden;

/* Guarded by fake.lock. */
static fake_rule rules[RULES_MOST];
static unsigned rule_count;
static fake_hidden hidden[RULES_MOST];
static unsigned hidden_count;

bool fake_script_hides(const char *symbol, int version)
{
    for (unsigned i = 0; i < hidden_count; i++) {
        if (strcmp(hidden[i].symbol, symbol) != 0) continue;
        if (hidden[i].version == 0 || hidden[i].version == version) return true;
    }
    return false;
}

/* Calls that "*" does not mean: they end objects, which would stay if they failed, or tell about
 * errors. */
static bool ends_or_tells(const char *symbol)
{
    static const char *const these[] = {
        "cuGetErrorName",      "cuGetErrorString", "cuDevicePrimaryCtxRelease",
        "cuCtxPopCurrent",     "cuMemFree",        "cuThreadExchangeStreamCaptureMode",
        "cuMemFreeHost",       "cuStreamDestroy",  "cuMemHostUnregister",
        "cuEventDestroy",      "cuMemAddressFree", "cuMemRelease",
        "cuIpcCloseMemHandle", "cuLibraryUnload",  "cuMemUnmap",
    };
    for (size_t i = 0; i < sizeof these / sizeof these[0]; i++)
        if (strcmp(these[i], symbol) == 0) return true;
    return false;
}

static bool means(const fake_rule *rule, const char *symbol)
{
    if (strcmp(rule->symbol, "*") == 0) return !ends_or_tells(symbol);
    return strcmp(rule->symbol, symbol) == 0;
}

rft_cu_result fake_script_answer(const char *symbol, rft_cu_result *later)
{
    for (unsigned i = 0; i < rule_count; i++) {
        fake_rule *rule = &rules[i];
        if (rule->times == 0 || !means(rule, symbol)) continue;
        if (rule->skip > 0) {
            rule->skip--;
            continue;
        }
        rule->times--;
        if (!rule->later) return rule->result;
        *later = rule->result;
    }
    return RFT_CU_SUCCESS;
}

static void add_rule(const char *symbol, unsigned nth, unsigned times, rft_cu_result result,
                     bool later)
{
    /* What has been used up makes room. */
    unsigned at = 0;
    while (at < rule_count && rules[at].times > 0)
        at++;
    if (at == RULES_MOST) abort();
    if (at == rule_count) rule_count++;
    rules[at] = (fake_rule){
        .skip = nth > 0 ? nth - 1 : 0, .times = times, .result = result, .later = later};
    snprintf(rules[at].symbol, sizeof rules[at].symbol, "%s", symbol);
}

/* "SYMBOL:NTH:TIMES:RESULT,…" */
static void read_script(const char *text)
{
    char symbol[64];
    unsigned nth, times;
    int result, length;
    while (sscanf(text, "%63[^:]:%u:%u:%d%n", symbol, &nth, &times, &result, &length) == 4) {
        add_rule(symbol, nth, times, result, false);
        text += length;
        if (*text == ',') text++;
    }
    if (*text == '\0') return;
    fprintf(stderr, "FAKE_CUDA_SCRIPT: \"%s\" is not SYMBOL:NTH:TIMES:RESULT\n", text);
    abort();
}

void fake_script_reset(void)
{
    rule_count = hidden_count = 0;
    const char *script = getenv("FAKE_CUDA_SCRIPT");
    if (script != NULL) read_script(script);
}

FAKE_EXPORTED void fake_cuda_fail(const char *symbol, unsigned nth, unsigned times,
                                  rft_cu_result result)
{
    fake_lock();
    add_rule(symbol, nth, times, result, false);
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_fail_later(const char *symbol, unsigned nth, rft_cu_result result)
{
    fake_lock();
    add_rule(symbol, nth, 1, result, true);
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_forget_faults(void)
{
    fake_lock();
    rule_count = 0;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_hide(const char *symbol, int version)
{
    fake_lock();
    if (hidden_count == RULES_MOST) abort();
    snprintf(hidden[hidden_count].symbol, sizeof hidden[0].symbol, "%s", symbol);
    hidden[hidden_count++].version = version;
    fake_unlock();
}
