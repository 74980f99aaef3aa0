"""Converts images to the inputs of a vision-language model: patches, which replace the placeholder tokens.

A row contains image files. For each forward pass the model's processor converts them to tensors; the most
recent ones are cached, because all samples of a prompt have the same images. If image tokens have positions
in height and width, these are computed for each sequence separately, so that a row may contain several.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.data.image_rows import load_auto_processor
from openrlhf.data.pictures import decoded, encoded
from openrlhf.rows import PackedRow, Sample
from openrlhf.text import image_layout
from openrlhf.types import Image

KEPT_IMAGES = 64
"""Number of images whose patches a process caches."""
BLANK_SIDE = 56
"""Side in pixels of the blank picture appended to a row without images."""
SHAPES = ((64, 64), (96, 160))
"""Heights and widths in pixels of two pictures with different numbers of patches."""


KINDS = ("token_type_ids", "mm_token_type_ids")
"""Names that processors use for the argument that marks the tokens of patches."""


class ImageReader:
    """Converts images to a model's inputs with the model's processor."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.patch_id = image_layout(processor).patch
        self._kinds_name = next(name for name in KINDS if name in processor.model_input_names)
        self.patches = lru_cache(KEPT_IMAGES)(self._patches)

    def inputs(self, token_ids: Tensor, images: Sequence[Image]) -> dict[str, Tensor]:
        """Returns the image inputs for token ids (N,), by the names of transformers' arguments: the
        concatenated patches of `images`, and the mask of their placeholder tokens."""
        read = [self.patches(image.data) for image in images]
        patches = {name: torch.cat([of_image[name] for of_image in read]) for name in read[0]}
        on_device = {name: x.to(token_ids.device, non_blocking=True) for name, x in patches.items()}
        return on_device | {self._kinds_name: self.kinds(token_ids)}

    def kinds(self, token_ids: Tensor) -> Tensor:
        """Returns (1, N) int32: 1 for patches, 0 for text."""
        return (token_ids == self.patch_id).int()[None]

    @cached_property
    def blank(self) -> Sample:
        return self.alone(PILImage.new("RGB", (BLANK_SIDE, BLANK_SIDE), "grey"))

    def noise(self, shape: tuple[int, int]) -> Sample:
        """Returns a sequence that consists of a random picture with `shape`, (height, width), the same in
        every call."""
        pixels = np.random.default_rng(shape).integers(256, size=(*shape, 3), dtype=np.uint8)
        return self.alone(PILImage.fromarray(pixels))

    def alone(self, picture: PILImage.Image) -> Sample:
        """Returns a sequence that consists only of `picture`, without actions."""
        read = self.processor(text=[self.processor.image_token], images=[picture], add_special_tokens=False)
        token_ids = torch.tensor(read["input_ids"][0])
        mask = torch.zeros(len(token_ids), dtype=torch.bool)
        return Sample(token_ids=token_ids, action_mask=mask, images=(encoded(picture),))

    def _patches(self, data: bytes) -> dict[str, Tensor]:
        made = self.processor.image_processor(images=[decoded(data)], return_tensors="pt")
        return {name: x for name, x in made.items() if name not in self.processor.unused_input_names}


def image_reader(path: str) -> ImageReader:
    """Builds the image reader of the model at `path`."""
    return ImageReader(load_auto_processor(path))


def freeze_vision(model: PreTrainedModel) -> None:
    """Freezes the vision tower and the projection of patches, so that only the language model is trained."""
    head = model.get_output_embeddings()
    learns = {id(p) for part in (model.get_decoder(), head) if part for p in part.parameters()}
    freeze(parameter for parameter in model.parameters() if id(parameter) not in learns)


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Freezes parameters, and marks them, so that their layers get no adapters."""
    for parameter in parameters:
        vars(parameter.requires_grad_(False))["is_frozen"] = True


def is_frozen(parameter: Tensor) -> bool:
    """Returns True if `freeze` froze the parameter. 4-bit weights have no gradients anyway."""
    return "is_frozen" in vars(parameter)


def with_blank(row: PackedRow, reader: ImageReader) -> PackedRow:
    """Returns `row`. If it has no images, a grey picture is appended as another sequence, because all ranks
    must run the vision tower if they shard parameters or sum gradients."""
    if row.images:
        return row
    blank = PackedRow.of([reader.blank]).to(row.token_ids.device)
    return replace(
        row,
        token_ids=torch.cat([row.token_ids, blank.token_ids]),
        position_ids=torch.cat([row.position_ids, blank.position_ids]),
        action_mask=torch.cat([row.action_mask, blank.action_mask]),
        lengths=row.lengths + blank.lengths,
        images=((),) * len(row.lengths) + blank.images,
    )


def positions_of_row(backbone: nn.Module, row: PackedRow, reader: ImageReader) -> Tensor:
    """Returns the positions (..., N) of the tokens of a row with at least one image, as `backbone` takes
    them."""
    counts_places = hasattr(backbone, "get_rope_index")
    return _positions(backbone, row, reader) if counts_places else row.position_ids[None]


def _positions(backbone: Any, row: PackedRow, reader: ImageReader) -> Tensor:
    """Returns positions (4, 1, N): the index in the sequence, and the model's positions in time, height and
    width."""
    places = []
    for token_ids, images in zip(row.token_ids.cpu().split(row.lengths), row.images, strict=True):
        grids = [reader.patches(image.data)["image_grid_thw"] for image in images]
        of_sequence, _ = backbone.get_rope_index(
            token_ids[None], reader.kinds(token_ids), image_grid_thw=torch.cat(grids) if grids else None
        )
        places.append(of_sequence)
    return torch.cat([row.position_ids[None, None], torch.cat(places, dim=2).to(row.position_ids.device)])
