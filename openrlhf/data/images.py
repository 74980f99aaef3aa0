"""Opens the images that rows and environments refer to. Only these are allowed:

    path               inside one folder, links resolved
    https://           from the hosts of `--data.image_hosts`, see `image_urls`; kept in the cache
    data:, base64      in the row itself, and so are bytes, {"bytes": ..., "path": ...} and PIL images

PNG, JPEG and WebP of limited size are read. An image that cannot be used is a UsageError that names it.
"""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ExifTags, ImageOps
from PIL import Image as PILImage

from openrlhf.data.files import kind
from openrlhf.data.image_urls import check_url, fetch
from openrlhf.data.pictures import name_image, png
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.files import cache_folder, replacing
from openrlhf.types import Image

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES = 32 * 2**20
MAX_PIXELS = 50_000_000
"""Maximum number of pixels of an image: a small file may decode to an image that fills the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSources:
    """The sources from which images may be read, apart from the values themselves."""

    root: Path | None = None
    """Folder that paths are relative to and must stay inside. None: no path is opened."""
    hosts: tuple[str, ...] = ()
    """Hosts whose https:// addresses are read."""


class ImageHeader(NamedTuple):
    """Metadata of an image, read without decoding it; height and width are those of the upright image."""

    reference: str
    height: int
    width: int


def load_image(value: Any, sources: ImageSources) -> Image:
    """Returns the image, decoded once to check that it is complete. An image with an EXIF orientation or
    transparency, which programs render differently, becomes a PNG: upright, and on white."""
    reference, file = _find(value, sources)
    data = file if isinstance(file, bytes) else file.read_bytes()
    with _opened(data, reference) as picture:
        picture.load()
        is_plain = picture.mode in ("RGB", "L") and not picture.has_transparency_data
        if not is_plain or _orientation(picture) != 1:
            data = png(_on_white(ImageOps.exif_transpose(picture)))
    return Image(reference, data)


def image_header(value: Any, sources: ImageSources) -> ImageHeader:
    """Returns the size of an image; of a file only the first bytes are read."""
    reference, file = _find(value, sources)
    with _opened(file, reference) as picture:
        lies = _orientation(picture) in _LYING
        width, height = reversed(picture.size) if lies else picture.size
    return ImageHeader(reference, height, width)


def image_identity(value: Any, sources: ImageSources) -> list[Any]:
    """Returns values that change when the image does, without reading the file."""
    reference, file = _find(value, sources)
    if isinstance(file, bytes):
        return [reference]
    stat = file.stat()
    return [reference, stat.st_size, stat.st_mtime_ns]


def _find(value: Any, sources: ImageSources) -> tuple[str, Path | bytes]:
    """Returns (the image's name in messages, its file or bytes)."""
    match value:
        case bytes(data) | {"bytes": bytes(data)}:
            return _named(data)
        case str(text) | {"path": str(text)}:
            return _find_text(text, sources)
        case PILImage.Image():
            return _named(png(value))
    text = f"an image is {kind(value)}; it must be a path, an https:// address, a data: URI, base64 or bytes."
    raise UsageError(ErrorCode.INVALID_ROW, text)


def _find_text(text: str, sources: ImageSources) -> tuple[str, Path | bytes]:
    if text.startswith("data:"):
        kind_of_data, _, data = text.partition(",")
        if not kind_of_data.endswith(";base64"):
            reason = "a data: URI must be data:image/...;base64,..."
            raise UsageError(ErrorCode.INVALID_ROW, reason, value=text[:40])
        return _named(_decode_base64(data))
    if "://" in text:
        return text, _downloaded(text, sources)
    if text.startswith(_BASE64_BEGINNINGS) and "." not in text:
        return _named(_decode_base64(text))
    return text, _in_root(text, sources.root)


def _named(data: bytes) -> tuple[str, bytes]:
    return name_image(data), data


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except binascii.Error as error:
        raise UsageError(ErrorCode.INVALID_ROW, f"not base64: {error}.", value=text[:40]) from error


def _in_root(text: str, root: Path | None) -> Path:
    error = partial(UsageError, value=text)
    if root is None:
        reason = "the folder of image paths is not known; set --data.image_root."
        raise error(ErrorCode.MISSING_FLAG, reason)
    root = root.resolve()
    path = (root / text).resolve()
    if not path.is_relative_to(root):
        reason = (
            f"the path leads to {path}, outside {root}. Copy the file there, or change --data.image_root."
        )
        raise error(ErrorCode.INVALID_ROW, reason)
    if not path.is_file():
        raise error(ErrorCode.NOT_FOUND, f"there is no such file in {root} (--data.image_root).")
    return path


def kept_download(url: str) -> Path:
    """Returns the place in the cache of a downloaded image, which may be missing."""
    return cache_folder() / "images" / hashlib.sha256(url.encode()).hexdigest()


def _downloaded(url: str, sources: ImageSources) -> Path:
    check_url(url, sources.hosts)
    kept = kept_download(url)
    if not kept.exists():
        data = fetch(url, sources.hosts, MAX_BYTES)
        with _opened(data, url):  # raises for data that is not an image, so that it is not cached
            kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept, shared=True) as beside:
            beside.write_bytes(data)
    return kept


@contextmanager
def _opened(file: Path | bytes, reference: str) -> Iterator[PILImage.Image]:
    """Opens an image without decoding it. Turns whatever PIL raises inside the block into a UsageError."""
    size = len(file) if isinstance(file, bytes) else file.stat().st_size
    unreadable = partial(UsageError, ErrorCode.UNREADABLE, value=reference)
    if size > MAX_BYTES:
        raise unreadable(f"{size} bytes; the limit is {MAX_BYTES}.")
    try:
        with PILImage.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are more than {MAX_PIXELS}")
            yield picture
    except PILImage.UnidentifiedImageError as error:
        raise unreadable(f"not an image of a supported format ({', '.join(FORMATS)}).") from error
    except Exception as error:  # a damaged file may raise nearly anything
        raise unreadable(f"damaged or too large: {error}.") from error


def _orientation(picture: PILImage.Image) -> int:
    """Returns the EXIF orientation: from 1, upright, to 8. For a PNG only EXIF data before the pixels counts,
    since PIL would decode the whole picture to look behind them."""
    if picture.format == "PNG" and "exif" not in picture.info:
        return 1
    return picture.getexif().get(ExifTags.Base.Orientation, 1)


_LYING = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""


def _on_white(picture: PILImage.Image) -> PILImage.Image:
    picture = picture.convert("RGBA")
    white = PILImage.new("RGBA", picture.size, "white")
    return PILImage.alpha_composite(white, picture).convert("RGB")


_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR")
"""First base64 characters of files of the three formats."""
