"""A trainer's buffer on the GPU that it shares with an engine: who can open it, and when it is freed."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from vllm.device_allocator import alloc_conf
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

from openrlhf.backends.vllm.gpu_transfers import Shareable
from openrlhf.backends.vllm.weight_receiver import CheckedIPC
from openrlhf.backends.weight_sync.client import EnginesFailedError


class Model(nn.Module):
    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None: ...


@pytest.mark.parametrize("name", ["layer.weight", "layer.lora_A.weight"])
def test_what_was_mapped_is_let_go(monkeypatch, name: str) -> None:
    """A sync of adapters alone is covered too, whose updates vLLM's own part does not see."""
    mapped = []

    def rebuild(*_) -> Tensor:
        buffer = torch.arange(64, dtype=torch.uint8)
        mapped.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU"))
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = CheckedIPC(None, config, torch.device("cuda", 0), Model())
    engine.packed = True
    chunk = {"names": [name], "dtype_names": ["uint8"], "shapes": [[64]], "tensor_sizes": [64]}
    for _ in range(2):
        engine.start_weight_update()
        for _ in range(2):
            engine.receive_weights(IPCWeightTransferUpdateInfo(**chunk, ipc_handles={"GPU": (0,) * 7}))
        assert mapped[-1]() is not None
        engine.finish_weight_update()
        assert mapped[-1]() is None
    assert len(mapped) == 2
    assert all(kept.tolist() == list(range(64)) for kept in engine.adapter.values())


@pytest.mark.parametrize(
    ("variable", "asked", "inside"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments:False"),
        (
            "PYTORCH_ALLOC_CONF",
            "max_split_size_mb:512,expandable_segments:True",
            "max_split_size_mb:512,expandable_segments:False",
        ),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_is_not_of_expandable_segments(monkeypatch, variable, asked, inside, fails):
    """An engine could open the handle of such a segment only where it may trace the trainer. The
    setting is restored afterwards."""
    for name in alloc_conf.ALLOC_CONF_ENV_VARS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, asked)
    did: list[str] = []

    class Transfer:
        def send_weights(self) -> None:
            did.append("sent")
            if fails:
                raise EnginesFailedError(1, {0: "gone"}, 1)

    monkeypatch.setattr(alloc_conf, "set_alloc_conf", did.append)
    with pytest.raises(EnginesFailedError) if fails else nullcontext():
        Shareable(Transfer()).send_weights()
    assert did == (["sent"] if inside is None else [inside, "sent", asked])
