"""Dropout masks follow the layout and the seed, and nothing else."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autopar.errors import PlanError
from autopar.layout import REPLICATED, Layout, assemble, replicated, shard, take_shard
from autopar.mesh import Mesh
from autopar.random import dropout, layout_pieces
from autopar.storage import Stored, storage_layout
from tests.lockstep import coordinates


def masks(layout: Layout, *, seed: int = 0, salt: int = 0, probability: float = 0.25) -> list[torch.Tensor]:
    """What every rank makes of ones."""
    ones = torch.ones(layout.local_shape, dtype=torch.float64)
    pieces = layout_pieces(layout)
    return [
        dropout(ones, torch.tensor([seed]), coordinates(layout.mesh, rank), probability=probability, salt=salt, pieces=pieces)
        for rank in range(layout.mesh.num_ranks)
    ]


def mask(*shape: int, seed: int = 0, salt: int = 0, probability: float = 0.25) -> torch.Tensor:
    return masks(replicated(Mesh.of(1), shape), seed=seed, salt=salt, probability=probability)[0]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_the_probability(probability: float) -> None:
    found = mask(400, 500, probability=probability)
    deviation = (probability * (1 - probability) / found.numel()) ** 0.5
    assert abs(float((found == 0).double().mean()) - probability) < 5 * deviation
    kept = found[found != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - probability)))


def test_rows_columns_seeds_and_salts_are_independent() -> None:
    """Each pair of masks agrees as often as independent ones do."""
    base = mask(300, 300, probability=0.5) == 0
    others = [
        base.roll(1, 0),
        base.roll(1, 1),
        base.T,
        mask(300, 300, probability=0.5, seed=1) == 0,
        mask(300, 300, probability=0.5, salt=1) == 0,
    ]
    for other in others:
        assert abs(float((base == other).double().mean()) - 0.5) < 5 * 0.5 / 300
    assert float(base.double().mean(0).std()) < 2 * 0.5 / 300**0.5


def test_equal_seeds_give_equal_masks() -> None:
    torch.testing.assert_close(mask(20, 20, seed=5), mask(20, 20, seed=5), rtol=0, atol=0)


def test_a_mask_does_not_depend_on_the_layout() -> None:
    mesh, atoms = Mesh.of((2, 2)), ((2, 12), (8,))
    expected = mask(24, 8)
    tried = 0
    for placements in product([REPLICATED, shard(0), shard(0, 1), shard(1)], repeat=2):
        try:
            layout = Layout(mesh, atoms, placements)
        except PlanError:
            continue
        tried += 1
        found = masks(layout)
        torch.testing.assert_close(assemble(found, layout), expected, rtol=0, atol=0)
        for rank in range(mesh.num_ranks):
            torch.testing.assert_close(found[rank], take_shard(expected, layout, mesh.coordinate(rank)), rtol=0, atol=0)
    assert tried > 10


def test_a_mask_does_not_depend_on_the_nesting() -> None:
    layout = storage_layout(Mesh.of((2, 2)), ((16,), (8,)), (Stored(3), shard(0)))
    assert layout.order == (1, 0)
    torch.testing.assert_close(assemble(masks(layout), layout), mask(16, 8), rtol=0, atol=0)


def test_ends_of_the_probability() -> None:
    x = torch.tensor([1.0, -2.0])
    for probability, expected in ((0.0, x), (1.0, torch.zeros(2))):
        pieces = layout_pieces(replicated(Mesh.of(1), (2,)))
        found = dropout(x, torch.tensor([0]), [torch.tensor([0])], probability=probability, salt=0, pieces=pieces)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    pieces = layout_pieces(replicated(Mesh.of(1), (64,)))
    found = dropout(torch.ones(64, dtype=dtype), torch.tensor([0]), [torch.tensor([0])], probability=0.5, salt=0, pieces=pieces)
    assert found.dtype is dtype
    assert set(found.tolist()) == {0.0, 2.0}


def test_the_gradient_has_the_same_mask() -> None:
    pieces = layout_pieces(replicated(Mesh.of(1), (8, 8)))
    x = torch.ones(8, 8, requires_grad=True)
    y = dropout(x, torch.tensor([3]), [torch.tensor([0])], probability=0.5, salt=1, pieces=pieces)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
