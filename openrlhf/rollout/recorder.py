"""Records an episode's requests to its engine, and the answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.agents.base import Engine
from openrlhf.backends.rollout import EngineDied
from openrlhf.completions import Completion, Completions, SamplingParams
from openrlhf.data.pictures import encoded
from openrlhf.rollout.executors import EnvironmentFailed
from openrlhf.rollout.seeds import seed_at
from openrlhf.types import Image, Turn, present

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

CHANGEABLE = frozenset(
    {
        *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("repetition_detection", "n", "seed"),
        *("top_p", "top_k", "min_p"),  # what they keep is recorded
        *("logprobs", "flat_logprobs"),
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_text_buffer_length"),
        *("output_kind", "stream_interval", "skip_clone", "skip_reading_prefix_cache"),
    }
)
"""Sampling parameters that an executor may change, including options of a single engine. Under any other,
also one that a later vLLM adds, recorded log-probs may belong to another distribution than the one that
training computes."""


class RecordingEngine:
    """Wraps the engine for one episode. `turns` is exact whatever the executor does with the answers."""

    def __init__(
        self,
        engine: Engine,
        seed_address: tuple[int | str, ...],
        sampling_params: SamplingParams,
        pictures: Sequence[tuple[Image, "Picture"]] = (),
        image_token_ids: tuple[int, ...] = (),
        max_kept_tokens: int = 0,
    ) -> None:
        """`seed_address`: address of the first turn's seed; later turns append their number.
        `sampling_params`: the run's own, which no executor can change. `pictures`: the prompt's images as an
        executor receives them. `image_token_ids`: see `stand_ins`; none where the policy reads no images.
        `max_kept_tokens`: recorded tokens of a top-p/top-k support; 0 for none."""
        self._engine, self._address, self._given = engine, seed_address, sampling_params
        self._known = {id(picture): (image, picture) for image, picture in pictures}
        self._image_token_ids, self._max_kept_tokens = image_token_ids, max_kept_tokens
        self._answers: list[list[Turn]] = []  # of each request
        self._death: EngineDied | None = None

    @property
    def turns(self) -> list[Turn]:
        """Turns in the order of their requests. A request without an answer is no turn."""
        return [turn for turns in self._answers for turn in turns]

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: Any,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """Sends one request. `sampling_params`, of this package or of vLLM, are not modified: the request has
        a copy with the seed of this turn, log-probs, and training's stop tokens where it has none. Raises
        ValueError where a parameter outside of `CHANGEABLE` has changed; EnvironmentFailed where the answer
        has image placeholders."""
        params = self._checked(SamplingParams.of(sampling_params))
        turn = len(self._answers)
        params.seed = seed = seed_at(*self._address, *((turn,) if turn else ()))
        params.stop_token_ids = params.stop_token_ids or self._given.stop_token_ids
        params.logprobs = params.logprobs or 0  # 0: that of the sampled token; -1: all
        params.max_kept_tokens = self._max_kept_tokens if params.is_truncated else 0
        pictures = _pictures(multi_modal_data)
        self._check_placeholders(prompt_token_ids, len(pictures))
        images = tuple(self._image(picture) for picture in pictures)
        if multi_modal_data and pictures:
            multi_modal_data = {**multi_modal_data, "image": [picture.convert("RGB") for picture in pictures]}
        turns: list[Turn] = []
        self._answers.append(turns)
        try:
            output = await self._engine.generate(prompt_token_ids, params, multi_modal_data)
        except EngineDied as error:
            self._death = error
            raise
        # As the policy read it, with all tokens of its images.
        prompt_ids = np.asarray(output.prompt_token_ids if images else prompt_token_ids, np.int32)
        turns += [_turn(prompt_ids, images, answer, seed) for answer in output.outputs]
        self._check_answers(turns)
        return output

    def check_alive(self) -> None:
        """Raises the engine's death if an executor has seen it."""
        if self._death is not None:
            raise self._death

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Returns the run's parameters, updated with those of `params` in `CHANGEABLE`. Raises ValueError
        where others differ from the run's: None, 0 and an empty list all mean that a field is unused."""
        asked, own, changed = SamplingParams(), vars(self._given), []
        vars(asked).update(own)
        for name, value in vars(params).items():
            if name in CHANGEABLE:
                setattr(asked, name, value)
            elif (value or None) != (own.get(name) or None):
                changed.append((name, value, own.get(name)))
        if changed:
            said = ", ".join(f"{name} {value!r} in place of {own!r}" for name, value, own in changed)
            raise ValueError(
                f"llm_engine.generate got sampling_params with {said}: training computes log-probs of "
                "another distribution.\nLeave it as execute was handed it; docs/agents.md says what an agent "
                "may change. The temperature of a whole run is --rollout.temperature, in evaluation "
                "--eval.temperature."
            )
        return asked

    def _check_placeholders(self, token_ids: Sequence[int], num_images: int) -> None:
        """Raises ValueError unless there is one image for each placeholder: vLLM would ignore a surplus
        placeholder, and the trainer would look for its image."""
        if not self._image_token_ids:
            return
        if (found := list(token_ids).count(self._image_token_ids[0])) != num_images:
            raise ValueError(
                f"llm_engine.generate got {found} tokens that stand for an image, and {num_images} images. "
                "Each image has one, and multi_modal_data has all of the prompt's and of feedback's."
            )

    def _check_answers(self, turns: Sequence[Turn]) -> None:
        if any(token_id in turn.action_ids for token_id in self._image_token_ids for turn in turns):
            raise EnvironmentFailed(
                "the policy answered with a token that stands for an image, a video or sound: whoever reads "
                "it looks for one"
            )

    def _image(self, picture: "Picture") -> Image:
        """Returns the file that the picture was read from, or a lossless encoding of an executor's own
        picture."""
        if id(picture) not in self._known:
            self._known[id(picture)] = encoded(picture), picture
        return self._known[id(picture)][0]


def _pictures(multi_modal_data: dict | None) -> "list[Picture]":
    """Returns the list of pictures; vLLM accepts one or a list."""
    found = (multi_modal_data or {}).get("image", [])
    return list(found) if isinstance(found, list | tuple) else [found]


def _turn(prompt_ids: np.ndarray, images: tuple[Image, ...], answer: Completion, seed: int) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        action_ids=np.asarray(answer.token_ids, np.int32),
        log_probs=present(answer.log_probs),
        weight_versions=answer.versions,
        finish_reason=answer.finish_reason,
        seed=seed + answer.index,
        kept=answer.kept,
        routing=answer.routing,
        images=images,
    )
