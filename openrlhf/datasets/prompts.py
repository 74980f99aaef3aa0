"""Prompts for RL and evaluation, and the order in which a run asks for them."""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.datasets.bad_rows import Policy, bad_row_error, read_rows, value_of
from openrlhf.datasets.order import epoch_order
from openrlhf.datasets.sources import Row, Rows
from openrlhf.datasets.templates import check_templates, render_prompt
from openrlhf.types import Prompt

logger = logging.getLogger(__name__)


class PromptDataset(Sequence[Prompt]):
    """All prompts of a run. `skipped` rows were left out by `--data.bad_rows skip`."""

    def __init__(self, prompts: Sequence[Prompt], skipped: int = 0):
        self._prompts = tuple(prompts)
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> Prompt:
        return self._prompts[i]

    def fingerprint(self) -> int:
        """Changes when a prompt, or the order of the prompts, does."""
        crc = 0
        for prompt in self._prompts:
            crc = zlib.crc32(prompt.text.encode(), crc)
        return crc


def build_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    label_key: str | None,
    apply_chat_template: bool,
    input_template: str | None,
    max_len: int,
    bad_rows: Policy = "error",
) -> PromptDataset:
    """One prompt of each row; its id is the number of the row, so ids stay the same when other rows are
    skipped.

    A row is bad when its prompt or label is missing or null, when the chat template refuses it, or when the
    prompt has more than max_len - 1 tokens, which leave no room for a response. The label keeps the type it
    has in the file.
    """
    check_templates(tokenizer, apply_chat_template=apply_chat_template, input_template=input_template)

    def read(row: Row) -> Prompt:
        value = value_of(row, input_key, str, list)
        text = render_prompt(
            value, tokenizer, apply_chat_template=apply_chat_template, input_template=input_template
        )
        label = "" if label_key is None else value_of(row, label_key)
        return Prompt(prompt_id=0, text=text, label=label, source=str(row.get("datasource") or "default"))

    read_prompts, skipped = read_rows(rows, read, bad_rows)
    prompts = []
    lengths = _token_counts([prompt.text for prompt in read_prompts.values()], tokenizer)
    for (i, prompt), length in zip(read_prompts.items(), lengths, strict=True):
        if 0 < length < max_len:
            prompts.append(replace(prompt, prompt_id=i))
            continue
        reason = (
            f"the prompt has {length} tokens; --data.max_len {max_len} leaves room for 1 to {max_len - 1}."
        )
        if bad_rows == "error":
            raise bad_row_error(rows.origin(i), reason)
        skipped += 1
    if skipped:
        logger.warning("%d of %d rows were skipped", skipped, len(rows))
    if not prompts:
        raise ValueError(f"All {len(rows)} prompts were skipped. The first is {rows.origin(0)}.")
    return PromptDataset(prompts, skipped)


class PromptSampler:
    """Hands out prompts, each once in an episode, in an order that depends on the seed and the episode alone.

    num_episodes None: for ever.
    """

    def __init__(
        self, prompts: PromptDataset, *, seed: int, num_episodes: int | None = None, shuffle: bool = True
    ):
        self._prompts = prompts
        self._seed = seed
        self._num_episodes = num_episodes
        self._shuffle = shuffle
        self._start(episode=0, position=0)

    @property
    def episode(self) -> int:
        """The episode of the next prompt."""
        return self._episode

    def next_batch(self, n: int) -> list[Prompt]:
        """The next n prompts. The last batch of an episode holds what is left of it; after the last episode:
        []."""
        if self._episode == self._num_episodes:
            return []
        chosen = self._order[self._position : self._position + n]
        batch = [replace(self._prompts[i], episode=self._episode) for i in chosen]
        if self._position + n < len(self._order):
            self._position += n
        else:
            self._start(self._episode + 1, position=0)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "episode": self._episode,
            "position": self._position,
            "seed": self._seed,
            "num_prompts": len(self._prompts),
            "fingerprint": self._prompts.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the sampler that wrote `state` would have. ValueError when it read other prompts."""
        here = self.state_dict()
        for key in ("seed", "num_prompts", "fingerprint"):
            if state[key] != here[key]:
                raise ValueError(
                    f"The checkpoint is of other prompts: {key} was {state[key]}, and is {here[key]}.\n"
                    "Resume with the same --data.prompt_dataset, templates and seed, or start a new run."
                )
        self._start(state["episode"], state["position"])

    def _start(self, episode: int, position: int) -> None:
        self._episode = episode
        self._position = position
        self._order = epoch_order(len(self._prompts), seed=self._seed, epoch=episode, shuffle=self._shuffle)


def _token_counts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    counts: list[int] = []
    for start in range(0, len(texts), 1000):  # the tokenizer works on one list of texts in parallel
        encoded = tokenizer(texts[start : start + 1000], add_special_tokens=False)["input_ids"]
        counts += [len(ids) for ids in encoded]
    return counts
