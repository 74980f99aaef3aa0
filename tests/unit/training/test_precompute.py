"""Values of a frozen model on a whole dataset, which are computed once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.backends.distributed import ProcessMesh
from openrlhf.data.batches import MiniBatches
from openrlhf.data.store import SampleStore
from openrlhf.rows import PackedRow
from openrlhf.training.precompute import values_of_items

LENGTHS = (2, 5, 3, 7, 4)


class Model:
    """A model without weights."""

    def forward(self, rows: Sequence[PackedRow], read: Callable) -> list[Tensor]:
        return [read(self, row) for row in rows]


def lengths(model: Model, row: PackedRow) -> Tensor:
    of_items = torch.tensor(row.lengths[: row.num_sequences], dtype=torch.float32)
    return torch.stack([of_items, 10 * of_items], dim=1)


def test_ranks_compute_the_values_of_all_items_together(threads: Callable) -> None:
    dataset, model = SampleStore(), Model()
    for length in LENGTHS:
        dataset.append(range(length), [True] * length)

    def work() -> np.ndarray:
        mesh = ProcessMesh.joined()
        ranks: Any = {"data_rank": mesh.data_rank, "data_size": mesh.data}
        mini_batches = MiniBatches(dataset, PackedRow.of, batch_size=4, micro_batch_size=2, seed=0, **ranks)
        return values_of_items(model, mini_batches, lengths, len(dataset), mesh)

    for found in (*threads(1, work), *threads(2, work)):
        assert found.tolist() == [[n, 10 * n] for n in LENGTHS]
