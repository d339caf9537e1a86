"""Computes cost coefficients from model and cluster descriptions, without measuring (`--analytic`).

`forward_operations` counts a forward pass. A backward pass costs 2 forward passes of the matrices and, since it
recomputes scores, 2.5 of attention. Activation recomputation adds another forward pass: only of matrices if attention
outputs are saved, and only of elementwise operations if matrix outputs are saved, too. The backward pass ends at the
first layer with trained weights, and frozen matrices have no weight gradient. A frozen vision encoder runs only
forward. With expert parallelism, tokens are exchanged between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from fcp_cli.cost.levels import RecomputeLevel, convex
from fcp_cli.cost.model import offload_cost
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, Heads, StepTerms, Sync, dump_cost_profile
from fcp_cli.cost.recipe import LayerRecompute, Recipe, Recompute, check_recipe
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import layer_bytes, recomputed_bytes, vision_bytes
from fcp_cli.memory.items import RESERVE_FRACTION, precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import WHOLE, Cut, State, backward_of, check_trained, trained_parameters
from fcp_cli.models.cluster import ClusterSpec
from fcp_cli.models.layers import Attention, LayerKind
from fcp_cli.models.model import ModelSpec, forward_operations

ATTENTION_BACKWARD = 2.5  # in multiples of forward
# Memory traffic of a ring hop outside its kernel, in bytes per query element and layer: accumulating partial results,
# slicing and writing back queries, results and gradients. Counted from the runtime's operations.
CHUNK_BYTES_FORWARD, CHUNK_BYTES_BACKWARD = 25.0, 26.0
# Average share of a rank's queries in a hop's kernel: all queries against half the keys of an earlier rank, or half of
# them against all keys of a later one.
HOP_QUERIES = 0.75
# Memory traffic of recomputed elementwise operations per byte available to backward, counted from transformers' layers
# in bf16: 2.5 (3.4 for experts), and 4.3 to 5.1.
MOVED_PER_RECOMPUTED_BYTE: Final[Mapping[Recompute, float]] = {"activation": 2.5, "elementwise": 5.0}
# Memory traffic of a layer's elementwise operations, forward and backward, per byte that the layer saves for backward.
# Counted from transformers' Llama and Qwen3 layers in fp32, over widths of queries and MLP: 6.6 to 10.3.
MOVED_PER_SAVED_BYTE: Final = 8.4
_ELEMENTWISE_EFFICIENCY = 0.8  # share of memory bandwidth; assumed
_LEAST_OPERATIONS_PER_BYTE = 300.0  # for unknown bandwidth: as of the H100, the highest ratio known


def ring_bytes_per_token(
    spec: ModelSpec, *, kv_bytes: int, gradient_bytes: int, recompute: bool = False, reached: float = 1.0
) -> float:
    """Return ring traffic in bytes per token, over all ring layers: K/V forward, K/V and dK/dV backward.

    Excludes window layers, which only exchange halos (`halo_bytes_per_token`), and linear attention, whose state does
    not grow with length.

    Args:
        kv_bytes: bytes per element of K or V on the wire.
        gradient_bytes: bytes per element of dK or dV on the wire.
        recompute: whether backward repeats the forward ring.
        reached: share of layers with a backward pass.
    """
    return _sent_per_token(
        spec.key_value_elements("full", "latent"), kv_bytes, gradient_bytes, recompute=recompute, reached=reached
    )


def halo_bytes_per_token(
    spec: ModelSpec, *, kv_bytes: int, gradient_bytes: int, recompute: bool = False, reached: float = 1.0
) -> float:
    """Return halo traffic in bytes per token, over all window layers; see `ring_bytes_per_token` for arguments."""
    return _sent_per_token(
        spec.key_value_elements("window"), kv_bytes, gradient_bytes, recompute=recompute, reached=reached
    )


def _sent_per_token(elements: int, kv_bytes: int, gradient_bytes: int, *, recompute: bool, reached: float) -> float:
    return elements * (kv_bytes + reached * ((2 if recompute else 1) * kv_bytes + gradient_bytes))


def messages_per_hop(spec: ModelSpec, *, recompute: bool = False, reached: float = 1.0) -> float:
    """Return the number of messages of a micro-batch per ring hop, over all layers.

    One per forward and backward pass (dK/dV are sent with K/V); recomputation repeats the forward ring. States of
    linear attention pass up the ring and back down.
    """
    per_pass = spec.ring_layers + 2 * spec.state_layers
    return per_pass * (1 + reached * (2 if recompute else 1))


def messages_per_halo(spec: ModelSpec, *, recompute: bool = False, reached: float = 1.0) -> float:
    """Return how often a micro-batch sends each halo message, over all window layers.

    Backward exchanges keys and values again and returns their gradients.
    """
    return spec.window_layers * (1 + reached * (3 if recompute else 2))


def counted_heads(spec: ModelSpec, recipe: Recipe, cut: Cut = WHOLE, *, message_seconds: float) -> Heads:
    """Count bytes and messages of Ulysses all-to-alls.

    Queries, keys and values are sent one way and outputs back, as are their gradients: two messages per peer and layer,
    forward and backward. A third message in backward has a value per query head, in at least fp32.

    Args:
        spec, recipe, cut: model, recipe and parallelism of the job.
        message_seconds: fixed cost of a message.
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


@lru_cache(maxsize=256)  # as-needed recomputation combines profiles of single levels
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
    """Compute an analytic cost profile; its measurement block records all assumptions.

    Args:
        spec: the model.
        cluster: provides rates, bandwidths and device memory.
        recipe: training recipe.
        sync: sync of the plans; it determines which tensors a rank gathers and keeps.
        ranks: number of ranks.
        cut: tensor, pipeline and expert parallelism.
        peers: ring peers of a rank, whose connections take memory.
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
    """A model on a cluster, with its recipe and parallelism."""

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
        """Return seconds per token of exchanging tokens with experts on other ranks.

        Args:
            passes: number of forward and backward passes, each of which sends there and back.
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
        """Return a ring hop's seconds per token outside its kernel; 0 if memory bandwidth is unknown."""
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
        """Return seconds per token of elementwise operations that the efficiency of matrices does not cover.

        These are the recomputed ones without their matrices. On CPU ranks they are all: the narrow layers that train
        there spend a third of their time in them, and the efficiency is that of matrices alone.
        """
        precision = precision_of(self.recipe)
        saved = recomputed = 0.0
        for kind, count in self.spec.kinds.items():
            if self.cluster.is_host:
                saved += count * layer_bytes(self.spec, kind, precision)
            if self.recipe.recompute in MOVED_PER_RECOMPUTED_BYTE:
                recomputed += count * recomputed_bytes(self.spec, kind, self.recipe, precision)
        moved = MOVED_PER_SAVED_BYTE * saved * (1 + 2 * reached) / 3
        moved += reached * MOVED_PER_RECOMPUTED_BYTE.get(self.recipe.recompute, 0.0) * recomputed
        rate = self.cluster.memory_bytes_per_second or self.cluster.peak_flops / _LEAST_OPERATIONS_PER_BYTE
        return moved / (rate * _ELEMENTWISE_EFFICIENCY) / self.cut.devices

    def offload_seconds_per_token(self, linear_seconds: float) -> float:
        """Return seconds per token of host offloading that computation does not hide.

        All micro-batches are priced as offloaded, although the runtime offloads only those that would not fit.
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

    def issue_seconds(self) -> float:
        """Return the seconds in which the host issues a micro-batch: those of all layers of its stage, whatever TP."""
        issued = host_operations(self.spec, self.recipe) * (self.cluster.operation_seconds or 0.0)
        return issued / self.cut.pipeline_parallel

    def clocks_of_messages(self, messages: float) -> tuple[float, float]:
        """Return the device's and the host's seconds of messages of all layers."""
        of_stage = messages / self.cut.pipeline_parallel
        return of_stage * self.cluster.message_seconds, of_stage * (self.cluster.host_message_seconds or 0.0)

    def heads(self) -> Heads | None:
        """Price Ulysses all-to-alls; None if messages take no time, as in the papers' formula."""
        seconds, host = self.cluster.message_seconds, self.cluster.host_message_seconds or 0.0
        if not seconds:
            return None
        heads = counted_heads(self.spec, self.recipe, self.cut, message_seconds=seconds)
        return replace(heads, host_exchange_seconds=heads.exchange_seconds * host / seconds)

    def coefficients(self) -> Coefficients:
        spec, cluster, recipe = self.spec, self.cluster, self.recipe
        operations = forward_operations(spec)
        devices = self.cut.devices
        matrix_rate = cluster.matrix_rate(spec.hidden_size) * devices
        rate = cluster.attention_rate
        attention_rate = cluster.peak_flops * rate.forward * devices
        # Recomputation repeats the forward; `selective` saves attention outputs, and so skips its ring.
        runs_ring_again, recomputes = recipe.recompute == "full", recipe.recomputes_matrices
        backward = backward_of(spec, recipe)
        attention_backward = ATTENTION_BACKWARD * (rate.forward / rate.backward) + runs_ring_again
        passes = 1 + backward.layers * attention_backward
        token_seconds = rate.token_pairs * passes / attention_rate
        kv_bytes = precision_of(recipe).activation
        # Rings accumulate dK and dV in at least fp32.
        sent: dict[str, Any] = {"recompute": runs_ring_again, "reached": backward.layers}
        widths: dict[str, Any] = {"kv_bytes": kv_bytes, "gradient_bytes": max(4, kv_bytes)}
        ring_bytes = ring_bytes_per_token(spec, **widths, **sent)
        hop, host_hop = self.clocks_of_messages(messages_per_hop(spec, **sent))
        halo, host_halo = self.clocks_of_messages(messages_per_halo(spec, **sent))
        vision = backward.vision
        matrices = backward.language.total(recomputes=recomputes) * operations.linear_per_token / matrix_rate
        # Backward needs one more message than forward: gradients follow one hop behind keys, and return to their owner.
        _, host_last = self.clocks_of_messages(spec.ring_layers * backward.layers)
        # Without a price of its messages, the host's operations are added to the device's seconds.
        has_clock = cluster.host_message_seconds is not None
        return Coefficients(
            attention_seconds_per_token2=passes * operations.attention_per_token2 / attention_rate,
            linear_seconds_per_token=matrices
            + self.offload_seconds_per_token(matrices)
            + self.elementwise_seconds_per_token(reached=backward.layers)
            + token_seconds * (operations.attention_per_token2 + operations.window_per_token2)
            + self.exchange_seconds_per_token(passes=1 + backward.layers * (1 + recomputes)),
            ring_bytes_per_token=ring_bytes / devices,
            microbatch_seconds=(cluster.microbatch_seconds or 0.0) + (0.0 if has_clock else self.issue_seconds()),
            ring_hop_seconds=hop,
            vision_seconds_per_patch=vision.total(recomputes=recipe.recomputes_layers)
            * operations.vision_per_patch
            / (matrix_rate if spec.vision is None else cluster.matrix_rate(spec.vision.hidden_size) * devices),
            vision_seconds_per_patch2=(1 + vision.inputs * attention_backward)
            * operations.vision_per_patch2
            / attention_rate,
            chunk_seconds_per_token=self.chunk_seconds_per_token(reached=backward.layers)
            + HOP_QUERIES * token_seconds * operations.attention_per_token2,
            window_seconds_per_token2=passes * operations.window_per_token2 / attention_rate,
            window_tokens=float(spec.window_tokens or 0),
            halo_bytes_per_token=halo_bytes_per_token(spec, **widths, **sent) / devices,
            halo_message_seconds=halo,
            host_microbatch_seconds=self.issue_seconds() if has_clock else 0.0,
            host_hop_seconds=host_hop,
            host_last_hop_seconds=host_last,
            host_halo_message_seconds=host_halo,
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
        # For long sequences, forward and backward, relative to the profile's kernel.
        "attention_seconds_by_kernel": {
            name: round(value / seconds[cluster.attention_kernel], 3) for name, value in seconds.items()
        },
    }


def as_needed_profile(
    recipe: Recipe, tokens: Mapping[LayerRecompute, int], profile_of: Callable[[Recipe], CostProfile]
) -> CostProfile:
    """Return the profile of as-needed recomputation: that of the first level, extended by the worthwhile levels.

    Args:
        recipe: recipe with as-needed recomputation.
        tokens: token capacity of a rank with all layers at each level.
        profile_of: computes the profile of a recipe with a single level.
    """
    profiles = {kind: profile_of(replace(recipe, recompute=kind)) for kind in tokens}
    first = profiles[next(iter(tokens))].coefficients.linear_seconds_per_token
    seconds = {kind: one.coefficients.linear_seconds_per_token - first for kind, one in profiles.items()}
    levels = convex(
        [
            RecomputeLevel(recompute=kind, tokens=count, seconds_per_token=seconds[kind])
            for kind, count in tokens.items()
        ]
    )
    base = profiles[levels[0].recompute]
    return replace(
        base,
        recipe=recipe,
        recompute_levels=tuple(
            replace(level, seconds_per_token=level.seconds_per_token - levels[0].seconds_per_token) for level in levels
        ),
        measurement={**base.measurement, "recompute": recipe.recompute},
    )


def with_level_tokens(profile: CostProfile, tokens: Mapping[LayerRecompute, int]) -> CostProfile:
    """Return a profile with as-needed recomputation, adapted to other token capacities of its levels.

    Raises:
        UsageError: no token fits at its first level, to which its times apply.
    """
    levels = convex(
        [
            replace(level, tokens=tokens[level.recompute])
            for level in profile.recompute_levels
            if level.recompute in tokens
        ]
    )
    first = profile.recompute_levels[0].recompute
    if levels[0].recompute != first:
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} has times for recomputation {first}, with "
            "which no token fits on these ranks; remove --profile, or plan for more --ranks"
        )
    found = replace(profile, recompute_levels=levels)
    return replace(found, text=dump_cost_profile(found))


class _Operations(NamedTuple):
    """Operations that the host launches: a fixed cost of a micro-batch, independent of tokens.

    Counted from transformers' layers under bf16 autocast, without operations that only create views; a test recounts
    them. Layers with a state and vision encoder blocks count as Llama layers.
    """

    forward: float
    backward: float


_LAYER: Final = _Operations(48, 87)
_HEAD_NORMS: Final = _Operations(16, 30)
_EXPERTS: Final = _Operations(14, 13)
_TWO_MORE_NORMS: Final = _Operations(22, 34)


# Forward passes added by recomputation. If products are saved, both passes go through Python, which takes as long
# again.
_AGAIN: Final[Mapping[Recompute, float]] = {
    "none": 0.0,
    "activation": 0.25,
    "elementwise": 3.0,
    "selective": 1.0,
    "full": 1.0,
}


def host_operations(spec: ModelSpec, recipe: Recipe) -> float:
    """Return the operations of a forward and backward pass of all layers, including recomputation."""
    backward = backward_of(spec, recipe)
    found = 0.0
    for kind, count in spec.kinds.items():
        layer = layer_operations(spec, kind)
        again = layer.forward * _AGAIN[recipe.recompute]
        found += count * (layer.forward + backward.layers * (layer.backward + again))
    if spec.vision is not None:
        again = _LAYER.forward if recipe.recomputes_layers else 0
        found += spec.vision.depth * (_LAYER.forward + backward.vision.inputs * (_LAYER.backward + again))
    return found


def layer_operations(spec: ModelSpec, kind: LayerKind) -> _Operations:
    """Return the forward and backward operations of a layer."""
    parts = [_LAYER]
    if spec.qk_norm and kind.attends:
        parts.append(_HEAD_NORMS)
    if spec.experts is not None and kind.has_experts:
        parts.append(_EXPERTS)
    if spec.has("four norms"):
        parts.append(_TWO_MORE_NORMS)
    share = ((kind.attention != "none") + (kind.mlp != "none")) / 2  # half a layer: a norm and the operations after it
    return _Operations(share * sum(part.forward for part in parts), share * sum(part.backward for part in parts))


def analytic_step_terms(state: State, cluster: ClusterSpec, *, ranks: int) -> StepTerms:
    """Compute a step's time outside its micro-batches; all 0 if the cluster does not specify node links.

    Traffic between nodes shares `links_per_node` links per node, each as fast as a ring's. Gathered data enters a node
    once per device of a rank; inside a node, each device receives all of it.

    Args:
        state: model state of a rank under the recipe.
        cluster: provides bandwidths, node links and memory bandwidth.
        ranks: number of ranks.
    """
    if cluster.links_per_node is None:
        return StepTerms()
    precision, recipe = state.precision, state.recipe
    devices = state.cut.devices
    shares = recipe.zero_stage > 0
    shards = state.shards if shares else ranks
    copies = max(1, ranks // shards)
    ranks_per_node = max(1, cluster.devices_per_node // devices)
    node_rate = cluster.inter_node_bytes_per_second * cluster.links_per_node

    def gather_seconds(size: float) -> float:
        """Return the seconds of an all-gather (or reduce-scatter) of `size` bytes per device."""
        received = size * (shards - 1) / shards
        across = received * devices / node_rate if shards > ranks_per_node else 0.0
        return max(received / cluster.intra_node_bytes_per_second, across)

    def copies_seconds(size: float) -> float:
        """Return the seconds to all-reduce shards of `size` bytes over replicas on different nodes."""
        senders = min(shards, ranks_per_node) * devices
        return 2.0 * size / shards * senders * (copies - 1) / copies / node_rate

    gradients = precision.gradient * state.trained
    summed = gather_seconds(gradients) + copies_seconds(gradients)
    gathered = gather_seconds(state.computed_weight * state.parameters)
    update = 0.0
    if cluster.memory_bytes_per_second is not None:
        numbers = 2 * (precision.moments + precision.master) + precision.gradient + precision.weight
        update = numbers * state.trained / (shards if shares else 1) / cluster.memory_bytes_per_second
    if recipe.zero_stage < 3:
        # Weights return the way gradients went; a replica's are part of the all-reduce.
        back = gather_seconds(state.computed_weight * state.trained if shares else gradients)
        return StepTerms(tail_seconds=summed + back, update_seconds=update)
    scatters = recipe.reduce == "wave"
    return StepTerms(
        # Forward and backward gather each layer's weights.
        wave_floor_seconds=2.0 * gathered + (summed if scatters else 0.0),
        tail_seconds=summed + gathered,
        update_seconds=update + (0.0 if scatters else summed),
        lockstep=state.spec.vision is not None,
    )
