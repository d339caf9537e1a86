"""Read from a `transformers.Trainer` what its plan is made from: batches, epochs, recipe, model, lengths of rows."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler, Subset

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.files import replaced_atomically
from fcp_cli.integrations.hugging_face.data.batches import one_pair, one_sequence
from fcp_cli.integrations.hugging_face.data.rows import CollatedRows, stored_lengths
from fcp_cli.plan.job_facts import JobFacts, is_launched_without_plan
from fcp_cli.plan.metadata import LastBatch, Sync, steps_per_epoch
from fcp_cli.reading.documents import decode_json
from fcp_cli.runtime.communication.world import join_process_group
from fcp_cli.runtime.data.followed_step import plan_path
from fcp_cli.runtime.online.control import ProcessControl
from fcp_cli.runtime.online.job_plan import job_source
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.start import start
from fcp_cli.tuning import Lora

_CACHE: Final = "fcp/lengths"
_READ_BY_EACH_WORKER: Final = 64


def facts_of(trainer: Any, kind: str, loader: Any, device: torch.device) -> JobFacts:
    """Return the facts of a trainer.

    Args:
        trainer: a `transformers.Trainer` about to train.
        kind: the class whose loss it uses.
        loader: its own.
        device: of this rank.
    """
    rows = len(loader.dataset)
    args = trainer.args
    batch = trainer.get_total_train_batch_size(args)
    last: LastBatch = "drop" if args.dataloader_drop_last else "keep"
    per_epoch = steps_per_epoch(rows, batch, last)
    if not per_epoch:
        raise RunError(
            f"the training data has {rows} rows, fewer than a step of {batch} (dataloader_drop_last drops the rest); "
            "use smaller batches or fewer ranks"
        )
    wanted = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    world = args.world_size
    return JobFacts(
        loop=kind,
        device=device.type,  # type: ignore[arg-type]  # a kind that fcp trains on
        ranks=world,
        ranks_per_node=min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world))),
        rows_per_pass=args.per_device_train_batch_size,
        global_batch_size=batch,
        epochs=math.ceil(wanted / per_epoch),
        steps=wanted if wanted % per_epoch else None,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=not _is_sequential(loader),
        last_batch=last,
        sync=_sync(trainer),
        recipe=_recipe(trainer),
        config=_config(trainer.model),
    )


def _is_sequential(loader: Any) -> bool:
    """Return whether a prepared loader visits the rows in the data's order."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # one that shares batches over ranks
        batches = batches.batch_sampler
    return isinstance(getattr(batches, "sampler", None), SequentialSampler)


def _gathers_again(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and bool(plugin.reshard_after_forward)


def _sync(trainer: Any) -> Sync:
    return "microbatch" if trainer.is_fsdp_enabled and _gathers_again(trainer) else "iteration"


def _recipe(trainer: Any) -> dict[str, Any]:
    args = trainer.args
    dtype = next(trainer.model.parameters()).dtype
    precision = "bf16" if dtype in (torch.bfloat16, torch.float16) else "fp64" if dtype == torch.float64 else "fp32"
    if precision == "fp32" and (args.bf16 or args.fp16):
        precision = "amp"
    zero = "0" if not trainer.is_fsdp_enabled else "3" if _gathers_again(trainer) else "2"
    recipe = {"zero": zero, "precision": precision, "recompute": "full" if args.gradient_checkpointing else "none"}
    adapters = getattr(trainer.model, "peft_config", None) or {}
    texts = [text for adapter in adapters.values() if (text := _lora(adapter))]
    return recipe | ({"lora": texts[0]} if texts else {})


def _lora(adapter: Any) -> str | None:
    """Return an adapter as `fcp plan --lora` takes it; None: the plan counts with weights that are trained whole."""
    targets = adapter.target_modules
    if getattr(adapter, "r", None) is None or isinstance(targets, str) or not targets:
        return None
    names = tuple(sorted({name.rsplit(".", 1)[-1] for name in targets}))
    return str(Lora(rank=int(adapter.r), alpha=float(adapter.lora_alpha), targets=names))


def _config(model: Any) -> dict[str, Any]:
    """Return the config.json of a model, with its name."""
    config = model.config
    name = Path(str(config.name_or_path or config.model_type)).name
    return {**decode_json(config.to_json_string(use_diff=False)), "_name_or_path": name}


def start_session(
    loader: Any, facts: Callable[[], JobFacts], *, device: torch.device, pairs: bool = False, plan: Path | None = None
) -> Session:
    """Start the session of a loop: under the job's plan, or under one that begins to be made. Every rank calls it.

    Args:
        loader: the script's own, of its training data.
        facts: of the loop, asked for if the job has no plan.
        device: of this rank.
        pairs: a row is a pair of answers.
        plan: plan file; None: the one in FCP_PLAN.

    Raises:
        FcpError: the plan cannot be followed, or none can be made.
    """
    if plan is not None or not is_launched_without_plan():
        return start(plan_path(plan), device=device)
    join_process_group(device)
    path, control = Path(os.environ["FCP_PLAN"]), ProcessControl("rank0")
    if control.from_rank(0, bytes([path.exists()])) != bytes([False]):  # rank 0 knows: a trainer before had it made
        return start(path, device=device)
    return start(stream=job_source(path, control, LoadedLengths(loader, pairs=pairs), facts), device=device)


def rows_of(session: Session, loader: Any, *, pairs: bool = False, config: Any = None) -> CollatedRows:
    """Return the rows of a loader as the session's plan takes them."""
    lengths = None if session.source is None else session.source.lengths
    return CollatedRows(loader, session.plan, session.metadata, pairs=pairs, config=config, lengths=lengths)


class LoadedLengths:
    """The lengths of a trainer's training data: from the places of Arrow's lists, else from what the collator makes.

    Args:
        loader: the trainer's own.
        pairs: a row is a pair of answers.
    """

    def __init__(self, loader: Any, *, pairs: bool) -> None:
        self._loader, self._pairs = loader, pairs
        if not hasattr(loader.dataset, "__len__") or not hasattr(loader.dataset, "__getitem__"):
            raise RunError(
                f"the training data is a {type(loader.dataset).__name__}, which is read in one go: nobody knows its "
                "lengths before; use a data set with random access (datasets.Dataset), or see docs/how-to/online.md"
            )

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def known(self) -> IntArray | None:
        """Return [rows] tokens where a first row shows that the collator cuts and adds nothing, or as kept before."""
        stored = stored_lengths(self._loader.dataset, pairs=self._pairs)
        if stored is not None and len(stored):
            longest = int(stored.argmax())
            if self.read(range(longest, longest + 1))[0] == stored[longest]:
                return stored
        cached = self._cache()
        if cached is not None and cached.is_file():
            with suppress(OSError):
                found: IntArray = np.fromfile(cached, dtype=np.int64)
                if len(found) == len(self) and (found > 0).all():
                    return found
        return None

    def read(self, rows: range) -> IntArray:
        """Collate rows one by one, in worker processes where there are many, and return their tokens."""
        loader = self._loader
        workers = loader.num_workers or min(_cores_of_a_rank(), len(rows) // _READ_BY_EACH_WORKER)
        reading = DataLoader(
            Subset(loader.dataset, rows),
            batch_size=1,
            collate_fn=loader.collate_fn,
            num_workers=workers,
            multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
            generator=torch.Generator(),
        )
        with torch.random.fork_rng(devices=[]):  # training draws what it would draw without a plan
            found = (self._tokens(batch, row) for row, batch in zip(rows, reading, strict=True))
            return np.fromiter(found, dtype=np.int64, count=len(rows))

    def keep(self, lengths: IntArray) -> None:
        """Keep them in the user's cache, where the data set and its collator can be told from others."""
        path = self._cache()
        if path is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_atomically(path) as temporary:
                temporary.write_bytes(lengths.tobytes())

    def _tokens(self, batch: Any, row: int) -> int:
        found = one_pair(batch, row) if self._pairs else one_sequence(batch, row)
        tokens = len(found[0] if isinstance(found, tuple) else found.tokens)
        if not tokens:
            raise RunError(f"row {row} of the training data has no tokens; filter it out of the data set")
        return tokens

    def _cache(self) -> Path | None:
        """Return the file of this data set under this collator; None where either has no fingerprint."""
        own = getattr(self._loader.dataset, "_fingerprint", None)
        if not own:
            return None
        from datasets.fingerprint import Hasher

        try:
            collator = Hasher.hash(self._loader.collate_fn)
        except Exception:  # whatever pickling a collator raises: it cannot be told from others
            return None
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        key = hashlib.sha256(f"{own} {collator} {self._pairs}".encode()).hexdigest()
        return home / _CACHE / f"{key}.lengths"


def _cores_of_a_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
