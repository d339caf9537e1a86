"""Computes coefficients from the figures of a model and a cluster, where nothing can be measured (`--analytic`).

Operations of a forward pass: 2 per matrix entry and token; causal attention 2 H D per layer and pair of tokens (half of
the 4 H D of a full mask). A backward pass costs twice the matrices and, since it computes the scores again, 2.5 times
the attention. Recomputing activations adds one more forward: of the matrices alone where attention's are kept.
A backward reaches the first layer of which anything is trained, and frozen matrices have no gradient of their own.
A vision encoder attends without a mask, 4 h per block and pair of patches of an image or frame, or of a window, whose
pairs grow with the patches alone; frozen, it runs its forward alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, Sync
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import vision_bytes
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import State
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.memory.trained import backward_of, check_trained, trained_parameters
from fcp_cli.models.cluster import ClusterSpec
from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.profiling.step_terms import analytic_step_terms
from fcp_cli.recipe import Recipe, check_recipe

ATTENTION_BACKWARD = 2.5  # forwards
# Bytes that a hop reads and writes per element of a token's queries and layer, beside its kernel: partial results are
# added up, and queries, results and their gradients taken out and put back. Counted of the runtime's own operations.
CHUNK_BYTES_FORWARD, CHUNK_BYTES_BACKWARD = 25.0, 26.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Operations of one forward pass of the whole model on one device."""

    linear_per_token: float  # matrices of the layers and the output layer
    attention_per_token2: float  # causal
    vision_per_patch: float = 0.0
    vision_per_patch2: float = 0.0  # full mask within one image or frame

    @property
    def break_even_tokens(self) -> float:
        """Length at which attention has as many operations as the matrices."""
        return self.linear_per_token / self.attention_per_token2


def forward_operations(spec: ModelSpec) -> Operations:
    """Count the operations of one forward pass, with the output layer: it is 22 % of the matrices of Qwen3-1.7B."""
    vision = spec.vision
    return Operations(
        linear_per_token=2.0 * (spec.num_layers * spec.layer_matrix_parameters + spec.embedding_parameters),
        attention_per_token2=2.0 * spec.num_layers * spec.num_heads * spec.head_dim,
        vision_per_patch=_operations_per_patch(vision) if vision else 0.0,
        vision_per_patch2=4.0 * vision.full_attention_blocks * vision.hidden_size if vision else 0.0,
    )


def _operations_per_patch(vision: VisionSpec) -> float:
    """Count the matrices, and attention within windows: whole ones, which overrates those at the edges of a picture."""
    matrices = 2.0 * (vision.block_parameters + vision.projector_parameters / vision.merge_size**2)
    windowed_blocks = vision.depth - vision.full_attention_blocks
    return matrices + 4.0 * windowed_blocks * vision.hidden_size * vision.window_patches


def ring_bytes_per_token(
    spec: ModelSpec, *, kv_bytes: int, gradient_bytes: int, recompute: bool = False, reached: float = 1.0
) -> float:
    """Return the bytes that a token sends around a ring: K/V forward, K/V and dK/dV backward, all layers.

    Args:
        kv_bytes: of one element of K or V on the wire.
        gradient_bytes: of one element of dK or dV on the wire.
        recompute: the forward ring runs once more in the backward.
        reached: share of the layers that have a backward.
    """
    elements = 2.0 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return elements * (kv_bytes + reached * ((2 if recompute else 1) * kv_bytes + gradient_bytes))


def messages_per_hop(spec: ModelSpec, *, recompute: bool = False, reached: float = 1.0) -> float:
    """Return how many messages one micro-batch sends over one hop of its ring, all layers.

    One forward and one backward, where dK/dV ride with K/V; recomputing runs the forward's ring once more.
    """
    return spec.num_layers * (1 + reached * (2 if recompute else 1))


def analytic_profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    *,
    recipe: Recipe,
    sync: Sync,
    ranks: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    peers: int = 0,
) -> CostProfile:
    """Compute a cost profile of origin `analytic`; its measurement block holds every assumption.

    Args:
        spec: the model.
        cluster: gives rates, bandwidths and the memory of a device.
        recipe: that times and memory are of.
        sync: of the plans to be made: what a rank gathers and keeps depends on it.
        ranks: of the job, each tensor_parallel x pipeline_parallel devices.
        tensor_parallel, pipeline_parallel: the cut of a rank.
        peers: ranks that one meets in rings, whose channels take memory.

    Raises:
        UsageError: the model cannot be cut so, it has no encoder to freeze, or the sync rules the recipe out.
    """
    job = _Job(
        spec=spec,
        cluster=cluster,
        recipe=recipe,
        sync=sync,
        ranks=ranks,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
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
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            on_cpu=cluster.is_host,
            peers=peers,
        ).as_profile_memory(cluster.memory_bytes * (1 - RESERVE_FRACTION)),
        recipe=recipe,
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
    tensor_parallel: int
    pipeline_parallel: int
    peers: int

    def check(self) -> None:
        spec, tensor, pipeline = self.spec, self.tensor_parallel, self.pipeline_parallel
        check_recipe(self.recipe, sync=self.sync)
        for figure, value in (("num_heads", spec.num_heads), ("ffn_size", spec.ffn_size)):
            if value % tensor:
                raise UsageError(f"--tensor-parallel {tensor} does not divide {figure} {value} of {spec.name}")
        check_trained(spec, self.recipe)
        if pipeline > spec.num_layers:
            raise UsageError(f"--pipeline-parallel {pipeline} exceeds the {spec.num_layers} layers of {spec.name}")

    @property
    def state(self) -> State:
        return State(
            spec=self.spec,
            recipe=self.recipe,
            precision=precision_of(self.recipe),
            shards=self.recipe.shards(self.ranks),
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
        )

    def chunk_seconds_per_token(self, *, reached: float) -> float:
        """Return what a hop takes beside its kernel, per token; 0 where the rate of the memory is not known."""
        if self.cluster.memory_bytes_per_second is None:
            return 0.0
        forwards = 1 + reached * (self.recipe.recompute == "full")
        elements = self.spec.num_layers * self.spec.num_heads * self.spec.head_dim
        size = elements * (forwards * CHUNK_BYTES_FORWARD + reached * CHUNK_BYTES_BACKWARD)
        return size / self.cluster.memory_bytes_per_second / (self.tensor_parallel * self.pipeline_parallel)

    def coefficients(self) -> Coefficients:
        spec, cluster, recipe = self.spec, self.cluster, self.recipe
        operations = forward_operations(spec)
        devices = self.tensor_parallel * self.pipeline_parallel
        matrix_rate = cluster.peak_flops * cluster.linear_efficiency * devices
        attention_rate = cluster.peak_flops * cluster.attention_efficiency * devices
        # Recomputing runs the forward again; `selective` keeps what attention computed, and so its ring.
        runs_ring_again, recomputes = recipe.recompute == "full", recipe.recompute != "none"
        backward = backward_of(spec, recipe)
        attention_backward = ATTENTION_BACKWARD + runs_ring_again
        kv_bytes = precision_of(recipe).activation
        # The runtime's rings sum dK and dV in at least fp32.
        ring_bytes = ring_bytes_per_token(
            spec, kv_bytes=kv_bytes, gradient_bytes=max(4, kv_bytes), recompute=runs_ring_again, reached=backward.layers
        )
        hop_messages = messages_per_hop(spec, recompute=runs_ring_again, reached=backward.layers)
        vision = backward.vision
        return Coefficients(
            attention_seconds_per_token2=(1 + backward.layers * attention_backward)
            * operations.attention_per_token2
            / attention_rate,
            linear_seconds_per_token=backward.language.total(recomputes=recomputes)
            * operations.linear_per_token
            / matrix_rate,
            ring_bytes_per_token=ring_bytes / devices,
            microbatch_seconds=cluster.microbatch_seconds,
            ring_hop_seconds=hop_messages * cluster.message_seconds / self.pipeline_parallel,
            vision_seconds_per_patch=vision.total(recomputes=recomputes) * operations.vision_per_patch / matrix_rate,
            vision_seconds_per_patch2=(1 + vision.inputs * attention_backward)
            * operations.vision_per_patch2
            / attention_rate,
            chunk_seconds_per_token=self.chunk_seconds_per_token(reached=backward.layers),
        )

    def assumptions(self) -> dict[str, Any]:
        spec, cluster, recipe = self.spec, self.cluster, self.recipe
        operations = forward_operations(spec)
        vision, tuned = {}, trained_parameters(spec, recipe)
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
            "attention_efficiency": cluster.attention_efficiency,
            "forward_operations_per_token": operations.linear_per_token,
            "forward_attention_operations_per_token2": operations.attention_per_token2,
            **vision,
            "parameters": spec.parameters,
            **({} if tuned is None else {"trained_parameters": tuned.total}),
            "precision": recipe.precision,
            "ranks": self.ranks,
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "zero_stage": recipe.zero_stage,
            "recompute": recipe.recompute,
            "memory_reserve_fraction": RESERVE_FRACTION,
            "cluster_sources": dict(cluster.sources),
        }
