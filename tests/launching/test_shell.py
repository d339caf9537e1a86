"""Quoting, through a real shell."""

from __future__ import annotations

from fcp_cli.launching import job


def test_a_variable_is_replaced_on_the_machine_that_runs_the_command() -> None:
    words = ["--node-rank=" + job.variable("K"), job.variable("DIR") + "/my logs", "$K", ""]
    assert job.join(words) == """--node-rank="$K" "$DIR"'/my logs' '$K' ''"""


def test_kubernetes_sees_variables_as_its_own_and_leaves_dollar_signs_alone() -> None:
    assert job.kubernetes_word("--rank=" + job.variable("RANK")) == "--rank=$(RANK)"
    assert job.kubernetes_word("$(HOME) costs $5") == "$$(HOME) costs $$5"
