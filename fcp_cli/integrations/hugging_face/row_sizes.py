"""Sizes of a training loop's rows, from stored lengths, a cache, or its own collator, for a job without a plan.

Images are sized from their headers: image processors of transformers derive tokens and patches only from heights and
widths. While rows are counted, decoding and resizing return blank pixels of the right shape, which cost neither time
nor memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data import has_masks_of_types, has_pictures, one_row, stored_lengths
from fcp_cli.plan.file import table_bytes, table_of
from fcp_cli.util.files import replaced_atomically
from fcp_cli.util.inputs import open_input
from fcp_cli.util.machine import usable_cores
from fcp_cli.util.masks import CAUSAL, MASK_COLUMN, Mask, MaskedSequence
from fcp_cli.vision.parts import VisualSequence

_CACHE: Final = "fcp/lengths"
_ROWS_BY_EACH_WORKER: Final = 64  # minimum
_PICTURES_BY_EACH_WORKER: Final = 8
_COMPARED: Final = 2  # rows with images that each process also decodes, to verify sizes from headers


class LoadedLengths:
    """Sizes of a trainer's training rows: from Arrow list offsets if possible, else from collated batches.

    Args:
        loader: the trainer's own loader.
        pairs: whether a row is a preference pair.
        config: model config, if the collator may return images and videos; None: it returns none.
    """

    def __init__(self, loader: Any, *, pairs: bool, config: Any = None) -> None:
        self._loader, self._pairs, self._config = loader, pairs, config
        self._cache = self._cache_file()  # now, since tokenizers remember their last call's settings

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def known(self) -> pa.Table | None:
        """Return the sizes of all rows if stored or cached, else None; the longest row verifies stored lengths."""
        stored = None if has_pictures(self._config) else stored_lengths(self._loader.dataset, pairs=self._pairs)
        if stored is not None and len(stored):
            longest = int(stored.argmax())
            if self.read(range(longest, longest + 1)).column("length")[0].as_py() == stored[longest]:
                return pa.table({"length": stored})
        if self._cache is not None and self._cache.is_file():
            with suppress(OSError, pa.ArrowInvalid), open_input(self._cache) as stream:
                found = table_of(stream.read())
                if len(found) == len(self):
                    return found
        return None

    def read(self, rows: range) -> pa.Table:
        """Collate rows one by one, in worker processes if there are many, and return their sizes."""
        loader = self._loader
        least = _PICTURES_BY_EACH_WORKER if has_pictures(self._config) else _ROWS_BY_EACH_WORKER
        cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = loader.num_workers or min(cores, len(rows) // least)
        rows_read = RowSizes(loader.dataset, loader.collate_fn, rows, pairs=self._pairs, config=self._config)
        reading = DataLoader(
            rows_read,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
            generator=torch.Generator(),
        )
        found = []
        with torch.random.fork_rng(devices=[]):  # keep the random state as without a plan
            for size in reading:
                if isinstance(size, str):
                    raise RunError(size)
                found.append(size)
        return _table_of(found, self._config)

    def keep(self, table: pa.Table) -> None:
        """Write the sizes to the user's cache if the data set and its collator can be identified."""
        if self._cache is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        with suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with replaced_atomically(self._cache) as temporary:
                temporary.write_bytes(table_bytes(table))

    def _cache_file(self) -> Path | None:
        """Return the cache file for this data set and collator; None if either has no fingerprint."""
        own = getattr(self._loader.dataset, "_fingerprint", None)
        if not own:
            return None
        from datasets.fingerprint import Hasher

        try:
            collator = Hasher.hash(self._loader.collate_fn)
        except Exception:  # the collator cannot be pickled, so it cannot be identified
            return None
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        read_as = config_text(self._config) if has_pictures(self._config) else str(self._pairs)
        key = hashlib.sha256(f"{own} {collator} {read_as}".encode()).hexdigest()
        return home / _CACHE / f"{key}.arrow"


def _table_of(sizes: Sequence[RowSize], config: Any) -> pa.Table:
    """Return the sizes as columns of a manifest."""
    columns = {"length": pa.array([one.tokens for one in sizes], pa.int64())}
    if has_pictures(config):
        columns["vision_patches"] = pa.array([one.patches for one in sizes], pa.int64())
        columns["vision_patch_pairs"] = pa.array([one.patch_pairs for one in sizes], pa.int64())
    if has_masks_of_types(config):
        columns["eta"] = pa.array([one.mask.eta(one.tokens) for one in sizes], pa.float64())
        columns[MASK_COLUMN] = pa.array([one.mask.numbers for one in sizes], pa.list_(pa.int32()))
    return pa.table(columns)


def config_text(config: Any) -> str:
    """Return a model's config.json."""
    return str(config.to_json_string(use_diff=False))


class RowSize(NamedTuple):
    """Sizes of a row as counted in a manifest.

    Attributes:
        patches: vision-encoder patches.
        patch_pairs: sum of squared patch counts over frames or tiles.
    """

    tokens: int
    patches: int = 0
    patch_pairs: int = 0
    mask: Mask = CAUSAL


def size_of_row(batch: Any, row: int, *, pairs: bool = False, config: Any = None) -> RowSize:
    """Return the sizes of a row as counted in a manifest; for the arguments see `one_row`."""
    found = one_row(batch, row, pairs=pairs, masked=has_masks_of_types(config), config=config)
    if isinstance(found, tuple):
        return RowSize(len(found[0]))
    mask = found.mask if isinstance(found, (MaskedSequence, VisualSequence)) else CAUSAL
    parts = found.parts if isinstance(found, VisualSequence) else ()
    patches = [height * width for height, width in (part.grid for part in parts)]
    return RowSize(len(found.tokens), sum(patches), sum(one**2 for one in patches), mask)


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
    return torch.zeros((), device="cpu").expand(*shape)


def _or_blank(own: Callable[..., Any], blank: Callable[[Sequence[int]], Any]) -> Callable[..., Any]:
    """Wrap a backend's `process_image`: blank for PIL images, unchanged for arrays."""
    from PIL.Image import Image

    def process_image(self: Any, image: Any, *given: Any, **named: Any) -> Any:
        return blank((3, image.height, image.width)) if isinstance(image, Image) else own(self, image, *given, **named)

    return process_image
