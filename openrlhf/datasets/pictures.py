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
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG")
    data = file.getvalue()
    return Image(f"sha256:{hashlib.sha256(data).hexdigest()}", data)
