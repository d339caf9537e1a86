"""Megatron-Bridge's training step under a plan, beside itself without fcp."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forked_ranks.rank_forking import SHARED
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.plans import microbatch
from tests.training.small_runs import run_fcp

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

SCRIPT = ROOT / "tests" / "runtime" / "megatron" / "bridge_train.py"
EAGER = {"TORCHDYNAMO_DISABLE": "1", SHARED: ""}  # the variable is read as PyTorch is imported


needs_bridge = pytest.mark.skipif(
    not os.environ.get("FCP_MEGATRON_BRIDGE_SOURCE"),
    reason="opt-in: FCP_MEGATRON_BRIDGE_SOURCE names a checkout of Megatron-Bridge 0.6.0; megatron-core 0.19",
)


@needs_bridge
@pytest.mark.parametrize("loader", ["single", "batch"])
def test_its_training_step_has_the_losses_and_weights_that_it_has_without_fcp(loader: str, tmp_path: Path) -> None:
    draw = random.Random(1)
    lengths = [draw.choice([3, 5, 9, 17, 30, 61, 100]) for _ in range(96)]
    pq.write_table(pa.table({"length": lengths}), tmp_path / "lengths.parquet")
    options = ("--ranks", "2", "--ranks-per-node", "2", "--tokens-per-rank", "80", "--global-batch-size", "8")
    making = ("--solver", "fcp-paper", "--sync", "iteration", "--no-shuffle", "-o", "plan.parquet")
    planned = run_fcp("plan", "lengths.parquet", *options, *making, folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    torchrun(str(SCRIPT), str(tmp_path / "lengths.parquet"), str(tmp_path / "alone"), loader, num_ranks=2, **EAGER)
    words = ("launch", "--plan", "plan.parquet", "--", str(SCRIPT), "lengths.parquet", "planned", loader)
    done = run_fcp(*words, folder=tmp_path, **EAGER)
    assert done.returncode == 0, done.stderr
    assert "from step 0 of 12, 2 ranks, sync iteration" in done.stderr
    alone, found = (json.loads((tmp_path / f"{name}.0.json").read_text()) for name in ("alone", "planned"))
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-6)
    np.testing.assert_allclose(found["weights"], alone["weights"], atol=1e-6)


@needs_bridge
@pytest.mark.parametrize("multiple", [1, 4])  # to which Bridge pads each sequence of a pack
def test_packs_of_its_own_data_set_are_cut_apart_as_its_collation_lays_them(multiple: int) -> None:
    import torch
    from torch.utils.data import DataLoader

    from fcp_cli.integrations.megatron.data import Cycle, find_samples, load_shard
    from tests.runtime.megatron.bridge_train import file_of_bridge

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets", MagicMock())
        parent = file_of_bridge("data/datasets/gpt_sft.py")["GPTSFTDataset"]
    kind = file_of_bridge("data/packing/gpt_sft.py", GPTSFTDataset=parent)["GPTSFTPackedDataset"]
    lengths = [[5, 9], [13], [5, 5, 9]]  # each with the token that is a label alone
    tokens = [
        [list(range(first, first + most)) for first, most in zip((100, 200, 300), each, strict=False)]
        for each in lengths
    ]
    rows = [
        {
            "input_ids": [token for sequence in pack for token in sequence],
            "seq_start_id": [0, *np.cumsum([len(sequence) for sequence in pack])[:-1].tolist()],
            "loss_mask": [1] * sum(map(len, pack)),
        }
        for pack in tokens
    ]
    packs = kind.__new__(kind)
    packs.__dict__.update(
        {"indexed_dataset": rows, "samples_mapping": None, "return_cu_seqlen": True, "_pad_seq_to_mult": multiple},
        pad_cu_seqlens=False,
        answer_only_loss=True,
        pad_to_max_length=False,
        max_seq_length=64,
        pad_seq_length_to_mult=16,
        ceil_to_power_2=False,
        tokenizer=SimpleNamespace(eos_id=0),
    )
    kind.__len__ = lambda _: len(rows)
    sampler = file_of_bridge("data/samplers.py")["MegatronPretrainingBatchSampler"](3, 0, 1, 2, 0, 1)
    samples = find_samples(Cycle(DataLoader(packs, batch_sampler=sampler, collate_fn=packs.collate_fn)))
    for at, pack in enumerate(tokens):
        kept = [len(sequence) - 1 for sequence in pack]
        row = microbatch((sum(kept),), (0, 1), first_sequence=at)
        shards = [load_shard(row, samples, rank=rank) for rank in range(2)]
        assert all(shard.layout.lengths == tuple(kept) for shard in shards)
        found, labels = (torch.cat([shard.batch[name][0] for shard in shards]) for name in ("tokens", "labels"))
        assert sorted(found.tolist()) == sorted(token for sequence in pack for token in sequence[:-1])
        assert labels.tolist() == (found + 1).tolist()
