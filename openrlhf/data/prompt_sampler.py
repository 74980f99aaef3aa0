"""The prompts of a run and the order in which they are sampled."""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Self

from openrlhf.algorithms.curricula import Curriculum
from openrlhf.data.order import epoch_order
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.types import Image, Prompt, PromptGroup, not_none

ReadImages = Callable[[Prompt], tuple[Image, ...]]


class PromptDataset:
    """All prompts of a run. Only the names of images are held; indexing and iterating read the images
    themselves. Prompts may be parsed from disk on each access: then iterating over all of them is a pass over
    the rows."""

    def __init__(
        self, prompts: Sequence[Prompt], skipped: Mapping[str, int] | None = None, needed_len: int = 0
    ):
        """skipped: reason -> number of rows that gave no prompt. needed_len: the max_len that would keep the
        prompts that are only too long, 0 where there are none."""
        self._prompts = prompts
        self.skipped = Counter(skipped)
        self.needed_len = needed_len
        self.truncated = 0
        """Number of truncated prompts, always 0: prompts are not truncated."""
        self._read_images: ReadImages | None = None

    @classmethod
    def joined(cls, datasets: "Sequence[PromptDataset]") -> Self:
        """Concatenates datasets; the ids of their prompts must differ."""
        whole = cls([prompt for dataset in datasets for prompt in dataset.without_images])
        home = {prompt.prompt_id: dataset for dataset in datasets for prompt in dataset.without_images}
        if any(dataset._read_images for dataset in datasets):
            whole.read_images_with(lambda prompt: home[prompt.prompt_id]._whole(prompt).images)
        return whole

    def read_images_with(self, read: ReadImages) -> None:
        """Makes prompts carry the images that `read` returns, read anew on each access."""
        self._read_images = read

    @property
    def without_images(self) -> Sequence[Prompt]:
        """The prompts with only the names of their images; no image is read."""
        return self._prompts

    def _whole(self, prompt: Prompt) -> Prompt:
        return prompt if self._read_images is None else replace(prompt, images=self._read_images(prompt))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> Prompt:
        return self._whole(self._prompts[i])

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._whole, self._prompts)

    def fingerprint(self) -> int:
        """Returns a checksum that changes when a prompt, or the order of the prompts, does."""
        return self._checksums[0]

    def digest(self) -> str:
        """Returns the SHA-256 of everything that a run reads of its prompts, as hex."""
        return self._checksums[1]

    def num_repeated(self) -> int:
        """Returns the number of prompts whose text and images an earlier prompt has too."""
        return len(self) - self._checksums[2]

    def num_shared(self, other: "PromptDataset") -> int:
        """Returns the number of prompts of `other` whose text and images a prompt here has too."""
        wanted = [_content(prompt) for prompt in other.without_images]
        shared = set(wanted).intersection(map(_content, self._prompts))
        return sum(content in shared for content in wanted)

    @cached_property
    def _checksums(self) -> tuple[int, str, int]:
        """(CRC of all texts and names of images, SHA-256 of a JSON list of all prompts, number of different
        prompts)."""
        crc, sha, different = 0, hashlib.sha256(b"["), set()
        for i, p in enumerate(self._prompts):
            references = [image.reference for image in p.images]
            different.add(_content(p))
            for text in (p.text, *references):
                crc = zlib.crc32(text.encode(), crc)
            read = json.dumps([p.prompt_id, p.text, p.label, p.source, *references], default=repr)
            sha.update(f"{', ' if i else ''}{read}".encode())
        sha.update(b"]")
        return crc, sha.hexdigest(), len(different)


def _content(prompt: Prompt) -> int:
    return hash((prompt.text, *(image.reference for image in prompt.images)))


class PromptSampler:
    """Samples prompts, each once in an epoch, in an order that depends on the seed and the epoch alone.

    num_epochs None: endless.
    """

    shuffles = True

    def __init__(self, prompts: PromptDataset, *, seed: int, num_epochs: int | None = None):
        self._prompts = prompts
        self._seed = seed
        self._num_epochs = num_epochs
        self._start(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt."""
        return self._epoch

    @property
    def is_exhausted(self) -> bool:
        """True once the last epoch is over."""
        return self._epoch == self._num_epochs

    def order(self, epoch: int) -> list[int]:
        """Returns the indices of the prompts in the order of an epoch."""
        return epoch_order(len(self._prompts), seed=self._seed, epoch=epoch)

    def next_batch(self, n: int) -> list[Prompt]:
        """Returns the next n prompts. The last batch of an epoch holds its remaining prompts; after the last
        epoch: []."""
        if self.is_exhausted:
            return []
        chosen = self._order[self._position : self._position + n]
        batch = [replace(self._prompts[i], epoch=self._epoch) for i in chosen]
        if self._position + n < len(self._order):
            self._position += n
        else:
            self._start(self._epoch + 1, position=0)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            **_identity(self._prompts, self._seed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position that `state` holds. Raises UsageError when it was written with other
        prompts."""
        _check_same_prompts(state, self._prompts, self._seed)
        epoch = state["epoch"] if "epoch" in state else state["episode"]  # name of the key in version 1
        self._start(epoch, state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = self.order(epoch)


def _identity(prompts: PromptDataset, seed: int) -> dict[str, Any]:
    return {"seed": seed, "num_prompts": len(prompts), "fingerprint": prompts.fingerprint()}


def _check_same_prompts(state: Mapping[str, Any], prompts: PromptDataset, seed: int) -> None:
    for key, here in _identity(prompts, seed).items():
        if state[key] != here:
            raise UsageError(
                ErrorCode.OTHER_RUN,
                f"the checkpoint belongs to other prompts: {key} was {state[key]}, and is {here}.\n"
                "Resume with the same --data.prompt_dataset, templates and seed, or start a new run.",
            )


class Shuffled(Curriculum):
    """Chooses each prompt once in an epoch, in the order of `PromptSampler`."""

    position: int = field(init=False, default=0)
    order: list[int] = field(init=False, default_factory=list)
    """The order of the current epoch; empty: not known yet."""

    def choose(self) -> int:
        epoch, i = divmod(self.position, len(self.prompts))
        if not (i and self.order):
            self.order = epoch_order(len(self.prompts), seed=self.seed, epoch=epoch)
        self.position += 1
        return self.order[i]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], []


class PromptDraws:
    """Draws prompts without end: those of each task by its quota, in the order of a curriculum. The epoch of
    a prompt is the number of times that it was drawn before."""

    epoch, is_exhausted, shuffles = 0, False, False

    def __init__(
        self,
        prompts: PromptDataset,
        *,
        seed: int,
        batch_size: int,
        quotas: Mapping[str, int],
        build: Callable[[], Curriculum] = Shuffled,
    ) -> None:
        """`quotas`: number of prompts in a step, by source; empty: all are one task, of which a step has
        `batch_size`. `build`: builds a task's curriculum."""
        self._prompts, self._seed, self._by_source = prompts, seed, bool(quotas)
        self.quotas = quotas or {"": batch_size}
        self._curricula = {task: build() for task in self.quotas}
        self._numbers: dict[str, list[int]] = {task: [] for task in self.quotas}
        """Task -> the indices of its prompts."""
        self._places: dict[int, int] = {}
        """Prompt id -> index among the prompts of its task."""
        self._drawn: Counter[int] = Counter()
        for i, prompt in enumerate(prompts.without_images):
            self._places[prompt.prompt_id] = len(own := self._numbers[self.task(prompt)])
            own.append(i)
        for task, own in self._numbers.items():
            self._curricula[task].prompts = [prompts.without_images[i] for i in own]
            self._curricula[task].seed = seed

    def task(self, prompt: Prompt) -> str:
        return prompt.source if self._by_source else ""

    def next_batch(self, n: int, held: Counter[str]) -> list[Prompt]:
        """Returns the next n prompts. Each is of the task that is furthest from its quota, so that every
        `batch_size` prompts have the quotas. `held`: number of prompts of each task that were drawn and not
        trained on yet."""
        held, batch = held.copy(), []
        for _ in range(n):
            task = min(self.quotas, key=lambda task: held[task] / self.quotas[task])
            held[task] += 1
            i = self._numbers[task][self._curricula[task].choose()]
            batch.append(replace(self._prompts[i], epoch=self._drawn[i]))
            self._drawn[i] += 1
        return batch

    def of_step(self, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
        """Returns the first groups of each task, as many as its quota or fewer, task by task: filtering may
        have requested them in another order when samples arrived in another one."""
        by_task = {task: [g for g in groups if self.task(g.prompt) == task] for task in self.quotas}
        return [group for task, quota in self.quotas.items() for group in by_task[task][:quota]]

    def observe(self, groups: Sequence[PromptGroup]) -> None:
        """Tells the curricula the scores of groups."""
        for group in groups:
            scores = [not_none(t.score) for t in group.trajectories if t.ok and t.is_first]
            place = self._places[group.prompt.prompt_id]
            self._curricula[self.task(group.prompt)].observe(place, scores)

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawn": dict(self._drawn),
            "curricula": {task: own.state_dict() for task, own in self._curricula.items()},
            **_identity(self._prompts, self._seed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`. Raises UsageError when it was written with other
        prompts."""
        _check_same_prompts(state, self._prompts, self._seed)
        self._drawn = Counter(state["drawn"])
        for task, curriculum in self._curricula.items():
            curriculum.load_state_dict(state["curricula"][task])
