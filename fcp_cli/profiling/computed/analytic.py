"""Computes coefficients from the figures of a model and a cluster, if nothing can be measured (`--analytic`).

`models.operations` counts a forward pass. A backward pass costs twice the matrices and, since it computes the scores
again, 2.5 times the attention. Recomputing activations adds one more forward: only of the matrices if attention's
outputs are kept, and only of the operations between matrices if their outputs are kept, too. A backward reaches the
first layer of which anything is trained, and frozen matrices have no weight gradient. A frozen vision encoder runs only
its forward. Experts that ranks share out are reached by exchanges of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from fcp_cli.cost.offload import offload_cost
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, Heads, Sync
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import recomputed_bytes
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import WHOLE, Cut, State
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.memory.trained import backward_of, check_trained, trained_parameters
from fcp_cli.memory.vision import vision_bytes
from fcp_cli.models.cluster import ClusterSpec
from fcp_cli.models.figures import Attention
from fcp_cli.models.model import ModelSpec
from fcp_cli.models.operations import forward_operations
from fcp_cli.profiling.computed.host import host_operations
from fcp_cli.profiling.computed.step_terms import analytic_step_terms
from fcp_cli.recipe import Recipe, Recompute, check_recipe

ATTENTION_BACKWARD = 2.5  # forwards
# Bytes that a hop reads and writes per element of a token's queries and layer, outside its kernel: partial results are
# added up, and queries, results and their gradients taken out and put back. Counted of the runtime's own operations.
CHUNK_BYTES_FORWARD, CHUNK_BYTES_BACKWARD = 25.0, 26.0
# Share of a rank's queries that a hop's kernel takes, on average: all of them against half of the keys of an earlier
# rank, or half of them against all keys of a later one.
HOP_QUERIES = 0.75
# Bytes that recomputed elementwise operations read and write for each byte that backward then has: counted of
# transformers' own layers in bf16: 2.5 (3.4 of experts), and 4.3 to 5.1.
MOVED_PER_RECOMPUTED_BYTE: Final[Mapping[Recompute, float]] = {"activation": 2.5, "elementwise": 5.0}
_ELEMENTWISE_EFFICIENCY = 0.8  # of the memory's bandwidth; assumed
_LEAST_OPERATIONS_PER_BYTE = 300.0  # of a device of unknown bandwidth: as of H100, whose memory is the slowest so


def ring_bytes_per_token(
    spec: ModelSpec, *, kv_bytes: int, gradient_bytes: int, recompute: bool = False, reached: float = 1.0
) -> float:
    """Return the bytes that a token sends around a ring: K/V forward, K/V and dK/dV backward, all such layers.

    None of layers with windows, of which only halos travel (`halo_bytes_per_token`), nor of linear attention, which
    hands on a state that no length makes larger.

    Args:
        kv_bytes: the kv bytes of one element of K or V on the wire.
        gradient_bytes: the gradient bytes of one element of dK or dV on the wire.
        recompute: the forward ring runs once more in the backward.
        reached: share of the layers that have a backward.
    """
    return _sent_per_token(
        spec.key_value_elements("full", "latent"), kv_bytes, gradient_bytes, recompute=recompute, reached=reached
    )


def halo_bytes_per_token(
    spec: ModelSpec, *, kv_bytes: int, gradient_bytes: int, recompute: bool = False, reached: float = 1.0
) -> float:
    """Return the bytes that a token of a halo takes, all layers with windows; the arguments are those of rings."""
    return _sent_per_token(
        spec.key_value_elements("window"), kv_bytes, gradient_bytes, recompute=recompute, reached=reached
    )


def _sent_per_token(elements: int, kv_bytes: int, gradient_bytes: int, *, recompute: bool, reached: float) -> float:
    return elements * (kv_bytes + reached * ((2 if recompute else 1) * kv_bytes + gradient_bytes))


def messages_per_hop(spec: ModelSpec, *, recompute: bool = False, reached: float = 1.0) -> float:
    """Return how many messages one micro-batch sends over one hop of its ring, all layers.

    One forward and one backward, in which dK/dV travel with K/V; recomputing runs the forward's ring once more. States
    of linear attention go up the ring and down again.
    """
    per_pass = spec.ring_layers + 2 * spec.state_layers
    return per_pass * (1 + reached * (2 if recompute else 1))


def messages_per_halo(spec: ModelSpec, *, recompute: bool = False, reached: float = 1.0) -> float:
    """Return how often a micro-batch sends each message of its halo, all layers with windows.

    In backward keys and values come once more, and their gradients go back.
    """
    return spec.window_layers * (1 + reached * (3 if recompute else 2))


def counted_heads(spec: ModelSpec, recipe: Recipe, cut: Cut = WHOLE, *, message_seconds: float) -> Heads:
    """Count bytes and messages of exchanges of tokens for heads.

    Queries, keys and values go one way and outputs back, and so do their gradients: two messages to each rank of the
    set and layer, forward and backward. A third in backward has a number of each query head, in at least fp32.

    Args:
        spec, recipe, cut: the description, recipe and cut of the job.
        message_seconds: the seconds of one message.
    """
    reached = backward_of(spec, recipe).layers
    passes = 1 + reached * (1 + (recipe.recompute == "full"))
    activation = precision_of(recipe).activation
    layers = spec.ring_layers + spec.window_layers
    attending: tuple[Attention, ...] = ("full", "latent", "window")
    size = passes * spec.key_value_elements(*attending) * activation
    queries = passes * spec.query_elements(*attending) * activation
    numbers = reached * layers * spec.num_heads * max(4, activation)
    return Heads(
        query_heads=max(1, spec.num_heads // cut.tensor_parallel),
        key_value_heads=max(1, spec.shared_kv_heads // cut.tensor_parallel),
        exchange_bytes_per_token=(queries + numbers) / cut.devices,
        key_value_exchange_bytes_per_token=size / cut.devices,
        exchange_seconds=(2 * passes + reached) * spec.num_layers * message_seconds / cut.pipeline_parallel,
    )


@lru_cache(maxsize=256)  # recipes that recompute as needed are made of those that do alike
def analytic_profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    *,
    recipe: Recipe,
    sync: Sync,
    ranks: int,
    cut: Cut = WHOLE,
    peers: int = 0,
) -> CostProfile:
    """Compute a cost profile of origin `analytic`; its measurement block holds every assumption.

    Args:
        spec: the model.
        cluster: gives rates, bandwidths and the memory of a device.
        recipe: the recipe that times and memory are of.
        sync: the sync of the plans to be made: it decides the tensors that a rank gathers and keeps.
        ranks: the ranks of the job.
        cut: the cut of the model over devices of a rank, and of its experts over ranks.
        peers: ring peers of a rank, whose channels take memory.
    """
    job = _Job(
        spec=spec,
        cluster=cluster,
        recipe=recipe,
        sync=sync,
        ranks=ranks,
        cut=cut,
        peers=peers,
    )
    job.check()
    return CostProfile(
        model=spec.name,
        cluster=cluster.name,
        origin="analytic",
        coefficients=job.coefficients(),
        bandwidth=Bandwidth(
            intra_node=cluster.intra_node_bytes_per_second,
            inter_node=cluster.inter_node_bytes_per_second,
        ),
        memory=rank_memory(
            spec,
            recipe,
            sync=sync,
            ranks=ranks,
            cut=cut,
            on_cpu=cluster.is_host,
            peers=peers,
        ).as_profile_memory(cluster.memory_bytes * (1 - RESERVE_FRACTION)),
        recipe=recipe,
        heads=job.heads(),
        step=analytic_step_terms(job.state, cluster, ranks=ranks),
        sync=sync,
        measurement=job.assumptions(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A model on a cluster, and how it runs there."""

    spec: ModelSpec
    cluster: ClusterSpec
    recipe: Recipe
    sync: Sync
    ranks: int
    cut: Cut
    peers: int

    def check(self) -> None:
        spec, tensor, pipeline = self.spec, self.cut.tensor_parallel, self.cut.pipeline_parallel
        check_recipe(self.recipe, sync=self.sync)
        for figure, value in (("num_heads", spec.num_heads), ("ffn_size", spec.ffn_size)):
            if value is not None and value % tensor:
                raise UsageError(f"--tensor-parallel {tensor} does not divide {figure} {value} of {spec.name}")
        check_trained(spec, self.recipe)
        self._check_experts()
        if pipeline > spec.num_layers:
            raise UsageError(f"--pipeline-parallel {pipeline} exceeds the {spec.num_layers} layers of {spec.name}")

    def _check_experts(self) -> None:
        among, experts = self.cut.expert_parallel, self.spec.experts
        if among == 1:
            return
        if experts is None:
            raise UsageError(f"--expert-parallel is {among}, and {self.spec.name} has no experts; remove it")
        for figure, value in (("the experts of a layer", experts.count), ("the ranks", self.ranks)):
            if value % among:
                raise UsageError(f"--expert-parallel {among} does not divide {figure}, {value} of {self.spec.name}")

    @property
    def state(self) -> State:
        return State(
            spec=self.spec,
            recipe=self.recipe,
            precision=precision_of(self.recipe),
            shards=self.recipe.shards(self.ranks),
            cut=self.cut,
        )

    def exchange_seconds_per_token(self, *, passes: float) -> float:
        """Return the seconds per token of sending tokens to experts of other ranks, and their results back.

        Args:
            passes: forwards and backwards, each of which sends both ways.
        """
        experts, among = self.spec.experts, self.cut.expert_parallel
        if experts is None or among == 1:
            return 0.0
        layers = sum(kind.has_experts for kind in self.spec.layer_kinds)
        sent = 2 * layers * experts.active * self.spec.hidden_size * precision_of(self.recipe).activation
        devices = self.cut.devices
        cluster, is_inside = self.cluster, among * devices <= self.cluster.devices_per_node
        rate = cluster.intra_node_bytes_per_second if is_inside else cluster.inter_node_bytes_per_second
        return passes * sent * (among - 1) / among / devices / rate

    def chunk_seconds_per_token(self, *, reached: float) -> float:
        """Return the seconds of a hop outside its kernel, per token; 0 if the memory bandwidth is unknown."""
        if self.cluster.memory_bytes_per_second is None:
            return 0.0
        forwards = 1 + reached * (self.recipe.recompute == "full")
        elements = sum(
            count * self.spec.num_heads * self.spec.value_dim(kind)
            for kind, count in self.spec.kinds.items()
            if kind.attention in ("full", "latent")
        )
        size = elements * (forwards * CHUNK_BYTES_FORWARD + reached * CHUNK_BYTES_BACKWARD)
        return size / self.cluster.memory_bytes_per_second / self.cut.devices

    def elementwise_seconds_per_token(self, *, reached: float) -> float:
        """Return the seconds per token of recomputed norms, rotations and activation functions, which memory bounds.

        Recomputed matrices have no such term: their efficiency stands for all of a layer.
        """
        moved = MOVED_PER_RECOMPUTED_BYTE.get(self.recipe.recompute)
        if moved is None:
            return 0.0
        rate = self.cluster.memory_bytes_per_second or self.cluster.peak_flops / _LEAST_OPERATIONS_PER_BYTE
        size = sum(
            count * recomputed_bytes(self.spec, kind, self.recipe, precision_of(self.recipe))
            for kind, count in self.spec.kinds.items()
        )
        return reached * moved * size / (rate * _ELEMENTWISE_EFFICIENCY) / self.cut.devices

    def offload_seconds_per_token(self, linear_seconds: float) -> float:
        """Return the seconds per token of copies to the host and back that no layer's matrices hide.

        Every micro-batch is priced as offloaded; the runtime offloads only those that would not fit.
        """
        if self.recipe.offload == "none":
            return 0.0
        layers, width = self.spec.num_layers, precision_of(self.recipe).residual * self.spec.hidden_size
        layer = linear_seconds / layers
        return offload_cost(
            input_bytes=width / self.cut.tensor_parallel,
            layers=layers,
            forward_seconds=layer / 4,
            backward_seconds=layer * 3 / 4,
        ).visible_seconds

    def microbatch_seconds(self) -> float:
        """Return the host's work for a micro-batch, which a device with little to do waits for."""
        issued = host_operations(self.spec, self.recipe) * (self.cluster.operation_seconds or 0.0)
        return (self.cluster.microbatch_seconds or 0.0) + issued / self.cut.pipeline_parallel

    def heads(self) -> Heads | None:
        """Price exchanges of tokens for heads; None if messages take no time, as in the papers' formula."""
        seconds = self.cluster.message_seconds
        return counted_heads(self.spec, self.recipe, self.cut, message_seconds=seconds) if seconds else None

    def last_hop(self, *, gradient_bytes: int, reached: float) -> tuple[float, float]:
        """Return bytes per token and seconds of a ring's last hop; 0 if `heads` has none.

        Backward needs two messages more than forward: gradients come one hop behind keys, and travel home.
        """
        if not self.cluster.message_seconds:
            return 0.0, 0.0
        spec, cut = self.spec, self.cut
        size = spec.key_value_elements("full", "latent") * gradient_bytes * reached / cut.devices
        return size, 2 * spec.ring_layers * reached * self.cluster.message_seconds / cut.pipeline_parallel

    def coefficients(self) -> Coefficients:
        spec, cluster, recipe = self.spec, self.cluster, self.recipe
        operations = forward_operations(spec)
        devices = self.cut.devices
        matrix_rate = cluster.peak_flops * cluster.linear_efficiency * devices
        rate = cluster.attention_rate
        attention_rate = cluster.peak_flops * rate.forward * devices
        # Recomputing runs the forward again; `selective` keeps attention's output, and so skips its ring.
        runs_ring_again, recomputes = recipe.recompute == "full", recipe.recomputes_matrices
        backward = backward_of(spec, recipe)
        attention_backward = ATTENTION_BACKWARD * (rate.forward / rate.backward) + runs_ring_again
        passes = 1 + backward.layers * attention_backward
        token_seconds = rate.token_pairs * passes / attention_rate
        kv_bytes = precision_of(recipe).activation
        # The runtime's rings sum dK and dV in at least fp32.
        sent: dict[str, Any] = {"recompute": runs_ring_again, "reached": backward.layers}
        widths: dict[str, Any] = {"kv_bytes": kv_bytes, "gradient_bytes": max(4, kv_bytes)}
        ring_bytes = ring_bytes_per_token(spec, **widths, **sent)
        hop_messages = messages_per_hop(spec, **sent)
        vision = backward.vision
        matrices = backward.language.total(recomputes=recomputes) * operations.linear_per_token / matrix_rate
        last_bytes, last_seconds = self.last_hop(gradient_bytes=max(4, kv_bytes), reached=backward.layers)
        return Coefficients(
            attention_seconds_per_token2=passes * operations.attention_per_token2 / attention_rate,
            linear_seconds_per_token=matrices
            + self.offload_seconds_per_token(matrices)
            + self.elementwise_seconds_per_token(reached=backward.layers)
            + token_seconds * (operations.attention_per_token2 + operations.window_per_token2)
            + self.exchange_seconds_per_token(passes=1 + backward.layers * (1 + recomputes)),
            ring_bytes_per_token=ring_bytes / devices,
            microbatch_seconds=self.microbatch_seconds(),
            ring_hop_seconds=hop_messages * cluster.message_seconds / self.cut.pipeline_parallel,
            vision_seconds_per_patch=vision.total(recomputes=recipe.recomputes_layers)
            * operations.vision_per_patch
            / matrix_rate,
            vision_seconds_per_patch2=(1 + vision.inputs * attention_backward)
            * operations.vision_per_patch2
            / attention_rate,
            chunk_seconds_per_token=self.chunk_seconds_per_token(reached=backward.layers)
            + HOP_QUERIES * token_seconds * operations.attention_per_token2,
            window_seconds_per_token2=passes * operations.window_per_token2 / attention_rate,
            window_tokens=float(spec.window_tokens or 0),
            halo_bytes_per_token=halo_bytes_per_token(spec, **widths, **sent) / devices,
            halo_message_seconds=messages_per_halo(spec, **sent) * cluster.message_seconds / self.cut.pipeline_parallel,
            last_hop_bytes_per_token=last_bytes,
            last_hop_seconds=last_seconds,
        )

    def assumptions(self) -> dict[str, Any]:
        spec, cluster, recipe = self.spec, self.cluster, self.recipe
        operations = forward_operations(spec)
        vision, tuned = {}, trained_parameters(spec, recipe)
        elementwise = self.elementwise_seconds_per_token(reached=backward_of(spec, recipe).layers)
        if spec.vision is not None:
            vision = {
                "forward_operations_per_patch": operations.vision_per_patch,
                "forward_operations_per_patch2": operations.vision_per_patch2,
                "freeze_vision": recipe.freeze_vision,
                "vision_bytes_per_token": vision_bytes(spec, recipe, precision_of(recipe)),
            }
        return {
            "method": "analytic: nothing was measured",
            "device": cluster.device,
            "peak_flops": cluster.peak_flops,
            "linear_efficiency": cluster.linear_efficiency,
            **_assumed_rate(cluster),
            "forward_operations_per_token": operations.linear_per_token,
            "forward_attention_operations_per_token2": operations.attention_per_token2,
            **vision,
            **({"forward_window_operations_per_token2": operations.window_per_token2} if spec.window_tokens else {}),
            "parameters": spec.parameters,
            **({"active_parameters": spec.active_parameters} if spec.experts else {}),
            **({} if tuned is None else {"trained_parameters": tuned.total}),
            **(
                {"operations_per_microbatch": round(host_operations(spec, recipe))} if cluster.operation_seconds else {}
            ),
            "precision": recipe.precision,
            "ranks": self.ranks,
            "tensor_parallel": self.cut.tensor_parallel,
            "pipeline_parallel": self.cut.pipeline_parallel,
            **({"expert_parallel": self.cut.expert_parallel} if self.cut.expert_parallel > 1 else {}),
            "zero_stage": recipe.zero_stage,
            "recompute": recipe.recompute,
            **({"elementwise_seconds_per_token": elementwise} if elementwise else {}),
            "memory_reserve_fraction": RESERVE_FRACTION,
            "cluster_sources": dict(cluster.sources),
        }


def _assumed_rate(cluster: ClusterSpec) -> dict[str, Any]:
    if cluster.attention_kernel is None:
        return {"attention_efficiency": cluster.attention_efficiency}
    seconds = {name: 1 / rate.forward + ATTENTION_BACKWARD / rate.backward for name, rate in cluster.attention.items()}
    return {
        "attention_kernel": cluster.attention_kernel,
        "attention_rate": asdict(cluster.attention_rate),
        # Of long sequences, forward and backward, as multiples of the kernel's that the profile is of.
        "attention_seconds_by_kernel": {
            name: round(value / seconds[cluster.attention_kernel], 3) for name, value in seconds.items()
        },
    }
