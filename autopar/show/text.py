"""A plan as a page of text: what ``print(plan)`` shows. It reads the `Plan` and nothing else.

Repeated blocks are one row each (`autopar.show.fold`), so that the page does not grow with the depth of the model.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from autopar.layout import Placement
from autopar.plan import CollectivePlan, OpPlan, Pipeline, Plan, StagePlan
from autopar.show.collectives import by_value
from autopar.show.fold import fold, split_numbers
from autopar.show.levels import LevelTraffic, sent_by_level
from autopar.show.table import table_text
from autopar.units import bytes_text, count_text, number_text, seconds_text, share_text

MAIN_OPS = {
    "linear": "linear",
    "mm": "mm",
    "bmm": "bmm",
    "matmul": "matmul",
    "addmm": "addmm",
    "grouped_mm": "grouped_mm",
    "sorted_mm": "grouped_mm",
    "scaled_dot_product_attention": "attention",
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "embedding": "embedding",
    "cross_entropy_loss": "cross_entropy",
    "convolution": "convolution",
    "conv1d": "conv1d",
    "conv2d": "conv2d",
}
"""Ops whose choices tell the plan, and what the page calls them; what lies between follows them."""

MAX_COLLECTIVES = 12
"""Rows of the table of collectives; the rest is summed up."""

RULE_WIDTH = 24
"""A longer rule goes on below."""

NUM_ALTERNATIVES = 8
"""Rows of the table of what else was tried."""

_WORDS = {
    "R": "replicated",
    "R*": "replicated, gradient a partial sum",
    "P": "partial sum",
    "Z1": "ZeRO-1: sharded optimizer",
    "Z2": "ZeRO-2: sharded optimizer and gradients",
    "Z3": "ZeRO-3: sharded, gathered for each use",
}


def factors_text(factors: Iterable[Sequence[int]]) -> str:
    """``768 x (3)(12)(64)``"""
    dims = [str(atoms[0]) if len(atoms) == 1 else "".join(f"({size})" for size in atoms) for atoms in factors]
    return " x ".join(dims) or "scalar"


def shape_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def op_name(op: str) -> str:
    """``aten.add.Tensor`` is ``add``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def short_name(op: OpPlan) -> str:
    return MAIN_OPS.get(op_name(op.op), op_name(op.op))


def symbol_words(symbol: str) -> str:
    """What a placement, a ZeRO level or a choice means."""
    if symbol in _WORDS:
        return _WORDS[symbol]
    placement = Placement.parse(symbol)
    atom = f"factor {placement.atom} of " if placement.atom else ""
    return f"sharded on {atom}dim {placement.dim}"


def _times(items: Sequence[object]) -> str:
    return f"x{len(items)}" if len(items) > 1 else ""


def _header(plan: Plan) -> Iterator[str]:
    yield f"{plan.model} on mesh {plan.grid} ({number_text(plan.grid.num_ranks, 'rank')}): {plan.config or 'automatic'}"
    yield f"  machine  {plan.machine}"
    if plan.precision:
        compute, _, reduce = plan.precision.partition("/")
        yield f"  computes in {compute}, gradients are summed over ranks in {reduce or 'the dtype of the parameters'}"
    elif plan.dtypes:
        other = "; precision='bf16' would compute in bf16" if "float32" in plan.dtypes else ""
        yield f"  computes in {' and '.join(plan.dtypes)}, as the model does by itself{other}"
    if plan.offload:
        yield f"  on the host {plan.offload}"
    if plan.compression:
        yield f"  gradients travel in {plan.compression}, which is lossy"
    yield "  batch    " + ", ".join(f"{name} {text}" for name, text in plan.batch.items())
    pipeline = plan.pipeline
    if pipeline.stages > 1:
        yield f"  pipeline {pipeline.stages} stages on axis {pipeline.axis}, {_microbatches_text(pipeline)}, {pipeline.schedule}"
    elif pipeline.microbatches > 1:
        yield f"  {_microbatches_text(pipeline)}"


def _microbatches_text(pipeline: Pipeline) -> str:
    averaged = "averaged " if pipeline.is_average else ""
    return number_text(pipeline.microbatches, f"{averaged}micro-batch", f"{averaged}micro-batches")


def _parameters(plan: Plan, width: int) -> str:
    rows = []
    folded = fold([(p.name, (p.factors, p.held, p.local_shape, len(p.aliases)), p) for p in plan.parameters])
    for row in folded:
        first = row.items[0]
        tied = f" = {', '.join(first.aliases)}" if first.aliases and len(row.items) == 1 else ""
        stored, num_bytes = shape_text(first.local_shape), bytes_text(first.num_bytes)
        rows.append([row.name + tied, _times(row.items), factors_text(first.factors), *first.held, stored, num_bytes])
    total = bytes_text(sum(p.num_bytes for p in plan.parameters))
    count = sum(math.prod(p.shape) for p in plan.parameters)
    columns = ("parameter", ">", "shape", *plan.mesh.names, ">stored", ">per rank")
    footer = (f"{count_text(count)} {'parameter' if count == 1 else 'parameters'}", "", "", *[""] * len(plan.mesh.names), "", total)
    return table_text(columns, rows, width=width, footer=footer, wide=("parameter",))


def _ops(plan: Plan, width: int) -> str:
    main = [op for op in plan.ops if op_name(op.op) in MAIN_OPS]
    folded = fold([(op.module, (op.op, op.rule, op.choices, op.layout, op.shape), op) for op in main])
    rows = []
    for row in folded:
        op = row.items[0]
        rule = textwrap.fill(op.rule.partition(" ; ")[0], RULE_WIDTH)
        rows.append([row.name or "-", _times(row.items), short_name(op), rule, *op.choices, f"[{' '.join(op.layout)}]"])
    columns = ("module", ">", "op", "rule", *plan.mesh.names, "result")
    return table_text(columns, rows, width=width, wide=("module",))


def _value_names(plan: Plan) -> dict[str, str]:
    """What to call a value that moves; an op is told by its module."""
    return {p.name: p.name for p in plan.parameters} | {op.name: f"{op.module} {short_name(op)}".strip() for op in plan.ops}


def _total_s(collectives: Iterable[CollectivePlan]) -> float:
    return sum(c.time_s * c.count for c in collectives)


def _collectives(plan: Plan, width: int) -> str:
    names = _value_names(plan)
    moved = [c for own in by_value(plan).values() for c in own]
    rows = [(names.get(c.value, c.value), (c.kind, c.axis, c.phase, c.num_bytes, c.time_s), c) for c in moved]
    folded = sorted(fold(rows), key=lambda row: -_total_s(row.items))
    shown, rest = folded[:MAX_COLLECTIVES], folded[MAX_COLLECTIVES:]
    cells = []
    for row in shown:
        c = row.items[0]
        count = sum(item.count for item in row.items)
        size, time = bytes_text(c.num_bytes), seconds_text(_total_s(row.items))
        cells.append([c.kind, c.axis, c.phase, row.name, size, str(count), time])
    if rest:
        others = [c for row in rest for c in row.items]
        count = sum(c.count for c in others)
        cells.append(["others", "", "", number_text(len(rest), "more row"), "", str(count), seconds_text(_total_s(others))])
    columns = ("collective", "axis", "phase", "of", ">each", ">count", ">time")
    lines = [table_text(columns, cells, width=width, wide=("of",))]
    for name in plan.grid.names:
        mine = [c for c in plan.collectives if c.axis == name]
        if not mine and name not in plan.mesh.names:
            continue
        count, num_bytes = sum(c.count for c in mine), sum(c.num_bytes * c.count for c in mine)
        lines.append(f"axis {name}: {number_text(count, 'collective')}, {bytes_text(num_bytes)}, {seconds_text(_total_s(mine))}")
    return "\n".join(lines)


def _communication(plan: Plan, width: int, sent: Iterable[LevelTraffic]) -> str:
    lines = [_collectives(plan, width)] if plan.collectives else []
    return "\n".join([*lines, *_wrapped(_levels(sent), width)]) or "no communication"


def _levels(sent: Iterable[LevelTraffic]) -> Iterator[str]:
    for level, group in groupby(sent, lambda row: row.level):
        rows = list(group)
        kinds = ", ".join(f"{row.kind} {bytes_text(row.num_bytes)}" for row in rows)
        yield f"{level} a rank sends {bytes_text(sum(row.num_bytes for row in rows))} a step: {kinds}"


def _fullest(plan: Plan) -> dict[str, int]:
    """Memory by kind of the rank of the pipeline that has most of it; what its stages do not hold all the step are activations."""
    peaks = plan.prediction.peak_memory_bytes
    if len(peaks) < 2 or len(plan.stages) % len(peaks):
        return dict(plan.prediction.memory_bytes)
    rank = peaks.index(max(peaks))
    own = [stage.memory_bytes for stage in plan.stages[rank :: len(peaks)]]
    still = {kind: sum(each[kind] for each in own) for kind in own[0] if kind != "activations"}
    return still | {"activations": peaks[rank] - sum(still.values())}


def _memory(plan: Plan, width: int) -> str:
    limit = plan.memory_limit_bytes

    def share(num_bytes: int) -> str:
        return share_text(num_bytes / limit) if limit else "-"

    rows = [[kind, bytes_text(num_bytes), share(num_bytes)] for kind, num_bytes in _fullest(plan).items()]
    peaks = plan.prediction.peak_memory_bytes
    peak = max(peaks, default=0)
    footer = ("peak", bytes_text(peak), share(peak))
    which = "memory of the fullest rank" if len(peaks) > 1 else "memory of a rank"
    lines = [table_text((which, ">bytes", f">of {bytes_text(limit)}"), rows, width=width, footer=footer)]
    if len(peaks) > 1:
        lines.append("peak by rank of the pipeline: " + ", ".join(map(bytes_text, peaks)))
    if plan.prediction.host_memory_bytes:
        lines.append("in the memory of the host, per rank: " + ", ".join(map(bytes_text, plan.prediction.host_memory_bytes)))
    elif plan.offload:
        lines.append("host and device are one memory: what is on the host counts with the rest")
    return "\n".join(lines)


def _stages(plan: Plan, width: int) -> str:
    """The stages with their times and memory; neighbours that are alike in both are one row."""
    rows = []
    numbered = enumerate((stage.begins, _stage_cells(stage)) for stage in plan.stages)
    for _, alike in groupby(numbered, lambda item: (split_numbers(item[1][0])[0], item[1][1])):
        (first, (begins, cells)), *rest = alike
        rows.append([f"{first}..{rest[-1][0]}" if rest else str(first), begins or "-", *cells])
    columns = ("stage", "begins", ">ops", ">forward", ">backward", ">send", ">once", ">live", "recompute", ">memory")
    return table_text(columns, rows, width=width, wide=("begins",))


def _stage_cells(stage: StagePlan) -> list[str]:
    sent_s = stage.send_forward_s + stage.send_backward_s
    times = (seconds_text(s) for s in (stage.forward_s, stage.backward_s, sent_s, stage.once_s))
    return [str(stage.num_ops), *times, str(stage.live), stage.recompute, bytes_text(sum(stage.memory_bytes.values()))]


def _alternatives(plan: Plan, width: int) -> str:
    """The shapes that were tried, best first."""
    rows = [
        [a.shape, "-" if a.reason else seconds_text(a.step_time_s), share_text(a.bubble_fraction), bytes_text(a.peak_memory_bytes)]
        for a in plan.alternatives[:NUM_ALTERNATIVES]
    ]
    left = len(plan.alternatives) - len(rows)
    footer = (f"{left} more", "", "", "") if left else ()
    return table_text(("tried", ">step", ">bubble", ">memory"), rows, width=width, footer=footer, wide=("tried",))


def _prediction(plan: Plan) -> Iterator[str]:
    p = plan.prediction
    idle_s = p.step_time_s - p.compute_s - p.update_s - p.exposed_comm_s - p.host_s
    yield (
        f"predicted step {seconds_text(p.step_time_s)}: compute {seconds_text(p.compute_s)}, update {seconds_text(p.update_s)}, "
        f"exposed {seconds_text(p.exposed_comm_s)} (blocking {seconds_text(p.blocking_comm_s)})"
        + (f", idle {seconds_text(max(0.0, idle_s))}" if plan.pipeline.stages > 1 else "")
    )
    if plan.offload:
        copied = seconds_text(p.host_s)
        yield f"copies to and from the host: {copied} that nothing hides; the others hide beside communication, or are exposed with it"
    if p.is_host_bound:
        yield (
            f"devices wait for their hosts, which take {seconds_text(p.dispatch_s)} to launch a step: fewer and larger ops "
            "(larger micro-batches, fused kernels) would be faster"
        )
    mfu = share_text(p.mfu) if p.mfu else "unknown"
    yield f"{count_text(p.tokens_per_s)} {p.unit}/s, MFU {mfu}, bubble {share_text(p.bubble_fraction)}"
    s = plan.stats
    gap = "proved optimal" if s.gap <= 1e-9 else f"within {100 * s.gap:.2g}% of the optimum"
    gap += " for this shape; the search was interrupted" if s.is_interrupted else ""
    yield (
        f"captured in {seconds_text(s.capture_time_s)}, solved in {seconds_text(s.solve_time_s)}: "
        f"{number_text(s.num_variables, 'variable')}, {number_text(s.num_clusters, 'cluster')}, {gap}"
    )


def _legend(plan: Plan) -> Iterator[str]:
    held = {symbol for p in plan.parameters for symbol in p.held}
    layouts = {symbol for op in plan.ops if op_name(op.op) in MAIN_OPS for symbol in op.layout}
    symbols = sorted(held | layouts)
    if symbols:
        yield "placements"
        yield from (f"  {symbol:5} {symbol_words(symbol)}" for symbol in symbols)
    if any(op_name(op.op) in MAIN_OPS for op in plan.ops):
        yield "ops: under an axis stands the letter of the rule that it splits, or the placement of all; +i lets partial sums through"


def plan_text(plan: Plan, width: int = 100, *, sent: Sequence[LevelTraffic] | None = None) -> str:
    """The whole page, at most ``width`` characters wide.

    Args:
        plan: any plan; it need not have been made here.
        width: at least 60.
        sent: what ranks send by level, of a part of a plan; by default what the plan says.
    """
    sent = sent_by_level(plan) if sent is None else sent
    sections = [
        "\n".join(_wrapped(_header(plan), width)),
        _parameters(plan, width) if plan.parameters else "",
        _ops(plan, width) if plan.ops else "",
        _communication(plan, width, sent),
        _memory(plan, width),
        _stages(plan, width) if plan.pipeline.stages * plan.pipeline.microbatches > 1 else "",
        _alternatives(plan, width) if len(plan.alternatives) > 1 else "",
        "\n".join(_wrapped(_prediction(plan), width)),
        "\n".join(_wrapped((f"note: {note}" for note in plan.notes), width)),
        "\n".join(_wrapped(_legend(plan), width)),
    ]
    return "\n\n".join(section for section in sections if section)


def _wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in lines:
        indent = "    " if line.startswith(" ") else "  "
        yield from textwrap.wrap(line, width, subsequent_indent=indent) or [""]
