"""Recorded steps beside the predicted one: as processes of a trace, and as data of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import Any

from autopar.measured import Communication, Recording, Span
from autopar.plan import Plan
from autopar.show.record import Compared, compare_collectives, compare_phases, some_text
from autopar.show.text import short_name
from autopar.show.trace import Process, Slice
from autopar.units import number_text

LANES = ("steps", "stages", "compute")
"""Of a recorded rank, before those of its axes."""
HALVES = ("forward", "backward")
MOST_RANKS = 16
"""Recorded ranks that a page shows."""
MOST_SURPRISES = 24
"""Collectives that a page compares, for each rank."""
DIGITS = 6
"""Significant digits of seconds in the page."""


def recorded_processes(recordings: Sequence[Recording], zero_s: float | None = None) -> list[Process]:
    """A process for each rank; second 0 is ``zero_s`` of their common clock, None: the first of their origins."""
    zero_s = min((recording.origin_s for recording in recordings), default=0.0) if zero_s is None else zero_s
    return [
        Process(recording.rank, _title(recording), LANES, list(_slices(recording, recording.origin_s - zero_s))) for recording in recordings
    ]


def _title(recording: Recording) -> str:
    left_out = f", without {number_text(recording.not_told, 'short op')} of the profiler" if recording.not_told else ""
    return f"rank {recording.rank}{left_out}"


def _slices(recording: Recording, late_s: float) -> Iterator[Slice]:
    for number, (start_s, end_s) in enumerate(recording.steps):
        yield Slice("steps", f"step {number}", "step", late_s + start_s, late_s + end_s)
    for half, first, last in _actions(recording.spans):
        name, args = f"stage {first.stage} {half} {first.microbatch}", {"stage": first.stage, "microbatch": first.microbatch}
        yield Slice("stages", name, half, late_s + first.start_s, late_s + last.end_s, args)
    for span in recording.spans:
        args = {"stage": span.stage, "microbatch": span.microbatch}
        yield Slice("compute", span.name, span.phase, late_s + span.start_s, late_s + span.end_s, args)
    for event in recording.events:
        told: dict[str, object] = {
            "values": list(event.values),
            "num_bytes": event.num_bytes,
            "dtype": event.dtype,
            "waited_us": event.wait_s * 1e6,
            "beside": {name: time_s * 1e6 for name, time_s in event.overlapped},
            "stage": event.stage,
            "microbatch": event.microbatch,
        }
        name = f"{event.kind} {some_text(event.values)}"
        yield Slice(f"communication {event.axis}", name, event.phase, late_s + event.start_s, late_s + event.end_s, told)
    busy_s: dict[str, float] = {}
    for op in recording.profiled:
        is_inside = op.end_s <= busy_s.get(op.lane, float("-inf"))
        busy_s[op.lane] = max(busy_s.get(op.lane, op.end_s), op.end_s)
        yield Slice(op.lane, op.name, "profiler", late_s + op.start_s, late_s + op.end_s, is_inside=is_inside)


def _actions(spans: Sequence[Span]) -> Iterator[tuple[str, Span, Span]]:
    """Forward or backward of a micro-batch on a stage, with its first and last span; what is waited for between them belongs to it."""
    half, first, last = "", None, None
    for span in sorted(spans, key=lambda span: span.start_s):
        is_same = first is not None and (span.step, span.stage, span.microbatch) == (first.step, first.stage, first.microbatch)
        if first is not None and last is not None and not (is_same and span.phase in (half, "wait")):
            yield half, first, last
            first = last = None
        if span.phase in HALVES:
            half, first, last = span.phase, first or span, span
    if first is not None and last is not None:
        yield half, first, last


def step_of(recordings: Sequence[Recording]) -> int:
    """The step of median length, by the rank that takes longest."""
    count = min(len(recording.steps) for recording in recordings)
    lengths = [max(r.steps[k][1] - r.steps[k][0] for r in recordings) for k in range(count)]
    return lengths.index(median_low(lengths))


def begin_of(recordings: Sequence[Recording], step: int) -> float:
    """When the first rank begins a step, on their common clock."""
    return min(recording.origin_s + recording.steps[step][0] for recording in recordings)


def measured_data(plan: Plan, recordings: Sequence[Recording]) -> dict[str, Any]:
    """One step of some ranks, whose begin is second 0, and of each what was predicted and measured."""
    step = step_of(recordings)
    begin_s = begin_of(recordings, step)
    shown = sorted(recordings, key=lambda recording: recording.rank)[:MOST_RANKS]
    ranks = [_rank_data(plan, recording, step, recording.origin_s - begin_s) for recording in shown]
    return {
        "step": step,
        "steps": len(recordings[0].steps),
        "recorded": len(recordings),
        "end_s": _short(max(r.origin_s + r.steps[step][1] for r in recordings) - begin_s),
        "ranks": ranks,
    }


def _rank_data(plan: Plan, recording: Recording, step: int, late_s: float) -> dict[str, Any]:
    ops = {op.name: f"{op.module} {short_name(op)}".strip() for op in plan.ops}
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def at(start_s: float, end_s: float) -> tuple[float, float]:
        return _short(late_s + start_s), _short(late_s + end_s)

    def told(event: Communication) -> list[Any]:
        of, beside = some_text([ops.get(value, value) for value in event.values]), event.overlapped[0][0] if event.overlapped else ""
        words = [number(word) for word in (event.axis, event.kind, event.phase, of, beside)]
        amounts = [event.num_bytes, _short(event.wait_s), _short(event.hidden_s)]
        return [*at(event.start_s, event.end_s), event.stage, event.microbatch, *words, *amounts]

    spans = [
        [*at(span.start_s, span.end_s), span.stage, span.microbatch, number(span.phase), number(ops.get(span.name, span.name))]
        for span in recording.spans
        if span.step == step
    ]
    events = [told(event) for event in recording.events if event.step == step]
    return {
        "rank": recording.rank,
        "position": _position(plan, recording.rank),
        "step": at(*recording.steps[step]),
        "spans": spans,
        "events": events,
        "names": list(names),
        "phases": _compared(compare_phases(recording, plan)),
        "collectives": _compared(compare_collectives(recording, plan)[:MOST_SURPRISES]),
    }


def _position(plan: Plan, rank: int) -> int:
    """Where a rank stands on the pipeline."""
    if plan.pipeline.degree == 1:
        return 0
    return plan.grid.coordinate(rank)[plan.pipeline.position]


def _compared(rows: Sequence[Compared]) -> list[tuple[str, float, float]]:
    return [(row.name, _short(row.predicted_s), _short(row.measured_s)) for row in rows]


def _short(time_s: float) -> float:
    return float(f"{time_s:.{DIGITS}g}")
