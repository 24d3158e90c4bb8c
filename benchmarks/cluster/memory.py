"""Memory of this process: what its tensors take while something runs, and what the system says.

Tensors are counted by torch's CPU allocator: those that are there before, and every block that it gives and gets back meanwhile, which are
results of ops, what kernels want for themselves and what collectives lay together. What gloo, Python and libraries allocate by their own is
in the resident set alone.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch


class Change(NamedTuple):
    """A block that the allocator gave, or got back (fewer than 0 bytes)."""

    time_ns: int
    num_bytes: int


def held_bytes() -> int:
    """What all tensors of this process take now."""
    plain = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    storages = (each.untyped_storage() for each in plain)
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage.device.type == "cpu"}.values())


def changes_of(run: Callable[[], object]) -> list[Change]:
    """What the allocator does in a call, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [Change(event.start_ns(), event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]


def allocated_bytes(run: Callable[[], object]) -> int:
    """The most that tensors take at one time in a call."""
    return held_bytes() + max(accumulate((change.num_bytes for change in changes_of(run)), initial=0))


def status_bytes(key: str) -> int:
    """A figure of the process: ``VmRSS`` is what is resident now, ``VmHWM`` the most that was since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def forget_peak() -> None:
    """Let VmHWM begin anew, without what has been freed."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
