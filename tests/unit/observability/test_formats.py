import math

import pytest
from terminals import CONTROL

from openrlhf.observability.formats import clean_text, format_duration, format_number


def test_clean_text():
    assert clean_text("a\x1b[2Jb\x00\x07\x7f\x9b1m\r\nc\td\u202e") == "a[2Jb1m\nc\td"
    assert clean_text("日本 é 😀") == "日本 é 😀"
    assert clean_text("\ud800") == "?"
    assert not CONTROL.search(
        clean_text("".join(map(chr, range(0x3000)))).replace("\n", "").replace("\t", "")
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (3.0, "3"), (2048, "2,048"), (0.5, "0.5"), (0.012345, "0.0123"), (1e-6, "1e-06"),
        (-1234.56, "-1,235"), (56_700, "56.7k"), (999_999, "1000k"), (1.23e9, "1.23G"), (1e20, "1.00e+20"),
        (999.7, "1,000"), (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0124, "12ms"), (0.9999, "1.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"),
        (192, "3m12s"), (3599.9, "1h00m"), (7500, "2h05m"), (273_600, "3d04h"),
    ],
)  # fmt: skip
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
