"""The source of a run's tokens. Imports no torch, so that `fcp launch` can check it before it starts anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fcp_cli.errors import ManifestError, RunError
from fcp_cli.manifest.header import manifest_source
from fcp_cli.manifest.tokenizer import FileTokenizer
from fcp_cli.manifest.tokens import SyntheticTokens, TokenReader, open_media, open_tokens
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.runtime.agreement.plan_agreement import require_causal


def open_data(
    plan: Path,
    manifest: Path | None,
    *,
    vocab_size: int,
    seed: int,
    length_column: str = "length",
    kept: Path | None = None,
) -> TokenReader:
    """Open the tokens of a manifest's source, or random ones of the plan's lengths.

    They are random where `manifest` is None, or was built from sizes of images and videos. `kept` as for `open_tokens`.
    """
    if manifest is None or open_media(manifest) is not None:
        require_causal(PlanReader(plan).metadata, plan, "random tokens")
        return SyntheticTokens(planned_lengths(plan), vocab_size, seed)
    tokens = open_tokens(manifest, length_column=length_column, kept=kept, entries=vocab_size)
    if tokens.vocab_size > vocab_size:
        raise RunError(
            f"the tokens of {manifest} go up to {tokens.vocab_size - 1}, but the model's vocabulary has {vocab_size} "
            "entries; choose the tokenizer's own model, or build the manifest with another --tokenizer"
        )
    return tokens


def check_tokenizer(manifest: Path, checkpoint: Path) -> None:
    """Refuse a manifest whose tokens are those of another tokenizer than a checkpoint's.

    Files may differ in other fields: only the vocabulary is compared.
    """
    source = manifest_source(manifest) or {}
    name, own = source.get("tokenizer"), checkpoint / "tokenizer.json"
    theirs = Path(str(name))
    theirs = theirs / "tokenizer.json" if theirs.is_dir() else theirs
    if name in (None, "bytes") or not own.is_file() or not theirs.is_file() or own.read_bytes() == theirs.read_bytes():
        return
    wanted, found = FileTokenizer(own).vocabulary(), FileTokenizer(theirs).vocabulary()
    differing = min(
        (token for token in found if wanted.get(token) != found[token]), key=found.__getitem__, default=None
    )
    if differing is None:
        return
    flag = "--processor" if source.get("content") == "pixels" else "--tokenizer"
    raise RunError(
        f"{manifest} was built with the tokenizer {theirs}, not with that of {checkpoint}: {differing!r} is token "
        f"{found[differing]} there and {wanted.get(differing, 'none')} here; build it again with {flag} {checkpoint}"
    )


def planned_lengths(plan: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return [manifest rows] the tokens of each sequence as planned; 0 for one that the plan drops."""
    reader = PlanReader(plan)
    lengths = np.zeros(reader.metadata.manifest.rows, dtype=np.int64)
    for step in reader.steps():
        lengths[step.sequences] = step.lengths
    return lengths


def has_tokens(manifest: Path, *, length_column: str = "length", kept: Path | None = None) -> bool:
    """Return whether training can read tokens through this manifest; it cannot if it was made of lengths alone."""
    try:
        open_tokens(manifest, length_column=length_column, kept=kept)
    except ManifestError:
        source = manifest_source(manifest)
        if source is None or source.get("content") == "lengths":
            return False
        raise
    return True
