"""Runs a program with a model as its API of OpenAI and Anthropic, and prints what a training run would learn
from its requests (`openrlhf agent record`)."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from openrlhf.api import (
    OpenAIAgentExecutor,
    PPOConfig,
    Session,
    TemplateProblem,
    Trajectory,
    counted,
    decode,
    load_run_tokenizer,
)
from openrlhf.tools.command_line.terminal import colour_console, say
from openrlhf.tools.plan.agent import departure, play, prepare, print_turns, shared

STATUS = "exit_status"
DRIFT = "drift"
SIGNALLED = 128
"""A shell's status of a program that a signal ended is this number and that of the signal."""


class AgentExecutor(OpenAIAgentExecutor):
    """Runs the program of the label until it ends. Its rewards mean nothing."""

    async def run_agent(self, prompt: str, label: Any, session: Session) -> dict:
        task = json.loads(label)
        session.tool_parser = task["tool_parser"]
        program = await asyncio.create_subprocess_exec(*task["program"], env=os.environ | session.environment)
        try:
            code = await program.wait()  # bounded: the user's program, which Ctrl-C ends
        finally:
            if program.returncode is None:
                program.terminate()
        status = code if code >= 0 else SIGNALLED - code
        drift = "\n".join(find_drift(session))
        return {"reward": 0.0, "extra_logs": {STATUS: status}, "extra_texts": {DRIFT: drift}}


def find_drift(session: Session) -> Iterator[str]:
    """Yields, for each finished conversation that the template and the tokenizer would write with other
    tokens than the policy read and sampled, the first difference."""
    known = [branch.token_ids for branch in session.branches]
    for branch in session.branches:
        kept = branch.token_ids
        if any(len(ids) > len(kept) and ids[: len(kept)] == kept for ids in known):
            continue  # another request went on
        try:
            text = session.stream.render(branch.messages, branch.tools, answering=False)
        except TemplateProblem as error:
            yield str(error)
            continue
        written = session.tokenizer(text, add_special_tokens=False)["input_ids"]
        if (same := shared(np.array(kept), np.array(written))) < len(kept):
            was, now = (_shown(session.tokenizer, ids, same) for ids in (kept, written))
            yield f"after {same} of {len(kept)} tokens, {now} would replace {was}"


def _shown(tokenizer: Any, token_ids: list[int], start: int) -> str:
    part = token_ids[start : start + 6]
    return f"{decode(tokenizer, part, after=token_ids[:start])!r} {part}"


def run(config: PPOConfig) -> int:
    """Returns the program's exit status; 1 if it could not be run."""
    group = asyncio.run(play(config, prepare(config)))
    report(colour_console(sys.stderr), load_run_tokenizer(config), group.trajectories)
    first = group.trajectories[0]
    return int(first.extra_logs[STATUS]) if first.ok else 1


def report(console: Console, tokenizer: Any, parts: Sequence[Trajectory]) -> None:
    first = parts[0]
    if first.error:
        say(console, first.error, "red")
    if not first.num_actions:
        text = "the policy sampled nothing: does the program read OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
        say(console, text, "red")
        return
    for part, trajectory in enumerate(parts):
        say(console, f"\nsegment {part + 1} of {len(parts)}", "bold")
        if part:
            say(console, departure(tokenizer, parts[:part], trajectory), "yellow")
        print_turns(console, tokenizer, trajectory)
    learned, total = (sum(f(t) for t in parts) for f in (lambda t: t.num_actions, lambda t: len(t.token_ids)))
    turns = counted(sum(len(t.turn_starts) for t in parts), "turn")
    segments = f"{counted(len(parts), 'segment')}, which share{'s' * (len(parts) == 1)} the episode's reward"
    say(console, f"\n{turns} in {segments}: {learned:,} of {total:,} tokens would be trained on", "green")
    drift = "no drift: the template would write every segment with the tokens that were sampled"
    if found := first.extra_texts.get(DRIFT):
        drift = f"drift, which training does not have, because it keeps the sampled tokens:\n{found}"
    say(console, drift, "yellow")
