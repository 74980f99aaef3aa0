"""Engine with adapters, by the scheduler and the model runner that the environment asks for; reports its
answers by weights, beside other requests and alone, with one request aborted, and across a sync."""

import asyncio
import copy
from collections.abc import Iterator

import torch
from sending import Client, Trainer, options_of, sync_under_way
from torch import Tensor

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.stored_weights import random_input
from openrlhf.completions import SamplingParams
from openrlhf.config.sections import LoraConfig
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.types import Turn

PROMPT = [3 + i % 200 for i in range(140)]
"""Prompt of one whole block of vLLM's cache on a CPU and a part of the next."""
LORA = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
MAX_KEPT = 6
ASKED: dict[str, dict] = {
    "plain": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},  # sometimes more tokens than are recorded
    "warm": {"temperature": 1.3, "top_p": 0.9, "top_k": 5},
    "two": {"n": 2},
    "greedy": {"temperature": 0.0},
}


class Adapted(Trainer):
    """Trainer that sends adapters beside its weights; `policy` has them merged."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "fp32")
        self.base, self.drawn = copy.deepcopy(self.policy), 0
        self.adapter: dict[str, Tensor] = {}

    def learn(self) -> None:
        self.drawn += 1
        for name, param in self.policy.model.named_parameters():
            if name.split(".")[-2] in LORA.target_modules:
                out, given = param.shape
                a = random_input(LORA.rank * given).view(LORA.rank, given).roll(self.drawn, 1)
                b = random_input(out * LORA.rank).view(out, LORA.rank).roll(self.drawn, 0) / 8
                of = f"base_model.model.{name.removesuffix('.weight')}"
                self.adapter |= {f"{of}.lora_A.weight": a, f"{of}.lora_B.weight": b}
                before = self.base.model.get_parameter(name)
                param.data = before.data + b @ a * (LORA.alpha / LORA.rank)

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        if part == "adapter":
            yield from self.adapter.items()
            return
        merged, self.policy = self.policy, self.base
        yield from list(super().weights(bucket_bytes))
        self.policy = merged

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.weights(0, part)]


def error_of(trainer: Trainer, turn: Turn, params: SamplingParams, actions: slice = slice(None)) -> float:
    """Returns the largest difference between a turn's log-probs and those that the trainer's weights give to
    the tokens that sampling kept."""
    ids = torch.tensor([*turn.prompt_ids.tolist(), *turn.action_ids.tolist()])
    with torch.no_grad():
        logits = trainer.policy.model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1].float()
    expected = torch.log_softmax(logits / (params.temperature or 1.0), -1)
    if turn.kept is not None:
        kept = torch.from_numpy(turn.kept.ids).split(turn.kept.counts.tolist())
        shares = zip(expected, kept, turn.kept.log_masses.tolist(), strict=True)
        rows = [row - row[of.long()].logsumexp(0) + share for row, of, share in shares]
        expected = torch.stack(rows)
    expected = expected.gather(1, torch.from_numpy(turn.action_ids)[:, None].long())[:, 0]
    if params.temperature == 0:
        assert (turn.action_ids == logits.argmax(-1).numpy()).all()
    return float((expected - torch.from_numpy(turn.log_probs)).abs()[actions].max())


async def ask(
    engine: VLLMEngine, name: str, tokens: int, *, seed: int = 0
) -> tuple[list[Turn], SamplingParams]:
    given = SamplingParams(max_tokens=tokens, seed=0, detokenize=False)
    given.temperature = ASKED[name].get("temperature", 1.0)
    params = copy.copy(given)
    params.ignore_eos = True
    for key, value in ASKED[name].items():
        setattr(params, key, value)
    recording = RecordingEngine(engine, (name, seed), given, max_kept_tokens=MAX_KEPT)
    await recording.generate(PROMPT, params)
    return recording.turns, params


def told(turn: Turn) -> dict:
    kept = [] if turn.kept is None else turn.kept.counts.tolist()
    return {"tokens": turn.action_ids.tolist(), "log_probs": turn.log_probs.tolist(), "kept": kept}


async def main(spec: dict) -> dict:
    torch.manual_seed(0)
    trainer = Adapted(spec["model"])
    trainer.learn()
    engine = VLLMEngine(options_of(spec["model"], enable_prefix_caching=True, lora=LORA))
    await engine.start()
    scheduling = engine.llm.vllm_config.scheduler_config.async_scheduling
    runner = engine.llm.vllm_config.use_v2_model_runner
    found: dict = {"is asynchronous": scheduling, "second runner": runner}
    client = Client(engine)
    meeting = {"backend": "gloo", "address": "127.0.0.1", "port": free_port(), "rank": 0}
    sender = await asyncio.to_thread(WeightSender, trainer, client, lora_sync="adapter", **meeting)
    await asyncio.to_thread(sender.send, 1)

    probing = asyncio.create_task(engine.probe(PROMPT))
    given_up = asyncio.create_task(ask(engine, "plain", 100, seed=1))
    beside = [asyncio.create_task(ask(engine, name, 12)) for name in ASKED]
    await asyncio.sleep(0.5)
    given_up.cancel()
    answers = dict(zip(ASKED, await asyncio.gather(*beside), strict=True))
    alone = {name: await ask(engine, name, 12) for name in ("plain", "warm")}
    found["answers"] = {name: [told(turn) for turn in turns] for name, (turns, _) in answers.items()}
    found["alone"] = {name: [told(turn) for turn in turns] for name, (turns, _) in alone.items()}
    found["errors"] = {
        name: max(error_of(trainer, turn, params) for turn in turns)
        for name, (turns, params) in answers.items()
    }
    ids = torch.tensor(PROMPT)
    with torch.no_grad():
        expected = torch.log_softmax(trainer.policy.model(ids[None]).logits[0].float(), -1)
    probed = torch.tensor((await probing).log_probs)
    found["probe"] = float((expected[:-1].gather(1, ids[1:, None])[:, 0] - probed).abs().max())

    under_way = asyncio.create_task(ask(engine, "top-k", 40, seed=2))
    before = copy.copy(trainer)
    before.policy = copy.deepcopy(trainer.policy)
    await sync_under_way(engine, PROMPT, trainer, sender)
    (turn,), params = await under_way
    found["versions"] = turn.weight_versions.tolist()
    count = found["versions"][0][1]
    found["old"] = error_of(before, turn, params, slice(count))
    found["new"] = error_of(trainer, turn, params, slice(count, None))
    found["old by new"] = error_of(trainer, turn, params, slice(count))
    engine.shutdown()
    return found
