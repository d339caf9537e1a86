"""The kinds of faults. Each is a function of a scene: it starts a job, strikes once, judges the end, and resumes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress

from tests.chaos import clock, scripts, system
from tests.chaos.jobs import Job
from tests.chaos.scene import EVERY, RANKS, RUN_DIR, SETTINGS, STEPS, Scene
from tests.ports import unused_port

_PAUSE_SECONDS = (1.0, 6.0)
_DAY = 86400.0

# What the last line says, by what was struck.
_STOPPED = r"interrupted|asked to stop|stopped"
_DISK_FULL = r"the disk of \S+ is full; .*free some space"
_READ_ONLY = r"Operation not permitted|Permission denied|Read-only file system"


def _victim(scene: Scene, job: Job, name: str) -> int | None:
    """Return the process to strike, once it is there: `fcp`, `torchrun`, `planner`, or a number, of a rank."""
    found: list[int] = []
    by_name = {"fcp": lambda: job.fcp.pid, "torchrun": job.torchrun, "planner": job.planner}

    def is_there() -> bool:
        pid = by_name[name]() if name in by_name else job.ranks().get(int(name))
        if pid is not None:
            found.append(pid)
        return bool(found)

    job.wait_for(is_there, 10 * scene.ground.seconds)
    return found[0] if found else None


def _signal(scene: Scene, job: Job, name: str, number: signal.Signals) -> int | None:
    """Signal a process of a job at its moment, if the job is still there; return the process."""
    scene.wait_for_moment(job)
    pid = _victim(scene, job, name)
    who = f"rank {name}" if name.isdigit() else name
    if pid is None or not job.is_running():
        scene.what.append(f"{who} was gone already")
        return None
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    scene.strike(f"{number.name} to {who}")
    return pid


def _strikes_rank(scene: Scene, number: signal.Signals, wanted: str) -> None:
    """Send a rank a signal; `wanted` is the pattern of the job's last words, with RANK for the rank."""
    rank = scene.draw.randrange(RANKS)
    job = scene.launch(*scene.first_words)
    _signal(scene, job, str(rank), number)
    scene.see_end(job, wanted=wanted.replace("RANK", str(rank)))
    scene.check_stopped()
    scene.resume()


def _kills_rank(scene: Scene) -> None:
    _strikes_rank(scene, signal.SIGKILL, r"rank RANK on \S+ was ended by signal 9")


def _stops_rank(scene: Scene) -> None:
    # It is there and ended by nobody: "out of memory?" would be a wrong cause.
    _strikes_rank(scene, signal.SIGSTOP, r"rank RANK (?!.*out of memory)")


def _asks_rank(scene: Scene) -> None:
    _strikes_rank(scene, signal.SIGTERM, rf"{_STOPPED}|rank RANK on \S+ was ended by signal 15")


def _kills_torchrun(scene: Scene) -> None:
    job = scene.launch(*scene.first_words)
    _signal(scene, job, "torchrun", signal.SIGKILL)
    scene.see_end(job, wanted=r"torchrun.*(signal 9|killed)")
    scene.check_stopped()
    scene.resume()


def _kills_of_script(script: scripts.Script, victim: str) -> Callable[[Scene], None]:
    """A job that plans while it trains loses torchrun or its planner, which must not change what it trains."""

    def strikes(scene: Scene) -> None:
        script.take(scene)
        job = scene.launch(*scene.first_words)
        _signal(scene, job, victim, signal.SIGKILL)
        scene.see_end(job, wanted=rf"{'planning process' if victim == 'planner' else victim} .*was ended by signal 9")
        scene.check_stopped()
        scene.resume()
        scene.see_whole_plan()

    return strikes


def _asks_torchrun(scene: Scene) -> None:
    job = scene.launch(*scene.first_words)
    _signal(scene, job, "torchrun", signal.SIGTERM)
    scene.see_end(job, wanted=rf"{_STOPPED}|torchrun.*signal 15|SIGTERM")
    scene.check_stopped()
    scene.resume()


def _kills_fcp(scene: Scene) -> None:
    job = scene.launch(*scene.first_words)
    _signal(scene, job, "fcp", signal.SIGKILL)
    scene.see_end(job, wanted=None)
    scene.check_stopped()
    scene.resume()


def _asks_fcp(scene: Scene) -> None:
    job = scene.launch(*scene.first_words)
    number = scene.draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    _signal(scene, job, "fcp", number)
    scene.see_end(job, wanted=_STOPPED)
    scene.check_stopped()
    scene.resume()


def _kills_everything(scene: Scene) -> None:
    """As a machine that loses its power, but for what its disk had yet to write."""
    job = scene.launch(*scene.first_words)
    scene.wait_for_moment(job)
    scene.strike("SIGKILL to every process")
    job.kill()
    scene.see_end(job, wanted=None)
    scene.check_stopped()
    scene.resume()


def _pauses(scene: Scene) -> None:
    """Halts a process for a while, as a debugger, a frozen container or Ctrl-Z do: the job goes on to its end."""
    victim = scene.draw.choice(("fcp", "torchrun", *map(str, range(RANKS))))
    seconds = scene.draw.uniform(*_PAUSE_SECONDS)
    job = scene.launch(*scene.first_words)
    pid = _signal(scene, job, victim, signal.SIGSTOP)
    if pid is not None:
        time.sleep(seconds)
        scene.what.append(f"SIGCONT after {seconds:.1f} s")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    scene.see_end(job, wanted="done", fails=False)
    scene.check_stopped()
    scene.resume()


def _jumps_the_clock(scene: Scene) -> None:
    """The clock jumps while it trains, and again, perhaps back, before it is resumed after a kill."""
    jumps = [scene.draw.choice((-1, 1)) * scene.draw.choice((60.0, 3600.0, _DAY, 366 * _DAY)) for _ in range(2)]
    rank = scene.draw.randrange(RANKS)
    job = scene.launch(*scene.first_words)
    try:
        scene.wait_for_moment(job, before_step=STEPS // 2)
        scene.what.append(f"the clock jumps by {jumps[0]:.0f} s")
        clock.set_clock(jumps[0])
        _signal(scene, job, str(rank), signal.SIGKILL)
        scene.see_end(job, wanted=rf"rank {rank} on \S+ was ended by signal 9")
        scene.check_stopped()
        scene.what.append(f"before it is resumed by {jumps[1]:.0f} s")
        clock.set_clock(sum(jumps))
        scene.resume()
    finally:
        clock.set_clock(0.0)


def _fills_the_disk(scene: Scene) -> None:
    with system.small_disk(scene.folder / RUN_DIR):
        job = scene.launch(*scene.first_words)
        scene.wait_for_moment(job)
        ballast = scene.run_dir / "ballast"
        scene.strike("the disk is full")
        system.fill(ballast)
        scene.see_end(job, wanted=_DISK_FULL)
        ballast.unlink()
        scene.check_stopped()
        scene.resume()


def _write_protects(scene: Scene) -> None:
    job = scene.launch(*scene.first_words)
    scene.wait_for_moment(job)
    job.wait_for(scene.run_dir.is_dir, 10 * scene.ground.seconds)
    folders = [folder for folder in (scene.run_dir, scene.run_dir / "checkpoints") if folder.is_dir()]
    scene.strike("the run's folder takes no new files")
    with system.write_protected(folders):
        scene.see_end(job, wanted=_READ_ONLY)
    scene.check_stopped()
    scene.resume()


def _launches_twice(scene: Scene) -> None:
    """A second launch into the folder of a job that runs: anew, or to resume it."""
    words = scene.draw.choice((scene.first_words, scene.next_words, scene.next_words))
    job = scene.launch(*scene.first_words)
    scene.wait_for_moment(job)
    job.wait_for(scene.run_dir.is_dir, 10 * scene.ground.seconds)
    if job.is_running():
        scene.strike(f"fcp launch {' '.join(words[-3:])}")
        second = scene.launch(*words)
        ended = scene.has_ended(second)
        alone = not job.is_running() and job.newest() == STEPS  # the first had ended by then
        if ended and second.status == 0 and not alone:
            scene.broken(f"a second job ran in the folder: {second.last_line}")
        elif ended and not alone and str(job.fcp.pid) not in second.last_line:
            scene.broken(f"it does not say which process owns the folder: {second.last_line}")
    scene.see_end(job, wanted="done", fails=False)
    scene.check_stopped()
    scene.resume()


def _shares_a_port(scene: Scene) -> None:
    """Two jobs of two nodes each, all on this machine, are given one port; the second is refused, then runs alone."""
    address = system.own_address()
    port = str(unused_port())
    apart = scene.draw.uniform(0.0, 1.0) * scene.ground.seconds

    def nodes(run_dir: str) -> list[Job]:
        words = (*SETTINGS, "--plan", "nodes.parquet", "--nodes", "2", "--master-addr", address)
        more = ("--master-port", port, "--join-timeout", "30", "--run-dir", run_dir)
        return [
            scene.launch(*words, *more, "--node-rank", str(node), run_dir=scene.folder / run_dir) for node in range(2)
        ]

    first = nodes(RUN_DIR)
    time.sleep(apart)
    scene.strike(f"a second job on its port after {apart:.1f} s")
    second = nodes("other")
    for job in (*first, *second):
        scene.has_ended(job, since=time.monotonic())
    # Node 1 of the refused job finds the store of the other, and neither joins its ranks nor waits for ranks of its own.
    if list((scene.folder / "other").glob("logs/start-001-node1/*/attempt_0")) and second[0].status:
        scene.broken(f"a node of the refused job starts its ranks at another job's store: {second[1].last_line}")
    whole = [jobs for jobs in (first, second) if jobs[0].newest() == STEPS]
    if not whole:
        scene.broken(f"neither job trains: {[job.last_line for job in (*first, *second)]}")
    for jobs in (first, second):
        if jobs not in whole and not any(port in job.last_line for job in jobs):
            scene.broken(f"the job that is refused does not name the port: {[job.last_line for job in jobs]}")
        if jobs in whole and any(job.status for job in jobs):
            scene.broken(f"the job that trains ends badly: {[job.last_line for job in jobs]}")
    if whole and whole[0] is second:
        shutil.rmtree(scene.run_dir, ignore_errors=True)
        (scene.folder / "other").rename(scene.run_dir)
    for job in (*first, *second):
        job.kill()
    scene.seconds = time.monotonic() - (scene.struck or 0.0)
    scene.check_stopped()
    if whole:
        scene.resume()


def _changes_the_plan(scene: Scene) -> None:
    """Killed, then resumed under another plan, which is refused."""
    _killed_after_a_checkpoint(scene)
    scene.what.append("resumed under another plan")
    scene.see_refused(r"plan", *scene.next_words, "--plan", "other.parquet")
    scene.resume()


def _changes_the_manifest(scene: Scene) -> None:
    """Killed, then resumed on a manifest whose rows have moved, or on texts of other lengths, which is refused."""
    _killed_after_a_checkpoint(scene)
    change = scene.draw.choice(("manifest", "texts"))
    scene.what.append(f"resumed with other {change}")
    kept = scene.folder / "kept"
    if change == "manifest":
        shutil.move(scene.folder / "lengths.parquet", kept)
        shutil.copyfile(scene.folder / "moved.parquet", scene.folder / "lengths.parquet")
        scene.see_refused(r"manifest|lengths\.parquet", *scene.next_words)
        shutil.move(kept, scene.folder / "lengths.parquet")
    else:
        step = scene.jobs[0].newest()
        text = scene.ground.folder / "text" / f"{step * 6 % 24:03d}.txt"  # the manifest names this folder
        shutil.copyfile(text, kept)
        text.write_text(text.read_text() + " more")
        try:
            scene.see_refused(r"text", *scene.next_words, unchanged=False)
        finally:
            shutil.copyfile(kept, text)
        scene.check_stopped()
    scene.resume()


def _damages_a_checkpoint(scene: Scene) -> None:
    """Killed, then a file of the newest checkpoint is cut short, changed, or lost: it is refused by name, or not used."""
    _killed_after_a_checkpoint(scene)
    newest = scene.run_dir / "checkpoints" / f"step-{scene.jobs[0].newest():08d}"
    step = scene.jobs[0].newest()
    how = scene.draw.choice(("cut short", "changed in a bit", "lost"))
    names = ("state.safetensors", "state.safetensors", "rng-00002.safetensors", "checkpoint.json")
    file = newest / scene.draw.choice(names[:3] if how == "changed in a bit" else names)
    content = bytearray(file.read_bytes())
    scene.what.append(f"{file.name} of {newest.name} is {how}")
    if how == "lost":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(content[: scene.draw.randrange(len(content))])
    else:
        at = scene.draw.randrange(len(content))
        content[at] ^= 1 << scene.draw.randrange(8)
        file.write_bytes(content)
    job = scene.launch(*scene.next_words)
    if scene.has_ended(job):
        if job.status and newest.name not in job.last_line:
            scene.broken(f"the damaged checkpoint is not named: {job.last_line}")
        if job.status == 0 and any(f", steps {step + 1} to " in line for line in job.lines):
            scene.broken(f"the damaged checkpoint was trained on: {job.last_line}")
        scene.check_printed(job)
    if job.status or scene.problems:
        shutil.rmtree(newest, ignore_errors=True)  # as the message says; one that was trained on is broken still
    scene.resume()


def _resumes_on_other_ranks(scene: Scene) -> None:
    """Killed, planned anew for three ranks, and resumed: equal up to rounding from there on."""
    _killed_after_a_checkpoint(scene)
    scene.what.append("resumed on 3 ranks")
    step = scene.jobs[0].newest()
    words = ("--ranks", "3", "--solver", "fcp-paper", "--profile", "profile.yaml", "-o", "three.parquet")
    scene.see_done("plan", "--continue-from", RUN_DIR, *words)
    scene.resume("--plan", "three.parquet", rounding=1e-4, exact_steps=step)


def _stalls_the_network(scene: Scene) -> None:
    """The cable between two machines of two ranks each carries nothing: for a while, or for ever."""
    returns = scene.draw.random() < 0.5
    seconds = scene.draw.uniform(*_PAUSE_SECONDS)
    with closing(system.TwoMachines()) as machines:
        more = ("--nodes", "2", "--master-addr", machines.addresses[0], "--join-timeout", "30")
        words = (*scene.first_words, "--plan", "nodes.parquet", *more)
        first, second = (
            scene.launch(*words, "--node-rank", str(node), preexec=machines.entering(node)) for node in range(2)
        )
        scene.wait_for_moment(first)
        first.wait_for(lambda: len({**first.ranks(), **second.ranks()}) == RANKS, 10 * scene.ground.seconds)
        if first.is_running() and second.is_running():
            scene.strike("the network stalls")
            machines.stall()
            if returns:
                time.sleep(seconds)
                scene.what.append(f"for {seconds:.1f} s")
                machines.unstall()
        for job in (first, second):
            scene.see_end(job, wanted=r"rank \d", fails=not returns)
    scene.check_stopped()
    scene.resume("--plan", "nodes.parquet", "--nodes", "1")


def _links_elsewhere(scene: Scene) -> None:
    """The folder of checkpoints becomes a link to another's before the run is resumed."""
    _killed_after_a_checkpoint(scene)
    name = scene.draw.choice(("checkpoints", "logs"))
    others = scene.folder / "others"
    shutil.copytree(scene.run_dir / name, others)
    (others / "kept").touch()
    before = sorted(others.rglob("*"))
    place = scene.run_dir / name
    place.rename(scene.folder / "own")
    place.symlink_to(others)
    scene.see_refused(rf"{name} links to \S+, which has files that this run did not write", *scene.next_words)
    if sorted(others.rglob("*")) != before:
        scene.broken(f"files were written or removed in {others}")
    place.unlink()
    (scene.folder / "own").rename(place)
    scene.resume()


def _spoils_the_export(scene: Scene) -> None:
    """A file lies where the model is exported to, after the last step."""
    scene.run_dir.mkdir()
    (scene.run_dir / "model").write_text("in the way", encoding="utf-8")
    job = scene.launch(*scene.first_words)
    scene.strike("a file in place of model/")
    scene.see_end(job, wanted=r"cannot write \S*model")
    if job.newest() != STEPS:
        scene.broken(f"the newest checkpoint is of step {job.newest()}, not {STEPS}")
    scene.resume()


def _killed_after_a_checkpoint(scene: Scene) -> None:
    job = scene.launch(*scene.first_words)
    step = scene.draw.randrange(EVERY, STEPS - 2)
    rank = scene.draw.randrange(RANKS)
    job.wait_for(lambda: job.newest() >= EVERY and job.steps() >= step, 10 * scene.ground.seconds)
    pid = _victim(scene, job, str(rank))
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    scene.strike(f"SIGKILL to rank {rank} after step {step}")
    scene.see_end(job, wanted=rf"rank {rank} on \S+ was ended by signal 9")
    scene.check_stopped()


KINDS: dict[str, Callable[[Scene], None]] = {
    "kill-rank": _kills_rank,
    "kill-torchrun": _kills_torchrun,
    "kill-fcp": _kills_fcp,
    "kill-all": _kills_everything,
    "term-rank": _asks_rank,
    "term-torchrun": _asks_torchrun,
    "stop-fcp": _asks_fcp,
    "halt-rank": _stops_rank,
    "pause": _pauses,
    "clock": _jumps_the_clock,
    "full-disk": _fills_the_disk,
    "read-only": _write_protects,
    "two-launches": _launches_twice,
    "one-port": _shares_a_port,
    "other-plan": _changes_the_plan,
    "other-manifest": _changes_the_manifest,
    "damaged-checkpoint": _damages_a_checkpoint,
    "other-ranks": _resumes_on_other_ranks,
    "network": _stalls_the_network,
    "strange-link": _links_elsewhere,
    "spoilt-export": _spoils_the_export,
    "trainer-torchrun": _kills_of_script(scripts.TRAINER, "torchrun"),
    "trainer-planner": _kills_of_script(scripts.TRAINER, "planner"),
    "online-torchrun": _kills_of_script(scripts.STREAM, "torchrun"),
    "online-planner": _kills_of_script(scripts.STREAM, "planner"),
}
