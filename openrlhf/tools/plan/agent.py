"""Plays episodes of an agent with a model and prints them turn by turn, to test the agent before training."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from openrlhf.api import choose_hub, counted, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser, positive

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from openrlhf.api import PPOConfig, Prompt, PromptGroup, Trajectory

EPILOG = """
Every flag of `openrlhf ppo` is accepted and has the same meaning, for example --rollout.max_new_tokens,
--rollout.temperature, --data.max_len, --data.apply_chat_template and --train.max_turns.
"""

ONE_SEQUENCE = "all requests form one token sequence"


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf agent")
    trying = parser.add_subparsers(required=True, metavar="try").add_parser(
        "try", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    trying.add_argument("file", metavar="FILE", help="Python file with the class AgentExecutor")
    trying.add_argument("--model", required=True, help="policy: a Hugging Face name or a folder")
    trying.add_argument("--prompt", required=True, help="text of the prompt")
    trying.add_argument("--label", default="", help="ground truth for the reward (default: empty)")
    trying.add_argument(
        "--samples", type=positive, default=1, metavar="N", help="episodes to play (default: 1)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors(), TemporaryDirectory() as folder:
        options, flags = make_parser().parse_known_args(argv)
        config, prompt = prepare(options, flags, Path(folder))
        group = asyncio.run(play(config, prompt))
        report(config, group)
    sys.exit(not all(t.ok for t in group.trajectories))


def prepare(options: argparse.Namespace, flags: Sequence[str], folder: Path) -> "tuple[PPOConfig, Prompt]":
    """Returns the configuration and the prompt, which is built as in training, with templates applied.
    `folder`: folder for temporary files."""
    from openrlhf.api import ACTOR_FLAG, PPO, checking, parse

    row = folder / "prompt.jsonl"
    row.write_text(json.dumps({"input": options.prompt, "label": options.label}) + "\n")
    given = [
        *("--actor.model_name_or_path", options.model, "--train.agent_func_path", options.file),
        *("--data.prompt_dataset", str(row), "--data.input_key", "input", "--data.label_key", "label"),
        *("--rollout.n_samples_per_prompt", str(options.samples), "--ckpt.output_dir", str(folder)),
    ]
    config = parse(PPO, [*flags, *given]).config
    choose_hub(config.use_ms)
    with checking():
        from openrlhf.api import build_prompt_datasets, check_room, check_users_files, load_config

        check_room(load_config(options.model, ACTOR_FLAG), config, "data.max_len", path=options.model)
        check_users_files(config, lambda flag, check, *arguments: check(*arguments))
        prompts, *_ = build_prompt_datasets(config)
        return config, prompts[0]


async def play(config: "PPOConfig", prompt: "Prompt") -> "PromptGroup":
    """Plays the episodes with a rollout engine that it starts in this process."""
    from openrlhf.api import waiting

    with waiting("starting 1 rollout engine", key=config.actor.model_name_or_path):
        from openrlhf.api import DEVICE_TYPE, RolloutWorker, UserFiles, engine_class, engine_options

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


def report(config: "PPOConfig", group: "PromptGroup") -> None:
    from rich.console import Console

    from openrlhf.api import policy_tokenizer
    from openrlhf.tools.command_line.terminal import shows_colours

    coloured = shows_colours()
    console = Console(file=sys.stdout, force_terminal=coloured, color_system="auto" if coloured else None)
    tokenizer = policy_tokenizer(config)
    episodes: dict[int, list[Trajectory]] = {}
    for t in group.trajectories:
        episodes.setdefault(t.sample_index, []).append(t)
    for index, parts in episodes.items():
        print_episode(console, tokenizer, index, parts)


def print_episode(console: "Console", tokenizer: Any, index: int, parts: "Sequence[Trajectory]") -> None:
    first = parts[0]
    value = "no reward" if first.reward is None else f"reward {first.reward:g}"
    cut = ", truncated" if first.truncated else ""
    write(console, f"\nepisode {index}: {first.outcome}, {value}{cut}", "bold")
    if first.error:
        write(console, first.error, "red")
    if first.extra_logs:
        write(console, ", ".join(f"{name} {number:g}" for name, number in first.extra_logs.items()), "dim")
    for name, text in first.extra_texts.items():
        write(console, f"{name}: {text}", "dim")
    for part, trajectory in enumerate(parts):
        if part:
            write(console, departure(tokenizer, parts[:part], trajectory), "yellow")
        print_turns(console, tokenizer, trajectory)
    if len(parts) == 1 and first.num_actions:
        write(console, ONE_SEQUENCE, "green")


def print_turns(console: "Console", tokenizer: Any, t: "Trajectory") -> None:
    """Prints the context and the sampled parts of a trajectory in order."""
    from openrlhf.api import decode
    from openrlhf.api import runs_of_version as runs

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
        write(console, kind, "bold cyan" if sampled else "dim")
        write(console, text, "" if sampled else "italic cyan")
        start = end


def departure(tokenizer: Any, earlier: "Sequence[Trajectory]", other: "Trajectory") -> str:
    """Explains why a request does not continue an earlier sequence. It is compared with the earlier sequence
    that has the longest common prefix."""
    from openrlhf.api import decode

    new = other.token_ids
    same, nearest = max(((_shared(t.token_ids, new), t) for t in earlier), key=lambda pair: pair[0])
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


def _shared(first: "np.ndarray", second: "np.ndarray") -> int:
    """Returns the length of the common prefix, in tokens."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def write(console: "Console", text: str, style: str) -> None:
    from rich.text import Text

    from openrlhf.api import clean_text

    console.print(Text(clean_text(text), style=style), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
