"""The engine of an episode: what it passes on, and what it records."""

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
from fake_engine import Engine
from PIL import Image as PILImage
from vllm import SamplingParams as VLLMParams
from vllm.outputs import WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from openrlhf.backends.rollout import EngineDied
from openrlhf.completions import SamplingParams
from openrlhf.data.pictures import decoded, encoded
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rollout.executors import EnvironmentFailed
from openrlhf.rollout.recorder import CHANGEABLE, RecordingEngine
from openrlhf.rollout.seeds import seed_at

ADDRESS = (42, "train", 0, 7, 3)
GIVEN = SamplingParams(temperature=0.7, top_p=0.9, stop_token_ids=[2])


def recording(engine) -> RecordingEngine:
    return RecordingEngine(engine, ADDRESS, GIVEN)


def asked_with(**changes: Any) -> VLLMParams:
    """Returns the sampling parameters of an executor, with some changes."""
    return VLLMParams(**{"temperature": 0.7, **changes})


def test_a_turn_is_what_was_asked_and_answered() -> None:
    spans = [WeightVersionSpan("4", start=0, end=1), WeightVersionSpan("6", start=1, end=3)]
    engine = recording(Engine([5, 6, 2], spans=spans))
    output = asyncio.run(engine.generate([1, 3], asked_with(max_tokens=9)))
    (turn,) = engine.turns
    assert turn.prompt_ids.tolist() == [1, 3] and turn.action_ids.tolist() == [5, 6, 2]
    assert turn.log_probs.tolist() == [-0.5, -1.0, -1.5]
    assert turn.weight_versions.tolist() == [[4, 1], [6, 2]]
    assert (turn.finish_reason, turn.seed) == ("stop", seed_at(*ADDRESS))
    dtypes = turn.prompt_ids.dtype, turn.action_ids.dtype, turn.log_probs.dtype, turn.weight_versions.dtype
    assert dtypes == (np.int32, np.int32, np.float32, np.int32)
    # users' executors read them in this form
    answer = output.outputs[0]
    assert [answer.logprobs[i][token].logprob for i, token in enumerate(answer.token_ids)] == [
        -0.5,
        -1.0,
        -1.5,
    ]
    assert len(answer.logprobs) == 3


def test_an_empty_prompt_is_refused() -> None:
    """Nothing would predict the first action."""
    engine = recording(Engine([5, 6]))
    with pytest.raises(UsageError, match="no prompt tokens"):
        asyncio.run(engine.generate([], asked_with()))
    assert engine.turns == []


def test_the_sampled_token_among_the_likely_ones() -> None:
    engine = recording(Engine([5, 6]))
    asyncio.run(engine.generate([1], asked_with(logprobs=3)))
    assert engine.turns[0].log_probs.tolist() == [-0.5, -1.0]


def test_each_turn_has_an_address_and_the_params_stay_as_they_are() -> None:
    fake, params = Engine([5]), asked_with(max_tokens=9, seed=1)
    engine = recording(fake)

    async def ask() -> None:
        for _ in range(3):
            await engine.generate([1], params)

    asyncio.run(ask())
    seeds = [seed_at(*ADDRESS), seed_at(*ADDRESS, 1), seed_at(*ADDRESS, 2)]
    assert [asked.seed for _, asked in fake.asked] == [turn.seed for turn in engine.turns] == seeds
    assert (params.seed, params.logprobs, params.stop_token_ids, params.flat_logprobs) == (1, None, [], False)
    for _, asked in fake.asked:
        assert asked is not params and (asked.temperature, asked.max_tokens) == (0.7, 9)
        assert (asked.logprobs, asked.stop_token_ids) == (0, [2])
        assert asked.output_kind is RequestOutputKind.FINAL_ONLY


CHANGES_WHAT_IS_SAMPLED = {
    "temperature": 0.0,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["no"],
    "structured_outputs": StructuredOutputsParams(regex="[0-9]+"),
    "min_tokens": 4,
    "watermarking": True,
    "thinking_token_budget": 8,
    "trace_decode_token_ids": [5],
    "extra_args": {"a": 1},
}
CHANGES_WHAT_IS_RECORDED = {"logprob_token_ids": [5], "routed_experts_prompt_start": 1}


@pytest.mark.parametrize(("name", "value"), {**CHANGES_WHAT_IS_SAMPLED, **CHANGES_WHAT_IS_RECORDED}.items())
def test_an_executor_cannot_sample_from_another_distribution(name: str, value: Any) -> None:
    """Parameters of the executor's own are refused, and so are changes of those that it was handed."""
    fake, handed = Engine([5]), copy.copy(GIVEN)
    setattr(handed, name, value)
    for params in (asked_with(**{name: value}), handed):
        engine = recording(fake)
        with pytest.raises(ValueError, match=rf"sampling_params\b.*\b{name}\b"):
            asyncio.run(engine.generate([1], params))
        assert not fake.asked and not engine.turns


def test_what_an_executor_may_change() -> None:
    """A value that means the same is allowed too: no field is used that is None, 0 or empty."""
    fake = Engine([5])
    other = {"top_p": 1.0, "top_k": 4, "min_p": 0.1, "max_tokens": 9, "stop": ["x"], "n": 2}
    params = asked_with(**other)
    params.bad_words, params.min_tokens, params.logit_bias = None, None, {}
    asyncio.run(recording(fake).generate([1], params))
    (_, asked) = fake.asked[0]
    assert {name: getattr(asked, name) for name in other} == other


def test_every_field_of_vllm_is_known() -> None:
    """A field that a new vLLM adds is refused until somebody has looked at it."""
    fields = {name for name in VLLMParams.__struct_fields__ if not name.startswith("_")}
    assert fields == CHANGEABLE | CHANGES_WHAT_IS_SAMPLED.keys() | CHANGES_WHAT_IS_RECORDED.keys()


def test_our_parameters_have_vllms_names_and_reach_vllm() -> None:
    """Options of vLLM alone, of a user's own record, and attributes that a user sets arrive too."""
    fields = set(vars(SamplingParams())) - {"max_kept_tokens", "num_likely"}
    assert fields < set(VLLMParams.__struct_fields__)
    fake = Engine([5])
    handed = copy.copy(GIVEN)
    handed.spaces_between_special_tokens = False
    for params in (asked_with(spaces_between_special_tokens=False, logprobs=3), handed):
        asyncio.run(recording(fake).generate([1], params))
    assert [asked.spaces_between_special_tokens for _, asked in fake.asked] == [False, False]
    assert [asked.logprobs for _, asked in fake.asked] == [3, 0]
    assert handed.clone() == handed and handed.clone().stop_token_ids is not handed.stop_token_ids


def test_stop_tokens_of_a_request_stay() -> None:
    fake = Engine([5])
    asyncio.run(recording(fake).generate([1], asked_with(stop_token_ids=[8])))
    assert fake.asked[0][1].stop_token_ids == [8]


def test_several_answers_to_one_request() -> None:
    """Each answer is a turn; vLLM adds an answer's number to the seed."""
    engine = recording(Engine([5]))
    asyncio.run(engine.generate([1], asked_with(n=2)))
    assert [turn.seed - seed_at(*ADDRESS) for turn in engine.turns] == [0, 1]


def test_turns_stand_in_the_order_in_which_they_were_asked_for() -> None:
    class Slow(Engine):
        async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
            await asyncio.sleep(0.01 * prompt_token_ids[0])
            return await super().generate(prompt_token_ids, sampling_params)

    engine = recording(Slow(lambda prompt: [10 * prompt[0]]))

    async def ask() -> None:
        await asyncio.gather(*(engine.generate([i], asked_with()) for i in (3, 1, 2)))

    asyncio.run(ask())
    assert [turn.action_ids.tolist() for turn in engine.turns] == [[30], [10], [20]]
    assert [turn.seed for turn in engine.turns] == [
        seed_at(*ADDRESS),
        seed_at(*ADDRESS, 1),
        seed_at(*ADDRESS, 2),
    ]


class Broken(Engine):
    def __init__(self, error: Exception) -> None:
        super().__init__([5])
        self.error = error

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        if len(prompt_token_ids) > 1:
            raise self.error
        return await super().generate(prompt_token_ids, sampling_params)


def test_a_request_that_failed_is_no_turn_but_has_had_its_seed() -> None:
    engine = recording(Broken(ValueError("too long")))

    async def ask() -> None:
        with pytest.raises(ValueError, match="too long"):
            await engine.generate([1, 2], asked_with())
        await engine.generate([1], asked_with())

    asyncio.run(ask())
    assert [turn.seed for turn in engine.turns] == [seed_at(*ADDRESS, 1)]
    engine.check_alive()


def test_a_dead_engine_stays_dead_whatever_an_executor_does() -> None:
    engine = recording(Broken(EngineDied(ErrorCode.ENGINE_FAILED, "")))

    async def ask() -> None:
        with pytest.raises(EngineDied):
            await engine.generate([1, 2], asked_with())

    asyncio.run(ask())
    with pytest.raises(EngineDied):
        engine.check_alive()


def test_an_answer_that_was_given_up_before_its_first_token() -> None:
    engine = recording(Engine([], finish_reason="abort"))
    asyncio.run(engine.generate([1], asked_with()))
    (turn,) = engine.turns
    assert turn.log_probs.shape == (0,) and turn.weight_versions.shape == (0, 2)


class Expanding(Engine):
    """Engine that reads two tokens for each image, and remembers the pictures."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        self.pictures = (multi_modal_data or {}).get("image", [])
        read = [token for token in prompt_token_ids for _ in range(2 if token == PATCH else 1)]
        return await super().generate(read, sampling_params)


PATCH = 90


def test_images_are_recorded_with_all_their_tokens() -> None:
    """The prompt's image is the file that it came from; an image that an executor made is a file with its
    pixels."""
    image = encoded(PILImage.new("RGB", (4, 3), "red"))
    picture, own = decoded(image.data), PILImage.new("L", (2, 2), 7)
    fake = Expanding([5])
    engine = RecordingEngine(fake, ADDRESS, GIVEN, [(image, picture)], (PATCH,))

    async def ask() -> None:
        await engine.generate([1, PATCH], asked_with(), {"image": picture})
        await engine.generate([1, PATCH, 5, PATCH], asked_with(), {"image": [picture, own]})
        await engine.generate([1], asked_with())

    asyncio.run(ask())
    one, two, none = engine.turns
    assert one.prompt_ids.tolist() == [1, PATCH, PATCH] and one.images == (image,)
    assert two.prompt_ids.tolist() == [1, PATCH, PATCH, 5, PATCH, PATCH]
    assert two.images[0] is image and two.images[1].reference.startswith("sha256:")
    seen = decoded(two.images[1].data)
    assert (seen.size, seen.getpixel((0, 0))) == ((2, 2), (7, 7, 7))
    assert none.prompt_ids.tolist() == [1] and none.images == ()


def test_the_engine_sees_the_pixels_that_are_recorded() -> None:
    fake = Expanding([5])
    engine = RecordingEngine(fake, ADDRESS, GIVEN)
    asyncio.run(engine.generate([PATCH], asked_with(), {"image": PILImage.new("LA", (2, 2), (7, 9))}))
    (shown,), (recorded,) = fake.pictures, engine.turns[0].images
    assert shown.mode == "RGB" and shown.tobytes() == decoded(recorded.data).tobytes()


@pytest.mark.parametrize("prompt, count", [([1, PATCH], 0), ([1], 1), ([PATCH, PATCH], 1)])
def test_every_image_has_one_placeholder(prompt: list[int], count: int) -> None:
    fake, pictures = Expanding([5]), [PILImage.new("RGB", (2, 2))] * count
    engine = RecordingEngine(fake, ADDRESS, GIVEN, image_token_ids=(PATCH,))
    with pytest.raises(ValueError, match=f"{prompt.count(PATCH)} image placeholder .* and {count} "):
        asyncio.run(engine.generate(prompt, asked_with(), {"image": pictures}))
    assert not fake.asked and not engine.turns


def test_an_answer_with_the_token_of_an_image_is_a_failure() -> None:
    engine = RecordingEngine(Expanding([5, PATCH]), ADDRESS, GIVEN, image_token_ids=(PATCH,))
    with pytest.raises(EnvironmentFailed, match="placeholder token"):
        asyncio.run(engine.generate([1], asked_with()))
    assert [turn.action_ids.tolist() for turn in engine.turns] == [[5, PATCH]]
