"""Records a run's inputs: the plan, its cost profile, and the installed versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fcp_cli.files import replaced_atomically, write_text_atomically
from fcp_cli.machine.devices import has_driver_files
from fcp_cli.machine.facts import collect_facts, facts_document
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runs.folder import RunPaths


def write_record(run_dir: Path, plan: Path, metadata: PlanMetadata) -> None:
    """Copy the plan, and write its cost profile and the versions on this machine."""
    paths = RunPaths(run_dir=run_dir)
    if plan != paths.plan:  # a resumed run follows its own copy
        with replaced_atomically(paths.plan) as temporary:
            shutil.copyfile(plan, temporary)
    if metadata.cost_profile:  # a job without a plan writes its own profile when training begins
        write_text_atomically(paths.profile, metadata.cost_profile)
    write_text_atomically(
        paths.versions, json.dumps(facts_document(collect_facts(asks_torch=has_driver_files())), indent=2) + "\n"
    )
