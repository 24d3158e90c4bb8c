from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.simulate import StagePrice, Timeline, simulate, step_times_s
from autopar.errors import PlanError
from autopar.schedule.actions import COMPUTE, ONCE, Action, Kind, Schedule
from autopar.schedule.check import peak_live_by_rank
from autopar.schedule.lower import lower
from autopar.schedule.tables import forward_only, make_schedule
from tests.schedule.grids import schedules

EQUAL = StagePrice(forward_s=1.0, backward_s=2.0, input_s=1.0, weight_s=1.0)

WHOLE = st.integers(1, 9).map(float)  # sums of small whole numbers are exact
"""Seconds."""


def _play(name: str, p: int, m: int, price: StagePrice, *, v: int = 1) -> Timeline:
    return simulate(make_schedule(name, degree=p, stages=p * v, microbatches=m), [price] * (p * v))


def unequal(stages: int) -> st.SearchStrategy[list[StagePrice]]:
    seconds = st.integers(0, 5).map(float)
    return st.lists(st.tuples(*[seconds] * len(fields(StagePrice))).map(lambda row: StagePrice(*row)), min_size=stages, max_size=stages)


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, list[StagePrice]]:
    """A schedule with communication, and unequal stages."""
    schedule = draw(schedules(degrees=4, microbatches=8))
    return lower(schedule), draw(unequal(schedule.stages))


@given(priced(), st.data(), st.sampled_from([1.0, 2.0]))
def test_prices_side_by_side_give_the_times_that_each_gives(
    found: tuple[Schedule, list[StagePrice]], data: st.DataObject, sharing: float
) -> None:
    schedule, prices = found
    options = [prices, *data.draw(st.lists(unequal(schedule.stages), max_size=3))]
    assert step_times_s(schedule, options, sharing) == [simulate(schedule, each, sharing).step_time_s for each in options]


@given(st.integers(1, 8), st.integers(1, 20), WHOLE, WHOLE)
def test_bubble_of_gpipe_and_1f1b(p: int, m: int, forward_s: float, backward_s: float) -> None:
    price = replace(EQUAL, forward_s=forward_s, backward_s=backward_s)
    for name in ("gpipe", "1f1b"):
        timeline = _play(name, p, m, price)
        assert timeline.bubble_fraction == (p - 1) / (m + p - 1)
        assert timeline.step_time_s == (m + p - 1) * (forward_s + backward_s)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(0, 10), WHOLE, WHOLE)
@settings(max_examples=50)
def test_bubble_of_several_stages_per_rank(p: int, v: int, more: int, forward_s: float, backward_s: float) -> None:
    m, price = p + more, replace(EQUAL, forward_s=forward_s, backward_s=backward_s)
    for name in ("gpipe", "interleaved"):
        assert _play(name, p, m, price, v=v).bubble_fraction == (p - 1) / (v * m + p - 1)


@given(st.integers(1, 8), st.integers(0, 12), WHOLE, WHOLE, WHOLE)
def test_bubble_of_zb_h1(p: int, more: int, forward_s: float, input_s: float, weight_s: float) -> None:
    m, weight_s = p + more, min(weight_s, input_s, forward_s)
    idle = (p - 1) * (forward_s + input_s - weight_s)
    timeline = _play("zb-h1", p, m, replace(EQUAL, forward_s=forward_s, input_s=input_s, weight_s=weight_s))
    assert timeline.bubble_fraction == idle / (m * (forward_s + input_s + weight_s) + idle)


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b() -> None:
    assert _play("zb-h1", 4, 8, EQUAL).idle_s == (3.0,) * 4
    assert _play("1f1b", 4, 8, EQUAL).idle_s == (9.0,) * 4


def test_forwards_alone() -> None:
    timeline = simulate(forward_only(4, 4, 8), [replace(EQUAL, live_num_bytes=1.0)] * 4)
    assert timeline.step_time_s == 11.0
    assert timeline.bubble_fraction == 3 / 11
    assert timeline.peak_num_bytes == (0.0,) * 4


def test_the_optimizer_waits_for_outputs_of_other_stages() -> None:
    """Of four stages the last is done first, and the first last; each broadcasts when it has done all of its own."""
    schedule = make_schedule("1f1b", degree=4, stages=4, microbatches=2)
    updated = replace(EQUAL, update_s=1.0)
    prices = [updated] * 4
    assert _updates(simulate(schedule, prices)) == [16.0, 14.0, 12.0, 10.0]
    late = [*prices[:3], replace(updated, output_s=5.0)]
    assert _updates(simulate(schedule, late)) == [21.0, 19.0, 17.0, 15.0]
    early = [replace(updated, output_s=5.0), *prices[1:]]
    assert _updates(simulate(schedule, early)) == [21.0] * 4
    alone = simulate(make_schedule("1f1b", degree=1, stages=1, microbatches=2), [late[3]])
    assert _updates(alone) == [7.0]


def _updates(timeline: Timeline) -> list[float]:
    """When the optimizer of each rank is done."""
    return [event.end_s for event in timeline.events if event.action is None]


def _ends(schedule: Schedule, prices: list[StagePrice]) -> dict[Action, float]:
    """When every action ends, straight from the rules, by recursion; a SEND ends with its RECV."""
    previous: dict[tuple[Action, str], Action] = {}  # the one before it in a stream of its rank, or on its link
    links: dict[tuple[int, int], Action] = {}
    for rank, row in enumerate(schedule.ranks):
        last: dict[str, Action] = {}
        for action in row:
            previous |= {(action, stream): before for stream, before in last.items()}
            if action.kind in (*COMPUTE, *ONCE):
                last["compute" if action.kind in COMPUTE else "collective"] = action
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                link = rank, schedule.rank_of(action.stage + (1 if action.kind is Kind.SEND_F else -1))
                if link in links:
                    previous[action, "link"] = links[link]
                links[link] = action

    def seconds(action: Action) -> float:
        names = {Kind.FORWARD: "forward_s", Kind.BACKWARD: "backward_s", Kind.INPUT: "input_s", Kind.WEIGHT: "weight_s"}
        return float(getattr(prices[action.stage], names[action.kind]))

    def before(action: Action, *streams: str) -> float:
        return max((end(previous[action, s]) for s in streams if (action, s) in previous), default=0.0)

    @cache
    def end(action: Action) -> float:
        stage, kind, k = action.stage, action.kind, action.microbatch
        price, remote = prices[stage], schedule.degree > 1
        if kind is Kind.RECV_F or kind is Kind.RECV_B:
            return end(Action(stage - 1, Kind.SEND_F, k) if kind is Kind.RECV_F else Action(stage + 1, Kind.SEND_B, k))
        if kind is Kind.SEND_F:
            posted = before(Action(stage + 1, Kind.RECV_F, k), "compute")
            return max(before(action, "compute", "link"), posted) + price.send_forward_s
        if kind is Kind.SEND_B:
            posted = before(Action(stage - 1, Kind.RECV_B, k), "compute")
            return max(before(action, "compute", "link"), posted) + price.send_backward_s
        if kind is Kind.GATHER:
            return before(action, "compute", "collective") + price.gather_s
        if kind is Kind.REDUCE:
            computed = previous[action, "compute"]
            return max(end(computed) - min(price.covered_s, seconds(computed)), before(action, "collective")) + price.reduce_s
        start = before(action, "compute")
        if kind is Kind.FORWARD:
            start = max(start, end(Action(stage, Kind.GATHER)))
            if remote and stage > 0:
                start = max(start, end(Action(stage, Kind.RECV_F, k)))
            return start + seconds(action)
        if kind is not Kind.WEIGHT and remote and stage + 1 < schedule.stages:
            start = max(start, end(Action(stage, Kind.RECV_B, k)))
        return start + seconds(action)

    return {action: end(action) for row in schedule.ranks for action in row}


@given(priced())
@settings(max_examples=60)
def test_every_action_ends_when_the_rules_say(case: tuple[Schedule, list[StagePrice]]) -> None:
    schedule, prices = case
    timeline = simulate(schedule, prices)
    scheduled = [event for event in timeline.events if event.action and event.action.kind is not Kind.OUTPUT]
    assert {event.action: event.end_s for event in scheduled} == _ends(schedule, prices)
    acted = [event for event in scheduled if event.stream in ("compute", "collective")]
    ready = [max(event.end_s for event in acted if event.rank == rank) for rank in range(schedule.degree)]
    for stage, price in enumerate(prices):
        if price.output_s and schedule.degree > 1:
            own = ready[schedule.rank_of(stage)]
            ready = [max(done, own) + price.output_s for done in ready]
            given = [event.end_s for event in timeline.events if event.action == Action(stage, Kind.OUTPUT)]
            assert given == ready
    for rank, done in enumerate(ready):
        updates = sum(prices[stage].update_s for stage in schedule.stages_of(rank))
        assert max(e.end_s for e in timeline.events if e.rank == rank and e.action is None) == done + updates


@given(priced())
@settings(max_examples=60)
def test_the_parts_of_a_step_add_up(case: tuple[Schedule, list[StagePrice]]) -> None:
    schedule, prices = case
    timeline = simulate(schedule, prices)
    assert 0.0 <= timeline.bubble_fraction <= 1.0
    parts = zip(timeline.busy_s, timeline.idle_s, timeline.exposed_s, timeline.communicating_s, strict=True)
    for busy, idle, exposed, communicating in parts:
        assert busy + idle + exposed == timeline.step_time_s
        assert min(busy, idle, exposed) >= 0.0
        assert exposed <= communicating <= timeline.step_time_s
    for rank, memory in enumerate(timeline.memory_at):
        assert [at for at, _ in memory] == sorted(at for at, _ in memory)
        assert memory[0][1] == memory[-1][1] == sum(prices[stage].static_num_bytes for stage in schedule.stages_of(rank))


@given(priced(), st.data())
@settings(max_examples=60)
def test_dearer_is_never_faster(case: tuple[Schedule, list[StagePrice]], data: st.DataObject) -> None:
    schedule, prices = case
    stage = data.draw(st.integers(0, schedule.stages - 1))
    costs = [field.name for field in fields(StagePrice) if field.name.endswith("_s") and field.name != "covered_s"]
    name = data.draw(st.sampled_from(costs))
    dearer = [replace(p, **{name: getattr(p, name) + 3.0}) if i == stage else p for i, p in enumerate(prices)]
    assert simulate(schedule, dearer).step_time_s >= simulate(schedule, prices).step_time_s


@given(schedules().filter(lambda s: s.has_backward), st.integers(1, 5))
@settings(max_examples=50)
def test_memory_peaks_where_most_microbatches_are_alive(schedule: Schedule, live: int) -> None:
    per_rank = schedule.stages // schedule.degree
    timeline = simulate(schedule, [replace(EQUAL, live_num_bytes=float(live), static_num_bytes=100.0)] * schedule.stages)
    assert timeline.peak_num_bytes == tuple(100.0 * per_rank + live * alive for alive in peak_live_by_rank(schedule))


def test_the_slowest_stage_sets_the_pace() -> None:
    prices = [replace(EQUAL, forward_s=f, backward_s=2 * f) for f in (1.0, 3.0, 2.0)]
    timeline = simulate(make_schedule("gpipe", degree=3, stages=3, microbatches=8), prices)
    assert timeline.step_time_s == 7 * 9.0 + 3.0 + 9.0 + 6.0  # (m-1) max t + sum t


def test_messages_hide_under_computation_and_share_a_link() -> None:
    slow = replace(EQUAL, send_forward_s=1.0, send_backward_s=1.0)
    assert _play("gpipe", 2, 8, slow).step_time_s == _play("gpipe", 2, 8, EQUAL).step_time_s + 2.0  # the first each way
    slower = replace(EQUAL, send_forward_s=3.0)
    assert _play("gpipe", 2, 8, slower).step_time_s == 1.0 + 8 * 3.0 + 1.0 + 2.0 * 8 + 2.0  # the link sets the pace of forwards


def test_gathers_reductions_and_updates() -> None:
    once = replace(EQUAL, gather_s=4.0, reduce_s=5.0, update_s=0.5)
    timeline = _play("1f1b", 1, 2, once)
    assert timeline.step_time_s == 4.0 + 6.0 + 5.0 + 0.5
    assert (timeline.busy_s, timeline.exposed_s, timeline.idle_s, timeline.bubble_fraction) == ((6.5,), (9.0,), (0.0,), 0.0)
    looped = simulate(make_schedule("gpipe", degree=1, stages=2, microbatches=3), [once] * 2)
    assert looped.step_time_s == 4.0 + 1.0 + 4.0 + 3.0 + 6.0 + 6.0 + 5.0 + 1.0  # 1 gathered while 0 runs, 1 reduced while 0 runs back
    assert looped.communicating_s == (18.0,)


def test_a_table_without_communication_is_lowered() -> None:
    schedule = make_schedule("interleaved", degree=2, stages=4, microbatches=4)
    prices = [replace(EQUAL, gather_s=1.0, send_forward_s=0.5, send_backward_s=0.25)] * 4
    assert simulate(schedule, prices) == simulate(lower(schedule), prices)


def test_what_cannot_be_played() -> None:
    schedule = make_schedule("1f1b", degree=2, stages=2, microbatches=2)
    with pytest.raises(PlanError, match="2 stages, but 1 price came"):
        simulate(schedule, [EQUAL])
    crossed = Schedule.parse(
        "mine degree=2 stages=2 microbatches=1\nrank 0: 0RECV_B0 0B0 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0"
    )
    with pytest.raises(PlanError, match="rank 0 waits for a message at 0B0 forever"):
        simulate(crossed, [EQUAL] * 2)


def test_pictures(golden: Callable[[str, str], None]) -> None:
    price = replace(EQUAL, send_forward_s=0.5, send_backward_s=0.5, gather_s=1.0, reduce_s=1.0, update_s=0.5)
    timelines = [
        _play("gpipe", 4, 4, EQUAL),
        _play("1f1b", 4, 6, EQUAL),
        _play("interleaved", 2, 4, EQUAL, v=2),
        _play("zb-h1", 4, 6, EQUAL),
        _play("1f1b", 4, 4, price),
        _play("1f1b", 4, 64, EQUAL),
        _play("gpipe", 1, 1, StagePrice(0.0, 0.0, 0.0, 0.0)),
    ]
    assert all(len(line) <= 100 for timeline in timelines for line in timeline.grid().splitlines())
    golden("cost/timelines", "\n\n".join(timeline.grid() for timeline in timelines))
    assert max(map(len, timelines[0].grid(width=30).splitlines()[1:])) <= 30


@pytest.mark.parametrize(
    "sharing, step_s",
    [
        (1.0, 12.0),  # one after the other
        (2.0, 6.0),  # each twice as fast while the others wait
        (4.0, 3.0),  # as fast as all four cores' work can be done
        (8.0, 3.0),  # and no faster
    ],
)
def test_ranks_that_wait_leave_their_cores(sharing: float, step_s: float) -> None:
    """Four stages of 1 s forward and 2 s backward, one micro-batch."""
    schedule = make_schedule("1f1b", degree=4, stages=4, microbatches=1)
    assert simulate(schedule, [EQUAL] * 4, sharing).step_time_s == pytest.approx(step_s, rel=5e-3)


@pytest.mark.parametrize(
    "sharing, core_s, step_s",
    [
        (4.0, 0.0, 3.5),  # the last stage is done after 1.5 s, and reduces for 2
        (4.0, 2.0, 4.0),  # by a core of its own, which halves the rate of two backwards meanwhile
        (4.0, 1.0, 3.0 + 2 / 3),  # by half of one
        (1.0, 2.0, 12.0),  # of nobody's, where every rank has its own
    ],
)
def test_communication_takes_cores_of_those_that_compute_beside_it(sharing: float, core_s: float, step_s: float) -> None:
    """Four stages of 1 s forward and 2 s backward, one micro-batch."""
    schedule = make_schedule("1f1b", degree=4, stages=4, microbatches=1)
    prices = [EQUAL, EQUAL, EQUAL, replace(EQUAL, reduce_s=2.0, core_s=core_s)]
    assert simulate(schedule, prices, sharing).step_time_s == pytest.approx(step_s, rel=5e-3)


def test_a_message_takes_cores_at_both_its_ends() -> None:
    """Of two ranks: the first computes for half a second, and sends for one, in which it gets two thirds of a second's work done, for both
    ends take a core of two; the rest it does while the other computes. Messages back take a quarter of a core, later."""
    schedule = make_schedule("gpipe", degree=2, stages=2, microbatches=2)
    prices = [replace(EQUAL, send_forward_s=1.0, core_s=4.0), replace(EQUAL, send_backward_s=2.0, core_s=2.0)]
    timeline = simulate(schedule, prices, sharing=2.0)
    second = next(event for event in timeline.events if event.rank == 0 and str(event.action) == "0F1")
    assert (second.start_s, second.end_s) == pytest.approx((0.5, 1.5 + 1 / 3), rel=5e-3)


def test_a_reduction_that_nothing_is_computed_beside_takes_no_cores() -> None:
    """One stage: what of its reduction is hidden is priced where it is."""
    schedule = make_schedule("1f1b", degree=1, stages=1, microbatches=4)
    price = replace(EQUAL, reduce_s=2.0, covered_s=0.5, core_s=1.5)
    assert simulate(schedule, [price], sharing=2.0).step_time_s == pytest.approx(4 * 3.0 + 1.5)


@pytest.mark.parametrize("dispatch_s, step_s", [(3.0, 15.0), (7.0, 15.0), (8.0, 16.0)])
def test_a_step_is_as_long_as_its_busiest_host_takes_to_launch_it(dispatch_s: float, step_s: float) -> None:
    """Two ranks with two stages each, whose 24 s of computation and 3 s of bubble wait for no host until one needs longer."""
    prices = [replace(EQUAL, dispatch_s=dispatch_s if stage % 2 else 1.0) for stage in range(4)]
    timeline = simulate(make_schedule("interleaved", degree=2, stages=4, microbatches=2), prices)
    assert timeline.step_time_s == pytest.approx(step_s)
    assert [busy + idle + exposed for busy, idle, exposed in zip(timeline.busy_s, timeline.idle_s, timeline.exposed_s, strict=True)] == (
        pytest.approx([step_s] * 2)
    )


def test_ranks_that_compute_at_one_time_share_cores() -> None:
    """Four stages of 1 s on two cores, four micro-batches forward: 1, 2, 3, 4, 3, 2, 1 ranks compute at a time, at a rate of 2, 2, 4/3, 1,
    4/3, 2, 2. Neither all the work on two cores (4 s) nor the chain at twice the rate (3.5 s) is as long."""
    timeline = simulate(forward_only(4, 4, 4), [StagePrice(1.0, 0.0, 0.0, 0.0)] * 4, sharing=2.0)
    assert timeline.step_time_s == pytest.approx(0.5 + 0.5 + 0.75 + 1.0 + 0.75 + 0.5 + 0.5, rel=1e-2)
