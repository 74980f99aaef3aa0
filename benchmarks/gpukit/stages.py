"""The stages, most valuable first: a budget of time takes them from the top."""

from typing import Any

from gpukit.stage import Stage

ENGINE = ("transformers", "deepspeed", "datasets")
STACK = (*ENGINE, "ray", "vllm")
PYTEST = (*ENGINE, "pytest")

HYBRID = (
    "--train.colocate_all --actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.enable_sleep "
    "--ds.enable_sleep --vllm.gpu_memory_utilization 0.5 --ds.zero_stage 2"
)
AHEAD = (
    "--train.colocate_all --actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.gpu_memory_utilization 0.4 "
    "--ds.zero_stage 2 --train.async_enable --train.async_queue_size 1"
)
PARTIAL = f"{AHEAD} --train.partial_rollout_enable"
SEPARATE = (
    "--actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.gpu_memory_utilization 0.8 --ds.zero_stage 2"
)
ON_TWO = HYBRID.replace("num_gpus_per_node 1", "num_gpus_per_node 2")
SMOLLM2 = "ckpt/smollm2"
SHARED_ROWS = f"{ON_TWO.replace('num_engines 1', 'num_engines 2')} --ds.ring_attn_size 2"


def rl(shows: str, flags: str, *, gpus: int = 1, rehearsed: bool = True, **options: Any) -> Stage:
    return Stage(
        shows=shows,
        work="gpukit.reinforcement:run",
        options={"flags": flags, **options},
        packages=STACK,
        gpus=gpus,
        seconds=120,
        rehearsed=rehearsed,
    )


def pytest(shows: str, *selection: str, seconds: float = 60) -> Stage:
    return Stage(
        shows=shows,
        work="gpukit.machine:tests",
        options={"selection": list(selection)},
        packages=PYTEST,
        seconds=seconds,
        rehearsed=False,
    )


def sft(
    shows: str, shape: str, *, checkpointing: bool, seconds: float, ways: tuple[str, ...] = ("ours", "bare")
) -> Stage:
    options = {"shape": shape, "checkpointing": checkpointing, "ways": ways}
    packages = (*ENGINE, *(["liger_kernel"] if "liger" in ways else []))
    return Stage(
        shows=shows,
        work="gpukit.training:sft",
        options=options,
        packages=packages,
        seconds=seconds,
        rehearsed="liger" not in ways,
    )


def pretrained(problems: str, task: str) -> Stage:
    return Stage(
        shows=f"a pretrained model learns {problems}: 40 steps, with the curve",
        work="gpukit.pretrained:learn",
        options={"folder": SMOLLM2, "task": task},
        packages=("transformers", "datasets", "reasoning_gym", "math_verify"),
        model=SMOLLM2,
        seconds=120,
        limit=600,
    )


STAGES = {
    "facts": Stage(shows="facts and rates of the machine", work="gpukit.machine:facts", gpus=0, seconds=20),
    "kernels": pytest("attention and head against float64", "tests/gpu/test_kernels.py"),
    "zero": pytest(
        "gradients at ZeRO 0 to 3, whatever the layout", "tests/gpu/test_training.py", "-k", "gradients"
    ),
    "sft-0.6B": sft("packed SFT beside a bare loop", "0.6B", checkpointing=False, seconds=60),
    "hybrid": rl("two steps of RL, trainer and engine on one GPU", HYBRID),
    "ipc": Stage(
        shows="weights from one process to another by CUDA IPC, beside a copy",
        work="gpukit.transport:ipc",
        packages=("transformers",),
        seconds=30,
    ),
    "sleep": pytest(
        "optimizer states moved away and back, with equal losses",
        "tests/gpu/test_training.py",
        "-k",
        "sleeping",
        seconds=30,
    ),
    "waits": Stage(
        shows="host synchronisations of a step", work="gpukit.training:waits", packages=ENGINE, seconds=40
    ),
    "sft-4B-checkpointing": sft(
        "packed SFT with checkpointing, as many layers of a 4B model as fit",
        "4B",
        checkpointing=True,
        seconds=90,
    ),
    "rl-0.6B": Stage(
        shows="an optimizer step of RL on rows of 16k",
        work="gpukit.training:policy",
        options={"shape": "0.6B"},
        packages=ENGINE,
        seconds=40,
    ),
    "rl-4B-lora": Stage(
        shows="an optimizer step of RL of a 4B model with adapters",
        work="gpukit.training:policy",
        options={"shape": "4B", "lora": True},
        packages=(*ENGINE, "peft"),
        seconds=60,
    ),
    "learns-sums": pretrained(
        "sums of two or three digits", "chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1"
    ),
    "learns-products": pretrained(
        "products of two digits", "products?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    ),
    "learns-legs": pretrained(
        "how many legs an animal or several have", "leg_counting?min_animals=1&max_animals=1&max_instances=5"
    ),
    "prefixes": Stage(
        shows="common prefixes of rows read once, beside rows read whole",
        work="gpukit.training:prefixes",
        packages=ENGINE,
        seconds=60,
    ),
    "sft-0.6B-checkpointing": sft("packed SFT with checkpointing", "0.6B", checkpointing=True, seconds=60),
    "optimizer": Stage(
        shows="fused AdamW on more than 2^31 elements", work="gpukit.machine:large_optimizer_step", seconds=20
    ),
    "liger": sft(
        "SFT with Liger's kernels beside transformers' own",
        "0.6B",
        checkpointing=False,
        seconds=60,
        ways=("ours", "liger"),
    ),
    "step": rl("a full step of RL: 512 samples of 512 tokens", HYBRID, prompts=64, tokens=512, steps=3),
    "hybrid-zero3": rl("two steps of RL at ZeRO-3", HYBRID.replace("zero_stage 2", "zero_stage 3")),
    "partial": rl(
        "weight syncs that pause requests", PARTIAL, tokens=256, steps=3, reaches={"rollout/staleness_max": 1}
    ),
    "kept-cache": rl(
        "weight syncs that pause requests and keep their cache",
        f"{PARTIAL} --vllm.keep_cache",
        tokens=256,
        steps=3,
    ),
    "async": rl("asynchronous RL: sampling ahead", AHEAD, steps=3, reaches={"rollout/staleness_max": 1}),
    "adapters": rl(
        "RL with adapters that engines keep apart", f"{HYBRID} --ds.lora.rank 8 --vllm.lora_sync adapter"
    ),
    "kept-sets": rl(
        "RL with top-p sampling and its recorded support",
        f"{HYBRID} --rollout.top_p 0.9",
        reaches={"rollout/kept_set_size_mean": 1.5},
    ),
    "routing": rl(
        "RL of a mixture of experts with router replay",
        f"{HYBRID} --algo.router_replay --vllm.enable_prefix_caching",
        moe=True,
    ),
    "rollout": Stage(
        shows="rollout beside bare vLLM", work="gpukit.reinforcement:rollout", packages=STACK, seconds=150
    ),
    "rollout-invariant": Stage(
        shows="rollout with vLLM's batch-invariant kernels: the same tokens by seeds",
        work="gpukit.reinforcement:rollout",
        options={"invariant": True},
        packages=STACK,
        seconds=150,
        rehearsed=False,
    ),
    "trl-sft": Stage(
        shows="SFT beside TRL's", work="gpukit.training:trl", packages=(*ENGINE, "trl"), seconds=120
    ),
    "floor": Stage(
        shows="a step of RL beside TRL's, and beside vLLM and a PyTorch loop alone",
        work="gpukit.reinforcement:floor",
        packages=(*STACK, "trl"),
        seconds=250,
    ),
    "collectives": Stage(
        shows="a sum over all GPUs, and its bandwidth", work="gpukit.machine:collectives", gpus=2, seconds=40
    ),
    "separate": rl("two steps of RL, trainer and engine on a GPU each", SEPARATE, gpus=2),
    "tensor-parallel": rl(
        "two steps of RL, an engine over two GPUs",
        f"{ON_TWO} --vllm.tensor_parallel_size 2",
        gpus=2,
        rehearsed=False,
    ),
    **{
        f"shared-{mode}": rl(
            f"two steps of RL, two GPUs share each row ({mode})",
            f"{SHARED_ROWS} --ds.sequence_parallel_mode {mode}",
            gpus=2,
            rehearsed=False,
        )
        for mode in ("ulysses", "ring", "allgather")
    },
}
