"""Tokens as text: the text that was written, and nothing else, wherever it is read."""

import asyncio
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import trajectory
from tokenizers_of_users import llama_2_style, word_pieces

from openrlhf.agents.base import Reward, SingleTurnAgentExecutor
from openrlhf.data.inference import Question
from openrlhf.models.generation import Generated
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.text import decode_response, token_ids_within
from openrlhf.tools.serve.answering import Recorder, requests_for
from openrlhf.tools.serve.interactive_chat import PiecewiseText
from openrlhf.utils import decode

PROMPT, RESPONSE = "Question: 2 + 2 = ? Answer:", " the answer is 4"
LLAMA, BYTES = llama_2_style(), tiny_tokenizer()


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def split(tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens of prompt and response."""
    whole, prompt = ids_of(tokenizer, PROMPT + RESPONSE), ids_of(tokenizer, PROMPT)
    assert whole[: len(prompt)] == prompt
    return prompt, whole[len(prompt) :]


@pytest.mark.parametrize("tokenizer", [LLAMA, BYTES], ids=["llama-2", "bytes"])
def test_a_response_begins_as_it_was_written(tokenizer) -> None:
    prompt, response = split(tokenizer)
    assert decode(tokenizer, response, after=prompt) == RESPONSE
    assert decode(tokenizer, prompt + response) == PROMPT + RESPONSE
    assert decode(tokenizer, [], after=prompt) == ""


def test_the_first_word_of_a_text_has_no_space_before_it() -> None:
    """The tests above are therefore no tests of `decode` alone."""
    assert LLAMA.decode(split(LLAMA)[1]) == RESPONSE.removeprefix(" ")


@pytest.mark.parametrize("skipped", [True, False])
def test_special_tokens(skipped: bool) -> None:
    prompt, response = split(LLAMA)
    text = decode(
        LLAMA,
        [*response, LLAMA.eos_token_id],
        after=[LLAMA.bos_token_id, *prompt],
        skip_special_tokens=skipped,
    )
    assert text == RESPONSE + ("" if skipped else "</s>")


@pytest.mark.parametrize("character", ["é", "日", "🍋"])
@pytest.mark.parametrize("tokenizer", [LLAMA, BYTES], ids=["llama-2", "bytes"])
def test_a_prompt_may_end_within_a_character(tokenizer, character: str) -> None:
    """The answer is the whole character that it completes."""
    ids = ids_of(tokenizer, f"ah{character} so")
    start = len(ids_of(tokenizer, "ah"))
    for end in range(start + 1, start + len(character.encode())):
        assert decode(tokenizer, ids[end:], after=ids[:end]) == f"{character} so"
    odd = ids_of(tokenizer, "ah \ufffd so")
    end = len(ids_of(tokenizer, "ah \ufffd"))
    assert decode(tokenizer, odd[end:], after=odd[:end]) == " so"


def test_half_a_character_behind_a_prompt_is_half_a_character() -> None:
    """A decoder with byte tokens finds all bytes invalid that stand together; the prompt stays as it is."""
    prompt = ids_of(LLAMA, "ah é")
    assert decode(LLAMA, prompt[-2:-1], after=prompt) == "\ufffd"


@settings(deadline=None)
@given(prompt=st.text("Qu2+ é🍋\n"), response=st.text("Qu2+ é🍋\n"), tokens=st.lists(st.integers(0, 367)))
def test_parts_are_the_whole(prompt: str, response: str, tokens: list[int]) -> None:
    """The prompt has whole characters; with byte-level tokens any tokens may be sampled."""
    for tokenizer, ids in ((LLAMA, ids_of(LLAMA, response)), (BYTES, tokens)):
        before = ids_of(tokenizer, prompt)
        text = decode(tokenizer, before) + decode(tokenizer, ids, after=before)
        assert text == decode(tokenizer, before + ids)


def test_decoding_cleans_nothing() -> None:
    tokenizer, text = word_pieces(), "x = 3 , y = [ 4 ] ."
    ids = ids_of(tokenizer, text)
    assert tokenizer.decode(ids) != text == decode(tokenizer, ids)


def test_users_import_it_without_torch() -> None:
    check = "import sys; from openrlhf.utils import decode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


# Code that reads responses


def test_a_reward_function_reads_what_the_policy_wrote() -> None:
    prompt, response = split(LLAMA)
    queries = []

    async def reward(query: str, prompt: str, label: str) -> Reward:
        queries.append(query)
        return Reward(reward=0.0, score=0.0)

    class Engine:
        async def generate(self, prompt_ids, params, images=None):
            log_probs = [{i: SimpleNamespace(logprob=0.0)} for i in response]
            output = SimpleNamespace(
                token_ids=response, finish_reason="stop", logprobs=log_probs, weight_versions=()
            )
            return SimpleNamespace(outputs=[output])

    executor = SingleTurnAgentExecutor(reward, is_chat=True)
    asyncio.run(executor.execute(PROMPT, "", SimpleNamespace(max_tokens=None), 100, LLAMA, Engine()))
    assert queries == [PROMPT + RESPONSE]
    assert ids_of(LLAMA, queries[0]) == prompt + response


def test_batch_inference_writes_what_the_model_wrote() -> None:
    prompt, response = split(LLAMA)
    rows: list[dict] = []
    recorder = Recorder().begin(
        SimpleNamespace(append=rows.extend), SimpleNamespace(total=1, advance=lambda n, **figures: None)
    )
    question = Question(prompt_id=0, input=PROMPT, token_ids=prompt)
    marked = [LLAMA.bos_token_id, *response]  # special tokens may mark thoughts or calls
    answers = [
        Generated(token_ids=[*marked, LLAMA.eos_token_id], finish_reason="stop"),
        Generated(token_ids=marked, finish_reason="length"),
    ]
    recorder.answers(LLAMA)(requests_for([question], num_samples=2, run_seed=0), answers)
    assert [row["output"] for row in rows] == [LLAMA.bos_token + RESPONSE] * 2


def test_every_sample_of_batch_inference_has_its_own_seed() -> None:
    questions = [Question(prompt_id=i, input=PROMPT, token_ids=[1]) for i in range(3)]
    seeds = [request.seed for request in requests_for(questions, num_samples=4, run_seed=0)]
    assert len({*seeds}) == 12
    assert seeds == [request.seed for request in requests_for(questions, num_samples=4, run_seed=0)]
    assert seeds[0] != requests_for(questions, num_samples=1, run_seed=1)[0].seed


def test_a_chat_shows_what_the_model_wrote() -> None:
    prompt, response = split(LLAMA)
    pieces, written = PiecewiseText(LLAMA, prompt), LLAMA.bos_token + RESPONSE
    assert "".join(map(pieces.add, [LLAMA.bos_token_id, *response])) + pieces.finish() == written
    assert pieces.text == written


def test_the_journal_holds_what_the_policy_wrote() -> None:
    prompt, response = split(LLAMA)
    t = trajectory(
        text=PROMPT, token_ids=prompt + response, action_mask=[False] * len(prompt) + [True] * len(response)
    )
    assert decode_response(t, partial(decode, LLAMA)) == RESPONSE


def test_a_text_that_is_much_too_long_is_not_read_to_its_end():
    """A thousandth of it is tokenised; one that may fit is read whole."""
    tokenizer = tiny_tokenizer()
    whole = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    text = "Tom has 3 apples. " * 50_000
    found = token_ids_within(tokenizer, text, 50)
    assert 100 < len(found) <= 16 * 50 and found[:-9] == whole(text[:2000])[: len(found) - 9]
    for fits in ("", "3", "Tom has 3 apples. ", text[:4000]):
        assert token_ids_within(tokenizer, fits, 2000) == whole(fits)
