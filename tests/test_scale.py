"""`autopar.scale`: each row is a plan by itself, from one capture."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner, Result

from autopar import api
from autopar.capture import trace
from autopar.cli import app
from autopar.cli.scale import read_count, read_sizes
from autopar.cost.cluster import Cluster
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.planner import session
from autopar.scale import scale
from autopar.show.scaling import Scaling
from tests import models
from tests.planner.test_question import without_times

pytestmark = pytest.mark.slow

CLUSTER = Cluster(1, 2, "h100")


@cache
def example() -> models.Example:
    return models.mlp(layers=1)


@cache
def strong() -> Scaling:
    return scale(example().model, CLUSTER, [1, 2, 4], example().batch, tokens=3.6e9, price_per_gpu_hour=2, noise_scale_tokens=8)


def captures() -> mock._patch[mock.MagicMock]:
    return mock.patch.object(session, "capture", side_effect=trace.capture)


def test_rows_are_plans() -> None:
    with captures() as capture:
        found = scale(example().model, CLUSTER, [1, 2], example().batch)
    assert capture.call_count == 1
    for row in found.rows:
        assert row.plan is not None
        fresh = api.plan(example().model, Cluster(row.nodes, 2, "h100"), example().batch)
        assert without_times(row.plan) == without_times(fresh)


def test_figures_are_relative_to_the_smallest_size() -> None:
    first, *others = strong().rows
    assert strong().base is first
    assert (first.nodes, first.ranks, first.batch_rows) == (1, 2, 8)
    assert first.efficiency == 1
    for row in others:
        assert row.efficiency == pytest.approx(first.step_time_s * first.ranks / (row.step_time_s * row.ranks))
        assert row.gpu_hours == pytest.approx(3.6e9 / row.tokens_per_step * row.step_time_s * row.ranks / 3600)
        assert row.cost == pytest.approx(2 * row.gpu_hours)
        assert row.learning_rate_factor == 1


def test_noise_scale() -> None:
    batch = strong().rows[0].batch
    assert batch is not None
    assert batch.tokens == pytest.approx(8)  # rows: the input is of floats
    assert (batch.data_factor, batch.step_factor) == pytest.approx((2, 2))
    assert "a batch of 8 tokens is 1 critical batches: 2 times the least data and 2 times the least steps" in str(strong())


def test_weak_scaling_captures_once() -> None:
    with captures() as capture:
        found = scale(example().model, CLUSTER, [1, 2], example().batch, weak=True, noise_scale_tokens=8)
    assert capture.call_count == 1
    assert [row.batch_rows for row in found.rows] == [8, 16]
    grown = {name: x.new_empty((16, *x.shape[1:])) for name, x in example().batch.items()}
    last = found.rows[1]
    assert last.plan is not None
    assert without_times(last.plan) == without_times(api.plan(example().model, Cluster(2, 2, "h100"), grown))
    assert last.learning_rate_factor == pytest.approx((1 + 1) / (1 + 1 / 2))
    assert last.efficiency == pytest.approx(found.rows[0].step_time_s / last.step_time_s)


def test_a_size_that_does_not_fit_says_why() -> None:
    found = scale(example().model, CLUSTER, [1, 4], example().batch, memory_limit="30 KiB", pipeline=False)
    small, large = found.rows
    assert not small.fits
    assert "no plan fits the memory limit of 30 KiB" in small.reason
    assert math.isnan(small.efficiency)
    assert large.efficiency == 1
    assert found.base is large


@pytest.mark.parametrize("sizes", [[], [0, 1], [-1], [2, 1], [1, 1], 4, None, "124", [1, 2.0], [True, 2]], ids=str)
def test_sizes_that_are_none(sizes: object) -> None:
    with pytest.raises(MeshError, match=rf"sizes are numbers of nodes, .*; got {re.escape(repr(sizes))}$"):
        scale(example().model, CLUSTER, sizes, example().batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", [8, "1x8", None, Mesh.of(8)], ids=str)
def test_what_has_no_nodes_is_refused(cluster: object) -> None:
    with pytest.raises(MeshError, match="scale counts the nodes of a Cluster, such as"):
        scale(example().model, cluster, [1], example().batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokens", "price_per_gpu_hour", "noise_scale_tokens"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1e9", True])
def test_numbers_that_are_none(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"{name} must be a positive number"):
        scale(example().model, CLUSTER, [1], example().batch, **{name: value})  # type: ignore[arg-type]


def test_clusters_of_one_size_are_refused() -> None:
    with pytest.raises(MeshError, match="regrouped or measured"):
        scale(example().model, Cluster(1, 4, "h100").with_mesh(Mesh.of((2, 2))), [1], example().batch)


def test_clusters_of_several_kinds_are_refused() -> None:
    with pytest.raises(MeshError, match="a cluster of h100 and l4 has no one kind of node"):
        scale(example().model, CLUSTER + Cluster(1, 2, "l4"), [1], example().batch)


def test_a_batch_grows_to_whole_rows() -> None:
    batch = {name: torch.empty(5, *x.shape[1:]) for name, x in example().batch.items()}
    with pytest.raises(PlanError, match="a batch of 5 rows on 2 nodes is no whole number of rows on 3"):
        scale(example().model, CLUSTER, [2, 3], batch, weak=True)


def run(*args: str | Path) -> Result:
    command = ("scale", "tests.test_cli:small_mlp", "--real", "--cluster", "1x2:h100")
    return CliRunner().invoke(app, [str(arg) for arg in (*command, *args)])


def test_command() -> None:
    result = run("--sizes", "1,2", "--tokens", "1B", "--price", "2.5", "--noise-scale", "16", "--weak")
    assert result.exit_code == 0, result.output
    for word in ("Mlp on nodes of 2 h100, the batch grows", "GPU-hours", "cost", "learning rate 1.33 times that of 16 tokens"):
        assert word in result.stdout


def test_command_json() -> None:
    result = run("--sizes", "1", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["efficiency"] == 1
    assert row["gpu_hours"] is None


@pytest.mark.parametrize(
    "options, word",
    [
        (("--sizes", "1,two"), "'1,two'"),
        (("--sizes", "2,1"), "increasing"),
        (("--sizes", "1", "--tokens", "300X"), "'300X'"),
        (("--sizes", "1", "--price", "-1"), "price_per_gpu_hour"),
    ],
)
def test_command_errors(options: tuple[str, ...], word: str) -> None:
    result = run(*options)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert word in result.stderr


def test_numbers() -> None:
    assert [read_count(text) for text in ("300B", "1.5T", "2m", "512k", "4096", "1e9")] == [3e11, 1.5e12, 2e6, 5.12e5, 4096, 1e9]
    assert read_sizes("1, 2,4") == [1, 2, 4]
    for wrong in ("", "B", "300X", "many"):
        with pytest.raises(PlanError, match="reads like"):
            read_count(wrong)
    with pytest.raises(MeshError, match="'1,,2'"):
        read_sizes("1,,2")
