"""What is done to parameters once a step, and what for every micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar import Manual, Precision
from autopar.capture.trace import Source
from autopar.compile import compile_stage, local_graph, plan_held
from autopar.ops.collectives import RESHARDS
from autopar.passes.accumulate import results_of
from autopar.passes.differentiate import differentiate
from autopar.passes.prepare import Prepared, split_prepare
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from autopar.stage import StageProgram
from autopar.virtual import run_lockstep
from tests import models
from tests.planning import num_of, opened, planned, rank_inputs

_c10d = torch.ops._c10d_functional
PARAMETERS = 6
"""Of a block of the MLP: two of a norm, two of each linear layer."""


def program(config: Manual) -> StageProgram:
    _, session = opened("mlp")
    return compile_stage(session.normal, planned(session, config), 0, device=torch.device("cpu"), training=True)


def count(module: fx.GraphModule | None, target: object) -> int:
    """How many tensors an op is for."""
    assert module is not None
    return sum(num_of(node) for node in module.graph.nodes if node.target is target)


def reduced(module: fx.GraphModule | None) -> int:
    """How many tensors are all-reduced, together or not, in place or not."""
    assert module is not None
    targets = _c10d.all_reduce.default, _c10d.all_reduce_.default, _c10d.all_reduce_coalesced_.default
    nodes = [node for node in module.graph.nodes if node.target in targets]
    return sum(len(node.args[0]) if isinstance(node.args[0], list | tuple) else num_of(node) for node in nodes)


@pytest.mark.parametrize("zero, gather, reduce", [(0, 0, _c10d.all_reduce), (1, PARAMETERS, _c10d.reduce_scatter_tensor)])
def test_what_is_done_once_a_step_leaves_the_body(zero: int, gather: int, reduce: torch._ops.OpOverloadPacket) -> None:
    made = program(Manual(dp=2, zero=zero, microbatches=4))
    assert made.prepare is not None
    assert made.prepare.backward is not None
    assert made.num_copies == PARAMETERS
    assert count(made.prepare.forward, _c10d.all_gather_into_tensor.default) == gather
    assert count(made.prepare.backward, reduce.default) == PARAMETERS
    if zero:
        assert max(num_of(node) for node in made.prepare.backward.graph.nodes if node.target is reduce.default) > 1  # vectors go together
    assert count(made.body.forward, _c10d.all_gather_into_tensor.default) == 0
    assert count(made.body.backward, reduce.default) == 0


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_2_and_3_reduce_for_every_micro_batch(zero: int) -> None:
    made = program(Manual(dp=2, zero=zero, microbatches=4))
    assert (made.prepare, made.num_copies, made.taken) == (None, 0, ())
    assert count(made.body.forward, _c10d.all_gather_into_tensor.default) == PARAMETERS
    assert count(made.body.backward, _c10d.reduce_scatter_tensor.default) == PARAMETERS


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_of_shards_reduce_once_a_step(zero: int) -> None:
    """What every micro-batch gathers are shards, whose gradients add up as they are."""
    made = program(Manual(dp=4, zero=zero, replicas=2, microbatches=2))
    assert made.prepare is not None
    assert (made.num_copies, made.taken[:PARAMETERS]) == (PARAMETERS, tuple(range(PARAMETERS)))
    assert {node.target for node in results_of(made.prepare.forward)} == {torch.ops.aten.view.default}  # nothing is copied
    assert (reduced(made.prepare.backward), reduced(made.body.backward)) == (PARAMETERS, 0)
    assert count(made.body.forward, _c10d.all_gather_into_tensor.default) == PARAMETERS
    assert count(made.body.backward, _c10d.all_gather_into_tensor.default) == (4 if zero == 3 else 0)  # all but biases
    assert count(made.body.backward, _c10d.reduce_scatter_tensor.default) == PARAMETERS


def test_replicas_reduce_narrow_gradients_for_every_micro_batch() -> None:
    """They add up in float32, in which they would take twice as many bytes."""
    example = models.mlp(layers=1)
    narrow = Precision(torch.bfloat16, torch.bfloat16)
    session = open_session(make_skeleton(example.model), (), example.batch, precision=narrow)
    plan = planned(session, Manual(dp=4, zero=3, replicas=2, microbatches=2))
    made = compile_stage(session.normal, plan, 0, device=torch.device("cpu"), training=True)
    assert made.prepare is None
    assert reduced(made.body.backward) == PARAMETERS


@pytest.mark.parametrize("config", [Manual(dp=2, zero=1, pp=2, microbatches=1), Manual(tp=2, microbatches=4), Manual(pp=2, microbatches=4)])
def test_with_nothing_to_do_there_is_no_graph(config: Manual) -> None:
    """One micro-batch reduces in its own backward; parameters that one rank alone uses, or holds a part of, are used as they are."""
    made = program(config)
    assert made.num_copies == (0 if made.prepare is None else len(made.prepare.with_grad))
    if config.tp == 1:
        assert made.prepare is None


def split(config: Manual) -> tuple[fx.GraphModule, Prepared, list[list[torch.Tensor]]]:
    """A whole local graph with all parameters made ready early, and inputs for it."""
    example, session = opened("mlp")
    plan = planned(session, config)
    held = plan_held(session.normal, plan)
    local = local_graph(session.normal, plan, device=torch.device("cpu"), training=True)
    order = session.normal.module.graph.find_nodes(op="placeholder")
    early = [i for i, node in enumerate(order) if node in held]
    coordinates = range(len(order), len(order) + len(plan.mesh.sizes))
    assert all(order[i].meta["placeholder"].source is Source.PARAMETER for i in early)
    return local, split_prepare(local, early, [], coordinates), rank_inputs(example, session.normal, plan)


def traced(local: fx.GraphModule) -> fx.GraphModule:
    """A local graph as a forward that virtual ranks can run."""
    return differentiate(local, gather_again=[], device=torch.device("cpu"), training=False).forward


@pytest.mark.parametrize("config", [Manual(dp=4), Manual(dp=4, zero=1), Manual(dp=2, tp=2), Manual(dp=2, tp=2, zero=1)])
def test_one_after_the_other_they_compute_the_local_graph(config: Manual) -> None:
    _, session = opened("mlp")
    mesh = planned(session, config).mesh
    local, made, inputs = split(config)
    assert made.prepare is not None
    copies = run_lockstep(traced(made.prepare), [[given[i] for i in made.taken] for given in inputs], mesh)
    found = run_lockstep(
        traced(made.body), [[*own, *(given[i] for i in made.kept)] for own, given in zip(copies, inputs, strict=True)], mesh
    )
    expected = run_lockstep(traced(local), inputs, mesh)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_reshards_of_values_and_of_late_parameters_stay() -> None:
    local, made, _ = split(Manual(dp=2, tp=2, zero=1))
    assert made.prepare is not None
    moved = sum(node.target in RESHARDS for node in made.prepare.graph.nodes)
    left = sum(node.target in RESHARDS for node in made.body.graph.nodes)
    assert moved + left == sum(node.target in RESHARDS for node in local.graph.nodes)
    assert moved
    assert left
    none = split_prepare(local, [], [], range(0))
    assert none.prepare is None
    assert (none.num_copies, none.taken) == (0, ())
    assert [node.name for node in none.body.graph.nodes] == [
        node.name for node in local.graph.nodes if node.op != "placeholder" or node.users
    ]
