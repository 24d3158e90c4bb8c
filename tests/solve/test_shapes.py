"""The ways to cut a grid that the search tries."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.solve.shapes import MANY_MICROBATCHES, MICROBATCHES_PER_RANK, pipelined


def cuts(grid: str, *kept: str) -> set[str]:
    """The grids with a pipeline axis."""
    return {str(shape.grid) for shape in pipelined([Mesh.parse(grid)], 64, kept=frozenset(kept))}


@pytest.mark.parametrize(
    "grid, expected",
    [
        ("gpu=4", {"pp=2,gpu=2", "pp=4,gpu=1"}),
        ("host=2,local=2", {"pp=2,local=2", "host=2,pp=2", "pp=4,local=1"}),
        (
            "node=4,gpu=8",
            {
                *("pp=2,node=2,gpu=8", "pp=4,gpu=8", "pp=8,gpu=4", "pp=16,gpu=2", "pp=32,gpu=1"),
                *("node=4,pp=2,gpu=4", "node=4,pp=4,gpu=2", "node=4,pp=8"),
            },
        ),
        (
            "rack=2,node=2,gpu=2",
            {"pp=2,node=2,gpu=2", "pp=4,gpu=2", "pp=8,gpu=1", "rack=2,pp=2,gpu=2", "rack=2,pp=4", "rack=2,node=2,pp=2"},
        ),
    ],
)
def test_stages_take_an_axis_a_part_of_it_or_several(grid: str, expected: set[str]) -> None:
    assert cuts(grid) == expected


def test_axes_of_pins_stay_inside_of_stages() -> None:
    assert cuts("rack=2,node=2,gpu=2", "node") == {"pp=2,node=2,gpu=2", "rack=2,node=2,pp=2"}


@pytest.mark.parametrize("per_rank", [MICROBATCHES_PER_RANK, MANY_MICROBATCHES])
def test_fewer_micro_batches_than_stages_are_among_them(per_rank: tuple[int, ...]) -> None:
    """They pay where launches take most of the time, in deep models too."""
    shapes = pipelined([Mesh.parse("gpu=4")], 64, per_rank=per_rank)
    found = [(shape.pipeline.degree, shape.pipeline.microbatches) for shape in shapes if shape.pipeline.schedule == "1f1b"]
    assert {(2, 1), (4, 1), (4, 2)} < set(found)
    assert found.index((4, 2)) > found.index((4, 4)), "last, since the bounds of others leave most of them out"


def test_every_shape_has_all_ranks_and_divides_the_batch() -> None:
    shapes = pipelined([Mesh.parse("node=4,gpu=8"), Mesh.parse("gpu=32")], 24)
    assert {shape.grid.num_ranks for shape in shapes} == {32}
    assert all(24 % shape.pipeline.microbatches == 0 for shape in shapes)
    assert len({(shape.mesh.sizes, shape.pipeline) for shape in shapes}) == len(shapes)
