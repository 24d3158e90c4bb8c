"""What lies in memory over the step that is played, by kind, from what the plan holds: of each stage its peak by kind, and what it keeps.

| kind                  | there                                                                                              |
|-----------------------|----------------------------------------------------------------------------------------------------|
| parameters, optimizer | all the step                                                                                       |
| gradients             | from the first backward of the stage on, as much as at the peak                                    |
| gathered, of ZeRO-3   | while the stage computes                                                                           |
| gathered, of ZeRO-2   | of each of several micro-batches, from its forward to its backward                                 |
| gathered, of others   | all the step; so where a stage has copies of several levels, whose parts the plan does not tell    |
| activations           | of each micro-batch what is kept for its backward; all the step what is there beside it at the peak |

How much of it there is inside of an action the plan tells of the peak alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

from autopar.cost.simulate import Event, Timeline
from autopar.plan import Plan, StagePlan
from autopar.schedule.actions import COMPUTE, Kind

KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations")
"""In the order of `memory_by_kind`."""

Change = tuple[float, str, float]
"""A moment in seconds, and how many bytes of a kind come or go."""


def memory_by_kind(plan: Plan, timeline: Timeline) -> list[list[tuple[float, tuple[float, ...]]]]:
    """For each rank (time, bytes from then on by `KINDS`), which together reach the predicted peak.

    On a rank with several stages the peaks of these are not at one time; what is too much by that is taken off its activations.
    """
    degree = len(timeline.busy_s)
    found = []
    for rank, peak in zip(range(degree), plan.prediction.peak_memory_bytes, strict=True):
        changes = [change for s in range(rank, len(plan.stages), degree) for change in _changes(plan, s, timeline)]
        rows = list(_summed(changes))
        too_much = max(sum(held) for _, held in rows) - peak
        found.append([(at_s, (*held[:-1], held[-1] - too_much)) for at_s, held in rows])
    return found


def memory_at(plan: Plan, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """For each rank (time, bytes from then on), which reach the predicted peak."""
    return [[(at_s, sum(held)) for at_s, held in rows] for rows in memory_by_kind(plan, timeline)]


def _summed(changes: list[Change]) -> Iterator[tuple[float, tuple[float, ...]]]:
    held = dict.fromkeys(KINDS, 0.0)
    for at_s, group in groupby(sorted(changes, key=lambda change: change[0]), lambda change: change[0]):
        for _, kind, num_bytes in group:
            held[kind] += num_bytes
        yield at_s, tuple(held.values())


def _changes(plan: Plan, stage: int, timeline: Timeline) -> Iterator[Change]:
    """Of a stage, the first of them at the begin of the step."""
    own = plan.stages[stage]
    computed = [e for e in timeline.events if e.action is not None and e.action.stage == stage and e.action.kind in COMPUTE]
    backwards = [event.start_s for event in computed if _kind(event) is not Kind.FORWARD]
    levels = {symbol for p in plan.parameters if stage in p.stages for symbol in p.held if symbol.startswith("Z")}
    still = defaultdict[str, float](float, own.memory_bytes)
    copies = 0.0
    if levels == {"Z2"} and plan.pipeline.microbatches > 1 and own.live:
        copies = still.pop("gathered", 0.0) / own.live
    still["activations"] -= own.live * (own.kept_bytes - copies)
    if backwards:
        yield min(backwards), "gradients", still.pop("gradients", 0.0)
        yield from _kept(own, computed, copies)
    if levels == {"Z3"}:
        gathered = still.pop("gathered", 0.0)
        for event in computed:
            yield event.start_s, "gathered", gathered
            yield event.end_s, "gathered", -gathered
    yield from ((0.0, kind, still[kind]) for kind in KINDS)


def _kept(own: StagePlan, computed: list[Event], copies: float) -> Iterator[Change]:
    """What each micro-batch has from its forward to its backward, of which the second part of one in two needs less."""
    activations = own.kept_bytes - copies
    for event in computed:
        kind = _kind(event)
        if kind is Kind.FORWARD:
            yield event.start_s, "activations", activations
            yield event.start_s, "gathered", copies
        elif kind is Kind.WEIGHT:
            yield event.end_s, "activations", -own.left_bytes
        else:
            yield event.end_s, "activations", -activations + (own.left_bytes if kind is Kind.INPUT else 0.0)
            yield event.end_s, "gathered", -copies


def _kind(event: Event) -> Kind:
    assert event.action is not None
    return event.action.kind
