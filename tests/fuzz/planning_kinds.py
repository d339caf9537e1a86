"""Manifests, plans of every form, cost profiles, and the journals of plans that were not finished."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli import Planner
from fcp_cli.errors import FcpError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import METADATA_KEY
from fcp_cli.planning import journal, make_plan
from fcp_cli.planning.journal import PlanJournal, StreamJournal, length_columns
from tests.cli.planning_folder import fcp, write_dataset
from tests.fuzz import mutations
from tests.fuzz.kind import Change, Kind, of_files, parquet, words_of
from tests.manifest.datasets import write_arrow, write_jsonl

# Plan -> words that make it, from the sound manifests and profiles.
PLANS = {
    "plan.parquet": "dataset.parquet PLAN",
    "waves.parquet": "dataset.parquet PLAN --sync microbatch",
    "heads.parquet": "dataset.parquet PLAN --profile heads.yaml --attention 2d --zero 1",
    "padded.parquet": "dataset.parquet PLAN --padded-rings",
    "speeds.parquet": "dataset.parquet PLAN --rank-speeds 1=0.7,node1=0.9",
    "stages.parquet": "dataset.parquet PLAN --profile stages.yaml",
    "blocks.parquet": "dataset.parquet PLAN --profile stages.yaml --virtual-stages 2 --sync microbatch",
    "forward.parquet": "dataset.parquet PLAN --phase forward",
    "by-tokens.parquet": "dataset.parquet --ranks 4 --ranks-per-node 2 --tokens-per-rank 8192 --global-batch-tokens 60000",
    "masked.parquet": "spans.parquet PLAN",
    "encoders.parquet": "pictures.parquet PLAN --profile pictures.yaml --encoder-ranks 1 --zero 1 --sync microbatch",
    "shared-encoder.parquet": "pictures.parquet PLAN --profile pictures.yaml --encoder-balance wave --sync microbatch",
}
_PROFILES = {
    "heads.yaml": "--model qwen3-8b --cluster h100-8x8",
    "stages.yaml": "--model qwen3-8b --cluster example-8x8 --pipeline-parallel 2",
    "pictures.yaml": "--model qwen3-vl-8b --cluster example-8x8",
}


def write_planning(folder: Path) -> None:
    """Write manifests, profiles, plans and journals; `plan.parquet` of `dataset.parquet` is the usual one."""
    write_dataset(folder, sequences=32)
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 9000, 20)]
    write_jsonl(folder / "dataset.jsonl", [{"length": n, "eta": 0.5, "vision_patches": 3} for n in lengths])
    (folder / "dataset.csv").write_text("length,eta\n" + "".join(f"{n},0.5\n" for n in lengths))
    (folder / "numbers.txt").write_text("".join(f"{n}\n" for n in lengths))
    write_arrow(folder / "dataset.arrow", {"length": lengths, "eta": [0.5] * len(lengths)}, stream=False)
    write_arrow(folder / "stream.arrow", {"length": lengths, "eta": [0.5] * len(lengths)}, stream=True)
    (folder / "speeds.yaml").write_text("node1: 0.9\n1: 0.7\n2-3: 0.8\n")
    _write_masked(folder)
    sized = [{"images": [{"height": 280, "width": 560}] * (i % 3), "text_tokens": 50 * i + 5} for i in range(32)]
    write_jsonl(folder / "pictures.jsonl", sized)
    run_fcp(folder, "manifest build pictures.jsonl --kind media --processor qwen3-vl -o pictures.parquet")
    for name, words in _PROFILES.items():
        run_fcp(folder, f"profile --analytic {words} -o {name}")
    for name, words in PLANS.items():
        run_fcp(folder, f"plan {words} -o {name}")
    _write_journals(folder)


def run_fcp(folder: Path, command: str) -> None:
    """Run a command that must succeed."""
    result = fcp(*words_of(command), cwd=folder)
    assert result.returncode == 0, result.stderr


def _write_masked(folder: Path) -> None:
    records = [
        {"input_ids": list(range(20 + i * 7)), "prefix": 5, "spans": [[2, 6], [8, 12]], "pairs": [5, 5 + i]}
        for i in range(20)
    ]
    write_jsonl(folder / "masked.jsonl", records)
    run_fcp(folder, "manifest build masked.jsonl --mask segments:spans -o spans.parquet")
    run_fcp(folder, "manifest build masked.jsonl --mask prefix:prefix -o prefixes.parquet")


def _write_journals(folder: Path) -> None:
    """Write the journals of a long plan that was interrupted, and of a run that planned while it trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_plan, "_JOURNAL_FROM_STEPS", 1)
        patch.setattr(journal, "_ROWS_PER_WINDOW", 4)
        kept: Callable[..., None] = PlanJournal._append
        windows = 0

        def append(self: PlanJournal, *tables: pa.Table) -> None:
            nonlocal windows
            kept(self, *tables)
            windows += 1
            if windows == 2:
                raise KeyboardInterrupt

        patch.setattr(PlanJournal, "_append", append)
        result = fcp(*words_of(_INTERRUPTED.removesuffix(" --resume")), cwd=folder)
        assert "continue with --resume" in result.stderr, result.stderr
    planner = Planner(folder / "profile.yaml", ranks=4, ranks_per_node=2, tokens_per_rank=8192)
    online = planner.online()
    (folder / "online.json").write_text(online.to_json())
    steps = list(PlanReader(folder / "plan.parquet").steps())
    taken = StreamJournal(folder / "online.parquet")
    taken.begin(online.metadata, 0)
    taken.append(length_columns(read_manifest(folder / "dataset.parquet")), steps)


_INTERRUPTED = "plan dataset.parquet --ranks 4 --ranks-per-node 2 --tokens-per-rank 8192 --global-batch-size 4 -o long.parquet --workers 1 --resume"
_SHOWN = (
    "inspect FILE --json",
    "inspect FILE --step 0 --why 0",
    "check FILE",
    "report FILE -o out.html --json",
)
_FOLLOWED = (
    "check FILE --manifest dataset.parquet",
    "launch --plan FILE --model qwen3-tiny --synthetic --dry-run --json",
    "profile fit runs/tiny-001 --plan FILE -o out.yaml --skip-steps 0",
    "report FILE --metrics runs/tiny-001 -o out.html",
    "verify --plan FILE --steps 1 --json",
)
_MANIFEST = ("plan FILE --solver static PLAN -o out.parquet", "manifest show FILE --json", "compare FILE PLAN --json")
_RANKS = "--ranks 4 --ranks-per-node 2 --tokens-per-rank 8192"


def _manifest_of(plan: str) -> str:
    return PLANS[plan].split()[0]


def of_plan(draw: random.Random, content: bytes) -> bytes:
    """Change a plan, and more often than not give it the hash of what it then holds: whoever forges a plan would."""
    changed = parquet(draw, content)
    if draw.random() < 0.3:
        return changed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.parquet"
        path.write_bytes(changed)
        try:
            reader = PlanReader(path)
            metadata = replace(reader.metadata, plan_hash=reader.content_hash())
            table = pq.read_table(path).replace_schema_metadata({METADATA_KEY: metadata.to_json().encode()})
            mutations.write_parquet(table, path)
        except (FcpError, pa.ArrowException, ValueError, TypeError, OverflowError, OSError):
            return changed
        return path.read_bytes()


def _plan_kinds() -> dict[str, Kind]:
    kinds = {}
    for name in PLANS:
        commands: tuple[str, ...] = (*_SHOWN, f"check FILE --manifest {_manifest_of(name)}")
        if name == "plan.parquet":
            commands = (*_SHOWN, *_FOLLOWED)
        elif name in ("heads.parquet", "masked.parquet", "encoders.parquet"):
            commands = (*commands, "launch --plan FILE --dry-run --json -- script.py")
        kinds[f"plan {name.removesuffix('.parquet')}"] = of_files(name, *commands, change=of_plan, starts=True)
    return kinds


_ONLINE: dict[str, Change] = {
    ".online.parquet.online/000000.windows": mutations.of_records,
    ".online.parquet.online/metadata.json": mutations.of_json,
}
_LONG: dict[str, Change] = {
    ".long.parquet.journal/000000.steps": mutations.of_records,
    ".long.parquet.journal/key": mutations.of_text,
}

KINDS: dict[str, Kind] = {
    "manifest": of_files("dataset.parquet", *_MANIFEST, change=parquet),
    "built manifest": of_files("built.parquet", *_MANIFEST, change=parquet),
    "masked manifest": of_files({"spans.parquet": parquet, "prefixes.parquet": parquet}, *_MANIFEST),
    "part of a manifest": of_files(
        "half-1.parquet", "manifest merge half-2.parquet FILE -o out.parquet", change=parquet
    ),
    "manifest of pictures": of_files(
        "pictures.parquet",
        _MANIFEST[1],
        f"plan FILE {_RANKS} --profile pictures.yaml --solver static -o out.parquet",
        "inspect encoders.parquet --manifest FILE --json",
        "report encoders.parquet --manifest FILE -o out.html",
        change=parquet,
    ),
    "arrow": of_files("dataset.arrow", *_MANIFEST[:2], change=mutations.of_arrow),
    "arrow stream": of_files("stream.arrow", *_MANIFEST[:2], change=mutations.of_arrow),
    "lengths in lines": of_files("dataset.jsonl", *_MANIFEST[:2], change=mutations.of_lines),
    "lengths in csv": of_files("dataset.csv", *_MANIFEST[:2], change=mutations.of_text),
    "lengths in text": of_files("numbers.txt", *_MANIFEST[:2], change=mutations.of_text),
    **_plan_kinds(),
    "cost profile": of_files(
        "profile.yaml",
        "profile show FILE --json",
        "plan dataset.parquet --solver static --profile FILE PLAN -o out.parquet",
        "plan dataset.parquet --profile FILE --sync microbatch PLAN -o out.parquet",
        "plan dataset.parquet --profile FILE PLAN -o out.parquet",
        "launch --online --profile FILE --ranks 4 --dry-run --json -- script.py",
        change=mutations.of_yaml,
    ),
    "cost profile of heads": of_files(
        "heads.yaml",
        f"plan dataset.parquet --profile FILE {_RANKS} --attention 2d --zero 1 --global-batch-size 16 -o out.parquet",
        "profile show FILE --json",
        change=mutations.of_yaml,
        share=0.5,
    ),
    "cost profile of stages": of_files(
        "stages.yaml",
        f"plan dataset.parquet --profile FILE {_RANKS} --global-batch-size 16 -o out.parquet",
        change=mutations.of_yaml,
        share=0.5,
    ),
    "cost profile of pictures": of_files(
        "pictures.yaml",
        f"plan pictures.parquet --profile FILE {_RANKS} --global-batch-size 16 --encoder-ranks 1 --zero 1 --sync microbatch -o out.parquet",
        f"plan pictures.parquet --profile FILE {_RANKS} --encoder-balance wave --sync microbatch -o out.parquet",
        "profile show FILE --json",
        change=mutations.of_yaml,
        share=0.5,
    ),
    "rank speeds": of_files(
        "speeds.yaml", f"plan dataset.parquet --rank-speeds FILE {_RANKS} -o out.parquet", change=mutations.of_yaml
    ),
    "plan journal": of_files(_LONG, _INTERRUPTED, writes=("long.parquet", ".long.parquet.journal*")),
    "online journal": of_files(
        _ONLINE,
        "plan -o online.parquet --resume",
        writes=("online.parquet", "online.lengths.parquet", ".online.parquet.online*"),
    ),
}
