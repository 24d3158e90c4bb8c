"""Process groups: one per mesh axis and rank, found by name in the graphs.

Graphs name groups by axis (`autopar.ops.collectives.group_name`). Several meshes may be in use in one process, so a mesh is *activated*
before its graphs run: the names then mean its groups, or those that stand in for them (`autopar.gloo`).
"""

from __future__ import annotations

import atexit
import datetime
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError, PlanError
from autopar.gloo import in_order, open_in_order
from autopar.mesh import Mesh
from autopar.ops.collectives import group_name
from autopar.units import number_text

_c10d = torch.ops._c10d_functional
_register: Callable[[str, dist.ProcessGroup], None] = torch._C._distributed_c10d._register_process_group  # type: ignore[assignment]
_unregister: Callable[[str], None] = torch._C._distributed_c10d._unregister_process_group  # type: ignore[assignment]
_meshes: dict[tuple[str, Mesh], DeviceMesh] = {}
_active: list[DeviceMesh] = []
HOST_AND_DEVICE = "cpu:gloo,cuda:nccl"
"""Backends of a job on GPUs: what is on the host has one too (norms and checkpoints of offloaded parameters)."""
GRACE_S = 0.1
"""How long a process stays after its script, for threads of gloo."""
CONNECTING_WORDS = {"cuda": (1, 2**20), "cpu": (1,)}
"""Of a rank: NCCL takes other algorithms for large messages."""
_host_groups: dict[tuple[dist.ProcessGroup, str], dist.ProcessGroup] = {}


def ensure_processes(device_type: str, timeout_s: float | None = None) -> None:
    """Start ``torch.distributed`` from the environment of ``torchrun`` if the script has not."""
    _end_with_grace()
    if dist.is_initialized():
        return
    if not dist.is_torchelastic_launched():
        raise MeshError(
            "no processes: start the script with `torchrun --nproc-per-node N script.py`, or call torch.distributed.init_process_group"
        )
    backend = HOST_AND_DEVICE if device_type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s) if timeout_s else None
    dist.init_process_group(backend, timeout=timeout)


@cache
def _end_with_grace() -> None:
    """Let gloo's threads let go of tensors while there is an interpreter: one that wants its lock when that is going ends the process by
    SIGABRT (github.com/pytorch/pytorch/pull/179291)."""
    atexit.register(time.sleep, GRACE_S)


def check_host_groups(device_type: str) -> None:
    """
    Raises:
        PlanError: the script's own process group knows no communication of tensors on the host.
    """
    world = dist.distributed_c10d._get_default_group()
    if "cpu" not in {device.type for device in world._device_types}:
        raise PlanError(
            "with offload, parameters and gradients lie on the host, and norms and checkpoints of their shards need a backend there: call "
            f"torch.distributed.init_process_group({HOST_AND_DEVICE!r}) in place of that for {device_type} alone"
        )


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh over all ranks with the axes of ``mesh``; made once per process.

    Raises:
        MeshError: the mesh does not have as many positions as there are ranks.
    """
    world = dist.get_world_size()
    if mesh.num_ranks != world:
        positions, ranks = number_text(mesh.num_ranks, "position"), number_text(world, "rank")
        raise MeshError(f"mesh ({mesh}) has {positions}, but there are {ranks}; their numbers must be equal")
    key = (device_type, mesh)
    if key not in _meshes:
        made = _meshes[key] = init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.names)
        for axis in range(len(mesh.sizes)):
            dist.distributed_c10d._set_pg_timeout(job_timeout(), made.get_group(axis))
        open_in_order(made)
    return _meshes[key]


def job_timeout() -> datetime.timedelta:
    """How long the job's own process group waits for a rank; torch gives every new group its default instead, half an hour."""
    world = dist.distributed_c10d._get_default_group()
    timeout: datetime.timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout


def job_store(name: str) -> PrefixStore:
    """A part of the store of the job, in which ranks leave notes for each other."""
    return PrefixStore(f"autopar/{name}", dist.distributed_c10d._get_default_store())


def host_group(purpose: str) -> dist.ProcessGroup:
    """All ranks in a group of gloo, for what is on the host and must not meet the collectives of a step; made once for a purpose."""
    key = (dist.distributed_c10d._get_default_group(), purpose)
    if key not in _host_groups:
        _host_groups[key] = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=job_timeout()))
    return _host_groups[key]


def peer_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Some ranks in a group of gloo, for what is on the host; made once, by these ranks alone. None for a single one."""
    if len(ranks) == 1:
        return None
    key = (dist.distributed_c10d._get_default_group(), str(list(ranks)))
    if key not in _host_groups:
        made = dist.new_group(list(ranks), backend="gloo", timeout=job_timeout(), use_local_synchronization=True)
        _host_groups[key] = cast(dist.ProcessGroup, made)
    return _host_groups[key]


def adopt(given: DeviceMesh) -> Mesh:
    """The `Mesh` of a user's DeviceMesh, whose groups are used from now on; all ranks call this together.

    Raises:
        MeshError: it does not cover all ranks in order.
    """
    world = dist.get_world_size()
    if given.mesh.flatten().tolist() != list(range(world)):
        raise MeshError(
            f"the DeviceMesh holds ranks {given.mesh.flatten().tolist()}, but autopar needs all ranks 0..{world - 1} in order; "
            "build it with init_device_mesh over the whole world"
        )
    names = given.mesh_dim_names or tuple(f"d{i}" for i in range(given.mesh.dim()))
    mesh = Mesh(tuple(names), tuple(given.mesh.shape))
    _meshes[given.device_type, mesh] = given
    open_in_order(given)
    return mesh


def put_group(name: str, group: dist.ProcessGroup) -> None:
    """Let a name mean this group."""
    _unregister(name)
    _register(name, group)


def activate(mesh: DeviceMesh) -> None:
    """Let the group names of graphs mean the groups of this mesh."""
    if _active and _active[0] is mesh:
        return
    for name, group in axis_groups(mesh).items():
        put_group(group_name(name), group)
    _active[:] = [mesh]


def axis_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """What runs the collectives of graphs on each axis of a mesh, by the name of the axis."""
    names = mesh.mesh_dim_names or tuple(f"d{i}" for i in range(mesh.mesh.dim()))
    return {name: in_order(mesh.get_group(axis)) for axis, name in enumerate(names)}


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let a group have its first collective of each kind; all its ranks call this.

    NCCL makes the communicator of a group at its first collective, and connects the ranks of an algorithm at the first that takes it. Both
    wait for the other ranks and for what the device has to do: in the middle of a pipeline that may be a message that is sent only later.
    """
    size, name = group.size(), group.group_name
    if size == 1:
        return
    for words in CONNECTING_WORDS[device.type]:
        part, whole, splits = torch.zeros(words, device=device), torch.zeros(words * size, device=device), [words] * size
        for started in (
            _c10d.all_reduce(whole, "sum", name),
            _c10d.all_gather_into_tensor(part, size, name),
            _c10d.reduce_scatter_tensor(whole, "sum", size, name),
            _c10d.all_to_all_single(whole, splits, splits, name),
        ):
            _c10d.wait_tensor(started).cpu()  # until it is through


def coordinates(mesh: DeviceMesh) -> list[torch.Tensor]:
    """This rank's position on every axis, int64 [1] on the mesh's device."""
    position = mesh.get_coordinate()
    assert position is not None
    device = local_device(mesh.device_type)
    return [number_on(device, p) for p in position]


def number_on(device: torch.device, number: int) -> torch.Tensor:
    """A number as int64 [1] on a device, for which the host does not wait: a copy of memory that is not page-locked would have it wait for
    all that the device has to do."""
    return torch.full((1,), number, dtype=torch.int64, device=device)


def local_device(device_type: str) -> torch.device:
    """The device of this rank."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)
