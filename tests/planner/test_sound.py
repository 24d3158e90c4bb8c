"""Damaged plans are refused when they meet their graph, and the text says what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan as Record
from autopar.planner.document import Plan
from autopar.planner.question import ask
from autopar.planner.request import check_plan
from autopar.planner.session import Session
from autopar.solve.manual import Manual
from tests import models

WEIGHT, LINEAR = "blocks.0.1.weight", "linear_default"


@cache
def example() -> models.Example:
    return models.mlp(layers=2)


@cache
def opened() -> Session:
    return ask(example().model, 4, example().batch).session


@cache
def made(*, staged: bool) -> Plan:
    config = Manual(dp=2, pp=2, microbatches=2) if staged else Manual(dp=2, tp=2, zero=1)
    return autopar.plan(example().model, 4, example().batch, plan=config)


def with_op(plan: Record, named: str, **changes: object) -> Record:
    return replace(plan, ops=tuple(replace(op, **changes) if op.name == named else op for op in plan.ops))  # type: ignore[arg-type]


def with_parameter(plan: Record, named: str, **changes: object) -> Record:
    rows = tuple(replace(p, **changes) if p.name == named else p for p in plan.parameters)  # type: ignore[arg-type]
    return replace(plan, parameters=rows)


def with_pipeline(plan: Record, **changes: object) -> Record:
    return replace(plan, pipeline=replace(plan.pipeline, **changes))  # type: ignore[arg-type]


def refused(plan: Record, text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        check_plan(plan, opened())


@pytest.mark.parametrize("staged", [False, True])
def test_a_plan_as_it_was_made_is_sound(staged: bool) -> None:
    check_plan(made(staged=staged), opened())


@pytest.mark.parametrize("held", ["P", "R*", "Z0", "Z9", "Z-1", "Zx", "S7", "S0.5", "S-1", "foo", ""])
def test_what_a_parameter_cannot_be_held_as(held: str) -> None:
    wrong = with_parameter(made(staged=False), WEIGHT, held=(held, "R"))
    refused(wrong, f"parameter {WEIGHT} (factors ((64,), (32,))) cannot be held as {held!r} on axis 'dp'")


def test_parameters_that_do_not_fit_the_mesh() -> None:
    plan = made(staged=False)
    refused(with_parameter(plan, WEIGHT, held=("R",)), f"parameter {WEIGHT} is held as ('R',), one for each axis, but mesh (dp=2,tp=2)")
    refused(with_parameter(plan, WEIGHT, name="blocks.1.0.weight"), "the plan has parameter blocks.1.0.weight twice")
    refused(replace(plan, parameters=plan.parameters[1:]), f"the plan has no parameter {plan.parameters[0].name!r}")


def test_ops_that_do_not_fit_the_graph() -> None:
    plan = made(staged=False)
    refused(replace(plan, ops=(*plan.ops, plan.ops[0])), f"the plan has op {plan.ops[0].name} twice")
    refused(replace(plan, ops=(*plan.ops, replace(plan.ops[0], name="other"))), "the plan has op other, which its graph lacks")
    refused(replace(plan, ops=plan.ops[1:]), f"the plan says nothing of op {plan.ops[0].name}")
    refused(with_op(plan, LINEAR, recompute="foo"), "computed again as 'foo', and there are pointwise, selective, full")
    refused(with_op(plan, LINEAR, stage=1), "op linear_default is of stage 1, and the plan has 1 stage, from 0")


@pytest.mark.parametrize("stage, text", [(2, "is of stage 2, and"), (-1, "is of stage -1, and"), (1, "needs linear_default of the later")])
def test_an_op_of_another_stage(stage: int, text: str) -> None:
    refused(with_op(made(staged=True), LINEAR, stage=stage), text)


@pytest.mark.parametrize("stages", [(), (1,), (0, 1), (5,), (-1,)])
def test_a_parameter_on_other_stages(stages: tuple[int, ...]) -> None:
    wrong = with_parameter(made(staged=True), WEIGHT, stages=stages)
    refused(wrong, f"parameter {WEIGHT} is on stages {stages}, and read by ops of stages (0,)")


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"degree": 0}, "degree is 0; it must be 1 or more"),
        ({"degree": 4}, "2 stages cannot be shared among 4 pipeline ranks"),
        ({"stages": 0}, "stages is 0; it must be 1 or more"),
        ({"stages": 1}, "1 stage cannot be shared among 2 pipeline ranks"),
        ({"stages": 4, "schedule": "gpipe"}, "figures of 2 stages and 2 positions of a pipeline with 4 stages and 2"),
        ({"microbatches": 0}, "microbatches is 0; it must be 1 or more"),
        ({"microbatches": 3}, "3 micro-batches do not divide the batch of 8"),
        ({"schedule": "foo"}, "there is no schedule 'foo'"),
        ({"position": 5}, "the pipeline axis stands at position 5 of mesh (dp=2,tp=1), which has 0 to 2"),
        ({"position": -1}, "the pipeline axis stands at position -1"),
        ({"axis": "dp"}, "the pipeline axis is called 'dp', as is one of mesh (dp=2,tp=1)"),
    ],
    ids=str,
)
def test_a_pipeline_that_cannot_be_played(changes: dict[str, object], text: str) -> None:
    refused(with_pipeline(made(staged=True), **changes), text)


def test_figures_of_other_stages_and_optimizers() -> None:
    plan = made(staged=True)
    refused(replace(plan, stages=plan.stages[:1]), "the plan has figures of 1 stage and 2 positions")
    refused(replace(plan, prediction=replace(plan.prediction, peak_memory_bytes=())), "the plan has figures of 2 stages and 0 positions")
    refused(replace(plan, optimizer="foo"), "optimizer 'foo' has no price here")
    refused(replace(made(staged=False), mesh=Mesh.parse("dp=2,microbatch=2")), "mesh (dp=2,microbatch=2) of the plan has the axis in time")


def test_a_damaged_plan_is_refused_wherever_it_is_used() -> None:
    wrong = with_parameter(made(staged=False), WEIGHT, held=("P", "R"))
    model, batch = example()
    for use in (
        lambda: autopar.plan(model, 4, batch, plan=wrong),
        lambda: autopar.verify(model, 4, batch, plan=wrong),
        lambda: autopar.check(model, wrong, batch),
    ):
        with pytest.raises(PlanError, match="cannot be held as 'P' on axis 'dp' of size 2; legal there: R, S0, S1, Z1, Z2, Z3"):
            use()
