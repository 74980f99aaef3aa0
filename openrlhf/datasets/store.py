"""Tokenised samples, held compactly."""

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from openrlhf.types import Sample


class SampleStore:
    """Samples in flat arrays: 5 bytes for each token."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Tokens of each sample."""
        self.dropped: Counter[str] = Counter()
        """Reason -> rows that gave no sample."""
        self.truncated = 0
        """Samples cut at max_len."""
        self._token_ids = array("i")
        self._action_mask = array("b")
        self._starts = [0]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Sample:
        i = range(len(self))[i]
        start, stop = self._starts[i], self._starts[i + 1]
        return Sample(
            token_ids=torch.from_numpy(np.array(self._token_ids[start:stop], dtype=np.int64)),
            action_mask=torch.from_numpy(np.array(self._action_mask[start:stop], dtype=np.bool_)),
        )

    def append(self, token_ids: Sequence[int], action_mask: Sequence[bool]) -> None:
        self._token_ids.extend(token_ids)
        self._action_mask.extend(action_mask)
        self._starts.append(len(self._token_ids))
        self.lengths.append(len(token_ids))
