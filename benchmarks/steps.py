"""Times of training steps on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def step_times(step: Callable[[], object], steps: int, turns: int, before: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of a step, in so many turns of ``steps`` that are timed together; ``before`` is called before each turn."""
    times = []
    for _ in range(turns):
        before()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started_s) / steps)
    return times
