"""Counts against hand-made figures."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar import Manual
from autopar.dry.build import build
from autopar.dry.count import Counted, RankCount, Traffic, count_programs
from autopar.dry.play import Programs, play
from autopar.plan import Plan
from autopar.planner.session import open_session
from autopar.precision import Precision
from autopar.runtime.module import make_skeleton
from tests import models
from tests.dry.test_check import built, opened
from tests.marks import few
from tests.planning import planned

pytestmark = pytest.mark.slow


def counted(wanted: Manual, layers: int = 2) -> Counted:
    return count_programs(*built("speaker", wanted, layers))


def traffic(row: RankCount, kind: str) -> Traffic:
    (found,) = (t for t in row.traffic if t.kind == kind)
    return found


@pytest.mark.parametrize(
    "wanted", few(2, [Manual(tp=2), Manual(pp=2, microbatches=4), Manual(dp=2), Manual(dp=2, zero=3, microbatches=2)]), ids=str
)
def test_flops_of_all_ranks_are_those_of_one(wanted: Manual) -> None:
    assert counted(wanted).total_flops == counted(Manual()).total_flops


def test_flops_are_those_of_torch() -> None:
    model, batch = models.mlp()
    plan = autopar.plan(model, 2, batch, plan=Manual(dp=2))
    with FlopCounterMode(display=False) as counter:
        model(**batch).backward()
    assert autopar.count(model, plan, batch).total_flops == counter.get_total_flops()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_data_parallelism_reduces_every_gradient_once(microbatches: int) -> None:
    """Beside them the loss: its sum, and the number of tokens that it counts."""
    plan, _ = built("speaker", Manual(dp=2, microbatches=microbatches))
    gradients = sum(p.num_bytes for p in plan.parameters)
    reduced = traffic(counted(Manual(dp=2, microbatches=microbatches)).positions[0], "all_reduce")
    assert (reduced.axis, reduced.group_size) == ("dp", 2)
    assert 0 <= reduced.num_bytes - gradients <= 64 * microbatches


def test_zero_3_gathers_twice_and_reduces_once_a_micro_batch() -> None:
    plan, _ = built("speaker", Manual(dp=2, zero=3, microbatches=2))
    row = counted(Manual(dp=2, zero=3, microbatches=2)).positions[0]
    stored = 2 * sum(p.num_bytes for p in plan.parameters if "Z3" in p.held)
    assert traffic(row, "reduce_scatter").num_bytes == 2 * stored
    assert traffic(row, "all_gather").num_bytes <= 2 * 2 * stored + 2**20


AGREEING = [
    Manual(dp=2, tp=2, zero=3, microbatches=4),
    Manual(dp=2, zero=2, microbatches=2),
    Manual(tp=2, sequence_parallel=True),
    Manual(dp=2, tp=2, zero=2),
    Manual(dp=2, zero=1, microbatches=4),
    Manual(cp=2, dp=2, zero=3),
    Manual(dp=4, zero=2, replicas=2, microbatches=2),
]
LISTING = [(AGREEING[0], "gpt2"), *product(AGREEING, ["speaker"]), *product(AGREEING[1:], ["gpt2"])]


@pytest.mark.parametrize("wanted, name", few(2, LISTING), ids=str)
def test_a_plan_lists_what_its_graphs_move(name: str, wanted: Manual) -> None:
    session = opened(name)
    plan = planned(session, wanted, cluster=autopar.Cluster(1, wanted.dp * wanted.tp * wanted.cp))
    programs, _ = build(session, plan)
    assert len(moved_as_listed(plan, programs)) >= 2


@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_plan_lists_what_frozen_parameters_move(microbatches: int, precision: Precision | None) -> None:
    """One weight is trained. ZeRO-3 gathers those after it again, for the gradients of what they read, and those before it once."""
    example = models.speaker(layers=3)
    for name, parameter in example.model.named_parameters():
        parameter.requires_grad_(name == "blocks.1.up.weight")
    session = open_session(make_skeleton(example.model), (), example.batch, precision=precision)
    plan = planned(session, Manual(dp=2, zero=3, microbatches=microbatches))
    programs, _ = build(session, plan)
    moved_as_listed(plan, programs)
    gathers = {c.value: Counter[str]() for c in plan.collectives}
    for c in plan.collectives:
        gathers[c.value][c.phase] += c.count * (c.kind == "all_gather")
    before, after = gathers["blocks.0.down.weight"], gathers["blocks.2.down.weight"]
    assert (before["forward"], before["backward"]) == (microbatches, 0)
    assert (after["forward"], after["backward"]) == (microbatches, microbatches)


@pytest.mark.parametrize("precision, times", [(None, 1), (Precision(torch.bfloat16, torch.bfloat16), 2)])
def test_replicas_of_shards_reduce_once_a_step(precision: Precision | None, times: int) -> None:
    """If they reduce in the dtype that gradients add up in."""
    example = models.speaker(layers=1)
    session = open_session(make_skeleton(example.model), (), example.batch, precision=precision)
    plan = planned(session, Manual(dp=4, zero=3, replicas=2, microbatches=2))
    programs, _ = build(session, plan)
    moved_as_listed(plan, programs)
    shards = {p.name for p in plan.parameters if "Z3" in p.held}
    assert shards
    assert {c.count for c in plan.collectives if c.axis == "replica" and c.value in shards} == {times}


def moved_as_listed(plan: Plan, programs: Programs) -> Counter[tuple[str, str]]:
    """Bytes by axis and kind, which are the same in a plan and in its graphs, but for labels: they are counted whole, and so go to all
    ranks to be cut in time."""
    listed, moved = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for collective in plan.collectives:
        parts = plan.grid.sizes[plan.grid.index(collective.axis)] if collective.kind == "all_to_all" else 1
        listed[collective.axis, collective.kind] += collective.count * collective.num_bytes // parts
    for call in play(programs, 0).calls:
        is_of_labels = call.kind == "all_gather" and call.dtype == "int64"
        moved[call.over, call.kind] += 0 if is_of_labels else call.num_bytes
    assert +moved == listed
    return listed


def test_a_plan_lists_the_outputs_that_its_stages_broadcast() -> None:
    session = opened("gpt2")
    plan = planned(session, Manual(pp=2, microbatches=2), cluster=autopar.Cluster(1, 2))
    programs, _ = build(session, plan)
    given = [(call.over, call.num_bytes) for call in play(programs, 0).calls if call.kind == "broadcast"]
    assert given == [(c.axis, c.num_bytes) for c in plan.collectives if c.kind == "broadcast"]
    assert len(given) > 1


def test_messages_of_a_pipeline() -> None:
    found = counted(Manual(pp=2, microbatches=4))
    assert [row.ranks for row in found.positions] == [(0,), (1,)]
    assert [row.stages for row in found.positions] == [(0,), (1,)]
    _, programs = built("speaker", Manual(pp=2, microbatches=4))
    assert programs.pipeline is not None
    wires = programs.pipeline.stages[0].sent
    num_bytes = sum(4 * 4 * math.prod(wire.shape) for wire in wires)  # four micro-batches, in float32
    assert num_bytes % (8 * 32 * 128 * 4) == 0
    for row in found.positions:
        for kind in ("send", "receive"):
            assert traffic(row, kind) == Traffic(kind, "pp", 2, 4 * len(wires), num_bytes)


def test_json() -> None:
    found = counted(Manual(dp=2))
    data = json.loads(found.to_json())
    assert data["num_ranks"] == 2
    assert data["positions"][0]["flops"] == found.positions[0].flops
    assert data["positions"][0]["traffic"][0]["kind"] == found.positions[0].traffic[0].kind


def test_memory_of_a_plan_is_counted() -> None:
    (row,) = counted(Manual(dp=2, microbatches=4)).positions
    plan, _ = built("speaker", Manual(dp=2, microbatches=4))
    stored = sum(p.num_bytes for p in plan.parameters)
    assert row.memory_bytes["parameters"] == stored
    assert row.memory_bytes["optimizer"] == 2 * stored
    assert row.peak_memory_bytes == sum(row.memory_bytes.values())
