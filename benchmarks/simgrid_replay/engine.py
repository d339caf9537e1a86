"""Replays ranks' programs in SimGrid: `/usr/bin/python3 engine.py WORKLOAD.json`, which prints seconds by rank as JSON.

It runs under the Python that Debian's python3-simgrid is built for, without fcp, so it reads everything from the
workload. Messages share links fairly (the model CM02 without TCP windows): what a link has more of than it carries,
takes longer, which the cost model does not see.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from simgrid import Actor, Barrier, Engine, Mailbox, NetZone, this_actor

_FLOPS = 1e9  # a host's; work is given in seconds
_CONFIG = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")


def main() -> None:
    """Build the platform, run every rank's program, and print when each ended."""
    workload = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(["replay", *(f"--cfg={one}" for one in _CONFIG), "--log=root.thres:error"])
    hosts = build(workload)
    ended = [0.0] * len(hosts)
    barrier = Barrier(len(hosts))
    for rank, program in enumerate(workload["programs"]):
        Actor.create(f"rank{rank}", hosts[rank], run, rank, program, workload["blocks"], barrier, ended)
    engine.run()
    print(json.dumps(ended))


def build(workload: dict[str, Any]) -> list[Any]:
    """Make hosts, links by the workload's capacities, and a route for every pair of ranks that exchanges messages."""
    zone = NetZone.create_full_zone("cluster")
    hosts = [zone.create_host(f"rank{rank}", _FLOPS) for rank in range(len(workload["programs"]))]
    links = {name: zone.create_link(name, rate) for name, rate in workload["links"].items()}
    delay = zone.create_link("delay", 1e18).set_latency(workload["message_seconds"])
    from simgrid import LinkInRoute

    for one, other, names in workload["routes"]:
        path = [LinkInRoute(links[name]) for name in names] + [LinkInRoute(delay)]
        zone.add_route(hosts[one].netpoint, hosts[other].netpoint, None, None, path, False)
    for link in (*links.values(), delay):
        link.seal()
    zone.seal()
    return hosts


def run(rank: int, program: list[dict[str, Any]], blocks: int, barrier: Any, ended: list[float]) -> None:
    """Run the micro-batches of a rank in their order; one whose `wave` differs from the last waits for all ranks."""
    from simgrid import Engine as Clock

    for index, work in enumerate(program):
        if work["waits"]:
            barrier.wait()
        gathers = [_exchange(work["gather"], f"gather{index}", rank)] if work["gather"] else []
        this_actor.execute(work["fixed_seconds"] * _FLOPS)
        for block in range(blocks):
            this_actor.execute(work["linear_seconds"] / blocks * _FLOPS)
            for hop in range(work["hops"] + 1):
                name = f"{work['name']}.{block}.{hop}"
                sent = _exchange(work["ring"], name, rank, share=1 / blocks) if hop < work["hops"] else []
                this_actor.execute(work["attention_seconds"] / blocks / (work["hops"] + 1) * _FLOPS)
                _wait(sent)
            if work["home"]:
                _wait(_exchange(work["home"], f"{work['name']}.{block}.home", rank, share=1 / blocks))
        for comms in gathers:
            _wait(comms)
    ended[rank] = Clock.clock


def _exchange(message: dict[str, Any], name: str, rank: int, share: float = 1.0) -> list[Any]:
    """Start to send to the next rank and to receive from the one before."""
    to, source = message["to"], message["from"]
    size = max(1, round(message["bytes"] * share))
    sent = Mailbox.by_name(f"{name}:{rank}>{to}").put_async(0, size)
    received, payload = Mailbox.by_name(f"{name}:{source}>{rank}").get_async()
    return [sent, received, payload]  # the bindings write into `payload`, which must live until then


def _wait(exchange: list[Any]) -> None:
    for comm in exchange[:2]:
        comm.wait()


if __name__ == "__main__":
    main()
