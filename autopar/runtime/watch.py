"""When collectives run: a process group that hands all on to another and sees when each is issued and ends.

Graphs find groups by name, so that a watched group stands in under the same name while steps are recorded, and nothing else changes.
The end of a collective is that of its future (`Ends`). Some have none (reduce-scatters and messages of gloo); these end when the rank has
waited for them.

(``torch.profiler`` sees the same begin and end, of each collective of gloo, but not what moves, and with it every op that runs; it hands
out what it saw only when it has stopped. `runtime.profiling` puts that beside.)

A clock gives *moments*, which are turned into seconds when all is over: seconds of the host, or events of the device's current stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

Moment = Any
"""What a clock gives."""


class Clock(Protocol):
    def now(self) -> Moment: ...

    def seconds(self, moment: Moment) -> float:
        """On the clock of the host (``time.perf_counter``)."""


class HostClock:
    """For ranks on CPUs, whose ops run when they are called."""

    now = staticmethod(time.perf_counter)

    def seconds(self, moment: float) -> float:
        return moment


class DeviceClock:
    """For ranks on CUDA: moments are events on the current stream."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first = self.now()
        torch.cuda.synchronize()
        self._first_s = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: torch.cuda.Event) -> float:
        moment.synchronize()
        elapsed_ms: float = self._first.elapsed_time(moment)
        return self._first_s + elapsed_ms / 1e3


def clock_of(device: torch.device) -> Clock:
    """That of a rank on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(slots=True)
class Flight:
    """A collective or message on its way.

    Args:
        group: whose it is; collectives of one group run as many at a time as it has ``lanes``, in the order in which they are issued.
        num_bytes: of the whole buffer.
        dtype: of it.
        issued: when.
        ended: when it was done; the first thing that knows it says so.
        waits: from when until when the rank waited for it.
    """

    group: object
    lanes: int
    num_bytes: int
    dtype: torch.dtype
    issued: Moment
    ended: Moment | None = None
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)


class Ends:
    """Learns when collectives end.

    NCCL completes a future on a stream of its own, on which the clock records an event. gloo does so in the thread that ran the
    collective, and a callback there would wait for Python's lock, with all collectives behind it: on CPUs the rank itself looks, between
    any two ops of a graph, so that an end is told late by an op at most.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._looks = clock, isinstance(clock, HostClock)
        self._awaited: list[tuple[Flight, Sequence[dist.Work]]] = []

    def follow(self, flight: Flight, works: Sequence[dist.Work]) -> bool:
        """Learn of the end of a flight from its works; False if they do not tell it."""
        try:
            futures = [work.get_future() for work in works]
        except RuntimeError:  # not implemented
            return False
        if not futures:
            return False
        if self._looks:
            self._awaited.append((flight, works))
            return True
        left = [len(futures)]

        def done(_: object) -> None:
            left[0] -= 1
            if left[0] == 0:
                flight.ended = self._clock.now()

        for future in futures:
            future.add_done_callback(done)
        return True

    def look(self) -> None:
        """See what has ended since the last time; called often."""
        if not self._awaited:
            return
        still = []
        for each in self._awaited:
            if all(work.is_completed() for work in each[1]):
                each[0].ended = self._clock.now()
            else:
                still.append(each)
        self._awaited = still


class Watched(dist.ProcessGroup):
    """A process group that tells of its collectives.

    Args:
        inner: the group that runs them.
        axis: name of its mesh axis.
        clock: gives moments.
        ends: is told of collectives.
        take: called with the axis and each collective, once it is issued.
    """

    def __init__(self, inner: dist.ProcessGroup, axis: str, clock: Clock, ends: Ends, take: Callable[[str, Flight], None]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._axis, self._clock, self._ends, self._take = inner, axis, clock, ends, take
        self._lanes = lanes_of(inner)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._issue(tensors, lambda: self.inner.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._issue(tensors, lambda: self.inner.allreduce_coalesced(tensors, opts))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._issue(outputs, lambda: self.inner.allgather_into_tensor_coalesced(outputs, inputs, opts))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._issue(inputs, lambda: self.inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts))

    def alltoall_base(  # type: ignore[override]
        self, output: Any, given: Any, output_sizes: Any, input_sizes: Any, opts: Any
    ) -> dist.Work:
        return self._issue([given], lambda: self.inner.alltoall_base(output, given, output_sizes, input_sizes, opts))

    def _issue(self, whole: Sequence[torch.Tensor], start: Callable[[], dist.Work]) -> dist.Work:
        flight = Flight(self.inner, self._lanes, bytes_of(whole), whole[0].dtype, self._clock.now())
        work = start()
        self._ends.follow(flight, [work])
        self._take(self._axis, flight)
        return work


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def lanes_of(group: dist.ProcessGroup) -> int:
    """How many collectives of a group run at a time: the threads of gloo (one, of those that graphs run on), the one stream of NCCL."""
    return int(getattr(group._get_backend(group._device_types[0]).options, "_threads", 1))
