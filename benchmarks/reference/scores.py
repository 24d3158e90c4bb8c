"""How good predictions are: errors and order by source, and of pairs of runs that differ in one setting."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from depth import Predicted
from records import Record
from table import kendall_tau

NOISE = 0.03
"""Pairs whose measured times differ by less say nothing about order: published noise is 4 to 6 %."""
SPREAD = 0.05
"""Standard deviation of published times; runs that differ by no more need not be ordered."""
DRAWS = 50
SETTINGS: dict[str, Callable[[Record], object]] = {
    "tp": lambda r: r.tp,
    "micro-batch": lambda r: r.micro_batch,
    "recompute": lambda r: r.recompute,
    "schedule": lambda r: r.vpp or 1,
    "sequence parallelism": lambda r: r.sequence_parallel,
    "ZeRO": lambda r: (r.zero, r.zero_ranks),
    "experts": lambda r: r.ep or r.usual_ep,
    "batch": lambda r: r.global_batch,
    "GPUs": lambda r: r.num_gpus,
}


class Row(NamedTuple):
    """A record, and what was predicted, or why nothing was."""

    record: Record
    predicted: Predicted | None
    why: str

    @property
    def times_s(self) -> tuple[float, float]:
        """Measured and predicted."""
        assert self.predicted is not None
        assert self.record.step_time_s is not None
        return self.record.step_time_s, self.predicted.step_time_s

    @property
    def error(self) -> float:
        measured, predicted = self.times_s
        return predicted / measured - 1


def scored(rows: Iterable[Row]) -> list[Row]:
    """Those that were both measured and predicted."""
    return [row for row in rows if row.predicted is not None and row.record.step_time_s is not None]


def table(rows: Sequence[Row]) -> str:
    """Figures by source, and of all."""
    groups = _by_source(rows)
    columns = ("source", "runs", "median", "mean", "bias", "tau (of true times)", f"tau beyond {SPREAD:.0%} (pairs)")
    columns += ("tau of a model (of true times)", "memory (runs)")
    lines = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 1)}|"]
    everything = [("all", scored(rows))] if groups else []
    for name, own in [*sorted(groups.items(), key=lambda item: -len(item[1])), *everything]:
        errors = [row.error for row in own]
        absolute = [abs(error) for error in errors]
        lines.append(
            f"| {name} | {len(own)} | {statistics.median(absolute):.1%} | {statistics.mean(absolute):.1%} | {statistics.mean(errors):+.1%} "
            f"| {_tau(own)} | {_tau_beyond(own)} | {_tau_of_models(own)} | {_memory(own)} |"
        )
    return "\n".join(lines)


def _tau(rows: Sequence[Row]) -> str:
    """Over all runs, by the seconds of a GPU for a token."""
    return _tau_of([list(map(_per_token, rows))])


def _tau_beyond(rows: Sequence[Row]) -> str:
    """The same over the pairs that differ by more than the spread: those in the right order less those in the wrong one, over all."""
    orders = [order for _, _, _, order in _apart(rows)]
    return f"{sum(orders) / len(orders):.2f} ({len(orders)})" if orders else "-"


def _apart(rows: Sequence[Row]) -> Iterator[tuple[Row, Row, float, int]]:
    """Pairs, the faster first, whose measured seconds of a GPU for a token differ by more than `SPREAD`: by how much, and whether they were
    predicted in this order (1), as equal (0) or in the other (-1)."""
    for fast, slow in combinations(sorted(rows, key=lambda row: _per_token(row)[0]), 2):
        (measured, predicted), (slow_measured, slow_predicted) = _per_token(fast), _per_token(slow)
        if slow_measured > (1 + SPREAD) * measured:
            yield fast, slow, slow_measured / measured - 1, (predicted < slow_predicted) - (predicted > slow_predicted)


def wrong_text(rows: Iterable[Row]) -> str:
    """Pairs of a source in the wrong order beyond the spread, a line each, the most different first."""
    groups = _by_source(rows)
    lines = []
    for name, own in groups.items():
        wrong = sorted((pair for pair in _apart(own) if pair[3] < 0), key=lambda pair: -pair[2])
        lines += [f"{name}: {difference:+.1%} {fast.record.id} before {slow.record.id}" for fast, slow, difference, _ in wrong]
    return "\n".join(lines)


def _by_source(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in scored(rows):
        groups[row.record.publisher].append(row)
    return groups


def _tau_of_models(rows: Sequence[Row]) -> str:
    """The same over the runs of one model on one kind of device, in the mean over those that have several, weighted by their number."""
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        r = row.record
        groups[r.source, r.dims.family, r.dims.hidden, r.dims.layers, r.gpu].append(_per_token(row))
    return _tau_of(list(groups.values()))


def _tau_of(groups: Sequence[Sequence[tuple[float, float]]]) -> str:
    """With what true times would have in brackets, if every measurement is off by `SPREAD`; of those that have an order."""
    several = [pairs for pairs in groups if len(pairs) > 2 and not math.isnan(kendall_tau(pairs))]
    if not several:
        return "-"
    draw = random.Random(0)
    remeasured = [[[(time, time * draw.lognormvariate(0, SPREAD)) for time, _ in pairs] for pairs in several] for _ in range(DRAWS)]
    return f"{_mean_tau(several):.2f} ({statistics.mean(map(_mean_tau, remeasured)):.2f})"


def _mean_tau(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    return sum(kendall_tau(list(pairs)) * len(pairs) for pairs in groups) / sum(map(len, groups))


def _memory(rows: Sequence[Row]) -> str:
    errors = [
        row.predicted.peak_memory_bytes / row.record.peak_memory_bytes - 1 for row in rows if row.predicted and row.record.peak_memory_bytes
    ]
    return f"{statistics.median(map(abs, errors)):.0%} ({len(errors)})" if errors else "-"


def pairs_text(rows: Iterable[Row]) -> str:
    """Of pairs that differ in one setting, how many are ordered right, by the seconds of a GPU for a token."""
    right: dict[str, list[bool]] = defaultdict(list)
    for a, b in combinations(scored(rows), 2):
        if a.record.dims != b.record.dims or a.record.gpu != b.record.gpu or a.record.source != b.record.source:
            continue
        differing = [name for name, value in SETTINGS.items() if value(a.record) != value(b.record)]
        if len(differing) != 1 or a.record.pp != b.record.pp:
            continue
        (ta, pa), (tb, pb) = map(_per_token, (a, b))
        if abs(ta / tb - 1) > NOISE:
            right[differing[0]].append((ta < tb) == (pa < pb))
    lines = [f"- only {name} differs: {sum(found)} of {len(found)} pairs ordered right" for name, found in right.items()]
    everything = [one for found in right.values() for one in found]
    return "\n".join([*lines, f"- all: {sum(everything)} of {len(everything)} ({sum(everything) / max(1, len(everything)):.0%})"])


def _per_token(row: Row) -> tuple[float, float]:
    """Seconds of a GPU for a token, measured and predicted."""
    scale = row.record.num_gpus / (row.record.global_batch * row.record.dims.seq)
    measured, predicted = row.times_s
    return measured * scale, predicted * scale
