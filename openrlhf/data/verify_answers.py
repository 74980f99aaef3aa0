"""Checks of the tokens that a supervised model learns: decoded, they are the row's answer.

Tokens are marked by the places of characters, of templates and of tokens. The check decodes the marked tokens
and looks for the answer as the row has it, so it shares nothing with the marking.
"""

from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import AnswerColumns
from openrlhf.data.encode import tokenize_text
from openrlhf.data.files import Row
from openrlhf.data.messages import is_learned, read_text
from openrlhf.data.sources import Rows
from openrlhf.data.store import Tokens
from openrlhf.errors import ErrorCode, RunError, shortened
from openrlhf.text import decode

CHECKED = 8
"""Number of samples of a dataset that are checked."""
LEAST = 16
"""Number of characters of a question from which its second half is looked for among the learned tokens. Short
ones may be part of a template. The first token of a text never has a loss."""
LONGEST = 200
"""Number of characters of a text in the message."""


def check_learned(
    rows: Rows, i: int, tokens: Tokens, columns: AnswerColumns, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Checks the sample of row i, which is not truncated. Raises RunError unless the learned tokens contain
    the answer, not the question, and end with the end-of-sequence token. Answers and questions that are not
    text are not checked."""
    question, answer = _texts(rows[i], columns)
    if answer is None or not answer.strip():
        return
    token_ids, learned = tokens
    chosen = [token for token, is_learned in zip(token_ids, learned, strict=True) if is_learned]
    text, wrong = decode(tokenizer, chosen, skip_special_tokens=True), ""
    # A template may end the prompt with the <think> of an answer, and write its thoughts elsewhere.
    thoughts, _, rest = answer.rpartition("</think>")
    parts = [_decoded(part, tokenizer) for part in (thoughts.strip().removeprefix("<think>"), rest)]
    found, expected = "".join(text.split()), parts[1]
    asked = "" if question is None or columns.multiturn else _decoded(question, tokenizer)
    if not all(part in found for part in parts):
        wrong = f"must contain the answer {shortened(answer, LONGEST)!r}"
    elif len(asked) >= LEAST and asked[len(asked) // 2 :] in found.replace(expected, ""):
        wrong = f"must not contain the question {shortened(str(question), LONGEST)!r}"
    elif tokenizer.eos_token_id is not None and not (learned[-1] and token_ids[-1] == tokenizer.eos_token_id):
        wrong = f"must end with the end-of-sequence token {tokenizer.eos_token!r}"
    if wrong:
        name, line = rows.place(i)
        raise RunError(
            ErrorCode.BROKEN_INVARIANT,
            f"the tokens with a loss are {shortened(text, LONGEST)!r}, and {wrong}.\n"
            "`openrlhf check` shows the tokens of the first rows. --train.verify_steps 0 omits this check.",
            value=name,
            row=line,
        )


def _texts(row: Row, columns: AnswerColumns) -> tuple[str | None, str | None]:
    """Returns the last question and the answer of a row, each of them None if it is not text."""
    read = read_text if columns.template.apply_chat_template else lambda value: value
    answer = read(row.get(columns.answer_keys[0]))
    if columns.prompt_key is not None:
        asked = read(row.get(columns.prompt_key))
    else:
        asked = answer[:-1] if isinstance(answer, list) else None
    return _content(asked, "user"), _content(answer, "assistant")


def _content(value: object, role: str) -> str | None:
    """Returns a text, or the text of the last of several messages if it is of this role and has weight."""
    if isinstance(value, list) and value and value[-1].get("role") == role and is_learned(value[-1]):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None


def _decoded(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decodes the tokens of a text, without white space, which tokenizers and templates may change."""
    return "".join(decode(tokenizer, tokenize_text(text, tokenizer), skip_special_tokens=True).split())
