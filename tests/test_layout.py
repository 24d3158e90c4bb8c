"""Layouts: text, shapes, and shards that make the whole again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL_GRAD, Layout, Placement, assemble, shard, take_shard
from autopar.mesh import Mesh

placements = st.one_of(
    st.sampled_from([REPLICATED, REPLICATED_PARTIAL_GRAD, PARTIAL]), st.builds(shard, st.integers(0, 9), st.integers(0, 9))
)


@st.composite
def layouts(draw: st.DrawFn, *, kinds: tuple[Placement, ...] = (REPLICATED, PARTIAL)) -> Layout:
    """Any layout on up to three axes: each atom is a multiple of all axes that shard it, nested in any order."""
    mesh = Mesh.of(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    sizes = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    spots = [shard(d, a) for d, dim in enumerate(sizes) for a in range(len(dim))]
    chosen = tuple(draw(st.sampled_from([*kinds, *spots])) for _ in mesh.sizes)
    for size, placement in zip(mesh.sizes, chosen, strict=True):
        if placement.is_sharded:
            sizes[placement.dim][placement.atom] *= size
    order = tuple(draw(st.permutations(range(len(mesh.sizes)))))
    return Layout(mesh, tuple(map(tuple, sizes)), chosen, order)


@given(placements)
def test_placement_parses_back(placement: Placement) -> None:
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize("text", ["R", "R*", "P", "S0", "S2.1"])
def test_placement_prints_as_documented(text: str) -> None:
    assert str(Placement.parse(text)) == text


@given(layouts())
def test_shards_make_the_whole(layout: Layout) -> None:
    whole = torch.arange(_numel(layout), dtype=torch.float32)
    whole = whole.reshape(layout.shape) + 1
    shards = [take_shard(whole, layout, layout.mesh.coordinate(rank)) for rank in range(layout.mesh.num_ranks)]
    assert {tuple(s.shape) for s in shards} == {layout.local_shape}
    assert torch.equal(assemble(shards, layout), whole)


@given(layouts(kinds=(REPLICATED,)))
def test_every_element_is_held_equally_often(layout: Layout) -> None:
    whole = torch.arange(_numel(layout)).reshape(layout.shape)
    held = torch.cat(
        [take_shard(whole, layout, layout.mesh.coordinate(rank)).flatten() for rank in range(layout.mesh.num_ranks)]
    )
    assert set(held.bincount(minlength=whole.numel()).tolist()) == {layout.mesh.num_ranks // layout.num_shards}


def test_shard_of_a_minor_factor_is_strided() -> None:
    """GPT-2's fused weight: rank 1 of 2 holds the second half of the heads of each of q, k and v."""
    layout = Layout(Mesh.of(2), ((3, 4),), (shard(0, 1),))
    assert take_shard(torch.arange(12), layout, (1,)).tolist() == [2, 3, 6, 7, 10, 11]
    assert layout.local_shape == (6,)


def test_order_says_which_axis_is_major() -> None:
    mesh, atoms, both = Mesh.of((2, 2)), ((8,),), (shard(0), shard(0))
    outer_first, inner_first = Layout(mesh, atoms, both), Layout(mesh, atoms, both, (1, 0))
    assert take_shard(torch.arange(8), outer_first, (0, 1)).tolist() == [2, 3]
    assert take_shard(torch.arange(8), inner_first, (0, 1)).tolist() == [4, 5]


def test_partial_sums_are_added() -> None:
    layout = Layout(Mesh.of(2), ((2,),), (PARTIAL,))
    assert assemble([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])], layout).tolist() == [11.0, 22.0]


def test_shards_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"atom 0 of dim 1 has size 6, which 4 shards do not divide"):
        Layout(Mesh.of((2, 2)), ((4,), (6,)), (shard(1), shard(1)))


def _numel(layout: Layout) -> int:
    numel = 1
    for size in layout.shape:
        numel *= size
    return numel


def test_there_is_one_object_for_each_placement() -> None:
    for placement in (REPLICATED, REPLICATED_PARTIAL_GRAD, PARTIAL, shard(1), shard(0, 2)):
        assert pickle.loads(pickle.dumps(placement)) is copy.deepcopy(placement) is Placement.parse(str(placement)) is placement
    assert len({REPLICATED, REPLICATED_PARTIAL_GRAD, PARTIAL, shard(1), shard(1, 1), shard(2)}) == 6
