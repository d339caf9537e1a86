"""Synthetic image and video sizes that follow the distributions of published data sets, for tests and studies.

Each figure names its publication or is marked as assumed. No clip is copied: durations, sizes and captions are drawn
from a seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_Draw = np.random.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSet:
    """A published set of captioned clips.

    Attributes:
        seconds: draws a duration.
        sizes: share of each frame size (height, width).
        frames_per_second: frame rate of the files.
        caption_tokens: mean caption length in tokens.
        sources: publication behind each figure, or `assumed`.
    """

    seconds: Callable[[_Draw], float]
    sizes: Mapping[tuple[int, int], float]
    frames_per_second: float
    caption_tokens: int
    sources: Mapping[str, str]


_INTERNVID_SHARES = {(0.5, 2.0): 0.36, (2.0, 4.0): 0.26, (4.0, 10.0): 0.23, (10.0, 20.0): 0.08, (20.0, 600.0): 0.07}
"""Range of seconds -> published share of the clips; that no clip is shorter than 0.5 s is assumed."""


def _internvid_seconds(draw: _Draw) -> float:
    """Draw from the published shares, uniformly within each; above 20 s exponentially, to match the mean of 11.7 s."""
    spans = list(_INTERNVID_SHARES)
    least, most = spans[draw.choice(len(spans), p=list(_INTERNVID_SHARES.values()))]
    if least < 20.0:
        return float(draw.uniform(least, most))
    return least + _cut_exponential(draw, scale=90.0, most=most - least)


def _cut_exponential(draw: _Draw, *, scale: float, most: float) -> float:
    return -scale * math.log1p(-draw.random() * -math.expm1(-most / scale))


CLIP_SETS: Mapping[str, ClipSet] = {
    "msrvtt": ClipSet(
        # An exponential with scale 5.3, truncated to 10 to 30 s, has the published mean of 14.8 s.
        seconds=lambda draw: 10.0 + _cut_exponential(draw, scale=5.3, most=20.0),
        sizes={(240, 320): 1.0},
        frames_per_second=30.0,
        caption_tokens=12,
        sources={
            "seconds": "Xu et al., MSR-VTT, CVPR 2016: 10 K clips, 41.2 hours (mean 14.8 s); of 10 to 30 s",
            "sizes": "320 x 240, that of the files as they are distributed",
            "frames_per_second": "assumed",
            "caption_tokens": "Xu et al.: 200 K sentences, 1,856,523 words (9.3 each); tokens per word are assumed",
        },
    ),
    "internvid": ClipSet(
        seconds=_internvid_seconds,
        sizes={(720, 1280): 0.85, (480, 854): 0.10, (360, 640): 0.05},
        frames_per_second=30.0,
        caption_tokens=24,
        sources={
            "seconds": "Wang et al., InternVid, ICLR 2024, Table 1 and Figure 4: mean 11.7 s (234 M clips, 760.3 K "
            "hours); 36 % of 0 to 2 s, 26 % to 4 s, 23 % to 10 s, 8 % to 20 s, 7 % longer; their tail is assumed",
            "sizes": "Wang et al., Table 1: 85 % are 720p, the rest 360p to 512p; shares of the rest are assumed",
            "frames_per_second": "assumed",
            "caption_tokens": "Wang et al., Table 1: 17.6 words; tokens per word are assumed",
        },
    ),
    "openvid": ClipSet(
        # Lognormal with median 5.2 and sigma 0.8: mean 7.2 s, mostly below 8 s, few above 64 s.
        seconds=lambda draw: float(np.clip(draw.lognormal(math.log(5.2), 0.8), 2.0, 120.0)),
        sizes={(1080, 1920): 0.425, (720, 1280): 0.475, (512, 512): 0.10},
        frames_per_second=30.0,
        caption_tokens=150,
        sources={
            "seconds": "Nan et al., OpenVid-1M, ICLR 2025: 1.02 M clips; the mean of 7.2 s is from memory, in no text "
            "that could be read again; shape as the text on Figure 1 of the DHP paper: most below 8 s, few above 64 s; "
            "the width is assumed",
            "sizes": "Nan et al., abstract and data card: 433 K of 1.02 M clips are 1080p, none below 512 x 512; the "
            "others are assumed",
            "frames_per_second": "assumed",
            "caption_tokens": "assumed: long captions of a language model",
        },
    ),
}
"""Clip sets by name; `mixed` draws from all of them."""

NAMES = (*CLIP_SETS, "mixed")

_CHAT_TOKENS = 20  # assumed: chat template tokens and a short question
_IMAGE_SIZES = ((480, 640), (640, 480), (768, 1024), (1080, 1920))  # assumed: common photo and screen sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Overrides of published picture sizes and frame rates.

    Attributes:
        short_side: shorter side of all pictures in pixels, for small models; None keeps the published sizes.
        frames_per_second: frame rate of all clips, for models that use every frame; None keeps the files' rate.
    """

    short_side: int | None = None
    frames_per_second: float | None = None


AS_PUBLISHED = Scale()


def media_records(name: str, rows: int, *, seed: int, scale: Scale = AS_PUBLISHED) -> Iterator[dict[str, Any]]:
    """Yield records as `fcp manifest build --kind media` reads them.

    Args:
        name: one of `NAMES`. `mixed` is 20 % text only, 20 % one image, 20 % two to eight images, and 40 % clips of all
            three sets in equal shares; these shares are assumed.
        rows: number of records.
        seed: random seed; a record does not depend on `rows`.
        scale: overrides of sizes and frame rates.
    """
    for row in range(rows):
        draw = np.random.default_rng([seed, row])
        yield {"id": f"{name}-{row}", **_record(name, draw, scale)}


def write_media_records(path: Path, name: str, rows: int, *, seed: int, scale: Scale = AS_PUBLISHED) -> None:
    """Write `media_records` as JSON lines."""
    records = media_records(name, rows, seed=seed, scale=scale)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def _record(name: str, draw: _Draw, scale: Scale) -> dict[str, Any]:
    if name != "mixed":
        return _clip(CLIP_SETS[name], draw, scale)
    kind = int(draw.integers(5))
    if kind > 2:
        return _clip(CLIP_SETS[str(draw.choice(list(CLIP_SETS)))], draw, scale)
    text_tokens = _CHAT_TOKENS + int(draw.lognormal(math.log(200.0), 1.0))  # assumed
    if kind == 0:
        return {"text_tokens": text_tokens}
    sizes = [_IMAGE_SIZES[draw.integers(len(_IMAGE_SIZES))] for _ in range(1 if kind == 1 else draw.integers(2, 9))]
    images = [_scaled(height, width, scale) for height, width in sizes]
    return {"text_tokens": text_tokens + 2 * len(images), "images": images}


def _clip(clips: ClipSet, draw: _Draw, scale: Scale) -> dict[str, Any]:
    seconds = clips.seconds(draw)
    sizes, shares = list(clips.sizes), list(clips.sizes.values())
    height, width = sizes[draw.choice(len(sizes), p=shares)]
    rate = scale.frames_per_second or clips.frames_per_second
    video = {"frames": max(2, round(seconds * rate)), **_scaled(height, width, scale), "fps": rate}
    return {"text_tokens": _CHAT_TOKENS + int(draw.poisson(clips.caption_tokens)), "videos": [video]}


def _scaled(height: int, width: int, scale: Scale) -> dict[str, int]:
    factor = 1.0 if scale.short_side is None else scale.short_side / min(height, width)
    return {"height": max(1, round(height * factor)), "width": max(1, round(width * factor))}
