"""After a resume, random numbers continue where the checkpoint was written, on every rank."""

import random

import numpy as np
import torch

from openrlhf.checkpoint.random_state import load_random_state, save_random_state
from openrlhf.checkpoint.writer import CheckpointWriter


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_every_rank_goes_on_with_its_own_numbers(tmp_path):
    expected = []
    for rank in range(2):
        save_random_state(CheckpointWriter(tmp_path), rank, num_ranks=2)
        expected.append(draw())
    assert expected[0] != expected[1]
    for rank in (1, 0):
        load_random_state(tmp_path, rank, num_ranks=2)
        assert draw() == expected[rank]


def test_where_there_are_none_for_this_rank_it_is_told(tmp_path, caplog):
    load_random_state(tmp_path, 0, num_ranks=1)
    assert f"{tmp_path} was saved by a version without random states" in caplog.text
    caplog.clear()
    save_random_state(CheckpointWriter(tmp_path), 0, num_ranks=2)
    before = torch.get_rng_state()
    load_random_state(tmp_path, 0, num_ranks=1)
    assert "2 ranks" in caplog.text and torch.equal(torch.get_rng_state(), before)
