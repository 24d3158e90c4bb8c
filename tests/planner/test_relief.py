"""Reliefs: every row is held against planning with its changed arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar import Cluster, Manual, Mesh, Plan, Relief, pin
from autopar.cost.updates import FOREACH_COPIES, UPDATE_COPIES
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.question import ask
from autopar.planner.relief import _more, _outputs, relief_text
from autopar.planner.request import Grid
from tests import models
from tests.marks import exhaustive
from tests.solve.problems import machine

pytestmark = pytest.mark.slow

KIB = 2**10
MLP = models.mlp(layers=1, hidden=64, intermediate=256, batch=16)
"""Parameters, gradients and state of AdamW are 519 KiB."""


class Classifier(torch.nn.Module):
    """Returns its logits with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(32, 2048, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, y), "logits": logits}


def relieved(of: models.Example = MLP, **asked: Any) -> dict[str, Relief]:
    """The rows by what they change, each planned again: with the same figures, or with no plan either."""
    asked = {"batch": of.batch, **asked}
    rows = autopar.relieve(of.model, **asked)
    for row in rows:
        if row.plan is None:
            with pytest.raises(PlanError):
                autopar.plan(of.model, **asked | row.change)
            continue
        plan: Plan = autopar.plan(of.model, **asked | row.change)
        assert plan.prediction.step_time_s == pytest.approx(row.step_time_s, rel=1e-6), row.what
        assert plan.prediction.peak_memory_bytes == row.peak_memory_bytes, row.what
    assert len({row.what for row in rows}) == len(rows)
    assert rows[0].what == "as asked"
    assert not rows[0].change
    return {row.what: row for row in rows}


def test_a_configuration_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies in (UPDATE_COPIES, FOREACH_COPIES):  # of two weights it would be most of the memory
        monkeypatch.setitem(copies, "adamw", 0)
    rows = relieved(cluster=4, plan=Manual(dp=4), memory_limit="500KiB")
    fitting = {what: row.fits for what, row in rows.items()}
    assert fitting == {
        "as asked": False,
        "recompute=pointwise": False,
        "recompute=selective": False,
        "recompute=full": False,
        "zero=1": True,
        "zero=2": True,
        "zero=3": True,
        "microbatches=4": False,
        "without Manual(dp=4, tp=1, zero=0)": True,
        "offload=optimizer": True,
        "offload=parameters": True,
        "offload=activations": False,
        "offload=optimizer+activations": True,
        "offload=parameters+activations": True,
        "optimizer sgd_momentum": True,
        "optimizer sgd": True,
        "a batch of 4 in place of 16": False,
        "4 x the ranks: 16, dp=16": False,
        "2 x the ranks: 8, tp=2": True,
        "2 x the ranks: 8, pp=2": True,
        "memory_limit 544 KiB": True,
    }
    assert rows["zero=1"].change == {"plan": Manual(dp=4, zero=1)}
    assert rows["as asked"].least_bytes == pytest.approx(533 * KIB, rel=1e-2)
    asked = {"cluster": 4, "batch": MLP.batch, "plan": Manual(dp=4)}
    with pytest.raises(InfeasibleError):
        autopar.plan(MLP.model, **asked, memory_limit=0.95 * max(rows["memory_limit 544 KiB"].peak_memory_bytes))  # type: ignore[arg-type]


def test_settings_that_help_only_together() -> None:
    example = models.mlp(layers=1, hidden=64, intermediate=256, batch=64)
    rows = autopar.relieve(example.model, 2, example.batch, plan=Manual(dp=2), memory_limit="500KiB")
    fitting = {row.what: row.fits for row in rows}
    together = "zero=3, microbatches=32, recompute=full"
    assert fitting[together]
    assert not any(fitting[what] for what in ("recompute=full", "zero=3", "microbatches=32"))
    (row,) = (row for row in rows if row.what == together)
    assert row.change == {"plan": Manual(dp=2, zero=3, microbatches=32, recompute="full")}


def test_recomputation_fits_where_activations_are_what_is_large() -> None:
    example = models.speaker(layers=4, batch=64, sequence=16)
    again = autopar.plan(example.model, 2, example.batch, plan=Manual(dp=2, recompute="full"))
    limit = 1.02 * max(again.prediction.peak_memory_bytes)
    rows = {row.what: row for row in autopar.relieve(example.model, 2, example.batch, plan=Manual(dp=2), memory_limit=limit)}
    assert not rows["as asked"].fits
    assert rows["recompute=full"].fits
    assert rows["recompute=full"].peak_memory_bytes == again.prediction.peak_memory_bytes
    assert rows["recompute=full"].step_time_s == pytest.approx(again.prediction.step_time_s, rel=1e-6)


def test_outputs_that_come_back_whole_may_be_what_is_large() -> None:
    """512 KiB of logits on each rank, beside 192 KiB of its part of a weight and its state."""
    model, batch = Classifier(), {"x": torch.randn(64, 32), "y": torch.randint(2048, (64,))}
    asked = ask(model, 4, batch, memory_limit="650KiB")
    said = "outputs of the model come back whole to every rank and take 512 KiB: outputs='loss' gives the loss alone"
    with pytest.raises(InfeasibleError, match=said):
        Plan.answer(asked)
    ((change,),) = _outputs(asked)
    assert change.arguments == {"outputs": "loss"}
    plan = autopar.plan(model, 4, batch, memory_limit="650KiB", outputs="loss")
    assert Plan.answer(change.question).prediction == plan.prediction
    assert not _outputs(ask(model, 4, batch, outputs="loss"))
    assert not _outputs(ask(MLP.model, 4, MLP.batch))  # whose loss is all that it gives


@exhaustive
def test_more_ranks_for_the_solver_are_the_fewest() -> None:
    rows = relieved(cluster=1, memory_limit="200KiB")
    (row,) = (row for row in rows.values() if "ranks" in row.what)
    assert row.fits
    assert row.what == "4 x the ranks: 4"
    assert row.change == {"cluster": 4}
    with pytest.raises(InfeasibleError):
        autopar.plan(MLP.model, 2, MLP.batch, memory_limit="200KiB")
    (limit,) = (row for row in rows.values() if "memory_limit" in row.change)
    with pytest.raises(InfeasibleError):
        autopar.plan(MLP.model, 1, MLP.batch, memory_limit=0.95 * max(limit.peak_memory_bytes))


@exhaustive
def test_a_smaller_batch_fits_where_it_must_be_whole() -> None:
    """Batch norm has no micro-batches."""
    example = models.batch_norm(width=32, batch=32)
    rows = relieved(of=example, cluster=1, memory_limit="1MiB")
    row = rows["a batch of 16 in place of 32"]
    assert row.fits
    batch: Any = row.change["batch"]
    assert all(tensor.shape[0] == 16 for tensor in batch.values())


def test_pins_of_a_plan_that_fits_are_priced() -> None:
    pins = (pin("blocks.0.1.weight", d0="zero3"), pin("blocks.0.0.weight", d0="replicated"))
    rows = relieved(cluster="2", constraints=pins)
    assert list(rows) == ["as asked", f"without pin {pins[0]}", f"without pin {pins[1]}", "without pins"]
    assert all(row.fits for row in rows.values())
    assert rows[f"without pin {pins[0]}"].change == {"constraints": pins[1:]}
    assert rows[f"without pin {pins[0]}"].step_time_s < rows["as asked"].step_time_s
    assert rows[f"without pin {pins[1]}"].step_time_s == pytest.approx(rows["as asked"].step_time_s, rel=1e-2)


def test_pins_that_go_against_each_other() -> None:
    pins = (pin("blocks.0.1.weight", d0="column"), pin("blocks.0.1.weight", d0="row"))
    rows = relieved(cluster="2", constraints=pins)
    assert [row.fits for row in rows.values()] == [False, True, True, True]
    assert "these cannot hold together" in rows["as asked"].reason


def test_a_plan_in_force_and_a_plain_request() -> None:
    assert list(relieved(cluster="2")) == ["as asked"]
    plan = autopar.plan(MLP.model, "2", MLP.batch)
    assert list(relieved(cluster="2", plan=plan)) == ["as asked", "without the plan"]


def test_other_errors_are_raised() -> None:
    with pytest.raises(PlanError, match="'bloks' matches no parameter"):
        autopar.relieve(MLP.model, 2, MLP.batch, constraints=[pin("bloks", d0="row")])


@pytest.mark.parametrize(
    "grid, more",
    [
        (2, 8),
        ("2x3", Mesh.of((8, 3))),
        ((2,), Mesh.of((8,))),
        ("dp=2,tp=3", Mesh.parse("dp=8,tp=3")),
        (Mesh.parse("dp=2,tp=3"), Mesh.parse("dp=8,tp=3")),
        (Cluster(2, 8), Cluster(8, 8)),
        (Cluster(2, 8) + Cluster(1, 8, "h100"), Cluster(8, 8) + Cluster(4, 8, "h100")),
        (Cluster(1, 6).with_mesh(Mesh.parse("dp=2,tp=3")), Cluster(4, 6).with_mesh(Mesh.parse("dp=8,tp=3"))),
        (Cluster.from_mesh(Mesh.of(2), machine(1)), Cluster.from_mesh(Mesh.of(8), machine(1))),
    ],
)
def test_more_of_a_grid(grid: Grid, more: Grid) -> None:
    found = _more(grid, 4)
    assert found == more
    if isinstance(found, Cluster):
        assert found.profile.links


def test_table() -> None:
    plan = autopar.plan(MLP.model, 2, MLP.batch)
    errors = InfeasibleError("too much", least_bytes=3 * 2**30), PlanError("not divisible")
    rows = [Relief("as asked", {}, error=errors[0]), Relief("else", {}, error=errors[1]), Relief("other", {}, plan)]
    title, _, first, second, third, reason = relief_text(rows).splitlines()
    assert title.split() == ["change", "fits", "step", "samples/s", "peak", "(least)"]
    assert first.split() == ["as", "asked", "no", "-", "-", "(3", "GiB)"]
    assert second.split() == ["else", "no", "-", "-", "-"]
    assert third.split()[:2] == ["other", "yes"]
    assert reason == "else: not divisible"


def test_the_table_counts_in_the_unit_of_the_batch() -> None:
    plan = autopar.plan(MLP.model, 2, MLP.batch)
    for unit in ("tokens", "samples"):
        made = replace(plan, prediction=replace(plan.prediction, unit=unit))
        rows = [Relief("as asked", {}, error=PlanError("too much")), Relief("other", {}, made)]
        assert f"{unit}/s" in relief_text(rows).splitlines()[0].split()
