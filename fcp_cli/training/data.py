"""Opens the tokens of a run. Imports no torch, so that `fcp launch` can check the data before starting anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fcp_cli.errors import ManifestError, RunError
from fcp_cli.manifest.table import manifest_source
from fcp_cli.manifest.tokenizer import FileTokenizer
from fcp_cli.manifest.tokens import SyntheticTokens, TokenReader, open_media, open_pictures, open_tokens
from fcp_cli.plan.file import PlanReader
from fcp_cli.planning.batches import mixed_manifests
from fcp_cli.runtime.cursor import mixed_fetch
from fcp_cli.runtime.plan_agreement import require_causal


def open_data(
    plan: Path,
    manifests: Sequence[Path],
    *,
    vocab_size: int,
    seed: int,
    length_column: str = "length",
    kept: Path | None = None,
) -> Callable[[int], Any]:
    """Open the tokens of a plan's manifest or mixture, or random tokens of its lengths.

    They are random without a manifest, or if it was built from media sizes. For `kept` see `open_tokens`.
    """
    reader = PlanReader(plan)
    metadata = reader.metadata
    if not manifests or (metadata.mixture is None and open_media(manifests[0]) is not None):
        require_causal(metadata, plan, "random tokens")
        return SyntheticTokens(reader.planned_lengths(), vocab_size, seed)
    if metadata.mixture is None:
        return _open_tokens(manifests[0], length_column, kept, vocab_size)
    require_texts(manifests)
    paths = mixed_manifests(metadata.mixture, manifests, length_column=length_column)
    names = [source.name for source in metadata.mixture.sources]
    opened = {
        name: _open_tokens(path, length_column, kept, vocab_size) for name, path in zip(names, paths, strict=True)
    }
    return mixed_fetch(plan, lambda name, row: opened[name](row))


def require_texts(manifests: Sequence[Path]) -> None:
    """Raise RunError for mixtures with images: the bundled trainer supports these only with a single manifest."""
    for path in manifests:
        if open_pictures(path) is not None or open_media(path) is not None:
            raise RunError(
                f"{path} holds images, but the bundled trainer only mixes texts; give a script of your own, whose "
                "fetch is fcp_cli.runtime.mixed_fetch"
            )


def _open_tokens(manifest: Path, length_column: str, kept: Path | None, vocab_size: int) -> TokenReader:
    tokens = open_tokens(manifest, length_column=length_column, kept=kept, entries=vocab_size)
    if tokens.vocab_size > vocab_size:
        raise RunError(
            f"the tokens of {manifest} go up to {tokens.vocab_size - 1}, but the model's vocabulary has {vocab_size} "
            "entries; choose the tokenizer's own model, or build the manifest with another --tokenizer"
        )
    return tokens


def check_tokenizer(manifest: Path, checkpoint: Path) -> None:
    """Raise RunError if a manifest's tokenizer differs from the checkpoint's.

    Only vocabularies are compared; files may differ in other fields.
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


def has_tokens(manifest: Path, *, length_column: str = "length", kept: Path | None = None) -> bool:
    """Return whether a manifest gives access to tokens; not if it was built only from lengths."""
    try:
        open_tokens(manifest, length_column=length_column, kept=kept)
    except ManifestError:
        source = manifest_source(manifest)
        if source is None or source.get("content") == "lengths":
            return False
        raise
    return True
