from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from autopar.errors import PlanError
from autopar.resident import StageBytes
from autopar.schedule.actions import Kind, Schedule
from autopar.schedule.check import check, peak_later, peak_live, peak_live_by_rank
from autopar.schedule.held import Sent, moments_of, peak_bytes
from autopar.schedule.lower import lower
from autopar.schedule.tables import SCHEDULES, forward_only, make_schedule
from tests.schedule.grids import schedules


@pytest.mark.parametrize(
    "name, degree, stages, microbatches",
    [("gpipe", 2, 4, 3), ("1f1b", 4, 4, 6), ("interleaved", 2, 4, 4), ("interleaved", 2, 4, 5), ("zb-h1", 4, 4, 6)],
)
def test_small_tables(golden: Callable[[str, str], None], name: str, degree: int, stages: int, microbatches: int) -> None:
    schedule = make_schedule(name, degree=degree, stages=stages, microbatches=microbatches)
    golden(f"schedule/{name}_{degree}_{stages}_{microbatches}", str(schedule))


@given(schedules())
def test_every_table_is_right(schedule: Schedule) -> None:
    check(schedule)


@given(schedules())
def test_gradients_are_summed_in_the_same_order_everywhere(schedule: Schedule) -> None:
    for row in schedule.ranks:
        for stage in range(schedule.stages):
            for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT):
                order = [action.microbatch for action in row if (action.stage, action.kind) == (stage, kind)]
                assert order == sorted(order)


@given(st.integers(1, 8), st.integers(1, 20))
def test_microbatches_alive_with_one_stage_per_rank(p: int, m: int) -> None:
    assert peak_live(make_schedule("gpipe", degree=p, stages=p, microbatches=m)) == (m,) * p
    assert peak_live(make_schedule("1f1b", degree=p, stages=p, microbatches=m)) == tuple(min(m, p - s) for s in range(p))
    assert peak_later(make_schedule("gpipe", degree=p, stages=p, microbatches=m)) == (m - 1,) * p
    assert peak_later(make_schedule("1f1b", degree=p, stages=p, microbatches=m)) == tuple(min(m - 1, p - s) for s in range(p))
    assert peak_live(make_schedule("zb-h1", degree=p, stages=p, microbatches=m)) == (min(m, p),) * p  # as stage 0 of 1F1B
    assert peak_live(forward_only(p, p, m)) == (0,) * p


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4))
def test_microbatches_alive_with_several_stages_per_rank(p: int, v: int, rounds: int) -> None:
    m = p * rounds
    assert peak_live_by_rank(make_schedule("gpipe", degree=p, stages=p * v, microbatches=m)) == (v * m,) * p
    alive = peak_live_by_rank(make_schedule("interleaved", degree=p, stages=p * v, microbatches=m))
    assert alive == tuple(min(v * m, (v - 1) * p + 2 * (p - r) - 1) for r in range(p))


@pytest.mark.parametrize(
    "name, degree, stages, microbatches, complaint",
    [
        ("dualpipe", 2, 2, 2, "no schedule 'dualpipe'; there are gpipe, 1f1b, interleaved, zb-h1"),
        ("gpipe", 0, 2, 2, "degree is 0"),
        ("gpipe", 2, 2, 0, "microbatches is 0"),
        ("gpipe", 4, 6, 2, "6 stages cannot be shared among 4 pipeline ranks: .* take 4 or 8 stages"),
        ("gpipe", 4, 2, 2, "take 4 stages"),
        ("1f1b", 2, 4, 2, "not 2, as of 4 stages on 2 ranks; take 2 stages, or 'interleaved'"),
        ("zb-h1", 2, 4, 2, "one stage on each rank"),
        ("interleaved", 2, 2, 2, "take 4 stages, or '1f1b'"),
    ],
)
def test_a_schedule_that_does_not_fit(name: str, degree: int, stages: int, microbatches: int, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        make_schedule(name, degree=degree, stages=stages, microbatches=microbatches)


def test_names() -> None:
    assert SCHEDULES == ("gpipe", "1f1b", "interleaved", "zb-h1")
    with pytest.raises(PlanError, match="microbatches is 0"):
        forward_only(2, 2, 0)


def _torch_row(schedule: Schedule, rank: int) -> list[str]:
    """What torch's private generators give for the same rank; methods of schedules that want real stages get a stand-in for them."""
    p, m, v = schedule.degree, schedule.microbatches, schedule.stages // schedule.degree
    own: Any = SimpleNamespace(pp_group_size=p, n_local_stages=v, _n_microbatches=m, _stages=[None] * v, rank=rank)
    own.microbatches_per_round = m // max(1, m // p)
    if schedule.name == "gpipe":
        row = theirs.ScheduleLoopedBFS._calculate_single_rank_operations(own, rank)
    elif schedule.name == "interleaved":
        row = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations(own, rank)
    elif schedule.name == "zb-h1":
        row = theirs.ScheduleInterleavedZeroBubble._calculate_single_rank_operations(own, rank)
    else:
        ahead = min(p - rank - 1, m)
        row = theirs._get_1f1b_rank_ops(1, p, ahead, m - ahead, ahead, rank, lambda _: rank, lambda _: rank)
    return [str(action) for action in row if action is not None]


def _gpipe_backwards_sorted(row: list[str]) -> list[str]:
    """Torch's GPipe with several stages does the backwards of a stage last micro-batch first."""
    forwards = [word for word in row if "F" in word]
    backwards = [word for word in row if "B" in word]
    stages = list(dict.fromkeys(word.split("B")[0] for word in backwards))
    return forwards + [f"{stage}B{k}" for stage in stages for k in range(len(backwards) // len(stages))]


@given(schedules())
def test_tables_equal_those_of_torch(schedule: Schedule) -> None:
    p, m = schedule.degree, schedule.microbatches
    assume(schedule.name != "forward")
    assume(schedule.name != "interleaved" or m % max(1, m // p) == 0)  # torch refuses other numbers
    for rank in range(p):
        row = _torch_row(schedule, rank)
        if schedule.name == "gpipe":
            row = _gpipe_backwards_sorted(row)
        assert [str(action) for action in schedule.ranks[rank]] == row


@given(schedules(), st.integers(0, 3))
def test_bytes_that_ranks_keep_at_a_time(schedule: Schedule, passing: int) -> None:
    """With stages alike, as many times what one keeps as micro-batches are alive; else no more than all stages at their most."""
    alike = peak_bytes(moments_of(schedule), [StageBytes(0.0, 2.0, 2.0, *[float(passing)] * 6)] * schedule.stages)
    assert alike == tuple(2.0 * live + passing for live in peak_live_by_rank(schedule))
    kept = [float(stage) for stage in range(schedule.stages)]
    most = [kept[stage] * live for stage, live in enumerate(peak_live(schedule))]
    for rank, peak in enumerate(peak_bytes(moments_of(schedule), [StageBytes(0.0, k, k, 0.0, 0.0) for k in kept])):
        assert max(most[rank :: schedule.degree]) <= peak <= sum(most[rank :: schedule.degree])


@pytest.mark.parametrize(
    "changed, peak",
    [
        ({}, 23),  # the first backward: static, kept twice, first
        ({"gradients": 9.0}, 25),  # the second, which is the last: static, kept once, gradients, last
        ({"end": 12.0}, 24),  # the end: static without copies, gradients, end
        ({"first": 0.0, "last": 4.0}, 23),
        ({"update": 20.0}, 32),  # the optimizer, when all else of the end is gone
        ({"update": 20.0, "received": 6.0}, 38),  # but for outputs of other ranks
        ({"received": 7.0, "update": 3.0, "gradients": 9.0}, 27),
        ({"together": 8.0, "update": 12.0}, 32),  # what it takes for one parameter, and for all
        ({"end": 15.0, "gone": 3.0}, 24),  # gradients are shards by then
        ({"end": 15.0, "coming": 3.0, "gone": 5.0}, 25),  # and these are what has come
        ({"update": 20.0, "gone": 4.0}, 28),
        ({"gradients": 9.0, "gone": 9.0, "coming": 0.0}, 25),  # the last backward, when they are still whole
    ],
)
def test_bytes_of_a_rank_by_hand(changed: dict[str, float], peak: float) -> None:
    stage = StageBytes(static=10.0, kept=5.0, left=5.0, first=3.0, later=1.0, last=1.0, gradients=4.0, copies=2.0, end=7.0)
    schedule = make_schedule("gpipe", degree=1, stages=1, microbatches=2)
    assert peak_bytes(moments_of(schedule), [replace(stage, **changed)]) == (peak,)


@pytest.mark.parametrize(
    "changed, peak",
    [
        ({}, 28),  # the first: static, kept three times, first
        ({"later": 6.0}, 30),  # the second: static, kept twice, gradients, later
        ({"last": 10.0}, 29),  # the third: static, kept once, gradients, last
        ({"coming": 90.0, "gone": 90.0}, 28),  # of which no other computes anything
    ],
)
def test_bytes_of_backwards_by_hand(changed: dict[str, float], peak: float) -> None:
    stage = StageBytes(static=10.0, kept=5.0, left=5.0, first=3.0, later=1.0, last=1.0, gradients=4.0)
    schedule = make_schedule("gpipe", degree=1, stages=1, microbatches=3)
    assert peak_bytes(moments_of(schedule), [replace(stage, **changed)]) == (peak,)


def test_what_reductions_make_is_there_while_other_stages_compute() -> None:
    """One rank with two stages: the last backward of the second is over before that of the first begins."""
    schedule = make_schedule("interleaved", degree=1, stages=2, microbatches=1)
    assert " ".join(map(str, schedule.ranks[0])) == "0F0 1F0 1B0 0B0"
    stages = [StageBytes(0.0, 0.0, 0.0, 0.0, 0.0, last=5.0), StageBytes(0.0, 0.0, 0.0, 0.0, 0.0, gradients=2.0, coming=1.0, gone=3.0)]
    assert peak_bytes(moments_of(schedule), stages) == (8.0,)


@pytest.mark.parametrize("kept, peak", [(0.0, 8.0), (2.0, 6.0)])
def test_messages_are_held_beside_what_is_computed(kept: float, peak: float) -> None:
    """In the middle of 1F1B a rank has the last message that it sent and the next one that comes; what it also keeps counts once."""
    schedule = lower(make_schedule("1f1b", degree=2, stages=2, microbatches=4))
    stages = [StageBytes(0.0, 0.0, 0.0, 0.0, 0.0, sent=kept), StageBytes(0.0, 0.0, 0.0, 0.0, 0.0)]
    assert peak_bytes(moments_of(schedule), stages, [Sent(forward=3.0), Sent(backward=5.0)]) == (peak, 8.0)
    alone = lower(make_schedule("1f1b", degree=2, stages=2, microbatches=1))
    # the receive is posted one computation early
    assert peak_bytes(moments_of(alone), stages, [Sent(forward=3.0), Sent(backward=5.0)]) == (5.0, 0.0)


@pytest.mark.parametrize(
    "changed, peak",
    [
        ({}, 22),  # I of the second: static, kept, and left of the first
        ({"inputs": 2.0}, 24),
        ({"first_weights": 7.0}, 25),  # W of the first: static, left twice
        ({"left": 2.0, "forward": 3.0}, 23),  # F of the second
        ({"later_weights": 9.0, "gradients": 1.0}, 24),  # W of the second
        ({"later_weights": 9.0, "gradients": 1.0, "coming": 2.0}, 26),  # which is the last
        ({"first": 50.0, "later": 50.0}, 22),  # of backwards that are whole
    ],
)
def test_bytes_of_a_rank_whose_backwards_are_in_two_parts_by_hand(changed: dict[str, float], peak: float) -> None:
    """Rank 1 of two, two micro-batches: F I F I W W."""
    stage = StageBytes(static=10.0, kept=8.0, left=4.0, first=0.0, later=0.0)
    schedule = make_schedule("zb-h1", degree=2, stages=2, microbatches=2)
    assert " ".join(map(str, schedule.ranks[1])) == "1F0 1I0 1F1 1I1 1W0 1W1"
    assert peak_bytes(moments_of(schedule), [replace(stage, **changed)] * 2)[1] == peak


def test_a_backward_of_inputs_leaves_what_weights_need() -> None:
    """Rank 1 of two, four micro-batches: F I, then F I beside what is left of the first, then W."""
    schedule = make_schedule("zb-h1", degree=2, stages=2, microbatches=4)
    kept, left = 8.0, 3.0
    whole, split = (peak_bytes(moments_of(schedule), [StageBytes(0.0, kept, each, 0.0, 0.0)] * 2) for each in (kept, left))
    assert whole == (2 * kept, 2 * kept)
    assert split == (2 * kept, kept + left)
