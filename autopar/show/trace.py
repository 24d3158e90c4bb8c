"""Steps, predicted or recorded, as a Chrome trace, which Perfetto and ``chrome://tracing`` open: a process for every rank.

The format is that of "Trace Event Format" (Google, 2016): complete events (``X``) and counters (``C``), with times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that lasts.

    Args:
        lane: the stream that it is on; what overlaps there stands in rows of its own.
        name, category, args: told of it.
        start_s, end_s: from when until when.
        is_inside: of the slice before it on its lane, below which it stands.
    """

    lane: str
    name: str
    category: str
    start_s: float
    end_s: float
    args: Mapping[str, object] = field(default_factory=dict)
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """What a rank did.

    Args:
        number, name: of the process in the trace.
        lanes: that stand first, in this order; others follow as they come.
        slices: in any order, but what is inside of another follows it.
        memory: (second, bytes from then on).
    """

    number: int
    name: str
    lanes: tuple[str, ...]
    slices: Sequence[Slice]
    memory: Sequence[tuple[float, float]] = ()


def trace_json(processes: Sequence[Process], about: Mapping[str, str] | None = None) -> str:
    """The text of a trace."""
    events = [event for process in processes for event in _of_process(process)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})})


def _of_process(process: Process) -> Iterator[dict[str, Any]]:
    own = {"pid": process.number}
    yield {**own, "ph": "M", "name": "process_name", "args": {"name": process.name}}
    yield {**own, "ph": "M", "name": "process_sort_index", "args": {"sort_index": process.number}}
    rows = _Rows(process.lanes)
    for each in process.slices:
        times = {"ts": each.start_s * 1e6, "dur": max(each.end_s - each.start_s, 0.0) * 1e6}
        told = {"name": each.name, "cat": each.category, "args": dict(each.args)}
        yield {**own, "ph": "X", "tid": rows.take(each), **told, **times}
    for at_s, num_bytes in process.memory:
        yield {**own, "ph": "C", "name": "memory", "ts": at_s * 1e6, "args": {"bytes": num_bytes}}
    for tid, name in rows.names():
        yield {**own, "ph": "M", "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {**own, "ph": "M", "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


class _Rows:
    """Rows of each lane, as many as there is at one time: events of a row must not overlap."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lanes = list(lanes)
        self._free_s = [float("-inf")] * len(lanes)
        self._used: set[int] = set()
        self._last: dict[str, int] = {}

    def take(self, each: Slice) -> int:
        row = self._last.get(each.lane) if each.is_inside else None
        if row is None:
            row = next((i for i, lane in enumerate(self._lanes) if lane == each.lane and self._free_s[i] <= each.start_s), None)
            if row is None:
                row = len(self._lanes)
                self._lanes.append(each.lane)
                self._free_s.append(0.0)
            self._free_s[row] = each.end_s
        self._last[each.lane] = row
        self._used.add(row)
        return row

    def names(self) -> Iterator[tuple[int, str]]:
        yield from ((row, lane) for row, lane in enumerate(self._lanes) if row in self._used)
