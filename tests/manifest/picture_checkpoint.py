"""Small checkpoints with tokenizer and processor, pictures and clips, and what transformers' own processors make of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.manifest.chat_checkpoint import write_checkpoint

Family = Literal["qwen3_vl", "qwen2_5_vl", "internvl", "gemma4"]

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INTERN_TEMPLATE = (QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")).replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>\n"
)
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")
TEMPLATES: dict[Family, str] = {
    "qwen3_vl": QWEN_TEMPLATE,
    "qwen2_5_vl": QWEN_TEMPLATE,
    "internvl": INTERN_TEMPLATE,
    "gemma4": GEMMA_TEMPLATE,
}
_QWEN_MARKS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
MARKS: dict[Family, dict[str, str]] = {
    "qwen3_vl": _QWEN_MARKS,
    "qwen2_5_vl": _QWEN_MARKS,
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
}
PATCH = 8  # pixels; a token of Qwen3-VL is 2 x 2 patches
TILE, TILE_TOKENS = 16, 4
GEMMA_PATCH, GEMMA_POOLING = 4, 2
_QWEN_IMAGES = {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 36}
_QWEN_VIDEOS: dict[Family, dict[str, Any]] = {
    "qwen3_vl": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 64},
    },
    "qwen2_5_vl": {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 16},
        "do_sample_frames": True,
    },
}
_MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.4, 0.5]}


def write_processor(folder: Path, family: Family) -> Path:
    """Tokenizer, chat template and processor of a small checkpoint, as `save_pretrained` leaves them."""
    from transformers import AutoTokenizer

    folder.mkdir(exist_ok=True)
    write_checkpoint(folder, TEMPLATES[family])
    loader: Any = AutoTokenizer
    tokenizer = loader.from_pretrained(folder, extra_special_tokens=MARKS[family])
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[family].values())})
    tokenizer.save_pretrained(folder)
    image_processor(family).save_pretrained(folder)
    if family == "gemma4":
        return folder
    if family == "internvl":
        videos: dict[str, Any] = {
            "video_processor_type": "InternVLVideoProcessor",
            "size": {"height": TILE, "width": TILE},
        }
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": TILE_TOKENS}))
    else:
        videos = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "fps": 2, "min_frames": 4}
        videos |= {"max_frames": 8, **_MEAN, **_QWEN_VIDEOS[family]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def image_processor(family: Family) -> Any:
    """The library's own, with small sizes."""
    if family == "gemma4":
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        gemma: Any = Gemma4ImageProcessorPil
        return gemma(patch_size=GEMMA_PATCH, pooling_kernel_size=GEMMA_POOLING, max_soft_tokens=70)
    if family != "internvl":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        qwen: Any = Qwen2VLImageProcessorPil
        return qwen(patch_size=PATCH, merge_size=2, size=_QWEN_IMAGES, **_MEAN)
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    intern: Any = GotOcr2ImageProcessorPil
    return intern(size={"height": TILE, "width": TILE}, min_patches=1, max_patches=6)


def processor(folder: Path, family: Family, *, videos: bool = False) -> Any:
    """transformers' own processor over a folder.

    Its video processor needs torchvision, which does not load everywhere; images do without.
    """
    import transformers

    loader: Any = transformers
    base: Any = {
        "qwen3_vl": loader.Qwen3VLProcessor,
        "qwen2_5_vl": loader.Qwen2_5_VLProcessor,
        "internvl": loader.InternVLProcessor,
        "gemma4": loader.Gemma4Processor,
    }[family]
    checks = base.check_argument_for_proper_class
    family_class = type(
        "SmallProcessor",
        (base,),
        {"check_argument_for_proper_class": lambda self, name, value: value is None or checks(self, name, value)},
    )
    tokenizer = loader.AutoTokenizer.from_pretrained(folder)
    images = loader.AutoImageProcessor.from_pretrained(folder)
    own_videos = loader.AutoVideoProcessor.from_pretrained(folder) if videos else None
    more = {"image_seq_length": TILE_TOKENS} if family == "internvl" else {}
    before = (None,) if family == "gemma4" else ()  # its processor of sounds
    tokenizer.pad_token = "<|im_end|>"  # Gemma 4's processor always asks for one
    return family_class(*before, images, tokenizer, own_videos, chat_template=tokenizer.chat_template, **more)


def picture(height: int, width: int, seed: int) -> Any:
    """A PIL image: noise on a gradient."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    values = draw.integers(0, 128, (height, width, 3)) + np.linspace(0, 127, width)[None, :, None]
    return Image.fromarray(values.astype(np.uint8))


def png(image: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def write_clip(path: Path, frames: int, height: int, width: int, fps: int) -> Path:
    """A clip of moving stripes, encoded by PyAV."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for number in range(frames):
            rows = (np.arange(height) * 7 + number * 31) % 256
            values = np.broadcast_to(rows[:, None, None], (height, width, 3)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(values), format="rgb24")))
        container.mux(stream.encode())
    return path


def odd_sizes(count: int, seed: int) -> Sequence[tuple[int, int]]:
    """Heights and widths of all kinds, within what Qwen's processors take."""
    draw = np.random.default_rng(seed)
    return [(int(height), int(width)) for height, width in draw.integers(3, 170, (count, 2)).tolist()]
