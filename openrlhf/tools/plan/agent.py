"""Plays episodes of an agent and prints them turn by turn (`openrlhf agent try`)."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from openrlhf.api import (
    ACTOR_FLAG,
    DEVICE_TYPE,
    PPOConfig,
    Prompt,
    PromptGroup,
    RolloutWorker,
    Trajectory,
    UserFiles,
    build_prompt_datasets,
    check_room,
    check_users_files,
    checking,
    counted,
    decode,
    engine_class,
    engine_options,
    load_config,
    load_run_tokenizer,
    waiting,
)
from openrlhf.api import runs_of_version as runs
from openrlhf.tools.command_line.terminal import colour_console, say

ONE_SEQUENCE = "all requests form one token sequence"


def run(config: PPOConfig) -> int:
    """Plays and prints the episodes. Returns 0 if none failed, else 1."""
    group = asyncio.run(play(config, prepare(config)))
    report(config, group)
    return int(not all(t.ok for t in group.trajectories))


def prepare(config: PPOConfig) -> Prompt:
    """Returns the prompt, which is built as in training, with templates applied."""
    with checking():
        path = config.actor.model_name_or_path
        check_room(load_config(path, ACTOR_FLAG), config, "data.max_len", path=path)
        check_users_files(config, lambda flag, check, *arguments: check(*arguments))
        prompts, *_ = build_prompt_datasets(config)
        return prompts[0]


async def play(config: PPOConfig, prompt: Prompt) -> PromptGroup:
    """Plays the episodes with a rollout engine that it starts in this process."""
    with waiting("starting 1 rollout engine", key=config.actor.model_name_or_path):
        options = engine_options(config, DEVICE_TYPE == "cuda", from_files=True)
        os.environ.update(engine_class(options).environment(options))
        engine = RolloutWorker(config, options, UserFiles.of(config.train.agent))
        await engine.start()
    count = config.rollout.n_samples_per_prompt
    try:
        with waiting(f"playing {counted(count, 'episode')}"):
            return (await engine.run_group(prompt, "train")).group
    finally:
        await engine.close()


def report(config: PPOConfig, group: PromptGroup) -> None:
    console = colour_console(sys.stdout)
    tokenizer = load_run_tokenizer(config)
    episodes: dict[int, list[Trajectory]] = {}
    for t in group.trajectories:
        episodes.setdefault(t.sample_index, []).append(t)
    for index, parts in episodes.items():
        print_episode(console, tokenizer, index, parts)


def print_episode(console: Console, tokenizer: Any, index: int, parts: Sequence[Trajectory]) -> None:
    first = parts[0]
    value = "no reward" if first.reward is None else f"reward {first.reward:g}"
    cut = ", truncated" if first.truncated else ""
    say(console, f"\nepisode {index}: {first.outcome}, {value}{cut}", "bold")
    if first.error:
        say(console, first.error, "red")
    if first.extra_logs:
        say(console, ", ".join(f"{name} {number:g}" for name, number in first.extra_logs.items()), "dim")
    for name, text in first.extra_texts.items():
        say(console, f"{name}: {text}", "dim")
    for part, trajectory in enumerate(parts):
        if part:
            say(console, departure(tokenizer, parts[:part], trajectory), "yellow")
        print_turns(console, tokenizer, trajectory)
    if len(parts) == 1 and first.num_actions:
        say(console, ONE_SEQUENCE, "green")


def print_turns(console: Console, tokenizer: Any, t: Trajectory) -> None:
    ids, start, turn = t.token_ids.tolist(), 0, 0
    for sampled, count in runs(t.action_mask).tolist():
        end = start + count
        text = decode(tokenizer, ids[start:end], after=ids[:start])
        if sampled:
            reward = f", turn reward {t.turn_rewards[turn]:g}" if turn < len(t.turn_rewards) else ""
            actions = int(t.action_mask[:start].sum())
            log_prob = t.rollout_log_probs[actions : actions + count].mean()
            kind = f"turn {turn + 1}: {count} sampled tokens, mean log-prob {log_prob:.2f}{reward}"
            turn += 1
        else:
            kind = f"{count} context tokens, not trained on"
        say(console, kind, "bold cyan" if sampled else "dim")
        say(console, text, "" if sampled else "italic cyan")
        start = end


def departure(tokenizer: Any, earlier: Sequence[Trajectory], other: Trajectory) -> str:
    """Explains why a request does not continue the earlier sequence with the longest common prefix."""
    new = other.token_ids
    same, nearest = max(((shared(t.token_ids, new), t) for t in earlier), key=lambda pair: pair[0])
    if same >= other.prompt_length:
        return (
            f"new sequence: another answer to the same {other.prompt_length} prompt tokens. The agent "
            "requested several answers (n > 1), or sent the same request twice"
        )
    was, now = (
        decode(tokenizer, ids[same : same + 12].tolist(), after=ids[:same].tolist())
        for ids in (nearest.token_ids, new)
    )
    return (
        f"new sequence: the agent rewrote the history. After {same} common tokens the earlier sequence has "
        f"{was!r}, and the new request has {now!r}"
    )


def shared(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
