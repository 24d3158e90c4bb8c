"""Plans side by side: one row for each, the automatic one and those written by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.plan import Plan, Prediction
from autopar.show.inside import exposed_of
from autopar.show.levels import total_by_level
from autopar.show.table import table_text
from autopar.units import bytes_text, count_text, number_text, seconds_text, share_text


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of a comparison. The figures of ``prediction`` can be read from the row itself.

    Args:
        name: what the plan is called.
        fits: whether it is legal and fits the memory; ``reason`` says why not.
        prediction: predicted figures; None if there is no plan.
        measured_step_time_s: seconds per step when it was run; None if it was not.
        moved_bytes: bytes of all collectives of a step, per rank.
        is_short_of_memory: whether it does not fit for want of memory.
        exposed_by_kind_s: seconds of a step of each kind of communication that nothing hides, in the mean of the ranks of a pipeline, with
            ``slice`` and ``pad``, which an axis takes of the device; their sum is ``exposed_comm_s``.
        bytes_by_axis: ``moved_bytes`` by axis of the grid.
        bytes_by_level: what a rank sends over links of each level of the machine, in the mean of all ranks: its part of these, and messages
            between stages.
        num_ranks: of the grid; 0 without a plan.
        layout: how it cuts ranks, batch and model, stores most of the parameters on each axis, and computes again.
        plan: which it is; None if there is none.
    """

    name: str
    fits: bool
    reason: str
    prediction: Prediction | None
    measured_step_time_s: float | None
    moved_bytes: int
    is_short_of_memory: bool = False
    exposed_by_kind_s: Mapping[str, float] = field(default_factory=dict)
    bytes_by_axis: Mapping[str, int] = field(default_factory=dict)
    bytes_by_level: Mapping[str, int] = field(default_factory=dict)
    num_ranks: int = 0
    layout: str = ""
    plan: Plan | None = field(default=None, compare=False, repr=False)

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step; nan without a plan, as are the others."""
        return self.prediction.step_time_s if self.prediction else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Predicted, over all ranks."""
        return self.prediction.tokens_per_s if self.prediction else float("nan")

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Predicted, of one rank."""
        return self.tokens_per_s / self.num_ranks if self.num_ranks else float("nan")

    @property
    def mfu(self) -> float:
        """Model flops over peak flops of all devices."""
        return self.prediction.mfu if self.prediction else float("nan")

    @property
    def bubble_fraction(self) -> float:
        """Idle part of the pipeline."""
        return self.prediction.bubble_fraction if self.prediction else float("nan")

    @property
    def exposed_comm_s(self) -> float:
        """Communication that nothing hides."""
        return self.prediction.exposed_comm_s if self.prediction else float("nan")

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Of every rank of the pipeline; empty without a plan."""
        return self.prediction.peak_memory_bytes if self.prediction else ()


def plan_row(name: str, plan: Plan, measured_step_time_s: float | None = None) -> Row:
    """The row of a plan that fits."""
    by_axis: Counter[str] = Counter()
    for c in plan.collectives:
        by_axis[c.axis] += c.num_bytes * c.count
    return Row(
        name,
        True,
        "",
        plan.prediction,
        measured_step_time_s,
        by_axis.total(),
        exposed_by_kind_s=_exposed_by_kind_s(plan),
        bytes_by_axis=dict(by_axis),
        bytes_by_level=total_by_level(plan),
        num_ranks=plan.grid.num_ranks,
        layout=layout_text(plan),
        plan=plan,
    )


def layout_text(plan: Plan) -> str:
    """``pp=8,dp=16,tp=8, 16 stages interleaved, 96 micro-batches; parameters dp Z1 99%, tp S 97%; again: selective on 3 of 16 stages``"""
    pipeline = plan.pipeline
    cut = [str(plan.grid)]
    cut += [f"{pipeline.stages} stages {pipeline.schedule}"] if pipeline.stages > 1 else []
    cut += [f"{pipeline.microbatches} micro-batches"] if pipeline.microbatches > 1 else []
    held = []
    for axis, name in enumerate(plan.mesh.names if plan.parameters else ()):
        numel: Counter[str] = Counter()
        for parameter in plan.parameters:
            symbol = parameter.held[axis]
            numel["S" if symbol.startswith("S") else symbol] += math.prod(math.prod(atoms) for atoms in parameter.factors)
        symbol, most = numel.most_common(1)[0]
        held.append(f"{name} {symbol} {share_text(most / numel.total())}")
    levels = Counter(stage.recompute for stage in plan.stages if stage.recompute != "none")
    again = [f"{level} on {count} of {number_text(len(plan.stages), 'stage')}" for level, count in levels.items()]
    parts = [", ".join(cut), *(["parameters " + ", ".join(held)] if held else [])]
    return "; ".join([*parts, *([f"again: {', '.join(again)}"] if again else [])])


def _exposed_by_kind_s(plan: Plan) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for stage in plan.stages:
        for kind, time_s in exposed_of(stage, plan.pipeline.microbatches).items():
            found[kind] += time_s / plan.pipeline.degree
        if stage.output_s:  # all ranks wait for it
            found["broadcast"] += stage.output_s
    return dict(found)


NEGLIGIBLE = 1e-5
"""A share of the step below which communication counts as hidden."""


def _exposed_text(time_s: float, row: Row) -> str:
    return seconds_text(time_s if time_s >= NEGLIGIBLE * row.step_time_s else 0.0)


def _cells(row: Row, best: float) -> list[str]:
    if row.prediction is None:
        return [row.name, *["-"] * 10]
    measured = row.measured_step_time_s
    return [
        row.name,
        seconds_text(row.step_time_s) if row.fits else f"({seconds_text(row.step_time_s)})",
        f"{row.step_time_s / best:.2f}" if row.fits and best else "-",
        seconds_text(measured) if measured is not None else "-",
        count_text(row.tokens_per_s),
        count_text(row.tokens_per_s_per_gpu) if row.num_ranks else "-",
        share_text(row.mfu) if row.mfu else "-",
        share_text(row.bubble_fraction),
        _exposed_text(row.exposed_comm_s, row),
        bytes_text(max(row.peak_memory_bytes, default=0)),
        bytes_text(row.moved_bytes),
    ]


def compare_text(rows: Sequence[Row], width: int = 100) -> str:
    """The table; rows that do not fit have their step time in brackets and their reason below."""
    best = min((row.step_time_s for row in rows if row.fits and row.prediction), default=0.0)
    unit = next((row.prediction.unit for row in rows if row.prediction), "tokens")
    columns = ("plan", ">step", ">to best", ">measured", f">{unit}/s", ">per GPU", ">MFU", ">bubble", ">exposed", ">peak", ">moved")
    text = table_text(columns, [_cells(row, best) for row in rows], width=width, wide=("plan",))
    traffic = [line for row in rows if row.prediction for line in (*_layout(row), *_traffic(row))]
    reasons = [f"{row.name} does not fit: {row.reason}" for row in rows if not row.fits]
    return "\n".join([text, *traffic, *reasons])


def _layout(row: Row) -> list[str]:
    return [f"{row.name}: {row.layout}"] if row.layout else []


def _traffic(row: Row) -> list[str]:
    """What is exposed by kind, moved by axis, and sent by level, in a line."""
    kinds = sorted(row.exposed_by_kind_s.items(), key=lambda item: -item[1])
    exposed = [f"{kind} {seconds_text(time_s)}" for kind, time_s in kinds if time_s >= NEGLIGIBLE * row.step_time_s]
    moved = [f"{axis} {bytes_text(num_bytes)}" for axis, num_bytes in row.bytes_by_axis.items()]
    sent = [f"{level} {bytes_text(num_bytes)}" for level, num_bytes in row.bytes_by_level.items()]
    parts = [("exposed ", exposed), ("moved on axis ", moved), ("a rank sends ", sent)]
    told = "; ".join(f"{what}{', '.join(each)}" for what, each in parts if each)
    return [f"{row.name}: {told}"] if told else []
