"""A rank of the test: `torchrun ... -m fcp_cli.verification.worker SETTINGS.json`, started by `fcp selftest`.

All ranks run all checks in the same order. Rank 0 keeps a diary, which the parent process monitors.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from fcp_cli.runtime.transport import join_process_group, local_device
from fcp_cli.util.files import write_json_atomically
from fcp_cli.util.findings import Finding
from fcp_cli.verification import checks, step_ends
from fcp_cli.verification.checks import Bench
from fcp_cli.verification.selftest import SelftestReport, Settings, now, read_settings

CHECKS: Mapping[str, Callable[[Bench], Finding]] = {
    "surroundings": checks.check_surroundings,
    "links": checks.check_links,  # first, since it times first contacts
    "kernel": checks.check_kernel,
    "rings": checks.check_rings,
    "overlap": checks.check_overlap,
    "order": step_ends.check_order,
    "packs": checks.check_packs,
}


def main(argv: list[str]) -> None:
    """Run all checks; called by torchrun on every rank."""
    # Before killing hanging ranks, the parent asks for their stacks.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    settings = read_settings(Path(argv[0]))
    device = torch.device("cpu") if settings.device == "cpu" else local_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    owns = join_process_group(device)
    try:
        bench = Bench(settings, device)
        for name, check in CHECKS.items():
            bench.begin(name)
            finding = check(bench)
            if bench.is_first:
                settings.diary.found(finding)
        if bench.is_first:
            settings.diary.finish()
            if settings.writes_report:
                _write_report(settings)
    finally:
        if owns:
            dist.destroy_process_group()


def _write_report(settings: Settings) -> None:
    report = SelftestReport(date=now(), findings=settings.diary.read().findings)
    write_json_atomically(settings.report, report.document())
    sys.stdout.write(report.block() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
