"""What was seen of real steps on a rank: what it computed and communicated, and when.

Seconds count from an origin that all spans and events of a `Recording` share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.errors import PlanError

FORMAT = 2
"""Version of the JSON of `Measured`."""
COMPUTE = ("forward", "backward", "update")
"""Phases of spans in which a rank computes."""
PURPOSES = ("gather", "forward", "backward", "reduce", "update")
"""What communication is for."""


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective or message, as a rank saw it.

    Args:
        step: number of the step, from 0.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send`` or ``receive``.
        axis: name of the mesh axis, ``world`` for all ranks, or the peer of a message as ``rank 3``.
        phase: what it is for: ``gather`` (of parameters), ``forward``, ``backward``, ``reduce`` (of their gradients), ``update``.
        values: parameters or ops, by their names in the plan, whose value or gradient moves; several in a bucket.
        num_bytes: of the whole buffer, on this rank.
        dtype: that travels.
        start_s: since when it runs; ``end_s``: until when.
        wait_s: for how long the rank did nothing but wait for it.
        overlapped: names of the spans that the rank computed while it ran, with seconds, most first.
        stage, microbatch: of the pipeline.
    """

    step: int
    kind: str
    axis: str
    phase: str
    values: tuple[str, ...]
    num_bytes: int
    dtype: str
    start_s: float
    end_s: float
    wait_s: float
    overlapped: tuple[tuple[str, float], ...] = ()
    stage: int = 0
    microbatch: int = 0

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def hidden_s(self) -> float:
        """For how long the rank computed while it ran."""
        return sum(time_s for _, time_s in self.overlapped)


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank was at for a while.

    Args:
        step: number of the step.
        name: module or op that was computed, or what was waited for.
        phase: ``forward``, ``backward``, ``wait`` (for a collective, or to start one), ``idle`` (waits for another stage), ``update``
            (the optimizer), ``clip``.
        start_s, end_s: from when until when.
        stage, microbatch: of the pipeline.
    """

    step: int
    name: str
    phase: str
    start_s: float
    end_s: float
    stage: int = 0
    microbatch: int = 0

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Profiled:
    """What ``torch.profiler`` saw: an op, a kernel, or a name that was given to a part of the step.

    Args:
        name: in torch.
        lane: its thread, or the device of a kernel.
        start_s, end_s: from when until when.
    """

    name: str
    lane: str
    start_s: float
    end_s: float

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Recording:
    """Some steps of one rank.

    Args:
        rank: whose.
        origin_s: the rank's clock at second 0.
        steps: start and end of each, from the first call of the model to the end of the optimizer's step.
        spans: in order; they do not overlap.
        events: in order of start.
        calls: of the model in each step: more than one where gradients accumulate.
        profiled: of ``record(profiler=True)``, in order of start; ``not_told`` more, the shortest, were left out.
    """

    rank: int
    origin_s: float
    steps: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]
    events: tuple[Communication, ...]
    calls: tuple[int, ...] = ()
    profiled: tuple[Profiled, ...] = ()
    not_told: int = 0

    def only(self, numbers: Sequence[int]) -> Recording:
        """Some of the steps, numbered anew."""
        new = {number: i for i, number in enumerate(numbers)}
        return replace(
            self,
            steps=tuple(self.steps[number] for number in numbers),
            spans=tuple(replace(span, step=new[span.step]) for span in self.spans if span.step in new),
            events=tuple(replace(event, step=new[event.step]) for event in self.events if event.step in new),
            calls=tuple(self.calls[number] for number in numbers),
            profiled=tuple(p for p in self.profiled if any(self.steps[n][0] <= p.start_s <= self.steps[n][1] for n in numbers)),
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of some ranks under one plan.

    Args:
        model, grid, graph_hash: of the plan (`plan.Plan`).
        recordings: of the ranks; their origins are on one clock.
    """

    model: str
    grid: str
    graph_hash: str
    recordings: tuple[Recording, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> Measured:
        """Inverse of `to_json`; PlanError if the text is no record of this version."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a record: the text is not JSON ({error})") from error
        found = data.pop("format", None) if isinstance(data, dict) else None
        if found != FORMAT or "recordings" not in data:
            raise PlanError(f"not a record of format {FORMAT} (found {found}); save one with record.save(path)")
        try:
            return Measured(data["model"], data["grid"], data["graph_hash"], tuple(map(_recording, data["recordings"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a whole record: {type(error).__name__} {error}; save one with record.save(path)") from error


def _recording(data: Mapping[str, Any]) -> Recording:
    events = [
        Communication(**event | {"values": tuple(event["values"]), "overlapped": tuple((name, s) for name, s in event["overlapped"])})
        for event in data["events"]
    ]
    spans = tuple(Span(**span) for span in data["spans"])
    steps = tuple((start_s, end_s) for start_s, end_s in data["steps"])
    profiled = tuple(Profiled(**each) for each in data["profiled"])
    return Recording(data["rank"], data["origin_s"], steps, spans, tuple(events), tuple(data["calls"]), profiled, data["not_told"])
