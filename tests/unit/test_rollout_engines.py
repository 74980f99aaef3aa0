"""The engine of transformers keeps the contract of engines; tests/e2e has vLLM's."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import engine_contract
import pytest
import torch
from engine_contract import with_engine

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
