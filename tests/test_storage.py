"""Stored parameters: text, where ZeRO shards go, and how torch is told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.layout import REPLICATED, Atoms, Layout, Placement, shard, take_shard
from autopar.mesh import Mesh
from autopar.storage import (
    Held,
    Stored,
    has_room,
    parse_held,
    split_factors,
    storage_layout,
    torch_can_hold,
    use_layout,
)

dims = st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple), min_size=1, max_size=2).map(tuple)
sizes = st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3)
levels = st.sampled_from([Stored(1), Stored(2), Stored(3)])


@st.composite
def stored(draw: st.DrawFn) -> tuple[Mesh, Atoms, tuple[Held, ...]]:
    """A mesh, atoms, and some way to hold them, possible or not."""
    mesh, atoms = Mesh.of(draw(sizes)), draw(dims)
    spots = [shard(d, a) for d, dim in enumerate(atoms) for a in range(len(dim))]
    held = tuple(draw(st.one_of(st.just(REPLICATED), levels, st.sampled_from(spots))) for _ in mesh.sizes)
    try:
        use_layout(mesh, atoms, held)
    except PlanError:
        assume(False)
    return mesh, atoms, held


@pytest.mark.parametrize("text", ["R", "R*", "P", "S1.2", "Z1", "Z3"])
def test_text_parses_back(text: str) -> None:
    assert str(parse_held(text)) == text


@given(stored())
def test_storage_shards_what_use_leaves(case: tuple[Mesh, Atoms, tuple[Held, ...]]) -> None:
    mesh, atoms, held = case
    if not has_room(mesh, atoms, held):
        with pytest.raises(PlanError, match="no factor has room"):
            storage_layout(mesh, atoms, held)
        return
    use, layout = use_layout(mesh, atoms, held), storage_layout(mesh, atoms, held)
    zero = [axis for axis, h in enumerate(held) if isinstance(h, Stored)]
    for axis, h in enumerate(held):
        assert layout.placements[axis].is_sharded if axis in zero else layout.placements[axis] == h
    assert math.prod(layout.local_shape) * math.prod(mesh.sizes[a] for a in zero) == math.prod(use.local_shape)
    assert torch_can_hold(layout)


@given(stored())
def test_a_shard_is_a_part_of_the_copy_in_use(case: tuple[Mesh, Atoms, tuple[Held, ...]]) -> None:
    """So that a gather over the ZeRO axes alone gives it."""
    mesh, atoms, held = case
    assume(has_room(mesh, atoms, held))
    use, layout = use_layout(mesh, atoms, held), storage_layout(mesh, atoms, held)
    whole = torch.arange(math.prod(use.shape)).reshape(use.shape)
    for rank in range(mesh.num_ranks):
        coordinate = mesh.coordinate(rank)
        mine = set(take_shard(whole, layout, coordinate).flatten().tolist())
        assert mine <= set(take_shard(whole, use, coordinate).flatten().tolist())


def torch_shard(whole: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """What DTensor's rules give: placements in mesh order, a strided shard takes its part of each of ``split_factor`` pieces."""
    for axis, (placement, factor) in enumerate(zip(layout.placements, split_factors(layout), strict=True)):
        if placement.is_sharded:
            pieces = whole.chunk(factor, placement.dim)
            parts = [piece.chunk(layout.mesh.sizes[axis], placement.dim)[coordinate[axis]] for piece in pieces]
            whole = torch.cat(parts, placement.dim)
    return whole


@given(stored())
def test_split_factors_say_it_in_torch_words(case: tuple[Mesh, Atoms, tuple[Held, ...]]) -> None:
    mesh, atoms, held = case
    assume(has_room(mesh, atoms, held))
    layout = storage_layout(mesh, atoms, held)
    whole = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for rank in range(mesh.num_ranks):
        coordinate = mesh.coordinate(rank)
        assert torch.equal(torch_shard(whole, layout, coordinate), take_shard(whole, layout, coordinate))


@pytest.mark.parametrize(
    "placements, factors",
    [(("R", "S0.1"), (0, 3)), (("S0.1", "R"), (3, 0)), (("S0", "R"), (1, 0)), (("R", "S1"), (0, 1))],
)
def test_split_factors_by_hand(placements: tuple[str, ...], factors: tuple[int, ...]) -> None:
    layout = Layout(Mesh.of((3, 3)), ((3, 6), (9,)), tuple(map(Placement.parse, placements)))
    assert split_factors(layout) == factors
