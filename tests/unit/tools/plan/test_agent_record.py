"""`openrlhf agent record`: its command line, the drift that it finds and what it prints."""

import asyncio
import io
import re
from typing import Any

from fake_engine import Engine
from records import trajectory
from refusals import refused
from rich.console import Console

from openrlhf.agents.openai import Session
from openrlhf.completions import SamplingParams
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tools.plan import flags
from openrlhf.tools.plan.recording import DRIFT, find_drift, report

TOKENIZER = tiny_tokenizer()


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


async def session_with(*answers: list[int]) -> Session:
    """Returns a session after a conversation with these answers."""
    session = Session(Engine(*answers), TOKENIZER, SamplingParams(logprobs=0), 300)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    for _ in answers:
        choice = (await session.complete({"messages": messages}))["choices"][0]
        messages += [choice["message"], {"role": "user", "content": "!"}]
    return session


def drift_of(*answers: list[int]) -> list[str]:
    return list(find_drift(asyncio.run(session_with(*answers))))


def test_drift_is_where_the_text_has_other_tokens() -> None:
    end = tokens("<|end|>")
    assert drift_of([*tokens(" apples"), *end], [*tokens(" 3"), *end]) == []
    spelt = [token for letter in " apples" for token in tokens(letter)]
    assert spelt != tokens(" apples")
    (found,) = drift_of([*spelt, *end], [*tokens(" 3"), *end])
    start = len(tokens("<|user|>?<|end|><|assistant|>"))
    assert found.startswith(f"after {start} of ") and found.count(" apples") == 1
    assert str(spelt[:6]) in found


def printed(*parts: Any) -> str:
    out = io.StringIO()
    report(Console(file=out, width=200), TOKENIZER, parts)
    return out.getvalue()


def test_what_is_printed() -> None:
    begin = tokens("Tom has 3")

    def part(number: int, text: str, drift: str) -> Any:
        ids = [*begin, *tokens(text)]
        mask = [i + 1 == len(ids) for i in range(len(ids))]
        return trajectory(0.0, token_ids=ids, action_mask=mask, part=number, extra_texts={DRIFT: drift})

    text = printed(part(0, " apples and 4", ""), part(1, " pears and 5", ""))
    assert "segment 1 of 2" in text and "segment 2 of 2" in text and "no drift" in text
    assert re.search(rf"rewrote .* {len(begin)} .*' apples and 4'.*' pears and 5'", text)
    total = 2 * len(begin) + len(tokens(" apples and 4")) + len(tokens(" pears and 5"))
    assert f"2 of {total} tokens would be trained on" in text
    alone = printed(part(0, " apples", "after 3 of 9 tokens"))
    assert "1 segment, which shares" in alone and "after 3 of 9 tokens" in alone and "no drift" not in alone
    assert "OPENAI_BASE_URL" in printed(trajectory(None, token_ids=[], action_mask=[], error="no shell"))


def test_flags_stand_before_the_program_and_its_own_behind() -> None:
    with refused(ErrorCode.MISSING_FLAG, flag="openrlhf agent record"):
        flags.record(["record", "--model", "m"])
    with refused(ErrorCode.NOT_FOUND, flag="--", value="no-such-program"):
        flags.record(["record", "--model", "m", "--", "no-such-program", "--model", "x"])
    with refused(ErrorCode.MISSING_FLAG, flag="--model"):
        flags.record(["record", "--", "sh", "-c", "true"])
