from __future__ import annotations

import pytest
from hypothesis import given, settings

from autopar.errors import PlanError
from autopar.schedule.actions import Action, Kind, Schedule
from autopar.schedule.lower import lower
from tests.schedule.grids import schedules


@pytest.mark.parametrize(
    "text, action",
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("12B34", Action(12, Kind.BACKWARD, 34)),
        ("0I1", Action(0, Kind.INPUT, 1)),
        ("0W1", Action(0, Kind.WEIGHT, 1)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("3RECV_B7", Action(3, Kind.RECV_B, 7)),
        ("2REDUCE", Action(2, Kind.REDUCE)),
        ("1GATHER", Action(1, Kind.GATHER)),
    ],
)
def test_an_action_prints_and_parses(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2GATHER0", "2F0 ", "-1F0", "2FORWARD0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is no action of a schedule"):
        Action.parse(text)


@given(schedules())
@settings(max_examples=30)
def test_a_schedule_prints_and_parses(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(str(lower(schedule))) == lower(schedule)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "starts with a line"),
        ("1f1b degree=2", "starts with a line"),
        ("1f1b degree=2 stages=2 microbatches=1\nrank 0: 0F0 0B0", "has 1 row;"),
        ("1f1b degree=1 stages=1 microbatches=1\nrank 1: 0F0 0B0", "line 2 .* must start with 'rank 0:'"),
        ("1f1b degree=1 stages=1 microbatches=1\nrank 0: 0F0 oops", "'oops' is no action"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        Schedule.parse(text)


def test_stages_are_looped_over_ranks() -> None:
    schedule = Schedule("empty", 2, 6, 1, ((), ()))
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 0, 1, 0, 1]
    assert schedule.stages_of(1) == (1, 3, 5)
