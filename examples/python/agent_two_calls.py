"""Agent with two calls: the policy answers and is asked to check its answer; the second answer counts.

--train.agent_func_path examples/python/agent_two_calls.py --data.label_key answer
"""

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.utils import grade_response

CHECK = "\nCheck this. Answer: "


class AgentExecutor(AgentExecutorBase):
    async def execute(
        self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
    ) -> dict:
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        check = hf_tokenizer(CHECK, add_special_tokens=False)["input_ids"]
        sampling_params.max_tokens = (max_length - len(tokens) - len(check)) // 2
        answers, ranges = [], []
        for feedback in (check, []):
            output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            answers.append(output.text)
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = [*tokens, *output.token_ids, *feedback]
        first, second = (float(grade_response(answer, str(label))) for answer in answers)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": None,
            "reward": second,
            "scores": second,
            "extra_logs": {"first_right": first, "corrected": float(second > first)},
        }
