"""Checks that every node has the models that it needs, and shares the folders of the run."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf.cluster import environment
from openrlhf.cluster.launch import node_names
from openrlhf.cluster.pending import results
from openrlhf.config.checks import SCATTERED
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, REWARD_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.errors import ErrorCode, UsageError, as_one
from openrlhf.files import appears, marked

if TYPE_CHECKING:  # placement imports torch, which the remote checks of files do not need
    from openrlhf.cluster.placement import Bundles

MODEL = (
    "not on {}.\nCopy it there to the same path, put it into a folder that all nodes share, or give its name "
    "on the hub."
)
EXPORT = "not shared with {}, which writes the model.\nName a folder that all nodes share."


class Need(NamedTuple):
    """A file or folder that must exist on `nodes` as it does on the node on which the run starts."""

    flag: str
    value: str
    nodes: set[str]
    file: str | Path
    problem: str
    """Error message for nodes without it. {} is replaced by their names."""


def check_disks(config: PPOConfig, places: "Mapping[str, Bundles]") -> None:
    """Raises UsageError if a node lacks a model or a shared folder. `places`: bundles of each role. Runs on a
    single node are not checked."""
    here = ray.get_runtime_context().get_node_id()
    nodes = {role: set(bundles.nodes) - {here} for role, bundles in places.items()}
    if not any(nodes.values()):
        return
    first = {role: {bundles.nodes[0]} - {here} for role, bundles in places.items()}
    with ExitStack() as held:
        needs = [*_models(config, nodes), *_folders(config, nodes, first, held)]
        lacking = _lacking(needs)
    names = node_names()
    problems = [
        UsageError(
            ErrorCode.NOT_FOUND,
            need.problem.format(", ".join(names[node] for node in without)),
            flag=need.flag,
            value=need.value,
        )
        for need, without in zip(needs, lacking, strict=True)
        if without
    ]
    if problems:
        raise as_one(problems)


def _models(config: PPOConfig, nodes: Mapping[str, set[str]]) -> Iterator[Need]:
    """Yields the models that are local paths. Every node needs the actor's model, for its tokenizer."""
    flags = {
        ACTOR_FLAG: ([config.actor.model_name_or_path], set().union(*nodes.values())),
        CRITIC_FLAG: ([config.critic_path], nodes.get("critic", set())),
        REWARD_FLAG: (config.reward.models, nodes.get("reward", set())),
        TEACHER_FLAG: ([config.teacher.model_name_or_path or ""], nodes.get("teacher", set())),
    }
    for flag, (paths, where) in flags.items():
        for path in paths:
            if os.path.exists(path):
                yield Need(flag, path, where, path, MODEL)


def _folders(
    config: PPOConfig, nodes: Mapping[str, set[str]], first: Mapping[str, set[str]], held: ExitStack
) -> Iterator[Need]:
    """Yields the output and checkpoint folders. `first`: node of each role's rank 0, which exports the model;
    `held`: removes the folders' marker files when it closes."""
    ckpt, exporting = config.ckpt, first["actor"]
    if config.critic.save_value_network:
        exporting = exporting | first.get("critic", set())
    model = held.enter_context(marked(ckpt.output_dir))
    yield Need("--ckpt.output_dir", ckpt.output_dir, exporting, model, EXPORT)
    if ckpt.is_used:
        training = nodes["actor"] | nodes.get("critic", set())
        writing, problem = (training, SCATTERED) if ckpt.has_parts else (exporting, EXPORT)
        checkpoint = held.enter_context(marked(ckpt.folder))
        yield Need("--ckpt.path", ckpt.folder, writing, checkpoint, problem)


def _lacking(needs: Sequence[Need]) -> list[list[str]]:
    """Returns, for each need, the nodes that do not see its file."""
    absent = ray.remote(_absent)
    asked = {
        node: absent.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote([str(need.file) for need in needs if node in need.nodes])
        for node in set().union(*(need.nodes for need in needs))
    }
    answers = dict(zip(asked, results([*asked.values()]), strict=True))
    return [[node for node in need.nodes if str(need.file) in answers[node]] for need in needs]


def _absent(files: Sequence[str]) -> list[str]:
    environment.enter()
    return [file for file in files if not appears(file)]
