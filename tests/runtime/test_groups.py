"""Process groups by axis: several meshes in one process, and meshes that do not fit."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.collectives import group_name
from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.runtime import groups
from autopar.runtime.groups import activate, adopt, coordinates, device_mesh, ensure_processes
from tests.pool import RankPool

pytestmark = pytest.mark.slow

_c10d = torch.ops._c10d_functional


def total(axis: str, rank: int) -> int:
    """Sum of 10 ** rank over the ranks of this axis: shows which took part."""
    summed = _c10d.all_reduce(torch.tensor([10.0**rank]), "sum", group_name(axis))
    return int(_c10d.wait_tensor(summed))


def use_meshes_in_turn(rank: int) -> list[int]:
    flat, square = Mesh(("d0",), (4,)), Mesh.of((2, 2))
    found = []
    for mesh in (flat, square, flat, square):
        activate(device_mesh(mesh, "cpu"))
        found.append(total("d0", rank))
    found.append(total("d1", rank))
    return found


def test_meshes_take_turns(ranks: RankPool) -> None:
    outer, inner = [101, 1010, 101, 1010], [11, 11, 1100, 1100]
    assert ranks.run(use_meshes_in_turn) == [[1111, outer[r], 1111, outer[r], inner[r]] for r in range(4)]


def adopt_mesh(rank: int) -> tuple[Mesh, list[int], bool]:
    given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    mesh = adopt(given)
    ensure_processes("cpu")  # they run already: nothing happens
    return mesh, [int(c) for c in coordinates(given)], device_mesh(mesh, "cpu") is given


def test_the_users_mesh_is_adopted(ranks: RankPool) -> None:
    mesh = Mesh(("data", "model"), (2, 2))
    assert ranks.run(adopt_mesh) == [(mesh, list(mesh.coordinate(rank)), True) for rank in range(4)]


def use_wrong_size(rank: int) -> str:
    with pytest.raises(MeshError) as error:
        device_mesh(Mesh.of((2, 3)), "cpu")
    return str(error.value)


def adopt_part(rank: int) -> str:
    part = DeviceMesh("cpu", [3, 2, 1, 0])
    with pytest.raises(MeshError) as error:
        adopt(part)
    return str(error.value)


def test_a_mesh_of_the_wrong_size_is_refused(ranks: RankPool) -> None:
    for text in ranks.run(use_wrong_size):
        assert text == "mesh (d0=2,d1=3) has 6 positions, but there are 4 ranks; their numbers must be equal"


def test_a_mesh_out_of_order_is_refused(ranks: RankPool) -> None:
    for text in ranks.run(adopt_part):
        assert re.match(r"the DeviceMesh holds ranks \[3, 2, 1, 0\], but autopar needs all ranks 0\.\.3 in order", text)


def test_a_process_stays_a_moment_for_the_threads_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))
    groups._end_with_grace.cache_clear()
    for _ in range(2):
        with pytest.raises(MeshError):
            ensure_processes("cpu")
    assert registered == [(time.sleep, groups.GRACE_S)]


def test_without_processes_the_remedy_is_named() -> None:
    assert not dist.is_initialized()
    with pytest.raises(MeshError, match="torchrun --nproc-per-node N"):
        ensure_processes("cpu")
