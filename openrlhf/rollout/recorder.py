"""Records an episode's requests to its engine, and the answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.agents.base import Engine
from openrlhf.backends.rollout import EngineDied
from openrlhf.completions import Completion, Completions, SamplingParams
from openrlhf.data.pictures import encoded
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rollout.executors import EnvironmentFailed
from openrlhf.rollout.seeds import seed_at
from openrlhf.types import Image, Turn, not_none

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

CHANGEABLE = frozenset(
    {
        *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("repetition_detection", "n", "seed"),
        *("top_p", "top_k", "min_p"),  # the resulting support is recorded
        *("logprobs", "flat_logprobs"),
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_text_buffer_length"),
        *("output_kind", "stream_interval", "skip_clone", "skip_reading_prefix_cache"),
    }
)
"""Sampling parameters that an executor may change, for all engines. Any other parameter, including those that
later versions of vLLM add, could make the sampling distribution differ from the one that training
computes."""


class RecordingEngine:
    """Wraps the engine for one episode and records its turns. `turns` is exact whatever the executor does
    with the answers."""

    def __init__(
        self,
        engine: Engine,
        seed_address: tuple[int | str, ...],
        sampling_params: SamplingParams,
        pictures: Sequence[tuple[Image, "Picture"]] = (),
        image_token_ids: tuple[int, ...] = (),
        max_kept_tokens: int = 0,
        num_likely: int = 0,
    ) -> None:
        """`seed_address`: address of the first turn's seed; later turns append their index.
        `sampling_params`: the run's parameters. `pictures`: the prompt's images as the executor receives
        them. `image_token_ids`: tokens that stand for images, see `text.image_placeholder_ids`; empty if the
        policy reads no images. `max_kept_tokens`: maximum number of recorded tokens of a top-p/top-k nucleus;
        0: none. `num_likely`: number of recorded most likely tokens of each action."""
        self._engine, self._address, self._given = engine, seed_address, sampling_params
        self._known = {id(picture): (image, picture) for image, picture in pictures}
        self._image_token_ids, self._max_kept_tokens = image_token_ids, max_kept_tokens
        self._num_likely = num_likely
        self._answers: list[list[Turn]] = []  # for each request
        self._death: EngineDied | None = None

    @property
    def turns(self) -> list[Turn]:
        """Turns in the order of their requests. Requests without an answer have no turn."""
        return [turn for turns in self._answers for turn in turns]

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: Any,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """Sends one request. `sampling_params`, of this package or of vLLM, are copied; the copy gets the
        seed of this turn, log-probs, and the run's stop tokens if it has none. Raises UsageError if a
        parameter outside `CHANGEABLE` differs from the run's or the prompt is empty, and EnvironmentFailed if
        the answer has image placeholders."""
        if not len(prompt_token_ids):
            text = "llm_engine.generate got no prompt tokens, and nothing predicts the first token of a text"
            raise UsageError(ErrorCode.USER_CODE, f"{text}.\nWas an observation or a prompt empty?")
        params = self._merged_params(SamplingParams.of(sampling_params))
        turn = len(self._answers)
        params.seed = seed = seed_at(*self._address, *((turn,) if turn else ()))
        params.stop_token_ids = params.stop_token_ids or self._given.stop_token_ids
        params.logprobs = params.logprobs or 0  # 0: of the sampled token; -1: of all tokens
        params.max_kept_tokens = self._max_kept_tokens if params.is_truncated else 0
        params.num_likely = self._num_likely
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
        # The engine's prompt_token_ids have all placeholders of each image.
        prompt_ids = np.asarray(output.prompt_token_ids if images else prompt_token_ids, np.int32)
        turns += [_turn(prompt_ids, images, answer, seed) for answer in output.outputs]
        self._check_answers(turns)
        return output

    def check_alive(self) -> None:
        """Raises EngineDied if a request met it, even if the executor caught it."""
        if self._death is not None:
            raise self._death

    def _merged_params(self, params: SamplingParams) -> SamplingParams:
        """Returns the run's parameters, updated with the `CHANGEABLE` ones of `params`. Raises UsageError if
        another one differs from the run's. None, 0 and an empty list are equal: they mean that a parameter is
        unused."""
        asked, own, changed = SamplingParams(), vars(self._given), []
        vars(asked).update(own)
        for name, value in vars(params).items():
            if name in CHANGEABLE:
                setattr(asked, name, value)
            elif (value or None) != (own.get(name) or None):
                changed.append((name, value, own.get(name)))
        if changed:
            said = ", ".join(f"{name} {value!r} in place of {own!r}" for name, value, own in changed)
            raise UsageError(
                ErrorCode.USER_CODE,
                f"llm_engine.generate got sampling_params with {said}: training computes log-probs of "
                "another distribution.\nUse the value that execute received; docs/agents.md lists what an "
                "agent may change. Set the temperature of a whole run with --rollout.temperature, of "
                "evaluation with --eval.temperature.",
            )
        return asked

    def _check_placeholders(self, token_ids: Sequence[int], num_images: int) -> None:
        """Raises UsageError unless there is one image for each placeholder. vLLM would ignore a surplus
        placeholder, but the trainer would look for its image."""
        if not self._image_token_ids:
            return
        if (found := list(token_ids).count(self._image_token_ids[0])) != num_images:
            raise UsageError(
                ErrorCode.USER_CODE,
                f"llm_engine.generate got {found} image placeholder tokens and {num_images} images. The "
                "prompt needs one placeholder for each image, and multi_modal_data all images of prompt and "
                "feedback.",
            )

    def _check_answers(self, turns: Sequence[Turn]) -> None:
        if any(token_id in turn.action_ids for token_id in self._image_token_ids for turn in turns):
            raise EnvironmentFailed(
                "the policy sampled a placeholder token of an image, a video or sound, for which there is no "
                "data"
            )

    def _image(self, picture: "Picture") -> Image:
        """Returns the file that the picture was read from. A picture that the executor created is encoded
        without loss."""
        if id(picture) not in self._known:
            self._known[id(picture)] = encoded(picture), picture
        return self._known[id(picture)][0]


def _pictures(multi_modal_data: dict | None) -> "list[Picture]":
    """Returns the pictures as a list. Like vLLM, accepts a single picture or a list."""
    found = (multi_modal_data or {}).get("image", [])
    return list(found) if isinstance(found, list | tuple) else [found]


def _turn(prompt_ids: np.ndarray, images: tuple[Image, ...], answer: Completion, seed: int) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        action_ids=np.asarray(answer.token_ids, np.int32),
        log_probs=not_none(answer.log_probs),
        weight_versions=answer.versions,
        finish_reason=answer.finish_reason,
        seed=seed + answer.index,
        kept=answer.kept,
        likely=answer.likely,
        routing=answer.routing,
        images=images,
    )
