"""Reward of another task than that of digits_reward.py: the fraction of letters in the answer."""


def reward_func(queries, prompts, labels):
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [sum(c.isalpha() for c in answer) / max(1, len(answer)) for answer in answers]
    return {"rewards": rewards, "extra_texts": {"judge": ["letters"] * len(rewards)}}
