"""Reward function for mathematics, for --reward.remote_url: 1 if the boxed answer equals the label, as
numbers and formulas are equal."""

from openrlhf.utils import extract_boxed_answer, grade_answer


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    r"""Returns the reward of each response. queries: prompt and response as text; labels: the right answers,
    as LaTeX or plain numbers; all lists have the same length. extra_logs: whether each response has an
    answer in \boxed{...}."""
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    answers = [extract_boxed_answer(response) for response in responses]
    rewards = [float(grade_answer(answer, label)) for answer, label in zip(answers, labels, strict=True)]
    boxed = [float(answer is not None) for answer in answers]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"boxed": boxed}}
