from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from autopar.errors import PlanError
from autopar.schedule.actions import COMPUTE, Action, Kind, Schedule
from autopar.schedule.check import check, deadlock_free, play_order
from autopar.schedule.lower import lower
from autopar.schedule.tables import forward_only, make_schedule
from tests.schedule.grids import schedules


@pytest.mark.parametrize("name, degree, stages", [("1f1b", 3, 3), ("zb-h1", 2, 2), ("interleaved", 2, 4), ("gpipe", 1, 2)])
def test_small_lowered_tables(golden: Callable[[str, str], None], name: str, degree: int, stages: int) -> None:
    golden(f"schedule/lowered_{name}_{degree}_{stages}", str(lower(make_schedule(name, degree=degree, stages=stages, microbatches=3))))


@given(schedules())
@settings(max_examples=60)
def test_a_lowered_table_is_right_and_computes_in_the_same_order(schedule: Schedule) -> None:
    lowered = lower(schedule)
    check(lowered)
    assert deadlock_free(lowered, buffered=True)
    for before, after in zip(schedule.ranks, lowered.ranks, strict=True):
        assert before == tuple(action for action in after if action.kind in COMPUTE)


@given(schedules())
@settings(max_examples=60)
def test_receives_are_posted_a_computation_early_and_sends_at_once(schedule: Schedule) -> None:
    for row in lower(schedule).ranks:
        for place, action in enumerate(row):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                assert (row[place - 1].stage, row[place - 1].microbatch) == (action.stage, action.microbatch)
                assert row[place - 1].kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                uses = (Kind.FORWARD,) if action.kind is Kind.RECV_F else (Kind.BACKWARD, Kind.INPUT)
                used = next(i for i, a in enumerate(row) if (a.stage, a.microbatch) == (action.stage, action.microbatch) and a.kind in uses)
                computed = sum(a.kind in COMPUTE for a in row[:used])
                assert sum(a.kind in COMPUTE for a in row[place:used]) >= min(1, computed)


@given(schedules())
@settings(max_examples=60)
def test_gathers_come_before_and_reductions_after_a_stage(schedule: Schedule) -> None:
    for rank, row in enumerate(lower(schedule).ranks):
        for stage in schedule.stages_of(rank):
            computed = [i for i, action in enumerate(row) if action.stage == stage and action.kind in COMPUTE]
            gathered = row.index(Action(stage, Kind.GATHER))
            assert gathered < computed[0]
            assert all(action.kind not in COMPUTE or action.stage < stage for action in row[:gathered])
            if schedule.has_backward:
                between = row[computed[-1] + 1 : row.index(Action(stage, Kind.REDUCE))]
                assert all(action.kind is Kind.SEND_B for action in between)


def test_gathers_and_reductions_may_be_left_out() -> None:
    bare = lower(make_schedule("1f1b", degree=2, stages=2, microbatches=2), gather=False, reduce=False)
    kinds = {action.kind for row in bare.ranks for action in row}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
    assert not any(action.kind is Kind.REDUCE for row in lower(forward_only(2, 4, 2)).ranks for action in row)


@given(schedules())
@settings(max_examples=60)
def test_one_stage_per_rank_needs_no_buffers(schedule: Schedule) -> None:
    """Looped tables do: rank 0 posts what comes round only when all its first stage is done."""
    if schedule.stages == schedule.degree:
        assert deadlock_free(schedule, buffered=False)


def test_a_looped_table_needs_buffers() -> None:
    schedule = make_schedule("gpipe", degree=2, stages=4, microbatches=4)
    assert deadlock_free(schedule, buffered=True)
    assert not deadlock_free(schedule, buffered=False)


@given(schedules())
@settings(max_examples=60)
def test_play_order_has_every_action_after_what_it_needs(schedule: Schedule) -> None:
    order = {action: i for i, action in enumerate(play_order(schedule))}
    assert len(order) == sum(map(len, schedule.ranks))
    for action, at in order.items():
        stage, k = action.stage, action.microbatch
        if action.kind is Kind.FORWARD and stage > 0:
            assert order[Action(stage - 1, Kind.FORWARD, k)] < at
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            assert order[Action(stage, Kind.FORWARD, k)] < at
            if stage + 1 < schedule.stages:
                assert order[Action(stage + 1, action.kind, k)] < at
        if action.kind is Kind.WEIGHT:
            assert order[Action(stage, Kind.INPUT, k)] < at


def test_lower_refuses_what_is_lowered_or_incomplete() -> None:
    with pytest.raises(PlanError, match="0GATHER already"):
        lower(lower(make_schedule("1f1b", degree=2, stages=2, microbatches=2)))
    with pytest.raises(PlanError, match="what 0F0 computes is used by no action of rank 1"):
        lower(Schedule.parse("mine degree=2 stages=2 microbatches=1\nrank 0: 0F0 0B0\nrank 1: 1B0"))
