"""What moves in the memory of a step, inside of actions and between them, and what lies there all along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import Manual, api
from autopar.cost.simulate import Event, Timeline
from autopar.piece import COMPUTE as COMPUTES
from autopar.piece import NO_AXIS, Piece
from autopar.planner.document import Plan
from autopar.resident import Resident, StageBytes
from autopar.schedule.actions import COMPUTE, Kind
from autopar.show import memory
from autopar.show.compare import layout_text
from autopar.show.memory import KINDS, memory_at, memory_by_kind
from autopar.show.timeline import play
from tests.show.test_timeline import WAYS, planned

MIB = 2**20


def curve(plan: Plan, kind: str, rank: int = 0) -> Callable[[float], float]:
    """MiB of a kind by time."""
    rows = memory_by_kind(plan, play(plan))[rank]
    return lambda at_s: [held[KINDS.index(kind)] / MIB for time_s, held in rows if time_s <= at_s][-1]


def computed(timeline: Timeline, rank: int, *kinds: Kind) -> list[Event]:
    wanted = kinds or COMPUTE
    return [e for e in timeline.events if e.rank == rank and e.action is not None and e.action.kind in wanted]


def at(event: Event, part: float) -> float:
    return event.start_s + part * (event.end_s - event.start_s)


def piece(phase: str, of: str, *mib: int) -> Piece:
    return Piece(phase, COMPUTES, NO_AXIS, 1.0, 0.0, 0, 1, of, Resident(*(n * MIB for n in mib)))


def with_memory(plan: Plan, peak: int, **mib: float) -> Plan:
    """Stages alike: 10 MiB of parameters; two modules, of which the first holds 3, 1 MiB in the forward, with 2 and 5 MiB of gradients and
    7 MiB on the way in the backward; the second 6, 2 MiB."""
    inside = (
        piece("forward", "a", 3, 1),
        piece("forward", "b", 6, 2),
        piece("backward", "b", 6, 2, 2, 7),
        piece("backward", "a", 3, 1, 5, 7),
        *([piece("weights", "b", 1)] if plan.pipeline.schedule.startswith("zb") else []),
    )
    held = replace(StageBytes(10 * MIB, 0.0, 0.0, 0.0, 0.0), **{name: n * MIB for name, n in mib.items()})
    stages = tuple(
        replace(s, memory_bytes=dict.fromkeys(KINDS, 0) | {"parameters": 10 * MIB}, inside=inside, held=held) for s in plan.stages
    )
    return replace(plan, stages=stages, prediction=replace(plan.prediction, peak_memory_bytes=(peak * MIB,) * plan.pipeline.degree))


def test_inside_of_an_action_memory_is_that_of_the_module_at_work() -> None:
    plan = with_memory(planned("1f1b"), 40, kept=4)
    timeline = play(plan)
    forward, backward = (computed(timeline, 0, kind)[-1] for kind in (Kind.FORWARD, Kind.BACKWARD))
    activations, gathered, buffers = (curve(plan, kind) for kind in ("activations", "gathered", "buffers"))
    still = activations(timeline.step_time_s)
    before = 4 * sum(e.start_s < forward.start_s for e in computed(timeline, 0, Kind.FORWARD))
    before -= 4 * sum(e.start_s < forward.start_s for e in computed(timeline, 0, Kind.BACKWARD))
    assert [activations(at(forward, part)) - still - before for part in (0.25, 0.75, 1.0)] == [3, 6, 4]
    assert [gathered(at(forward, part)) for part in (0.25, 0.75, 1.0)] == [1, 2, 0]
    assert [activations(at(backward, part)) - still for part in (0.25, 0.75)] == [6, 3]
    assert [buffers(at(backward, part)) for part in (0.25, 0.75)] == [7, 7]
    assert buffers(at(forward, 0.5)) == 0


def test_gradients_are_what_is_left_of_them_when_all_is_computed() -> None:
    plan = with_memory(planned("1f1b"), 40, kept=4, gradients=7, gone=5)
    last, gradients = max(event.end_s for event in computed(play(plan), 0)), curve(plan, "gradients")
    assert (gradients(last * 0.999), gradients(last)) == (7, 2)
    reduced = curve(with_memory(planned("1f1b"), 40, kept=4, gradients=7, coming=2, gone=7), "gradients")
    assert (reduced(last * 0.999), reduced(last)) == (7, 2)


@pytest.mark.parametrize("name, ranks", [("plain", 2), ("zero1", 4), ("zero3", 4), ("1f1b", 2), ("1f1b_zero1", 4)])
def test_gradients_that_a_rank_steps_by_stay(name: str, ranks: int) -> None:
    """Of all weights and biases, which so many ranks have between them."""
    plan = planned(name)
    least, most = (4 * 4 * (64 * 64 + extra) / ranks / MIB for extra in (0, 2 * 64))
    assert least <= curve(plan, "gradients")(play(plan).step_time_s) <= most


@pytest.mark.parametrize("name, seen", [("1f1b", [2, 5, 5]), ("zb-h1", [0, 0, 0])])
def test_gradients_come_one_by_one_in_the_first_backward(name: str, seen: list[int]) -> None:
    """Or, of backwards in two parts, with the first that is of weights."""
    plan = with_memory(planned(name), 40, kept=4, gradients=5)
    for rank in range(plan.pipeline.degree):
        gradients, parameters = curve(plan, "gradients", rank), curve(plan, "parameters", rank)
        timeline = play(plan)
        first, second, *_ = computed(timeline, rank, Kind.BACKWARD, Kind.INPUT)
        assert gradients(0.0) == gradients(first.start_s * (1 - 1e-9)) == 0
        assert [gradients(at(first, part)) for part in (0.2, 0.6, 1.0)] == seen
        weights = computed(timeline, rank, Kind.WEIGHT)
        after = at(second, 0.25) if not weights else weights[0].end_s
        assert gradients(after) == gradients(timeline.step_time_s) == 5
        assert parameters(0.0) == parameters(timeline.step_time_s) == 10


def test_copies_of_a_micro_batch_are_there_while_it_is_in_flight() -> None:
    plan = with_memory(planned("1f1b"), 40, kept=4, kept_copies=3)
    timeline, live = play(plan), plan.stages[0].live
    gathered, activations = curve(plan, "gathered"), curve(plan, "activations")
    first, second, *others = computed(timeline, 0, Kind.FORWARD)
    assert live == 2 < 2 + len(others)
    assert first.end_s == second.start_s < second.end_s < others[0].start_s
    assert [gathered(first.end_s), gathered(second.end_s), gathered(timeline.step_time_s)] == [3 + 1, 3 + 3, 0]
    assert activations(second.end_s) - activations(timeline.step_time_s) == 1 + 1


def test_copies_of_a_step_are_there_until_all_is_computed() -> None:
    plan = with_memory(planned("1f1b"), 40, static=17, copies=7)
    timeline = play(plan)
    gathered, events = curve(plan, "gathered", 1), computed(timeline, 1)
    assert [gathered(0.0), gathered(at(events[-1], 0.25)), gathered(timeline.step_time_s)] == [7, 9, 0]


def test_outputs_are_there_all_along_and_the_optimizer_takes_its_own_in_the_end() -> None:
    plan = with_memory(planned("1f1b"), 40, static=13, end=2, update=1)
    timeline, buffers = play(plan), curve(plan, "buffers", 1)
    (update,) = (event for event in timeline.events if event.rank == 1 and event.action is None)
    last = max(event.end_s for event in computed(timeline, 1))
    assert [buffers(0.0), buffers(last), buffers(update.start_s)] == [3, 4 if update.start_s == last else 5, 4]
    from_others = curve(with_memory(planned("1f1b"), 40, static=13, end=2, received=1.5, update=1), "buffers", 1)
    assert from_others(update.start_s) == 3 + 1.5 + 1
    of_all = curve(with_memory(planned("1f1b"), 40, static=13, end=2, together=4), "buffers", 1)
    assert of_all(update.start_s) == 3 + 4


def test_a_backward_in_two_frees_in_two() -> None:
    plan = with_memory(planned("zb-h1"), 60, kept=4, left=1)
    timeline = play(plan)
    activations = curve(plan, "activations", 3)
    still = activations(timeline.step_time_s)
    for event in computed(timeline, 3):
        begun, halved, ended = (
            sum(e.end_s <= event.end_s for e in computed(timeline, 3, kind)) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
        )
        others = [e for e in computed(timeline, 3) if e.start_s == event.end_s]  # of which the first module is at work already
        now = {Kind.FORWARD: 3, Kind.INPUT: 6 - 4, Kind.WEIGHT: 1 - 1}[others[0].action.kind] if others and others[0].action else 0
        assert activations(event.end_s) - still == 4 * begun - 3 * halved - ended + now


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_less_than_nothing_and_all_that_came_goes(name: str) -> None:
    plan = planned(name)
    timeline = play(plan)
    for rows, total in zip(memory_by_kind(plan, timeline), memory_at(plan, timeline), strict=True):
        assert [sum(held) for _, held in rows] == [num_bytes for _, num_bytes in total]
        assert min(num_bytes for _, held in rows for num_bytes in held) >= 0
        first, last = (dict(zip(KINDS, held, strict=True)) for held in (rows[0][1], rows[-1][1]))
        assert last["gathered"] == 0
        assert last["activations"] <= first["activations"]
        assert (last["parameters"], last["optimizer"]) == (first["parameters"], first["optimizer"])


@pytest.mark.parametrize(
    "name, most",
    [
        *[(name, 1e-9) for name in ("plain", "zero1", "zero3", "accumulating", "1f1b", "recompute")],
        *[("zb-h1", 0.04), ("1f1b_zero1", 0.11), ("interleaved", 0.12)],
    ],
)
def test_the_peak_is_where_the_plan_has_it(name: str, most: float) -> None:
    """What is put right in activations, which are all gone in the end, is at most a small part of it; of one stage it has the kinds of the
    plan."""
    plan = planned(name)
    for rank, rows in enumerate(memory_by_kind(plan, play(plan))):
        fullest = max((held for _, held in rows), key=sum)
        assert abs(rows[-1][1][KINDS.index("activations")]) <= most * plan.prediction.peak_memory_bytes[rank]
        if rank == 0 and len(plan.stages) == 1:
            assert dict(zip(KINDS, fullest, strict=True)) == pytest.approx(plan.prediction.memory_bytes, abs=0.02 * sum(fullest))


def test_of_many_moments_the_fullest_and_the_emptiest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("1f1b")
    (whole, *_), timeline = memory_by_kind(plan, play(plan)), play(plan)
    monkeypatch.setattr(memory, "MOST_ROWS", 8)
    few, *_ = memory_by_kind(plan, timeline)
    totals = [[sum(held) for _, held in rows] for rows in (whole, few)]
    assert len(few) <= 10 < len(whole)
    assert set(few) < set(whole)
    assert (whole[0], whole[-1], max(totals[0]), min(totals[0])) == (few[0], few[-1], max(totals[1]), min(totals[1]))


@pytest.mark.parametrize("config", [Manual(dp=2), None], ids=str)
@pytest.mark.parametrize("model", [nn.Linear(4, 4).requires_grad_(False), nn.ReLU()], ids=["frozen", "no parameters"])
def test_what_trains_nothing_is_drawn(model: nn.Module, config: Manual | None) -> None:
    plan = api.plan(model, 2, (torch.zeros(8, 4),), plan=config, loss_fn=torch.Tensor.sum)
    (rows,) = memory_by_kind(plan, play(plan))
    assert max(sum(held) for _, held in rows) == plan.prediction.peak_memory_bytes[0]
    assert layout_text(plan).startswith("dp=2,tp=1" if config else "d0=2")
    assert ("parameters" in layout_text(plan)) is bool(plan.parameters)
    assert "<iframe" in plan._repr_html_()


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_a_batch_is_no_parameter(offload: str) -> None:
    """It lies in buffers, 2 MiB that all ranks are given, beside a loss; 4 KiB of weights are parameters, as are buffers of the model."""
    model = nn.Sequential(nn.Linear(1024, 1, bias=False), nn.BatchNorm1d(1, affine=False).eval())
    plan = api.plan(model, 2, (torch.zeros(512, 1024),), plan=Manual(dp=2), loss_fn=torch.Tensor.sum, offload=offload)
    held = plan.prediction.memory_bytes
    assert held["parameters"] == 4096 * (offload == "none") + sum(buffer.nbytes for buffer in model.buffers())
    assert sum(plan.prediction.host_memory_bytes) == (0 if offload == "none" else 4 * 4096)  # with its gradient and two moments
    assert 0 <= held["buffers"] - 2 * MIB <= 8


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "1f1b_zero1"])
def test_a_stage_that_is_all_of_its_rank_has_the_peak_of_it(name: str) -> None:
    plan = planned(name)
    assert tuple(sum(stage.memory_bytes.values()) for stage in plan.stages) == plan.prediction.peak_memory_bytes
    assert plan.stages[0].memory_bytes == plan.prediction.memory_bytes
    assert min(num_bytes for stage in plan.stages for num_bytes in stage.memory_bytes.values()) >= 0
