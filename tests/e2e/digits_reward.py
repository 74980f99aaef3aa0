"""Reward that a policy without any knowledge can raise: the fraction of digits in the answer."""


def reward_func(queries, prompts, labels):
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [sum(c.isdigit() for c in answer) / max(1, len(answer)) for answer in answers]}
