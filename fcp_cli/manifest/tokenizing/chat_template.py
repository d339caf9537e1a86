"""Renders the chat templates of checkpoints, which are foreign code, in a sandbox with work limits.

The result equals that of transformers' `apply_chat_template`, which is sandboxed but unlimited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import Template

# Field names of a turn's reasoning; templates read the first, or the name that their model uses.
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    turns: Sequence[Mapping[str, Any]],
    *,
    tools: Any,
    prompts: bool,
    special_tokens: Mapping[str, Any],
) -> str:
    """Render a conversation as text.

    Args:
        template: the checkpoint's chat template.
        turns: the turns, each with `role` and `content`.
        tools: JSON schemas of tool functions, or None.
        prompts: whether to append the generation prompt.
        special_tokens: special tokens by template variable.
    """
    from fcp_cli.reading.sandbox import rendered

    values = {
        **special_tokens,
        "messages": [_with_thoughts(turn) for turn in turns],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": prompts,
    }
    return rendered(_compiled(template), values)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    from fcp_cli.reading.sandbox import Sandbox

    return Sandbox().compiled(template)


def _with_thoughts(turn: Mapping[str, Any]) -> dict[str, Any]:
    present = {name: value for name, value in turn.items() if value is not None}
    thoughts = next((present[name] for name in _THOUGHTS if name in present), None)
    return present if thoughts is None else {"thinking": thoughts, **present, "reasoning_content": thoughts}
