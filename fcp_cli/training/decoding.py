"""Decodes images and videos and preprocesses them with a checkpoint's image processor, in dedicated processes.

Video frames also go through the image processor: one by one, resized and normalized like the video processor does, and
merged in time afterwards. Frames are independent, so a rank preprocesses only those that it encodes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fcp_cli.errors import ManifestError, RunError
from fcp_cli.manifest.pictures import Picture, PictureSize
from fcp_cli.util.inputs import read_json
from fcp_cli.util.machine import usable_cores
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.words import counted, first_line
from fcp_cli.vision.processors import InternVision, VisionProcessor, Visual

Values: TypeAlias = npt.NDArray[np.float32]
_VIDEO_SETTINGS = ("image_mean", "image_std", "resample", "rescale_factor", "do_rescale", "do_normalize")


class BadPictureError(Exception):
    """A picture that is unreadable, or has changed since the manifest was built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Requested row ranges of a preprocessed picture: patches of Qwen-VL, tiles of InternVL."""

    picture: Picture
    size: PictureSize
    visual: Visual
    ranges: tuple[tuple[int, int], ...]


class Decoder:
    """Decodes with a checkpoint's image processor."""

    def __init__(self, folder: Path, processor: VisionProcessor) -> None:
        try:
            import PIL.Image  # noqa: F401
            from transformers import AutoImageProcessor
        except ImportError as error:
            raise RunError(f"images are decoded by Pillow and transformers: {pip_install('hf')}") from error
        loader: Any = AutoImageProcessor
        try:
            self._images = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds
            raise RunError(
                f"{folder} is not the folder of a checkpoint with an image processor: {first_line(error)}"
            ) from error
        self._processor, self._folder = processor, folder
        # As InternVL's processor does, overriding its image processor's file.
        self._cut = {"crop_to_patches": True} if isinstance(processor, InternVision) else {}
        self._video_settings = _video_settings(folder)

    def __call__(self, wanted: Wanted) -> list[Values]:
        """Return the requested rows, in order."""
        try:
            if wanted.size.frames is None:
                rows = self._image(wanted)
                return [rows[start:stop] for start, stop in wanted.ranges]
            return self._video(wanted)
        except ManifestError as error:
            raise BadPictureError(str(error)) from error

    def _image(self, wanted: Wanted) -> Values:
        rows = self._processed([_opened(wanted.picture, wanted.size)], **self._cut)
        expected = wanted.visual.grid[0] * self._processor.rows_per_part(wanted.visual)
        if len(rows) != expected:
            raise BadPictureError(
                f"becomes {len(rows)} rows of pixels, but the manifest counted {expected}: the processor has changed"
            )
        return rows

    def _video(self, wanted: Wanted) -> list[Values]:
        """Preprocess only the frames of the requested parts."""
        assert wanted.size.frames is not None
        per_part, together = self._processor.rows_per_part(wanted.visual), self._processor.frames_per_part
        indices = self._processor.frame_indices(wanted.size.frames, wanted.size.fps)
        indices = np.pad(indices, (0, wanted.visual.grid[0] * together - len(indices)), mode="edge")
        numbers = indices.reshape(-1, together)
        spans = [range(start // per_part, -(-stop // per_part)) for start, stop in wanted.ranges]
        chosen = sorted({part for span in spans for part in span})
        frames = _frames(wanted.picture, wanted.size, set(numbers[chosen].flat))
        size = self._processor.frame_size(wanted.visual)
        made = {part: self._part([frames[number] for number in numbers[part]], size) for part in chosen}
        return [
            np.concatenate([made[part] for part in span])[start - span.start * per_part : stop - span.start * per_part]
            for span, (start, stop) in zip(spans, wanted.ranges, strict=True)
        ]

    def _part(self, frames: Sequence[Values], size: tuple[int, int]) -> Values:
        """Return the rows of jointly encoded frames: a tile, or patches that span several frames."""
        count = len(frames)
        given = {name: value for name, value in self._video_settings.items() if name != "resample"}
        if self._cut:
            given["crop_to_patches"] = False
        resized = [self._resized(frame, *size) for frame in frames]
        rows = self._processed(resized, do_resize=False, input_data_format="channels_first", **given)
        if count == 1:
            return rows
        # The image processor repeats each frame in time: of frame i, take copy i.
        apart = rows.reshape(count, len(rows) // count, 3, count, -1)
        return np.stack([apart[i, :, :, i] for i in range(count)], axis=2).reshape(len(rows) // count, -1)

    def _resized(self, frame: Any, height: int, width: int) -> Any:
        """Resize a frame like the library's video processors, not to a size that the image processor chooses."""
        from transformers.image_processing_backends import PilBackend, TorchvisionBackend
        from transformers.image_utils import SizeDict

        backend: Any = TorchvisionBackend if self._images.backend == "torchvision" else PilBackend
        values = self._images.process_image(frame, do_convert_rgb=True, input_data_format="channels_last")
        resample = self._video_settings.get("resample", self._images.resample)
        return backend.resize(self._images, values, SizeDict(height=height, width=width), resample=resample)

    def _processed(self, images: Sequence[Any], **more: Any) -> Values:
        try:
            values = self._images(images=list(images), **more)["pixel_values"]
        except Exception as error:  # the library raises many kinds; images were decoded before
            raise RunError(f"the image processor of {self._folder} cannot run: {first_line(error)}") from error
        if isinstance(values, list):
            values = np.stack([np.asarray(value) for value in values])
        return np.ascontiguousarray(values, dtype=np.float32)


def _video_settings(folder: Path) -> dict[str, Any]:
    """Return the pixel settings of the checkpoint's video processor; {} if it has none."""
    file, newer = folder / "video_preprocessor_config.json", folder / "processor_config.json"
    document = read_json(file, error=RunError) if file.is_file() else None
    if document is None and newer.is_file():
        whole = read_json(newer, error=RunError)
        document = whole.get("video_processor") if isinstance(whole, dict) else None
    if not isinstance(document, dict):
        return {}
    return {name: document[name] for name in _VIDEO_SETTINGS if document.get(name) is not None}


def _opened(picture: Picture, size: PictureSize) -> Any:
    """Decode an image like transformers: with EXIF orientation applied, as RGB."""
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(picture.content()) as stored:
            image = PIL.ImageOps.exif_transpose(stored).convert("RGB")
    except Exception as error:  # decoders raise any exception
        raise BadPictureError(_undecodable(error)) from error
    _require_size(image.height, image.width, size)
    return image


def _frames(picture: Picture, size: PictureSize, wanted: set[int]) -> dict[int, Any]:
    """Decode frames by number."""
    try:
        import av
    except ImportError as error:
        raise RunError(f"videos are decoded by PyAV: {pip_install('video')}") from error
    content, found, count = picture.content(), dict[int, Any](), 0
    try:
        with av.open(str(content) if isinstance(content, Path) else content) as container:
            for number, frame in enumerate(container.decode(video=0)):
                count = number + 1
                if number in wanted:
                    found[number] = frame.to_ndarray(format="rgb24")
                if number >= max(wanted):
                    break
    except Exception as error:
        raise BadPictureError(_undecodable(error)) from error
    if wanted - set(found):
        raise BadPictureError(f"has {counted(count, 'frame')}, but the manifest counted {size.frames}")
    for values in found.values():
        _require_size(values.shape[0], values.shape[1], size)
    return found


def _undecodable(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return f"cannot be decoded: {reason}"


def _require_size(height: int, width: int, size: PictureSize) -> None:
    if (height, width) != (size.height, size.width):
        raise BadPictureError(
            f"is {height} x {width} pixels, but the manifest counted {size.height} x {size.width}: it changed since"
        )


# A bounded pool of processes that decode pictures ahead of the training loop.
#
# Processes are spawned, not forked: the trainer has threads, sockets and devices that do not survive a fork. Pixels
# stay in the trainer's memory until their micro-batch is loaded, so the loader's prefetch depth bounds that memory.

_MOST_WORKERS = 8


def usual_workers(local_ranks: int) -> int:
    """Return the number of decoder processes of a rank: its share of cores minus 1, between 1 and 8."""
    return min(_MOST_WORKERS, max(1, usable_cores() // max(local_ranks, 1) - 1))


class PixelPool:
    """Processes that decode with a checkpoint's processor.

    Args:
        folder: checkpoint folder.
        processor: processor with which the manifest was counted.
        workers: number of processes; 0 decodes in the calling thread.
    """

    def __init__(self, folder: Path, processor: VisionProcessor, *, workers: int) -> None:
        self._decoder = Decoder(folder, processor) if workers == 0 else None
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            self._pool = ProcessPoolExecutor(
                max_workers=workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(folder, processor),
            )
            self._pool.submit(os.getpid)  # starts workers now, so that they import while the model is built

    def begin(self, wanted: Wanted) -> Callable[[], list[Values]]:
        """Start decoding a picture; return a function that waits for its rows."""
        if self._decoder is not None:
            return partial(self._decoder, wanted)
        assert self._pool is not None
        try:
            future = self._pool.submit(_decode, wanted)
        except BrokenProcessPool as error:
            raise _broken() from error

        def wait() -> list[Values]:
            try:
                return future.result()
            except BrokenProcessPool as error:
                raise _broken() from error

        return wait

    def close(self) -> None:
        """End the processes; pending pictures are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _broken() -> RunError:
    return RunError(
        "a process that decodes images ended, perhaps because memory ran out; see the lines above, and try fewer "
        "with --decode-workers"
    )


_decoders: list[Decoder] = []


def _start_worker(folder: Path, processor: VisionProcessor) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and ends its workers
    threading.Thread(target=_follow_parent, name="fcp-parent", daemon=True).start()
    _decoders.append(Decoder(folder, processor))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the processes already run in parallel


def _follow_parent() -> None:
    """Exit when the trainer exits, even if killed: waiting for work would never end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _decode(wanted: Wanted) -> list[Values]:
    return _decoders[0](wanted)
