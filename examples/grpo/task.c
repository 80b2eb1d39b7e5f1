/* The task: prompts by number, rewards by arithmetic. Knows nothing of the policy that answers. */
#include "task.h"

void task_prompt(uint32_t prompt, uint8_t tokens[PROMPT_TOKENS])
{
    tokens[0] = (uint8_t)(prompt / DIGITS % DIGITS);
    tokens[1] = (uint8_t)(prompt % DIGITS);
}

float task_reward(const uint8_t prompt[PROMPT_TOKENS], const uint8_t completion[COMPLETION_TOKENS])
{
    int sum = prompt[0] + prompt[1];
    int right = (completion[0] == sum / DIGITS) + (completion[1] == sum % DIGITS);
    return (float)right * (REWARD_MOST / COMPLETION_TOKENS);
}
