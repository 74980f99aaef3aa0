"""Seconds of an RL step: GRPO on word problems with a verifier, as in `openrlhf demo`.

ours       openrlhf ppo, with its steps from metrics.jsonl
unchecked  the same, but engines are compared with the trainer only after the first weight sync
async      the same, with the next batch sampled while the models train
partial    async, where weight syncs pause requests instead of waiting for them
trl        TRL's GRPOTrainer, which samples with transformers
floor      the least time of a step with these libraries: vLLM's AsyncLLM without anything else, with the
           same engine arguments, prompts and seeds; and a PyTorch loop over packed rows of the answers, with
           neither DeepSpeed nor Ray. One after the other, both take their sum; at the same time, on cores
           of their own, they take the longer of the two

Every run has processes of its own, one run at a time. A round is one run of every way with every number of
threads, in alternating order, so that load on the machine meets all of them; trust the ratios, not the
seconds. A run's step is the median of its steps after the warm-up.

The policy of `--model tiny` is the demo's, after its supervised phases: it ends its answers itself. `small`
has about 30 million random weights, so nearly all of its answers are cut at --max_new_tokens. A folder is
that of a chat model, such as the one that `openrlhf fetch smollm2` prints. The learning rate is close to 0,
so every step of every way samples from the same policy; the answers must have the same length on average, or
the benchmark ends with an error.

    python benchmarks/rl_step.py --model tiny
    python benchmarks/rl_step.py --model small --steps 4 --warmup 1 --rounds 2
    python benchmarks/rl_step.py --model a/folder/with/SmolLM2-135M --steps 3 --warmup 1 --prompts 8
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.device import DEVICE_TYPE
from openrlhf.tasks.prepare import REWARD_FILE
from openrlhf.tools.demo import demo
from openrlhf.types import not_none

SIZES = {"small": {"hidden_size": 640, "num_layers": 8, "num_heads": 10, "num_kv_heads": 5}}
"""Arguments of `tiny_chat_model`."""
PRETRAINED = "--data.max_len 256 --train.max_tokens_per_gpu 1024"
"""Flags for a chat model of a folder, whose template and vocabulary are larger."""
LENGTHS_AGREE = 0.15
"""Largest relative difference of the mean lengths of two ways: both are means over random answers."""
PHASES = ("generate", "logprobs", "update", "sync")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options that all ways share."""

    model: str
    prompts: str
    """Path of a file with `input` and `label`."""
    batch_size: int
    num_samples: int
    max_new_tokens: int
    steps: int
    warmup: int
    learning_rate: float = 1e-12
    seed: int = 0
    more: str = ""
    """Further flags of `openrlhf ppo`."""

    @property
    def flags(self) -> str:
        """Flags of `openrlhf ppo`: those of the demo, and the differences from it."""
        samples = self.batch_size * self.num_samples
        return (
            f"{demo.RL} {demo.TINY_RL} --actor.model_name_or_path {self.model} "
            f"--data.prompt_dataset {self.prompts} "
            f"--reward.remote_url {REWARD_FILE} --rollout.batch_size {self.batch_size} "
            f"--rollout.n_samples_per_prompt {self.num_samples} "
            f"--rollout.max_new_tokens {self.max_new_tokens} --train.batch_size {samples} "
            f"--train.max_steps {self.steps} --train.num_episodes {self.steps} --train.seed {self.seed} "
            f"--actor.adam.lr {self.learning_rate} {self.more}"
        )

    @property
    def config(self) -> PPOConfig:
        return parse(PPO, shlex.split(self.flags)).config

    @property
    def problems(self) -> list[dict[str, Any]]:
        with open(self.prompts) as file:
            return [json.loads(line) for line in file]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of one run of one way."""

    step: float
    """Seconds of a step."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase that is known."""
    samples: float
    """Number of samples of a step."""
    length: float
    """Mean length of an answer, in tokens."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step, from the first on."""


def main() -> None:
    options = parse_options()
    if options.way:
        print(json.dumps(asdict(WAYS[options.way](Setting(**json.loads(options.setting))))))
        return
    with tempfile.TemporaryDirectory() as folder:
        setting = prepare(options, options.folder or Path(folder))
        describe(options, setting)
        runs = measure(options, setting)
    check(setting, runs)
    report(options, runs)
    if options.json:
        options.json.write_text(json.dumps(figures(runs)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, small, or the folder of a chat model")
    parser.add_argument(
        "--modes", nargs="+", default=list(WAYS), choices=WAYS, help="ways to run (default: all)"
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="numbers of threads; 0: the way's own choice",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way with each number of threads")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a run that do not count")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="folder that keeps the tiny policy, trained once")
    parser.add_argument("--sft_rows", type=int, default=20_000, help="rows that the tiny policy learns from")
    parser.add_argument("--json", type=Path, help="file to write the median seconds of each way to")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(options: argparse.Namespace, folder: Path) -> Setting:
    from openrlhf.tasks.prepare import prepare as prepare_task
    from openrlhf.tasks.tiny_model import tiny_chat_model

    files = prepare_task(folder / "task", num_pretrain=options.sft_rows)
    if options.model == "tiny":
        model = folder / "sft"
        if not model.exists():
            train_policy(files, folder)
    elif options.model in SIZES:
        model = tiny_chat_model(folder / options.model, **SIZES[options.model])
    else:
        model = Path(options.model)
    return Setting(
        model=str(model.resolve()),
        prompts=str(files.prompts.resolve()),
        batch_size=options.prompts,
        num_samples=options.samples,
        max_new_tokens=options.max_new_tokens,
        steps=options.steps,
        warmup=options.warmup,
        more="" if options.model in ("tiny", *SIZES) else PRETRAINED,
    )


def train_policy(files: Any, folder: Path, seed: int = 0) -> None:
    """Trains the policy by the demo's supervised phases: `base` and `sft` in `folder`."""
    for flags in (
        f"--model.model_name_or_path {files.model} --model.pretrain_mode_enable "
        f"--data.dataset {files.pretrain} --ckpt.output_dir {folder / 'base'} {demo.PRETRAIN}",
        f"--model.model_name_or_path {folder / 'base'} --data.dataset {files.sft} --data.output_key output "
        f"--data.apply_chat_template --ckpt.output_dir {folder / 'sft'} {demo.CHAT}",
    ):
        train_supervised(f"{flags} --train.seed {seed}")


def train_supervised(flags: str) -> None:
    """Runs `openrlhf sft` with these flags and those of the demo's supervised phases."""
    run_process(["-m", "openrlhf.cli.train_sft", *shlex.split(f"{flags} {demo.SFT_FLAGS}")], threads=1)


def measure(options: argparse.Namespace, setting: Setting) -> dict[tuple[str, int], list[Run]]:
    runs: dict[tuple[str, int], list[Run]] = {key: [] for key in product(options.modes, options.threads)}
    order = list(runs)
    for _ in range(options.rounds):
        for way, threads in order:
            runs[way, threads].append(in_process(way, setting, threads))
        order.reverse()  # no way always comes first
    return runs


def in_process(way: str, setting: Setting, threads: int) -> Run:
    """Runs a way in a process of its own."""
    command = [__file__, "--way", way, "--setting", json.dumps(asdict(setting))]
    run = Run(**json.loads(run_process(command, threads).splitlines()[-1]))
    print(f"{way:8} {threads} threads: {run.step:.3f} s", file=sys.stderr)
    return run


def run_process(command: list[str], threads: int) -> str:
    """Returns the output of Python with these arguments; ends this process if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    # the folder takes what a run writes to its working directory
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=folder
        )
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


# Ours


AHEAD = {
    "async": "--train.async_enable --train.async_queue_size 1",
    "partial": "--train.async_enable --train.async_queue_size 1 --train.partial_rollout_enable",
}
"""Flags of the ways that sample while they train."""
UNCHECKED = "--vllm.sync_check_steps 1000000"
"""Flag by which engines are compared with the trainer after the first weight sync only."""


def ours(setting: Setting, more: str = "") -> Run:
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{setting.flags} --logger.run_dir {folder}/run --ckpt.output_dir {folder}/policy {more}"
        subprocess.run(
            [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *shlex.split(flags)],
            check=True,
            stdout=sys.stderr,
        )
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward_mean"] for row in rows]
    rows = [row for row in rows if row["step"] > setting.warmup]
    middle = lambda name: statistics.median(row[name] for row in rows)
    return Run(
        step=middle("timing/step_total"),
        phases={phase: middle(f"timing/{phase}") for phase in PHASES},
        samples=middle("rollout/num_samples"),
        length=statistics.mean(row["rollout/response_length_mean"] for row in rows),
        rewards=rewards,
    )


# TRL


def trl(setting: Setting) -> Run:
    stopwatch = new_stopwatch()
    trainer = grpo_trainer(setting, verifier, stopwatch, beta=0.0)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    return Run(
        step=statistics.median(stopwatch.seconds[setting.warmup :]),
        samples=not_none(trainer.args.generation_batch_size),
        length=statistics.mean(row["completions/mean_length"] for row in logs[setting.warmup :]),
        rewards=[row["reward"] for row in logs],
    )


def grpo_trainer(
    setting: Setting,
    reward: Callable,
    callback: Any,
    *,
    optimizer_steps: int = 1,
    micro_batches: int = 1,
    **arguments: Any,
) -> Any:
    """Builds TRL's trainer. `setting.steps`: batches of samples, with `optimizer_steps` each, whose gradients
    are sums over `micro_batches`. `arguments`: of GRPOConfig."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    parts = optimizer_steps * micro_batches
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(setting.model, dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=setting.batch_size * setting.num_samples // parts,
            gradient_accumulation_steps=micro_batches,
            steps_per_generation=parts,
            num_generations=setting.num_samples,
            max_completion_length=setting.max_new_tokens,
            max_steps=setting.steps * optimizer_steps,
            learning_rate=setting.learning_rate,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=DEVICE_TYPE == "cpu",
            seed=setting.seed,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": as_messages(row["input"]), "label": row["label"]} for row in setting.problems]
        ),
        processing_class=AutoTokenizer.from_pretrained(setting.model),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def as_messages(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def verifier(completions: list[list[dict]], label: list[str], **others) -> list[float | None]:
    from openrlhf.tasks.word_problem_reward import reward_func

    answers = [messages[0]["content"] for messages in completions]
    return reward_func(answers, [""] * len(answers), label)["rewards"]


def new_stopwatch() -> Any:
    """Returns a callback with the `seconds` of each step, from the end of the one before."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.seconds: list[float] = []
            self.last = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now

    return Stopwatch()


# The floor


def floor(setting: Setting) -> Run:
    """Measures generation and update; the sum is the step."""
    rng = random.Random(0)
    batches = [rng.sample(setting.problems, setting.batch_size) for _ in range(setting.steps)]
    generate, answers = asyncio.run(sampled(setting, batches))
    update = trained(setting, answers)
    phases = {
        "generate": statistics.median(generate[setting.warmup :]),
        "update": statistics.median(update[setting.warmup :]),
    }
    return Run(
        step=sum(phases.values()),
        phases=phases,
        samples=len(answers[0]),
        length=statistics.mean(len(answer) for batch in answers for _, answer in batch),
    )


Answers = list[tuple[list[int], list[int]]]
"""Token ids of prompt and answer."""


async def sampled(setting: Setting, batches: Sequence[list[dict]]) -> tuple[list[float], list[Answers]]:
    """Returns the seconds and the answers of each batch."""
    from rollout import BareEngine

    from openrlhf.backends.vllm.engine import engine_environment
    from openrlhf.cluster.engine_pool import engine_options
    from openrlhf.models.ends import stop_token_ids
    from openrlhf.models.tokenizers import load_tokenizer
    from openrlhf.rollout.seeds import seed_at

    config = setting.config
    options = engine_options(config, on_gpu=DEVICE_TYPE == "cuda", from_files=True)
    os.environ.update(engine_environment(options))
    tokenizer: Any = load_tokenizer(setting.model, flag="--model")
    stop = stop_token_ids(setting.model, tokenizer)
    engine = BareEngine(options)
    await engine.start()
    seconds, answers = [], []
    for step, batch in enumerate(batches):
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem["input"]}], add_generation_prompt=True
            )["input_ids"]
            for problem in batch
        ]
        requests = [
            (ids, seed_at(0, "train", step, prompt, i))
            for prompt, ids in enumerate(prompts)
            for i in range(setting.num_samples)
        ]
        start = time.perf_counter()
        tokens = await engine.sample(requests, setting.max_new_tokens, config.rollout.temperature, stop)
        seconds.append(time.perf_counter() - start)
        answers.append([(ids, answer) for (ids, _), answer in zip(requests, tokens, strict=True)])
    engine.shutdown()
    return seconds, answers


def trained(setting: Setting, batches: Sequence[Answers]) -> list[float]:
    """Returns the seconds of an optimizer step on each batch: policy gradient, clipping, AdamW."""
    import torch
    from supervised import adamw, packed, sample_of, token_log_probs, update
    from transformers import AutoModelForCausalLM

    from openrlhf.data.packing import pack_to_budget
    from openrlhf.rows import PackedRow

    model = (
        packed(AutoModelForCausalLM.from_pretrained(setting.model, dtype="float32")).to(DEVICE_TYPE).train()
    )
    optimizer, budget = adamw(model), setting.config.train.max_tokens_per_gpu

    def step(answers: Answers) -> None:
        samples = [sample_of(*answer) for answer in answers]
        count = sum(sample.num_actions for sample in samples)
        for group in pack_to_budget([sample.length for sample in samples], budget):
            row = PackedRow.of([samples[i] for i in group]).to(DEVICE_TYPE)
            advantages = torch.linspace(-1, 1, len(row.token_ids), device=DEVICE_TYPE)
            (-(token_log_probs(model, row) * advantages).sum() / count).backward()
        update(model, optimizer)

    return [timed(lambda batch=batch: step(batch)) for batch in batches]


def timed(work: Callable[[], None]) -> float:
    import torch

    start = time.perf_counter()
    work()
    if DEVICE_TYPE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


WAYS: dict[str, Callable[[Setting], Run]] = {
    "ours": ours,
    "unchecked": partial(ours, more=UNCHECKED),
    **{way: partial(ours, more=flags) for way, flags in AHEAD.items()},
    "trl": trl,
    "floor": floor,
}


# Report


def describe(options: argparse.Namespace, setting: Setting) -> None:
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(setting.model).num_parameters() / 1e6
    load = Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").exists() else "?"
    print(
        f"{options.model}: {weights:.1f}M weights, {os.cpu_count()} cores, load {load}\n"
        f"{options.prompts} prompts x {options.samples} samples, at most {options.max_new_tokens} new "
        f"tokens; {options.rounds} rounds, the median of {options.steps - options.warmup} steps each\n",
        flush=True,
    )


def check(setting: Setting, runs: dict[tuple[str, int], list[Run]]) -> None:
    """Exits if the ways do not do the same work."""
    count = setting.batch_size * setting.num_samples
    lengths = {key: statistics.mean(run.length for run in done) for key, done in runs.items()}
    expected = statistics.median(lengths.values())
    for key, done in runs.items():
        name = f"{key[0]} with {key[1]} threads"
        if wrong := {run.samples for run in done} - {count}:
            sys.exit(f"error: {name} has steps of {wrong} samples, not of {count}")
        if abs(lengths[key] / expected - 1) > LENGTHS_AGREE:
            sys.exit(f"error: {name} has {lengths[key]:.1f} tokens an answer, the others {expected:.1f}")


def report(options: argparse.Namespace, runs: dict[tuple[str, int], list[Run]]) -> None:
    """Prints medians of the rounds; ratios compare runs of the same round."""
    rival = next(iter(runs))
    columns = "".join(f"{name:>10}" for name in (*PHASES, "step"))
    head = f"{'seconds':8}{'threads':>8}{columns}{'tokens':>8}"
    print(f"{head}   this / {rival[0]} {rival[1]} (min - max)   this / floor")
    for (way, threads), done in runs.items():
        middle = lambda read, done=done: statistics.median(map(read, done))
        phases = [f"{middle(lambda r, p=p: r.phases[p]):.3f}" if p in done[0].phases else "" for p in PHASES]
        figures = "".join(f"{x:>10}" for x in (*phases, f"{middle(lambda r: r.step):.3f}"))
        print(
            f"{way:8}{threads or '-':>8}{figures}{middle(lambda r: r.length):8.1f}"
            f"{compared(done, [run.step for run in runs[rival]])}"
            f"{compared(done, [at_least(way, run) for run in runs.get(('floor', threads), [])])}"
        )


def figures(runs: dict[tuple[str, int], list[Run]]) -> dict[str, float]:
    """Returns median seconds of a step and of its phases, of each way."""
    found = {}
    for (way, threads), done in runs.items():
        name = f"{way}, {threads} threads" if threads else way
        found[f"{name}: step, s"] = statistics.median(run.step for run in done)
        for phase in done[0].phases:
            found[f"{name}: {phase}, s"] = statistics.median(run.phases[phase] for run in done)
    return found


def at_least(way: str, floor: Run) -> float:
    """Returns the seconds of a step of that way, with phases as fast as those of the floor."""
    return (max if way in AHEAD else sum)(floor.phases.values())


def compared(runs: Sequence[Run], seconds: Sequence[float]) -> str:
    """Formats the median, the smallest and the largest ratio to the seconds of the same round."""
    if not seconds:
        return ""
    ratios = [run.step / other for run, other in zip(runs, seconds, strict=True)]
    return f"{statistics.median(ratios):10.3f} ({min(ratios):.3f} - {max(ratios):.3f})"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
