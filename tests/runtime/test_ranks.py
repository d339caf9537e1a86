from __future__ import annotations

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runtime.launcher import is_scheduler, torch_variables

WORKER = {
    "MS_ROLE": "MS_WORKER",
    "MS_NODE_ID": "5",
    "MS_WORKER_NUM": "8",
    "DEVICE_ID": "1",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "RANK_ID": "5",
}


def test_a_worker_of_msrun_is_told_in_torchs_words_who_it_is() -> None:
    assert torch_variables({**WORKER, "RANK": "stale"}) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "8119",
    }
    assert not is_scheduler(WORKER)


def test_a_process_of_torchrun_keeps_its_variables() -> None:
    assert torch_variables({"RANK": "3", "WORLD_SIZE": "4"}) == {}


def test_the_scheduler_of_msrun_is_no_rank() -> None:
    assert is_scheduler({"MS_ROLE": "MS_SCHED", "RANK_ID": "0"})


def test_several_nodes_without_node_rank_are_not_all_rank_0() -> None:
    unnumbered = {name: value for name, value in WORKER.items() if name != "MS_NODE_ID"}
    with pytest.raises(RunError, match=r"without MS_NODE_ID, so its rank is not known; .* msrun needs --node_rank"):
        torch_variables(unnumbered)


def test_a_port_that_is_none_is_named() -> None:
    with pytest.raises(RunError, match="MS_SCHED_PORT is 'tcp', not a port"):
        torch_variables({**WORKER, "MS_SCHED_PORT": "tcp"})
