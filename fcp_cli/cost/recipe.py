"""Training recipe of a job: sharding, recomputation, offload and precision.

Cost profiles and plans record their recipe, since it affects memory and times. Options override settings and leave the
rest `auto`. Imports nothing heavy, since every `fcp` command reads these options.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from fcp_cli.errors import UsageError
from fcp_cli.util.options import MOST_RANKS, Opt, check_limits
from fcp_cli.util.words import nearest_words

ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
Reduce: TypeAlias = Literal["step", "wave"]
PrecisionName: TypeAlias = Literal["bf16", "amp", "fp32", "fp64"]
LayerRecompute: TypeAlias = Literal["none", "activation", "elementwise", "selective"]  # none repeats a ring
Recompute: TypeAlias = Literal["none", "activation", "elementwise", "selective", "full", "as-needed"]
Loss: TypeAlias = Literal["chunked", "plain"]
Offload: TypeAlias = Literal["none", "activations"]
SplitAttention: TypeAlias = Literal["ulysses", "2d"]  # groups split only heads, or heads and tokens
Phase: TypeAlias = Literal["forward"]  # a job that does not train

AUTO: Final = "auto"
_OF_ACCELERATORS: Final = ("bf16", "amp")

GRADIENT_BUCKET_BYTES: Final = 256 << 20
"""Most bytes of a flat copy of gradients that an unsharded model sums over ranks; 8B parameters fill about 150."""
GRADIENT_BUCKETS: Final = 2
"""Copies in flight: while one is summed, the next is filled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Sharding, recomputation, offload and precision of a job.

    Attributes:
        zero_stage: ZeRO stage: 0 shards nothing, 1 the optimizer, 2 also gradients at the end of a step, 3 also
            weights, which are gathered layer by layer.
        shard_ranks: number of ranks per replica of sharded tensors (HSDP); None: all.
        reduce: under stage 3, reduce gradients once per `step`, until which they are unsharded, or after each `wave` of
            micro-batches, so that ranks hold only shards.
        precision: `bf16` weights with fp32 master weights in the optimizer, fp32 weights under bfloat16 autocast
            (`amp`), `fp32`, or `fp64` for verification.
        recompute: activations of a layer that backward recomputes: `none`, of the MLP's activation function
            (`activation`), also of norms and rotations (`elementwise`), all but attention's (`selective`), or all
            (`full`). `as-needed` chooses one of these except `full` per micro-batch and layer, as the rank's tokens
            require, from `recompute_levels` of the plan's profile.
        loss: `chunked` cross entropy never materializes all logits, `plain` does.
        offload: whether inputs of recomputed layers are offloaded to host memory.
        freeze_vision: whether the vision encoder is frozen.
        lora: low-rank adapters on frozen weights (see `tuning.parse_lora`), or None.
        freeze: comma-separated name patterns of frozen weights, or None.
    """

    zero_stage: ZeroStage = 0
    shard_ranks: int | None = None
    reduce: Reduce = "wave"
    precision: PrecisionName = "bf16"
    recompute: Recompute = "none"
    loss: Loss = "chunked"
    offload: Offload = "none"
    freeze_vision: bool = False
    lora: str | None = None
    freeze: str | None = None

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers save only their inputs, and backward repeats their forward in part or in full."""
        return self.recompute not in ("none", "activation")

    @property
    def recomputes_matrices(self) -> bool:
        """Whether backward repeats a layer's matrix products."""
        return self.recompute in ("selective", "full")

    def shards(self, ranks: int) -> int:
        """Return the number of shards per replica."""
        return min(self.shard_ranks or ranks, ranks)

    def flags(self) -> list[str]:
        """Return the command-line options for this recipe."""
        words = [f"--zero {self.zero_stage}", f"--precision {self.precision}", f"--recompute {self.recompute}"]
        words += [f"--loss {self.loss}"] if self.loss != "chunked" else []
        words += [f"--offload {self.offload}"] if self.offload != "none" else []
        words += [f"--reduce {self.reduce}"] if self.zero_stage == 3 and self.reduce != "wave" else []
        words += [f"--shard-ranks {self.shard_ranks}"] if self.shard_ranks else []
        words += ["--freeze-vision"] if self.freeze_vision else []
        words = " ".join(words).split()
        words += ["--lora", self.lora] if self.lora else []
        words += ["--freeze", self.freeze] if self.freeze else []
        return words

    def describe(self) -> str:
        """Describe the recipe for a person."""
        words = [f"ZeRO-{self.zero_stage}", self.precision]
        if self.recompute != "none":
            words.append(
                "recomputation as needed" if self.recompute == "as-needed" else f"{self.recompute} recomputation"
            )
        words += [f"{self.loss} loss"]
        words += ["offloaded activations"] if self.offload == "activations" else []
        words += [f"sharded over {self.shard_ranks} ranks"] if self.shard_ranks else []
        words += ["frozen vision encoder"] if self.freeze_vision else []
        words += [f"LoRA {self.lora}"] if self.lora else []
        words += [f"frozen {self.freeze}"] if self.freeze else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRequest:
    """Recipe options of `fcp profile`, `fcp plan` and `fcp launch`; `auto`, None and False mean unspecified."""

    zero: Annotated[
        Literal["auto", "0", "1", "2", "3"],
        Opt(
            "ZeRO stage: 0 none, 1 optimizer, 2 gradients, 3 weights; auto: chosen to fit.",
            common=True,
            group="memory and precision",
        ),
    ] = "auto"
    shard_ranks: Annotated[
        int | None,
        Opt(
            "Ranks that share one copy of the sharded tensors, e.g. those of a node.",
            min=1,
            max=MOST_RANKS,
            unset="all",
        ),
    ] = None
    reduce: Annotated[
        Literal["auto", "step", "wave"],
        Opt("When gradients are reduced under --zero 3: wave keeps a shard of them, step keeps all and sends less."),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "amp", "fp32", "fp64"],
        Opt("bf16 keeps fp32 master weights, amp is fp32 under autocast; auto: fp32 on a CPU, else bf16."),
    ] = "auto"
    recompute: Annotated[
        Literal["auto", "none", "activation", "elementwise", "selective", "full", "as-needed"],
        Opt("Activations that backward recomputes; selective: all but attention's.", common=True),
    ] = "auto"
    loss: Annotated[
        Literal["auto", "chunked", "plain"],
        Opt("Cross entropy: chunked never holds all logits at once, plain does; auto: plain if Megatron runs."),
    ] = "auto"
    offload: Annotated[
        Literal["auto", "none", "activations"],
        Opt("activations: move the inputs of recomputed layers to host memory; auto: if quicker."),
    ] = "auto"
    freeze_vision: Annotated[bool, Opt("Train the language model of a vision model only.", group="weights")] = False
    lora: Annotated[
        str | None,
        Opt("Train low-rank adapters only, with peft.", metavar="r=16,alpha=32,target=q_proj+v_proj", unset="none"),
    ] = None
    freeze: Annotated[
        str | None,
        Opt(
            "Freeze weights that match these patterns, e.g. 'visual.*'.", metavar="PATTERN,...", unset="all are trained"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_limits(self)
        check_tuning(self.lora, self.freeze)

    def given(self) -> dict[str, Any]:
        """Return the requested settings by their names in `Recipe`."""
        values = {f.name: getattr(self, f.name) for f in fields(RecipeRequest)}
        found = {name: value for name, value in values.items() if value not in (AUTO, None, False)}
        if "zero" in found:
            found["zero_stage"] = int(found.pop("zero"))
        return found

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return a recipe overridden by the requested settings; adapters and patterns replace each other."""
        others = {"lora": None, "freeze": None} if self.lora or self.freeze else {}
        return replace(recipe, **{**others, **self.given()})

    @classmethod
    def to_train_as(cls, recipe: Recipe | RecipeRequest, **asked: Any) -> RecipeRequest:
        """Return a request for the same trained part, with the given settings."""
        return RecipeRequest(freeze_vision=recipe.freeze_vision, lora=recipe.lora, freeze=recipe.freeze, **asked)


def flag_words(name: str, value: Any) -> list[str]:
    """Return the command-line option for a recipe setting; [] if it is None or False."""
    flag = f"--{name.removesuffix('_stage').replace('_', '-')}"
    return [] if value is None or value is False else [flag] if value is True else [flag, str(value)]


def default_recipe(*, sync: str, device: str) -> Recipe:
    """Return the default recipe for a plan without one.

    Args:
        sync: sync of the plan.
        device: device kind of the ranks.
    """
    precision: PrecisionName = "fp32" if device == "cpu" else "bf16"
    if sync == "microbatch":
        return Recipe(zero_stage=3, precision=precision)
    # CPU ranks share one memory, whatever they shard.
    return Recipe(zero_stage=0 if device == "cpu" else 2, precision=precision)


def recipe_to_follow(planned: Recipe | None, *, sync: str, device: str) -> Recipe:
    """Return the recipe for a plan if no settings are requested.

    An accelerator plan that runs on a CPU has a small model, which fits anyway: use the recipe best for CPUs.

    Args:
        planned: recipe recorded in the plan.
        sync: sync of the plan.
        device: device kind of the ranks.
    """
    if planned is None or (device == "cpu" and planned.precision in _OF_ACCELERATORS):
        default = default_recipe(sync=sync, device=device)
        return default if planned is None else RecipeRequest.to_train_as(planned).applied_to(default)
    return planned


def check_recipe(recipe: Recipe, *, sync: str) -> None:
    """Raise UsageError if the recipe contradicts the plan's sync or itself.

    Raises:
        UsageError: for example stage 3 under `iteration`: gathering weights per micro-batch needs all ranks, but these
            run different numbers of micro-batches.
    """
    if recipe.zero_stage == 3 and sync == "iteration":
        raise UsageError(
            "--zero 3 gathers weights in every micro-batch, of which ranks run different numbers under sync iteration; "
            "give --zero 2, or plan with 'fcp plan --sync microbatch'"
        )
    if recipe.offload == "activations" and recipe.recompute == "as-needed":
        raise UsageError(
            "--offload activations moves the inputs of all layers, and --recompute is as-needed; add --recompute full, "
            "or remove --offload"
        )
    if recipe.offload == "activations" and not recipe.recomputes_layers:
        raise UsageError(
            f"--offload activations moves the inputs of recomputed layers, and --recompute is {recipe.recompute}; add "
            "--recompute full"
        )


def check_shard_ranks(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError if the shard ranks do not divide the ranks.

    Raises:
        UsageError: names the largest smaller divisor.
    """
    shards = recipe.shards(ranks)
    if recipe.zero_stage > 0 and ranks % shards:
        nearest = max(divisor for divisor in range(1, shards) if ranks % divisor == 0)
        raise UsageError(
            f"--shard-ranks is {shards}, which does not divide the {ranks} ranks; give --shard-ranks {nearest}, or "
            "remove it to shard one copy over all ranks"
        )


# The trained part of a model: everything, low-rank adapters, or all weights except those matching patterns.
#
# Imports nothing heavy, since it validates options of `fcp launch`.

ALL_LINEAR: Final = "all-linear"
_DEFAULT_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TABLES: Final = ("lm_head", "embed_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al., "LoRA"): trains B A, scaled by alpha / rank, added to a frozen W [out, in].

    Attributes:
        rank: rows of A [rank, in] and columns of B [out, rank].
        alpha: scale, as in peft.
        targets: last name parts of linear layers with adapters, or only `ALL_LINEAR`: all but the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = _DEFAULT_TARGETS

    def __str__(self) -> str:
        return f"r={self.rank},alpha={self.alpha:g},target={'+'.join(self.targets)}"


def parse_lora(text: str) -> Lora:
    """Parse "r=16,alpha=32,target=q_proj+v_proj"; omitted fields have `Lora`'s defaults, alpha twice the rank."""
    found: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        if key not in ("r", "alpha", "target") or not value:
            raise UsageError(f"--lora is {text!r}, where {word!r} is unknown; write r=16,alpha=32,target=q_proj+v_proj")
        found[key] = value
    rank = _positive(found.get("r", "16"), "r", text)
    if rank != int(rank):
        raise UsageError(f"--lora is {text!r}; r must be a whole number")
    targets = tuple(found["target"].split("+")) if "target" in found else _DEFAULT_TARGETS
    for target in targets:
        if not target or target in _TABLES:
            raise UsageError(
                f"--lora is {text!r}, where {target!r} cannot have an adapter; name linear layers, as q_proj+v_proj, "
                f"or {ALL_LINEAR}"
            )
    alpha = _positive(found["alpha"], "alpha", text) if "alpha" in found else 2 * rank
    return Lora(rank=int(rank), alpha=alpha, targets=targets)


def _positive(value: str, key: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--lora is {text!r}; {key} must be a number above 0")
    return number


def patterns_of(freeze: str) -> tuple[str, ...]:
    """Return the comma-separated patterns of --freeze."""
    return tuple(filter(None, (part.strip() for part in freeze.split(","))))


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's full name or its tail after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def frozen_names(names: Iterable[str], freeze: str) -> set[str]:
    """Return the names of the parameters that --freeze freezes."""
    names = list(names)
    frozen: set[str] = set()
    for pattern in patterns_of(freeze):
        found = {name for name in names if matches(name, pattern)}
        if not found:
            similar = ", ".join(_similar(pattern, names))
            raise UsageError(
                f"--freeze: {pattern!r} is the name of no weight{f'; similar are {similar}' * bool(similar)}"
            )
        frozen |= found
    if len(frozen) == len(names):
        raise UsageError(f"--freeze {freeze} leaves nothing to train; remove some of its patterns")
    return frozen


def _similar(pattern: str, names: list[str]) -> list[str]:
    """Return patterns built from name parts, most similar first."""
    parts = {part: None for name in names for part in name.split(".")[:-1] if not part.isdecimal()}
    wanted = next((part for part in pattern.split(".") if part.strip("*")), pattern)
    near = nearest_words(wanted.strip("*"), parts, most=3, cutoff=0.4)
    return [f"'{part}.*'" for part in near or list(parts)[:3]]


def check_tuning(lora: str | None, freeze: str | None) -> None:
    """Raise UsageError if adapters or patterns are invalid or combined."""
    if lora is not None:
        parse_lora(lora)
    if freeze is not None and not patterns_of(freeze):
        raise UsageError("--freeze is empty; give patterns of names, as 'visual.*'")
    if lora is not None and freeze is not None:
        raise UsageError(
            "--freeze and --lora exclude each other: with adapters every other weight is frozen; say with target= "
            "where adapters go"
        )


# Names of the attention kernels of NVIDIA devices; separate, so that command-line options import nothing heavy.

KernelName: TypeAlias = Literal["cudnn", "fa2", "fa3", "fa4"]
KernelChoice: TypeAlias = Literal["auto", "cudnn", "fa2", "fa3", "fa4"]
KERNELS: Final[tuple[KernelName, ...]] = get_args(KernelName)
KERNEL_VARIABLE: Final = "FCP_ATTENTION_KERNEL"
"""Variable that carries a `KernelChoice` to a job's ranks."""
