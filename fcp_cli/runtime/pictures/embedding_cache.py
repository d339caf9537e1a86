"""Cache of a frozen vision encoder's outputs on disk: a repeated picture is neither decoded nor encoded.

Each part (an image, a pair of frames, a tile) is one file, named after the inputs of its embeddings: the
picture's content, its processor, the part's place in it, and the encoder's weights and types. A file exists whole or
not at all, and any number of ranks and runs may share a folder. An embedding is this encoder's own output, bit
for bit; a picture encoded in a batch may differ in its last bits from one encoded by itself, as always.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.console import note
from fcp_cli.errors import FcpError, RunError
from fcp_cli.files import replaced_atomically
from fcp_cli.reading.documents import decode_json
from fcp_cli.vision.parts import VisualPart, content_key

_DIGEST_BYTES = 16
_REMEDY = "freeze it (--freeze-vision), or drop the cache (--cache-embeddings)"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CachedRows:
    """Embeddings that a rank need not compute.

    Attributes:
        rows: [tokens, levels, hidden] of its parts that were cached.
        order: [tokens of all its parts] place of each embedding among those computed, with `rows` behind them.
    """

    rows: Tensor
    order: Tensor

    def joined_with(self, computed: Tensor) -> Tensor:
        """Return the embeddings of all parts [tokens, levels, hidden], with those computed, or a blank one's, given."""
        own = computed[: len(self.order) - len(self.rows)]
        rows = self.rows.to(device=own.device, non_blocking=True)
        if rows.dtype != own.dtype or rows.shape[1:] != own.shape[1:]:
            raise RunError(
                f"cached embeddings are {rows.dtype} {tuple(rows.shape[1:])}, those of the encoder {own.dtype} "
                f"{tuple(own.shape[1:])}: its precision changed; name another folder for the cache"
            )
        return torch.cat((own, rows))[self.order.to(own.device)]


class EmbeddingCache:
    """A folder of embeddings.

    Args:
        folder: made if it is not there.
        about: other settings that affect the embeddings, e.g. the precision of the model.
    """

    def __init__(self, folder: Path, *, about: str = "") -> None:
        self.folder = folder
        self._about = about
        self._of_model = ""
        self._is_writable = True
        self.hits = self.misses = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the folder of cached embeddings {folder}: {error.strerror}") from error

    def bind(self, model: nn.Module) -> None:
        """Take the encoder whose embeddings these are. Collective if its weights are sharded."""
        towers = dict(encoder_modules(model))
        trained = [
            f"{tower}.{name}"
            for tower, module in towers.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        if not towers or trained:
            reason = f"this run trains it ({trained[0]})" if trained else "this model has none"
            raise RunError(f"cached embeddings are those of a frozen vision encoder, but {reason}; {_REMEDY}")
        digest = hashlib.blake2b(f"{torch.__version__} {self._about}".encode(), digest_size=_DIGEST_BYTES)
        for tower, module in towers.items():
            for name, weight in sorted(module.state_dict(keep_vars=True).items()):
                whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
                digest.update(f"{tower}.{name} {whole.dtype} {tuple(whole.shape)}".encode())
                digest.update(memoryview(_bytes_of(whole.detach())))
        self._of_model = digest.hexdigest()

    def key(self, part: VisualPart) -> str:
        """Return the name of a part's embeddings; may read its picture."""
        text = f"{self._of_model} {part.kind} {part.grid} {part.num_tokens} {content_key(part)}"
        return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def read(self, key: str) -> Tensor | None:
        """Return the embeddings [tokens, levels, hidden] of this name; None if they are not there, or damaged."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            content = b""
        head, _, rows = content.partition(b"\n")
        try:
            described = decode_json(head or "{}")
            found = torch.frombuffer(bytearray(rows), dtype=getattr(torch, described["dtype"]))
            found = found.view(described["shape"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            self.misses += 1
            return None
        self.hits += 1
        return found

    def write(self, keys: Sequence[str | None], embeddings: Iterable[Tensor]) -> None:
        """Cache the embeddings of each name; a full disk is reported once, and training continues."""
        for key, rows in zip(keys, embeddings, strict=True):
            if key is None or not self._is_writable:
                continue
            head = {"dtype": str(rows.dtype).removeprefix("torch."), "shape": list(rows.shape)}
            try:
                self._path(key).parent.mkdir(exist_ok=True)
                with replaced_atomically(self._path(key), durable=False) as path:
                    path.write_bytes(json.dumps(head).encode() + b"\n" + _bytes_of(rows.detach()))
            except (FcpError, OSError) as error:
                self._is_writable = False
                note(f"no more embeddings are cached; images without one are encoded in every epoch: {error}")

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]


def encoder_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return the parts of a vision-language model, wrapped or not, that come before its language model, by name."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if "language_model" in children:
            before = {child: part for child, part in children.items() if child != "language_model"}
            return [(f"{name}.{child}".lstrip("."), part) for child, part in before.items() if child != "lm_head"]
    return []


def _bytes_of(tensor: Tensor) -> bytes:
    host: Any = tensor.cpu().contiguous().flatten().view(torch.uint8)
    whole: bytes = host.numpy().tobytes()
    return whole
