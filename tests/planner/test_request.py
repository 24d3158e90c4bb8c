"""Arguments of another kind are refused before a model is captured, and the text says which, what it was and what it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import AutoparError, CaptureError, InputError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.planner.request import Grid, check_functions, grids_of, load_plan, positional_and_keyword, shapes_in_force
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.shapes import pipelined
from tests import models
from tests.passes.test_microbatch import BatchNorm, Head, Many

MODEL, BATCH = nn.Linear(4, 4), torch.zeros(2, 4)


@pytest.mark.parametrize("plan", [3, True, [], {}, autopar.Manual, autopar.Mesh.of(4), b"plan.json"], ids=str)
def test_what_is_no_plan(plan: object) -> None:
    with pytest.raises(PlanError, match=r"plan is a Plan, a file that Plan\.save wrote, a Manual, or None for the planner to choose; got "):
        load_plan(plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["none.json", "", "auto"])
def test_a_plan_that_is_no_file(name: str, tmp_path: Path) -> None:
    for given in (str(tmp_path / name), tmp_path / name):
        with pytest.raises(PlanError, match=r"plan='.*' is no file; it takes a Plan, a file that Plan.save wrote"):
            load_plan(given)


@pytest.mark.parametrize("batch", [None, 3, "x", b"x", torch.Tensor, {3: BATCH}, {3: BATCH, "x": BATCH}], ids=lambda x: type(x).__name__)
def test_what_is_no_call(batch: object) -> None:
    with pytest.raises(InputError, match="what the model is called with: a dict by keyword, a tuple by position, or a tensor; got "):
        positional_and_keyword(batch)  # type: ignore[arg-type]


def test_calls() -> None:
    assert positional_and_keyword({"x": BATCH}) == ((), {"x": BATCH})
    assert positional_and_keyword([BATCH, 3]) == ((BATCH, 3), {})
    assert positional_and_keyword(BATCH) == ((BATCH,), {})


@pytest.mark.parametrize(
    "grid", [None, 2.0, True, b"22", {"dp": 2}, autopar.Cluster, ("a",), (2.0, 2), [[2, 2]], "\u00b2", "4x", "a=\u00b2"], ids=str
)
def test_what_is_no_grid(grid: object) -> None:
    with pytest.raises(MeshError):
        grids_of(grid, None)  # type: ignore[arg-type]


def test_a_plan_for_other_outputs() -> None:
    """Model and batch are those that it names, so that it says what else may differ."""
    example = models.gpt2(layers=1, batch=4)
    plan = autopar.plan(example.model, 2, example.batch, outputs="loss")
    with pytest.raises(PlanError, match="or give what it was made with: outputs=, loss_fn="):
        autopar.count(example.model, plan, example.batch)
    shorter = {name: value[:2] for name, value in example.batch.items()}
    with pytest.raises(PlanError, match=r"plan again for this model and batch$"):
        autopar.count(example.model, plan, shorter, outputs="loss")


@pytest.mark.parametrize("grid", [2**24 + 1, 10**20, f"4x{2**23}", Mesh.of((2, 2**24)), f"dp={10**20}"], ids=str)
def test_more_ranks_than_anyone_has(grid: Grid) -> None:
    with pytest.raises(MeshError, match="at most 16,777,216 can be planned for"):
        grids_of(grid, None)


@pytest.mark.parametrize(
    "loss_fn, text",
    [(3, "got 3; such as"), ("mse", "got 'mse'; such as"), (nn.MSELoss, r"got <class .*MSELoss'>; make one, as MSELoss\(\)")],
    ids=str,
)
def test_what_is_no_loss(loss_fn: object, text: str) -> None:
    with pytest.raises(PlanError, match=f"loss_fn is a function of the model's output, or a module, {text}"):
        check_functions(loss_fn, print)
    check_functions(nn.MSELoss(), print)
    check_functions(None, print)


def test_names_of_axes_that_plans_have_themselves() -> None:
    """The one of stages is called otherwise then."""
    with pytest.raises(MeshError, match=r"mesh \(microbatch=2,dp=2\): 'microbatch' is the axis in time"):
        grids_of("microbatch=2,dp=2", None)
    shapes = pipelined(grids_of("pp=4,dp=2", None), 8)
    assert {(shape.pipeline.axis, "pp" in shape.mesh.names) for shape in shapes} == {("pp", False), ("pp2", True)}
    assert all(shape.grid.num_ranks == 8 for shape in shapes)


def test_a_plan_is_of_its_optimizer() -> None:
    plan = autopar.plan(MODEL, 2, BATCH, loss_fn=torch.sum, optimizer="sgd")
    assert autopar.plan(MODEL, 2, BATCH, loss_fn=torch.sum, plan=plan).optimizer == "sgd"
    with pytest.raises(PlanError, match="the plan was made for optimizer 'sgd', and optimizer='adafactor' is asked for"):
        autopar.plan(MODEL, 2, BATCH, loss_fn=torch.sum, plan=plan, optimizer="adafactor")


def test_a_loss_function_holds_no_tensors() -> None:
    with pytest.raises(PlanError, match=r"loss_fn, a CrossEntropyLoss, holds tensors \(weight\), .* let the model have it"):
        check_functions(nn.CrossEntropyLoss(weight=torch.ones(3)), print)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"model": "gpt2"}, CaptureError, "the model is a torch.nn.Module, got 'gpt2'; build it first"),
        ({"model": nn.Linear}, CaptureError, r"the model is a torch.nn.Module, got <class .*; make one of it"),
        ({"batch": None}, InputError, "the batch is what the model is called with"),
        ({"plan": 3}, PlanError, "plan is a Plan"),
        ({"loss_fn": "mse"}, PlanError, "loss_fn is a function"),
        ({"report": None}, PlanError, "report is a function of a line of text, such as print, got None"),
        ({"optimizer": ["adamw"]}, PlanError, r"optimizer \['adamw'\] has no price here"),
        ({"offload": 3}, PlanError, "offload is text"),
        ({"compress": 3}, PlanError, "compress is one of"),
        ({"profile": 3}, PlanError, "profile is a MachineProfile, or a file .* got 3"),
        ({"pipeline": "no"}, PlanError, "pipeline is True or False, got 'no'"),
        ({"complete": 1}, PlanError, "complete is True or False, got 1"),
    ],
    ids=str,
)
def test_arguments_of_a_plan(arguments: dict[str, object], error: type[AutoparError], text: str) -> None:
    given = {"model": MODEL, "cluster": 2, "batch": BATCH} | arguments
    with pytest.raises(error, match=text):
        autopar.plan(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"model": nn.Linear}, CaptureError, "the model is a torch.nn.Module"),
        ({"plan": 3}, PlanError, "plan is a Plan"),
        ({"loss_fn": "mse"}, PlanError, "loss_fn is a function"),
        ({"compare_batches": "3"}, InputError, "compare_batches counts calls, and there cannot be '3'"),
        ({"initialize": None}, PlanError, "initialize is True or False, got None"),
        ({"device": "gpu"}, PlanError, "device is 'cpu' or 'cuda', where the model will run, got 'gpu'"),
    ],
    ids=str,
)
def test_arguments_of_a_parallel_model(arguments: dict[str, object], error: type[AutoparError], text: str) -> None:
    with pytest.raises(error, match=text):
        autopar.parallelize(**{"model": MODEL} | arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "configs, text",
    [
        ([autopar.Manual()], r"configs are Manuals or plans by name, .* got \[Manual"),
        ({"mine": "dp=2"}, "configs are Manuals or plans by name, .* got 'mine': 'dp=2'"),
        ({"auto": autopar.Manual(dp=2)}, "the row of the automatic plan is called 'auto'"),
    ],
    ids=str,
)
def test_configurations_to_compare(configs: object, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        autopar.compare(MODEL, 2, BATCH, configs)  # type: ignore[arg-type]


def of_rows(kind: type[Head], rows: int) -> tuple[Head, dict[str, torch.Tensor], Session]:
    model, batch = kind(), {"x": torch.randn(rows, 8), "labels": torch.arange(rows) % 4}
    return model, batch, open_session(make_skeleton(model), (), batch)


@pytest.mark.parametrize(
    "kind, rows, training, counts",
    [
        (Many, 16, True, [4, 1]),
        (Many, 6, True, [1]),
        (BatchNorm, 16, True, [4]),
        (BatchNorm, 16, False, [4, 1]),
        (BatchNorm, 6, False, [1]),
    ],
)
def test_micro_batches_of_other_calls(kind: type[Head], rows: int, training: bool, counts: list[int]) -> None:
    """They stay as many as in the plan wherever they can, and are averaged in training alone."""
    model, batch, _ = of_rows(kind, 8)
    plan = autopar.plan(model, 1, batch, plan=Manual(microbatches=4), average_microbatches=True)
    pipelines = [shape.pipeline for shape in shapes_in_force(plan, of_rows(kind, rows)[-1], training=training)]
    assert [pipeline.microbatches for pipeline in pipelines] == counts
    assert {pipeline.is_average for pipeline in pipelines} == {training and kind is BatchNorm}


def test_a_batch_that_averaged_micro_batches_do_not_divide() -> None:
    model, batch, _ = of_rows(BatchNorm, 8)
    plan = autopar.plan(model, 1, batch, plan=Manual(microbatches=4), average_microbatches=True)
    with pytest.raises(MicrobatchError, match=r"averages 4 micro-batches, which do not divide the batch of 6; .* \(drop_last=True"):
        shapes_in_force(plan, of_rows(BatchNorm, 6)[-1])
