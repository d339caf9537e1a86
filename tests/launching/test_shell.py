"""Quoting, through a real shell."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.launching.job import shell

# What an argument of a process can hold: anything but NUL.
WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=6)


def test_a_variable_is_replaced_on_the_machine_that_runs_the_command() -> None:
    words = ["--node-rank=" + shell.variable("K"), shell.variable("DIR") + "/my logs", "$K", ""]
    assert shell.join(words) == """--node-rank="$K" "$DIR"'/my logs' '$K' ''"""


@pytest.mark.processes
@given(words=WORDS)
@settings(max_examples=40)
def test_every_word_goes_through_a_shell_unchanged(words: list[str]) -> None:
    printed = subprocess.run(["bash", "-c", shell.join(["printf", r"%s\0", *words])], capture_output=True, check=True)
    assert printed.stdout.decode().split("\0")[:-1] == words


def test_kubernetes_sees_variables_as_its_own_and_leaves_dollar_signs_alone() -> None:
    assert shell.kubernetes_word("--rank=" + shell.variable("RANK")) == "--rank=$(RANK)"
    assert shell.kubernetes_word("$(HOME) costs $5") == "$$(HOME) costs $$5"
