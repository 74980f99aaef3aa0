"""Recomputes the log-probs of sampled tokens on the CPU, with a model as it is or with one property
changed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.api import CHECKPOINT_COPY as COPY
from openrlhf.api import transformed_logits
from openrlhf.tools.doctor.mismatch import MismatchRow
from openrlhf.tools.reference.outputs import chosen, distribution

MOST_LOGITS = 10**8
"""Maximum number of logits that are in memory at a time."""


@dataclass(eq=False)
class Recomputed:
    """A model in float32 on the CPU, for recomputing log-probs."""

    model: Any
    path: str

    @classmethod
    def load(cls, path: str) -> "Recomputed":
        """Loads a model, or an adapter with its base model. Raises OSError or ValueError if there is none, or
        only a part of one."""
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        return cls(model.eval(), path)

    @torch.no_grad()
    def hidden(self, rows: Sequence[MismatchRow], token_ids: Sequence[np.ndarray] | None = None) -> Tensor:
        """Returns the inputs of the head from which the actions of all rows are predicted, (A, H). Sequences
        of equal length are one batch. `token_ids`: tokens to use instead of those of the rows, which must end
        with the same answers."""
        all_ids = token_ids or [row.token_ids for row in rows]
        found: dict[int, Tensor] = {}
        for length in {len(ids) for ids in all_ids}:
            members = [i for i, ids in enumerate(all_ids) if len(ids) == length]
            batch = torch.tensor(np.stack([all_ids[i] for i in members]))
            states = self.decoder(input_ids=batch).last_hidden_state
            for i, of_row in zip(members, states, strict=True):
                shift = length - len(rows[i].token_ids)
                found[i] = of_row[torch.tensor(rows[i].actions + shift - 1)]
        return torch.cat([found[i] for i in range(len(rows))])

    @property
    def decoder(self) -> nn.Module:
        return self.model.get_decoder()

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.transformed(self.head(hidden))

    def transformed(self, logits: Tensor) -> Tensor:
        """Applies the model's scale and softcap to the outputs of its head, (A, V)."""
        return transformed_logits(logits.float(), self.model.config)

    def all_logits(self, rows: Sequence[MismatchRow]) -> Tensor:
        return self.logits(self.hidden(rows))

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def frequencies(self) -> list[Any]:
        return [
            module for module in self.model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)
        ]

    @property
    def routers(self) -> list[Any]:
        return [m for m in self.model.modules() if hasattr(m, "top_k") and hasattr(m, "weight")]


def log_probs(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, nucleus: Tensor | None = None
) -> np.ndarray:
    """Returns the log-probs of the targets at a temperature, or at that of each, (A, 1): (A,). `nucleus`:
    mask of the tokens that they are normalised over, (A, V); None: all."""
    return chosen(distribution(logits, temperature, nucleus), targets).double().numpy()


def find_nucleus(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, top_p: float, top_k: int = -1
) -> Tensor:
    """Returns the mask of the tokens that remain after top-k and top-p, and of the targets, (A, V)."""
    ordered, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    if top_k > 0:
        ordered = ordered.clone()
        ordered[:, top_k:] = 0
        ordered /= ordered.sum(-1, keepdim=True)
    inside = (ordered.cumsum(-1) - ordered < top_p) & (ordered > 0)
    nucleus = torch.zeros_like(inside).scatter(1, order, inside)
    return nucleus.scatter(1, targets[:, None], True)


@contextmanager
def replaced(holders: Sequence[Any], name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Changes an attribute of each holder inside the block."""
    before = [getattr(holder, name) for holder in holders]
    for holder, value in zip(holders, before, strict=True):
        setattr(holder, name, change(value))
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            setattr(holder, name, value)


@contextmanager
def hooked(modules: Sequence[nn.Module], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:])) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tokenizer_at(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def find_checkpoints(folder: Path) -> dict[int, str]:
    """Returns step -> folder of the checkpoint's copy in Hugging Face format (--ckpt.save_hf)."""
    found = {}
    for path in folder.glob(f"*global_step*{COPY}"):
        number = path.name.rpartition("global_step")[2].removesuffix(COPY)
        if number.isdigit():
            found[int(number)] = str(path)
    return dict(sorted(found.items()))
