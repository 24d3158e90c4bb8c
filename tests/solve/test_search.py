"""Shapes under a limit of memory: what is tried of them, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import api
from autopar.cost.cluster import Cluster
from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.planner.choose import _unlike
from autopar.solve.bound import Bound
from autopar.solve.cuts import most_stages
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from autopar.solve.staged import Staged
from tests.solve.problems import machine, session


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_shape_that_is_too_slow_without_a_limit_is_not_solved_under_it(*, is_complete: bool) -> None:
    """A complete search goes on, to what is proved to take too long."""
    normal, shape = session("mlp").normal, Shape(Mesh.of(2))

    def search(limit_bytes: float) -> Search:
        return Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), limit_bytes, is_complete=is_complete)

    free = search(float("inf")).decide(shape)
    tight = search(0.9 * max(free.rank_bytes))
    tight.best = replace(free, step_time_s=0.9 * free.step_time_s)
    tight.try_shapes([shape])
    (tried,) = tight.tried
    assert ("as it is, and takes" in tried.reason) is not is_complete
    assert tried.reason.endswith("or more") is is_complete


def test_a_limit_is_met_by_other_shards_and_by_computing_again_together() -> None:
    """ZeRO-3 with pointwise ops computed again, where other shards alone fit too, and are slower."""
    with torch.device("meta"):
        blocks = ((nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3))
        model, batch = nn.Sequential(*(layer for block in blocks for layer in block)), (torch.zeros(4096, 1024),)
    found = api.plan(
        model,
        Cluster(1, 8, "a100-80gb"),
        batch,
        loss_fn=lambda out: out.square().mean(),
        outputs="loss",
        memory_limit="161MiB",
        pipeline=False,
    )
    hand = found.with_(plan=Manual(dp=8, zero=3, microbatches=1, recompute="pointwise"))
    assert found.prediction.step_time_s <= hand.prediction.step_time_s


def test_a_step_takes_no_less_under_a_smaller_limit() -> None:
    """On one device, where the batch in parts is faster than what is computed again as soon as it does not fit whole."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(512, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True)
        model, batch = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False), (torch.zeros(16, 256, 512),)
    free = api.plan(model, Cluster(1, 1, "a100-80gb"), batch, loss_fn=lambda out: out.square().mean(), outputs="loss")
    found = [free, *(free.with_(memory_limit=limit) for limit in ("397MiB", "323MiB", "249MiB"))]
    times = [plan.prediction.step_time_s for plan in found]
    assert times == sorted(times)
    assert [plan.pipeline.microbatches for plan in found] == [1, 2, 4, 4]


def test_no_more_stages_are_tried_than_have_a_parameter_each() -> None:
    """They would take long to price: of 4,096 devices most shapes of a small model are such."""
    normal = session("mlp").normal
    most = most_stages(normal.module)
    search = Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), float("inf"))
    search.try_shapes(Shape(Mesh.of(1), Pipeline(stages, stages, 2)) for stages in (most, most + 1))
    (tried,) = search.tried
    assert not tried.reason
    assert search.pruned == {Bound.OPS: 1}


@pytest.mark.parametrize(
    "speeds, positions", [((1, 1, 1), {0}), ((1, 1, 2), {0, 2}), ((1, 2, 1), {0, 1, 2}), ((2, 1, 1), {0, 1})], ids=str
)
def test_stages_on_links_that_are_alike_are_tried_once(speeds: tuple[int, ...], positions: set[int]) -> None:
    """Of two axes next to each other; with another between them those of a stage would nest otherwise."""
    normal, prices = session("mlp").normal, machine(3)
    links = tuple(replace(link, bandwidth=speed * link.bandwidth) for link, speed in zip(prices.links, speeds, strict=True))
    search = Search(lambda _: normal, lambda grid: replace(prices, links=links), float("inf"))
    shapes = [Shape(Mesh.of((2, 2)), Pipeline(2, 2, 2, position=position)) for position in range(3)]
    left = _unlike(search, shapes)
    assert {shape.pipeline.position for shape in left} == positions
    assert search.pruned == {Bound.ALIKE: 3 - len(positions)}
    best_s = [min(search.decide(shape).step_time_s for shape in some) for some in (left, shapes)]
    assert best_s[0] == best_s[1]


def test_what_else_tells_such_stages_apart() -> None:
    """Sizes of axes, pins, and kinds of devices."""
    normal, prices = session("mlp").normal, machine(3)
    sizes = [Shape(Mesh.of(sizes), Pipeline(2, 2, 2)) for sizes in ((2, 4), (4, 2))]
    assert _unlike(Search(lambda _: normal, lambda _: prices, float("inf")), sizes) == sizes
    shapes = [Shape(Mesh.of((2, 2)), Pipeline(2, 2, 2, position=position)) for position in range(3)]
    pinned = Search(lambda _: normal, lambda _: prices, float("inf"), restrictions=[Pin("*", (("d0", "R"),))])
    assert _unlike(pinned, shapes) == shapes
    mixed = Cluster(1, 4, "a100-80gb") + Cluster(1, 4, "h100")
    kinds = Search(lambda _: normal, lambda grid: mixed.with_mesh(grid).profile, float("inf"))
    assert _unlike(kinds, shapes) == shapes


def test_a_model_without_parameters_to_train_is_planned() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    plan = api.plan(model, 2, (torch.randn(4, 8),))
    assert (plan.grid.num_ranks, plan.pipeline.stages) == (2, 1)
    assert plan.prediction.step_time_s > 0


@pytest.mark.parametrize("training, enough, count", [(True, None, 4), (True, 1, 1), (False, None, 1)])
def test_what_computes_nothing_again_is_not_solved_again(
    *, training: bool, enough: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is there more to solve where any shape that fits will do."""
    normal, shape = session("gpt2").normal, Shape(Mesh.of(2))

    def search(limit_bytes: float) -> Search:
        made = Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), limit_bytes, training=training, enough=enough)
        return replace(made, is_complete=True)

    free = search(float("inf")).decide(shape)
    solved, limited = list[Staged](), Search._limited

    def counted(self: Search, staged: Staged, *args: float, explain: bool = False) -> Staged:
        solved.append(staged)
        return limited(self, staged, *args, explain=explain)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "_limited", counted)
    monkeypatch.setattr(Search, "_saving", lambda *_: None)
    monkeypatch.setattr(Search, "_worth_s", lambda *_: float("inf"))
    search(0.98 * max(free.rank_bytes)).decide(shape)
    assert len(solved) == count


class Scanned(nn.Module):
    """Takes more than the rows of the program for memory say."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.weights = nn.Linear(6, 12), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.values(x).cumsum(1)
        loss: torch.Tensor = (self.weights(y).softmax(1) * y).sum(1).logsumexp(-1).mean() + y.amax((1, 2)).std()
        return loss


def test_what_fits_a_limit_fits_a_larger_one() -> None:
    """Where a layout takes more than the program knows, the next is asked for with less."""
    model, batch = Scanned(), (torch.randn(6, 6, 6),)
    peaks = [max(api.plan(model, "2x2", batch, memory_limit=b, pipeline=False).prediction.peak_memory_bytes) for b in (5000, 5297)]
    assert peaks[0] <= 5000
    assert peaks[1] <= 5297
