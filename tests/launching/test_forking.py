"""What tests' jobs rely on in the server that forks their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_ranks.rank_forking import SHARED, fork, fork_ranks, fork_shared, server
from tests.patience import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.processes

PROGRAM = "tests.launching.forked_program"


def run(folder: Path, *arguments: str, address: str) -> tuple[int, str, str]:
    """Exit status and streams of a forked program."""
    (folder / "in").write_text("given")
    with (folder / "in").open() as given, (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        streams = (given.fileno(), out.fileno(), err.fileno())
        process = fork(address, [PROGRAM, *arguments], {**os.environ, "NAME": "forked"}, streams)
        assert process is not None
        status = process.wait(PATIENCE_SECONDS)
    return status, (folder / "out").read_text(), (folder / "err").read_text()


@pytest.mark.parametrize(("argument", "status"), [("0", 0), ("3", 3), ("signal", -15)])
@pytest.mark.parametrize("modules", [(), ("json",)], ids=["of one agent", "of all jobs"])
def test_a_forked_program_has_streams_arguments_environment_and_status_of_its_own(
    tmp_path: Path, modules: tuple[str, ...], argument: str, status: int
) -> None:
    found = run(tmp_path, argument, address=server(*modules))
    assert found == (status, f"forked ['{argument}'] True given\n", "on standard error\n")


def test_what_modules_would_have_read_as_they_were_imported_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    address = server("json")
    monkeypatch.setenv("HF_HOME", "elsewhere")
    assert fork(address, [PROGRAM, "0"], os.environ, (0, 1, 2)) is None


def test_a_job_is_forked_whatever_pytorch_noted_of_its_cache_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch._inductor` sets this variable in any process that asks where its cache is, and so in that of later jobs."""
    address = server("json")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert run(tmp_path, "0", address=address)[0] == 0


def test_a_job_that_the_shared_server_refuses_fails_with_the_reason() -> None:
    environment = {**os.environ, SHARED: server("json"), "HF_HOME": "elsewhere"}
    with pytest.raises(SystemExit, match=f"refuses {PROGRAM}: a variable that modules read as they are imported"):
        fork_shared([PROGRAM, "0"], environment, (0, 1, 2))


def test_a_process_of_a_shared_server_ends_with_what_stands_for_it(tmp_path: Path) -> None:
    """As `fcp` and torchrun, whose interpreters do nothing but wait."""
    waits = f"from tests.forked_ranks.rank_forking import go_on_forked; go_on_forked(['{PROGRAM}', 'never'])"
    environment = {**os.environ, SHARED: server("json"), "NAME": "forked"}
    with (tmp_path / "out").open("w") as out:
        client = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.DEVNULL, stdout=out, env=environment)
    wait_until(lambda: (tmp_path / "out").read_text() != "")
    before = _forked()
    assert before
    client.kill()
    client.wait()
    wait_until(lambda: not _forked() & before)


@pytest.mark.torch
def test_an_agent_ends_ranks_of_which_one_is_gone_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun signals the others of a rank that failed; those that ended meanwhile have no number any more."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    for name in ("_popen", "close"):  # for the next test
        monkeypatch.setattr(SubprocessHandler, name, getattr(SubprocessHandler, name))
    fork_ranks()
    forking = {SHARED: server("json"), "NAME": "forked"}
    argv = ("-u", "-m", PROGRAM, "signal")
    rank = SubprocessHandler(sys.executable, argv, forking, None, None, 0, None)
    wait_until(lambda: not Path("/proc", str(rank.proc.pid)).exists())
    rank.close()
    assert rank.proc.wait(PATIENCE_SECONDS) == -15


def _forked() -> set[int]:
    """Processes of all servers that wait in the program."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text() == "forked_program\n":
                found.add(int(entry.name))
        except OSError:
            continue
    return found
