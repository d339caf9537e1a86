"""`make chaos`: faults on real jobs, one run after the other; prints a line for each, and a table of the kinds.

python -m tests.chaos RUNS [FIRST] [KIND ...]

A run's number and kind say what is struck and when, in shares of an undisturbed job's time. Every tenth job is started
as a user starts it, the others by forks of this process. Exit status 1: an invariant was broken.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import clock, forks
from tests.chaos.faults import KINDS
from tests.chaos.jobs import Job
from tests.chaos.scene import RUN_DIR, SETTINGS, STEPS, Ground, Scene, layouts_of
from tests.chaos.system import SkippedError

_UNFORKED_EVERY = 10
# The clock is that of the processes forked from here, which have not imported what scripts need.
_ONLY_FORKED = ("clock",)
_NEVER_FORKED = ("trainer-torchrun", "trainer-planner", "online-torchrun", "online-planner")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run of a kind; `skipped`: why it was not made."""

    kind: str
    problems: list[str]
    seconds: float = 0.0
    struck: bool = False
    resumed: bool = False
    skipped: str = ""


def main() -> int:
    forks.make_room()
    for interrupt in (signal.SIGINT, signal.SIGTERM):  # a shell has what it starts in the background ignore Ctrl-C
        signal.signal(interrupt, signal.default_int_handler)
    runs, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kinds = sys.argv[3:] or list(KINDS)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fcp-chaos-") as folder:
        ground = _prepare(Path(folder))
        print(
            f"an undisturbed job takes {ground.seconds:.1f} s, {ground.start_seconds:.1f} s of them to its first step; "
            f"one that was struck has {ground.most_seconds:.0f} s",
            flush=True,
        )
        with suppress(KeyboardInterrupt):  # what was run until then still counts
            for number in range(first, first + runs):
                outcomes.append(_run(number, kinds[number % len(kinds)], ground))
    _print_table(outcomes, kinds, time.monotonic() - began)
    return int(any(outcome.problems for outcome in outcomes))


def _prepare(folder: Path) -> Ground:
    """Write what jobs read, and let one job go straight to its end."""
    seeds = folder / "seeds"
    seeds.mkdir()
    forks.fork_from_here()
    clock.install()
    forks.in_a_fork(lambda: _write_seeds(seeds))
    layouts = json.loads((seeds / "layouts.json").read_text())
    work = folder / "reference"
    shutil.copytree(seeds, work)
    # It keeps every step's state: a job that is asked to stop saves wherever it is.
    words = (*SETTINGS, "--checkpoint-every", "1", "--run-dir", RUN_DIR)
    job = Job(*words, folder=work, run_dir=work / RUN_DIR, mark=f"{os.getpid()}-reference")
    ground = Ground.of(job, seeds, lambda: layouts)
    shutil.rmtree(work)
    return ground


def _write_seeds(folder: Path) -> None:
    from fcp_cli.manifest.build import build_manifest
    from fcp_cli.manifest.text import TextTree
    from fcp_cli.manifest.tokenizer import open_tokenizer
    from fcp_cli.models.cluster import shipped_profile_path
    from tests.training.small_runs import write_manifest, write_small_plan, write_text

    manifest = write_manifest(folder)
    write_small_plan(folder / "plan.parquet", manifest, steps=STEPS)
    write_small_plan(folder / "nodes.parquet", manifest, steps=STEPS, ranks_per_node=2)
    write_small_plan(folder / "other.parquet", manifest, steps=STEPS + 1)
    other = write_text(folder / "other-text", seed=1).resolve()
    build_manifest(TextTree(root=other, tokenizer=open_tokenizer("bytes")), folder / "moved.parquet")
    shutil.copyfile(shipped_profile_path("qwen3-tiny"), folder / "profile.yaml")
    (folder / "layouts.json").write_text(json.dumps(layouts_of(folder / "plan.parquet")))


def _run(number: int, kind: str, ground: Ground) -> Outcome:
    """Make one run, and print its line."""
    folder = ground.folder.parent / f"run-{number}"
    shutil.copytree(ground.folder, folder)
    scene = Scene(ground=ground, folder=folder, mark=f"{os.getpid()}-{number}", draw=random.Random(f"{kind} {number}"))
    unforked = (kind in _NEVER_FORKED or number % _UNFORKED_EVERY == _UNFORKED_EVERY - 1) and kind not in _ONLY_FORKED
    if unforked:
        forks.start_from_disk()
    skipped = ""
    try:
        KINDS[kind](scene)
    except SkippedError as reason:
        skipped = str(reason)
    except Exception as error:  # one of ours: the campaign goes on
        traceback.print_exc()
        scene.broken(f"the run itself failed: {type(error).__name__}: {error}")
    finally:
        for job in scene.jobs:
            job.kill()
        if unforked:
            forks.fork_from_here()
    verdict = f"skipped: {skipped}" if skipped else "broken" if scene.problems else "held"
    how = f"{'; '.join(scene.what)}{' (not forked)' if unforked else ''}"
    print(f"{number} {kind}: {how}: {scene.seconds:.1f} s, {verdict}", flush=True)
    for problem in dict.fromkeys(scene.problems):
        print(f"    {problem}", flush=True)
    _keep_or_remove(folder, broken=bool(scene.problems))
    return Outcome(
        kind=kind,
        problems=scene.problems,
        seconds=scene.seconds,
        struck=scene.struck is not None,
        resumed=scene.resumed,
        skipped=skipped,
    )


def _keep_or_remove(folder: Path, *, broken: bool) -> None:
    """Keep the folder of a broken run where FCP_CHAOS_KEEP says."""
    kept = os.environ.get("FCP_CHAOS_KEEP")
    if broken and kept:
        shutil.copytree(folder, Path(kept) / folder.name, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _print_table(outcomes: list[Outcome], kinds: list[str], seconds: float) -> None:
    print("\n| kind | runs | struck | held | broken | seconds to the end: median, most | resumed bit-equal |")
    print("|---|---|---|---|---|---|---|")
    for kind in (*kinds, "all"):
        made = [it for it in outcomes if kind in (it.kind, "all") and not it.skipped]
        reasons = {it.skipped for it in outcomes if it.kind == kind and it.skipped}
        if not made:
            print(f"| {kind} | 0 | – | – | – | – | {'; '.join(reasons) or '–'} |")
            continue
        held = sum(not it.problems for it in made)
        took = [it.seconds for it in made]
        times = f"{statistics.median(took):.1f}, {max(took):.1f}"
        struck, resumed = (sum(getattr(it, name) for it in made) for name in ("struck", "resumed"))
        print(f"| {kind} | {len(made)} | {struck} | {held} | {len(made) - held} | {times} | {resumed} |")
    print(f"\n{len(outcomes)} runs in {seconds / 60:.0f} minutes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
