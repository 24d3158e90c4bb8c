"""Memory of this process: what its tensors take while something runs, and what the system says.

Tensors are counted by torch's CPU allocator: those that are there before, and every block that it gives and gets back meanwhile, which are
results of ops, what kernels want for themselves and what collectives lay together. What gloo, Python and libraries allocate by their own is
in the resident set alone.

torch's profiler does not see what threads of gloo free. Where one of them is the last that holds a block, the block seems to stay, until
its addresses are given away again. What is counted is too much by such blocks; of several calls the one that leaves least counts.
"""

from __future__ import annotations

import ctypes
import gc
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._profiler import _EventType, _ProfilerEvent

TRIES = 4


class Change(NamedTuple):
    """A block that the allocator gave, or got back (fewer than 0 bytes)."""

    time_ns: int
    num_bytes: int


def held_bytes() -> int:
    """What all tensors of this process take now."""
    plain = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided)
    storages = (each.untyped_storage() for each in plain)
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage.device.type == "cpu"}.values())


def changes_of(run: Callable[[], object]) -> list[Change]:
    """What the allocator does in a call, in order; the call is made `TRIES` times, and is to leave as much as it found."""
    return min((_changes_of(run) for _ in range(TRIES)), key=lambda changes: (_left(changes), _most(changes)))


def _left(changes: Iterable[Change]) -> int:
    return sum(change.num_bytes for change in changes)


def _most(changes: Iterable[Change]) -> int:
    return max(accumulate((change.num_bytes for change in changes), initial=0))


def _changes_of(run: Callable[[], object]) -> list[Change]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    changes: list[Change] = []
    starts: list[int] = []  # of the blocks that are there, in order
    sizes: dict[int, int] = {}
    for event in events:
        start, num_bytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        if num_bytes > 0:
            first, last = bisect_left(starts, start), bisect_left(starts, start + num_bytes)
            if first and starts[first - 1] + sizes[starts[first - 1]] > start:
                first -= 1
            changes += [Change(event.start_time_ns, -sizes.pop(gone)) for gone in starts[first:last]]
            del starts[first:last]
            insort(starts, start)
            sizes[start] = num_bytes
        elif start in sizes:
            starts.remove(start)
            del sizes[start]
        changes.append(Change(event.start_time_ns, num_bytes))
    return changes


def _allocations(events: Iterable[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    for event in events:
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event
        yield from _allocations(event.children)


def allocated_bytes(run: Callable[[], object]) -> int:
    """The most that tensors take at one time in a call."""
    return held_bytes() + _most(changes_of(run))


def status_bytes(key: str) -> int:
    """A figure of the process: ``VmRSS`` is what is resident now, ``VmHWM`` the most that was since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def forget_peak() -> None:
    """Let VmHWM begin anew, without what has been freed."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
