"""``torch.profiler`` beside a recorder: what torch itself did, on the clock of the record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from autopar.errors import PlanError
from autopar.measured import Profiled

MARK = "autopar: the clocks of record and profiler"
MARKS = 3
"""At the begin, and at the end; the first of a process takes long."""
MOST = 50_000
"""Ops and kernels that are kept of a rank, the longest of them."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Between which seconds of our clock an event of the profiler began, and ended."""

    before_s: float
    within_s: float
    after_s: float


class Profiling:
    """A profiler that runs from `start` to `stop`.

    Args:
        device: of the rank; of one with CUDA kernels are seen too.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._bounds: list[_Bounds] = []

    def start(self) -> None:
        """Begin; PlanError if another profiler is at work, beside which torch cannot have one."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise PlanError(
                "torch.profiler is at work already, and there is one at a time: leave it first, or use model.record() without "
                "profiler=True inside of it"
            )
        self._profile.start()
        self._mark()

    def stop(self) -> None:
        """End; what was seen is in `profiled`."""
        self._mark()
        self._profile.stop()

    @staticmethod
    def named(name: str) -> AbstractContextManager[object]:
        """What is done inside has a name among the profiler's events."""
        return record_function(name)

    def profiled(self, origin_s: float, steps: Sequence[tuple[float, float]]) -> tuple[tuple[Profiled, ...], int]:
        """What torch did in the steps, in order, and how many were left out.

        Args:
            origin_s: ``time.perf_counter`` at second 0 of the record.
            steps: begin and end of each, in seconds of the record.
        """
        events = self._profile.events() or []
        marks = [event for event in events if event.name == MARK and event.device_type == DeviceType.CPU]
        late_s = self._offset_s(marks) - origin_s
        threads: dict[int, str] = {}
        found = []
        for event in events:
            start_s, end_s = (late_s + us * 1e-6 for us in (event.time_range.start, event.time_range.end))
            if event.name != MARK and any(begin_s <= start_s <= until_s for begin_s, until_s in steps):
                found.append(Profiled(event.name, _lane(event, threads), start_s, end_s))
        kept = sorted(sorted(found, key=lambda each: each.time_s, reverse=True)[:MOST], key=lambda each: (each.start_s, -each.end_s))
        return tuple(kept), len(found) - len(kept)

    def _mark(self) -> None:
        for _ in range(MARKS):
            before_s = time.perf_counter()
            with record_function(MARK):
                within_s = time.perf_counter()
            self._bounds.append(_Bounds(before_s, within_s, time.perf_counter()))

    def _offset_s(self, marks: Sequence[FunctionEvent]) -> float:
        """What our clock shows more than the profiler's: in the middle of what all marks allow."""
        least, most = [], []
        for mark, bounds in zip(sorted(marks, key=lambda event: event.time_range.start), self._bounds, strict=True):
            start_s, end_s = mark.time_range.start * 1e-6, mark.time_range.end * 1e-6
            least += [bounds.before_s - start_s, bounds.within_s - end_s]
            most += [bounds.within_s - start_s, bounds.after_s - end_s]
        return float(max(least) + min(most)) / 2


def _lane(event: FunctionEvent, threads: dict[int, str]) -> str:
    if event.device_type != DeviceType.CPU:
        return f"kernels of device {event.device_index}"
    return threads.setdefault(event.thread, f"torch, thread {len(threads)}")
