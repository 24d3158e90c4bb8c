"""What moves in the memory of a step, and what lies there all along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.cost.simulate import Event, Timeline
from autopar.document import Plan
from autopar.schedule.actions import COMPUTE, Kind
from autopar.show.memory import KINDS, memory_at, memory_by_kind
from autopar.show.timeline import play
from tests.show.test_timeline import WAYS, planned

MIB = 2**20


def curve(plan: Plan, kind: str, rank: int = 0) -> Callable[[float], float]:
    """Bytes of a kind by time."""
    rows = memory_by_kind(plan, play(plan))[rank]
    return lambda at_s: [held[KINDS.index(kind)] for time_s, held in rows if time_s <= at_s][-1]


def computed(timeline: Timeline, rank: int, *kinds: Kind) -> list[Event]:
    wanted = kinds or COMPUTE
    return [e for e in timeline.events if e.rank == rank and e.action is not None and e.action.kind in wanted]


def with_memory(plan: Plan, **num_bytes: int) -> Plan:
    """Stages alike, each with this at its peak, and 1 MiB kept of a micro-batch."""
    stages = tuple(
        replace(s, memory_bytes=dict.fromkeys(KINDS, 0) | num_bytes, kept_bytes=MIB, left_bytes=MIB // 4) for s in plan.stages
    )
    live = sum(num_bytes.values())
    return replace(plan, stages=stages, prediction=replace(plan.prediction, peak_memory_bytes=(live,) * plan.pipeline.degree))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_come_with_the_first_backward(name: str) -> None:
    plan = with_memory(planned(name), parameters=5 * MIB, gradients=3 * MIB, activations=20 * MIB)
    for rank in range(plan.pipeline.degree):
        gradients, parameters = curve(plan, "gradients", rank), curve(plan, "parameters", rank)
        timeline = play(plan)
        first = min(e.start_s for e in computed(timeline, rank, Kind.BACKWARD, Kind.INPUT))
        assert gradients(0.0) == gradients(first * (1 - 1e-9)) == 0
        assert gradients(first) == gradients(timeline.step_time_s) == 3 * MIB
        assert parameters(0.0) == parameters(timeline.step_time_s) == 5 * MIB


def test_copies_of_zero3_are_there_while_a_stage_computes() -> None:
    plan = planned("1f1b")
    plan = replace(plan, parameters=tuple(replace(p, held=("Z3", *p.held[1:])) for p in plan.parameters))
    plan = with_memory(plan, gathered=7 * MIB, activations=9 * MIB)
    timeline = play(plan)
    gathered = curve(plan, "gathered", 1)
    events = computed(timeline, 1)
    assert all(gathered(e.start_s) == gathered((e.start_s + e.end_s) / 2) == 7 * MIB for e in events)
    assert gathered(events[0].start_s / 2) == gathered(events[-1].end_s) == 0


def test_copies_of_zero2_are_there_while_a_micro_batch_is_in_flight() -> None:
    plan = planned("1f1b")
    plan = replace(plan, parameters=tuple(replace(p, held=("Z2", *p.held[1:])) for p in plan.parameters))
    plan = with_memory(plan, gathered=MIB, activations=9 * MIB)
    timeline, live = play(plan), plan.stages[0].live
    gathered = curve(plan, "gathered")
    forwards = computed(timeline, 0, Kind.FORWARD)
    assert live == 2 < len(forwards)
    second = forwards[1].start_s
    assert [gathered(0.0), gathered(second), gathered(timeline.step_time_s)] == [MIB / 2, MIB, 0]


def test_copies_of_several_levels_lie_flat() -> None:
    plan = planned("1f1b")
    held = ["Z3", *["Z1"] * (len(plan.parameters) - 1)]
    plan = replace(plan, parameters=tuple(replace(p, held=(h,), stages=(0,)) for p, h in zip(plan.parameters, held, strict=True)))
    plan = with_memory(plan, gathered=7 * MIB, activations=9 * MIB)
    assert {held[KINDS.index("gathered")] for _, held in memory_by_kind(plan, play(plan))[0]} == {7 * MIB}


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_less_than_nothing_and_all_that_came_goes(name: str) -> None:
    plan = planned(name)
    timeline = play(plan)
    for rows, total in zip(memory_by_kind(plan, timeline), memory_at(plan, timeline), strict=True):
        assert [sum(held) for _, held in rows] == [num_bytes for _, num_bytes in total]
        assert min(num_bytes for _, held in rows for num_bytes in held[:-1]) >= 0
        first, last = (dict(zip(KINDS, held, strict=True)) for held in (rows[0][1], rows[-1][1]))
        assert last["activations"] <= first["activations"]
        assert (last["parameters"], last["optimizer"]) == (first["parameters"], first["optimizer"])


def test_a_backward_in_two_frees_in_two() -> None:
    plan = with_memory(planned("zb-h1"), activations=20 * MIB)
    timeline = play(plan)
    activations = curve(plan, "activations", 3)
    still = activations(timeline.step_time_s)
    for event in computed(timeline, 3):
        at_s = (event.start_s + event.end_s) / 2
        begun = sum(e.start_s <= at_s for e in computed(timeline, 3, Kind.FORWARD))
        halved, ended = (sum(e.end_s <= at_s for e in computed(timeline, 3, kind)) for kind in (Kind.INPUT, Kind.WEIGHT))
        assert activations(at_s) == still + MIB * begun - MIB * 3 // 4 * halved - MIB // 4 * ended
