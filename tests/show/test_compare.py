from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.piece import Piece
from autopar.plan import CollectivePlan, LinkPlan, Pipeline
from autopar.show.compare import Row, compare_text, plan_row
from autopar.solve import footprint
from tests.show.plans import small_plan


def test_the_table(golden: Callable[[str, str], None]) -> None:
    prediction = small_plan().prediction
    slow = replace(prediction, step_time_s=2 * prediction.step_time_s, mfu=0.0)
    rows = [
        Row("automatic", True, "", prediction, 0.0263, 3 * 2**30),
        Row("megatron", True, "", slow, None, 5 * 2**30),
        Row("ddp", False, "needs 93.1 GiB on rank 0, have 80", slow, None, 2**30),
        Row("tp=5", False, "5 does not divide the 12 heads", None, None, 0),
    ]
    text = compare_text(rows)
    golden("show/compare_text", text)
    assert max(map(len, text.splitlines())) <= 100


def test_figures_are_on_the_row() -> None:
    prediction = small_plan().prediction
    row = Row("automatic", True, "", prediction, None, 0)
    for name in ("step_time_s", "tokens_per_s", "mfu", "bubble_fraction", "exposed_comm_s", "peak_memory_bytes"):
        assert getattr(row, name) == getattr(prediction, name)


def test_no_rows() -> None:
    assert "plan" in compare_text([])


def test_a_row_tells_how_it_is_laid_out() -> None:
    """Axes with what holds most elements of the parameters."""
    plan = small_plan()
    weight, *others = plan.parameters
    large = replace(weight, factors=((1000,), (30,)), held=("Z1", "S1.2"))
    small = [replace(p, factors=((100,),), held=("R", "R")) for p in others[:1]]
    row = plan_row("mine", replace(plan, parameters=(large, *small), pipeline=Pipeline(1, 1, 4)))
    assert row.layout == f"{plan.grid}, 4 micro-batches; parameters dp Z1 99.7%, tp S 99.7%"
    assert f"mine: {row.layout}" in compare_text([row]).splitlines()


def test_what_is_next_to_nothing_is_told_as_nothing() -> None:
    prediction = replace(small_plan().prediction, step_time_s=2.0, exposed_comm_s=3e-8)
    row = Row("mine", True, "", prediction, None, 0, exposed_by_kind_s={"all_reduce": 3e-8})
    assert " ns" not in compare_text([row])
    assert "all_reduce" not in compare_text([row])
    assert "all_reduce 30 ms" in compare_text([replace(row, exposed_by_kind_s={"all_reduce": 0.03})])


EXPOSED = {
    "dp": Manual(dp=4),
    "tp": Manual(tp=4),
    "zero1": Manual(dp=2, tp=2, zero=1),
    "zero2": Manual(dp=4, zero=2),
    "zero3": Manual(dp=4, zero=3),
    "accumulating": Manual(dp=4, microbatches=2),
    "accumulating zero1": Manual(dp=4, microbatches=2, zero=1),
    "accumulating zero2": Manual(dp=4, microbatches=4, zero=2),
    "accumulating zero3": Manual(dp=2, tp=2, microbatches=2, zero=3),
    "again": Manual(dp=2, tp=2, microbatches=2, recompute="full"),
    "again zero3": Manual(dp=4, zero=3, recompute="full"),
    "1f1b": Manual(pp=2, dp=2, microbatches=4, zero=2),
    "zb-h1": Manual(pp=2, dp=2, microbatches=8, schedule="zb-h1"),
    "interleaved": Manual(pp=2, tp=2, microbatches=4, schedule="interleaved:2", recompute="full"),
}


ON_GPUS = [(name, "none", "a100-80gb") for name in EXPOSED]
ON_THE_HOST = [(name, "activations", kind) for name in ("dp", "again", "zb-h1") for kind in ("a100-80gb", "cpu")]


@pytest.mark.parametrize("name, offload, kind", [*ON_GPUS, *ON_THE_HOST])
def test_what_is_exposed_by_kind_adds_up_to_the_prediction(name: str, offload: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do copies that computation waits for beside communication; those of one memory are the host's."""
    monkeypatch.setattr(footprint, "LARGE_NUM_BYTES", 1024)
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        model, batch = nn.Sequential(*blocks), (torch.empty(64, 16, 64),)
    asked = {"plan": EXPOSED[name], "offload": offload, "loss_fn": lambda y: y.square().mean()}
    plan = autopar.plan(model, autopar.Cluster(1, 4, kind), batch, **asked)  # type: ignore[arg-type]
    exposed_s = plan.prediction.exposed_comm_s
    assert exposed_s > 0
    assert sum(plan_row("mine", plan).exposed_by_kind_s.values()) == pytest.approx(exposed_s, rel=1e-6)
    assert exposed_s >= plan.prediction.blocking_comm_s * (1 - 1e-9)


def test_a_row_tells_where_time_and_bytes_go() -> None:
    """Two micro-batches, two stages: what is waited for in each, what computation is too short for, half of what is reduced at the end."""
    plan = small_plan()
    moves = (
        CollectivePlan("all_reduce", "dp", "forward", "linear", "h.0", 100, 1e-3, 2),
        CollectivePlan("all_gather", "tp", "forward", "linear", "h.0", 50, 2e-3, 1),
        CollectivePlan("reduce_scatter", "dp", "backward", plan.parameters[0].name, "", 10, 3e-3, 1),
        CollectivePlan("all_gather", "dp", "forward", plan.parameters[0].name, "", 20, 1e-3, 3),
    )
    pieces = (
        Piece("forward", "all_gather", "dp", 0.0, 0.3, 20, 3, "w"),
        Piece("forward", "compute", "-", 0.2, 0.0, 0, 1, "h.0"),
        Piece("forward", "all_reduce", "dp", 0.05, 0.0, 100, 2, "linear"),
        Piece("backward", "compute", "-", 0.4, 0.0, 0, 1, "h.0"),
        Piece("backward", "reduce_scatter", "dp", 0.0, 0.4, 10, 1, "w"),
        Piece("reduce", "reduce_scatter", "dp", 0.3, 0.0, 10, 1, "w"),
    )
    stage = replace(plan.stages[0], inside=pieces, reduce_s=0.3, covered_s=0.15)
    stage = replace(stage, send_forward_bytes=14)
    stages, pipeline = (stage, replace(stage, inside=pieces[1:2], send_forward_bytes=0)), Pipeline(2, 2, 2, "1f1b")
    prediction = replace(plan.prediction, tokens_per_s=80.0)
    links = (LinkPlan("pp", ("between nodes",), (2,)), *(LinkPlan(a, ("inside a node",), (n,)) for a, n in (("dp", 2), ("tp", 4))))
    plan = replace(plan, collectives=moves, prediction=prediction, stages=stages, pipeline=pipeline, links=links)
    row = plan_row("mine", plan)
    assert row.exposed_by_kind_s == pytest.approx({"all_reduce": 0.05, "all_gather": 0.1, "reduce_scatter": 0.15 / 2})
    assert row.bytes_by_axis == {"dp": 270, "tp": 50}
    assert row.moved_bytes == 320
    assert row.bytes_by_level == {"between nodes": 14, "inside a node": 136}
    assert row.tokens_per_s_per_gpu == 80.0 / plan.grid.num_ranks
    line = "mine: exposed all_gather 100 ms, reduce_scatter 75 ms, all_reduce 50 ms; moved on axis dp 270 B, tp 50 B"
    line += "; a rank sends between nodes 14 B, inside a node 136 B"
    assert line in compare_text([row]).splitlines()
