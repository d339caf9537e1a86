"""A rank of the test: `torchrun ... -m fcp_cli.selftest.worker SETTINGS.json`, started by `fcp selftest`.

All ranks run all checks in the same order. Rank 0 keeps a diary, which the parent process monitors.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fcp_cli.files import write_text_atomically
from fcp_cli.runtime.communication.world import join_process_group, local_device
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.checks import kernel, links, order, overlap, packs, rings, surroundings
from fcp_cli.selftest.findings import Finding, SelftestReport, now
from fcp_cli.selftest.settings import Settings, read_settings

CHECKS: Sequence[Callable[[Bench], Finding]] = (
    surroundings.check,
    links.check,  # first, since it times first contacts
    kernel.check,
    rings.check,
    overlap.check,
    order.check,
    packs.check,
)


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
        for check in CHECKS:
            bench.begin(check.__module__.rpartition(".")[2])
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
    write_text_atomically(settings.report, json.dumps(report.document(), indent=2) + "\n")
    sys.stdout.write(report.block() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
