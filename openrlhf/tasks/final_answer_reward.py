"""Reward of reasoning_gym's problems whose answer is one number or word, for --reward.remote_url: 1 if the
final one of a response is right, else 0. The package's own verifiers accept no sentence around it."""

from openrlhf.api import find_entry, grade_response


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    responses = (query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True))
    answers = (find_entry(label)[1]["answer"] for label in labels)
    return [float(grade_response(*pair)) for pair in zip(responses, answers, strict=True)]
