"""Images and videos of a script's collator become parts of their row; what would be trained otherwise is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data import one_row
from fcp_cli.integrations.hugging_face.losses import own_batches, weights_of
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.plans import Row, make_step

pytest.importorskip("transformers")
pytest.importorskip("datasets", reason="the examples read data by datasets")

from tests.runtime.vision_families import FAMILIES
from tests.runtime.workers.vision_trainer_worker import collate

pytestmark = [pytest.mark.torch, pytest.mark.hf]

TEXT, PICTURES = 0, 4
MODELS = FAMILIES["qwen3_vl"]


def batch(row: int = PICTURES, **changes: Any) -> dict[str, Any]:
    return {**collate([MODELS.inputs_of(row)], family="qwen3_vl"), **changes}


def read(given: Mapping[str, Any]) -> Any:
    return one_row(given, 7, config=MODELS.config())


def positions(given: Mapping[str, Any]) -> torch.Tensor:
    """Those of the model, as frameworks add them."""
    grids = {name: given.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    found: torch.Tensor = MODELS.model().model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], **grids)[
        0
    ]
    return found


def padded(given: Mapping[str, Any]) -> dict[str, Any]:
    """With a token of padding on the left."""
    found = dict(given)
    for name, value in (("input_ids", 0), ("labels", -100), ("attention_mask", 0), ("mm_token_type_ids", 0)):
        found[name] = torch.nn.functional.pad(given[name], (1, 0), value=value)
    return found


def test_pictures_become_parts_whose_tokens_lie_between_the_padding() -> None:
    plain, found = read(batch()), read(padded(batch()))
    assert isinstance(found, VisualSequence) and plain.parts
    assert [part.start_token for part in found.parts] == [part.start_token for part in plain.parts]
    assert np.array_equal(found.tokens, MODELS.inputs_of(PICTURES).input_ids)


def test_the_models_own_positions_may_come_with_a_row_and_those_of_text_before_them() -> None:
    given = batch()
    own = positions(given)
    text = torch.arange(own.shape[-1]).expand(1, 1, -1)
    for one in (own, torch.cat((text, own))):
        assert isinstance(read({**given, "position_ids": one}), VisualSequence)
    text_alone = batch(TEXT)
    axes = torch.arange(text_alone["input_ids"].shape[1]).expand(3, 1, -1)
    assert isinstance(read({**text_alone, "position_ids": axes}), tuple)


def test_arguments_that_a_family_does_not_take_are_ignored_as_by_the_model_or_refused() -> None:
    assert isinstance(read({**batch(), "second_per_grid_ts": [1.0]}), VisualSequence)
    assert isinstance(read({**batch(), "rope_deltas": torch.ones(1, 1)}), VisualSequence)
    assert isinstance(read({**batch(TEXT), "rope_deltas": torch.ones(1, 1)}), tuple)
    tiles = collate([FAMILIES["internvl"].inputs_of(1)], family="internvl")
    with pytest.raises(RunError, match="gives image_grid_thw besides the tokens of row 7"):
        one_row({**tiles, "image_grid_thw": torch.tensor([[1, 2, 2]])}, 7, config=FAMILIES["internvl"].config())


def test_images_of_gemma4_see_each_other_in_windows_if_the_batch_has_token_types_as_in_transformers() -> None:
    gemma4 = FAMILIES["gemma4"]
    given = collate([gemma4.inputs_of(PICTURES)], family="gemma4")
    found = one_row(given, 7, config=gemma4.config())
    assert isinstance(found, VisualSequence) and found.mask == gemma4.sequence(gemma4.inputs_of(PICTURES), None).mask
    assert found.mask.windows_only and not found.mask.is_causal
    del given["mm_token_type_ids"]
    without = one_row(given, 7, config=gemma4.config())
    assert isinstance(without, VisualSequence) and without.mask.is_causal


def test_a_blank_picture_among_the_padding_of_text_is_dropped() -> None:
    blank = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    tokens, _ = read({**batch(TEXT), **blank})
    assert np.array_equal(tokens, MODELS.inputs_of(TEXT).input_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            lambda given: {"position_ids": positions(given) + 1},
            "the position_ids of row 7 of the training data are not those",
        ),
        (
            lambda given: {"mm_token_type_ids": given["mm_token_type_ids"].roll(1)},
            "the mm_token_type_ids of row 7 of the training data mark other tokens",
        ),
        (lambda given: {"image_grid_thw": None}, "row 7 of the training data: a sequence has .* image placeholders"),
        (lambda given: {"pixel_values": None}, "row 7 of the training data: a sequence has images but no pixel_values"),
        (lambda given: {"image_sizes": torch.ones(1)}, "gives image_sizes besides the tokens of row 7"),
    ],
)
def test_a_row_that_would_be_trained_otherwise_is_refused(changes: Any, message: str) -> None:
    given = batch()
    with pytest.raises(RunError, match=message):
        read({**given, **changes(given)})


def test_tokens_weigh_what_they_do_in_the_scripts_own_batches() -> None:
    learned = [4, 0, 1, 3, 5]
    batches = [learned[:2], learned[2:4], learned[4:]]
    found = weights_of(learned, 2)
    expected = [5 / 3 / sum(own) for own in batches for _ in own]
    assert found == pytest.approx(expected)


def test_batches_are_in_the_datas_order_or_at_random_as_the_plan_is() -> None:
    planned = make_step([Row((0,), (3, 1)), Row((1,), (2, 2, 5))], step=1, first_sequence=10)
    step = replace(planned, sequences=planned.sequences[::-1])  # as packs have them, of any rows
    assert own_batches(step, None).tolist() == [10, 11, 12, 13, 14]
    shuffled = own_batches(step, 3)
    assert sorted(shuffled.tolist()) == [10, 11, 12, 13, 14] != shuffled.tolist()
    assert np.array_equal(shuffled, own_batches(planned, 3))
    others = [own_batches(replace(step, step=number), 3).tolist() for number in range(2, 6)]
    assert any(other != shuffled.tolist() for other in others)
