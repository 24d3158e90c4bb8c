"""Costs as formulas: they say what the prices are made of, with the numbers of the plan."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from autopar import Cluster, Manual, Plan, api
from autopar.errors import PlanError
from autopar.graph import Value, specs_of
from autopar.planner.formula import formulas
from autopar.solve.names import find_by_name
from tests import models


@cache
def planned() -> Plan:
    """Width 32 and 64, a batch of 16 over two ranks and in two parts, weights by column and row over two."""
    model, batch = models.mlp(layers=1, batch=16)
    return api.plan(model, 4, batch, plan=Manual(dp=2, tp=2, zero=1, microbatches=2))


def op_named(module: str) -> str:
    return next(op.name for op in planned().ops if op.module == module and op.op == "aten.linear")


def row(text: str, what: str, unit: str) -> tuple[str, str]:
    """Formula and value of a line of an explanation."""
    found = re.search(rf"^  {what} +(\S.*) = ([\d.]+ ?\w*{unit})$", text, re.MULTILINE)
    assert found, text
    return found[1], found[2]


def test_a_linear_by_column() -> None:
    """4 samples of 32 features to 32 of 64: 2 * 4 * 32 * 32 flops, and twice as many backward; the input and the weight are kept."""
    text = planned().explain(op_named("blocks.0.1"), formula=True)
    assert "b0 = 16, k = 32, n = 64, dp = 2, tp = 2, microbatch = 2" in text
    assert row(text, "forward", "flop") == ("2*b0*k*n/(dp*microbatch*tp)", "8.19 kflop")
    assert row(text, "backward", "flop") == ("4*b0*k*n/(dp*microbatch*tp)", "16.4 kflop")
    assert row(text, "forward", "B") == ("4*(b0*k/(dp*microbatch) + b0*n/(dp*microbatch*tp) + k*n/tp)", "5 KiB")
    assert row(text, "kept", "B") == ("4*k*(b0/(dp*microbatch) + n/tp)", "4.50 KiB")


def test_biases_that_products_of_gpus_add_are_told() -> None:
    model, batch = models.mlp(layers=1, batch=16)
    for device, count in (("cpu", 0), ("a100-80gb", 2)):
        plan = api.plan(model, Cluster(1, 4, device), batch, plan=Manual(dp=4))
        told = [plan.explain(op.name, formula=True).splitlines()[0] for op in plan.ops if op.op == "aten.add.Tensor"]
        assert sum("; the product before it adds this bias, in no time of its own" in line for line in told) == count


def test_a_parameter_of_zero_1() -> None:
    """32 x 64 numbers: a quarter is stored, the gradient and the gathered copy are those of the column."""
    text = planned().explain("blocks.0.1.weight", formula=True)
    assert "N = 2048, dp = 2, tp = 2" in text
    rows = {what: row(text, what, "B") for what in ("parameter", "gradient", "optimizer", "gathered")}
    assert rows == {
        "parameter": ("4*N/(dp*tp)", "2 KiB"),
        "gradient": ("4*N/tp", "4 KiB"),
        "optimizer": ("8*N/(dp*tp)", "4 KiB"),
        "gathered": ("4*N/tp", "4 KiB"),
    }
    assert planned().parameter("blocks.0.1.weight").num_bytes == 2048


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer, offload", [("adamw_master", "none"), ("adamw", "optimizer"), ("adamw", "parameters")])
def test_parameters_that_are_not_on_the_device(tmp_path: Path, optimizer: str, offload: str, zero: int) -> None:
    """ZeRO-1 and -2 store float32 copies alone, offload stores on the host; formulas say what memory counts."""
    model, batch = models.mlp(layers=1, batch=16)
    if optimizer == "adamw_master":
        model, batch = model.bfloat16(), {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    asked = Manual(dp=4, zero=zero, microbatches=2)
    plan = api.plan(model, Cluster(1, 4, "a100-80gb"), batch, plan=asked, optimizer=optimizer, offload=offload)
    plan.to_html(tmp_path / "plan.html")
    assert plan.decision is not None
    problem, pricer = plan.decision.problem, plan.decision.prices.pricer
    for name in ("blocks.0.1.weight", "blocks.0.1.bias"):
        _, node = find_by_name(problem, name)
        index = problem.cluster_of[node]
        held = problem.clusters[index].gives(Value(node), plan.decision.solution.variants[index])
        taken = pricer.parameter_bytes(specs_of(node)[0], held)
        told = {amount.what: amount.value for amount in formulas(plan.decision, name).amounts}
        assert told == {what: size for what, size in taken._asdict().items() if size and what != "reduced"}


def test_every_op_has_formulas() -> None:
    for op in planned().ops:
        assert planned().explain(op.name, formula=True).startswith(f"{op.name}: {op.op}, rule ")


def test_what_is_not_there() -> None:
    with pytest.raises(PlanError, match="no parameter or op 'nothing'"):
        planned().explain("nothing", formula=True)
