"""Reward of the picture task, for --reward.remote_url: the fraction of colours named at their place."""

from openrlhf.tasks.picture import fraction_right


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [fraction_right(response, label) for response, label in zip(responses, labels, strict=True)]
    return {"rewards": rewards, "scores": rewards}
