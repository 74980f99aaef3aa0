"""Texts and figures as a terminal and the lines of a run show them."""

import math
import re


def clean_text(text: str) -> str:
    """Removes control characters (except newline and tab) and marks that reverse the reading order, because
    they could act on a terminal. Replaces lone surrogates, which no stream can encode, by question marks."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, limit: int, *, keep_end: bool = False) -> str:
    text = clean_text(text).strip()
    if len(text) <= limit:
        return text
    # The question is at the end of a long prompt; an answer keeps its beginning and its conclusion.
    head = limit // 4 if keep_end else limit * 2 // 3
    return f"{text[:head]} […{len(text) - limit:,} characters…] {text[len(text) - (limit - head) :]}"


def format_number(value: float) -> str:
    """Formats a number with three to four digits: 0.0123, 12.3, 1,234, 56.7k, 1e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 10_000:
        return f"{int(value):,}"
    if size >= 10_000:
        for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if limit <= size < limit * 1000:
                return f"{value / limit:.3g}{unit}" if size < limit * 999.5 else f"{value / limit:.0f}{unit}"
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Formats a duration: 12ms, 1.2s, 34s, 3m12s, 2h05m, 3d04h."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
