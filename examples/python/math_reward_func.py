"""A reward function for mathematics, for --reward.remote_url: 1 where the answer equals the label, as numbers
and formulas are equal."""

from math_verify import parse, verify


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """queries: prompt and response as text; labels: the right answers, as LaTeX or plain numbers. Lists of
    the same length. extra_logs: the share of responses with an answer in \\boxed{...}."""
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [float(is_right(response, label)) for response, label in zip(responses, labels, strict=True)]
    boxed = sum("\\boxed" in response for response in responses) / len(responses)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"boxed": boxed}}


def is_right(response: str, label: str) -> bool:
    return bool(verify(parse(f"\\boxed{{{label}}}"), parse(response)))
