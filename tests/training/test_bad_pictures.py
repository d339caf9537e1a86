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

from fcp_cli.training.pictures import open_visuals
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.weights import model_config
from tests.training.picture_runs import write_vision_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]

CAPTION: dict[str, Any] = {"caption": "it is"}
RECORD = {**CAPTION, "image": "a.png"}


def built(folder: Path, record: dict[str, Any], **options: Any) -> BuiltManifest:
    data = write_jsonl(folder / "data.jsonl", [{"caption": "text alone"}, record])
    return build(data, folder / "m.parquet", kind="media", processor=str(folder / "checkpoint"), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_processor(tmp_path / "checkpoint", "qwen3_vl")
    picture(40, 60, seed=0).save(tmp_path / "a.png")
    return tmp_path


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


def write_strict_template(path: Path) -> None:
    path.write_text(
        "{% if messages | length > 2 %}{{ raise_exception('no more than one answer') }}{% endif %}{{ messages[0].role }}"
    )


def asked(content: Any) -> dict[str, Any]:
    """A conversation whose first turn is this, about the picture."""
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    return {"messages": turns, "image": "a.png"}


# What is wrong -> the file that is written for it, what writes it, and the record.
BAD: dict[str, tuple[str, Callable[[Path], Any] | None, dict[str, Any]]] = {
    "no file": ("", None, {**CAPTION, "image": "gone.png"}),
    "no picture": ("b.png", lambda path: path.write_bytes(b"no picture at all"), {**CAPTION, "image": "b.png"}),
    "no video": ("b.mp4", lambda path: path.write_bytes(b"no video at all"), {**CAPTION, "video": "b.mp4"}),
    "sound alone": ("b.mkv", write_sound, {**CAPTION, "video": "b.mkv"}),
    "no frames": ("b.mkv", write_header, {**CAPTION, "video": "b.mkv"}),
    "one frame": ("b.mkv", lambda path: write_clip(path, 1, 32, 48, 4), {**CAPTION, "video": "b.mkv"}),
    "a picture elsewhere": ("", None, {**CAPTION, "image": "https://example.org/a.png"}),
    "more pictures than places": (
        "",
        None,
        {"image": ["a.png", "a.png"], "conversations": [{"from": "human", "value": "<image>"}]},
    ),
    "more places than pictures": ("", None, {"image": "a.png", "caption": "<image> and <image>"}),
    "a number in place of a name": ("", None, {**CAPTION, "image": 7}),
    "a template that fails": (
        "checkpoint/chat_template.jinja",
        write_strict_template,
        {"conversations": [{"from": who, "value": "so"} for who in ("human", "gpt", "human", "gpt")]},
    ),
    "a mark of the checkpoint's": ("", None, asked("<|image_pad|> look")),
    "a part of another service's": (
        "",
        None,
        asked([{"type": "input_image", "image_url": "a.png"}, {"type": "text", "text": "look"}]),
    ),
    "a part without its text": ("", None, asked([{"type": "text", "content": "look"}])),
}
BAD_MESSAGES = snapshot(
    {
        "no file": "ManifestError: FOLDER/data.jsonl:2: FOLDER/gone.png: cannot read it: No such file or directory; use --bad-rows skip to drop such records",
        "no picture": "ManifestError: FOLDER/data.jsonl:2: FOLDER/b.png has no header of a known image format; use --bad-rows skip to drop such records",
        "no video": "ManifestError: FOLDER/data.jsonl:2: FOLDER/b.mp4: cannot read it as a video: Invalid data found when processing input; use --bad-rows skip to drop such records",
        "sound alone": "ManifestError: FOLDER/data.jsonl:2: FOLDER/b.mkv has no video stream; use --bad-rows skip to drop such records",
        "no frames": "ManifestError: FOLDER/data.jsonl:2: FOLDER/b.mkv: cannot read it as a video: End of file; use --bad-rows skip to drop such records",
        "one frame": "ManifestError: FOLDER/data.jsonl:2: a video needs at least 2 frames; drop the record",
        "a picture elsewhere": "ManifestError: FOLDER/data.jsonl:2: https://example.org/a.png is not on this machine; download it and name the file",
        "more pictures than places": "ManifestError: FOLDER/data.jsonl:2 names 2 images but has places for 1; put <image> into its texts for each",
        "more places than pictures": "ManifestError: FOLDER/data.jsonl:2 has more places for images than the 1 image it names",
        "a number in place of a name": "ManifestError: FOLDER/data.jsonl:2: a picture is '7'; it must be a path or bytes",
        "a template that fails": "ManifestError: FOLDER/data.jsonl:2: the chat template of FOLDER/checkpoint fails: no more than one answer",
        "a mark of the checkpoint's": "ManifestError: FOLDER/data.jsonl:2 has 1 picture, but the text that FOLDER/checkpoint's chat template makes of it has 2 marks for them (<|image_pad|>, <|video_pad|>); they must be as many, of the same kinds in the same order. Texts mark their places by <image> and <video>; the template writes the checkpoint's own marks",
        "a part of another service's": 'ManifestError: FOLDER/data.jsonl:2: a turn of \'messages\' holds a part of type \'input_image\'; known are text, image, image_url, video and video_url, as in {"type": "image", "image": PATH}',
        "a part without its text": "ManifestError: FOLDER/data.jsonl:2: 'messages' holds 'None' instead of a text",
    }
)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_picture_ends_the_build_in_one_line_that_names_its_row(case: str, folder: Path) -> None:
    name, write, record = BAD[case]
    if name.endswith((".mp4", ".mkv")):
        pytest.importorskip("av")
    if write is not None:
        write(folder / name)
    with raises(BAD_MESSAGES[case]):
        built(folder, record)


def test_unreadable_pictures_can_be_left_out_of_a_manifest(folder: Path) -> None:
    found = built(folder, RECORD | {"image": "gone.png"}, skips_bad=True)
    assert (found.rows, found.skipped) == (1, {"unreadable": 1})


# What happens to the picture after its manifest is built.
CHANGES: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "cut short": lambda file: file.write_bytes(png(picture(40, 60, seed=0))[:200]),
    "of another size": lambda file: picture(41, 60, seed=0).save(file),
}
CHANGES_MESSAGES = snapshot(
    {
        "removed": "RunError: row 1 of the manifest (FOLDER/data.jsonl:2): FOLDER/a.png cannot be decoded: No such file or directory",
        "cut short": "RunError: row 1 of the manifest (FOLDER/data.jsonl:2): FOLDER/a.png cannot be decoded: image file is truncated",
        "of another size": "RunError: row 1 of the manifest (FOLDER/data.jsonl:2): FOLDER/a.png is 41 x 60 pixels, but the manifest counted 40 x 60: it changed since",
    }
)


@pytest.mark.parametrize("case", CHANGES)
def test_a_picture_that_changed_since_is_named_when_it_is_decoded(tmp_path: Path, case: str) -> None:
    write_vision_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    picture(40, 60, seed=0).save(tmp_path / "a.png")
    built(tmp_path, RECORD)
    visuals = open_visuals(settings(tmp_path), model_config(str(tmp_path / "checkpoint")))
    assert visuals is not None
    CHANGES[case](tmp_path / "a.png")
    with raises(CHANGES_MESSAGES[case]):
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
            "RunError: row 1 of the manifest (FOLDER/data.jsonl:2): FOLDER/a.mp4 has 5 frames, but the manifest counted 12"
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


MISFITS: dict[str, Callable[[Path], None]] = {
    "no processor": lose_processor,
    "another processor": change_processor,
    "no column of pictures": lose_column,
}
MISFITS_MESSAGES = snapshot(
    {
        "no processor": "ManifestError: cannot read FOLDER/checkpoint/preprocessor_config.json: No such file or directory",
        "another processor": "ManifestError: the processor of FOLDER/checkpoint is not the one that FOLDER/m.parquet was counted with: its settings changed; build and plan again: fcp manifest build FOLDER/data.jsonl --kind media --processor FOLDER/checkpoint --train-on assistant -o FOLDER/m.parquet, then fcp plan FOLDER/m.parquet",
        "no column of pictures": "ManifestError: FOLDER/m.parquet has no column 'pictures', which has the paths of images; build and plan again: fcp manifest build FOLDER/data.jsonl --kind media --processor FOLDER/checkpoint --train-on assistant -o FOLDER/m.parquet, then fcp plan FOLDER/m.parquet",
    }
)


@pytest.mark.parametrize("case", MISFITS)
def test_a_manifest_that_does_not_fit_its_checkpoint_any_more_is_refused(folder: Path, case: str) -> None:
    built(folder, RECORD)
    MISFITS[case](folder)
    with raises(MISFITS_MESSAGES[case]):
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
