"""What actions are made of adds up to their prices, under every kind of plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.collectives import collective_time_s
from autopar.passes.buckets import BUCKET_NUM_BYTES
from autopar.piece import PHASES, Piece
from autopar.plan import StagePlan
from autopar.planner.document import Plan
from autopar.solve.inter import Costs
from tests import models
from tests.marks import few
from tests.show.test_timeline import WAYS, planned
from tests.solve.problems import prices_of, random_machine, session, small, walk

pytestmark = pytest.mark.slow


@settings(max_examples=30, deadline=None, derandomize=True)
@given(name=st.sampled_from(["attention", "chain", "norms", "mlp"]), microbatches=st.sampled_from([1, 2, 4]), seed=st.integers(0, 10_000))
def test_without_stages_the_price_of_a_step_is_what_the_program_minimises(name: str, microbatches: int, seed: int) -> None:
    """However parameters are stored: what is done for every micro-batch and what once a step, and what each hides under."""
    normal = session("mlp", 3).normal if name == "mlp" else small(name)
    prices = prices_of(normal, (2, 2), random_machine(2, seed), microbatches=microbatches)
    for variants in walk(prices, seed):
        costs = Costs(prices, variants)
        (stage,) = costs.stage_prices(dict.fromkeys(costs.order, 0), 1, (), [prices.memory(variants)], (1,), {}, in_two=False)
        once_s = stage.gather_s + stage.reduce_s - stage.covered_s + stage.update_s
        step_s = microbatches * (stage.forward_s + stage.backward_s) + once_s
        assert step_s == pytest.approx(prices.objective(variants).total_s, rel=1e-9)


def taken_s(pieces: tuple[Piece, ...], phase: str) -> float:
    own = [piece for piece in pieces if piece.phase == phase]
    computing = sum(piece.waited_s for piece in own if piece.is_compute)
    waited = sum(piece.waited_s for piece in own if not piece.is_compute)
    return computing + waited + max(0.0, sum(piece.hidden_s for piece in own) - computing)


def check(stage: StagePlan) -> None:
    forward_s, backward_s, weights_s, gather_s, reduce_s, output_s = (taken_s(stage.inside, phase) for phase in PHASES)
    assert forward_s == pytest.approx(stage.forward_s, rel=1e-9)
    assert backward_s == pytest.approx(stage.input_s if weights_s else stage.backward_s, rel=1e-9)
    assert weights_s in (0.0, pytest.approx(stage.weight_s, rel=1e-9))
    assert (gather_s, reduce_s, output_s) == pytest.approx((stage.gather_s, stage.reduce_s, stage.output_s), rel=1e-9)


@pytest.mark.parametrize("name", WAYS)
def test_pieces_add_up_to_the_prices_of_their_stage(name: str) -> None:
    for stage in Plan.from_json(planned(name).to_json()).stages:
        check(stage)


def gpt2_plan(way: Manual, *, sequence: int = 64, batch: int = 16, **asked: str) -> Plan:
    model, given = models.gpt2(layers=2, hidden=256, heads=4, vocab=512, sequence=sequence, batch=batch, device="meta")
    return autopar.plan(model, autopar.Cluster(1, 4, "a100-80gb"), given, plan=way, outputs="loss", **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", few(1, ["pointwise", "selective"]))
def test_what_is_gathered_of_what_is_computed_again_is_paid_for_again(level: str) -> None:
    """A backward gathers for the products of a block what they have had gathered in the forward: of five gathers four, since the fifth is
    that of the head."""
    ways = (Manual(tp=4, sequence_parallel=True, recompute=recompute) for recompute in ("none", level))
    kept, again = (gpt2_plan(way, sequence=256, batch=64) for way in ways)
    gathered = []
    for (stage,) in (kept.stages, again.stages):
        check(stage)
        gathered.append([sum(p.waited_s for p in stage.inside if (p.phase, p.kind) == (phase, "all_gather")) for phase in PHASES[:2]])
    (forward_s, backward_s), (same_s, more_s) = gathered
    assert same_s == pytest.approx(forward_s)
    assert more_s == pytest.approx(backward_s + 4 / 5 * forward_s)


def test_what_lies_on_the_host_is_copied() -> None:
    for offload in ("optimizer", "activations"):
        plan = gpt2_plan(Manual(dp=4), offload=offload)
        check(plan.stages[0])
        assert {piece.kind for piece in plan.stages[0].inside if piece.axis == "host"} == {"copy"}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_made_again_is_not_copied(recompute: str) -> None:
    """A step waits for copies of what is kept, and of nothing else."""
    plan = gpt2_plan(Manual(dp=4, recompute=recompute), offload="activations")
    assert plan.decision is not None
    kept = plan.decision.prices.footprint.moved_by_op(plan.decision.solution.variants)
    check(plan.stages[0])
    for phase in ("forward", "backward"):
        copied = [piece.num_bytes for piece in plan.stages[0].inside if piece.kind == "copy" and piece.phase == phase]
        assert sum(copied) == sum(kept.values())
        assert bool(copied) is (recompute != "full")


def test_small_gradients_travel_together_and_large_ones_alone() -> None:
    reductions = [piece for piece in gpt2_plan(Manual(dp=4)).stages[0].inside if piece.kind == "all_reduce" and piece.phase == "backward"]
    assert any(piece.count > 4 for piece in reductions)
    assert all(piece.count == 1 or piece.num_bytes < 5 * 2**20 for piece in reductions)
    parameters = {p.name for p in gpt2_plan(Manual(dp=4)).parameters}
    assert sum(piece.count for piece in reductions if piece.of in parameters) == len(parameters)


def test_vectors_travel_together_gathers_with_the_first_and_reductions_with_the_last() -> None:
    plan = gpt2_plan(Manual(dp=4, zero=3))
    check(plan.stages[0])
    vectors = {p.name for p in plan.parameters if len(p.shape) == 1}
    numbers = {("forward", "all_gather"): len(vectors), ("backward", "reduce_scatter"): len(vectors), ("backward", "all_gather"): 10}
    for (phase, kind), num in numbers.items():
        moved = [piece for piece in plan.stages[0].inside if (piece.phase, piece.kind) == (phase, kind) and piece.count > 1]
        (together,) = [piece for piece in moved if piece.of in vectors]
        assert together.count == num  # the backward reads the norms alone
        bucket_s = float(collective_time_s(kind, BUCKET_NUM_BYTES, 4, autopar.Cluster(1, 4, "a100-80gb").profile.links[0]))
        assert together.time_s == pytest.approx(bucket_s * together.num_bytes / BUCKET_NUM_BYTES)
        rows = [row for row in plan.collectives if (row.phase, row.kind) == (phase, kind) and row.value in vectors]
        assert sum(row.count * row.time_s for row in rows) == pytest.approx(together.time_s)
        place = plan.stages[0].inside.index(together)
        behind = [piece.of for piece in plan.stages[0].inside[place:] if piece.is_compute and piece.phase == phase]
        assert any(name.startswith("transformer.h.1") for name in behind) is (kind == "all_gather")


def test_a_block_is_computed_again_before_its_backward() -> None:
    stage = gpt2_plan(Manual(pp=2, dp=2, microbatches=2, recompute="full")).stages[0]
    order = [piece.of for piece in stage.inside if piece.phase == "backward" and piece.is_compute]
    assert any(name.endswith(" again") for name in order)
    block = "transformer.h.0"
    again = [i for i, name in enumerate(order) if name.startswith(block) and name.endswith(" again")]
    assert max(again) < min(i for i, name in enumerate(order) if name.startswith(block) and i not in again)


def test_a_batch_norm_has_its_sums_of_all_ranks_inside_of_the_forward() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        batch = (torch.empty(64, 64),)
    plan = autopar.plan(model, autopar.Cluster(1, 4, "a100-80gb"), batch, plan=Manual(dp=4), loss_fn=lambda y: y.square().mean())
    check(plan.stages[0])
    assert any(piece.phase == "forward" and piece.kind == "all_reduce" and piece.waited_s for piece in plan.stages[0].inside)
