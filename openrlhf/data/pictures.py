"""Between the file of an image and its pixels."""

import hashlib
import io

from PIL import Image as PILImage
from PIL import ImageOps

from openrlhf.types import Image


def decoded(data: bytes) -> PILImage.Image:
    """The picture of a file, upright, in RGB."""
    return ImageOps.exif_transpose(PILImage.open(io.BytesIO(data))).convert("RGB")


def encoded(picture: PILImage.Image) -> Image:
    """A file with exactly these pixels, in RGB, which has their digest for a name."""
    data = png(picture.convert("RGB"))
    return Image(name_of(data), data)


def png(picture: PILImage.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def name_of(data: bytes) -> str:
    """What the file of a picture is called that has no other name."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
