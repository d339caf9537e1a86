"""What changed inputs have broken: one small input each."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import PlanError, RunError
from fcp_cli.manifest.media import video_size
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.tokens import open_tokens
from fcp_cli.models.model import load_hf_config
from fcp_cli.models.weights import find_weights
from fcp_cli.plan.setup import Pipeline
from fcp_cli.report.charts import DegreeColours
from fcp_cli.util.validation import validated
from fcp_cli.util.words import first_line
from tests.cli.planning_folder import assert_one_error_line, fcp, write_dataset
from tests.fuzz.mutations import write_parquet
from tests.manifest.chat_checkpoint import write_checkpoint
from tests.manifest.datasets import write_jsonl
from tests.messages import raises

pytestmark = [pytest.mark.torch, pytest.mark.hf]


def test_a_manifest_with_other_rows_than_the_plans_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    fcp("plan", "dataset.parquet", "--ranks", "8", "--tokens-per-rank", "8192", "-o", "plan.parquet", cwd=tmp_path)
    pq.write_table(pa.table({"length": [5]}), tmp_path / "other.parquet")
    for words in (["report"], ["inspect"], ["inspect", "--step", "0", "--why", "0"]):
        result = fcp(*words[:1], "plan.parquet", *words[1:], "--manifest", "other.parquet", cwd=tmp_path)
        assert assert_one_error_line(result, 1) == snapshot(
            "error: --manifest other.parquet has 1 row, but plan.parquet was planned from 96 rows of dataset.parquet; name that one"
        )


def test_a_legend_shows_degrees_that_have_a_colour() -> None:
    assert DegreeColours([2, 4]).encoding([1, 2])["legend"]["values"] == ["2"]


def test_a_video_without_a_decoder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    (tmp_path / "clip.mp4").write_bytes(b"x")
    stream = SimpleNamespace(codec_context=None)  # and so no size
    container = SimpleNamespace(streams=SimpleNamespace(video=[stream]))
    monkeypatch.setattr(av, "open", lambda *_: nullcontext(container))
    with raises(snapshot("ManifestError: clip.mp4 has no video stream")):
        video_size(tmp_path / "clip.mp4", "clip.mp4")


def test_a_turn_whose_role_is_no_text_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "chat")
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": {"a": 1}, "content": "x"}]}])
    result = fcp("manifest", "build", "chat.jsonl", "--kind", "chat", "--tokenizer", "chat", cwd=tmp_path)
    assert "a turn of 'messages' is of {'a': 1}; roles are" in assert_one_error_line(result, 1)


def test_a_long_message_of_a_library_is_shortened() -> None:
    assert len(first_line(ValueError("x" * 5000))) == 1000


@pytest.mark.processes
def test_a_record_that_a_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "chat")
    settings = tmp_path / "chat" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": "x"}))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk}])
    result = fcp("manifest", "build", "chat.jsonl", "--kind", "chat", "--tokenizer", "chat", cwd=tmp_path)
    assert assert_one_error_line(result, 1).endswith(
        "cannot encode: '>' not supported between instances of 'int' and 'str'"
    )


@pytest.mark.parametrize("name", ["b\0c", "k" * 100_000])
def test_files_of_weights_have_names_that_can_be_shown(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(RunError, match="has no 'weight_map' from tensors to files"):
        find_weights(tmp_path)


def test_a_profile_of_impossibly_many_devices_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    with (tmp_path / "profile.yaml").open("a") as profile:
        profile.write("measurement: {tensor_parallel: 9223372036854775808}\n")
    assert assert_one_error_line(fcp("plan", "dataset.parquet", "--ranks", "4", cwd=tmp_path), 2) == snapshot(
        "error: the cost profile of qwen3-8b on example-8x8 has tensor_parallel 9223372036854775808 in its block measurement; it must be from 1 to 1048576"
    )


def test_pipelines_of_impossibly_many_blocks_are_refused() -> None:
    document = {"virtual_stages": 1 << 40, "forward_share": 0.25}
    with raises(
        snapshot(
            "PlanError: the pipeline: virtual_stages is 1099511627776; it must be a whole number of at least 1, at most 4096"
        )
    ):
        validated(document, Pipeline, where="the pipeline", error=PlanError)


def test_a_list_of_another_length_is_refused() -> None:
    with raises(snapshot("PlanError: the part: files[0] is ['a', 1, 2, 3]; it must be a list of 3")):
        validated({"files": [["a", 1, 2, 3]]}, _Files, where="the part", error=PlanError)


@dataclass(frozen=True)
class _Files:
    files: tuple[tuple[str, int, int], ...]


LINES: dict[str, object] = {"kind": "jsonl", "column": "text", "tokenizer": "bytes", "files": ["d.jsonl"]}
LAYERS: dict[str, dict[str, object]] = {
    "a kind that is no text": {"model_type": "qwen3", "layer_types": [{"a": 1}, "full_attention"]},
    "layers that are no list": {"model_type": "bamba", "attn_layer_indices": "~"},
}
LAYERS_MESSAGES = snapshot(
    {
        "a kind that is no text": "ProfileError: FOLDER/config.json: layer_types has {'a': 1}; known: full_attention, sliding_attention, linear_attention",
        "layers that are no list": "ProfileError: FOLDER/config.json: attn_layer_indices is '~'; it must be a list of layers",
    }
)


@pytest.mark.parametrize("case", LAYERS)
def test_layers_of_a_configuration_that_are_none_are_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **LAYERS[case]}))
    with raises(LAYERS_MESSAGES[case]):
        load_hf_config(tmp_path / "config.json")


# What is wrong with a manifest of two rows -> columns beside its lengths, and what its header says of the source.
MANIFESTS: dict[str, tuple[dict[str, list[object]], dict[str, object]]] = {
    "masks with nulls": ({"eta": [0.5, 0.5], "mask": [[1, 2], None]}, {"kind": "megatron", "mask": "segments:spans"}),
    "a mask that is a list": ({"eta": [0.5, 0.5]}, {"kind": "text", "mask": ["full"]}),
    "control characters": ({}, {"path": "\x1b[2J", "kind": "text", "tokenizer": "bytes"}),
    "files beyond those of the source": ({"shard": [7, 0], "byte_offset": [0, 1]}, LINES),
    "files as texts": ({"shard": ["a", "b"], "byte_offset": [0, 1]}, LINES),
    "a row without a file": ({"shard": [0, None], "byte_offset": [0, 1]}, LINES),
}
MANIFESTS_MESSAGES = snapshot(
    {
        "masks with nulls": "ManifestError: FOLDER/m.parquet: the column mask must hold lists of whole numbers without nulls",
        "a mask that is a list": "ManifestError: FOLDER/m.parquet: its source is damaged: tokenizer is None; build it again",
        "control characters": "ManifestError: FOLDER/m.parquet: its source is damaged: path is '\\x1b[2J'; build it again",
        "files beyond those of the source": "ManifestError: FOLDER/m.parquet: the column shard names files beyond the 1 of its source",
        "files as texts": "ManifestError: FOLDER/m.parquet: the column shard is of string; build the manifest again",
        "a row without a file": "ManifestError: FOLDER/m.parquet: the column shard has nulls; build the manifest again",
    }
)


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_whose_rows_lie_nowhere_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", [{"text": "abc"}, {"text": "def"}])
    columns, source = MANIFESTS[case]
    header = json.dumps({"format": "fcp-manifest/1", "source": {"path": "d.jsonl", **source}}).encode()
    table = pa.table({"length": [3, 3], **columns}).replace_schema_metadata({b"fcp": header})
    write_parquet(table, tmp_path / "m.parquet")
    with raises(MANIFESTS_MESSAGES[case]):
        read_manifest(tmp_path / "m.parquet")
        open_tokens(tmp_path / "m.parquet")
