"""The timed work, as in the runtime: layers of a real model on a pack, a vision encoder call, the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcp_cli.cost.recipe import PrecisionName, Recipe
from fcp_cli.models.model import ModelSpec
from fcp_cli.models.transformers_config import text_config, whole_config
from fcp_cli.profiling.points import Point, VisionPoint
from fcp_cli.runtime.gradients import WEIGHT_DTYPES, PlainSync
from fcp_cli.runtime.inject import transformers_models
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.loss import Labels, token_loss_sum
from fcp_cli.runtime.recompute import ActivationOffload
from fcp_cli.runtime.ring import Ring, current_ring
from fcp_cli.runtime.transport import Handle, Transport, World
from fcp_cli.vision.families import FAMILIES
from fcp_cli.vision.parts import VisualPart


def build_model(spec: ModelSpec, layers: int, device: torch.device, recipe: Recipe) -> nn.Module:
    """Build the transformers model with random weights, `layers` layers and the runtime's attention.

    Weights have the recipe's dtype, and layers its recomputation.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, figures = text_config(replace(spec, num_layers=layers))
    config = AutoConfig.for_model(model_type, **figures)
    config.use_cache = False
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=WEIGHT_DTYPES[recipe.precision])  # type: ignore[no-untyped-call]
    integration = transformers_models()
    integration.prepare(model)
    integration.recompute_layers(model, recipe.recompute)
    trained: nn.Module = model.train()
    return trained


class SilentTransport:
    """Transport without communication: messages arrive at once, with the receiver's own data.

    With it, a single process runs exactly the kernels of a member of a ring of any degree.
    """

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        # Uninitialized memory may hold NaN or denormals, which change kernel times.
        if receive is not None:
            receive.zero_() if send is None else _fill(receive, send)
        return _Arrived()


class _Arrived:
    def wait(self) -> None:
        pass


def _fill(receive: Tensor, send: Tensor) -> None:
    flat, source = receive.view(-1), send.view(-1)
    common = min(flat.numel(), source.numel())
    flat[:common].copy_(source[:common])
    flat[common:].zero_()


class SyntheticBatch(NamedTuple):
    """Tokens of a ring member, [1, tokens] each."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor


class GradientSums:
    """Accumulates gradients of bf16 weights in fp32 over micro-batches, as in a job."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not isinstance(parameter, nn.Parameter):
            return
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.to(torch.float32)
        parameter.grad = None

    def holders(self) -> list[nn.Parameter]:
        """Return a parameter per sum that is its own gradient, as reduction and update expect."""
        found = []
        for parameter in self._model.parameters():
            if parameter in self._sums:
                holder = nn.Parameter(self._sums[parameter])
                holder.grad = self._sums[parameter]
                found.append(holder)
        return found


class Workload:
    """Runs micro-batches of given lengths on this rank, forward and backward, as in training.

    Args:
        model: model from `build_model`, possibly wrapped.
        device: its device.
        recipe: provides precision, recomputation and offloading.
        transport: transport of ring hops.
    """

    def __init__(self, model: nn.Module, device: torch.device, recipe: Recipe, transport: Transport) -> None:
        self.model = model
        self.device = device
        self._autocast = autocast_for(device, recipe.precision)
        self._recipe = recipe
        self._transport = transport
        self._offload = ActivationOffload(device) if recipe.offload == "activations" else None
        self._sums = GradientSums(model) if recipe.precision == "bf16" else None
        self._vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        self._batch = lru_cache(maxsize=64)(self._make_batch)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of matrix products."""
        return torch.bfloat16 if self._recipe.precision == "amp" else next(self.model.parameters()).dtype

    def gradient_holders(self) -> list[nn.Parameter]:
        """Return parameters whose `grad` is reduced over ranks."""
        return list(self.model.parameters()) if self._sums is None else self._sums.holders()

    def set_layers(self, layers: int) -> None:
        """Use only the first `layers` layers in further calls."""
        # transformers decoders run self.layers[: config.num_hidden_layers].
        self.model.config.num_hidden_layers = layers  # type: ignore[union-attr]

    def microbatch(
        self, lengths: tuple[int, ...], ranks: Sequence[int], index: int, heads_degree: int = 1
    ) -> Callable[[], None]:
        """Return a function that runs forward and backward of member `index`; gradients accumulate.

        Args:
            lengths: sequence lengths of the pack.
            ranks: ranks of the group.
            index: index of the member in the group.
            heads_degree: Ulysses degree.
        """
        degree = len(ranks)
        batch = self._batch(lengths, degree, index, heads_degree)
        tokens = sum(lengths)

        def run() -> None:
            layout = shard_layout(lengths, degree, heads_degree)
            ring = Ring(layout=layout, index=index, ranks=tuple(ranks), transport=self._transport)
            current_ring.set(ring)
            loss: Any = self._loss_sum(batch, ring) / tokens
            loss.backward()
            current_ring.set(None)

        return run

    def _loss_sum(self, batch: SyntheticBatch, ring: Ring) -> Tensor:
        """Run forward with the recipe's loss and offloading, as the bundled trainer does."""
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        with self._autocast(), nullcontext() if self._offload is None else self._offload.of(batch):
            if self._recipe.loss == "chunked":
                ring.context.labels = Labels(values=batch.labels)
                loss_sum: Tensor = self.model(**inputs, labels=batch.labels).loss
                return loss_sum
            logits = self.model(**inputs).logits
        return token_loss_sum(logits, batch.labels)

    def _make_batch(self, lengths: tuple[int, ...], degree: int, index: int, heads_degree: int) -> SyntheticBatch:
        layout = shard_layout(lengths, degree, heads_degree)
        draw = torch.Generator().manual_seed(sum(lengths))
        tokens = torch.randint(self._vocabulary, (1, layout.tokens(index)), generator=draw)
        positions = torch.from_numpy(layout.position_ids(index))[None]
        labels = torch.roll(tokens, -1, dims=1)
        return SyntheticBatch(tokens.to(self.device), positions.to(self.device), labels.to(self.device))


def groups_of(point: Point, *, world: int, ranks_per_node: int) -> list[tuple[int, ...]]:
    """Return the groups that run a point concurrently: as many as fit, as in a job.

    Groups in a node are blocks of consecutive ranks; groups across nodes are spread over as many nodes as possible.
    """
    order = list(range(world))
    if point.crosses_nodes:
        # One rank per node in turn, so that neighbours in the order are on different nodes.
        order.sort(key=lambda rank: (rank % ranks_per_node, rank))
        return [
            tuple(sorted(order[start : start + point.degree]))
            for start in range(0, world - point.degree + 1, point.degree)
        ]
    return [
        tuple(range(start, start + point.degree))
        for node in range(0, world, ranks_per_node)
        for start in range(node, min(node + ranks_per_node, world) - point.degree + 1, point.degree)
    ]


def autocast_for(device: torch.device, precision: PrecisionName) -> Callable[[], AbstractContextManager[Any]]:
    """Return the forward context: bfloat16 autocast for amp, else none."""
    if precision != "amp":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def build_encoder(spec: ModelSpec, blocks: int, device: torch.device, recipe: Recipe) -> nn.Module:
    """Build a vision-language base model with `blocks` encoder blocks and almost no language model.

    Weights are random, in the recipe's dtype. All deepstack mergers are kept, after the first blocks.
    """
    from transformers import AutoConfig, AutoModel

    assert spec.vision is not None
    vision = replace(
        spec.vision,
        depth=blocks,
        deepstack_layers=tuple(range(len(spec.vision.deepstack_layers))),
        full_attention_layers=tuple(layer for layer in spec.vision.full_attention_layers if layer < blocks),
    )
    # No language model layers and a minimal vocabulary, since neither runs.
    model_type, figures = whole_config(replace(spec, vision=vision, num_layers=1, vocab_size=4, ffn_size=8))
    figures["text_config"]["num_hidden_layers"] = 0
    with device:
        model = AutoModel.from_config(
            AutoConfig.for_model(model_type, **figures), dtype=WEIGHT_DTYPES[recipe.precision]
        )  # type: ignore[no-untyped-call]
    transformers_models().recompute_layers(model, recipe.recompute)
    trained: nn.Module = model.train()
    return trained


class VisionWorkload:
    """Runs an encoder call on random pixels as the runtime does in each micro-batch."""

    def __init__(self, model: nn.Module, device: torch.device, recipe: Recipe) -> None:
        self.model = model
        self._device = device
        self._autocast = autocast_for(device, recipe.precision)
        self._pixels = lru_cache(maxsize=4)(self._draw_pixels)
        self._blocks = {
            name: module
            for name, module in model.named_modules()
            if name in ("visual.blocks", "vision_tower.encoder.layer")
        }

    def set_blocks(self, blocks: int) -> None:
        """Use only the first `blocks` blocks in further calls."""
        for name, layers in self._blocks.items():
            self.model.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], layers[:blocks])

    @property
    def encoder(self) -> nn.Module:
        """Modules of a trained encoder: everything but the language model."""
        return nn.ModuleList([part for name, part in self.model.named_children() if name != "language_model"])

    def call(self, point: VisionPoint) -> Callable[[], None]:
        """Return a function that runs forward and, for a trained call, backward; gradients accumulate."""
        # Pixels of all parts are drawn together on the device.
        image: dict[str, Any] = {"kind": "image", "start_token": 0, "work": 1.0, "pixels": lambda: torch.empty(0)}
        parts = [VisualPart(**image, num_tokens=side * side // 4, grid=(side, side)) for side in point.sides]
        pixels = self._pixels(point.sides)
        family = FAMILIES[self.model.config.model_type]  # type: ignore[union-attr, index]

        def run() -> None:
            with torch.set_grad_enabled(point.trained), self._autocast():
                embeddings = family.encode(self.model, parts, pixels)
            if point.trained:
                torch.autograd.backward(embeddings, torch.ones_like(embeddings))

        return run

    def _draw_pixels(self, sides: tuple[int, ...]) -> torch.Tensor:
        config: Any = self.model.config
        vision = config.vision_config
        draw = torch.Generator(self._device).manual_seed(sum(sides))
        if config.model_type == "internvl":
            pixels = sides[0] * vision.patch_size[0]
            shape: tuple[int, ...] = (len(sides), vision.num_channels, pixels, pixels)
        else:
            values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            shape = (sum(side * side for side in sides), values)
        return torch.randn(shape, generator=draw, device=self._device)


class UpdateStep:
    """Runs the end of a step for timing: reduces, clips and applies a workload's gradients.

    Always uses an all-reduce: reduce-scatter of gradients plus all-gather of weights transfers the same bytes.

    Args:
        workload: workload that has run at least one micro-batch.
        world: all ranks.
        share: share of parameters updated here; other ranks of the job update the rest.
    """

    def __init__(self, workload: Workload, world: World, *, share: float) -> None:
        holders = nn.ParameterList(workload.gradient_holders())
        self._sync = PlainSync(holders, world)
        self._holders = list(holders)
        # Learning rate 0 keeps weights constant over repeats.
        self.optimizer = torch.optim.AdamW(_share_of(self._holders, share), lr=0.0)

    def run(self) -> None:
        """Reduce, clip and update once."""
        self._sync.reduce()
        nn.utils.clip_grad_norm_(self._holders, 1.0)
        self.optimizer.step()


def _share_of(parameters: list[nn.Parameter], share: float) -> list[nn.Parameter]:
    """Return the smallest parameters that together reach this share of all elements; at least one."""
    wanted = share * sum(parameter.numel() for parameter in parameters)
    chosen: list[nn.Parameter] = []
    held = 0
    for parameter in sorted(parameters, key=nn.Parameter.numel):
        if chosen and held >= wanted:
            break
        chosen.append(parameter)
        held += parameter.numel()
    return chosen


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the total bytes of weights, gradients and optimizer state."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = 0 if parameter.grad is None else parameter.grad.nbytes
            state = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
            total += parameter.nbytes + gradient + sum(value.nbytes for value in state)
    return total
