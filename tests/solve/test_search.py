"""Shapes under a limit of memory: what is tried of them, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.mesh import Mesh
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from tests.solve.problems import machine, session


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_shape_that_is_too_slow_without_a_limit_is_not_solved_under_it(*, is_complete: bool) -> None:
    normal, shape = session("mlp").normal, Shape(Mesh.of(2))

    def search(limit_bytes: float) -> Search:
        return Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), limit_bytes, is_complete=is_complete)

    free = search(float("inf")).decide(shape)
    tight = search(0.9 * max(free.rank_bytes))
    tight.best = replace(free, step_time_s=0.9 * free.step_time_s)
    tight.try_shapes([shape])
    (tried,) = tight.tried
    assert ("as it is, and takes" in tried.reason) is not is_complete
    assert (tried.step_time_s >= free.step_time_s) is is_complete
