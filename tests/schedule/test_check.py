from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.errors import PlanError
from autopar.schedule.actions import Schedule
from autopar.schedule.check import check, deadlock_free, peak_live, peak_live_by_rank, play_order
from autopar.schedule.lower import lower
from autopar.schedule.tables import make_schedule


def _two(row0: str, row1: str, *, microbatches: int = 1) -> Schedule:
    return Schedule.parse(f"mine degree=2 stages=2 microbatches={microbatches}\nrank 0: {row0}\nrank 1: {row1}")


@pytest.mark.parametrize(
    "row0, row1, complaint",
    [
        ("0F0", "1F0 1B0", "0B0 is missing on rank 0"),
        ("0F0 0I0", "1F0 1B0", "0W0 is missing on rank 0"),
        ("0F0 0B0 0I0", "1F0 1B0", "0I0 has no use"),
        ("0F0 0B0 0B0", "1F0 1B0", "0B0 stands twice"),
        ("0F0 0B0 1F0", "1B0", "1F0 stands on rank 0, but stage 1 runs on rank 1"),
        ("0F0 0B0 0F1", "1F0 1B0", "0F1 is no action of 2 stages and 1 micro-batch"),
        ("0F0 0B0 2F0", "1F0 1B0", "2F0 is no action"),
        ("0B0 0F0", "1F0 1B0", "0B0 stands before 0F0"),
        ("0F0 0W0 0I0", "1F0 1B0", "0W0 stands before 0I0"),
        ("0F0 0GATHER 0B0", "1GATHER 1F0 1B0", "0F0 stands before 0GATHER"),
        ("0GATHER 0F0 0B0", "1F0 1B0", "1GATHER is missing on rank 1"),
        ("0F0 0REDUCE 0B0", "1F0 1B0 1REDUCE", "0REDUCE stands before 0B0"),
        ("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0RECV_B0 is missing on rank 0"),
        ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 stands before 0F0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0", "1F0 stands before 1RECV_F0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_B0 has no use"),
    ],
)
def test_a_wrong_table(row0: str, row1: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check(_two(row0, row1))


def test_receives_out_of_order() -> None:
    wrong = _two("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", microbatches=2)
    assert deadlock_free(wrong)
    with pytest.raises(PlanError, match="1RECV_F1 stands where rank 0 sends what 1RECV_F0 receives; messages have no tags"):
        check(wrong)


def test_ranks_that_wait_for_each_other() -> None:
    wrong = _two("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
    with pytest.raises(PlanError, match="wait for each other forever: 0B0 on rank 0 for 1B0; 1F1 on rank 1 for 0F1"):
        play_order(wrong)
    assert not deadlock_free(wrong)


def test_sends_that_hold_up_their_ranks() -> None:
    crossed = _two(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    check(crossed)
    assert deadlock_free(crossed, buffered=True)
    assert not deadlock_free(crossed, buffered=False)


def test_the_error_shows_the_grid(golden: Callable[[str, str], None]) -> None:
    schedule = lower(make_schedule("1f1b", degree=4, stages=4, microbatches=6))
    row = list(schedule.ranks[2])
    at = row.index(next(action for action in row if str(action) == "2B3"))
    row[at], row[at - 3] = row[at - 3], row[at]
    wrong = Schedule("mine", 4, 4, 6, (*schedule.ranks[:2], tuple(row), schedule.ranks[3]))
    with pytest.raises(PlanError) as error:
        check(wrong)
    golden("schedule/error", str(error.value))


def test_a_wrong_number_of_rows() -> None:
    with pytest.raises(PlanError, match="has 1 row;"):
        check(Schedule("mine", 2, 2, 1, ((),)))
    with pytest.raises(PlanError, match="has 0 rows"):
        check(Schedule("mine", 0, 2, 1, ()))


def test_values_for_the_weights_stay_alive_after_the_input_gradient() -> None:
    schedule = Schedule.parse("mine degree=1 stages=1 microbatches=3\nrank 0: 0F0 0I0 0F1 0I1 0F2 0B2 0W0 0W1")
    check(schedule)
    assert peak_live(schedule) == peak_live_by_rank(schedule) == (3,)
