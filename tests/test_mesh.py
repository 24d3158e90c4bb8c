"""Meshes: text, numbering of ranks, groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(Mesh.of)


@given(meshes)
def test_parses_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@given(meshes)
def test_ranks_are_numbered_row_major(mesh: Mesh) -> None:
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.num_ranks)]
    assert coordinates == sorted(coordinates)
    assert [mesh.rank(c) for c in coordinates] == list(range(mesh.num_ranks))


@given(meshes)
def test_groups_of_an_axis_part_the_ranks(mesh: Mesh) -> None:
    for axis, size in enumerate(mesh.sizes):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(size))
            assert len({mesh.coordinate(r)[:axis] + mesh.coordinate(r)[axis + 1 :] for r in group}) == 1


def test_default_names() -> None:
    assert str(Mesh.of((2, 4))) == "d0=2,d1=4"
    assert Mesh.of(8) == Mesh(("d0",), (8,))


@pytest.mark.parametrize("text", ["2x4", "dp", "dp=two", "dp=-1", "dp=\u00b2", "", None])
def test_text_that_is_no_mesh(text: str) -> None:
    with pytest.raises(MeshError, match="reads like 'dp=2,tp=4'"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    "names, sizes, text",
    [
        (("a",), (2, 2), "one size per axis"),
        (("a", "a"), (2, 2), "must differ"),
        (("a",), (0,), "at least 1"),
        ((), (), "one size"),
        ("a", 2, "several names and sizes, .* got names 'a' and sizes 2"),
        (("a", ""), (2, 2), "text without '=' and ','"),
        (("a=",), (2,), "text without '=' and ','"),
        ((1,), (2,), "text without '=' and ','"),
        (("a",), ("2",), r"whole numbers, at least 1, got \('2',\)"),
        (("a",), (True,), r"whole numbers, at least 1, got \(True,\)"),
    ],
)
def test_bad_meshes(names: tuple[str, ...], sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(MeshError, match=text):
        Mesh(names, sizes)


def test_lists_make_the_same_mesh() -> None:
    assert hash(Mesh(["a", "b"], [2, 4])) == hash(Mesh.parse("a=2,b=4"))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [None, "8", 2.5])
def test_sizes_that_are_none(sizes: object) -> None:
    with pytest.raises(MeshError, match="sizes of a mesh are whole numbers"):
        Mesh.of(sizes)  # type: ignore[arg-type]


def test_unknown_axis_lists_those_there_are() -> None:
    with pytest.raises(MeshError, match=r"mesh \(dp=2,tp=4\) has no axis 'pp'; its axes are dp, tp"):
        Mesh.parse("dp=2,tp=4").index("pp")
