"""The faults: each replaces one text of one function of the package."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault of the runtime.

    Attributes:
        says: what is wrong with it.
        file: in `fcp_cli`.
        function: name of the function or Class.method that holds `text`, once.
        text, becomes: replaced text, and its replacement.
        test: test file that finds it; "": `fcp verify`.
    """

    says: str
    file: str
    function: str
    text: str
    becomes: str
    test: str = ""

    def put_into(self, package: Path) -> None:
        """Change a copy of the package.

        Raises:
            LookupError: the function does not hold the text once; adapt the fault to the code.
        """
        path = package / self.file
        source = path.read_text(encoding="utf-8")
        body = _segment(source, self.function)
        if body.count(self.text) != 1:
            raise LookupError(
                f"{self.file}: {self.function} holds {self.text!r} {body.count(self.text)} times, not once; adapt the "
                f"fault {self.says!r} in {__file__}"
            )
        path.write_text(source.replace(body, body.replace(self.text, self.becomes)), encoding="utf-8")


def _segment(source: str, function: str) -> str:
    """Return the source of a function or Class.method, or "" if there is none."""
    node: ast.AST = ast.parse(source)
    for name in function.split("."):
        found = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", None) == name]
        if not found:
            return ""
        node = found[0]
    return ast.get_source_segment(source, node) or ""


_PASSES, _ATTENTION = "runtime/ring_passes.py", "runtime/ring_attention.py"
_EXCHANGE, _LAYOUT = "runtime/exchange.py", "runtime/layout.py"
FAULTS = (
    Fault(
        says="keys and values swapped on receipt, if their heads have unequal sizes",
        file=_PASSES,
        function="_Messages.keys",
        text="return self._pair(self._buffer(hop), self._tokens(hop))",
        becomes=(
            "flat, size = self._buffer(hop), self._tokens(hop) * self._shapes[0].numel()\n"
            "        if hop and self._shapes[0] != self._shapes[1]:\n"
            "            flat = flat.roll(size)\n"
            "        return self._pair(flat, self._tokens(hop))"
        ),
    ),
    Fault(
        says="causal at hop d/2",
        file=_LAYOUT,
        function="ZigZagLayout._make_hops",
        text="Segments(tuple(q_sizes[i].tolist()), tuple(k_sizes[i].tolist()), source == member)",
        becomes=(
            "Segments(tuple(q_sizes[i].tolist()), tuple(k_sizes[i].tolist()),"
            " source == member or 2 * ((member - source) % self.degree) == self.degree)"
        ),
    ),
    Fault(
        says="gradients of replicated heads not summed",
        file=_EXCHANGE,
        function="_gather",
        text="replicated.sum(1, dtype=lse_dtype(parts.dtype))",
        becomes="replicated[:, 0]",
    ),
    Fault(
        says="the dummy of an idle rank skipped",
        file="runtime/cursor.py",
        function="RankView.of_step",
        text="rows = orders_of_rank(plan, self.rank)",
        becomes=(
            "rows = orders_of_rank(plan, self.rank)\n"
            "        if len(rows) > 1:\n"
            "            rows = rows[np.diff(plan.sequence_offsets)[rows] > 0]"
        ),
    ),
    Fault(
        says="the last hop's gradients of keys and values lost",
        file=_PASSES,
        function="ring_backward",
        text="own.add_(arrived)",
        becomes="own.add_(arrived * 0)",
    ),
    Fault(
        says="a hop's gradient of queries lost",
        file=_PASSES,
        function="ring_backward",
        text="sum_of_dq.add(work.q_rows, dq_share)",
        becomes="sum_of_dq.add(work.q_rows, dq_share * (hop > 1))",
    ),
    Fault(
        says="another scale in the backward",
        file=_PASSES,
        function="ring_backward",
        text="kernel, scale = kernel_of(q, spec), spec.scale",
        becomes="kernel, scale = kernel_of(q, spec), spec.scale * 1.001",
    ),
    Fault(
        says="hops merged with wrong weights",
        file=_PASSES,
        function="ring_forward",
        text="merge(*places, lse, work.q_rows, part, part_lse)",
        becomes="merge(*places, lse, work.q_rows, part, part_lse + 1e-6)",
    ),
    Fault(
        says="gradient sums zeroed twice",
        file=_PASSES,
        function="_Messages.add",
        text="if hop == 1:",
        becomes="if hop in (1, 2):",
    ),
    Fault(
        says="a shorter message sent than is expected",
        file=_PASSES,
        function="_Messages.pass_on",
        text="has_keys, has_gradients = hop < self._last_keys,",
        becomes="has_keys, has_gradients = hop < self._last_keys and ring.index != 1,",
    ),
    Fault(
        says="positions of chunks as if all were equal",
        file=_LAYOUT,
        function="ZigZagLayout.runs",
        text="np.minimum(chunks, extra[:, None])",
        becomes="0 * np.minimum(chunks, extra[:, None])",
    ),
    Fault(
        says="positions counted from 0 on every rank",
        file=_LAYOUT,
        function="ZigZagLayout.position_ids",
        text="return self._places(index)",
        becomes="return self._places(index) * 0 + np.arange(self.tokens(index))",
    ),
    Fault(
        says="loss averaged over the pack, not over the global batch",
        file="runtime/step.py",
        function="LocalMicroBatch.normalised",
        text="loss_sum * self._guards.sync.loss_factor / self._denominator",
        becomes="loss_sum * self._guards.sync.loss_factor / max(self.ring.layout.total_tokens, 1)",
    ),
    Fault(
        says="the last tokens of sequences counted in the loss's denominator",
        file="runtime/cursor.py",
        function="RankView.of_step",
        text="- len(plan.lengths),",
        becomes=",",
    ),
    Fault(
        says="gradients divided by the number of ranks",
        file="runtime/gradients.py",
        function="_Bucket.__init__",
        text="world.start_all_reduce(self._flat)",
        becomes="world.start_all_reduce(self._flat.div_(world.size))",
    ),
    Fault(
        says="row products of shared heads from the wrong tensor",
        file=_EXCHANGE,
        function="row_products",
        text="(grad_out.to(wide) * out)",
        becomes="(grad_out.to(wide) * grad_out.to(wide))",
    ),
    Fault(
        says="own heads exchanged in another order than those of others",
        file=_EXCHANGE,
        function="UlyssesExchange.to_heads",
        text="received[self._rows[self._place]].copy_(sent[self._place])",
        becomes="received[self._rows[self._place]].copy_(sent[self._place - 1])",
    ),
    Fault(
        says="a window one token short",
        file="runtime/windows.py",
        function="window_work",
        text="halo = halo_of(layout, index, window - 1)",
        becomes="halo = halo_of(layout, index, window - 2)",
        test="tests/runtime/test_windows.py",
    ),
    Fault(
        says="sinks left out of what the backward keeps",
        file=_ATTENTION,
        function="with_sinks",
        text="(out * kept).to(out.dtype)), total",
        becomes="(out * kept).to(out.dtype)), lse",
        test="tests/runtime/test_windows.py",
    ),
    Fault(
        says="a state space's decay not applied across ranks",
        file="runtime/recurrent.py",
        function="Scan.in_chunks",
        text="factors = torch.cat(sums).exp()",
        becomes="factors = torch.cat(sums).exp() * 0 + 1",
        test="tests/runtime/test_state_spaces.py",
    ),
)
