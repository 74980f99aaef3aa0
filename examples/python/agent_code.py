"""Agent that writes a program, sees the results of the visible tests, and may correct it.

--train.agent_func_path examples/python/agent_code.py --data.label_key tests

`tests` is a JSON list of [input, output]. The first half gives the policy feedback, the second half decides
the reward. Programs read stdin and write stdout, so that no program sees the expected output.

Leave --data.apply_chat_template out: the server renders messages with the policy's template.
"""

import asyncio
import json
import re

from openrlhf.agents.openai import OpenAIAgentExecutor
from openrlhf.agents.sandbox import Sandbox

MAX_TRIES = 3
SANDBOX = Sandbox(seconds=5)


class AgentExecutor(OpenAIAgentExecutor):
    async def run_agent(self, prompt, label, session):
        if not (tests := json.loads(label)):
            raise ValueError("a problem has no tests, so any program would be right")
        shown, hidden = tests[: len(tests) // 2], tests[len(tests) // 2 :]
        messages = [{"role": "user", "content": prompt}]
        for tries in range(1, MAX_TRIES + 1):
            answer = await session.client.chat.completions.create(model=session.model, messages=messages)
            text = answer.choices[0].message.content
            problems = await failures(program(text), shown)
            if not problems or tries == MAX_TRIES:
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": problems[0]}]
        right = not await failures(program(text), hidden)
        return {"reward": float(right), "extra_logs": {"tries": tries, "shown_right": float(not problems)}}


def program(text):
    """Returns the last block of code, or the whole answer."""
    return (re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL) or [text])[-1]


async def failures(code, tests):
    """Returns why tests fail, one text for each failing test."""
    results = await asyncio.gather(*(SANDBOX.run_async(code, stdin) for stdin, _ in tests))
    return [
        f"Input:\n{stdin}\nYour program:\n{result.text[-1000:]}\nIt should print:\n{output}"
        for (stdin, output), result in zip(tests, results, strict=True)
        if result.status != "ok" or result.stdout.split() != output.split()
    ]
