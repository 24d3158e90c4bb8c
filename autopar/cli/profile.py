"""``autopar profile`` and ``--cluster local``: measure this machine, on the ranks of torchrun or on ranks that are started here, and show
what was found."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from autopar.cli.progress import progress
from autopar.cost.cluster import INSIDE_NODE, Cluster
from autopar.cost.machine import MachineProfile
from autopar.cost.measure import measure, read_cached
from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.report import silent
from autopar.show.table import table_text
from autopar.units import bytes_text, count_text, number_text, seconds_text

RANK_THREADS = 1
"""Of a rank on the CPU."""


def is_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure_here(mesh: Mesh, *, refresh: bool) -> MachineProfile:
    """On a rank of the default group."""
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    device_mesh = init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.names)
    with progress(_say) if dist.get_rank() == 0 else nullcontext(silent) as report:
        profile = measure(device_mesh, report=report, refresh=refresh)
    dist.barrier()  # gloo of torch 2.13 aborts if a rank leaves while another still talks
    return profile


def _join(rank: int, *, world: int, store: str | None, local_rank: int, local_ranks: int) -> None:
    """Become one rank of the default group; the CUDA devices are used if there is one for every rank of this host."""
    init_method = f"file://{store}" if store else "env://"
    if _device(local_ranks).type == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", init_method=init_method, rank=rank, world_size=world, device_id=torch.device("cuda", local_rank))
    else:
        torch.set_num_threads(RANK_THREADS)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)


def _spawned(rank: int, mesh: Mesh, store: str, out: str, refresh: bool) -> None:
    _join(rank, world=mesh.num_ranks, store=store, local_rank=rank, local_ranks=mesh.num_ranks)
    try:
        profile = _measure_here(mesh, refresh=refresh)
        if rank == 0:
            profile.save(out)
    finally:
        dist.destroy_process_group()


def profile_machine(mesh: Mesh | None, *, refresh: bool) -> MachineProfile | None:
    """Measure on all ranks; None on the ranks of torchrun other than the first.

    Args:
        mesh: its ranks are started here unless torchrun has started them; None is one axis: over those of torchrun, the CUDA devices, or 4.
        refresh: measure even if this machine was measured before.

    Raises:
        MeshError: the mesh has not as many ranks as torchrun has started.
    """
    if not is_torchrun():
        mesh = mesh or Mesh.of(default_ranks())
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "profile.json")
            spawn(_spawned, (mesh, str(Path(folder) / "store"), out, refresh), nprocs=mesh.num_ranks)
            return MachineProfile.load(out)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = mesh or Mesh.of(world)
    if mesh.num_ranks != world:
        raise MeshError(f"mesh ({mesh}) has {number_text(mesh.num_ranks, 'rank')}, but torchrun has started {world}; change one of them")
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    _join(rank, world=world, store=None, local_rank=local_rank, local_ranks=local_ranks)
    try:
        profile = _measure_here(mesh, refresh=refresh)
    finally:
        dist.destroy_process_group()
    return profile if rank == 0 else None


def local_cluster(num_ranks: int | None) -> Cluster:
    """This machine: its CUDA devices or so many processes, with prices that are measured at the first time and then read from the cache.

    Args:
        num_ranks: None: all CUDA devices, or 4 processes.

    Raises:
        MeshError: this process is one of torchrun.
    """
    if is_torchrun():
        raise MeshError("--cluster local is for a process by itself, which starts the ranks that measure; run it without torchrun")
    mesh = Mesh.of(num_ranks or default_ranks())
    profile = read_cached(mesh, _device(mesh.num_ranks), RANK_THREADS) or profile_machine(mesh, refresh=False)
    assert profile is not None
    links = tuple(replace(link, level=INSIDE_NODE) for link in profile.links)
    return Cluster.from_mesh(mesh, replace(profile, links=links))


def default_ranks() -> int:
    return torch.cuda.device_count() or 4


def _device(local_ranks: int) -> torch.device:
    """Of each of so many ranks of this host: a CUDA device if there is one for all of them."""
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks else "cpu")


def profile_text(profile: MachineProfile, width: int = 100) -> str:
    """The device, its ops, and one row per axis of the mesh."""
    device = profile.device
    memory, rate = bytes_text(device.memory_bytes), bytes_text(device.memory_bandwidth)
    lines = [profile.origin, f"  memory {memory} a rank, {rate}/s, launch overhead {seconds_text(device.launch_overhead_s)}"]
    lines += [f"  {bytes_text(device.host_bytes_per_s)}/s to memory of the host"] if device.host_bytes_per_s else []
    samples = [
        [s.dtype, f"{s.m} x {s.k} x {s.n}{several}", *(f"{count_text(rate)}flop/s" for rate in s.rates)]
        for several, products in (("", device.matmul), (", many", device.batched))
        for s in products
    ]
    attention = [
        [s.dtype, str(s.length), *(f"{count_text(rate)}flop/s" for rate in (s.forward_flops_per_s, s.backward_flops_per_s))]
        for s in device.attention
    ]
    streams = [[name, *(f"{bytes_text(rate)}/s" for rate in rates)] for name, rates in device.streams.items()]
    links = [
        [f"axis {i}", seconds_text(link.alpha_s), f"{bytes_text(link.bandwidth)}/s", link.source]
        for i, link in enumerate(profile.links)
    ]
    tables = [
        table_text(("matmul", ">m x k x n", ">forward", ">backward"), samples, width=width),
        *([table_text(("attention", ">tokens", ">forward", ">backward"), attention, width=width)] if attention else []),
        *([table_text(("op", ">forward", ">backward"), streams, width=width)] if streams else []),
        table_text(("link", ">latency", ">bandwidth", "source"), links, width=width, wide=("source",)),
    ]
    return "\n\n".join(["\n".join(lines), *tables])
