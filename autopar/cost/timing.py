"""Timing calls on a device: medians of repeated runs; CUDA is timed with events after a warm-up.

What launches on CUDA runs ahead of the device or behind it. `time_calls` with ``ahead`` lets the device wait until all calls are enqueued,
so that their time is that of the device; without it the slower of the two counts. Between such bursts the device rests, as it does from
each kind of work in a training step: one that multiplied for long was slowed by its power limit, by an eighth on an H200.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

ROW_S, BURST_S, REST_S = 0.01, 0.002, 0.01
"""How long calls in a row are to take, those of a device that rests between, and how long it rests at least."""
CYCLES_PER_S = 3e9
"""Of a device that waits, by counting: faster than clocks are, so that it waits longer than it takes to enqueue."""


class Timing(NamedTuple):
    """Median seconds of one call, and (longest - shortest) / median over the repeats."""

    median_s: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median_s * 1e6:.1f} us, spread {self.spread:.0%}"


def time_calls(
    run: Callable[[], object], device: torch.device, *, calls: int | None = None, repeats: int = 5, ahead: bool = False
) -> Timing:
    """Time of one of ``calls`` calls in a row; by default as many as fill some ms.

    Args:
        run: the call.
        device: where it runs.
        calls: how many are timed together.
        repeats: how often.
        ahead: on CUDA, whether all are enqueued before the first runs.
    """
    ahead = ahead and device.type == "cuda"
    if calls is None:
        once_s = time_calls(run, device, calls=1, repeats=1, ahead=ahead).median_s
        calls = max(1, min(200, round((BURST_S if ahead else ROW_S) / max(once_s, 1e-6))))
    run()
    waited_s = REST_S + _enqueue_s(run, calls, device) if ahead else 0.0
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            if ahead:
                torch.cuda._sleep(round(waited_s * CYCLES_PER_S))
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / calls)
        else:
            start_s = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - start_s) / calls)
    median_s = statistics.median(times)
    return Timing(median_s, (max(times) - min(times)) / median_s)


def _enqueue_s(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds in which so many calls are launched, whenever they run."""
    torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start_s
