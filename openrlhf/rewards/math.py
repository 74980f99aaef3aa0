"""Extracts and compares answers: numbers and formulas, and for labels that are words, words."""

import math
import re
import signal
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from decimal import Decimal
from typing import Any, NoReturn

from openrlhf.text import behind_thoughts

LIMIT = 5.0
"""Seconds of CPU time after which the comparison of two answers ends, and the answer is wrong. Time of the
clock would make right answers wrong on a busy machine."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?=\{)|([^\s$]+))")
_ENDS = re.compile(r"(\s*<[^<>\s]+>)+\s*$")
"""Special tokens at the end of a response."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PLAIN: tuple[tuple[re.Pattern, Any], ...] = (
    (re.compile("(?:([0-9]+) ?)?([\u00bc-\u00be\u2150-\u215e])"), lambda sign: _fraction(sign)),
    (
        re.compile("[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+"),
        lambda n: "^" + _normal(n[0]) if len(n[0]) == 1 else f"^({_normal(n[0])})",
    ),
    (
        re.compile(r"\u221a\s?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\))"),
        lambda n: rf"\sqrt{{{n[1] or n[2]}}}",
    ),
    (re.compile("\u221e"), r"\\infty"),
    (re.compile(r"\u2205|\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|[~'\u2019\xa0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (
        re.compile(
            r"(?<![\w.,(\[])(\d{1,3}(?:(?:\.\d{3})+(?=,\d)|(?:\.\d{3}){2,}))(?:,(\d+))?(?![\w,]|\.\d)"
        ),
        lambda n: n[1].replace(".", "") + (f".{n[2]}" if n[2] else ""),
    ),
    (re.compile(r"(?:(?<![\w-])negative|(?:^|(?<=\bis )|(?<=: )|(?<=\{))minus)\s+(?=\$?\.?\d)"), "-"),
)
"""Characters and words that math-verify does not read, and what stands for them: fractions, powers and roots
in Unicode, groups of digits as in 10\\,000, 10'000 and 10.000,5 and minus as a word."""
_GAP = r"(?:\s|\\[,;:! ]|[$€£¥₹])*(?:\\(?:text|mathrm|mbox)\{\s*)?"
"""Pattern of the text between a number and its unit."""
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = f"(?:{'|'.join(_SCALES)})"
_MIXED = re.compile(r"(?<![\w.,/])(\d{1,9}) (\d{1,2})/(\d{1,3})(?!\w|/|\.\d)")
"""A mixed number such as 2 1/2, of which math-verify makes a product."""
_TIMES_TEN = r"\s*(?:[x\u00d7*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*([{(])?"
_SIGN = re.compile(r"[€£¥₹]\s*(?=\d)|(?<=\d)\s*[€£¥₹]")
"""The sign of a currency, beside which math-verify does not read a number."""
_TIDIED: tuple[tuple[re.Pattern, Any], ...] = (
    (_MIXED, lambda number: _improper(number)),
    (
        re.compile(
            rf"(?<![\w./])(\d[\d,]{{0,20}}(?:\.\d+)?)(?:/([1-9]\d*))?({_GAP})({_SCALE}(?:\s+{_SCALE})*)\b",
            re.IGNORECASE,
        ),
        lambda n: format(_scaled(n[1], n[4]) / int(n[2] or 1), "f") + n[3].rstrip(),
    ),
    (
        re.compile(
            rf"(?<=\d)({_GAP})(?:(k)ilo|(c)enti|(m)illi)?"
            r"(?:(m)et(?:er|re)s?|(g)rams?|(l)it(?:er|re)s?|(s)econds?|(min)utes?|(h)ours?"
            r"|(f)oo(t)|(f)ee(t)|(inch)(?:es)?|(mile|yard)s?)\b"
        ),
        lambda unit: "".join(filter(None, unit.groups())),
    ),
    (re.compile(r"(?<=\d)\s*([kcm]m|ft|inch)\s*\^([{(])?([23])(?(2)[)}])"), r"\\text{ \1}^\3"),
    (re.compile(r"(?<=\d)\u00b0(?!\w)"), ""),
    (re.compile(r"(?<![\w)}])\u2013(?=[\d.])"), "-"),
    (
        re.compile(
            rf"(?<![\w.])(\d+\.?\d*|\.\d+)(?:[eE]|{_TIMES_TEN})([-+]?\d{{1,3}})(?(2)[}})])(?!\w|\.\d)"
        ),
        lambda number: format(Decimal(f"{number[1]}e{number[3]}"), "f"),
    ),
)
"""Texts that math-verify does not read, and what stands for them: 18 million, kilometers, cm^2, degrees, a
dash as a minus, 1e-05 and 5 x 10^3."""
_UNIT = re.compile(
    rf"{_GAP}((?:[kcm]?[mgl]|s|min|h|ft|inch|mile|yard|lb)(?![a-zA-Z])\}}?(?:\^[{{(]?\d)?|[€£¥₹]|_\{{?\d+)"
)
"""A unit, a currency or a base behind a number, of which math-verify drops most."""
_BASE = re.compile(r"\d(_\{?\d+)\}?$")
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_METRIC = r"(?:kilo|centi|milli)?(?:met(?:er|re)|gram|lit(?:er|re)|second|minute|hour)s?"
_FORMULA = (
    r"percent|plus|minus|times|over|sqrt|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|alpha|beta|gamma|delta|epsilon"
    r"|zeta|theta|iota|kappa|lambda|sigma|upsilon|omega|infinity"
)
_COUNTED = re.compile(
    rf"(?:\\?([$€£¥₹]))?([-+]?\d[\d,./]*(?:\s+{_SCALE})*)(?:\s+(?!.*\b(?:{_SCALE}|{_METRIC}|{_FORMULA})\b)"
    r"(?!(?:feet|foot|inch(?:es)?|miles?|yards?)$)((?=.*(?:[^\W\d_]{4}|\bper\b|\bmen\b))[^\W\d_]+(?:\s+[^\W\d_]+)*)|\s*([€£¥₹]))?",
    re.IGNORECASE,
)
"""A number and perhaps what it counts, such as 18 dollars, of whose letters math-verify makes a product."""
_WORDS = re.compile(r"[^\W\d_]{3,}|no|on", re.IGNORECASE)
"""A word, whose letters math-verify would multiply, in any order; ab and ba are products."""
_DATE = re.compile(r"\d+(-\d+)+")
"""A date or a score, whose numbers math-verify would subtract."""
_NAME = re.compile(r"[^\W\d_]{3,}[\w .'-]*|\d+(:\d+)+|\d+(\.\d+){2,}")
"""A name with a number (Apollo 11), a ratio or time, a version: at the end of a text math-verify reads the
last number alone."""
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_EAST_ASIAN = "\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff0f\uff1a-\uff20"
_EDGE = re.compile(rf"(?<=[{_EAST_ASIAN}])(?=[-\\$(.0-9A-Za-z])|(?<=[0-9A-Za-z}})$%])(?=[{_EAST_ASIAN}])")
"""An end of East Asian script, which has no spaces, and beside which math-verify finds no number."""
_OPTION = re.compile(r"^\(?([A-Za-z])\)$")  # of multiple choice; responses may lack the parentheses
_SPACED = re.compile(r"(?<=\d)\s(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[-+]?[\d.,]+(?:[eE][-+]?\d+)?")
_POWER = re.compile(r"(?:\^|\*\*)\W*?(\d+)[^\w!^*]*(?:(?:\^|\*\*)\W*?(\d+)|(!))?|(\d{5,})[^\w!]*!")
_TOWER = re.compile(r"\d+(\W*\^\W*\d+){3}")
"""An exponent, with an exponent or a factorial of its own, or a factorial; the second, powers of powers."""
_DENIED = re.compile(r"(?:\bnot|n['\u2019]t|\bnor)\s+(?:equal to\s+)?\\?\$?[-+]?\d[\d,.]*\$?", re.IGNORECASE)
_BEFORE = (
    r"(?<!\w)(?<!\d[-:.])(?<!\bnot )(?<!\bnot \()(?<!n't )(?<!n\u2019t )(?<!\bor )(?<!\bnor )"
    r"(?<!\b[a-z] and )"
)
"""Words before a label at the end of a response, by which it is not the answer: not B, A or B."""
_SYMBOLS, _SAID = re.compile(r"[^\W\d_]|[,(\[]"), re.compile(r"(?:^|[^\W\d_]{2}|[:=])[\s$]*$")
"""Signs of a formula, and the text before a whole one, which is no other part of it."""
_QUOTIENT = re.compile(r"\d\s*(?:/|\u00f7|\\div)\s*\d|frac\{[-\d]+\}\{[-\d]+\}")
"""A quotient of numbers, which is no answer where the label is a whole number."""
_SUM = re.compile(r"\d\s*(?:[-+*\u00d7\u00b7]|\\times|\\cdot)\s*(?!10\s*(?:\^|\*\*))\d")
"""A sum, difference or product of numbers, which a policy could copy from the question; 3 * 10^8 is none."""


def extract_boxed_answer(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...} or \fbox{...} in a text, or the word after
    \boxed. None without such an answer."""
    for box in reversed(list(_BOX.finditer(text))):
        answer = box[1] or _braced(text, box.end())
        if answer is not None:
            return answer
    return None


def grade_answer(prediction: str | None, truth: str | float) -> bool:
    r"""Returns True if two answers are equal: the same text apart from whitespace, or, according to
    math-verify, equal numbers, formulas, sets or intervals, in LaTeX or plain text. Digits may be in groups
    of three, a full stop may follow, and \text{...} around all is dropped. 2 1/2 and 18 million are numbers.
    5 equals 5 km, 5 dollars and €5, and 5 km does not equal 5 m, nor €5 £5.
    Words, dates and scores such as 3-1 are compared as text, in upper or lower case. A missing prediction is
    wrong.

    An answer with a number that cannot be written out, such as 9^{9^9}, is wrong unless it is the text of the
    label. A comparison may take `LIMIT` seconds of CPU time where reward functions of a command run, in the
    main thread; in another thread, as for agents and `Run.reward`, it has no limit.
    """
    if prediction is None:
        return False
    prediction, truth = (_plain(_text(answer)) for answer in (prediction, truth))
    given, right = ("".join(answer.split()) for answer in (prediction, truth))
    is_word = _WORDS.fullmatch(given) and _WORDS.fullmatch(right) and not (given + right).isupper()
    if given == right or is_word or _DATE.fullmatch(right):
        return given.casefold() == right.casefold()
    numbers = [number for text in (prediction, truth) if (number := _COUNTED.fullmatch(text))]
    if len(numbers) == 2:
        if not _count_same(*numbers):
            return False
        prediction, truth = (number[2] for number in numbers)
    return _equal(f"\\boxed{{{truth}}}", f"\\boxed{{{prediction}}}")


def _count_same(*numbers: re.Match) -> bool:
    """Returns whether numbers count the same, as far as they say what: 18 dollars, $18 per day and 18."""
    signs = [_CURRENCIES.get(number[1] or number[4], "") for number in numbers]
    words = [re.sub(r"(?:(?<=[cs]h|.x)e)?s+$", "", (number[3] or "").lower()) for number in numbers]
    named = words if all(signs) else [word or sign for word, sign in zip(words, signs, strict=True)]
    return all(len({*names} - {""}) < 2 for names in (signs, named))


def _plain(answer: str) -> str:
    """Returns an answer without a full stop, spaces between digits, and a command around all of it."""
    answer = _SPACED.sub("", _MIXED.sub(_improper, answer.strip().rstrip(".")))
    return wrapped[1].strip() if (wrapped := _WRAPPED.fullmatch(answer)) else answer


def _improper(number: re.Match) -> str:
    whole, part, parts = map(int, number.groups())
    return f"{whole * parts + part}/{parts}" if part < parts else number[0]


def final_answer(label: str | float) -> str:
    r"""Returns a label's answer: after the last ####, as in GSM8K, else the last \boxed{...}, else all.
    Raises TypeError for a label that is neither text nor a number."""
    label = _text(label)
    _, mark, answer = label.rpartition("####")
    return answer.strip() if mark else extract_boxed_answer(label) or label.strip()


def grade_response(response: str, label: str | float) -> bool:
    r"""Returns True if the final answer of a response equals that of a label: its last \boxed{...}; else, for
    a label with a digit, the number or formula that math-verify finds, after "answer is" or the last one;
    else, or if the label is a name, a ratio or a version (Apollo 11, 3:4, 1.2.3), its end, in upper or lower
    case. Thoughts before </think>, or behind a <think> that nothing closes, are not read, and if it has
    <answer>...</answer>, the last one alone. Of an equation, the last side counts. What "not" denies is no
    answer. Where the label is a number, a sum or product that is not worked out is wrong, and where it is a
    whole number, a quotient. Its time is limited as that of `grade_answer`. Raises TypeError for a label that
    is neither text nor a number."""
    said = _text(behind_thoughts(response))
    response = next(iter(_TAGGED.findall(said)[-1:]), said)
    truth, boxed = _OPTION.sub(r"\1", final_answer(label)), extract_boxed_answer(response)
    if boxed is not None or not truth:
        return bool(truth) and grade_answer(boxed, truth) and _is_worked_out(boxed or "", truth)
    response, truth = (_EDGE.sub(" ", text) for text in (_ENDS.sub("", response), truth))
    ends = re.search(rf"{_BEFORE}{re.escape(truth)}\W*$", response, re.IGNORECASE)
    if not re.search(r"\d", truth) or _DATE.fullmatch(truth) or (ends and _NAME.fullmatch(truth)):
        return bool(ends)
    if ends and _SYMBOLS.search(truth) and _SAID.search(response[: ends.start()]):
        return True  # math-verify finds no x^2 or (0, 1) in plain text
    counted = _COUNTED.fullmatch(truth)
    number = counted[0][: counted.end(2)] if counted else truth  # 18 of 18 dollars
    return _equal(f"\\boxed{{{number}}}", _DENIED.sub("", response), number)


def _equal(gold: str, answer: str, truth: str = "") -> bool:
    """Returns whether math-verify finds equal answers in two texts, and the second is worked out. Where it
    finds the left side of an equation, as in "the answer is 2 + 5 - 3 = 7", the right one is compared."""
    import math_verify  # imports sympy, which takes a second

    in_main = threading.current_thread() is threading.main_thread()
    limit: Any = 3600 if in_main else None  # of math-verify's own clock
    gold, answer = _replaced(gold, _TIDIED), _replaced(answer, _TIDIED)

    def parse(text: str) -> list[Any]:
        return math_verify.parse(_SIGN.sub("", text), parsing_timeout=limit)

    if any(map(_is_endless, (gold, answer))):
        return False
    with suppress(_OutOfTime), _limited() if in_main else nullcontext():
        while (found := parse(answer)) and (rest := _behind(answer, str(found[-1]))).startswith("="):
            answer = rest[1:]
        if not found or not math_verify.verify(known := parse(gold), found, timeout_seconds=limit):
            return False
        units = {_unit(gold, str(known[-1])), _unit(answer, str(found[-1]))} - {""}
        is_close = len(units) < 2 and _are_close(known[0], found[0])
        return is_close and _is_worked_out(str(found[-1]), truth)
    return False


class _OutOfTime(BaseException):
    """Raised after `LIMIT`. No Exception, which math-verify would take for an error of its own."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raises `_OutOfTime` in the block after `LIMIT`. For the main thread."""

    def end(*_: Any) -> NoReturn:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _are_close(known: Any, found: Any) -> bool:
    """Returns False for numbers that are equal only because math-verify rounds to six decimals: they differ
    by more than a thousandth."""
    if known == found or not all(getattr(number, "is_number", False) for number in (known, found)):
        return True
    difference, size = abs((known - found).doit()).evalf(), abs(known.doit()).evalf()
    return not difference.is_comparable or bool(difference >= 1e-6 or difference <= size / 1000)


def _is_endless(text: str) -> bool:
    """Returns whether a number of the text has too many digits for a comparison that no limit ends."""
    for exponent, top, mark, factorial in _POWER.findall(text):
        if factorial or len(exponent) > 6 or (mark and len(exponent) > 1):
            return True
        if top and int(top) * math.log10(max(2, int(exponent))) > 5:
            return True
    return bool(_TOWER.search(text))


def _text(answer: str | float) -> str:
    if not isinstance(answer, str | int | float):
        raise TypeError(f"an answer or a label is text or a number, not {answer!r}")
    return _replaced(str(answer), _PLAIN)


def _replaced(text: str, patterns: Sequence[tuple[re.Pattern, Any]]) -> str:
    for pattern, plain in patterns:
        text = pattern.sub(plain, text)
    return text


def _fraction(sign: re.Match) -> str:
    parts = _normal(sign[2]).split("\u2044")
    return f"{sign[1]} {'/'.join(parts)}" if sign[1] else r"\frac{{{}}}{{{}}}".format(*parts)


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _behind(text: str, part: str) -> str:
    """Returns the text behind the last occurrence of a part; "" if there is none."""
    at = text.rfind(part)
    return text[at + len(part) :].lstrip(" $") if at >= 0 else ""


def _unit(text: str, number: str) -> str:
    """Returns the currency before a number, or the unit or base behind it, such as km, cm^2 or _2; "" without
    one."""
    before, _, behind = text.rpartition(number) if number in text else ("", "", "")
    sign = before.rstrip()[-1:]
    if sign in [*_CURRENCIES] and not (sign == "$" and "$" in behind):  # $18$ is a formula
        return sign
    found = _UNIT.match(behind) or _BASE.search(number)
    return re.sub(r"[{}()]", "", found[1]) if found else ""


def _scaled(number: str, words: str) -> Decimal:
    return Decimal(number.replace(",", "")).scaleb(sum(_SCALES[word] for word in words.lower().split()))


def _is_worked_out(answer: str, truth: str) -> bool:
    side = _replaced(answer, _TIDIED).rpartition("=")[2]
    is_whole = re.fullmatch(r"[-+]?[\d,]+", truth)
    return not _NUMBER.fullmatch(truth) or not (_SUM.search(side) or (is_whole and _QUOTIENT.search(side)))


def _braced(text: str, start: int) -> str | None:
    """Returns the content of the braces that open at `start`; None if they do not close."""
    depth = 0
    for i in range(start, len(text)):
        if text[i - 1] == "\\" and i > start:
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i].strip()
    return None
