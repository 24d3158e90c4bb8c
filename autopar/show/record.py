"""Recorded steps as text: a log of all communication, and what was measured beside what the plan predicted, the largest surprises first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from autopar.measured import Communication, Recording
from autopar.plan import Plan
from autopar.show.fold import split_numbers
from autopar.show.table import table_text
from autopar.show.text import short_name
from autopar.units import bytes_text, number_text, seconds_text, share_text

NUM_SURPRISES = 8
"""Rows of the table of collectives."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of a step for something: predicted, and measured on a rank."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def surprise_s(self) -> float:
        return self.measured_s - self.predicted_s


def compare_phases(recording: Recording, plan: Plan) -> tuple[Compared, ...]:
    """The phases of a step, the largest surprise first, and last the step. Measured are those of the step of median length, which add up.

    A step of several calls of the model, whose gradients accumulate, is predicted as that many without the update, and one update.
    ``other`` is what is left of a step (Python between graphs, clipping, the loop), of which nothing is predicted; ``bubble`` is predicted
    as what the rank's own work leaves of the step.
    """
    prediction, count = plan.prediction, len(recording.steps)
    calls = _median(recording.calls) or 1
    own = [plan.stages[stage] for stage in sorted({span.stage for span in recording.spans if span.phase == "forward"})]
    forward_s = calls * plan.pipeline.microbatches * sum(stage.forward_s - stage.forward_comm_s for stage in own)
    backward_s = calls * plan.pipeline.microbatches * sum(stage.backward_s - stage.backward_comm_s for stage in own)
    exposed_s, update_s = calls * prediction.exposed_comm_s, sum(stage.update_s for stage in own)
    step_s = calls * (prediction.step_time_s - update_s) + update_s
    times_s: dict[str, list[float]] = defaultdict(lambda: [0.0] * count)
    for span in recording.spans:
        times_s[span.phase][span.step] += span.time_s
    whole_s = [end - start for start, end in recording.steps]
    known = ("forward", "backward", "wait", "idle", "update")
    middle = whole_s.index(median_low(whole_s)) if whole_s else None
    seen = {phase: times_s[phase][middle] if middle is not None else 0.0 for phase in known}
    seen_s = whole_s[middle] if middle is not None else 0.0
    rows = [
        Compared("forward", forward_s, seen["forward"]),
        Compared("backward", backward_s, seen["backward"]),
        Compared("exposed communication", exposed_s, seen["wait"]),
        Compared("update", update_s, seen["update"]),
        Compared("other", 0.0, seen_s - sum(seen.values())),
    ]
    if plan.pipeline.stages > 1:
        rows.append(Compared("bubble", max(step_s - forward_s - backward_s - exposed_s - update_s, 0.0), seen["idle"]))
    return (*sorted(rows, key=_order), Compared("step", step_s, seen_s))


def compare_collectives(recording: Recording, plan: Plan) -> tuple[Compared, ...]:
    """Collectives that the plan knows, whether they are hidden or not, the largest surprise first; measured is the median of the steps.

    Equal blocks share a row, as they share their prices; so do values that travel in one bucket.
    """
    names = _names(plan)
    parameters = {entry.name for entry in plan.parameters}
    predicted_s: Counter[tuple[str, str, str, str]] = Counter()
    for c in plan.collectives:
        is_gather = c.kind == "all_gather"
        phase = ("gather" if is_gather else "reduce") if c.value in parameters else c.phase
        predicted_s[c.kind, c.axis, phase, names.get(c.value, c.value)] += c.time_s * c.count  # type: ignore[assignment]
    count, calls = len(recording.steps), _median(recording.calls) or 1
    rows = []
    for (kind, axis, phase), events in _grouped(recording.events).items():
        for together in _together([{names.get(value, value) for value in event.values} for event in events]):
            price_s = calls * sum(predicted_s[kind, axis, phase, name] for name in together)
            if not price_s:
                continue
            seen_s = [0.0] * count
            for event in events:
                if names.get(event.values[0], event.values[0]) in together:
                    seen_s[event.step] += event.time_s
            rows.append(Compared(f"{kind} {axis} {phase} {some_text(sorted(together))}", price_s, _median(seen_s)))
    return tuple(sorted(rows, key=_order))


def _median(times_s: Sequence[float]) -> float:
    return median(times_s) if times_s else 0.0


def _order(row: Compared) -> float:
    return -abs(row.surprise_s)


def _names(plan: Plan) -> dict[str, str]:
    """What values of equal blocks are called together: ``h.*.mlp.c_fc.weight``."""
    names = {name: split_numbers(name)[0] for entry in plan.parameters for name in (entry.name, *entry.aliases)}
    return names | {op.name: split_numbers(f"{op.module} {short_name(op)}".strip())[0] for op in plan.ops}


def _grouped(events: Iterable[Communication]) -> dict[tuple[str, str, str], list[Communication]]:
    groups: dict[tuple[str, str, str], list[Communication]] = defaultdict(list)
    for event in events:
        groups[event.kind, event.axis, event.phase].append(event)
    return groups


def _together(sets: Iterable[set[str]]) -> list[set[str]]:
    """Names that share a set, or share one with one that does, and so on."""
    found: list[set[str]] = []
    for names in sets:
        touched = [group for group in found if not group.isdisjoint(names)]
        found = [group for group in found if group.isdisjoint(names)] + [names.union(*touched)]
    return found


def some_text(values: Sequence[str]) -> str:
    """``h.0.attn.c_attn.weight and 3 more``"""
    return " and ".join([*values[:1], *([f"{len(values) - 1} more"] if len(values) > 1 else [])])


def _tail(name: str, length: int = 32) -> str:
    """``..0.attention.q_lin.weight``: the end of a name that is longer."""
    while len(name) > length and "." in name[2:]:
        name = ".." + name[2:].partition(".")[2]
    return name


def log_text(events: Sequence[Communication], plan: Plan, *, begin_s: float = 0.0, width: int = 160) -> str:
    """All communication, a line each, as it starts.

    Args:
        events: of a step.
        plan: that says what ops are.
        begin_s: second from which ``start`` and ``end`` count.
        width: in characters.
    """
    ops, rows = {op.name: f"{op.module} {short_name(op)}".strip() for op in plan.ops}, []
    for event in events:
        hidden = share_text(min(event.hidden_s / event.time_s, 1.0)) if event.time_s > 0 else "-"
        most = f"{_tail(event.overlapped[0][0])} +{len(event.overlapped) - 1}" if event.overlapped else "-"
        times = [f"{(t - begin_s) * 1e3:.2f}" for t in (event.start_s, event.end_s)]
        wait = f"{event.wait_s * 1e3:.2f}"
        of = some_text([_tail(ops.get(value, value)) for value in event.values])
        rows.append([*times, event.phase, event.kind, event.axis, of, bytes_text(event.num_bytes), event.dtype, wait, hidden, most])
    columns = (">start ms", ">end ms", "for", "collective", "axis", "of", ">bytes", "dtype", ">waited ms", ">hidden", "beside")
    return table_text(columns, rows, width=width, wide=("of", "beside"))


def totals_text(recording: Recording, *, width: int = 100) -> str:
    """Communication of a step by what it is for, on average."""
    count = max(len(recording.steps), 1)
    rows = []
    for (kind, axis, phase), events in sorted(_grouped(recording.events).items(), key=lambda item: item[0][2]):
        num_bytes = sum(event.num_bytes for event in events) / count
        time_s, hidden_s, wait_s = (sum(times) for times in zip(*((e.time_s, e.hidden_s, e.wait_s) for e in events), strict=True))
        hidden = share_text(hidden_s / time_s) if time_s else "-"
        moved = f"{len(events) / count:g}"
        rows.append([phase, kind, axis, moved, bytes_text(num_bytes), seconds_text(time_s / count), seconds_text(wait_s / count), hidden])
    columns = ("for", "collective", "axis", ">count", ">bytes", ">time", ">waited", ">hidden")
    return table_text(columns, rows, width=width)


def compared_text(what: str, rows: Sequence[Compared], *, width: int = 100, footer: Compared | None = None) -> str:
    """Predicted beside measured."""

    def cells(row: Compared) -> list[str]:
        ratio = f"{row.measured_s / row.predicted_s:.2f}" if row.predicted_s else "-"
        sign = "-" if row.surprise_s < 0 else "+"
        return [row.name, seconds_text(row.predicted_s), seconds_text(row.measured_s), sign + seconds_text(abs(row.surprise_s)), ratio]

    columns = (what, ">predicted", ">measured", ">surprise", ">ratio")
    return table_text(columns, map(cells, rows), width=width, footer=cells(footer) if footer is not None else (), wide=(what,))


def record_text(recording: Recording, plan: Plan, *, width: int = 100) -> str:
    """What ``print(record)`` shows."""
    if not recording.steps:
        return f"rank {recording.rank}: no steps were recorded"
    *phases, step = compare_phases(recording, plan)
    collectives = compare_collectives(recording, plan)[:NUM_SURPRISES]
    steps = number_text(len(recording.steps), "step")
    sections = [
        f"rank {recording.rank}, {steps}: seconds of a step",
        compared_text("phase", phases, width=width, footer=step),
        totals_text(recording, width=width) if recording.events else "no communication",
        compared_text("collective", collectives, width=width) if collectives else "",
    ]
    return "\n\n".join(section for section in sections if section)
