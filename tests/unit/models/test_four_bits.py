"""Models in NF4 for inference equal models in float32 with the same quantised weights."""

import re
from functools import partial
from itertools import product

import pytest
import torch
from bitsandbytes import functional
from refusals import printed, refused
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf.config.commands import BATCH_INFERENCE, CHAT, SERVE_RM
from openrlhf.config.parse import parse
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.data.encode import Text
from openrlhf.errors import ErrorCode
from openrlhf.models.loading import load_causal_lm, load_generator
from openrlhf.models.nf4 import check_nf4, round_to_nf4
from openrlhf.models.scorer import load_scorer
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tools.serve.serve_rm import load
from openrlhf.training.models import load_language_model

TEXTS = [Text(text=text) for text in ("1+2=3", "2+2=5", "<|user|>Tom has 3 apples.<|end|>")]
HIDDEN = 64
ROUNDING = HIDDEN * 2.0**-24
"""Relative error of a float32 sum of as many products as a layer adds."""
LAYERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_chat_model(tmp_path_factory.mktemp("lm"), hidden_size=HIDDEN, num_layers=2))


@pytest.fixture(scope="module")
def reward_model(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rm")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    load_scorer(
        folder, flag="--model", dtype="fp32", attention="auto", tokenizer=tokenizer
    ).model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def read_back(packed: PreTrainedModel, plain: PreTrainedModel) -> int:
    """Gives `plain` the weights of `packed`; returns the number of its layers in four bits."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    count = 0
    for name, module in packed.named_modules():
        if isinstance(module, Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            target = plain.get_submodule(name)
            assert isinstance(target, nn.Linear) and weight.shape == target.weight.shape
            assert 0 < (weight - target.weight).abs().max() < 0.2 * target.weight.abs().max()
            target.weight.data.copy_(weight)
            count += 1
    return count


def dequantized(packed: torch.Tensor, state: functional.QuantState) -> torch.Tensor:
    """Returns the weights of packed ones: two codes in a byte, the first in its upper half."""
    absmax, numel = state.absmax, state.shape.numel()
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    pairs = packed.flatten()
    codes = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[:numel].long()
    scales = absmax.float().repeat_interleave(state.blocksize)[:numel]
    return (state.code.float()[codes] * scales).view(state.shape).to(state.dtype)


@pytest.mark.parametrize("dtype", [(), ("--ds.param_dtype", "fp32")])
def test_a_served_reward_model(reward_model: str, dtype: tuple[str, ...]) -> None:
    """The dtype of its files is used too, where the flag names none."""
    flags = ["--reward.model_name_or_path", reward_model, "--data.max_len", "64", *dtype]
    packed, plain = (load(parse(SERVE_RM, [*flags, *more]).config) for more in (["--ds.load_in_4bit"], []))
    whole = [result.score for result in plain(TEXTS)]
    assert read_back(packed.model.model, plain.model.model) == 2 * 7
    expected = [result.score for result in plain(TEXTS)]
    scale = packed.model.model.score.weight.norm().item() * HIDDEN**0.5
    assert [r.score for r in packed(TEXTS)] == pytest.approx(expected, abs=LAYERS * ROUNDING * scale)
    assert whole != pytest.approx(expected, abs=LAYERS * ROUNDING * scale)


def test_a_model_that_answers(folder: str) -> None:
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto", "max_len": 64}
    packed = load_generator(folder, **options, in_4bit=True).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tiny_tokenizer()("Tom has 3 apples.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = plain(ids).logits
        assert read_back(packed, plain) == 2 * 7
        expected, found = plain(ids).logits, packed(ids).logits
    atol = LAYERS * ROUNDING * expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    assert (whole - expected).abs().max() > 100 * atol


def test_a_policy_whose_adapters_are_trained(folder: str) -> None:
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto"}
    config = SFTConfig(ds=DeepSpeedConfig(param_dtype="fp32"))
    ours = partial(load_language_model, config, folder, "--model")
    loaders = partial(load_causal_lm, folder, **options), ours
    for load_it, (in_4bit, layers) in product(loaders, ((True, 2 * 7), (False, 0))):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert read_back(load_it(in_4bit=in_4bit), plain) == layers


GENERATE = ["--model.model_name_or_path", "org/m", "--data.dataset", "org/d", "--output_path", "o.jsonl"]
CHATS = ["--model.model_name_or_path", "org/m"]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (CHAT, [*CHATS, "--rollout.engine", "vllm"]),
        (BATCH_INFERENCE, [*GENERATE, "--task", "generate_vllm"]),
        (BATCH_INFERENCE, [*GENERATE, "--task", "generate", "--rollout.engine", "vllm"]),
    ],
)
def test_vllm_has_no_such_weights(command, flags: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        parse(command, [*flags, "--ds.load_in_4bit"])
    (refusal,) = printed(capsys.readouterr().err)
    assert (refusal.code, refusal.place) == ("unsupported", "--ds.load_in_4bit")
    assert "--rollout.engine transformers" in refusal.text


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (CHAT, CHATS),
        (BATCH_INFERENCE, [*GENERATE, "--task", "generate"]),
        (BATCH_INFERENCE, [*GENERATE, "--task", "rm"]),
        (SERVE_RM, ["--reward.model_name_or_path", "org/m"]),
    ],
)
def test_its_package_must_be_there(command, flags: list[str], monkeypatch, capsys) -> None:
    assert parse(command, [*flags, "--ds.load_in_4bit"]).config.ds.load_in_4bit
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(command, [*flags, "--ds.load_in_4bit"])
    assert 'pip install "openrlhf[qlora]"' in capsys.readouterr().err


CODE = [
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
]
"""The values that the paper lists."""


def test_our_own_nf4() -> None:
    """Two blocks with other scales, and one that is not full."""
    weight = torch.tensor([*CODE, *(3 * value for value in CODE), 0.5, -0.1])
    assert torch.allclose(
        round_to_nf4(weight, 16), torch.tensor([*CODE, *(3 * v for v in CODE), 0.5, -0.5 * 0.18477343])
    )
    middle = torch.tensor([1.0, 0.5, 0.51])  # 0.5 is nearer to 0.4407, and 0.51 to 0.5626
    assert round_to_nf4(middle, 64).tolist() == pytest.approx([1.0, CODE[12], CODE[13]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_wrong_weights_of_bitsandbytes_are_refused_by_size(monkeypatch, dtype, nested, damaged):
    """The fault is that of a kernel for AVX-512: where rows have half a block more than whole ones, it takes
    the scale of the block before for some weights."""
    sizes = (32, 96, 160, 64, 128, 192, 200, 256)
    model = nn.Module()
    for size in sizes:
        packed, state = functional.quantize_4bit(
            torch.randn(48, size).to(dtype), blocksize=64, quant_type="nf4", compress_statistics=nested
        )
        layer = nn.Parameter(packed, requires_grad=False)
        vars(layer)["quant_state"] = state
        model.register_parameter(f"of_{size}", layer)
    real = functional.dequantize_4bit

    def faulty(packed: torch.Tensor, state: functional.QuantState) -> torch.Tensor:
        found = real(packed, state)
        if state.shape[-1] % 64 == 32:
            found[1::2, -32:] = found[::2, -32:]
        return found

    if not damaged:
        monkeypatch.setattr(functional, "dequantize_4bit", dequantized)  # whatever kernel this machine has
        check_nf4(model)
        return
    monkeypatch.setattr(functional, "dequantize_4bit", faulty)
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.load_in_4bit") as refusal:
        check_nf4(model)
    named = {int(size) for size in re.findall(r"(\d+) inputs", refusal.value.text)}
    assert named == {32, 96, 160}


def test_a_model_in_four_bits_is_checked_when_it_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(functional, "dequantize_4bit", lambda packed, state: torch.zeros(state.shape))
    for load_it in (load_causal_lm, load_generator):
        with refused(ErrorCode.UNSUPPORTED, flag="--ds.load_in_4bit"):
            load_it(folder, flag="--model", dtype="fp32", attention="auto", max_len=64, in_4bit=True)
