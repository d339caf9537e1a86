"""Every preflight check by its message, and the sound launch that passes them all."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.profile import Memory, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.launching.checks import CHECKS, check_launch
from fcp_cli.launching.environment import job_variables, set_by_fcp
from fcp_cli.launching.job import Job
from fcp_cli.models.cluster import shipped_profile
from fcp_cli.plan.setup import Pipeline
from fcp_cli.training.settings import TrainSettings
from fcp_cli.util import network
from fcp_cli.util.machine import Facts
from tests.launching.jobs import MACHINES, job, plan_metadata


def facts_of(stack: str, **changed: Any) -> Facts:
    """A node on which nothing is wrong; `variables` are the user's."""
    machine = MACHINES[stack]
    given: dict[str, str] = changed.pop("variables", {})
    own = set_by_fcp(job_variables(job(stack), given, interface="eth0"))
    values: dict[str, Any] = {
        "python": "/venv/bin/python3",
        "host": "node-a",
        "packages": {"torch": "2.7.1", "torch-npu": "2.7.1.post2" if stack == "npu" else None, "transformers": "5.3.0"},
        "programs": {"python3": "/venv/bin/python3", "msrun": "/venv/bin/msrun"},
        "machine": machine,
        "device_memory_bytes": 0 if stack == "cpu" else 64 << 30,
        "cann_home": "/usr/local/Ascend/cann",
        "has_hccl": True,
        "interfaces": ("lo", "eth0", "eth1"),
        "open_files": 65_536,
        "variables": {**own, **given},
        "master_addresses": ("10.0.0.1",),
        "master_is_here": True,
    }
    return Facts(**{**values, **changed})


def found(stack: str, *, of: dict[str, Any] | None = None, **facts: Any) -> list[str]:
    """`severity: message` of everything that is wrong; `of` changes the job, the rest the facts."""
    findings = check_launch(job(stack, **(of or {})), facts_of(stack, **facts))
    return [f"{finding.severity}: {finding.message}" for finding in findings]


# A plan whose model is smaller than the shared memory of a CPU node's eight ranks.
HERE = shipped_profile("qwen3-tiny").text.replace("cluster: example-8x8", "cluster: this-machine")
SMALL = {"metadata": plan_metadata(model="qwen3-tiny", cost_profile=HERE)}
# Two stages of two blocks of layers each; what Megatron counts as a layer more.
INTERLEAVED: dict[str, Any] = {
    "sync": "microbatch",
    "pipeline_parallel": 2,
    "pipeline": Pipeline(forward_share=0.25, virtual_stages=2),
}
COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


@pytest.mark.parametrize("stack", ["cpu", "cuda", "npu"])
def test_a_sound_launch_passes_every_check(stack: str) -> None:
    assert found(stack, of=SMALL if stack == "cpu" else {}) == []


@pytest.mark.lengthy
def test_each_check_finds_something_in_some_test_below() -> None:
    """A new check without a case here would never be seen to work."""
    broken = {
        check.__name__
        for stack, of, facts in CASES.values()
        for check in CHECKS
        if list(check(job(stack, **of), facts_of(stack, **facts)))
    }
    assert broken | {"host_copies", "recipe_arguments"} == {check.__name__ for check in CHECKS}  # those elsewhere


# Profiles that say of no recipe what their memory is: a state of 18.4 GB, and 9.9 MB for each token.
_MEMORY = Memory(bytes_per_token=9_936_548.0, model_state_bytes=18_429_154_560.0, capacity_bytes=58.88e9)
_UNSAID = replace(shipped_profile("qwen3-8b"), memory=_MEMORY, recipe=None, sync=None)
COMPUTED = dump_cost_profile(_UNSAID)
MEASURED = dump_cost_profile(replace(_UNSAID, origin="measured"))
_H100 = shipped_profile("qwen3-8b").text.replace("cluster: example-8x8", "cluster: h100-8x8")
# What is wrong -> the stack, and what it changes of the job and of the facts about this node.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "node 0's address is loopback": ("cuda", {"master_addr": "localhost", "node_rank": None}, {}),
    "less time than the longest step takes": ("cuda", {"grace_seconds": 20}, {}),
    "Slurm's signal comes too late": ("cuda", {"values": {"sbatch_options": ["--signal=B:TERM@120"]}}, {}),
    "node 0's name resolves to loopback": ("cuda", {"master_addr": "node-a"}, {"master_addresses": ("127.0.1.1",)}),
    "node 0's name is unknown": ("cuda", {"master_addr": "nowhere"}, {"master_addresses": (), "master_is_here": False}),
    "node 0 has another address": ("cuda", {}, {"master_is_here": False}),
    "another node has node 0's address": ("cuda", {"node_rank": 1}, {}),
    "the port is in use": ("cuda", {}, {"port_problem": "in use by another process"}),
    "the port is one of HCCL's": ("npu", {}, {"variables": {"HCCL_IF_BASE_PORT": "29490"}}),
    "an interface that this node lacks": ("npu", {}, {"variables": {"HCCL_SOCKET_IFNAME": "bond0"}}),
    "a profile of accelerators on CPU cores": ("cpu", {"metadata": plan_metadata(model="qwen3-tiny")}, {}),
    "a recipe of accelerators on CPU cores": (
        "cpu",
        {
            "metadata": plan_metadata(model="qwen3-tiny", recipe=Recipe(zero_stage=2, precision="bf16")),
            "settings": TrainSettings(plan=Path("plan.parquet"), model="qwen3-tiny", run_dir=Path("run")),
        },
        {},
    ),
    "a profile of other accelerators": (
        "cuda",
        {"metadata": plan_metadata(cost_profile=_H100)},
        {"device_names": ("NVIDIA H200",)},
    ),
    "the loopback interface": ("cpu", SMALL, {"variables": {"GLOO_SOCKET_IFNAME": "lo"}}),
    "nodes that Slurm gave": ("cuda", {}, {"variables": {"SLURM_NNODES": "4"}}),
    "fewer ranks on a node than the plan counts": ("cuda", {"num_nodes": 4, "processes_per_node": 4}, {}),
    "the profile of another model": ("cuda", {"model": "qwen3-4b"}, {}),
    "more tokens than a device holds, measured": (
        "cuda",
        {"metadata": plan_metadata(tokens_per_rank=16_384, cost_profile=MEASURED), "model": "qwen3-8b"},
        {},
    ),
    "more tokens than a device holds under the plan's recipe": (
        "cuda",
        {"program": ("train.py",), "metadata": plan_metadata(tokens_per_rank=100_000, recipe=Recipe(zero_stage=2))},
        {},
    ),
    "more tokens than a device holds in a script": (
        "cuda",
        {"program": ("train.py",), "metadata": plan_metadata(tokens_per_rank=16_384, cost_profile=MEASURED)},
        {},
    ),
    "a device smaller than the model": (
        "cuda",
        {"metadata": plan_metadata(cost_profile=COMPUTED), "model": "qwen3-8b"},
        {"device_memory_bytes": 8_000_000_000},
    ),
    "node 0 is out of reach": (
        "cpu",
        {**SMALL, "node_rank": 1},
        {"way_problem": "no route to host", "master_is_here": False},
    ),
    "HCCL's buffers fill the device": ("npu", {}, {"variables": {"HCCL_BUFFSIZE": "4000"}}),
    "a communicator for each group": (
        "npu",
        {"program": ("train.py",), "metadata": plan_metadata(tokens_per_rank=4000, distinct_groups=200)},
        {},
    ),
    "few open files": ("cuda", {}, {"open_files": 256}),
    "a short time to connect": ("npu", {}, {"variables": {"HCCL_CONNECT_TIMEOUT": "120"}}),
    "a time to connect longer than a hang": ("npu", {}, {"variables": {"HCCL_EXEC_TIMEOUT": "600"}}),
    "a script of other tensor parallel ranks": (
        "cuda",
        {
            "program": ("train.py",),
            "arguments": ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=1"),
        },
        {},
    ),
    "a Megatron script with settings of its own": (
        "cuda",
        {
            "metadata": plan_metadata(steps=20),
            "program": ("pretrain_gpt.py",),
            "arguments": (
                *("--global-batch-size", "96", "--train-iters=5000", "--context-parallel-size", "2"),
                *("--rampup-batch-size", "8", "8", "100", "--dataloader-type", "cyclic", "--attention-dropout", "0.1"),
            ),
        },
        {},
    ),
    "a Megatron script that lacks two options": (
        "cuda",
        {"program": ("pretrain_gpt.py",), "arguments": ("--context-parallel-size", "1")},
        {},
    ),
    "options that are Megatron's in a script of another name": (
        "cuda",
        {"program": ("train.py",), "arguments": ("--global-batch-size", "96", "--context-parallel-size", "2")},
        {},
    ),
    "options that are MindSpeed's in a script of another name": (
        "npu",
        {"program": ("train.py",), "arguments": ("--micro-batch-size", "1", "--context-parallel-size", "2")},
        {},
    ),
    "a script of other virtual stages": (
        "cuda",
        {
            "metadata": plan_metadata(num_ranks=8, **INTERLEAVED),
            "program": ("train.py",),
            "arguments": ("--num-virtual-stages-per-pipeline-rank", "4"),
        },
        {},
    ),
    "a script whose layers make other virtual stages": (
        "cuda",
        {
            "metadata": plan_metadata(num_ranks=8, **INTERLEAVED),
            "program": ("train.py",),
            "arguments": ("--num-layers=30", "--num-layers-per-virtual-pipeline-stage", "4", *COUNTED),
        },
        {},
    ),
    "stages that share a node": (
        "cuda",
        {"metadata": plan_metadata(num_ranks=8, ranks_per_node=4, pipeline_parallel=2, sync="microbatch")},
        {},
    ),
    "stages of a mapping that spreads pipelines": (
        "cuda",
        {
            "metadata": plan_metadata(num_ranks=8, pipeline_parallel=2, sync="microbatch"),
            "program": ("train.py",),
            "arguments": ("--use-tp-pp-dp-mapping",),
        },
        {},
    ),
    "fewer visible devices than processes": ("npu", {}, {"variables": {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}}),
    "torch_npu is not loaded": ("npu", {}, {"variables": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}),
    "CANN was not sourced": ("npu", {}, {"cann_home": None}),
    "CANN lacks HCCL": ("npu", {}, {"has_hccl": False}),
    "torch_npu of another torch": ("npu", {}, {"packages": {"torch": "2.13.0+cpu", "torch-npu": "2.7.1"}}),
    "no torch_npu": ("npu", {}, {"packages": {"torch": "2.7.1", "torch-npu": None}}),
    "an old torch": ("cuda", {}, {"packages": {"torch": "2.6.0"}}),
    "old transformers": ("cuda", {}, {"packages": {"torch": "2.7.1", "transformers": "4.9.1"}}),
    "msrun would run another Python": (
        "npu",
        {"launcher": "msrun"},
        {"programs": {"python3": "/usr/bin/python3", "msrun": "/venv/bin/msrun"}},
    ),
    "no msrun": ("npu", {"launcher": "msrun"}, {"programs": {"python3": "/venv/bin/python3"}}),
    "Ulysses of MindSpeed": (
        "npu",
        {"program": ("train.py",), "arguments": ("--context-parallel-algo", "ulysses_cp_algo")},
        {},
    ),
}
FINDINGS = snapshot(
    {
        "node 0's address is loopback": "error: --master-addr localhost is another machine on each of 2 nodes; give node 0's address",
        "less time than the longest step takes": "warning: --grace 20 is less than the 58 s that the plan's longest step, a checkpoint and the job's end may take: a stop would lose the steps since the last checkpoint; leave it out",
        "Slurm's signal comes too late": "warning: --sbatch-option=--signal=B:TERM@120 is less than the 220 s that the plan's longest step, a checkpoint and the job's end may take: a stop would lose the steps since the last checkpoint; leave it out",
        "node 0's name resolves to loopback": "error: --master-addr node-a is 127.0.1.1 on node-a, which is another machine on each of 2 nodes; give node 0's address on the network between nodes",
        "node 0's name is unknown": "error: --master-addr nowhere is unknown on node-a; give an IP address, or a name that every node can resolve",
        "node 0 has another address": "warning: --master-addr 10.0.0.1 is no address of node-a, but --node-rank 0 makes this node 0; give this machine's address, or the right --node-rank",
        "another node has node 0's address": "warning: --master-addr 10.0.0.1 is this machine, node-a, but --node-rank is 1; only node 0 has that address",
        "the port is in use": "error: --master-port 29500 of node-a is in use by another process; give all nodes another one, or find who has it with: ss -ltnp 'sport = :29500'",
        "the port is one of HCCL's": "error: --master-port 29500 is one of HCCL's own: HCCL_IF_BASE_PORT=29490 takes 16 ports; give a --master-port outside 29490 to 29505",
        "an interface that this node lacks": (
            "error: HCCL_SOCKET_IFNAME=bond0 is no interface of node-a, which has lo, eth0, eth1; export one of them\n"
            "warning: the nodes talk over different interfaces (GLOO_SOCKET_IFNAME=eth0, HCCL_SOCKET_IFNAME=bond0, TP_SOCKET_IFNAME=eth0); export the same one in all of them"
        ),
        "a profile of accelerators on CPU cores": "warning: plan.parquet has the times of example-8x8, but its ranks run on CPU cores here: they will take others; plan with a profile of this machine from 'fcp profile'",
        "a recipe of accelerators on CPU cores": "warning: plan.parquet has the times of example-8x8, but its ranks run on CPU cores here: they will take others, and train as ZeRO-0, fp32, chunked loss, not as ZeRO-2, bf16, chunked loss; plan with a profile of this machine from 'fcp profile'",
        "a profile of other accelerators": "warning: plan.parquet has the times of h100-8x8, but its ranks run on NVIDIA H200 here: they will take others; plan with a profile of this machine from 'fcp profile'",
        "the loopback interface": "error: GLOO_SOCKET_IFNAME=lo is the loopback interface, which reaches no other node; export another of lo, eth0, eth1",
        "nodes that Slurm gave": "warning: Slurm allocated 4 nodes, but the job runs on 2; give --nodes 4, or submit with --nodes=2",
        "fewer ranks on a node than the plan counts": "warning: plan.parquet counts 8 ranks per node, but 4 run on each of 4: its rings would cross nodes unseen; plan with --ranks-per-node 4",
        "the profile of another model": "warning: plan.parquet was made with the cost profile of qwen3-8b, not of qwen3-4b: its times and token budget are another model's; plan again with: fcp plan lengths.parquet --model qwen3-4b --cluster example-8x8 --ranks 16 --ranks-per-node 8 --global-batch-size 8 --no-shuffle --solver test -o plan-2.parquet",
        "more tokens than a device holds, measured": "error: plan.parquet lets a rank hold 16,384 tokens, 181.2 GB with the model, but a device here has 68.7 GB; plan with --tokens-per-rank 4507",
        "more tokens than a device holds under the plan's recipe": "warning: plan.parquet lets a rank hold 100,000 tokens, for which qwen3-8b needs 844.8 GB under ZeRO-2, bf16, chunked loss, but a device has 68.7 GB; plan for it with: fcp plan lengths.parquet --ranks 16 --ranks-per-node 8 --tokens-per-rank 100000 --global-batch-size 8 --no-shuffle --solver test --zero 3 --precision bf16 --recompute full --offload activations --shard-ranks 8 --model qwen3-8b --cluster example-8x8 --sync microbatch -o plan-2.parquet",
        "more tokens than a device holds in a script": "warning: plan.parquet lets a rank hold 16,384 tokens, 181.2 GB with qwen3-8b, the plan's model, but a device here has 68.7 GB; plan with --tokens-per-rank 4507",
        "a device smaller than the model": "warning: plan.parquet lets a rank hold 4,000 tokens, 58.2 GB with the model, but a device here has 8.0 GB; the model alone is larger, so choose a smaller one",
        "node 0 is out of reach": "error: --master-addr 10.0.0.1 cannot be reached from node-a: no route to host; give node 0's address on the network between nodes, and let port 29500 through its firewall",
        "HCCL's buffers fill the device": "warning: HCCL_BUFFSIZE=4000 takes 16.8 GB of each device's 69 GB for 2 communicators; unset it to let fcp choose",
        "a communicator for each group": "warning: plan.parquet has 200 distinct groups: a framework that makes a communicator for each would take up to 13 GB per device; plan with --max-groups, or use fcp_cli.runtime, which makes one for all",
        "few open files": "warning: a process may open 256 files, but a rank of 16 may need 576; raise it with: ulimit -n 576",
        "a short time to connect": "warning: HCCL_CONNECT_TIMEOUT=120 s is short for ranks that load a model first; export at least 300, or unset it",
        "a time to connect longer than a hang": "warning: HCCL_CONNECT_TIMEOUT=1200 is above HCCL_EXEC_TIMEOUT=600: a slow start would be mistaken for a hang; export the second at least as large as the first",
        "a script of other tensor parallel ranks": "error: the script has --tensor-model-parallel-size 2, but plan.parquet was made for 1; plan with --tensor-parallel 2, or launch the script with the plan's",
        "a Megatron script with settings of its own": (
            "error: the script has --global-batch-size 96, but plan.parquet was made for 8; plan with --global-batch-size 96, or launch the script with the plan's\n"
            "error: the script has --train-iters 5000, but plan.parquet ends after 20 steps; plan more with --epochs, or launch the script with --train-iters 20\n"
            "error: --rampup-batch-size changes the global batch, which the plan has made; remove it\n"
            "error: --dataloader-type cyclic draws samples at random, and the plan names them; use single\n"
            "error: the script has --context-parallel-size 2, but the plan makes the groups; use --context-parallel-size 1\n"
            "error: --attention-dropout 0.1 cannot be repeated by a ring; use --attention-dropout 0\n"
            "warning: pretrain_gpt.py stops before its first step under a plan, unless given --calculate-per-token-loss"
        ),
        "a Megatron script that lacks two options": "warning: pretrain_gpt.py stops before its first step under a plan, unless given --calculate-per-token-loss --attention-dropout 0",
        "options that are Megatron's in a script of another name": "",
        "options that are MindSpeed's in a script of another name": "",
        "a script of other virtual stages": "error: the script has --num-virtual-stages-per-pipeline-rank 4, but plan.parquet was made for 2; plan with --virtual-stages 4, or launch the script with the plan's",
        "a script whose layers make other virtual stages": "error: the script has --num-layers-per-virtual-pipeline-stage 4, which makes 4 virtual stages of the 32 layers on 2 stages, but plan.parquet was made for 2; plan with --virtual-stages 4, or launch the script with the plan's",
        "stages that share a node": "warning: plan.parquet counts 4 ranks per node, but 8 run on each of 2: its rings would cross nodes unseen; plan with --ranks-per-node 8",
        "stages of a mapping that spreads pipelines": "warning: plan.parquet counts 8 ranks per node, but 4 run on each of 2: its rings would cross nodes unseen; plan with --ranks-per-node 4",
        "fewer visible devices than processes": "error: ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 shows 4 devices, but 8 processes run on this node; unset it, or plan for 4 ranks per node",
        "torch_npu is not loaded": "warning: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu; unset it, or import torch_npu in the script",
        "CANN was not sourced": "error: ASCEND_HOME_PATH is not set: CANN was not sourced; run: source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        "CANN lacks HCCL": "error: libhccl.so is not found though ASCEND_HOME_PATH is /usr/local/Ascend/cann; run: source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        "torch_npu of another torch": "error: torch_npu 2.7.1 is not made for torch 2.13.0+cpu; run: pip install 'torch_npu==2.13.0.*'",
        "no torch_npu": "error: torch_npu is not installed; run: pip install 'torch-npu>=2.7' 'torch>=2.7'",
        "an old torch": "error: torch 2.6.0 is too old; fcp needs 2.7 or newer: pip install 'torch>=2.7'",
        "old transformers": "error: transformers 4.9.1 is too old for the bundled trainer; run: pip install 'transformers>=5.3'",
        "msrun would run another Python": "error: msrun runs the python3 of PATH, which is /usr/bin/python3, not /venv/bin/python3; run fcp from an environment whose folder has a python3: python3 -m venv makes one",
        "no msrun": "error: msrun is neither next to this Python nor on PATH; it comes with MindSpore: pip install 'mindspore>=2.7' 'numpy<2' 'pyarrow<26'",
        "Ulysses of MindSpeed": "error: --context-parallel-algo ulysses_cp_algo keeps the groups of its start, so no plan can change them; use megatron_cp_algo",
    }
)


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_one_line_with_its_mend(case: str) -> None:
    stack, of, facts = CASES[case]
    assert "\n".join(found(stack, of=of, **facts)) == FINDINGS[case]


def test_errors_come_before_warnings() -> None:
    findings = found("npu", variables={"HCCL_CONNECT_TIMEOUT": "120"}, cann_home=None)
    assert [finding.split(":")[0] for finding in findings] == ["error", "warning"]


def test_a_missing_interface_is_told_when_no_route_gave_one() -> None:
    variables = facts_of("cuda").variables
    facts = facts_of("cuda")
    without = {name: value for name, value in variables.items() if not name.endswith("IFNAME")}
    assert [finding.message for finding in check_launch(job("cuda"), _with(facts, variables=without))] == [
        f"{name} is not set, and no route to 10.0.0.1 shows it; export it on every node"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    ]


def _with(facts: Facts, **changed: Any) -> Facts:
    from dataclasses import replace

    return replace(facts, **changed)


@pytest.mark.parametrize("value", ["eth", "=eth0", "^lo,docker", "eth1,eth0"])
def test_the_spellings_of_nccl_for_interfaces_are_understood(value: str) -> None:
    of = {"num_nodes": 2}
    messages = found("cuda", of=of, variables={"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": value})
    assert messages == []


def test_nccl_may_have_an_interface_of_its_own() -> None:
    variables = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0"}
    assert found("cuda", of={"num_nodes": 2}, variables=variables) == []


def test_a_dry_run_for_other_machines_judges_only_what_holds_on_all_of_them() -> None:
    elsewhere: Job = job("npu", node_rank=None)
    assert check_launch(elsewhere, Facts(variables={"HCCL_CONNECT_TIMEOUT": "1200"})) == []


def test_this_machines_own_addresses_are_recognised() -> None:
    assert network.is_here("127.0.0.1")
    assert not network.is_here("nowhere.invalid")
    assert network.addresses_of("nowhere.invalid") == ()
    assert network.interface_towards("127.0.0.1") is None  # loopback leads to no other node


def test_a_script_of_mindspore_s_needs_no_torch_npu() -> None:
    packages = {"torch": "2.7.1", "torch-npu": None}
    of = {"launcher": "msrun", "needs_torch": False, "program": ("train.py",)}
    assert found("npu", of=of, packages=packages) == []


def test_ports_that_are_free_together_are_found() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        assert network.free_ports(port - 1, count=2) > port
    assert network.free_ports(65_534, count=2) == 65_534  # beyond the last, whoever listens says what is wrong
