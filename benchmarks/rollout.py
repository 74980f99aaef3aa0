"""Sampled tokens per second of a rollout, in several ways on the same model, prompts and seeds.

ours      EnginePool: from prompts to trajectories with rewards in the controller, through the Ray
          actor, the agent and the reward process of train_ppo_ray
bare      vLLM's AsyncLLM in a Ray actor, with the same engine arguments and token ids as input: one request
          for each sample, all at once, log-probs of sampled tokens; it returns the tokens
defaults  the same with vLLM's own engine arguments

Every repeat runs every way, and all must sample the same tokens. On a GPU, where results depend on the rest
of the batch, answers must begin alike: a lost seed or prompt shows in the first tokens. With
VLLM_BATCH_INVARIANT=1 whole answers must be equal. Trust the ratios, not the absolute figures.

    python benchmarks/rollout.py --model tiny --prompts 32 --samples 8
    python benchmarks/rollout.py --model tiny --prompts 32 --samples 8 --top_p 0.95
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from openrlhf.backends.vllm.engine import VLLMEngine, engine_environment
from openrlhf.cluster.engine_pool import EnginePool, engine_options
from openrlhf.cluster.launch import check_resources, start_ray
from openrlhf.cluster.layout import ENGINES
from openrlhf.cluster.placement import Bundles, place
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.rollout.seeds import seed_at
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tasks.word_problem import make_problems
from openrlhf.types import Prompt

MODELS = {
    "tiny": {},
    "small": {"hidden_size": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "max_len": 4096},
}
"""Arguments of `tiny_chat_model`."""

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"

BEGINNING = 8
"""Number of first tokens that are compared. In bf16 about one token in a hundred differs if another kernel
computes it: with equal seeds nine answers in ten then begin alike, with other seeds none."""

Way = Callable[[], list[list[int]]]
"""Function that samples everything and returns the sampled tokens, prompt by prompt."""


def main() -> None:
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(options, Path(folder))
        prompts = build_prompts(config, options.prompts)
        layout = check_resources(config)
        on_gpu, bundles = layout.on_gpu, place(config, layout)[ENGINES]
        ways = {name: WAYS[name](config, bundles, on_gpu, prompts) for name in options.ways}
        answers = {name: way() for name, way in ways.items()}
        for name, found in answers.items():
            check_same(name, answers[options.ways[0]], found, exact=exact(on_gpu))
        describe(options, answers["ours"])
        report(measure(ways, options.repeats), sum(map(len, answers["ours"])))
    ray.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, small, or a Hugging Face name or folder")
    parser.add_argument(
        "--repeats", type=int, default=7, help="number of repeats, whose median ratio is printed"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument(
        "--max_len", type=int, default=512, help="maximum length of prompt and response together"
    )
    parser.add_argument("--top_p", type=float, default=1.0, help="top-p; below 1, ours records the support")
    parser.add_argument(
        "--max_kept_tokens", type=int, default=32, help="maximum number of recorded tokens of a support"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine on a CPU")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--ways", nargs="+", default=["ours", "bare"], choices=WAYS)
    return parser.parse_args()


def build_config(options: argparse.Namespace, folder: Path) -> PPOConfig:
    model = options.model
    if model in MODELS:
        model = tiny_chat_model(folder / "model", **MODELS[model])
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    flags = {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": 1,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "data.prompt_dataset": folder,  # not read: the prompts are made here
        "data.max_len": options.max_len,
        "ds.param_dtype": options.dtype,
        "reward.remote_url": reward,
        "rollout.batch_size": options.prompts,
        "rollout.max_new_tokens": options.max_new_tokens,
        "rollout.max_kept_tokens": options.max_kept_tokens,
        "rollout.n_samples_per_prompt": options.samples,
        "rollout.top_p": options.top_p,
        "train.batch_size": options.prompts * options.samples,
        "vllm.gpu_memory_utilization": 0.9 / (len(options.ways) + 0.3),  # the engines of all ways share a GPU
        "vllm.num_engines": 1,
    }
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse(PPO, [*argv, "--train.colocate_all"]).config


def build_prompts(config: PPOConfig, count: int) -> list[Prompt]:
    tokenizer = load_tokenizer(config.actor.model_name_or_path, flag="--model")
    chat = lambda text: str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    )
    return [
        Prompt(prompt_id=i, text=chat(problem.question), label=problem.answer)
        for i, problem in enumerate(make_problems(count, seed=0))
    ]


def ours(config: PPOConfig, bundles: Bundles, on_gpu: bool, prompts: list[Prompt]) -> Way:
    pool = EnginePool(config, bundles, on_gpu, from_files=True)
    pool.start().result()

    def sample() -> list[list[int]]:
        """Returns samples in the order of the prompts, however they finish."""
        pool.submit(prompts, "train")
        groups = sorted((pool.next_group("train") for _ in prompts), key=lambda g: g.prompt.prompt_id)
        return [t.action_ids.tolist() for group in groups for t in group.trajectories]

    return sample


def bare(
    config: PPOConfig, bundles: Bundles, on_gpu: bool, prompts: list[Prompt], *, defaults: bool = False
) -> Way:
    options, devices = bundles.engine_options(0, 1)
    as_ours = engine_options(config, on_gpu, from_files=True)
    environment = engine_environment(as_ours) | devices
    actor: Any = ray.remote(DefaultEngine if defaults else BareEngine)
    engine = actor.options(**options, runtime_env={"env_vars": environment}, max_concurrency=8).remote(
        as_ours
    )
    path = config.actor.model_name_or_path
    tokenizer = load_tokenizer(path, flag="--model")
    requests = [
        (
            tokenizer(prompt.text, add_special_tokens=False)["input_ids"],
            seed_at(config.train.seed, "train", prompt.epoch, prompt.prompt_id, i),
        )
        for prompt in prompts
        for i in range(config.rollout.n_samples_per_prompt)
    ]
    ray.get(engine.start.remote())
    rollout, stop = config.rollout, stop_token_ids(path, tokenizer)
    arguments = requests, rollout.max_new_tokens, rollout.temperature, stop, rollout.top_p
    return lambda: ray.get(engine.sample.remote(*arguments))


class BareEngine(VLLMEngine):
    """Engine that starts like the package's, so that the engine arguments are the same, and is then used
    without the package's code."""

    async def sample(
        self,
        requests: list[tuple[list[int], int]],
        max_tokens: int,
        temperature: float,
        stop: list[int],
        top_p: float = 1.0,
    ) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def one(token_ids: list[int], seed: int) -> list[int]:
            params = SamplingParams(
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                seed=seed,
                stop_token_ids=stop,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": token_ids}
            outputs = self.llm.generate(prompt, params, request_id=uuid.uuid4().hex)
            (answer,) = [output async for output in outputs]  # with FINAL_ONLY there is one output
            return list(answer.outputs[0].token_ids)

        return await asyncio.gather(*(one(*request) for request in requests))


class DefaultEngine(BareEngine):
    """Engine that starts as users of vLLM start it."""

    async def start(self, free_fraction: float | None = None) -> None:
        from vllm.config.model import ModelDType
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = self.options
        dtypes: dict[str, ModelDType] = {"bf16": "bfloat16", "fp32": "float32"}
        share: dict[str, Any] = (
            {"gpu_memory_utilization": options.gpu_memory_utilization} if options.on_gpu else {}
        )
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=options.model,
                dtype=dtypes[options.dtype],
                max_model_len=options.max_len,
                disable_log_stats=True,
                **share,
            )
        )


WAYS: dict[str, Callable[[PPOConfig, Bundles, bool, list[Prompt]], Way]] = {
    "ours": ours,
    "bare": bare,
    "defaults": partial(bare, defaults=True),
}


def exact(on_gpu: bool) -> bool:
    """Says whether equal seeds give equal tokens whatever else is in the batch."""
    return not on_gpu or os.environ.get("VLLM_BATCH_INVARIANT") == "1"


def check_same(name: str, expected: list[list[int]], found: list[list[int]], *, exact: bool) -> None:
    """Ends this process if a way does other work than the first: if its tokens differ, or, where kernels
    depend on the batch, the beginnings of more than half of the answers."""
    pairs = list(zip(expected, found, strict=True))
    alike = sum(a[:BEGINNING] == b[:BEGINNING] for a, b in pairs) / len(pairs)
    equal = sum(a == b for a, b in pairs) / len(pairs)
    if equal < 1 if exact else alike < 0.5:
        sys.exit(
            f"{name}: {equal:.0%} of the answers are those of the first way, {alike:.0%} begin with the same "
            f"{BEGINNING} tokens: the ways do not do the same work"
        )


def measure(ways: dict[str, Way], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each repeat. All ways have run once before."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(repeats):
        for name in names:
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
        names.reverse()  # no way always comes first
    return seconds


def describe(options: argparse.Namespace, answers: list[list[int]]) -> None:
    import vllm

    lengths = [len(answer) for answer in answers]
    load = Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").exists() else "?"
    print(
        f"{options.model}, {options.dtype}, {options.threads} threads, vllm {vllm.__version__}, load {load}\n"
        f"{options.prompts} prompts x {options.samples} samples, {sum(lengths)} tokens sampled, "
        f"{statistics.mean(lengths):.0f} on average, at most {max(lengths)}\n",
        flush=True,
    )


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    for name, times in seconds.items():
        print(f"{name:9}{tokens / statistics.median(times):10.0f} tokens/s")
    first, *others = seconds
    for name in others:
        ratios = [theirs / mine for theirs, mine in zip(seconds[name], seconds[first], strict=True)]
        print(
            f"{first} / {name}: {min(ratios):.3f} / {statistics.median(ratios):.3f} / {max(ratios):.3f} "
            "(min / median / max of repeats)"
        )


if __name__ == "__main__":
    main()
