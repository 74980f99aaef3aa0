"""A task whose answer is in a picture alone: the colours of its four squares, row by row.

(a picture) Which colours?
red blue white red
"""

import io
import random
import re
from dataclasses import dataclass

from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 60, 220),
    "yellow": (240, 210, 40),
    "white": (240, 240, 240),
    "purple": (140, 50, 160),
}
SQUARE = 28
"""Side of a square in pixels; the tiny vision model reads one square as one token."""
QUESTION = "Which colours?"


@dataclass(frozen=True, slots=True)
class Picture:
    colours: tuple[str, ...]
    """Colours at top left, top right, bottom left, bottom right."""

    @property
    def answer(self) -> str:
        return " ".join(self.colours)

    @property
    def name(self) -> str:
        """File name of the picture."""
        return f"{'-'.join(self.colours)}.png"

    def png(self) -> bytes:
        """Returns the picture as PNG; the bytes depend on the colours alone."""
        image = Image.new("RGB", (2 * SQUARE, 2 * SQUARE))
        for i, colour in enumerate(self.colours):
            top, left = SQUARE * (i // 2), SQUARE * (i % 2)
            image.paste(COLOURS[colour], (left, top, left + SQUARE, top + SQUARE))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def make_pictures(count: int, *, seed: int, exclude: frozenset[Picture] = frozenset()) -> list[Picture]:
    """Returns `count` different pictures, none of them in `exclude`. There are 1296."""
    rng = random.Random(f"picture/{seed}")
    pictures: dict[Picture, None] = {}
    while len(pictures) < count:
        picture = Picture(tuple(rng.choices([*COLOURS], k=4)))
        if picture not in exclude:
            pictures[picture] = None
    return list(pictures)


def fraction_right(text: str, label: str) -> float:
    """Returns the fraction of the label's colours that the text names at their place. Colours beyond the
    fourth do not count."""
    named, wanted = _COLOUR.findall(text), label.split()
    return sum(one == other for one, other in zip(named, wanted, strict=False)) / len(wanted)


_COLOUR = re.compile("|".join(COLOURS))
