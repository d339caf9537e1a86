"""Every function that opens a file to read it is entered by a sound input of some kind, or stands here with the reason.

Whatever a file holds, the command that reads it answers, or says in one line what is wrong: a few inputs of every kind; `make fuzz`
runs 20,000. In one file with the readers, so that one worker writes the seeds of both.
"""

from __future__ import annotations

import cProfile
from types import CodeType

import pytest

from tests.fuzz.campaign import KINDS, inputs
from tests.fuzz.folder import SeedFolder
from tests.fuzz.judgement import judged
from tests.fuzz.option_kinds import UNDRAWN, commands
from tests.fuzz.readers import readers

# Sound inputs start jobs up to the first process, and read what only ranks read.
pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]

_INPUTS = 4  # of a kind; more than seconds are left to `make fuzz`

_SYSTEM = "a file of the system, which no user writes"
_OWN = "a file or pipe of fcp's own processes"
_RANKS = "opened in ranks of real jobs alone"
_NOT_YET = "no kind yet"
_STORE = "an object of a store; tests/util/test_remote.py has faults of those"
EXCEPTIONS = {
    "fcp_cli/cli/plan.py:_plan_to_stdout": _OWN,
    "fcp_cli/util/compiling.py:package_stamp": _SYSTEM,
    "fcp_cli/integrations/megatron/follow.py:ScheduleRecorder.begin": _OWN,
    "fcp_cli/launching/program.py:_head": _NOT_YET,
    "fcp_cli/launching/program.py:_swift_settings": _NOT_YET,
    "fcp_cli/launching/node.py:_write_record": _OWN,
    "fcp_cli/launching/failure.py:MsrunRanks._noticed": _OWN,
    "fcp_cli/util/machine.py:_gpus": _SYSTEM,
    "fcp_cli/util/machine.py:cpu_name": _SYSTEM,
    "fcp_cli/util/processes.py:current_boot_id": _SYSTEM,
    "fcp_cli/util/processes.py:_stat": _SYSTEM,
    "fcp_cli/util/processes.py:command_of": _SYSTEM,
    "fcp_cli/util/processes.py:environment_of": _SYSTEM,
    "fcp_cli/manifest/build.py:counted_rows": _NOT_YET,
    "fcp_cli/manifest/detect.py:_made_by_fcp": _NOT_YET,
    "fcp_cli/models/weights.py:_conversion": _NOT_YET,
    "fcp_cli/plan/file.py:table_of": _OWN,
    "fcp_cli/planning/journal.py:PlanJournal.read_refit": _RANKS,
    "fcp_cli/planning/journal.py:StreamJournal._take_over_plan": _NOT_YET,
    "fcp_cli/profiling/timing.py:peak_bytes": _SYSTEM,
    "fcp_cli/profiling/timing.py:run_queue_seconds": _SYSTEM,
    "fcp_cli/profiling/measure.py:run_measurement.goes_on": _OWN,
    "fcp_cli/profiling/measure.py:reason_in_log": _OWN,
    "fcp_cli/profiling/samples.py:read_measurement": _OWN,
    "fcp_cli/util/inputs.py:open_unpacked": _NOT_YET,
    "fcp_cli/util/remote.py:RemoteFile.__init__": _STORE,
    "fcp_cli/runs/run_dir.py:read_stopped": _NOT_YET,
    "fcp_cli/integrations/hugging_face/loops.py:AcceleratedLoop.load": _RANKS,
    "fcp_cli/runtime/online_job.py:_wish": _RANKS,
    "fcp_cli/runtime/online.py:StreamCursor.__init__": _RANKS,
    "fcp_cli/runtime/session.py:Session.steps": _RANKS,
    "fcp_cli/verification/selftest.py:Diary.read": _OWN,
    "fcp_cli/verification/selftest.py:_findings": _OWN,
    "fcp_cli/verification/selftest.py:read_settings": _OWN,
    "fcp_cli/training/checkpoint.py:_pieces": _RANKS,
    "fcp_cli/training/data.py:check_tokenizer": _RANKS,
    "fcp_cli/training/checkpoint.py:kept_names": _RANKS,
    "fcp_cli/training/trainer.py:Trainer._open_metrics": _RANKS,
    "fcp_cli/verification/verify.py:_reason": _OWN,
}


@pytest.fixture(scope="module")
def entered(seeds: SeedFolder) -> set[str]:
    """The readers that sound inputs of all kinds enter."""
    places = {place: name for name, place in readers().items()}
    found: set[str] = set()
    for kind in KINDS.values():
        for one in kind.sound:
            with cProfile.Profile(builtins=False) as profile:  # written in C: a callback in Python takes a minute more
                became = judged(one, seeds)
            assert became == ("answered", None), one.name
            codes = (entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType))
            found.update(places.get((code.co_filename, code.co_firstlineno), "") for code in codes)
    return found


@pytest.mark.full
def test_every_reader_is_entered_by_a_kind_or_named_with_its_reason(entered: set[str]) -> None:
    assert set(readers()) - entered - set(EXCEPTIONS) == set()
    assert set(EXCEPTIONS) - set(readers()) == set()


def test_every_command_has_a_kind_of_its_options_or_a_reason() -> None:
    drawn = {kind.removeprefix("options of ") for kind in KINDS if kind.startswith("options of ")}
    assert set(commands()) == drawn | set(UNDRAWN)


@pytest.mark.examples(40)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused_in_one_line(seeds: SeedFolder, kind: str) -> None:
    count = max(1, round(_INPUTS * KINDS[kind].share))
    assert [(name, wrong) for _, _, name, wrong in inputs(kind, seeds, 0, count) if wrong] == []
