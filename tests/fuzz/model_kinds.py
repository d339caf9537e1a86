"""Descriptions of models, clusters and what trains: config.json by family, YAML, configurations of fcp, templates, lists of nodes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from fcp_cli.cost.recipe import Recipe
from fcp_cli.models.model import load_model
from fcp_cli.models.transformers_config import text_config, whole_config
from fcp_cli.util.files import shipped
from tests.fuzz import mutations
from tests.fuzz.kind import Kind, of_files
from tests.profiling.recorded import write_samples

_ANALYTIC = "profile --analytic --model FILE --cluster example-8x8 -o out.yaml --json"
FAMILIES = (
    *("llama3.2-1b", "qwen3-1.7b", "qwen3-30b-a3b", "deepseek-v3", "glm-4.5", "gemma3-27b", "gpt-oss-20b"),
    *("bamba-9b", "qwen3-next-80b-a3b", "qwen3-vl-2b", "qwen2.5-vl-7b", "internvl3-2b", "gemma3-vl-27b"),
)
_WIDE = ("deepseek-v3", "glm-4.5")  # models of which a few layers fit the cluster with their experts shared out
_TINY = {
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
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}


def write_models(folder: Path) -> None:
    """Write descriptions, of every shipped model with an architecture of its own a config.json, and configurations."""
    profiles = shipped("profiles")
    (folder / "model.yaml").write_bytes((profiles / "models" / "qwen3-vl-8b.yaml").read_bytes())
    (folder / "experts.yaml").write_bytes((profiles / "models" / "qwen3-30b-a3b.yaml").read_bytes())
    (folder / "states.yaml").write_bytes((profiles / "models" / "bamba-9b.yaml").read_bytes())
    (folder / "cluster.yaml").write_bytes((profiles / "clusters" / "example-8x8.yaml").read_bytes())
    for name in FAMILIES:
        spec = load_model(name)
        spec = replace(spec, num_layers=min(spec.num_layers, 4))  # so that each fits the cluster
        model_type, figures = text_config(spec) if spec.vision is None else whole_config(spec)
        document = {"model_type": model_type, **figures}
        _write(folder / "hf" / name / "config.json", json.dumps(document, default=str))
    _write(folder / "hf" / "tiny" / "config.json", json.dumps(_TINY))
    write_samples(folder / "samples.jsonl", Recipe())
    (folder / "hosts").write_text("node0 slots=8\nnode1 slots=8\n# a comment\n10.0.0.3\n10.0.0.4\n")
    shutil.copy(shipped("launchers") / "job.sbatch.j2", folder / "template.j2")
    (folder / "given.yaml").write_text(
        "plan:\n  ranks: 4\n  ranks-per-node: 2\n  tokens-per-rank: 8192\n  global-batch-size: 16\n  solver: static\n"
        "  seed: 3\n  sync: iteration\nmanifest:\n  build:\n    include: ['*.txt']\n"
    )
    (folder / "script.py").write_text("import sys\nfrom fcp_cli import runtime\nprint(sys.argv)\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


_SLURM = "launch --plan plan.parquet --model qwen3-tiny --synthetic --target slurm --nodes 2"
KINDS: dict[str, Kind] = {
    **{
        f"config of {name}": of_files(
            f"hf/{name}/config.json",
            f"{_ANALYTIC} --expert-parallel {8 if name in _WIDE else 1}",
            change=mutations.of_json,
            share=0.3,
        )
        for name in FAMILIES
    },
    "config of a small model": of_files(
        "hf/tiny/config.json",
        _ANALYTIC,
        "launch --plan plan.parquet --model FILE --synthetic --dry-run --json",
        change=mutations.of_json,
    ),
    "model": of_files(
        {"model.yaml": mutations.of_yaml, "experts.yaml": mutations.of_yaml, "states.yaml": mutations.of_yaml},
        _ANALYTIC,
        _ANALYTIC.replace("FILE", "experts.yaml"),
        _ANALYTIC.replace("FILE", "states.yaml"),
        share=0.5,
    ),
    "cluster": of_files(
        "cluster.yaml",
        "profile --analytic --model qwen3-8b --cluster FILE -o out.yaml --json",
        change=mutations.of_yaml,
        share=0.5,
    ),
    "samples": of_files(
        "samples.jsonl", "profile --from-samples FILE -o out.yaml --json", change=mutations.of_lines, share=0.3
    ),
    "list of nodes": of_files(
        "hosts",
        "launch --plan plan.parquet --model qwen3-tiny --synthetic --nodes 4 --hostfile FILE --dry-run --json",
        "launch --plan plan.parquet --model qwen3-tiny --synthetic --nodes 4 --hostfile FILE --target scripts -o out",
        change=mutations.of_text,
    ),
    "script": of_files(
        "script.py",
        "launch --plan plan.parquet --dry-run --json -- FILE",
        "launch --plan plan.parquet --preflight -- FILE",
        change=mutations.of_text,
        share=0.5,
    ),
    "config": of_files(
        "given.yaml",
        "--config FILE plan dataset.parquet -o out.parquet",
        "--config FILE manifest build corpus -o out.parquet",
        change=mutations.of_yaml,
    ),
    "template": of_files(
        "template.j2",
        f"{_SLURM} --template FILE --dry-run --json",
        f"{_SLURM} --template FILE -o out",
        change=mutations.of_text,
    ),
}
