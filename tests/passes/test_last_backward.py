"""The last backward starts each reduction as soon as its gradient is there, and waits for none."""

from __future__ import annotations

import pytest
import torch

from autopar import Manual
from autopar.compile import StageProgram, compile_stage
from autopar.passes.overlap import _STARTS, ALL_GATHER, _ancestors
from tests.planning import opened, planned

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


@pytest.mark.parametrize("name", PLANS)
def test_reductions_start_inside_and_end_outside(name: str) -> None:
    made = program(PLANS[name])
    assert made.last is not None
    assert made.prepare is not None
    assert made.prepare.backward is not None
    ends = made.split.weights if made.split is not None else made.body.backward
    assert ends is not None
    own = [node.target for node in ends.graph.nodes if node.op == "call_function"]
    targets = [node.target for node in made.last.start.graph.nodes if node.op == "call_function"]
    reductions = [node for node in made.prepare.backward.graph.nodes if node.target in _STARTS]
    finish = [node.target for node in made.last.finish.graph.nodes]
    assert reductions
    started = sum(target in _STARTS for target in targets) - sum(target in _STARTS for target in own)
    # the first of each copy, unless it is an all-gather; what follows on other axes needs its result
    gathers = [node for node in reductions if node.target is ALL_GATHER]
    num_gathers = sum(all(used.target is not _WAIT for used in _ancestors(node)) for node in gathers)
    assert started + num_gathers == len(made.prepare.differentiable)
    assert targets.count(ALL_GATHER) == own.count(ALL_GATHER)
    assert started + sum(target in _STARTS for target in finish) == len(reductions)
    assert targets.count(_WAIT) == own.count(_WAIT)
    assert finish.count(_WAIT) == len(reductions)
    reduced = [place for place, target in enumerate(targets) if target in {node.target for node in reductions}]
    assert reduced[0] < len(targets) / 2  # the last op of the backward is that of the embedding; the first gradients are there early
    assert len(made.last.finish.graph.find_nodes(op="output")[0].args[0]) == len(made.prepare.with_grad)


def test_gradients_of_nothing_prepared_are_kept() -> None:
    """The second stage of a pipeline sends one gradient back; all others belong to copies."""
    made = program(PLANS["pp_zero1"], stage=1)
    assert made.last is not None
    assert len(made.last.kept) == len([wire for wire in made.received if wire.needs_grad])
    assert len(made.last.kept) + made.num_copies == len(made.body.with_grad)


def test_without_reductions_there_is_none() -> None:
    assert program(Manual(dp=2, zero=2, microbatches=2)).last is None
    assert program(Manual(pp=2, microbatches=2)).last is None
    assert program(Manual(pp=2, dp=2, microbatches=1)).last is None
