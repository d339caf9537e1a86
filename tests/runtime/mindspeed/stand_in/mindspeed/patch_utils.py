"""MindSpeed's patch manager: functions are wrapped in their module and wherever they were imported by name."""

import importlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar


class MindSpeedPatchesManager:
    patches: ClassVar[dict[str, list[Callable[..., Any]]]] = {}

    @classmethod
    def register_patch(cls, orig_func_name: str, new_func: Callable[..., Any]) -> None:
        cls.patches.setdefault(orig_func_name, []).append(new_func)

    @classmethod
    def apply_patches(cls) -> None:
        for path, replacements in cls.patches.items():
            home, name = path.rsplit(".", 1)
            original = getattr(importlib.import_module(home), name)
            final = original
            for new in replacements:
                final = new(final) if new.__name__.endswith(("wrapper", "decorator")) else new
            replacements.clear()
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is original:
                    setattr(module, name, final)
