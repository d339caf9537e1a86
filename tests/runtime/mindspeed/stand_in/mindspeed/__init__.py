"""A small stand-in for MindSpeed: its names and signatures where fcp meets them, and an attention that is plain.

Its ring takes everything that makes it a ring from what Megatron and MindSpeed are asked in the call, as the real one
does, so that a hook that is missing or wrong shows in numbers. Whatever Megatron is there is taken for that of
MindSpeed's line.
"""

import importlib.util
import sys
from pathlib import Path


def _pretend_megatron_version(version: str) -> None:
    spec = importlib.util.find_spec("megatron")  # imports nothing
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "core" / "package_info.py"
    spec = importlib.util.spec_from_file_location("megatron.core.package_info", file)
    assert spec is not None and spec.loader is not None
    info = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(info)
    info.__dict__["__version__"] = version
    sys.modules[spec.name] = info


_pretend_megatron_version("0.12.1")
