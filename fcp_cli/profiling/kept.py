"""Cost profiles in the user's cache: measured ones, and those that trainings refitted, for later jobs without a plan.

A file's name holds the hardware, the model and the settings that its times are of, so that one of other hardware is
never read. The file itself repeats them, in case somebody renamed it, and is a cost profile like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.cost.profile import FORMAT, CostProfile, dump_cost_profile, load_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.files import write_text_atomically
from fcp_cli.machine.accelerators import find_accelerators
from fcp_cli.machine.host import cpu_name, usable_cores
from fcp_cli.profiling.fits.measurement import model_figures, timed_settings
from fcp_cli.recipe import Recipe
from fcp_cli.words import counted, one_line

_FOLDER: Final = "fcp/profiles"
_OF: Final = "kept_for"  # key of the measurement block

DeviceKind = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptKey:
    """Circumstances in which the times of a profile hold.

    Attributes:
        device: name of the processor, with its usable cores, or of the accelerator.
        ranks_per_node: ranks that share a node.
        several_nodes: rings may cross nodes.
        model: digest of the model's figures, without its name.
        settings: the settings of the recipe, as far as times depend on them.
    """

    device: str
    ranks_per_node: int
    several_nodes: bool
    model: str
    settings: str

    @property
    def path(self) -> Path:
        """Return the file of the profile, which need not exist."""
        rest = _digest([FORMAT, self.several_nodes, self.settings])[:8]
        return _folder() / f"{self.model[:16]}-{rest}-{self.hardware}.yaml"

    @property
    def hardware(self) -> str:
        """Return the device and its number as a part of a file name."""
        return f"{self.ranks_per_node}x-{re.sub(r'[^a-z0-9]+', '-', self.device.lower()).strip('-')}"

    def document(self) -> dict[str, Any]:
        """Return the key as the file repeats it."""
        return {"format": FORMAT, **asdict(self)}


def key_of(
    model: str, recipe: Recipe, *, device: DeviceKind, ranks_per_node: int, several_nodes: bool = False
) -> KeptKey | None:
    """Return the key of a model's times on this machine; None if its accelerator reports no name."""
    name = f"{cpu_name()}, {counted(usable_cores(), 'core')}"
    if device != "cpu":
        found = find_accelerators()
        if found is None or found.kind != device or not found.name:
            return None
        name = found.name
    figures = {key: value for key, value in model_figures(model).items() if key != "name"}
    trained = {"lora": recipe.lora, "freeze": recipe.freeze, "freeze_vision": recipe.freeze_vision}
    return KeptKey(
        device=name,
        ranks_per_node=ranks_per_node,
        several_nodes=several_nodes,
        model=_digest(figures),
        settings=json.dumps({**timed_settings(recipe), **trained}),
    )


def keep_measured(profile: CostProfile, model: str) -> Path | None:
    """Write the profile of a model that was measured on this machine for jobs here; None if they cannot use it."""
    found, recipe = profile.measurement, profile.recipe
    device, ranks = found["device"], found["ranks"]
    if recipe is None or ranks != found["ranks_per_node"]:
        return None
    key = key_of(model, recipe, device=device, ranks_per_node=ranks)
    return None if key is None else keep(profile, key)


def keep(profile: CostProfile, key: KeptKey) -> Path | None:
    """Write a profile for later jobs; None if the cache cannot be written, which is no reason to stop."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kept = replace(profile, measurement={"date": now, **profile.measurement, _OF: key.document()})
    try:
        key.path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(key.path, dump_cost_profile(kept), durable=False)
    except OSError:
        return None
    return key.path


def kept_profile(key: KeptKey) -> tuple[CostProfile | None, str]:
    """Return the profile that is kept for a key, and a phrase about it, or None and why there is none."""
    try:
        found = load_cost_profile(key.path) if key.path.is_file() else None
    except ProfileError as error:
        return None, f"computed, since the kept profile is damaged, remove it: {one_line(str(error), most=300)}"
    if found is None:
        return None, f"computed{_kept_elsewhere(key)}"
    if found.measurement.get(_OF) != key.document():
        return None, f"computed, since {key.path} is of other hardware, model or settings than its name says; remove it"
    kind = "measured by 'fcp profile'" if found.origin == "measured" else "fitted to a training"
    return found, f"{kind} {_age(found)}, kept in {key.path}"


def under_kept_times(profile: CostProfile, kept: CostProfile) -> CostProfile:
    """Return a computed profile with the kept times of micro-batches; memory and step terms are the job's own."""
    found = replace(
        profile,
        origin=kept.origin,
        coefficients=kept.coefficients,
        bandwidth=kept.bandwidth,
        common_ground=kept.common_ground,
        heads=kept.heads,
        attention_kernels=kept.attention_kernels,
        measurement=kept.measurement,
    )
    return replace(found, text=dump_cost_profile(found))


def _kept_elsewhere(key: KeptKey) -> str:
    """Name kept profiles of this model on other hardware, or of another model here, which are not used."""
    names = sorted(path.stem for path in key.path.parent.glob("*.yaml"))
    of_model = [name for name in names if name.startswith(key.model[:16]) and not name.endswith(key.hardware)]
    if of_model:
        return f"; the kept profile of this model is of other hardware ({of_model[0].split('-', 2)[2]})"
    here = [name for name in names if name.endswith(key.hardware)]
    return "; the profiles kept of this hardware are of other models or settings" if here else ""


def _age(profile: CostProfile) -> str:
    try:
        at = datetime.fromisoformat(str(profile.measurement.get("date")))
        days = (datetime.now(timezone.utc) - at).days
    except (TypeError, ValueError):
        return "at an unknown date"
    return "today" if days < 1 else f"{counted(days, 'day')} ago"


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _FOLDER


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
