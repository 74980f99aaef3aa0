"""Differences between an engine's log-probs and the trainer's that stop a run, and their message."""

import math

import pytest
import torch
import transformers as hf
from refusals import refused

from openrlhf.algorithms.mismatch import PROBE
from openrlhf.backends.weight_sync.stored_weights import (
    LEAST_SPREAD,
    DifferentWeightsError,
    EngineProbe,
    Limit,
    WeightFingerprint,
    build_probe,
    build_run_probe,
    check_adapter,
    check_stored,
    differing_weights,
    explain_difference,
    fingerprints,
    make_probe,
)
from openrlhf.cluster.weight_check import WeightCheck
from openrlhf.config.ppo import ActorConfig, PPOConfig, PromptDataConfig
from openrlhf.errors import ErrorCode
from openrlhf.models.configurations import has_experts
from openrlhf.models.vision import image_reader
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tasks.tiny_vision_model import tiny_vision_model

OURS = torch.tensor([-1.0, -3.0] * 10)  # 1 nat from their mean
ON_GPU = {dtype: Limit(dtype=dtype, on_gpu=True) for dtype in ("bf16", "fp16", "fp32")}


def check(log_probs: torch.Tensor, limit: Limit = ON_GPU["bf16"], trainer: torch.Tensor = OURS) -> float:
    return check_stored(trainer, 1, EngineProbe(log_probs=log_probs.tolist(), version=7), limit)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (ON_GPU["bf16"], 1 / 8),  # 32 roundings of 2^-8, in units of the spread
        (ON_GPU["fp16"], 1 / 64),
        (ON_GPU["fp32"], 1 / 64),  # TF32
        (Limit(dtype="bf16", on_gpu=False), 1 / 8),
        (Limit(dtype="fp32", on_gpu=False), 2**-12),
        (Limit(dtype="fp32", on_gpu=False, has_experts=True), 1 / 8),
    ],
)
def test_rounding_is_no_difference(limit: Limit, allowed: float):
    assert check(OURS + 0.99 * allowed, limit) == pytest.approx(0.99 * allowed, rel=1e-2)
    assert check(OURS - 0.99 * allowed, limit) > 0
    with refused(ErrorCode.WRONG_WEIGHTS, told=f"explains {allowed:.3g}."):
        check(OURS + 1.01 * allowed, limit)


def test_the_mean_counts():
    """One token may differ by much: a router near a tie chooses another expert."""
    one = OURS.clone()
    one[3] += 2
    check(one)
    one[4:8] += 2
    with refused(ErrorCode.WRONG_WEIGHTS, told="0.5 nats"):
        check(one)


def test_the_message_names_engine_version_and_both_log_probs():
    wrong = OURS.clone()
    wrong[2] = -31.0
    with pytest.raises(DifferentWeightsError) as refusal:
        check(wrong)
    for figure in ("weight sync 7", "engine 1 ", "20 tokens", "1.5 nats", "30 at most", "token 3 is -31 "):
        assert figure in refusal.value.text
    assert ", -1 in the trainer" in refusal.value.text


def test_a_difference_of_exactly_the_limit_is_rounding():
    check(OURS + 1 / 8)
    with refused(ErrorCode.WRONG_WEIGHTS):
        check(OURS + 9 / 64)


def test_nan_is_a_difference():
    broken = OURS.clone()
    broken[4] = math.nan
    with refused(ErrorCode.WRONG_WEIGHTS, told="token 5 is nan "):
        check(broken)


def test_a_model_that_tells_no_tokens_apart():
    same = torch.full((20,), -5.0)
    check(same + 1e-5, ON_GPU["fp32"], same)
    with refused(ErrorCode.WRONG_WEIGHTS):
        check(same + LEAST_SPREAD, ON_GPU["bf16"], same)


def test_the_probe_is_made_of_ordinary_tokens():
    tokenizer = tiny_tokenizer()
    probe = build_probe(tokenizer, 128)
    assert len(probe) == 128
    assert not set(probe) & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    assert len(set(probe)) > 80
    assert build_probe(tokenizer, 128) == probe
    tokenizer.bos_token = "<|endoftext|>"
    assert build_probe(tokenizer, 5) == [tokenizer.bos_token_id, *probe[:4]]
    assert make_probe(tokenizer, None, 9).token_ids == make_probe(tokenizer, None, 9).asked
    assert len(make_probe(tokenizer, None, 9).asked) == 9


def test_the_probe_of_a_run_leaves_room_for_a_token(tmp_path):
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=str(tiny_chat_model(tmp_path))), data=PromptDataConfig(max_len=9)
    )
    assert build_run_probe(config) == make_probe(tiny_tokenizer(), None, 8)


def test_the_probe_of_a_policy_with_pictures_begins_with_one(tmp_path):
    """The engine is asked with one placeholder, which it replaces by the picture's tokens itself."""
    reader = image_reader(str(tiny_vision_model(tmp_path)))
    tokenizer = reader.processor.tokenizer
    probe = make_probe(tokenizer, reader, 40)
    num_patches = probe.token_ids.count(reader.patch_id)
    text = probe.token_ids[num_patches:]
    assert num_patches > 1 and len(probe.token_ids) == 40 and len(probe.images) == 1
    assert probe.token_ids[:num_patches] == [reader.patch_id] * num_patches
    assert probe.asked == [reader.patch_id, *text] and text == build_probe(tokenizer, len(text))


def test_the_probe_of_a_run_with_pictures_has_its_readers_picture(tmp_path):
    folder = str(tiny_vision_model(tmp_path))
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=folder),
        data=PromptDataConfig(max_len=41, max_images_per_prompt=1),
    )
    reader = image_reader(folder)
    expected = make_probe(reader.processor.tokenizer, reader, 40)
    assert (
        build_run_probe(config).token_ids == expected.token_ids and len(build_run_probe(config).images) == 1
    )


def test_an_adapter_that_moves_nothing_proves_nothing():
    limit = ON_GPU["bf16"]  # an eighth is allowed
    check_adapter(OURS, OURS + 0.51, limit)
    with refused(ErrorCode.WRONG_WEIGHTS, flag="--vllm.lora_sync", value="adapter") as refusal:
        check_adapter(OURS, OURS + 0.49, limit)
    assert "0.49 nats" in refusal.value.text and "0.5.\n" in refusal.value.text


WEIGHTS = {"norm": (5,), "up": (7, 5), "down": (5, 7), "experts": (2, 5, 7)}


def test_weights_that_layers_hold_otherwise_are_named():
    """The weights are rolled along rows or columns, of an earlier sync, or of another layer; rounded to
    bfloat16 they are the same."""
    torch.manual_seed(0)
    sent = {name: torch.randn(shape) for name, shape in WEIGHTS.items()}
    ours = fingerprints(sent.items())
    assert ours.keys() == {"norm", "up", "down"}
    relative = ON_GPU["bf16"].relative

    def different(**changed: torch.Tensor) -> list[str]:
        return differing_weights(ours, fingerprints((sent | changed).items()), relative)

    assert different() == []
    assert different(up=sent["up"].bfloat16(), norm=sent["norm"].bfloat16()) == []
    assert different(up=sent["up"].roll(1, 0), norm=sent["norm"] + 1) == ["norm", "up"]
    assert different(up=sent["up"].roll(1, 1)) == ["up"]
    assert different(down=torch.randn(5, 7)) == ["down"]
    assert differing_weights(ours, {"up": WeightFingerprint(7, 1.0, (math.nan,) * 16)}, relative) == ["up"]


def test_an_answer_is_compared_with_the_log_probs_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = WeightCheck(PPOConfig(), engines=None, on_gpu=True)
    found.limit = ON_GPU["bf16"]
    monkeypatch.setattr(found, "_reason", lambda number: "a reason")
    found.expected = {1: OURS, 2: OURS + 3}
    answer = lambda version: EngineProbe(log_probs=(OURS + 0.1).tolist(), version=version)
    found._compare(0, answer(1))
    found._compare(0, answer(7))  # of a sync without a check
    assert found.take_metrics() == {PROBE: pytest.approx(0.1)}
    with refused(ErrorCode.WRONG_WEIGHTS) as refusal:
        found._compare(0, answer(2))
    assert refusal.value.text.endswith("a reason")


def test_reasons_name_the_tensors():
    assert "a, b, c and 2 more:" in explain_difference(["a", "b", "c", "d", "e"], [], 0)
    assert "a, b, c and 1 more:" in explain_difference(["a", "b", "c", "d"], [], 0)
    assert "write a, b, c:" in explain_difference(["a", "b", "c"], [], 0)
    assert "Of 3 weights" in explain_difference([], ["up"], 3) and " up:" in explain_difference([], ["up"], 3)
    assert "(3 weights" in explain_difference([], [], 3)


@pytest.mark.parametrize(
    ("config", "is_mixture"),
    [
        (hf.Qwen3Config(), False),
        (hf.Qwen3MoeConfig(num_experts=8), True),
        (hf.MixtralConfig(num_local_experts=4), True),
        (hf.DeepseekV3Config(n_routed_experts=16), True),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_mixtures_of_experts_are_known_by_their_configuration(config, is_mixture: bool, tmp_path) -> None:
    config.save_pretrained(tmp_path)
    assert has_experts(str(tmp_path), "--model") == is_mixture
