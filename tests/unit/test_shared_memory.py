"""A trainer's buffer on the GPU that it shares with an engine is free once a sync has ended."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

from openrlhf.engine.vllm_transfer import CheckedIPC


class Model(nn.Module):
    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None: ...


@pytest.mark.parametrize("name", ["layer.weight", "layer.lora_A.weight"])
def test_what_was_mapped_is_let_go(monkeypatch, name: str) -> None:
    """Also where nothing but adapters came, whose updates vLLM's own part sees nothing of."""
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
