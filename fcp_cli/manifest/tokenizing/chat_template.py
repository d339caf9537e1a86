"""Renders the chat templates of checkpoints: programs of others, so in a sandbox with limits.

As `apply_chat_template` of transformers renders them, which has the sandbox and no limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import Template

# Names of a turn's thoughts in data; templates read the first, or that of the model that they are from.
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    turns: Sequence[Mapping[str, Any]],
    *,
    tools: Any,
    prompts: bool,
    special_tokens: Mapping[str, Any],
) -> str:
    """Return a conversation as a text.

    Args:
        template: the template of the checkpoint.
        turns: the turns, each with `role` and `content`.
        tools: JSON schemas of functions, or None.
        prompts: end with the generation prompt of the assistant's turn.
        special_tokens: the special tokens, by the names under which templates know them.
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
