"""What lies in memory over the step that is played, by kind, from what the plan holds of each stage and of the pieces of its actions.

| kind                  | there                                                                                                       |
|-----------------------|-------------------------------------------------------------------------------------------------------------|
| parameters, optimizer | all the step                                                                                                |
| gradients             | as the first backward of the stage makes them, one by one; then all of them; after the last what they become |
| gathered              | copies of ZeRO-3 about their use; of ZeRO-2 as micro-batches are in flight; of others until all is computed |
| activations           | of a micro-batch as its forward makes and its backward takes them; of each that is in flight what is kept   |
| buffers               | outputs all the step; whole gradients until they are reduced; what joins outputs; what the optimizer takes  |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby

from autopar.cost.simulate import Event, Timeline
from autopar.plan import Plan, StagePlan
from autopar.resident import NOTHING, Resident
from autopar.schedule.actions import COMPUTE, Action, Kind
from autopar.show.inside import COMPUTE as COMPUTES
from autopar.show.inside import play_inside

KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "buffers")
"""In the order of `memory_by_kind`."""
MOST_ROWS = 1000
"""Of a rank, about: a picture is not wider."""

Change = tuple[float, str, float]
"""A moment in seconds, and how many bytes of a kind come or go."""
Row = tuple[float, tuple[float, ...]]
"""A moment in seconds, and bytes from then on by `KINDS`."""


def memory_by_kind(plan: Plan, timeline: Timeline) -> list[list[Row]]:
    """For each rank its rows, which together reach the predicted peak.

    Where the plan counts more than is there at any one moment, as where several stages have their peaks, that is put right in activations.
    Of more than `MOST_ROWS` moments those are told that have most and least of their neighbours.
    """
    degree = len(timeline.busy_s)
    found = []
    for rank, peak in zip(range(degree), plan.prediction.peak_memory_bytes, strict=True):
        rows = list(_summed(_changes_of_rank(plan, rank, timeline)))
        too_much = max(sum(held) for _, held in rows) - peak
        at = KINDS.index("activations")
        found.append([(at_s, (*held[:at], held[at] - too_much, *held[at + 1 :])) for at_s, held in _thinned(rows)])
    return found


def memory_at(plan: Plan, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """For each rank (time, bytes from then on), which reach the predicted peak."""
    return [[(at_s, sum(held)) for at_s, held in rows] for rows in memory_by_kind(plan, timeline)]


def _summed(changes: Iterable[Change]) -> Iterator[Row]:
    held = dict.fromkeys(KINDS, 0.0)
    for at_s, group in groupby(sorted(changes, key=lambda change: change[0]), lambda change: change[0]):
        for _, kind, num_bytes in group:
            held[kind] += num_bytes
        yield at_s, tuple(held.values())


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """The first, the last, and of each few neighbours the fullest and the emptiest."""
    together = -(-len(rows) // (MOST_ROWS // 2))
    if together <= 2:
        return list(rows)
    kept = {0, len(rows) - 1}
    for begin in range(0, len(rows), together):
        few = range(begin, min(begin + together, len(rows)))
        kept |= {max(few, key=lambda i: sum(rows[i][1])), min(few, key=lambda i: sum(rows[i][1]))}
    return [rows[i] for i in sorted(kept)]


def _changes_of_rank(plan: Plan, rank: int, timeline: Timeline) -> Iterator[Change]:
    """The first of them are at the begin of the step."""
    own = [event for event in timeline.events if event.rank == rank]
    computed = [(event, event.action) for event in own if event.action is not None and event.action.kind in COMPUTE]
    end_s = max(event.end_s for event, _ in computed)
    updates = [event.start_s for event in own if event.action is None]
    stages = plan.stages[rank :: len(timeline.busy_s)]
    for number, stage in zip(range(rank, len(plan.stages), len(timeline.busy_s)), stages, strict=True):
        is_plain = plan.pipeline.stages == plan.pipeline.microbatches == 1  # copies are made one by one, and counted so
        copies = 0.0 if is_plain else stage.held.copies
        lasting = {kind: stage.memory_bytes[kind] for kind in ("parameters", "optimizer")}
        yield from ((0.0, kind, float(num_bytes)) for kind, num_bytes in lasting.items())
        yield 0.0, "gathered", copies
        yield 0.0, "buffers", stage.held.static - stage.held.copies - sum(lasting.values())
        yield from _computing(stage, [(event, action) for event, action in computed if action.stage == number])
        yield end_s, "gathered", -copies
        yield end_s, "gradients", -stage.held.gone
        yield end_s, "buffers", stage.held.end
    if updates:
        come = sum(stage.held.received + stage.held.together - stage.held.end for stage in stages)
        yield min(updates), "buffers", max(stage.held.update for stage in stages) + come


def _computing(stage: StagePlan, computed: Sequence[tuple[Event, Action]]) -> Iterator[Change]:
    """What the actions of a stage hold, and what there is between them."""
    reducing = [(event, action) for event, action in computed if action.kind in (Kind.BACKWARD, Kind.WEIGHT)]
    freed = {action.microbatch for _, action in reducing}
    copies = int(stage.held.kept_copies)
    kept, left = Resident(int(stage.held.kept) - copies, copies), Resident(int(stage.held.left))
    has_gradients = False
    for event, action in computed:
        before = {Kind.FORWARD: NOTHING, Kind.WEIGHT: left}.get(action.kind, kept)
        after = {Kind.FORWARD: kept if action.microbatch in freed else NOTHING, Kind.INPUT: left}.get(action.kind, NOTHING)
        for part in play_inside(stage.inside, action, event.start_s, event.end_s):
            piece = stage.inside[part.piece]
            if part.lane == COMPUTES and piece.is_compute:
                has_none = has_gradients or action.kind is Kind.INPUT  # of its own: those of weights come in W
                now = replace(piece.resident, gradients=0) if has_none else piece.resident
                yield from _between(part.start_s, before, now)
                before = now
        yield from _between(event.end_s, before, after)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT) and not has_gradients:
            yield event.end_s, "gradients", stage.held.gradients
            has_gradients = True
    if not reducing:  # nothing is trained
        return
    event, action = reducing[-1]
    yield event.start_s if action.kind is Kind.WEIGHT else event.end_s, "gradients", stage.held.coming  # as `schedule.held` counts


def _between(at_s: float, before: Resident, after: Resident) -> Iterator[Change]:
    for field in fields(Resident):
        if change := getattr(after, field.name) - getattr(before, field.name):
            yield at_s, field.name, float(change)
