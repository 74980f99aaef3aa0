"""The engine of transformers satisfies the contract of engines; tests/e2e has vLLM's."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import engine_contract
import pytest
import torch
from engine_contract import options_of, with_engine
from refusals import refused

from openrlhf.backends.transformers.engine import TransformersEngine
from openrlhf.completions import SamplingParams
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check: Callable, model: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        asyncio.run(with_engine("transformers", str(model), check))
    finally:
        torch.set_num_threads(threads)


def test_weights_that_a_sync_does_not_send_stay(model: Path) -> None:
    async def update(setting: engine_contract.Setting) -> None:
        before = {name: t.clone() for name, t in setting.engine.model.state_dict().items()}
        sent = "model.norm.weight"
        await setting.engine.start_weight_update()
        await engine_contract.send(setting.engine, sent, 2 * before[sent])
        await setting.engine.finish_weight_update("1")
        for name, tensor in setting.engine.model.state_dict().items():
            assert torch.equal(tensor, before[name] * (2 if name == sent else 1)), name
        assert sent not in await setting.engine.unwritten_parameters()

    asyncio.run(with_engine("transformers", str(model), update))


def test_options_that_the_engine_lacks_are_refused(model: Path) -> None:
    options = options_of("transformers", model)
    engine = {"flag": "--rollout.engine", "value": "transformers"}
    with refused(ErrorCode.UNSUPPORTED, **engine, told=("several workers", "routing of experts")):
        TransformersEngine(replace(options, tensor_parallel_size=2, returns_routing=True))
    params = SamplingParams(presence_penalty=0.5)
    params.stream_interval = 2  # an option of vLLM alone
    with refused(ErrorCode.UNSUPPORTED, **engine, told="presence_penalty, stream_interval"):
        asyncio.run(TransformersEngine(options).generate([1], params))


def test_flags_that_it_cannot_serve() -> None:
    flags = (
        "--actor.model_name_or_path org/model --data.prompt_dataset org/rows "
        "--reward.remote_url http://host/r --rollout.engine transformers"
    )
    assert parse(PPO, flags.split()).config.rollout.engine == "transformers"
    with pytest.raises(SystemExit):
        parse(PPO, [*flags.split(), "--vllm.tensor_parallel_size", "2"])
