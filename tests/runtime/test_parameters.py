"""Stored shards as DTensors: torch gathers every layout that autopar stores, and one parameter stays one object."""

from __future__ import annotations

import copy
import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.layout import REPLICATED, Layout, shard, take_shard
from autopar.mesh import Mesh
from autopar.runtime.groups import device_mesh
from autopar.runtime.parameters import agree, as_dtensor, hold_whole, store
from autopar.storage import Held, Stored, storage_layout, torch_can_hold
from tests import models
from tests.pool import RankPool

pytestmark = pytest.mark.slow

MESH = Mesh.of((2, 2))
SHAPES = (((3, 4, 4),), ((8, 4), (4,)), ((16,), (4, 8)), ((3, 4, 4), (8,)), ((4, 4, 2), (2, 2)))


def storable() -> list[Layout]:
    """Every layout on (2, 2) that a parameter may be stored in."""
    found = []
    for atoms in SHAPES:
        kinds: list[Held] = [
            REPLICATED,
            Stored(3),
            *(shard(d, a) for d, sizes in enumerate(atoms) for a in range(len(sizes))),
        ]
        for held in product(kinds, repeat=2):
            try:
                found.append(storage_layout(MESH, atoms, held))
            except PlanError:
                continue
    return found


def gather_all(rank: int) -> tuple[int, list[str]]:
    """How many layouts were tried, and which were gathered wrongly."""
    wrong = []
    layouts = storable()
    for layout in layouts:
        whole = torch.arange(float(math.prod(layout.shape))).reshape(layout.shape)
        local = take_shard(whole, layout, MESH.coordinate(rank)).contiguous()
        held = as_dtensor(local, layout, device_mesh(MESH, "cpu"))
        if held.shape != whole.shape or not torch.equal(held.full_tensor(), whole):
            wrong.append(f"{layout} of {layout.atoms}, order {layout.order}: {held.placements}")
    return len(layouts), wrong


def test_torch_gathers_every_stored_layout(ranks: RankPool) -> None:
    for tried, wrong in ranks.run(gather_all):
        assert tried > 100
        assert not wrong, "\n".join(wrong)


def test_what_torch_would_gather_wrongly_is_known() -> None:
    layout = Layout(MESH, ((3, 4, 4),), (shard(0, 1), shard(0, 2)))
    assert not torch_can_hold(layout)


def hold_and_store(rank: int) -> None:
    torch.manual_seed(rank)  # values differ: those of rank 0 count
    model = models.gpt2(layers=1, hidden=16, heads=2, vocab=32).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(rank))
    expected = copy.deepcopy(model.get_parameter("transformer.wte.weight").detach())
    dist.broadcast(expected, 0)
    mesh = device_mesh(MESH, "cpu")
    hold_whole(model, mesh)
    tied = model.get_submodule("lm_head").weight
    embedding = model.get_parameter("transformer.wte.weight")
    assert tied is embedding
    held_before = {id(p) for p in model.parameters()}
    for parameter in model.parameters():
        atoms = tuple((size,) for size in parameter.shape)
        store(parameter, storage_layout(MESH, atoms, (Stored(3), shard(0))), mesh)
    assert {id(p) for p in model.parameters()} == held_before
    assert model.get_submodule("lm_head").weight is embedding
    assert isinstance(embedding, nn.Parameter)
    assert isinstance(embedding, DTensor)
    assert embedding.requires_grad
    assert embedding.to_local().numel() * 4 == embedding.numel()
    assert torch.equal(embedding.full_tensor(), expected)


def test_parameters_stay_the_same_objects(ranks: RankPool) -> None:
    ranks.run(hold_and_store)


def odd(rank: int) -> dict[str, torch.Tensor]:
    """Tensors that do not lie in order: sliced, turned, expanded; on rank 2 sliced ones do."""
    sliced = torch.randn(8, 16)[:, ::2]
    return {
        "sliced": sliced.contiguous() if rank == 2 else sliced,
        "turned": torch.randn(8, 8).t(),
        "expanded": torch.randn(8).expand(4096, 8),
    }


def start_from_odd_tensors(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    mesh, whole = device_mesh(MESH, "cpu"), nn.ParameterDict({name: nn.Parameter(x) for name, x in odd(rank).items()})
    buffers = odd(rank)
    hold_whole(whole, mesh)
    for parameter in whole.parameters():
        store(parameter, storage_layout(MESH, tuple((n,) for n in parameter.shape), (Stored(3), shard(0))), mesh)
    found = {name: parameter.full_tensor() for name, parameter in whole.items() if isinstance(parameter, DTensor)}
    for name, buffer in buffers.items():
        agree(buffer)
        buffer.add_(1)  # its memory is its own
        found[f"buffer {name}"] = buffer - 1
    return found


def test_strided_tensors_start_with_the_values_of_the_first_rank(ranks: RankPool) -> None:
    torch.manual_seed(0)
    parameters, buffers = odd(0), odd(0)
    expected = parameters | {f"buffer {name}": buffer for name, buffer in buffers.items()}
    for found in ranks.run(start_from_odd_tensors):
        torch.testing.assert_close(found, expected)
