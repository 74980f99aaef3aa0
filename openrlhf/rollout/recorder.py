"""The engine that an episode is given: it passes requests on, and records what was asked and answered."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from openrlhf.agents.base import Engine
from openrlhf.data.pictures import encoded
from openrlhf.rollout.executors import EnvironmentFailed
from openrlhf.rollout.seeds import seed_at
from openrlhf.types import Image, KeptSets, Turn, present, unrouted

if TYPE_CHECKING:  # vLLM reads its environment, and takes seconds
    from PIL.Image import Image as Picture
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams


FREE = frozenset(
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
"""What an executor may change in its SamplingParams. Under any other field, also one that a later vLLM adds,
the recorded log-probs may be of another distribution than the one that training computes."""


class RecordingEngine:
    """One episode's view of an engine. Whatever an executor makes of the answers, `turns` is exact."""

    def __init__(
        self,
        engine: Engine,
        seed_address: tuple[int | str, ...],
        sampling_params: "SamplingParams",
        pictures: Sequence[tuple[Image, "Picture"]] = (),
        image_token_ids: tuple[int, ...] = (),
        max_kept_tokens: int = 0,
    ) -> None:
        """`seed_address`: of the first turn; the others have their number behind it. `sampling_params`: the
        run's own, which no executor has in its hands. `pictures`: those of the prompt, as an executor is
        handed them. `image_token_ids`: see `stand_ins`; none where the policy reads no images.
        `max_kept_tokens`: of a kept set that are recorded; 0 for none."""
        self._engine, self._address, self._given = engine, seed_address, sampling_params
        self._known = {id(picture): (image, picture) for image, picture in pictures}
        self._image_token_ids, self._max_kept_tokens = image_token_ids, max_kept_tokens
        self._answers: list[list[Turn]] = []  # of each request
        self._death: Exception | None = None

    @property
    def turns(self) -> list[Turn]:
        """In the order in which they were asked for. A request that was not answered is no turn."""
        return [turn for turns in self._answers for turn in turns]

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: "SamplingParams",
        multi_modal_data: dict | None = None,
    ) -> "RequestOutput":
        """One request. `sampling_params` stay as they are: the request has a copy with the seed of this turn,
        log-probs, and the stop tokens of training where it has none. ValueError where they change what is
        not `FREE`; EnvironmentFailed where the answer cannot be read as text."""
        self._check_params(sampling_params)
        turn = len(self._answers)
        seed = seed_at(*self._address, *((turn,) if turn else ()))
        params = self._of_request(sampling_params, seed)
        pictures = _pictures(multi_modal_data)
        self._check_placeholders(prompt_token_ids, len(pictures))
        images = tuple(self._image(picture) for picture in pictures)
        if multi_modal_data and pictures:
            multi_modal_data = {**multi_modal_data, "image": [picture.convert("RGB") for picture in pictures]}
        turns: list[Turn] = []
        self._answers.append(turns)
        try:
            output = await self._engine.generate(prompt_token_ids, params, multi_modal_data)
        except Exception as error:
            if _is_death(error):
                self._death = error
            raise
        # As the policy read it, with all tokens of its images.
        prompt_ids = np.asarray(output.prompt_token_ids if images else prompt_token_ids, np.int32)
        records_kept = self._num_kept(params) > 0
        turns += [
            _turn(prompt_ids, images, answer, seed + answer.index, records_kept) for answer in output.outputs
        ]
        self._check_answers(turns)
        return output

    def check_alive(self) -> None:
        """Raise the engine's death, if an executor has seen it."""
        if self._death is not None:
            raise self._death

    def _check_params(self, params: "SamplingParams") -> None:
        """ValueError where one that is not `FREE` is not the run's. None, 0 and an empty list all mean that a
        field is not used."""
        names = [name for name in params.__struct_fields__ if name not in FREE and name[0] != "_"]
        values = [(name, getattr(params, name), getattr(self._given, name)) for name in names]
        if changed := [each for each in values if (each[1] or None) != (each[2] or None)]:
            said = ", ".join(f"{name} {value!r} in place of {own!r}" for name, value, own in changed)
            raise ValueError(
                f"llm_engine.generate got sampling_params with {said}: training computes log-probs of "
                "another distribution.\nLeave it as execute was handed it; docs/agents.md says what an agent "
                "may change. The temperature of a whole run is --rollout.temperature, in evaluation "
                "--eval.temperature."
            )

    def _check_placeholders(self, token_ids: Sequence[int], num_images: int) -> None:
        """vLLM would leave what has no image as it is, and the trainer would look for one."""
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
        """The file that it was read from; of a picture that an executor made, one without loss."""
        if id(picture) not in self._known:
            self._known[id(picture)] = encoded(picture), picture
        return self._known[id(picture)][0]

    def _of_request(self, sampling_params: "SamplingParams", seed: int) -> "SamplingParams":
        from vllm.sampling_params import RequestOutputKind

        params = copy.copy(sampling_params)
        params.skip_clone = True  # vLLM need not copy it again
        params.seed = seed
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.stop_token_ids = params.stop_token_ids or self._given.stop_token_ids
        asked = params.logprobs or 0  # 0: that of the sampled token; -1: all
        params.logprobs = asked if asked < 0 else max(asked, self._num_kept(params))
        params.flat_logprobs = True  # half the time for each token, and it reads like a list
        return params

    def _num_kept(self, params: "SamplingParams") -> int:
        """How many of the most likely tokens show which ones sampling keeps: one more than top-k, so that a
        whole set ends with a token of probability 0. 0 where it keeps all."""
        if params.top_p == 1 and params.top_k < 1 and params.min_p == 0:
            return 0
        return min(self._max_kept_tokens, params.top_k + 1) if params.top_k > 0 else self._max_kept_tokens


def _is_death(error: Exception) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def _pictures(multi_modal_data: dict | None) -> "list[Picture]":
    """One or a list, as vLLM takes them."""
    found = (multi_modal_data or {}).get("image", [])
    return list(found) if isinstance(found, list | tuple) else [found]


def _turn(
    prompt_ids: np.ndarray,
    images: tuple[Image, ...],
    answer: "CompletionOutput",
    seed: int,
    records_kept: bool,
) -> Turn:
    action_ids = np.asarray(answer.token_ids, np.int32)
    log_probs = cast("FlatLogprobs", answer.logprobs)
    spans = [(int(span.version), span.end - span.start) for span in answer.weight_versions or ()]
    if not spans and len(action_ids):
        spans = [(0, len(action_ids))]
    return Turn(
        prompt_ids=prompt_ids,
        action_ids=action_ids,
        log_probs=_sampled_log_probs(log_probs),
        weight_versions=np.array(spans, np.int32).reshape(-1, 2),
        finish_reason=present(answer.finish_reason),
        seed=seed,
        kept=_kept_sets(log_probs) if records_kept else None,
        routing=_routing(answer.routed_experts, len(prompt_ids) + len(action_ids)),
        images=images,
    )


def _routing(of_read: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """Of all tokens, where vLLM knows it of those that it has read: all but the last one."""
    if of_read is None:
        return None
    of_read = of_read[: num_tokens - 1]
    return np.concatenate([of_read, unrouted(num_tokens - len(of_read), of_read)])


def _sampled_log_probs(log_probs: "FlatLogprobs") -> np.ndarray:
    """The sampled token stands before the likely ones."""
    values = np.asarray(log_probs.logprobs, np.float32)
    return values if len(values) == len(log_probs) else values[log_probs.start_indices]


def _kept_sets(log_probs: "FlatLogprobs") -> KeptSets:
    """Of each position, the tokens with a probability: the sampled one stands first, and once more where it
    is among the likely ones."""
    shape = len(log_probs), len(log_probs.token_ids) // max(1, len(log_probs))
    ids = np.asarray(log_probs.token_ids, np.int32).reshape(shape)
    values = np.asarray(log_probs.logprobs, np.float64).reshape(shape)
    possible = np.isfinite(values)
    is_whole = ~possible.all(axis=1)  # where one of the likely tokens has none, all that have one are here
    possible[:, 1:] &= ids[:, 1:] != ids[:, :1]
    shares = np.exp(values, out=np.zeros_like(values), where=possible).sum(axis=1)
    return KeptSets(
        ids=ids[possible],
        counts=possible.sum(axis=1, dtype=np.int32),
        log_masses=np.where(is_whole, 0, np.log(shares.clip(max=1))).astype(np.float32),
    )
