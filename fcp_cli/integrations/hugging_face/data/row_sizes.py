"""Computes the sizes of a script's training rows through its own collator; images are sized from their headers.

Image processors of transformers derive tokens and patches only from heights and widths. While rows are counted,
decoding and resizing return blank pixels of the right shape, which cost neither time nor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data.pictures import RowSize, has_pictures, size_of_row

_COMPARED: Final = 2  # rows with images that each process also decodes, to verify sizes from headers


class RowSizes(Dataset[RowSize | str]):
    """A data set of row sizes, or of error messages: an exception in a worker would print a traceback.

    Args:
        dataset, collate: data set and collator of the script's loader.
        rows: rows to count.
        pairs: whether a row is a preference pair.
        config: model config, if the collator may return images and videos.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], rows: range, *, pairs: bool = False, config: Any = None
    ) -> None:
        self._dataset, self._collate, self._rows = dataset, collate, rows
        self._pairs, self._config = pairs, config
        self._reads_headers, self._compared = has_pictures(config), 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> RowSize | str:
        row = self._rows[at]
        try:
            found = self._of_headers(row) or self._of_pixels(row)
        except RunError as error:
            return str(error)
        return found if found.tokens else f"row {row} of the training data has no tokens; filter it out of the data set"

    def _of_pixels(self, row: int) -> RowSize:
        return size_of_row(self._collate([self._dataset[row]]), row, pairs=self._pairs, config=self._config)

    def _of_headers(self, row: int) -> RowSize | None:
        """Return the size from the headers of a row's images, or None if its pixels are needed."""
        if not self._reads_headers:
            return None
        try:
            with blank_pixels():
                found = self._of_pixels(row)
        except Exception:  # any error of a collator that reads pixels; a faulty row raises again with real pixels
            return None
        if found.patches and self._compared < _COMPARED:
            self._compared += 1
            self._reads_headers = found == self._of_pixels(row)
            return found if self._reads_headers else None
        return found


@contextmanager
def blank_pixels() -> Iterator[None]:
    """Make transformers' image processors return zeros of the right shapes, without decoding images."""
    import transformers.image_processing_backends as backends
    from PIL.Image import new
    from PIL.ImageFile import ImageFile

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (ImageFile, "load", lambda image: None),
        (ImageFile, "convert", lambda image, *_, **__: image),
        (ImageFile, "copy", lambda image: image),
        (ImageFile, "resize", lambda image, size, *_, **__: new("RGB", size)),
        (backends, "np_resize", lambda image, size, **_: _numpy_blank((len(image), *size))),
        (backends, "np_rescale", lambda image, **_: image),
        (backends, "np_normalize", lambda image, **_: image),
        (backends.TorchvisionBackend, "rescale_and_normalize", lambda self, images, *_: images),
    ]
    for kind, blank in ((backends.PilBackend, _numpy_blank), (backends.TorchvisionBackend, _torch_blank)):
        replaced.append((kind, "process_image", _or_blank(kind.process_image, blank)))
    if hasattr(backends, "tvF"):  # with torchvision
        replaced.append((backends.tvF, "resize", lambda images, size, **_: _torch_blank((*images.shape[:-2], *size))))
    with ExitStack() as stack:
        for owner, name, blank in replaced:
            stack.callback(_restore, owner, name, vars(owner).get(name))
            setattr(owner, name, blank)
        yield


def _restore(owner: Any, name: str, own: Any) -> None:
    if own is None:  # inherited
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def _numpy_blank(shape: Sequence[int]) -> Any:
    return np.broadcast_to(np.float32(0), tuple(shape))


def _torch_blank(shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(()).expand(*shape)


def _or_blank(own: Callable[..., Any], blank: Callable[[Sequence[int]], Any]) -> Callable[..., Any]:
    """Wrap a backend's `process_image`: blank for PIL images, unchanged for arrays."""
    from PIL.Image import Image

    def process_image(self: Any, image: Any, *given: Any, **named: Any) -> Any:
        return blank((3, image.height, image.width)) if isinstance(image, Image) else own(self, image, *given, **named)

    return process_image
