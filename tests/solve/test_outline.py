"""Sketches against the whole model, solved, cut and played."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from autopar.cost.machine import MachineProfile
from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.session import _try_deeply
from autopar.solve.decide import Decision
from autopar.solve.fold import fold
from autopar.solve.outline import Outline, Sketch
from autopar.solve.search import Search
from autopar.solve.shapes import Shape, pipelined
from tests.solve.problems import machine, session

LAYERS = 12


def machine_of(grid: Mesh) -> MachineProfile:
    return machine(len(grid.sizes))


def searches(limit_bytes: float = float("inf")) -> tuple[Search, Outline]:
    normal = session("llama", LAYERS).normal
    search = Search(lambda _: normal, machine_of, limit_bytes)
    folded = fold(normal)
    assert folded is not None
    return search, Outline(folded, search)


SHAPES = [
    Shape(Mesh(("a",), (2,)), Pipeline(2, 2, 2, "1f1b")),
    Shape(Mesh(("a",), (2,)), Pipeline(3, 3, 4, "zb-h1")),
    Shape(Mesh(("a",), (2,)), Pipeline(2, 4, 4, "interleaved")),
    Shape(Mesh(("a",), (4,)), Pipeline(4, 4, 4, "1f1b")),
    Shape(Mesh(("a", "b"), (2, 2))),
]


@cache
def bound_of(shape: Shape) -> Sketch:
    _, outline = searches()
    (bound,) = outline.bounds([shape])
    return bound


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sketch_takes_what_the_whole_takes(shape: Shape) -> None:
    search, _ = searches()
    whole, sketch = search.decide(shape), bound_of(shape)
    assert sketch.step_time_s == pytest.approx(whole.step_time_s, rel=0.02)
    assert sketch.peak_bytes == pytest.approx(whole.rank_bytes, rel=0.15)  # the whole is also cut within blocks


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_a_limit_of_memory(shape: Shape) -> None:
    """With less than it needs without, more is computed again, or sharded otherwise. The whole model then fits, and takes no longer."""
    limit = 0.9 * max(bound_of(shape).peak_bytes)
    search, outline = searches(limit)
    (bound,) = outline.bounds([shape])
    sketch = outline.sketch(bound)
    assert max(sketch.peak_bytes) <= limit * 1.001
    assert sketch.step_time_s >= bound.step_time_s * 0.999
    search.take(sketch.shape, sketch.levels, sketch.decision)
    assert search.best is not None
    assert search.best.fits(limit)
    assert search.best.step_time_s <= sketch.step_time_s * 1.02


def test_a_limit_that_nothing_fits() -> None:
    search, outline = searches(1e3)
    assert outline.search_shapes(SHAPES[:1]) == []
    assert all(alternative.reason for alternative in search.tried)


@pytest.mark.slow
def test_the_search_finds_what_solving_every_shape_whole_finds() -> None:
    shapes = [*pipelined([Mesh(("a", "b"), (2, 4))], 4, per_rank=(1,)), Shape(Mesh(("a", "b"), (2, 4)))]
    search, outline = searches()
    found = outline.search_shapes(shapes)[0]
    best_s = float("inf")
    for shape in shapes:
        try:
            best_s = min(best_s, search.decide(shape).step_time_s)
        except PlanError:
            continue
    assert found.step_time_s == pytest.approx(best_s, rel=0.02)
    assert search.pruned + len(search.tried) >= len(shapes) // 2


def test_more_stages_than_blocks_are_left_out() -> None:
    search, outline = searches()
    assert outline.search_shapes([Shape(Mesh(("a",), (2,)), Pipeline(16, 16, 16, "1f1b"))]) == []
    assert search.pruned == 1


def test_stages_of_a_rank_share_its_memory() -> None:
    """Interleaved, two stages a rank: a limit between the fullest stage and the fullest rank is one to heed."""
    search, _ = searches()
    shape = SHAPES[2]
    whole = search.decide(shape)
    fullest_stage = max(use.total for use in whole.memory)
    assert max(whole.rank_bytes) > 1.3 * fullest_stage
    assert sum(whole.rank_bytes) <= sum(use.total for use in whole.memory)
    limit = (max(whole.rank_bytes) + fullest_stage) / 2
    assert not whole.fits(limit)
    assert max(searches(limit)[0].decide(shape).rank_bytes) <= limit * 1.001


def test_where_the_fastest_is_no_plan_after_all_the_next_is_made_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit may be one that the sketch just fits, and the whole does not."""
    search, outline = searches()
    take, tried = Search.take, []

    def take_second(self: Search, shape: Shape, levels: Sequence[str], like: Decision) -> None:
        tried.append(shape)
        if len(tried) == 1:
            raise InfeasibleError("does not fit")
        take(self, shape, levels, like)

    monkeypatch.setattr(Search, "take", take_second)
    assert _try_deeply(search, outline.folded, [Shape(Mesh(("a",), (4,)))], 4)
    assert len(tried) == 2
    assert search.best is not None
    assert search.best.shape == tried[1]
