"""Steps as they run on this rank, recorded: graphs take their marks, groups are watched, and messages and the optimizer are timed.

A recorder runs the graphs of a step in place of `release.run_released`. While it is open, watched groups stand in for those of the mesh.
What it collects are moments of a clock; `runtime.resolve` makes spans and events of them when all is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.ops.collectives import group_name
from autopar.plan import Plan
from autopar.runtime.groups import activate, axis_groups, put_group
from autopar.runtime.marks import Marks, Track, mark
from autopar.runtime.optimizers import register_before_updates
from autopar.runtime.profiling import Profiling
from autopar.runtime.release import run_released
from autopar.runtime.transfer import Message, What
from autopar.runtime.watch import Clock, Ends, Flight, Moment, Watched, bytes_of, clock_of


@dataclass(frozen=True, slots=True)
class Where:
    """What a rank is at: number of the step, stage and micro-batch."""

    step: int = 0
    stage: int = 0
    microbatch: int = 0


@dataclass(slots=True)
class Run:
    """One run of a graph; ``flights`` are those of its collectives, by the region that starts each."""

    where: Where
    track: Track
    marks: Marks
    flights: dict[int, Seen] = field(default_factory=dict)

    @property
    def name(self) -> str:
        phases = [region.phase for region in self.track.regions[:1]]
        return " ".join([f"stage {self.where.stage}", *phases, f"{self.where.microbatch}"])

    @property
    def position(self) -> int:
        """The region that it is in."""
        return len(self.marks.times) - 1


@dataclass(frozen=True, slots=True)
class Seen:
    """A collective or message; fields as of `measured.Communication`."""

    where: Where
    kind: str
    axis: str
    phase: str
    values: tuple[str, ...]
    flight: Flight


@dataclass(frozen=True, slots=True)
class Timed:
    """A span that is in no graph; fields as of `measured.Span`."""

    where: Where
    name: str
    phase: str
    begin: Moment
    end: Moment


class Recorder:
    """What is recorded on this rank, from when it is made until it is closed.

    Args:
        device: of the rank.
        parameters: of the model; optimizers that hold others are not recorded.
        tracks: graphs with their marks, kept from one recorder to the next; None for those of this one alone.
        yields: whether another recorder of the same model may take its place.
        profiling: runs beside it, and is told what graphs are of.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Iterable[torch.Tensor],
        *,
        tracks: dict[fx.GraphModule, Track] | None = None,
        yields: bool = False,
        profiling: Profiling | None = None,
    ) -> None:
        self.clock: Clock = clock_of(device)
        self._ends = Ends(self.clock)
        self.yields = yields
        self.profiling = profiling
        self.runs: list[Run] = []
        self.seen: list[Seen] = []
        self.timed: list[Timed] = []
        self.steps: list[tuple[Moment, Moment]] = []
        self.plans: list[list[Plan]] = []
        self._where = Where()
        self._running: Run | None = None
        self._is_over = True
        self._is_open = True
        self._tracks: dict[fx.GraphModule, Track] = {} if tracks is None else tracks
        self._groups: dict[str, tuple[dist.ProcessGroup, Watched]] = {}
        self._own = {id(parameter) for parameter in parameters}
        self._update: Moment | None = None
        self._hooks = (register_before_updates(self._begin_update), register_optimizer_step_post_hook(self._end_update))

    # Before steps, and after

    def learn(self, graphs: Iterable[tuple[fx.GraphModule, str]], plan: Plan) -> None:
        """Put marks into graphs of a plan, given with their phases; other graphs run without."""
        parameters, modules = {entry.name for entry in plan.parameters}, {op.name: op.module or op.name for op in plan.ops}
        for module, phase in graphs:
            if module not in self._tracks:
                self._tracks[module] = mark(module, phase, parameters, modules)

    def watch(self, mesh: DeviceMesh) -> None:
        """See the collectives of the graphs that run on a mesh, from now on."""
        if not self._is_open:
            return
        for name, group in axis_groups(mesh).items():
            known_as = group_name(name)
            if known_as not in self._groups:
                self._groups[known_as] = group, Watched(group, name, self.clock, self._ends, self._take)
            put_group(known_as, self._groups[known_as][1])

    def close(self) -> None:
        """Let everything be as it was."""
        for name, (group, watched) in self._groups.items():
            if dist.distributed_c10d._resolve_process_group(name) is watched:  # type: ignore[attr-defined, arg-type]
                put_group(name, group)
        for hook in self._hooks:
            hook.remove()
        self._tracks = {}
        self._is_open = False

    # While they run

    def run(self, module: fx.GraphModule, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """`release.run_released`, with marks."""
        track = self._tracks.get(module)
        if track is None:
            return run_released(module, given)
        self._running = Run(self._where, track, Marks(self.clock, self._ends))
        self.runs.append(self._running)
        try:
            with nullcontext() if self.profiling is None else self.profiling.named(self._running.name):
                return list(track.module(given, self._running.marks))
        finally:
            self._running = None

    def begin_call(self, plan: Plan) -> None:
        """A call of the model by a plan: of the step that goes on, or of a new one if that is over."""
        now = self.clock.now()
        if self._is_over:
            self.steps.append((now, now))
            self.plans.append([])
            self._is_over = False
        self.plans[-1].append(plan)
        self._where = Where(len(self.steps) - 1)

    def end_part(self, *, is_over: bool = False) -> None:
        """A part of the step has ended; with ``is_over`` the next call is of another."""
        if self.steps and self._is_open:
            self.steps[-1] = self.steps[-1][0], self.clock.now()
            self._is_over = is_over

    def at(self, stage: int, microbatch: int) -> None:
        """What comes is of a stage and a micro-batch (-1: of none)."""
        self._where = Where(self._where.step, stage, max(microbatch, 0))

    @contextmanager
    def span(self, name: str, phase: str) -> Iterator[None]:
        """Time what is done inside."""
        begin = self.clock.now()
        yield
        self.timed.append(Timed(self._where, name, phase, begin, self.clock.now()))

    @contextmanager
    def blocking(self, kind: str, axis: str, phase: str, tensor: torch.Tensor, of: str) -> Iterator[None]:
        """Time a collective that is waited for inside; ``of`` is what moves."""
        begin = self.clock.now()
        yield
        end = self.clock.now()
        flight = Flight(object(), 1, tensor.nbytes, tensor.dtype, begin, end, [(begin, end)])
        self.seen.append(Seen(self._where, kind, axis, phase, (of,), flight))
        self.timed.append(Timed(self._where, f"{kind} of {of}", "wait", begin, end))

    def message(
        self, kind: str, phase: str, values: Sequence[str], start: Callable[[], Message]
    ) -> Callable[[What], list[torch.Tensor]]:
        """Start a message; gives what waits for it, as `Message.wait`.

        The end of one that tells nothing of it, as with gloo, is that of the wait, and of one that is sent, that of the call.
        """
        issued = self.clock.now()
        message = start()
        tensors = message.tensors
        flight = Flight(object(), 1, bytes_of(tensors), tensors[0].dtype if tensors else torch.uint8, issued)
        if not self._ends.follow(flight, message.works) and kind == "send":
            flight.ended = self.clock.now()
        if tensors:
            self.seen.append(Seen(self._where, kind, f"rank {message.peer}", phase, tuple(values), flight))

        def wait(what: What) -> list[torch.Tensor]:
            begin = self.clock.now()
            result = message.wait(what)
            flight.waits.append((begin, self.clock.now()))
            self.timed.append(Timed(self._where, f"wait for rank {message.peer}", "idle", *flight.waits[-1]))
            return result

        return wait

    def _take(self, axis: str, flight: Flight) -> None:
        """A collective of a watched group, which the region that runs has started."""
        if self._running is None:
            return  # a graph without marks
        region = self._running.track.regions[self._running.position]
        seen = Seen(self._running.where, region.kind, axis, region.phase, region.values, flight)
        self._running.flights[self._running.position] = seen
        self.seen.append(seen)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._update = self.clock.now()

    def _end_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._update is not None and self._is_ours(optimizer):
            self.timed.append(Timed(self._where, type(optimizer).__name__, "update", self._update, self.clock.now()))
            self._update = None
            self.end_part(is_over=True)


Runner = Callable[[fx.GraphModule, list[torch.Tensor]], list[torch.Tensor]]
"""Runs a graph as `release.run_released` does."""


def runner(mesh: DeviceMesh, recorder: Recorder | None) -> Runner:
    """Let the group names of graphs mean the groups of a mesh; gives what runs them there."""
    activate(mesh)
    if recorder is None:
        return run_released
    recorder.watch(mesh)
    return recorder.run
