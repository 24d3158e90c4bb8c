"""Rectangles of strided and nested shards: each rank's are what it holds, and together they are the tensor, once."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch.distributed.tensor import Shard

from autopar.layout import Layout, take_shard
from autopar.runtime.chunks import Chunks, Run, runs_of
from autopar.runtime.parameters import torch_placements
from tests.runtime.test_parameters import MESH, storable


def rectangles(layout: Layout, rank: int) -> list[tuple[Run, ...]]:
    coordinate, placements = MESH.coordinate(rank), torch_placements(layout)
    return list(product(*(runs_of(size, dim, placements, MESH.sizes, coordinate) for dim, size in enumerate(layout.shape))))


def test_rectangles_of_every_stored_layout() -> None:
    layouts = storable()
    assert len(layouts) > 100
    for layout in layouts:
        whole = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
        times = torch.zeros_like(whole)
        for rank in range(MESH.num_ranks):
            local = take_shard(whole, layout, MESH.coordinate(rank))
            for runs in rectangles(layout, rank):
                there = tuple(slice(run.start, run.start + run.length) for run in runs)
                here = tuple(slice(run.local_start, run.local_start + run.length) for run in runs)
                assert torch.equal(whole[there], local[here])
                times[there] += 1
        replicas = MESH.num_ranks // layout.num_shards
        assert torch.equal(times, torch.full_like(times, replicas)), layout


def test_a_fused_projection_on_its_heads_is_one_rectangle_for_each_of_q_k_v() -> None:
    layout = next(found for found in storable() if found.atoms == ((3, 4, 4),) and str(found) == "[R S0.1]")
    assert rectangles(layout, 1) == [(Run(8, 0, 8),), (Run(24, 8, 8),), (Run(40, 16, 8),)]


def test_rows_that_the_ranks_do_not_divide() -> None:
    """As torch does: five rows on four ranks are 2, 2, 1 and none."""
    assert [runs_of(5, 0, [Shard(0)], [4], [rank]) for rank in range(4)] == [[Run(0, 0, 2)], [Run(2, 0, 2)], [Run(4, 0, 1)], []]


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_a_plain_tensor_is_one_rectangle(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    chunks = Chunks.of(tensor)
    assert chunks.size() == tensor.shape
    (part,) = chunks.parts.values()
    part.zero_()
    assert not tensor.any()
    copied = Chunks.of(tensor).copied()
    tensor.fill_(1.0)
    assert not any(part.any() for part in copied.parts.values())
