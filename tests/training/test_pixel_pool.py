"""The processes that decode pictures: what they give, what they say, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.manifest.pictures import PictureRecords
from fcp_cli.manifest.tokens import open_pictures
from tests.manifest.datasets import build, write_jsonl
from tests.manifest.picture_checkpoint import picture, write_processor
from tests.messages import raises
from tests.patience import PATIENCE_SECONDS

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from fcp_cli.training.decoding import Decoder, PixelPool, Wanted, usual_workers

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]


@pytest.fixture
def rows(tmp_path: Path) -> PictureRecords:
    folder = write_processor(tmp_path / "checkpoint", "qwen3_vl")
    for number in range(4):
        picture(30 + 9 * number, 50, number).save(tmp_path / f"{number}.png")
    data = write_jsonl(tmp_path / "data.jsonl", [{"image": f"{number}.png", "caption": "it"} for number in range(4)])
    build(data, tmp_path / "m.parquet", kind="media", processor=str(folder))
    found = open_pictures(tmp_path / "m.parquet")
    assert found is not None
    return found


def wanted(rows: PictureRecords, row: int) -> Wanted:
    found = rows.read(row)
    visual = found.visuals[0]
    return Wanted(picture=found.pictures[0], size=found.sizes[0], visual=visual, ranges=((0, visual.patches),))


def test_a_process_decodes_what_the_trainer_would_and_says_what_is_wrong(rows: PictureRecords, tmp_path: Path) -> None:
    pool, decode = PixelPool(rows.folder, rows.processor, workers=1), Decoder(rows.folder, rows.processor)
    try:
        begun = [pool.begin(wanted(rows, row)) for row in range(3)]
        (tmp_path / "3.png").write_bytes(b"no picture")
        begun.append(pool.begin(wanted(rows, 3)))
        for row in range(3):
            assert np.array_equal(begun[row]()[0], decode(wanted(rows, row))[0])
        with raises(snapshot("BadPictureError: cannot be decoded: cannot identify image file 'FOLDER/3.png'")):
            begun[3]()
        (worker,) = workers_of(pool)
        os.kill(worker, signal.SIGKILL)
        with raises(
            snapshot(
                "RunError: a process that decodes images ended, perhaps because memory ran out; see the lines above, and try fewer with --decode-workers"
            )
        ):
            pool.begin(wanted(rows, 0))()
    finally:
        pool.close()
    assert not Path(f"/proc/{worker}").exists()


def workers_of(pool: PixelPool) -> list[int]:
    executor: Any = pool._pool
    return list(executor._processes)


_TRAINER = """
import sys
from pathlib import Path
from fcp_cli.training.decoding import PixelPool
from fcp_cli.vision.processors import open_processor

if __name__ == "__main__":
    pool = PixelPool(Path(sys.argv[1]), open_processor(sys.argv[1]), workers=1)
    print(*pool._pool._processes, flush=True)
    sys.stdin.read()
"""


@pytest.mark.full
def test_processes_end_with_a_trainer_that_is_killed(rows: PictureRecords, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(_TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(tmp_path / "trainer.py"), str(rows.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None and trainer.stdin is not None
    worker = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    trainer.stdin.close()
    end = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_each_rank_has_its_share_of_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert usual_workers(cores) == 1
    assert usual_workers(1) == min(8, max(1, cores - 1))
