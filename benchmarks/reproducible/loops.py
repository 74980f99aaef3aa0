"""Trains and evaluates the model of a row in this process, with `rl.Run`.

The loops take the steps of `openrlhf ppo` and of the programs in recipes/: sample a batch, score it, change
the policy, send its weights to the engine.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from best_of_n import likelihood  # recipes/
from demo import machine
from dpo_on_policy import dpo, pairs_of  # recipes/

import openrlhf as rl
from openrlhf.types import PromptGroup, Trajectory
from reproducible.clock import Clock
from reproducible.methods import OPTIMIZER_STEPS
from reproducible.outcome import Outcome, Score, find_goal
from reproducible.rows import Row

Groups = list[PromptGroup]


def run(row: Row, seed: int, start: str, folder: Path) -> Outcome:
    """start: model before RL. folder: has `prompts.jsonl` and `eval.jsonl`, and gets the run in a folder of
    the row's name."""
    output, began_on = folder / row.name, machine()
    if row.method.update == "trl":
        from reproducible.trl_loop import train

        before = evaluate(row, seed, start, folder)
        curve, times = train(row, seed, start, folder / "prompts.jsonl", output / "policy")
        after = evaluate(row, seed, str(output / "policy"), folder)
    else:
        with rl.Run(actor=start, **flags(row, seed, output)) as program:
            (problems,) = program.prompts(str(folder / "eval.jsonl"))
            before = score(row, program, problems)
            batches = program.prompts(str(folder / "prompts.jsonl"), batch_size=row.prompts, epochs=1_000)
            clock, curve, times = Clock(), [], []
            for groups in steps(row, program, islice(batches, row.steps)):
                curve.append(fraction_solved(groups))
                times.append(clock.read())
            after = score(row, program, problems)
            program.export(output / "policy").result()
    minutes, cpu_minutes = times[-1]
    return Outcome(
        before=before,
        after=after,
        curve=[round(solved, 4) for solved in curve],
        goal=find_goal(curve, times, row.task.goal, row.samples_per_step),
        minutes=round(minutes, 2),
        cpu_minutes=round(cpu_minutes, 2),
        weights=weights_hash(output / "policy"),
        machine=began_on,
        versions={name: version(name) for name in ("openrlhf", "torch", "transformers", "trl")},
    )


def flags(row: Row, seed: int, output: Path) -> dict[str, Any]:
    own = {"logger.run_dir": str(output / "run"), "ckpt.output_dir": str(output / "policy")}
    return row.flags(seed) | own


def evaluate(row: Row, seed: int, model: str, folder: Path) -> Score:
    """Scores a model in a run of its own."""
    own: dict[str, Any] = {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0}
    with rl.Run(actor=model, **flags(row, seed, folder / row.name) | own) as program:
        (problems,) = program.prompts(str(folder / "eval.jsonl"))
        return score(row, program, problems)


def sample(row: Row, program: rl.Run, prompts: Sequence[rl.Prompt], n: int | None = None) -> Any:
    """Samples answers and scores them. Returns a `Result` of groups."""
    groups = program.sample(prompts, n=n)
    return groups if row.task.reward is None else program.reward(groups, row.task.reward)


def score(row: Row, program: rl.Run, problems: Sequence[rl.Prompt]) -> Score:
    """Counts the solved problems, with one answer to each at temperature 1."""
    groups = sample(row, program, problems, n=1).result()
    return Score(sum(solved(group.trajectories[0]) for group in groups), len(groups))


def solved(trajectory: Trajectory) -> bool:
    return trajectory.ok and (trajectory.score or 0.0) >= 1


def fraction_solved(groups: Groups) -> float:
    answers = [t for group in groups for t in group.trajectories if t.is_first]
    return sum(map(solved, answers)) / len(answers)


def steps(row: Row, program: rl.Run, batches: Iterator[list[rl.Prompt]]) -> Iterator[Groups]:
    """Yields the samples of each step when it has ended."""
    update, ahead = UPDATES[row.method.update], []
    for questions in batches:
        ahead.append(sample(row, program, questions))
        if len(ahead) > row.method.samples_ahead:
            yield step(program, ahead.pop(0).result(), update)
    for groups in ahead:
        yield step(program, groups.result(), update)


def step(program: rl.Run, groups: Groups, update: Any) -> Groups:
    metrics = update(program, groups)
    program.sync()
    program.log(metrics, groups)
    return groups


def update_policy(program: rl.Run, groups: Groups) -> Any:
    return program.update(program.batch(groups))


def update_dpo(program: rl.Run, groups: Groups) -> Any:
    """Takes the steps of recipes/dpo_on_policy.py; none if no prompt has a right and a wrong answer."""
    return own_loss(program, pairs_of([judged(group) for group in groups]), dpo)


def update_best_of_n(program: rl.Run, groups: Groups) -> Any:
    """Imitates a right answer to each prompt that has one, as recipes/best_of_n.py does."""
    right = [(group, [t for t in group.trajectories if solved(t)][:1]) for group in groups]
    return own_loss(program, [replace(group, trajectories=best) for group, best in right if best], likelihood)


def judged(group: PromptGroup) -> PromptGroup:
    """Returns the group with the rewards 1 for solved and 0, because verifiers also give parts of 1."""
    return replace(group, trajectories=[replace(t, reward=float(solved(t))) for t in group.trajectories])


def own_loss(program: rl.Run, groups: Groups, loss: Any) -> Any:
    metrics: Any = {}
    if groups:
        batch = program.batch(groups)
        for _ in range(OPTIMIZER_STEPS):
            program.forward_backward(batch, loss)
            metrics = program.optim_step()
    return metrics


UPDATES = {"policy": update_policy, "dpo": update_dpo, "best_of_n": update_best_of_n}


def weights_hash(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
