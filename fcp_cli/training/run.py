"""Runs the bundled trainer: run directory, data, session of all ranks, training loop."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from fcp_cli.errors import RunError
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.runs.owner import own_unless_launched
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.runtime import Fetch, Session, start
from fcp_cli.training.data import open_data
from fcp_cli.training.evaluation import open_held_out
from fcp_cli.training.interrupt import StopRequest
from fcp_cli.training.pictures import open_visuals
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.trainer import Trainer
from fcp_cli.training.weights import has_vision, model_config, model_vocab_size


def train(settings: TrainSettings, stop: StopRequest) -> bool:
    """Train on this rank until the last step. Collective.

    Returns:
        Whether the run finished; False if it was stopped, after saving a checkpoint.
    """
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":
            owned = own_unless_launched(settings.run_dir)
            stack.enter_context(owned or nullcontext())
        _require_free(settings)
        fetch, shows_pictures = _open_data(settings, stack)
        if has_vision(model_config(settings.model)) and not shows_pictures:
            settings = replace(settings, freeze_vision=True)  # else weight decay would shrink untrained weights
        session = stack.enter_context(
            start(
                settings.plan,
                fetch,
                device=_device(settings.device),
                grad_ring_dtype=settings.grad_ring_dtype,
                skip_bad_rows=settings.bad_rows == "skip",
                metrics=RunPaths(run_dir=settings.run_dir).metrics,
            )
        )
        held_out = None
        if settings.eval_manifest is not None:
            held_out = open_held_out(settings, session, lambda theirs: _open_data(theirs, stack)[0])
        trainer = stack.enter_context(closing(Trainer(settings, session, held_out)))
        if session.recorder is not None:
            _require_shared(trainer.paths, session)
        return trainer.run(stop)


def _open_data(settings: TrainSettings, stack: ExitStack) -> tuple[Fetch, bool]:
    """Return the manifest's rows, open until the stack exits, and whether they have images or videos."""
    visuals = open_visuals(settings, model_config(settings.model))
    if visuals is not None:
        stack.callback(visuals.close)
        return visuals, True
    tokens = open_data(
        settings.plan,
        settings.manifest,
        vocab_size=model_vocab_size(settings.model),
        seed=settings.seed,
        length_column=settings.length_column,
        kept=RunPaths(run_dir=settings.run_dir).origin if settings.resume else None,
    )
    return tokens, False


def _require_free(settings: TrainSettings) -> None:
    """Raise RunError if the run directory already has a run; called before any rank writes."""
    paths = RunPaths(run_dir=settings.run_dir)
    if not settings.resume and (paths.metrics.exists() or checkpoints(paths.checkpoints)):
        raise RunError(
            f"{settings.run_dir} already holds a run; continue it with --resume, or choose another --run-dir"
        )


def _require_shared(paths: RunPaths, session: Session) -> None:
    """Check that all ranks see rank 0's files: else checkpoints would be scattered over nodes."""
    dist.barrier()
    missing = torch.zeros(1, device=session.device)
    missing += not paths.metrics.exists()
    session.world.all_reduce_sum(missing)
    if missing.item():
        raise RunError(
            f"{int(missing.item())} ranks do not see the run directory {paths.run_dir} of rank 0; choose a --run-dir "
            "on a file system that all nodes share"
        )


def _device(kind: str) -> torch.device | None:
    if kind == "auto":
        return None
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
