"""Timing calls on a device: medians of repeated runs; CUDA is timed with events after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Median seconds of one call, and (longest - shortest) / median over the repeats."""

    median_s: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median_s * 1e6:.1f} us, spread {self.spread:.0%}"


def time_calls(run: Callable[[], object], device: torch.device, *, calls: int | None = None, repeats: int = 5) -> Timing:
    """Time of one of ``calls`` calls in a row; by default as many as fill some 10 ms."""
    if calls is None:
        calls = max(1, min(200, round(0.01 / max(time_calls(run, device, calls=1, repeats=1).median_s, 1e-6))))
    run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
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
