"""Rows with images are counted from headers by the script's own processor, as its pixels would be counted."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL", reason="Pillow is not installed")

from PIL import Image, ImageFile

from fcp_cli.integrations.hugging_face.row_sizes import RowSize, RowSizes, blank_pixels
from tests.manifest.picture_checkpoint import (
    Family,
    image_processor,
    odd_sizes,
    picture,
    png,
    processor,
    write_processor,
)
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import IMAGE
from tests.training.picture_runs import config

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]

ROWS, WHOLE = 8, 3
Collate = Callable[[list[Any]], Any]


class Pictures:
    """A data set of a picture in each row, opened as it is asked for; of the rows from `WHOLE` on, no pixels are left."""

    def __init__(self) -> None:
        sizes = odd_sizes(ROWS, 2)
        self._whole = [png(picture(height, width, seed=row)) for row, (height, width) in enumerate(sizes)]
        self._files = [file[:64] if row >= WHOLE else file for row, file in enumerate(self._whole)]

    def mend(self) -> None:
        self._files = self._whole

    def __getitem__(self, row: int) -> Any:
        return Image.open(io.BytesIO(self._files[row]))


def collator(folder: Path, family: Family) -> tuple[Collate, Any]:
    """Return a script's collator and the configuration of its model."""
    own = processor(write_processor(folder / "checkpoint", family), family)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "say"}]}]
    text = own.apply_chat_template(turns, tokenize=False)

    def collate(items: list[Any]) -> dict[str, Any]:
        images = [item.convert("RGB") for item in items]
        batch = own(text=[text], images=images, return_tensors="pt")
        return {**{name: value for name, value in batch.items() if name != "num_patches"}, "labels": batch["input_ids"]}

    return collate, config(family, own.tokenizer)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl"])
def test_images_are_counted_from_their_headers_as_from_their_pixels(family: Family, tmp_path: Path) -> None:
    pictures = Pictures()
    collate, model = collator(tmp_path, family)
    rows = RowSizes(pictures, collate, range(ROWS), config=model)
    found = [rows[row] for row in range(ROWS)]
    pictures.mend()
    assert found == [rows._of_pixels(row) for row in range(ROWS)]
    assert all(isinstance(one, RowSize) and one.patches > 0 for one in found)


def test_so_are_those_of_gemma_3_with_their_masks() -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    kind: Any = Gemma3ImageProcessorPil
    images = kind(size={"height": 8, "width": 8}, do_pan_and_scan=True, pan_and_scan_min_crop_size=2,
                  pan_and_scan_max_num_crops=3, pan_and_scan_min_ratio_to_activate=1.2)  # fmt: skip

    def collate(items: list[Any]) -> dict[str, Any]:
        pixels = images(items, return_tensors="pt")["pixel_values"]
        ids = torch.tensor([[1, *[IMAGE] * (4 * len(pixels)), 2]])
        types = (ids == IMAGE).long()
        return {"input_ids": ids, "labels": ids, "token_type_ids": types, "pixel_values": pixels}

    pictures = Pictures()
    rows = RowSizes(pictures, collate, range(ROWS), config=FAMILIES["gemma3"].config())
    found = [rows[row] for row in range(ROWS)]
    pictures.mend()
    assert found == [rows._of_pixels(row) for row in range(ROWS)]
    sizes = [one for one in found if isinstance(one, RowSize)]
    assert len({one.patches for one in sizes}) > 1 and not any(one.mask.is_causal for one in sizes)


def test_a_collator_that_looks_at_pixels_is_given_them(tmp_path: Path) -> None:
    pictures = Pictures()
    pictures.mend()
    collate, model = collator(tmp_path, "qwen3_vl")

    def of_bright(items: list[Any]) -> Any:
        is_bright = [np.asarray(item).mean() > 10 for item in items]
        assert all(is_bright)
        return collate(items)

    def doubled_if_blank(items: list[Any]) -> Any:
        batch = collate(items)
        more = torch.ones(1, 1 if batch["pixel_values"].any() else 9, dtype=torch.int64)
        return {"input_ids": torch.cat((batch["input_ids"], more), 1), "pixel_values": batch["pixel_values"],
                "labels": torch.cat((batch["labels"], more), 1), "image_grid_thw": batch["image_grid_thw"]}  # fmt: skip

    for own in (of_bright, doubled_if_blank):
        rows = RowSizes(pictures, own, range(ROWS), config=model)
        assert [rows[row] for row in range(ROWS)] == [rows._of_pixels(row) for row in range(ROWS)]


def test_a_row_that_a_plan_cannot_follow_is_named_with_its_number(tmp_path: Path) -> None:
    pictures = Pictures()
    collate, model = collator(tmp_path, "qwen3_vl")
    rows = RowSizes(pictures, lambda items: {**collate(items), "sizes": torch.ones(1)}, range(2, 3), config=model)
    assert str(rows[0]).startswith("the data collator gives sizes besides the tokens of row 2, which would be lost")
    empty = RowSizes([{}], lambda _: dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 0)), range(1))
    assert empty[0] == "row 0 of the training data has no tokens; filter it out of the data set"


def test_images_are_read_as_ever_afterwards() -> None:
    import transformers.image_processing_backends as backends

    before = [dict(vars(one)) for one in (ImageFile.ImageFile, backends, backends.PilBackend)]
    with blank_pixels():
        assert image_processor("qwen3_vl")(Pictures()[0], return_tensors="pt")["pixel_values"].sum() == 0
    assert [dict(vars(one)) for one in (ImageFile.ImageFile, backends, backends.PilBackend)] == before
    assert image_processor("qwen3_vl")(Pictures()[0], return_tensors="pt")["pixel_values"].sum() != 0


class FakeTorchvision(ModuleType):
    """As much of torchvision as image processors of Qwen-VL need, of which nothing can be resized."""

    InterpolationMode = type("InterpolationMode", (), {"BILINEAR": 2, "LANCZOS": 1, "BICUBIC": 3})
    functional: Any = None

    @staticmethod
    def resize(images: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
        raise AssertionError("pixels were resized")


def test_processors_on_torchvision_give_the_grids_of_those_on_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.image_processing_backends as backends

    fake = FakeTorchvision("torchvision")
    fake.functional = fake
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(backends, "tvF", fake, raising=False)
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", dict.fromkeys(range(8), 3))
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    kind: Any = Qwen2VLImageProcessor
    on_pillow = image_processor("qwen3_vl")
    images = [Image.new("RGB", (width, height)) for height, width in odd_sizes(5, 1)]
    with blank_pixels():
        found = kind(patch_size=8, merge_size=2, size=dict(on_pillow.size))(images, return_tensors="pt")
    expected = on_pillow(images, return_tensors="pt")
    assert found["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    assert found["pixel_values"].shape == expected["pixel_values"].shape
