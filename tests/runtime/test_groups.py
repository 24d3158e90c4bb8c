"""Process groups by axis: several meshes in one process, and meshes that do not fit."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import gloo
from autopar.cost import measure
from autopar.cost.machine import LinkProfile
from autopar.errors import MeshError
from autopar.gloo import open_in_order
from autopar.mesh import Mesh
from autopar.ops.collectives import group_name
from autopar.runtime import groups
from autopar.runtime.groups import activate, adopt, axis_groups, coordinates, device_mesh, ensure_processes
from autopar.runtime.watch import lanes_of
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


def groups_that_graphs_run_on(rank: int) -> list[tuple[int, int, bool, list[int]]]:
    """For a mesh of autopar's and one of the user's, of each axis: threads, those of the DeviceMesh's own group, whether they are the
    same, and the ranks."""
    found = []
    own = Mesh(("in", "order"), (2, 2))
    given = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    adopt(given)
    for mesh in (device_mesh(own, "cpu"), given):
        activate(mesh)
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            used = dist.distributed_c10d._resolve_process_group(group_name(name))  # type: ignore[attr-defined, arg-type]
            of_mesh = mesh.get_group(axis)
            assert axis_groups(mesh)[name] is used
            found.append((lanes_of(used), lanes_of(of_mesh), used is of_mesh, dist.get_process_group_ranks(used)))
            assert dist.get_process_group_ranks(used) == dist.get_process_group_ranks(of_mesh)
            assert used.rank() == of_mesh.rank()
            timeouts = {g._get_backend(torch.device("cpu")).options._timeout for g in (used, of_mesh, dist.group.WORLD)}  # type: ignore[union-attr]
            assert len(timeouts) == 1
    return found


def test_graphs_run_on_groups_of_one_thread(ranks: RankPool) -> None:
    lines = [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
    expected = [[(1, 2, False, of_rank) for of_rank in (*lines[rank], [0, 1, 2, 3])] for rank in range(4)]
    assert ranks.run(groups_that_graphs_run_on) == expected


def collectives_that_connect(rank: int) -> list[str]:
    """Of a group of four, and of one of a single rank."""
    found: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            found.append(name)
            return getattr(_c10d, name)

    mesh = device_mesh(Mesh(("four", "one"), (4, 1)), "cpu")
    with patch.object(groups, "_c10d", Noted()):
        for group in axis_groups(mesh).values():
            groups.connect(group, torch.device("cpu"))
    return [name for name in found if name != "wait_tensor"]


def test_groups_connect_for_every_kind_of_collective(ranks: RankPool) -> None:
    kinds = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
    assert ranks.run(collectives_that_connect) == [kinds] * 4


def groups_that_are_measured(rank: int) -> list[int]:
    """Threads of each."""
    found: list[int] = []

    def measured(group: dist.ProcessGroup, *_: object, **__: object) -> LinkProfile:
        found.append(lanes_of(group))
        return LinkProfile(0.0, 1e9)

    with patch.object(measure, "_measure_axis", measured):
        measure.measure_links(init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near")))
    return found


def test_what_graphs_run_on_is_measured(ranks: RankPool) -> None:
    assert ranks.run(groups_that_are_measured) == [[1, 1]] * 4


def collectives_in_flight(rank: int) -> bool:
    """All kinds at once, which are waited for in the order in which they start."""
    activate(device_mesh(Mesh(("d0",), (4,)), "cpu"))
    name, started = group_name("d0"), []
    for k in range(40):
        x, splits = torch.full((8 * (k % 5 + 1),), float(rank + k)), [2 * (k % 5 + 1)] * 4
        of_all = torch.arange(4.0) + k
        started += [
            (_c10d.all_gather_into_tensor(x, 4, name), of_all.repeat_interleave(len(x))),
            (_c10d.reduce_scatter_tensor(x, "sum", 4, name), of_all.sum().expand(len(x) // 4)),
            (_c10d.all_to_all_single(x, splits, splits, name), of_all.repeat_interleave(len(x) // 4)),
            (_c10d.all_reduce(x, "sum", name), of_all.sum().expand(len(x))),
        ]
    return all(torch.equal(_c10d.wait_tensor(result), expected) for result, expected in started)


def test_collectives_of_a_group_may_all_be_in_flight(ranks: RankPool) -> None:
    assert ranks.run(collectives_in_flight) == [True] * 4


def test_groups_of_one_rank_and_of_other_backends_stand_for_themselves() -> None:
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("d0", "d1"))
        open_in_order(mesh)
        assert axis_groups(mesh) == {"d0": mesh.get_group(0), "d1": mesh.get_group(1)}
    finally:
        dist.destroy_process_group()


def test_the_interface_is_that_which_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SimpleNamespace(
        store=HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=9), global_ranks_in_group=[0], group_id="alone"
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    options: Any = gloo._make(asked, None).options
    assert len(options._devices) == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    options = gloo._make(asked, None).options
    assert (len(options._devices), options._threads, options._timeout) == (2, 1, timedelta(seconds=9))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere")
    with pytest.raises(RuntimeError, match="nowhere"):
        gloo._make(asked, None)


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
