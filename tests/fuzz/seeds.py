"""Sound files of every kind that fcp reads, small, in one folder."""

from __future__ import annotations

import io
import json
import random
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.files import shipped
from fcp_cli.recipe import Recipe
from tests.commands.planning_folder import fcp, write_dataset
from tests.manifest.datasets import write_arrow, write_jsonl, write_megatron, write_parquet, write_tokenizer
from tests.planning.examples import PROFILE
from tests.profiling.recorded import write_samples
from tests.report.runs import write_run
from tests.runs.records import launch_record


def write_seeds(folder: Path) -> Path:
    """Write them all, and return the folder."""
    write_dataset(folder, sequences=32)
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 9000, 20)]
    write_jsonl(folder / "dataset.jsonl", [{"length": n, "eta": 0.5, "vision_patches": 3} for n in lengths])
    (folder / "dataset.csv").write_text("length,eta\n" + "".join(f"{n},0.5\n" for n in lengths))
    write_arrow(folder / "dataset.arrow", {"length": lengths, "eta": [0.5] * len(lengths)}, stream=False)
    (folder / "other.yaml").write_text(PROFILE)
    options = ["--ranks", "4", "--ranks-per-node", "2", "--tokens-per-rank", "8192", "--global-batch-size", "16"]
    _run(folder, "plan", "dataset.parquet", *options, "-o", "plan.parquet")
    _run(folder, "plan", "dataset.parquet", *options, "--sync", "microbatch", "-o", "waves.parquet")
    _write_run(folder)
    _write_descriptions(folder)
    _write_sources(folder)
    _run(folder, "manifest", "build", "texts.jsonl", "-o", "built.parquet")
    write_samples(folder / "samples.jsonl", Recipe())
    return folder


def _run(folder: Path, *words: str) -> None:
    result = fcp(*words, cwd=folder)
    assert result.returncode == 0, result.stderr


def _write_run(folder: Path) -> None:
    run = folder / "runs" / "tiny-001"
    checkpoint = run / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    plan = folder / "plan.parquet"
    (run / "plan.parquet").write_bytes(plan.read_bytes())
    write_run(run / "metrics.jsonl", plan)
    from fcp_cli.plan.reader import PlanReader

    plan_hash = PlanReader(plan).metadata.plan_hash
    record = launch_record(plan=str(plan), plan_hash=plan_hash, run_dir=str(run))
    (run / "launch.json").write_text(json.dumps(asdict(record)))
    beat = {
        "format": "fcp-heartbeat/1",
        "host": "here",
        "pid": 1,
        "process_started": 5,
        "started": "2026-01-01T00:00:00+00:00",
    }
    (run / "heartbeat.json").write_text(json.dumps({**beat, "ended": "finished"}))
    header: dict[str, Any] = {"format": "fcp-checkpoint/2", "step": 1, "plan_hash": plan_hash, "num_ranks": 4}
    header |= {"sharding": "replicated", "model": "qwen3-tiny", "torch": "2.13", "shards": None}
    (checkpoint / "checkpoint.json").write_text(json.dumps(header))


def _write_descriptions(folder: Path) -> None:
    (folder / "model.yaml").write_bytes((shipped("profiles") / "models" / "qwen3-vl-8b.yaml").read_bytes())
    (folder / "cluster.yaml").write_bytes((shipped("profiles") / "clusters" / "example-8x8.yaml").read_bytes())
    (folder / "fcp.yaml").write_text(
        "plan:\n  ranks: 4\n  ranks-per-node: 2\n  tokens-per-rank: 8192\n  global-batch-size: 16\n  solver: static\n"
        "  seed: 3\n  sync: iteration\nmanifest:\n  build:\n    include: ['*.py']\n"
    )
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_hidden_layers": 2,
                "intermediate_size": 128,
                "vocab_size": 256,
                "rope_theta": 1e6,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
                "_name_or_path": "tiny",
                "rope_parameters": {"rope_theta": 1e6},
                "attention_bias": False,
            }
        )
    )
    (folder / "processor").mkdir()
    images = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2_5_VLProcessor"}
    images |= {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}  # type: ignore[dict-item]
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(images))


def _write_sources(folder: Path) -> None:
    draw = random.Random(0)
    texts = ["word " * draw.randrange(1, 40) for _ in range(12)]
    write_jsonl(folder / "texts.jsonl", [{"text": text, "id": i} for i, text in enumerate(texts)])
    when = pa.array([0] * 12, pa.timestamp("us"))
    sizes = {"width": [280] * 12, "height": [280] * 12, "text_tokens": [7] * 12}
    write_parquet(folder / "texts.parquet", {"text": texts, "when": when})
    write_parquet(folder / "media.parquet", {"when": when, **sizes})
    sized = [{"images": [{"height": 280, "width": 560}], "text_tokens": 5, "id": i} for i in range(4)]
    video = {"videos": [{"height": 280, "width": 280, "frames": 16, "fps": 4.0}], "text_tokens": 7}
    write_jsonl(folder / "media.jsonl", [*sized, video])
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "This."}]
    listed = [
        {"id": str(i), "image": f"{i}.jpg", "width": 280, "height": 280, "conversations": turns} for i in range(3)
    ]
    (folder / "media.json").write_text(json.dumps(listed))
    (folder / "media.csv").write_text(
        "id,width,height,duration,fps,text_tokens\n" + "a,280,280,2.5,24.0,7\nb,560,280,,,7\n" * 3
    )
    with tarfile.open(folder / "media.tar", "w") as tar:
        for i in range(4):
            members = {"png": _PNG, "json": json.dumps({"text_tokens": 9}).encode()}
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"{i:04d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    write_tokenizer(folder / "tokenizer.json")
    write_megatron(folder / "megatron", [np.arange(1, 1 + draw.randrange(1, 30), dtype=np.int32) for _ in range(9)])


# The header of a picture of 280 x 280 pixels, which is all that is read of it.
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (280).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00" + bytes(4)
