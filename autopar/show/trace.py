"""Recorded steps of some ranks as a Chrome trace, which Perfetto and ``chrome://tracing`` open: a process for every rank.

The format is that of "Trace Event Format" (Google, 2016): complete events (``X``) with times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopar.measured import Recording
from autopar.show.record import some_text

_STEPS, _COMPUTE, _FIRST = 0, 1, 2


def trace_json(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The trace.

    Args:
        recordings: one for each rank; their origins are on one clock.
    """
    origin_s = min((recording.origin_s for recording in recordings), default=0.0)
    events = [event for recording in recordings for event in _of_rank(recording, recording.origin_s - origin_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_rank(recording: Recording, late_s: float) -> Iterator[dict[str, Any]]:
    def at(start_s: float, end_s: float) -> dict[str, float]:
        return {"ts": (late_s + start_s) * 1e6, "dur": max(end_s - start_s, 0.0) * 1e6}

    own = {"pid": recording.rank}
    yield {**own, "ph": "M", "name": "process_name", "args": {"name": f"rank {recording.rank}"}}
    yield {**own, "ph": "M", "name": "process_sort_index", "args": {"sort_index": recording.rank}}
    lanes = _Lanes()
    for number, (start_s, end_s) in enumerate(recording.steps):
        yield {**own, "ph": "X", "tid": _STEPS, "name": f"step {number}", "cat": "step", **at(start_s, end_s)}
    for span in recording.spans:
        where = {"stage": span.stage, "microbatch": span.microbatch}
        yield {**own, "ph": "X", "tid": _COMPUTE, "name": span.name, "cat": span.phase, **at(span.start_s, span.end_s), "args": where}
    for event in recording.events:
        lane = lanes.take(event.axis, event.start_s, event.end_s)
        args: dict[str, Any] = {
            "values": list(event.values),
            "num_bytes": event.num_bytes,
            "dtype": event.dtype,
            "waited_us": event.wait_s * 1e6,
            "beside": {name: time_s * 1e6 for name, time_s in event.overlapped},
            "stage": event.stage,
            "microbatch": event.microbatch,
        }
        name = f"{event.kind} {some_text(event.values)}"
        yield {**own, "ph": "X", "tid": lane, "name": name, "cat": event.phase, **at(event.start_s, event.end_s), "args": args}
    for tid, name in ((_STEPS, "steps"), (_COMPUTE, "compute"), *lanes.names()):
        yield {**own, "ph": "M", "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {**own, "ph": "M", "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


class _Lanes:
    """Rows for communication of each axis, as many as there is at one time: events of a row must not overlap."""

    def __init__(self) -> None:
        self._free_s: list[tuple[str, float]] = []

    def take(self, axis: str, start_s: float, end_s: float) -> int:
        for i, (other, free_s) in enumerate(self._free_s):
            if other == axis and free_s <= start_s:
                self._free_s[i] = axis, end_s
                return _FIRST + i
        self._free_s.append((axis, end_s))
        return _FIRST + len(self._free_s) - 1

    def names(self) -> Iterator[tuple[int, str]]:
        yield from ((_FIRST + i, f"communication {axis}") for i, (axis, _) in enumerate(self._free_s))
