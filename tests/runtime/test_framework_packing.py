"""Frameworks' packing under a plan, on stand-ins for the modules that hold it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face import packing
from fcp_cli.integrations.hugging_face.packing import (
    ReplacedPacking,
    replaced_packing,
    unpack_axolotl,
    unpack_swift,
)


def test_axolotl_validates_settings_without_packing_and_without_sums_over_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[dict[str, Any]] = []
    module = ModuleType("axolotl.utils.config")
    module.validate_config = lambda cfg, capabilities=None: seen.append(dict(vars(cfg)))  # type: ignore[attr-defined]
    unpack_axolotl(module)
    module.validate_config(SimpleNamespace(sample_packing=True), capabilities={})
    assert seen == [{"sample_packing": False, "eval_sample_packing": False, "include_tkps": False}]
    line = "fcp: axolotl's sample_packing is off: the plan packs, and batch sizes count sequences\n"
    assert capsys.readouterr().err == line
    module.validate_config(SimpleNamespace(sample_packing=None))
    assert capsys.readouterr().err == ""


def test_the_rows_of_replaced_packing_are_known_to_whoever_prices_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class SftArguments:
        def __init__(self, **given: Any) -> None:
            vars(self).update(given)
            self.__post_init__()

        def __post_init__(self) -> None: ...

    monkeypatch.setattr(packing, "_replaced", [])
    module = ModuleType("swift.arguments.sft_args")
    module.SftArguments = SftArguments  # type: ignore[attr-defined]
    unpack_swift(module)
    module.SftArguments(packing=False, packing_length=None, max_length=512)
    assert replaced_packing() is None
    module.SftArguments(packing=True, packing_length=None, max_length=512)
    assert replaced_packing() == ReplacedPacking("ms-swift's packing", 512)
    module.SftArguments(packing=True, packing_length=None, max_length=None)
    assert replaced_packing() == ReplacedPacking("ms-swift's packing", 0)


def test_packed_rows_are_counted_as_frameworks_pack_them() -> None:
    packing = ReplacedPacking("TRL's packing", 10)
    assert packing.packed_rows(np.array([9, 8, 3, 2, 1, 7])) == 3  # 9+1, 8+2, 7+3
    assert packing.packed_rows(np.array([25, 4])) == 2  # cut to 10
    assert ReplacedPacking("TRL's packing", 0).packed_rows(np.array([6, 5, 1])) == 2  # rows of the longest
    many = np.full(20_000, 5)
    assert packing.packed_rows(many) == pytest.approx(10_000)


def test_an_axolotl_without_the_hooked_function_is_refused() -> None:
    with pytest.raises(RunError, match=r"this axolotl has no axolotl.utils.config.validate_config; version known"):
        unpack_axolotl(ModuleType("axolotl.utils.config"))
