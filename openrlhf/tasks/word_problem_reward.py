"""Reward of the word problems, for --reward.remote_url: 1 when the boxed number is the label, else 0."""

from openrlhf.tasks.word_problem import boxed_answer, thinks


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """Returns rewards, and as extra logs whether a response has steps and a boxed number."""
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    answers = [boxed_answer(response) for response in responses]
    rewards = [float(answer == label) for answer, label in zip(answers, labels, strict=True)]
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {
            "thinks": [float(thinks(response)) for response in responses],
            "format": [float(answer is not None) for answer in answers],
        },
    }
