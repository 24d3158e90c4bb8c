"""Gradients add up in place; the last backward starts each reduction as soon as its gradient is there, and waits for none."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import fx

from autopar import Manual
from autopar.compile import compile_stage
from autopar.passes import buckets
from autopar.passes.accumulate import results_of
from autopar.passes.aliases import base_of
from autopar.passes.overlap import ALL_GATHER, STARTS, _ancestors
from autopar.stage import StageProgram
from tests.marks import few
from tests.planning import num_of, opened, planned

pytestmark = pytest.mark.slow

_c10d = torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default


def program(config: Manual, stage: int = 0) -> StageProgram:
    _, session = opened("gpt2")
    return compile_stage(session.normal, planned(session, config), stage, device=torch.device("cpu"), training=True)


PLANS = {
    "dp": Manual(dp=2, microbatches=2),
    "zero1": Manual(dp=2, tp=2, zero=1, microbatches=2),
    "pp_zb": Manual(pp=2, dp=2, microbatches=2, schedule="zb-h1"),
    "pp_zero1": Manual(pp=2, dp=2, zero=1, microbatches=2),
}


def num_reduced(nodes: Iterable[fx.Node]) -> int:
    """How many tensors collectives start to reduce or gather."""
    found = [node for node in nodes if node.target in STARTS]
    return sum(len(node.all_input_nodes) if node.target is _c10d.all_reduce_coalesced_.default else num_of(node) for node in found)


@pytest.mark.parametrize("name", few(2, PLANS))
def test_reductions_start_inside_and_end_outside(name: str) -> None:
    made = program(PLANS[name])
    assert made.ending is not None
    assert made.ending.last is not None
    assert made.prepare is not None
    assert made.prepare.backward is not None
    start, finish = made.ending.last.start.graph, made.ending.last.finish.graph
    own = [node for node in made.ending.first.graph.nodes if node.op == "call_function"]
    started = [node for node in start.nodes if node.op == "call_function"]
    reductions = [node for node in made.prepare.backward.graph.nodes if node.target in STARTS]
    assert reductions
    num_started = num_reduced(started) - num_reduced(own)
    # the first of each copy, unless it is an all-gather; what follows on other axes needs its result
    gathers = [node for node in reductions if node.target is ALL_GATHER]
    num_gathers = sum(num_of(node) for node in gathers if all(used.target is not _WAIT for used in _ancestors(node)))
    assert num_started + num_gathers == len(made.prepare.differentiable)
    assert len(start.find_nodes(op="call_function", target=ALL_GATHER)) == sum(node.target is ALL_GATHER for node in own)
    assert num_started + num_reduced(finish.nodes) == num_reduced(reductions)
    assert sum(node.target is _WAIT for node in started) == sum(node.target is _WAIT for node in own)
    assert sum(num_of(node) for node in finish.find_nodes(op="call_function", target=_WAIT)) == num_reduced(reductions)
    assert len(finish.find_nodes(op="output")[0].args[0]) == len(made.prepare.with_grad)


def test_reductions_start_early_in_place_and_small_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL_NUM_BYTES", 2**12)
    monkeypatch.setattr(buckets, "BUCKET_NUM_BYTES", 2**10)
    made = program(PLANS["dp"])
    assert made.ending is not None
    assert made.ending.last is not None
    assert made.prepare is not None
    targets = [node.target for node in made.ending.last.start.graph.nodes if node.op == "call_function"]
    assert _c10d.all_reduce.default not in targets
    alone, together = targets.count(_c10d.all_reduce_.default), targets.count(_c10d.all_reduce_coalesced_.default)
    assert alone > 1
    assert together > 1
    assert alone + together < len(made.prepare.differentiable)
    assert targets.index(_c10d.all_reduce_.default) < len(targets) / 2


@pytest.mark.parametrize("name", PLANS)
def test_weights_add_up_in_their_products(name: str) -> None:
    made = program(PLANS[name])
    assert made.ending is not None
    fused = made.ending.next.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm_.default)
    added = made.ending.next.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
    results = results_of(made.ending.first)
    products = [i for i in made.ending.summed if base_of(results[i]).target is torch.ops.aten.mm.default]
    assert len(fused) == len(products) >= 3  # of attention and of the MLP
    assert len(fused) + len(added) == len(made.ending.summed)


def test_gradients_of_nothing_summed_are_given() -> None:
    """The second stage of a pipeline sends one gradient back; all others belong to copies."""
    made = program(PLANS["pp_zero1"], stage=1)
    assert made.ending is not None
    assert made.ending.last is not None
    assert made.ending.last.num_results == len([wire for wire in made.received if wire.needs_grad])
    assert len(made.ending.summed) == made.num_copies
    assert made.ending.last.num_results + made.num_copies == len(made.body.with_grad)


def test_without_reductions_there_is_no_last() -> None:
    for config in (Manual(dp=2, zero=2, microbatches=2), Manual(pp=2, microbatches=2), Manual(pp=2, dp=2, microbatches=1)):
        made = program(config)
        assert made.ending is not None
        assert made.ending.last is None
