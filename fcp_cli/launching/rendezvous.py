"""Rendezvous of a job's nodes: the handler `fcp` of torchrun (entry point group `torchrun.handlers`).

torchrun's own handlers do not suit a shared network. `c10d`, which `--standalone` implies, unpickles the contents of a
store that any network peer can write to; the stores of both `c10d` and `static` listen on all interfaces; and `static`
lets nodes of another job join. This handler binds its socket before it starts the store: to the loopback interface for
a job on one machine, else to the interface of node 0's address. The ranks connect to the same store, so no second port
is chosen that another process could take first. Nodes compare the identity of their jobs before any rank starts.

Tried with torch 2.13; the interfaces that it uses exist since 2.4.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fcp_cli import __version__
from fcp_cli.errors import RunError
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.runtime.launcher import DIFFERENCE_VARIABLE
from fcp_cli.util.files import write_json_atomically
from fcp_cli.util.inputs import read_object

BACKEND: Final = "fcp"
_JOB: Final = "fcp/job"
_TIMEOUT_SECONDS: Final = 600  # torchrun's default
_ANSWER_SECONDS: Final = 15  # node 0 writes its job's identity right after it starts the store
# Packages that all nodes must have in the same version, and those of which a difference is only reported.
_EQUAL: Final = ("fcp", "torch")
_REPORTED: Final = ("torch-npu", "transformers", "accelerate", "deepspeed", "lightning", "megatron-core", "mindspore")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class NodeRendezvous(RendezvousHandler):
    """The meeting of a fixed number of nodes in a store that node 0 holds.

    Args:
        host, port: address of node 0; port 0 is a free one, for a job on one machine.
        node_rank: this node's number.
        nodes: number of nodes.
        job: identity of the job, the same on all its nodes and no others.
        timeout_seconds: longest wait for the other nodes.
    """

    def __init__(
        self, host: str, port: int, *, node_rank: int, nodes: int, job: str, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> None:
        self._host, self._port = host, port
        self._node_rank, self._nodes = node_rank, nodes
        self._job = job
        self._timeout = timedelta(seconds=timeout_seconds)
        self.versions = _versions_here()
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks connect to the store of node 0's torchrun instead of opening another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store once all nodes have met.

        Raises:
            RendezvousConnectionError: the port is taken, or node 0 does not answer.
            RendezvousError: the store belongs to another job, another node has this node's number, or nodes have
                different versions of fcp or torch.
            RendezvousTimeoutError: a node did not come in time.
        """
        if self._store is None:
            self._store = self._opened() if self._node_rank == 0 else self._joined()
            self._met(self._store)
        return RendezvousInfo(
            PrefixStore(self._job, self._store),
            self._node_rank,
            self._nodes,
            RendezvousStoreInfo(self._host, self._port),
        )

    def _opened(self) -> TCPStore:
        listening = bound_socket(self._host, self._port, alone=self._nodes == 1)
        self._port = listening.getsockname()[1]
        store = TCPStore(
            self._host,
            self._port,
            None,
            True,
            self._timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )
        store.set(_JOB, self._job)
        return store

    def _joined(self) -> TCPStore:
        where = f"{self._host}:{self._port}"
        try:
            store = TCPStore(self._host, self._port, None, False, self._timeout, wait_for_workers=False)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are of this class
            raise RendezvousConnectionError(
                f"node 0 does not answer at {where}; start it, make sure that --master-addr and --master-port are its "
                "own, or wait longer with --join-timeout"
            ) from error
        try:
            store.wait([_JOB], timedelta(seconds=_ANSWER_SECONDS))
        except RuntimeError as error:
            raise RendezvousError(
                f"the process at {where} is not node 0 of this job; give node 0's address and a free port"
            ) from error
        if store.get(_JOB) != self._job.encode():
            raise RendezvousError(
                f"another job holds {where}; give each job a --master-port of its own, and start all nodes of a job "
                "with the same plan and run directory"
            )
        return store

    def _met(self, store: Store) -> None:
        store.set(f"fcp/versions/{self._node_rank}", json.dumps(self.versions))
        if store.add(f"fcp/node/{self._node_rank}", 1) > 1:
            raise RendezvousError(f"another node has the number {self._node_rank}, too; give each its own --node-rank")
        others = [f"fcp/node/{node}" for node in range(self._nodes) if node != self._node_rank]
        try:
            store.wait(others, self._timeout)
        except RuntimeError as error:
            missing = [node for node in range(self._nodes) if not store.check([f"fcp/node/{node}"])]
            names = ", ".join(map(str, missing))
            raise RendezvousTimeoutError(
                f"only {self._nodes - len(missing)} of {self._nodes} nodes came together in time, without {names}; "
                "start the others with the same plan and --master-addr, or wait longer with --join-timeout"
            ) from error

        if self._nodes > 1:
            self._compare(store)

    def _compare(self, store: Store) -> None:
        """Compare the versions of all nodes, and record them."""
        versions = [json.loads(one) for one in store.multi_get([f"fcp/versions/{n}" for n in range(self._nodes)])]
        store.set(f"fcp/compared/{self._node_rank}", "")
        differences = [  # (name, sentence), those that are refused first
            (name, f"node {node} has {name} {own.get(name, 'not at all')}, but node 0 {versions[0][name]}")
            for name in versions[0]
            for node, own in enumerate(versions)
            if own.get(name) != versions[0][name]
        ]
        if self._node_rank == 0 and (run_dir := os.environ.get("FCP_RUN_DIR")):
            path = RunPaths(run_dir=Path(run_dir)).versions
            with suppress(RunError):  # a run directory of another fcp
                document = {**read_object(path, error=RunError), "nodes": versions}
                write_json_atomically(path, document)
        if differences and differences[0][0] in _EQUAL:
            if self._node_rank == 0:  # whose store the others still read
                with suppress(RuntimeError):
                    wanted = [f"fcp/compared/{n}" for n in range(self._nodes)]
                    store.wait(wanted, timedelta(seconds=_ANSWER_SECONDS))
            raise RendezvousError(f"{differences[0][1]}; install the same on all nodes")
        if differences and self._node_rank == 0:
            os.environ[DIFFERENCE_VARIABLE] = differences[0][1]  # rank 0 prints it: nobody reads torchrun's log

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._job

    def shutdown(self) -> bool:
        return True


def _versions_here() -> dict[str, str]:
    found = {"fcp": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in _REPORTED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def bound_socket(host: str, port: int, *, alone: bool) -> socket.socket:
    """Return a listening socket on the interface of node 0's address.

    Args:
        host: node 0's address or name.
        port: its port; 0 is any free one.
        alone: whether the job runs on this machine alone, and so needs no other interface than loopback.

    Raises:
        RendezvousConnectionError: the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # A machine's own name is often in /etc/hosts as a loopback address, which other nodes cannot reach; an address
    # of a load balancer is on no interface. Such names need all interfaces.
    is_unreachable = not alone and host not in _LOOPBACK and str(address[0]).startswith(("127.", "::1"))
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind(("", port) if is_unreachable else address)
        except OSError as error:
            if alone or error.errno != errno.EADDRNOTAVAIL:
                raise
            listening.bind(("", port))
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise RendezvousConnectionError(
                f"port {port} of this machine is in use by another process; give all nodes another --master-port"
            ) from error
        reason = os.strerror(error.errno or 0)
        raise RendezvousConnectionError(f"node 0 cannot listen on {host}:{port}: {reason}") from error
    return listening


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    return NodeRendezvous(
        host,
        port,
        node_rank=int(parameters.config.get("rank", 0)),
        nodes=parameters.max_nodes,
        job=parameters.run_id,
        timeout_seconds=float(parameters.config.get("timeout", _TIMEOUT_SECONDS)),
    )


def handler() -> object:
    """Return the function that torchrun calls to create its rendezvous handler; named by the entry point."""
    return _create
