"""Error of predicted times per model size, laid out as Table 3 of the papers: `python -m benchmarks.estimation_error`.

The papers measured whole models on Ascend 910B clusters. This measures what fits a CPU: the language models of the
same six checkpoints at an eighth of their width (hidden size, MLP and head dimension; their own numbers of heads), two
layers and a vocabulary of 256, over real gloo rings, with `fcp profile`. Attention overtakes linear work at an eighth
of the length. The error is of lengths and packs that were never fitted.

Each model takes `--budget-minutes`. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.models.model import load_model

WIDTH_DIVISOR = 8
NUM_LAYERS = 2
VOCAB_SIZE = 256
FAMILIES = {
    "Qwen3-VL": ("qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b"),
    "InternVL2.5/3": ("internvl3-2b", "internvl2.5-4b", "internvl3-8b"),
}
PAPERS = {"Qwen3-VL": (7.93, 6.71, 4.27), "InternVL2.5/3": (7.48, 6.54, 4.12)}  # per cent
TEXT_MODELS = {"qwen3_vl": "qwen3", "internvl": "qwen2"}  # the language model's own architecture


def main() -> None:
    """Measure what is not measured yet and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-minutes", type=float, default=3.0, help="per model")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--ranks", type=int, help="one per core by default")
    parser.add_argument("--folder", type=Path, default=Path("estimation-error"), help="keeps profiles and samples")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    profiles = {name: profile_of(name, options) for names in FAMILIES.values() for name in names}
    print_table(profiles)


def profile_of(name: str, options: argparse.Namespace) -> CostProfile:
    """Measure one scaled model, or read what a former run measured."""
    output: Path = options.folder / f"{name}.yaml"
    if not output.exists():
        model = options.folder / f"{name}.model.yaml"
        model.write_text(yaml.safe_dump(scaled(name)), encoding="utf-8")
        command = [sys.executable, "-m", "fcp_cli", "profile", "--model", str(model), "--output", str(output)]
        command += ["--budget-minutes", str(options.budget_minutes), "--max-length", str(options.max_length)]
        if options.ranks:
            command += ["--ranks", str(options.ranks)]
        subprocess.run(command, check=True)
    return load_cost_profile(output)


def scaled(name: str) -> dict[str, object]:
    """A model description (`fcp-model/1`) of the language model at a fraction of its width."""
    spec = load_model(name)
    text = {
        "num_layers": NUM_LAYERS,
        "hidden_size": spec.hidden_size // WIDTH_DIVISOR,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim // WIDTH_DIVISOR,
        "ffn_size": (spec.ffn_size or 0) // WIDTH_DIVISOR,
        "vocab_size": VOCAB_SIZE,
        "tied_embeddings": spec.tied_embeddings,
        "qkv_bias": spec.qkv_bias,
        "qk_norm": spec.qk_norm,
        "rope_theta": spec.rope_theta,
        "norm_eps": spec.norm_eps,
    }
    return {
        "format": "fcp-model/1",
        "name": f"{spec.name}-eighth",
        "architecture": TEXT_MODELS[spec.architecture],
        "text": text,
        "sources": {"text": f"{spec.name} at 1/{WIDTH_DIVISOR} of its width, {NUM_LAYERS} layers"},
    }


def print_table(profiles: dict[str, CostProfile]) -> None:
    """The papers' layout, theirs and ours, and what a degree adds to the error."""
    print("\n| held-out error, % | 2B | 4B | 8B |\n|---|---:|---:|---:|")
    for family, names in FAMILIES.items():
        print(f"| {family}, papers (whole models, Ascend) | {' | '.join(f'{error:.2f}' for error in PAPERS[family])} |")
        ours = [float(profiles[name].measurement["held_out_error_percent"]) for name in names]
        print(f"| {family}, here (eighth of the width, CPU) | {' | '.join(f'{error:.2f}' for error in ours)} |")
        for degree in profiles[names[0]].measurement["degrees"]:
            cells = [f"{held_out_percent(profiles[name], degree):.2f}" for name in names]
            print(f"| - degree {degree} | {' | '.join(cells)} |")
    first = next(iter(profiles.values())).measurement
    print(f"\n{first['device_name']}, {first['ranks']} ranks on {first['cores']} cores, torch {first['torch']}")


def held_out_percent(profile: CostProfile, degree: int) -> float:
    """Held-out error of one degree."""
    rows = {row["degree"]: row for row in profile.measurement["error_by_degree"] if row["heads_degree"] == 1}
    return float(rows[degree]["held_out_percent"])


if __name__ == "__main__":
    main()
