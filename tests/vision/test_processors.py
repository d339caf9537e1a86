"""Visual tokens against transformers' own functions, against published examples, and from checkpoint folders."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.vision.processors import (
    Gemma4Vision,
    GemmaVision,
    InternVision,
    Qwen25Vision,
    QwenVision,
    open_processor,
    recorded_processor,
    words_of,
)
from tests.messages import raises

QWEN, QWEN25, INTERN = QwenVision(), Qwen25Vision(), InternVision()


@lru_cache
def library_functions(module: str) -> dict[str, Any]:
    """The plain functions and the methods of a transformers module, without importing it: that needs torchvision."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    tree = ast.parse((Path(spec.origin).parent / "models" / f"{module}.py").read_text(encoding="utf-8"))
    wanted = {
        "smart_resize",
        "get_all_supported_aspect_ratios",
        "get_optimal_tiled_canvas",
        "sample_frames",
        "_calculate_timestamps",
        "replace_video_token",
        "get_aspect_ratio_preserving_size",
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for function in functions:
        function.decorator_list = []
        function.returns = None
        for argument in [*function.args.args, *function.args.kwonlyargs]:
            argument.annotation = None
    if functions:
        names: dict[str, Any] = {"math": math, "np": np}
        exec(compile(ast.Module([*functions], []), module, "exec"), names)
        return names
    pytest.skip(f"transformers has no functions in {module} any more")


def sizes(number: int) -> Iterator[tuple[int, int]]:
    """(height, width), log-uniform, within the aspect ratio that Qwen3-VL takes."""
    draw = np.random.default_rng(0)
    while number:
        height, width = (int(side) for side in np.exp(draw.uniform(np.log(8), np.log(9000), 2)))
        if max(height, width) <= 200 * min(height, width):
            number -= 1
            yield height, width


@pytest.mark.hf
def test_10_000_qwen_images_are_resized_as_by_transformers() -> None:
    smart_resize: Callable[..., tuple[int, int]] = library_functions("qwen2_vl/image_processing_qwen2_vl")[
        "smart_resize"
    ]
    for height, width in sizes(10_000):
        resized = smart_resize(height, width, 32, 65_536, 16_777_216)
        visual = QWEN.image(height, width)
        assert visual.patches == resized[0] // 16 * (resized[1] // 16), (height, width)
        assert visual.tokens == visual.patches // 4
        assert visual.patch_pairs == visual.patches**2


class Metadata:
    """What transformers knows of a video before it samples."""

    def __init__(self, total_num_frames: int, fps: float) -> None:
        self.total_num_frames, self.fps = total_num_frames, fps


class Sampler:
    """The settings that transformers' sampling reads from its processor."""

    fps, min_frames, max_frames, num_frames, temporal_patch_size = 2, 4, 768, None, 2


@pytest.mark.hf
def test_10_000_qwen_videos_are_sampled_resized_and_stamped_as_by_transformers() -> None:
    videos = library_functions("qwen3_vl/video_processing_qwen3_vl")
    stamps_of = library_functions("qwen3_vl/processing_qwen3_vl")["_calculate_timestamps"]
    draw = np.random.default_rng(1)
    for height, width in sizes(10_000):
        frames = int(np.exp(draw.uniform(np.log(2), np.log(60_000))))
        fps = float(draw.choice([1.0, 7.5, 23.976, 24.0, 25.0, 30.0, 60.0]))
        indices = videos["sample_frames"](Sampler(), Metadata(frames, fps))
        resized = videos["smart_resize"](len(indices), height, width, 2, 32, 4096, 25_165_824)
        stamps = [f"<{stamp:.1f} seconds>" for stamp in stamps_of(None, indices, fps)]
        visual = QWEN.video(frames, height, width, fps)
        part = resized[0] // 16 * (resized[1] // 16)
        assert list(visual.texts) == stamps, (frames, height, width, fps)
        assert visual.patches == part * len(stamps), (frames, height, width, fps)
        assert visual.patch_pairs == part**2 * len(stamps)
        assert visual.tokens == (part // 4 + 2) * len(stamps)


@pytest.mark.hf
def test_10_000_qwen2_5_images_and_videos_are_resized_and_sampled_as_by_transformers() -> None:
    images = library_functions("qwen2_vl/image_processing_qwen2_vl")["smart_resize"]
    videos = library_functions("qwen2_vl/video_processing_qwen2_vl")
    videos["torch"] = pytest.importorskip("torch")
    draw = np.random.default_rng(3)
    for height, width in sizes(10_000):
        resized = images(height, width, 28, 3136, 12_845_056)
        assert QWEN25.image(height, width).patches == resized[0] // 14 * (resized[1] // 14), (height, width)
        frames = int(np.exp(draw.uniform(np.log(2), np.log(60_000))))
        fps = float(draw.choice([1.0, 7.5, 23.976, 24.0, 25.0, 30.0, 60.0]))
        sampled = len(videos["sample_frames"](Sampler(), Metadata(frames, fps)))
        resized = videos["smart_resize"](height, width, 28, 128 * 28 * 28, 768 * 28 * 28)
        visual = QWEN25.video(frames, height, width, fps)
        pairs = (sampled + 1) // 2
        assert visual.grid == (pairs, resized[0] // 14, resized[1] // 14), (frames, height, width, fps)
        assert (visual.tokens, visual.texts) == (visual.patches // 4, ())
        assert visual.part_seconds == 2 / (sampled / frames * fps)


@pytest.mark.hf
def test_10_000_internvl_images_are_tiled_as_by_transformers() -> None:
    best = library_functions("got_ocr2/image_processing_got_ocr2")["get_optimal_tiled_canvas"]
    for height, width in sizes(10_000):
        columns, rows = best((height, width), (448, 448), 1, 12)
        tiles = columns * rows + (columns * rows > 1)
        visual = INTERN.image(height, width)
        assert (visual.tokens, visual.patch_pairs) == (256 * tiles + 2, tiles * 1024**2), (height, width)


@pytest.mark.hf
def test_gemma_images_are_cropped_as_by_transformers() -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor: Any = Gemma3ImageProcessorPil
    crop = processor().pan_and_scan
    vision = replace(GemmaVision(), pan_and_scan=True)
    seen = set()
    for height, width in sizes(2_000):
        crops = len(crop(np.broadcast_to(np.zeros(1), (3, height, width)), 256, 4, 1.2))
        visual = vision.image(height, width)
        assert (visual.tokens, visual.patch_pairs) == ((1 + crops) * 260, (1 + crops) * 4096**2), (height, width)
        assert GemmaVision().image(height, width).tokens == 260
        seen.add(crops)
    assert seen == {0, 2, 3, 4}


@pytest.mark.hf
@pytest.mark.parametrize("size", [(900, 900), (600, 1700)])
def test_gemma_images_are_written_as_by_transformers(size: tuple[int, int]) -> None:
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    visual, image = replace(GemmaVision(), pan_and_scan=True).image(*size), f"\n\n[{'x' * 256}]\n\n"
    processor = SimpleNamespace(full_image_sequence=image)
    wanted = Gemma3Processor.replace_image_token(processor, {"num_crops": [visual.grid[0] - 1]}, 0)  # type: ignore[arg-type]
    marks = GemmaVision().marks(SimpleNamespace(boi_token="[", image_token="x", eoi_token="]"))
    written = GemmaVision().written(visual, marks, is_video=False)
    assert written.text.replace("x", "x" * 256) == wanted
    assert sum(written.runs) == wanted.count("x")


@pytest.mark.hf
@pytest.mark.parametrize("max_tokens", [70, 280])
def test_10_000_gemma4_images_have_the_patches_of_transformers(max_tokens: int) -> None:
    fitted = library_functions("gemma4/image_processing_pil_gemma4")["get_aspect_ratio_preserving_size"]
    vision = Gemma4Vision(max_tokens=max_tokens)
    for height, width in [*sizes(10_000), (1, 5_000), (5_000, 1), (3, 900)]:
        rows, columns = (side // 16 for side in fitted(height, width, 16, max_tokens * 9, 3))
        visual = vision.image(height, width)
        assert visual.grid == (1, rows, columns), (height, width)
        assert visual.tokens == rows * columns // 9 + 2


def test_a_gemma4_picture_is_written_between_its_marks_and_videos_are_refused(tmp_path: Path) -> None:
    images = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 140}
    vision = open_processor(checkpoint(tmp_path, processor_config={"image_processor": images}))
    assert recorded_processor(vision.describe()) == vision
    assert vision.row_shape == (140 * 9, 3 * 16 * 16)
    marks = vision.marks(SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>"))
    written = vision.written(vision.image(480, 480), marks, is_video=False)
    assert (written.text, written.runs) == ("<|image><|image|><image|>", (11 * 11,))
    with pytest.raises(ValueError, match="videos of Gemma 4 cannot follow a plan; give their frames as images"):
        vision.video(9, 480, 480, 24.0)


class InternMarks:
    """The marks that transformers' InternVL processor writes around the tokens of a frame."""

    start_image_token, image_token, end_image_token, image_seq_length = "[", "x", "]", 256


@pytest.mark.hf
def test_10_000_internvl_videos_are_written_as_by_transformers() -> None:
    """Of a video only its number of frames counts: every one is a tile behind its title."""
    write = library_functions("internvl/processing_internvl")["replace_video_token"]
    draw = np.random.default_rng(2)
    expected: dict[int, tuple[int, tuple[str, ...]]] = {}
    for height, width in sizes(10_000):
        frames = int(np.exp(draw.uniform(np.log(1), np.log(400))))
        if frames not in expected:
            written = write(InternMarks(), {"pixel_values_videos": [np.empty((frames, 0))]}, 0)
            titles = tuple(piece.rpartition("]")[2] for piece in written.split("[")[:-1])
            expected[frames] = sum(written.count(mark) for mark in "[x]"), titles
        visual = INTERN.video(frames, height, width, None)
        assert (visual.tokens, visual.texts) == expected[frames]
        assert visual.patches == frames * 1024


@pytest.mark.parametrize(
    ("height", "width", "qwen", "intern"),
    [
        (224, 224, 64, 258),
        (448, 448, 196, 258),
        (720, 1280, 880, 2306),
        (2160, 3840, 8160, 2306),
        (3000, 4000, 11750, 3330),
    ],
)
def test_tokens_of_usual_sizes(height: int, width: int, qwen: int, intern: int) -> None:
    assert (QWEN.image(height, width).tokens, INTERN.image(height, width).tokens) == (qwen, intern)


def test_an_internvl_video_is_one_tile_and_one_line_of_text_per_frame() -> None:
    visual = INTERN.video(3, 720, 1280, None)
    assert visual.tokens == 3 * 258
    assert visual.texts == ("Frame1: ", "\nFrame2: ", "\nFrame3: ")


@pytest.mark.parametrize(
    ("text", "tokens"), [("<0.5 seconds>", 6), ("<123.4 seconds>", 8), ("Frame1: ", 4), ("\nFrame12: ", 6)]
)
def test_short_texts_are_split_into_words_digits_marks_and_spaces(text: str, tokens: int) -> None:
    assert words_of(text) == tokens


def test_pictures_that_qwen_refuses_are_refused() -> None:
    with raises(snapshot("ValueError: 10 x 4000 pixels exceed Qwen-VL's maximum aspect ratio of 200")):
        QWEN.image(10, 4000)
    with pytest.raises(ValueError, match="a video needs at least 2 frames"):
        QWEN.video(1, 100, 100, 30)


QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 1_048_576},
}
QWEN_VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 786_432},
    "fps": 1,
}
INTERN_IMAGES = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": 448, "width": 448},
    "min_patches": 1,
    "max_patches": 6,
    "crop_to_patches": True,
}


def checkpoint(root: Path, **files: Any) -> str:
    for name, content in files.items():
        (root / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(root)


def test_a_checkpoint_says_its_own_sizes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, preprocessor_config=QWEN_IMAGES, video_preprocessor_config=QWEN_VIDEOS)
    processor = open_processor(folder)
    assert processor.image(2160, 3840).tokens <= 1024
    assert processor.video(768, 720, 1280, 1.0).tokens == 384 * (1 + 2)
    assert processor.describe()["name"] == folder


def test_a_checkpoint_that_says_nothing_of_videos_counts_images(tmp_path: Path) -> None:
    images = {**QWEN_IMAGES, "temporal_patch_size": 2}
    processor = open_processor(checkpoint(tmp_path, preprocessor_config=images))
    assert processor.image(2160, 3840).tokens <= 1024
    with pytest.raises(ValueError, match=r"has no video_preprocessor_config\.json, which sets the size of videos"):
        processor.video(768, 720, 1280, 1.0)


QWEN25_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
}


def test_a_published_qwen2_5_folder_has_one_file_for_images_and_videos_and_takes_every_frame(tmp_path: Path) -> None:
    processor = open_processor(checkpoint(tmp_path, preprocessor_config=QWEN25_IMAGES))
    assert processor.image(1000, 1500) == QWEN25.image(1000, 1500)
    video = processor.video(31, 720, 1280, 25.0)  # the last frame fills up the last pair
    assert (video.grid, video.part_seconds) == ((16, 52, 92), 2 / 25)
    assert recorded_processor(processor.describe()) == processor


def test_a_newer_qwen2_5_folder_samples_videos_as_its_file_says(tmp_path: Path) -> None:
    videos = {**QWEN_VIDEOS, "video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": True}
    images = {**QWEN25_IMAGES, "size": {"shortest_edge": 1, "longest_edge": 2}}  # which the older names overrule
    folder = checkpoint(tmp_path, processor_config={"image_processor": images, "video_processor": videos})
    processor = open_processor(folder)
    assert processor.image(1000, 1500) == QWEN25.image(1000, 1500)
    assert processor.video(250, 280, 280, 25.0).grid == (5, 20, 20)
    assert processor.video(250, 1280, 1280, 25.0).patches <= 5 * 786_432 / 14**2


def test_a_newer_checkpoint_says_them_in_one_file(tmp_path: Path) -> None:
    settings_of = {"image_processor": INTERN_IMAGES, "image_seq_length": 256}
    processor = open_processor(checkpoint(tmp_path, processor_config=settings_of))
    assert processor.image(3000, 4000).tokens <= 256 * 7 + 2


FOREIGN: dict[str, dict[str, Any]] = {
    "no file": {},
    "a damaged file": {"preprocessor_config": "{"},
    "an unknown image processor": {"preprocessor_config": {"image_processor_type": "CLIP"}},
    "an unknown video processor": {
        "preprocessor_config": QWEN_IMAGES,
        "video_preprocessor_config": {"video_processor_type": "Qwen2VLVideo"},
    },
    "a cap on pixels of frames": {
        "preprocessor_config": QWEN_IMAGES,
        "video_preprocessor_config": {**QWEN_VIDEOS, "cap_pixels_per_frame": True},
    },
    "a number of frames": {
        "preprocessor_config": QWEN25_IMAGES,
        "video_preprocessor_config": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "do_sample_frames": True,
            "num_frames": 8,
        },
    },
    "a size that is half said": {
        "preprocessor_config": {**QWEN_IMAGES, "size": {"shortest_edge": 1}},
        "video_preprocessor_config": QWEN_VIDEOS,
    },
}
FOREIGN_MESSAGES = snapshot(
    {
        "no file": "ManifestError: cannot read FOLDER/preprocessor_config.json: No such file or directory",
        "a damaged file": "ManifestError: FOLDER/preprocessor_config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "an unknown image processor": "ManifestError: FOLDER has the image processor 'CLIP'; fcp knows Qwen-VL's, InternVL's, Gemma 3's and Gemma 4's",
        "an unknown video processor": "ManifestError: FOLDER has the video processor 'Qwen2VLVideo'; fcp knows Qwen3VLVideoProcessor and Qwen2VLVideoProcessor",
        "a cap on pixels of frames": "ManifestError: FOLDER caps the pixels of each video frame, which fcp does not model yet",
        "a number of frames": "ManifestError: FOLDER takes num_frames of each video, which fcp does not support; set fps instead",
        "a size that is half said": "ManifestError: FOLDER/preprocessor_config.json has no 'longest_edge', which the number of visual tokens depends on",
    }
)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path, case: str) -> None:
    with raises(FOREIGN_MESSAGES[case]):
        open_processor(checkpoint(tmp_path, **FOREIGN[case]))


def test_an_unknown_processor_is_named() -> None:
    with raises(
        snapshot(
            "ManifestError: --processor llava is none of qwen3-vl, qwen2.5-vl, internvl, gemma3, gemma4, nor the folder of a checkpoint"
        )
    ):
        open_processor("llava")
