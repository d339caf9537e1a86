from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.launching.environment import job_variables, set_by_fcp
from fcp_cli.launching.job import Variable, argument
from tests.launching.jobs import job, plan_metadata


def variables(stack: str = "npu", given: dict[str, str] | None = None, **changed: Any) -> dict[str, Variable]:
    found = job_variables(job(stack, **changed), given or {}, interface="eth0")
    return {variable.name: variable for variable in found}


def test_ranks_on_one_cpu_share_its_cores() -> None:
    found = variables("cpu", num_nodes=1, processes_per_node=4)
    assert set_by_fcp(list(found.values())) == {"OMP_NUM_THREADS": "2"}
    assert found["OMP_NUM_THREADS"].source == "8 cores over 4 ranks"


@pytest.mark.parametrize(
    ("stack", "names"),
    [
        ("cpu", {"GLOO_SOCKET_IFNAME"}),
        ("cuda", {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}),
        ("npu", {"GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
    ],
)
def test_several_nodes_talk_over_the_interface_that_leads_to_node_0(stack: str, names: set[str]) -> None:
    found = variables(stack)
    assert {name for name in found if name.endswith("IFNAME")} == names
    # To NCCL a bare name is the beginning of names: eth0 would also mean eth01.
    assert {name: found[name].value for name in names} == {
        name: "=eth0" if name == "NCCL_SOCKET_IFNAME" else "eth0" for name in names
    }
    assert {found[name].source for name in names} == {"this machine's route to 10.0.0.1"}
    assert not {name for name in variables(stack, num_nodes=1) if name.endswith("IFNAME")}


def test_a_machine_that_prints_commands_for_others_names_no_interface_of_its_own() -> None:
    found = job_variables(job("npu", node_rank=None), {})
    assert "HCCL_SOCKET_IFNAME" not in set_by_fcp(found)
    (hccl,) = (variable for variable in found if variable.name == "HCCL_SOCKET_IFNAME")
    assert (hccl.value, hccl.source) == ("", "each node's own route to 10.0.0.1")


@pytest.mark.parametrize("stack", ["cuda", "npu"])
def test_only_megatrons_own_parallelism_gets_one_hardware_queue(stack: str) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    tensor = variables(stack, metadata=plan_metadata(tensor_parallel=2, ranks_per_node=4))[name]
    assert (tensor.value, tensor.reason, tensor.source) == snapshot(
        ("1", "tensor parallelism overlaps in the order of launch", "the plan's tensor parallel ranks")
    )
    static = job_variables(job(stack, program=("train.py",), arguments=("--context-parallel-size", "2")), {})
    assert [(v.value, v.source) for v in static if v.name == name] == [("1", "the script's --context-parallel-size")]
    for sync in ("iteration", "microbatch"):
        assert name not in variables(stack, metadata=plan_metadata(sync=sync, pipeline_parallel=2, ranks_per_node=4))
        assert name not in variables(stack, metadata=plan_metadata(sync=sync))


def test_messages_of_several_nodes_get_the_channels_that_nvlink_needs() -> None:
    """NCCL's own number is that of its network, and all-to-alls of experts would open as many to all their peers."""
    name = "NCCL_NCHANNELS_PER_NET_PEER"

    def of(cluster: str, model: str = "qwen3-8b", **changed: Any) -> Variable | None:
        profile = json.dumps({"model": model, "cluster": cluster})
        return variables("cuda", metadata=plan_metadata(cost_profile=profile), **changed).get(name)

    found = of("h100-8x8")
    assert found is not None
    assert (found.value, found.reason, found.source) == snapshot(
        (
            "8",
            "channels of a message; in nodes, too, NCCL would use as few as its network needs, 1 to 4",
            "NVLink of h100-8x8, 8 of 15 channels that fill it",
        )
    )
    given = of("h100-8x8", given={name: "4"})
    assert given is not None and (given.value, given.is_given) == ("4", True)
    assert of("h100-8x8", num_nodes=1) is None
    assert of("h100-8x8", model="qwen3-30b-a3b") is None, "experts"
    assert of("h100-8x8", model="unknown") is None
    for without in ("rtx-pro-6000-1x8", "mi300x-8x8", "this-machine", "unknown"):
        assert of(without) is None, without


def test_hccl_buffers_hold_one_hop_of_the_plans_rings() -> None:
    found = variables(metadata=plan_metadata(tokens_per_rank=16_384))["HCCL_BUFFSIZE"]
    assert found.value == "64"  # keys and values: 2 x 8 heads x 128 x 2 bytes x 16,384 tokens
    assert found.source == snapshot("a ring's hop of 64 MB at 16,384 tokens per rank; 256 MB per device in all")
    assert found.reason == snapshot("MB of a buffer; each of the plan's 2 communicators has 2")


def test_hccl_buffers_never_take_more_than_a_twentieth_of_the_memory() -> None:
    text = plan_metadata().cost_profile.replace("capacity_bytes: 58880000000.0", "capacity_bytes: 4294967296")
    assert variables(metadata=plan_metadata(cost_profile=text, tokens_per_rank=16_384))["HCCL_BUFFSIZE"].value == "51"


def test_without_a_known_model_hccl_buffers_stay_at_their_default() -> None:
    found = variables(metadata=plan_metadata(model=""))["HCCL_BUFFSIZE"]
    assert found.value == "200"
    assert found.source.startswith("HCCL's own default: the model's keys and values are not known")


def test_hccl_ports_keep_clear_of_the_master_port() -> None:
    assert variables()["HCCL_IF_BASE_PORT"].value == "25809"
    assert variables(master_port=25_820)["HCCL_IF_BASE_PORT"].value == "25825"


def test_what_the_user_exported_wins_and_is_left_alone() -> None:
    given = {"HCCL_CONNECT_TIMEOUT": "7200", "TASK_QUEUE_ENABLE": "2", "OTHER": "x"}
    found = variables(given=given)
    assert found["HCCL_CONNECT_TIMEOUT"].value == "7200"
    assert found["HCCL_CONNECT_TIMEOUT"].source == "your environment; fcp would set 1200"
    assert found["TASK_QUEUE_ENABLE"].source == "your environment"
    assert not set_by_fcp(list(found.values())).keys() & given.keys()


def test_what_was_exported_for_the_stack_s_library_travels_and_nothing_else() -> None:
    given = {"NCCL_IB_HCA": "mlx5", "TORCH_NCCL_BLOCKING_WAIT": "1", "HCCL_ALGO": "x", "HOME": "/", "NCCL_COMM_ID": "a"}
    expected = {"cpu": set(), "cuda": {"NCCL_IB_HCA", "TORCH_NCCL_BLOCKING_WAIT"}, "npu": {"HCCL_ALGO"}}
    for stack, names in expected.items():
        found = variables(stack, given)
        assert names == {name for name in given if name in found}
        assert all(found[name].value == given[name] for name in names)
        assert not names & set(set_by_fcp(list(found.values())))


def test_each_variable_says_why_and_from_where() -> None:
    for stack in ("cpu", "cuda", "npu"):
        for variable in variables(stack).values():
            assert variable.reason, variable.name
            assert variable.source, variable.name


def test_a_scripts_arguments_are_read_in_both_spellings() -> None:
    words = ("--cp", "2", "--seq-length=4096", "--cp", "4", "--flag")
    assert argument(words, "--cp") == "4"
    assert argument(words, "--seq-length") == "4096"
    assert argument(words, "--flag") == ""
    assert argument(words, "--none") is None


def test_a_hang_leaves_its_traces_in_the_run_directory() -> None:
    found = variables("cuda", run_dir=Path("/shared/runs/a"))
    assert {name: found[name].value for name in found if "NCCL_DEBUG" in name or name.startswith("TORCH_NCCL")} == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/shared/runs/a/logs/flight-recorder-",
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": "/shared/runs/a/logs/nccl-%h-%p.log",
    }
    assert not {name for name in variables("npu") if "NCCL" in name}


def test_whoever_asks_nccl_to_talk_sees_it_where_it_would_be_by_itself() -> None:
    found = variables("cuda", {"NCCL_DEBUG": "INFO"}, run_dir=Path("/shared/runs/a"))
    assert (found["NCCL_DEBUG"].value, "NCCL_DEBUG_FILE" in found) == ("INFO", False)
    given = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/mine"}
    assert variables("cuda", given, run_dir=Path("/shared/runs/a"))["NCCL_DEBUG_FILE"].value == "/tmp/mine"


def test_a_rank_timeout_reaches_the_ranks_of_every_stack() -> None:
    for stack in ("cpu", "cuda", "npu"):
        assert variables(stack, rank_timeout_seconds=90)["FCP_RANK_TIMEOUT"].value == "90"
        assert "FCP_RANK_TIMEOUT" not in variables(stack)


def test_the_time_to_join_reaches_the_ranks_of_several_nodes_under_torchrun() -> None:
    assert variables("cpu", join_timeout_seconds=90)["FCP_JOIN_TIMEOUT"].value == "90"
    without = ({"num_nodes": 1}, {"launcher": "msrun"}, {"join_timeout_seconds": None})
    for changed in without:
        job_changes: dict[str, Any] = {"join_timeout_seconds": 90, **changed}
        assert "FCP_JOIN_TIMEOUT" not in variables("cpu", **job_changes)


def test_an_attention_kernel_that_was_asked_for_reaches_the_ranks() -> None:
    assert variables("cuda", attention_kernel="cudnn")["FCP_ATTENTION_KERNEL"].value == "cudnn"
    assert "FCP_ATTENTION_KERNEL" not in variables("cuda")
