"""The contract of an engine that samples: the same checks for every `RolloutEngine`."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf.backends.rollout import EngineOptions, RolloutEngine, engine_class
from openrlhf.backends.weight_sync.buckets import Bucket, TensorMeta
from openrlhf.backends.weight_sync.checksum import Checksum
from openrlhf.backends.weight_sync.stored_weights import fingerprints
from openrlhf.completions import Completion, SamplingParams
from openrlhf.models.checkpoint_layout import checkpoint_tensors
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.tokenizers import load_tokenizer

PROMPT = [10, 20, 30, 40, 50]
PASSED = {"max_num_seqs": 7, "scheduling_policy": "priority"}
"""Options of vLLM without a flag, which its engine gets."""
TOLERANCE = 1e-4
"""Largest difference of log-probs, nats: float32 logits are sums of a few hundred products, here by two
programs."""

CHECKS: list[Callable[["Setting"], Coroutine[Any, Any, None]]] = []


class Setting:
    """A running engine, and the same weights in transformers."""

    def __init__(self, engine: RolloutEngine, path: str) -> None:
        self.engine = engine
        self.model: Any = load_causal_lm(path, flag="--model", dtype="fp32", attention="eager").eval()
        self.tokenizer = load_tokenizer(path, flag="--model")

    @torch.no_grad()
    def distribution(self, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Returns the (L, V) log-probs of the token after each position."""
        logits = self.model(torch.tensor([token_ids])).logits[0].float()
        return (logits / temperature).log_softmax(-1)

    def log_probs(self, answer: Completion, temperature: float = 1.0) -> torch.Tensor:
        """Returns the (A, V) log-probs at the positions of the answer's tokens."""
        return self.distribution([*PROMPT, *answer.token_ids], temperature)[len(PROMPT) - 1 : -1]

    async def answer(self, **params: Any) -> Completion:
        asked = {"max_tokens": 12, "seed": 1, "ignore_eos": True, "logprobs": 0} | params
        return (await self.engine.generate(list(PROMPT), SamplingParams(**asked))).outputs[0]


async def with_engine(name: str, path: str, check: Callable[[Setting], Coroutine[Any, Any, None]]) -> None:
    options = options_of(name, path)
    engine = engine_class(options)(options)
    await engine.start()
    try:
        await check(Setting(engine, path))
    finally:
        engine.shutdown()


def options_of(name: str, path: str | Path) -> EngineOptions:
    return EngineOptions(
        engine=name,
        model=str(path),
        dtype="fp32",
        max_len=64,
        seed=0,
        transfer_backend="ray",
        on_gpu=False,
        enable_sleep=True,
        engine_args=PASSED if name == "vllm" else {},
    )


def check(function: Callable[[Setting], Coroutine[Any, Any, None]]) -> Callable:
    CHECKS.append(function)
    return function


@check
async def the_queue_counts_requests(setting: Setting) -> None:
    """Checks that a request is answered or waits while it is under way, and that none is left afterwards."""
    seen = [setting.engine.queue()]

    async def look() -> None:
        while True:
            seen.append(setting.engine.queue())
            await asyncio.sleep(0.001)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(setting.answer(seed=i, max_tokens=30) for i in range(3)))
    looking.cancel()
    assert seen[0] == setting.engine.queue() == (0, 0)
    assert max(running + waiting for running, waiting in seen) == 3
    assert max(running for running, _ in seen) >= 1


@check
async def tokens_in_tokens_out(setting: Setting) -> None:
    """Checks that reported log-probs are those of the distribution that was sampled from, by every name of
    the field."""
    params = SamplingParams(max_tokens=12, seed=3, temperature=0.7, logprobs=2, ignore_eos=True)
    output = await setting.engine.generate(list(PROMPT), params)
    (answer,) = output.outputs
    expected = setting.log_probs(answer, 0.7)
    assert list(output.prompt_token_ids) == PROMPT and len(answer.token_ids) == 12
    assert (answer.index, answer.finish_reason) == (0, "length")
    assert answer.log_probs is not None and answer.log_probs.dtype == np.float32
    chosen = expected.gather(1, torch.tensor([list(answer.token_ids)]).T)[:, 0]
    assert answer.log_probs.tolist() == pytest.approx(chosen.tolist(), abs=TOLERANCE)
    assert answer.logprobs is not None and len(answer.logprobs) == 12
    for i, token in enumerate(answer.token_ids):
        likely = answer.logprobs[i]
        assert likely[token].logprob == pytest.approx(answer.log_probs[i], abs=1e-6)
        assert next(iter(likely)) == token and {*expected[i].topk(2).indices.tolist()} <= likely.keys()
    assert answer.text == setting.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.versions.tolist() == [[0, 12]]
    assert params == SamplingParams(max_tokens=12, seed=3, temperature=0.7, logprobs=2, ignore_eos=True)


@check
async def seeds_repeat(setting: Setting) -> None:
    """Checks that a seed gives the same answers beside other requests too, for each of several answers."""
    first, other = await setting.answer(seed=5), await setting.answer(seed=6)
    assert list(first.token_ids) != list(other.token_ids)
    again = await asyncio.gather(*(setting.answer(seed=seed) for seed in (6, 7, 5)))
    assert [list(a.token_ids) for a in (again[2], again[0])] == [list(first.token_ids), list(other.token_ids)]
    asked = SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True)
    both = (await setting.engine.generate(list(PROMPT), asked)).outputs
    assert [list(a.token_ids) for a in both] == [list(first.token_ids), list(other.token_ids)]
    assert [a.index for a in both] == [0, 1] and both[0].log_probs is None and both[0].logprobs is None


@check
async def why_an_answer_ends(setting: Setting) -> None:
    """Checks the reasons why answers end (stop token, stop text, length limit) and that greedy answers take
    the most likely tokens."""
    whole = await setting.answer(max_tokens=40, seed=4)
    ids = list(whole.token_ids)
    end = next(i for i, token in enumerate(ids) if token not in ids[:i] and i > 1)
    stopped = await setting.answer(max_tokens=40, seed=4, stop_token_ids=[ids[end]])
    assert list(stopped.token_ids) == ids[: end + 1] and stopped.finish_reason == "stop"
    pieces = [setting.tokenizer.decode([token]) for token in ids]
    end = next(
        i for i, t in enumerate(pieces) if i > 1 and t.isascii() and not any(t in p for p in pieces[:i])
    )
    asked = {"max_tokens": 40, "seed": 4, "skip_special_tokens": False, "stop": [pieces[end]]}
    for include in (True, False):
        stopped = await setting.answer(**asked, include_stop_str_in_output=include)
        assert stopped.finish_reason == "stop" and list(stopped.token_ids) == ids[: end + 1]
        assert stopped.text == setting.tokenizer.decode(ids[: end + include])
    greedy = await setting.answer(temperature=0.0)
    expected = setting.log_probs(greedy)
    assert list(greedy.token_ids) == expected.argmax(-1).tolist()
    assert greedy.log_probs is not None
    assert greedy.log_probs.tolist() == pytest.approx(expected.amax(-1).tolist(), abs=TOLERANCE)
    room = await setting.answer(max_tokens=None, detokenize=False)
    assert (len(room.token_ids), room.finish_reason, room.text) == (64 - len(PROMPT), "length", "")


@check
async def kept_sets(setting: Setting) -> None:
    answer = await setting.answer(top_k=3, temperature=0.8, max_kept_tokens=8)
    assert answer.kept is not None and answer.log_probs is not None
    assert answer.kept.counts.tolist() == [3] * 12 and not answer.kept.log_masses.any()
    ids = torch.from_numpy(answer.kept.ids).long().view(12, 3)
    assert ids[:, 0].tolist() == list(answer.token_ids)
    among = setting.log_probs(answer, 0.8).gather(1, ids).log_softmax(-1)
    assert answer.log_probs.tolist() == pytest.approx(among[:, 0].tolist(), abs=TOLERANCE)
    assert (await setting.answer()).kept is None


@check
async def likely_tokens(setting: Setting) -> None:
    """Checks that the most likely tokens have their log-probs among all tokens, or among those that may be
    sampled, and do not depend on the sampled one."""
    for count, params in ((4, {}), (4, {"top_k": 3, "max_kept_tokens": 8}), (9, {"logprobs": 2})):
        answer = await setting.answer(temperature=0.8, num_likely=count, **params)
        assert answer.likely is not None and answer.likely.shape == (12, count)
        expected = setting.log_probs(answer, 0.8).topk(count)
        values = expected.values
        if "top_k" in params:
            values = torch.cat([values[:, :3].log_softmax(-1), torch.full((12, 1), -torch.inf)], 1)
        known = slice(3) if "top_k" in params else slice(None)  # dropped tokens are all alike
        assert answer.likely["id"][:, known].tolist() == expected.indices[:, known].tolist()
        found = torch.from_numpy(answer.likely["log_prob"].copy())
        torch.testing.assert_close(found, values, atol=TOLERANCE, rtol=0)
    assert (await setting.answer()).likely is None


@check
async def a_request_that_is_given_up(setting: Setting) -> None:
    expected = list((await setting.answer(seed=9)).token_ids)
    given_up = asyncio.create_task(setting.answer(max_tokens=None, seed=2))
    beside = asyncio.create_task(setting.answer(seed=9))
    await asyncio.sleep(0.01)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert list((await beside).token_ids) == expected == list((await setting.answer(seed=9)).token_ids)


@check
async def what_cannot_be_answered(setting: Setting) -> None:
    with pytest.raises(ValueError, match="64"):
        await setting.engine.generate([7] * 64, SamplingParams(max_tokens=1))
    assert setting.engine.vocabulary == setting.model.config.vocab_size


@check
async def probes(setting: Setting) -> None:
    await probes_of_version(setting, 0)


@check
async def sleeping(setting: Setting) -> None:
    before = list((await setting.answer()).token_ids)
    await setting.engine.sleep()
    await setting.engine.wake(["weights"])
    await setting.engine.wake(["kv_cache"])
    assert list((await setting.answer()).token_ids) == before
    assert (await setting.engine.peak_memory()).keys() <= {"generate"}


@check
async def new_weights(setting: Setting) -> None:
    """Checks that requests during a weight update are answered after it, and that every answer names its
    weights."""
    engine = setting.engine
    before = (await engine.probe(PROMPT)).log_probs
    with torch.no_grad():
        for param in setting.model.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))
    sent = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(setting.model).items()}
    checksum = Checksum()
    await engine.init_weight_transfer_engine({})
    await engine.start_weight_update()
    meanwhile = asyncio.create_task(setting.answer())
    for name, tensor in sent.items():
        checksum.add(name, tensor)
        await send(engine, name, tensor)
    await engine.finish_weight_update("3")
    assert await engine.loaded_checksums() == [checksum.value]
    await probes_of_version(setting, 3)
    assert np.abs(np.subtract((await engine.probe(PROMPT)).log_probs, before)).mean() > 100 * TOLERANCE
    answer = await meanwhile
    assert answer.versions.tolist() == [[3, 12]]
    assert await engine.unwritten_parameters() == []
    ours = fingerprints(sent.items())
    stored = await engine.layer_fingerprints({name: fingerprint.length for name, fingerprint in ours.items()})
    assert len(stored) > len(ours) // 2
    for name, fingerprint in stored.items():
        assert fingerprint.distance(ours[name]) < 1e-4 * ours[name].size, name


async def send(engine: RolloutEngine, name: str, tensor: torch.Tensor) -> None:
    """Sends one float32 tensor of a weight update."""
    bucket = Bucket((TensorMeta(name, "float32", tuple(tensor.shape)),))
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for _, view in bucket.views(buffer):
        view.copy_(tensor)
    described = [[t.name, t.dtype, list(t.shape)] for t in bucket.tensors]
    await engine.update_weights({"tensors": described, "data": buffer.numpy().tobytes()})


async def probes_of_version(setting: Setting, version: int) -> None:
    found = await setting.engine.probe(PROMPT)
    expected = setting.distribution(PROMPT)[:-1].gather(1, torch.tensor([PROMPT[1:]]).T)[:, 0]
    assert found.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE) and found.version == version
