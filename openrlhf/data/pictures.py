"""Converts between image files and pixels."""

import hashlib
import io

from PIL import Image as PILImage
from PIL import ImageOps

from openrlhf.types import Image


def decoded(data: bytes) -> PILImage.Image:
    """Decodes an image file: upright, in RGB."""
    return ImageOps.exif_transpose(PILImage.open(io.BytesIO(data))).convert("RGB")


def encoded(picture: PILImage.Image) -> Image:
    """Returns a PNG file of exactly these pixels, in RGB, named by its digest."""
    data = png(picture.convert("RGB"))
    return Image(name_image(data), data)


def png(picture: PILImage.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def name_image(data: bytes) -> str:
    """Returns the name of an image file that has no other: its SHA-256."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
