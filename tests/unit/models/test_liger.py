"""Liger's exchange of kernels, without its kernels, which need a GPU: a stand-in for the package does to a
model what `liger_kernel.transformers.monkey_patch` does."""

import sys
from collections.abc import Callable
from types import MethodType, ModuleType

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from refusals import refused
from test_policy import SHAPE
from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3

from openrlhf.errors import ErrorCode
from openrlhf.models import liger, loading, self_check
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.liger import apply_liger, transformers_kernels
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.self_check import resolve_row_layout, why_not_liger
from openrlhf.rows import PackedRow, Sample

IDS = torch.tensor([5, 17, 9, 33, 21, 40])


def own(name: str) -> Callable:
    """Makes a function that names the package as its module."""

    def mark(function: Callable) -> Callable:
        function.__module__ = f"liger_kernel.{name}"
        return function

    return mark


@own("transformers.rms_norm")
def rms_norm(self, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


@own("transformers.swiglu")
def swiglu(self, x: Tensor) -> Tensor:
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@own("transformers.rope")
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@own("transformers.rope")
def no_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q, k


@pytest.fixture
def package(monkeypatch):
    """Installs liger-kernel with these positions on a machine with a GPU. Returns the calls that it
    received."""
    for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm"):
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))
    monkeypatch.setattr(liger, "_own_functions", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: dict[str, bool] = {}

    def provide(positions: Callable | None) -> dict:
        def apply(model: nn.Module, **options: bool) -> None:
            asked.update(options)
            if positions is None:
                return  # "There are currently no Liger kernels supported for model type"
            modeling_qwen3.apply_rotary_pos_emb = positions
            modeling_qwen3.Qwen3RMSNorm = type("LigerRMSNorm", (nn.Module,), {})
            for module in model.modules():
                if isinstance(module, modeling_qwen3.Qwen3MLP):
                    bind(module, swiglu, "LigerSwiGLUMLP")
                elif type(module).__name__ == "Qwen3RMSNorm":
                    bind(module, rms_norm, "LigerRMSNorm")

        file = ModuleType("liger_kernel.transformers")
        file._apply_liger_kernel_to_instance = apply
        monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers", file)
        return asked

    return provide


def bind(module: nn.Module, forward: Callable, name: str) -> None:
    module.__dict__["forward"] = MethodType(forward, module)
    module.__dict__["_get_name"] = lambda: name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**SHAPE)).save_pretrained(path)
    return str(path)


@pytest.fixture
def model(folder: str):
    return load_causal_lm(folder, flag="--model", dtype="fp32", attention="auto").eval()


@torch.no_grad()
def log_probs(model) -> Tensor:
    mask = torch.arange(len(IDS)) > 0
    return PolicyModel(model)(PackedRow.of([Sample(token_ids=IDS, action_mask=mask)])).log_probs


def test_kernels_are_exchanged_and_put_back(package, model, monkeypatch) -> None:
    before, norm_class = log_probs(model), modeling_qwen3.Qwen3RMSNorm
    options = package(rope)
    apply_liger(model)
    # the head is the package's own
    assert options == {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert modeling_qwen3.Qwen3RMSNorm is norm_class  # the norm that later models of the process use

    calls = []

    def record(name: str, function: Callable) -> Callable:
        return lambda *x: calls.append(name) or function(*x)

    for name in ("rms_norm", "silu"):
        monkeypatch.setattr(F, name, record(name, getattr(F, name)))
    torch.testing.assert_close(log_probs(model), before)
    assert set(calls) == {"rms_norm", "silu"}
    assert modeling_qwen3.apply_rotary_pos_emb is rope
    calls.clear()
    with transformers_kernels(model):
        assert torch.equal(log_probs(model), before)
        assert modeling_qwen3.apply_rotary_pos_emb is not rope
    assert "rms_norm" not in calls
    log_probs(model)
    assert "rms_norm" in calls and modeling_qwen3.apply_rotary_pos_emb is rope


def test_transformers_kernels_of_a_model_without_others(model) -> None:
    names = dict(vars(modeling_qwen3))
    with transformers_kernels(model):
        assert vars(modeling_qwen3) == names


def test_a_second_model_of_the_architecture_knows_transformers_functions_too(package, model, folder) -> None:
    """The second model is a teacher, or the reference of DPO."""
    own_rope = modeling_qwen3.apply_rotary_pos_emb
    package(rope)
    apply_liger(model)
    second = load_causal_lm(folder, flag="--model", dtype="fp32", attention="auto")
    apply_liger(second)
    with transformers_kernels(second):
        assert modeling_qwen3.apply_rotary_pos_emb is own_rope


def test_kernels_that_compute_something_else_are_refused(package, model, monkeypatch) -> None:
    monkeypatch.setattr(self_check, "version", lambda name: "1")
    ask = torch.no_grad()(lambda question: question())
    package(rope)
    apply_liger(model)
    assert why_not_liger(ask, model) == ""
    package(no_rope)
    apply_liger(model)
    get_row_layout(model).liger = True
    policy = PolicyModel(model)
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.use_liger_kernel"):
        resolve_row_layout(policy, policy)


def test_an_architecture_without_kernels_is_refused(package, model) -> None:
    package(None)
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.use_liger_kernel", told="Qwen3ForCausalLM"):
        apply_liger(model)


def test_an_activation_without_kernel_is_refused(package) -> None:
    """Liger's MLP takes the place of any, and computes SiLU."""
    package(rope)
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**SHAPE, hidden_act="relu"))
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.use_liger_kernel", told="ReLU"):
        apply_liger(model)


def test_kernels_without_a_gpu_are_refused(model, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(ErrorCode.RESOURCES, flag="--ds.use_liger_kernel"):
        apply_liger(model)


def test_the_flag_reaches_the_model(folder, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(loading, "apply_liger", seen.append)
    model = load_causal_lm(folder, flag="--model", dtype="fp32", attention="auto", liger=True)
    assert seen == [model] and get_row_layout(model).liger
