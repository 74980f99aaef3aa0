"""Agent that uses the `openai` client: it asks, checks the answer, and asks again.

--train.agent_func_path examples/python/agent_openai.py --data.label_key label

Leave --data.apply_chat_template out: the server renders messages with the policy's template.
"""

from openrlhf.agents.openai import OpenAIAgentExecutor
from openrlhf.utils import extract_boxed_answer

MAX_TRIES = 3


class AgentExecutor(OpenAIAgentExecutor):
    async def run_agent(self, prompt, label, session):
        messages = [{"role": "user", "content": prompt}]
        for tries in range(1, MAX_TRIES + 1):
            answer = await session.client.chat.completions.create(model=session.model, messages=messages)
            text = answer.choices[0].message.content
            if extract_boxed_answer(text) == label:
                return {"reward": 1.0, "extra_logs": {"tries": tries}}
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Wrong. Again!"}]
        return {"reward": 0.0, "extra_logs": {"tries": MAX_TRIES}}
