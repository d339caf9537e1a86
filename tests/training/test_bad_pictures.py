"""What is wrong with a picture or a processor, in one line that names the row and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.manifest.build import BuiltManifest
from fcp_cli.manifest.tokens import open_pictures
from tests.manifest.datasets import build, write_jsonl
from tests.manifest.picture_checkpoint import picture, png, write_clip, write_processor
from tests.messages import raises

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from fcp_cli.training.pictures.visuals import open_visuals
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.weights.models import model_config
from tests.training.picture_runs import write_vision_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.hf]

RECORD: dict[str, Any] = {"image": "a.png", "caption": "it is"}


def built(folder: Path, record: dict[str, Any], **options: Any) -> BuiltManifest:
    data = write_jsonl(folder / "data.jsonl", [{"caption": "text alone"}, record])
    return build(data, folder / "m.parquet", kind="media", processor=str(folder / "checkpoint"), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_processor(tmp_path / "checkpoint", "qwen3_vl")
    picture(40, 60, seed=0).save(tmp_path / "a.png")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "record", "message"),
    [
        ("gone.png", None, {"image": "gone.png"}, snapshot('ManifestError: FOLDER/data.jsonl:2: FOLDER/gone.png: cannot read it: No such file or directory; --bad-rows skip leaves such records out')),
        ("b.png", b"no picture at all", {"image": "b.png"}, snapshot('ManifestError: FOLDER/data.jsonl:2: FOLDER/b.png has no header of an image that is known; --bad-rows skip leaves such records out')),
        ("b.mp4", b"no video at all", {"video": "b.mp4"}, snapshot('ManifestError: FOLDER/data.jsonl:2: FOLDER/b.mp4: cannot read it as a video: Invalid data found when processing input; --bad-rows skip leaves such records out')),
        ("", None, {"image": "https://example.org/a.png"}, snapshot('ManifestError: FOLDER/data.jsonl:2: https://example.org/a.png is not on this machine; download it and name the file')),
        ("", None, {"image": ["a.png", "a.png"], "caption": None, "conversations": [{"from": "human", "value": "<image>"}]}, snapshot('ManifestError: FOLDER/data.jsonl:2 names 2 images but has places for 1; put <image> into its texts for each')),
        ("", None, {"image": "a.png", "caption": "<image> and <image>"}, snapshot('ManifestError: FOLDER/data.jsonl:2 has more places for images than the 1 image it names')),
        ("", None, {"image": 7}, snapshot("ManifestError: FOLDER/data.jsonl:2: a picture is '7'; it must be a path or bytes")),
    ],
    ids=["missing", "no picture", "no video", "elsewhere", "no place for it", "too many places", "no name"],
)  # fmt: skip
def test_a_bad_picture_ends_the_build_or_is_left_out(
    name: str, content: bytes | None, record: dict[str, Any], message: str, folder: Path
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    with raises(message):
        built(folder, RECORD | {"image": None} | record)


def write_sound(path: Path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame(format="s16", layout="mono", samples=800)
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_header(path: Path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        container.start_encoding()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            write_sound,
            snapshot(
                "ManifestError: FOLDER/data.jsonl:2: FOLDER/a.mkv has no video stream; --bad-rows skip leaves such records out"
            ),
        ),
        (
            write_header,
            snapshot(
                "ManifestError: FOLDER/data.jsonl:2: FOLDER/a.mkv: cannot read it as a video: End of file; --bad-rows skip leaves such records out"
            ),
        ),
        (
            lambda path: write_clip(path, 1, 32, 48, 4),
            snapshot("ManifestError: FOLDER/data.jsonl:2: a video needs at least 2 frames; leave the record out"),
        ),
    ],
    ids=["sound alone", "no frames", "one frame"],
)
def test_a_video_without_frames_ends_the_build(write: Callable[[Path], Any], message: str, folder: Path) -> None:
    pytest.importorskip("av")
    write(folder / "a.mkv")
    with raises(message):
        built(folder, {"video": "a.mkv", "caption": "it is"})


def test_a_template_that_fails_on_a_row_names_row_and_file(folder: Path) -> None:
    (folder / "checkpoint" / "chat_template.jinja").write_text(
        "{% if messages | length > 2 %}{{ raise_exception('no more than one answer') }}{% endif %}{{ messages[0].role }}"
    )
    turns = [{"from": who, "value": "so"} for who in ("human", "gpt", "human", "gpt")]
    with raises(
        snapshot(
            "ManifestError: FOLDER/data.jsonl:2: the chat template of FOLDER/checkpoint fails: no more than one answer"
        )
    ):
        built(folder, {"conversations": turns})


def test_unreadable_pictures_can_be_left_out_of_a_manifest(folder: Path) -> None:
    found = built(folder, RECORD | {"image": "gone.png"}, skips_bad=True)
    assert (found.rows, found.skipped) == (1, {"unreadable": 1})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "<|image_pad|> look",
            snapshot(
                "ManifestError: FOLDER/data.jsonl:2 has 1 picture, but the text that FOLDER/checkpoint's chat template makes of it has 2 marks for them (<|image_pad|>, <|video_pad|>); they must be as many, of the same kinds in the same order. Texts mark their places by <image> and <video>; the template writes the checkpoint's own marks"
            ),
        ),
        (
            [{"type": "input_image", "image_url": "a.png"}, {"type": "text", "text": "look"}],
            snapshot(
                'ManifestError: FOLDER/data.jsonl:2: a turn of \'messages\' holds a part of type \'input_image\'; known are text, image, image_url, video and video_url, as in {"type": "image", "image": PATH}'
            ),
        ),
        (
            [{"type": "text", "content": "look"}],
            snapshot("ManifestError: FOLDER/data.jsonl:2: 'messages' holds 'None' where a text belongs"),
        ),
    ],
    ids=["a mark of the checkpoint's", "a part of another service's", "no text"],
)
def test_a_turn_that_names_its_picture_in_another_way_is_told_how(content: Any, message: str, folder: Path) -> None:
    record = {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}],
        "image": "a.png",
    }
    with raises(message):
        built(folder, record)


def remove(folder: Path) -> None:
    (folder / "a.png").unlink()


def shorten(folder: Path) -> None:
    (folder / "a.png").write_bytes(png(picture(40, 60, seed=0))[:200])


def grow(folder: Path) -> None:
    picture(41, 60, seed=0).save(folder / "a.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            remove,
            snapshot(
                "RunError: row 1 of the manifest (FOLDER/data.jsonl at byte 26): FOLDER/a.png cannot be decoded: No such file or directory"
            ),
        ),
        (
            shorten,
            snapshot(
                "RunError: row 1 of the manifest (FOLDER/data.jsonl at byte 26): FOLDER/a.png cannot be decoded: image file is truncated"
            ),
        ),
        (
            grow,
            snapshot(
                "RunError: row 1 of the manifest (FOLDER/data.jsonl at byte 26): FOLDER/a.png is 41 x 60 pixels, but the manifest counted 40 x 60: it changed since"
            ),
        ),
    ],
    ids=["removed", "cut", "of another size"],
)
def test_a_picture_that_changed_since_is_named_when_it_is_decoded(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write_vision_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    picture(40, 60, seed=0).save(tmp_path / "a.png")
    built(tmp_path, RECORD)
    visuals = open_visuals(settings(tmp_path), model_config(str(tmp_path / "checkpoint")))
    assert visuals is not None
    change(tmp_path)
    with raises(message):
        visuals(1).parts[0].pixels()


def settings(folder: Path, **changes: Any) -> TrainSettings:
    given: dict[str, Any] = {"model": str(folder / "checkpoint"), "manifest": (folder / "m.parquet",), **changes}
    return TrainSettings(plan=folder / "plan.parquet", run_dir=folder / "run", decode_workers=0, **given)


def test_a_video_with_fewer_frames_than_its_header_says_is_named(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_vision_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    write_clip(tmp_path / "a.mp4", 12, 32, 48, 4)
    built(tmp_path, {"video": "a.mp4", "caption": "it is"})
    write_clip(tmp_path / "a.mp4", 5, 32, 48, 4)
    visuals = open_visuals(settings(tmp_path), model_config(str(tmp_path / "checkpoint")))
    assert visuals is not None
    with raises(
        snapshot(
            "RunError: row 1 of the manifest (FOLDER/data.jsonl at byte 26): FOLDER/a.mp4 has 5 frames, but the manifest counted 12"
        )
    ):
        visuals(1).parts[-1].pixels()


def lose_processor(folder: Path) -> None:
    (folder / "checkpoint" / "preprocessor_config.json").unlink()


def change_processor(folder: Path) -> None:
    file = folder / "checkpoint" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": {"shortest_edge": 256, "longest_edge": 512}}))


def lose_column(folder: Path) -> None:
    table = pq.read_table(folder / "m.parquet")
    pq.write_table(table.drop_columns(["pictures"]), folder / "m.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lose_processor,
            snapshot(
                "ManifestError: cannot read FOLDER/checkpoint/preprocessor_config.json: No such file or directory"
            ),
        ),
        (
            change_processor,
            snapshot(
                "ManifestError: the processor of FOLDER/checkpoint is not the one that FOLDER/m.parquet was counted with: its settings changed; build and plan again: fcp manifest build FOLDER/data.jsonl --kind media --processor FOLDER/checkpoint --train-on assistant -o FOLDER/m.parquet, then fcp plan FOLDER/m.parquet"
            ),
        ),
        (
            lose_column,
            snapshot(
                "ManifestError: FOLDER/m.parquet has no column 'pictures', which has the paths of images; build and plan again: fcp manifest build FOLDER/data.jsonl --kind media --processor FOLDER/checkpoint --train-on assistant -o FOLDER/m.parquet, then fcp plan FOLDER/m.parquet"
            ),
        ),
    ],
    ids=["processor gone", "processor changed", "no column of pictures"],
)
def test_a_manifest_that_does_not_fit_its_checkpoint_any_more_is_refused(
    change: Callable[[Path], None], message: str, folder: Path
) -> None:
    built(folder, RECORD)
    change(folder)
    with raises(message):
        open_pictures(folder / "m.parquet")


def test_a_model_without_an_encoder_or_weights_without_pixels_are_refused(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    picture(40, 60, seed=0).save(tmp_path / "a.png")
    built(tmp_path, RECORD)
    with raises(
        snapshot(
            "RunError: FOLDER/m.parquet holds pictures, but the model qwen3-tiny has no vision encoder; train a vision-language model, or build a manifest of texts only"
        )
    ):
        open_visuals(settings(tmp_path, model="qwen3-tiny"), model_config("qwen3-tiny"))
    sizes = write_jsonl(tmp_path / "sizes.jsonl", [{"text_tokens": 5, "images": [{"height": 40, "width": 60}]}])
    build(sizes, tmp_path / "m.parquet", kind="media", processor=str(tmp_path / "checkpoint"))
    with raises(
        snapshot(
            "RunError: FOLDER/m.parquet was built from sizes only, so the weights of FOLDER/checkpoint would be trained on synthetic pixels; build it from the images with 'fcp manifest build DATA --kind media --processor FOLDER/checkpoint', or rehearse with --weights random"
        )
    ):
        open_visuals(settings(tmp_path, weights=tmp_path / "checkpoint"), model_config(str(tmp_path / "checkpoint")))
