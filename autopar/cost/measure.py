"""Measures the present machine: what its device computes and moves, and what each mesh axis carries.

Medians of repeated runs on random data (zeros multiply faster); CUDA is timed with events after a warm-up. Latency and bandwidth
of a link are fitted to all its collectives; the measurements themselves are kept beside.
All ranks take part and all get what rank 0 got: its device, which it measures alone, and what is left of it while all compute.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost.collectives import KINDS, ring_terms
from autopar.cost.machine import DeviceProfile, LinkProfile, MachineProfile, MatmulSample
from autopar.errors import PlanError

_c10d = torch.ops._c10d_functional

Report = Callable[[str], None]
T = TypeVar("T")

CPU_CUBES = (64, 128, 256, 512, 1024)
CUDA_CUBES = (256, 512, 1024, 2048, 4096, 8192)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LONGEST_MATMUL_S = 0.1
"""No matmul is tried that should take longer than this, judged by the next smaller one."""
METHOD = "2"
"""Of measuring; profiles that were cached by another are not read."""
OVERLAP_BYTES = 2**23
"""Size of the all-reduce by which overlap is measured."""
SHARED_TURN_S = 0.1
"""Computation that is timed on all ranks at once lasts so long, many times what a scheduler gives each process in turn."""
NOT_SHARED = 1.2
"""A rank that is no more than this many times as fast alone has its device for itself."""
MESSAGE_BYTES = (2**10, 2**13, 2**16, 2**19, 2**22, 2**24)


def _silent(_: str) -> None:
    pass


class Timing(NamedTuple):
    """Median seconds of one call, and (longest - shortest) / median over the repeats."""

    median_s: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median_s * 1e6:.1f} us, spread {self.spread:.0%}"


def _time(run: Callable[[], object], device: torch.device, *, calls: int, repeats: int = 5) -> Timing:
    """Time of one of ``calls`` calls in a row."""
    run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / calls)
        else:
            start_s = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - start_s) / calls)
    median_s = statistics.median(times)
    return Timing(median_s, (max(times) - min(times)) / median_s)


def _calls(expected_s: float) -> int:
    """Calls in a row that fill some 10 ms."""
    return max(1, min(200, round(0.01 / max(expected_s, 1e-6))))


def _matmul_samples(device: torch.device, launch_s: float, cubes: Iterable[int], report: Report) -> list[MatmulSample]:
    samples = []
    for dtype in DTYPES:
        expected_s = 0.0
        for size in cubes:
            if 8 * expected_s > LONGEST_MATMUL_S:
                report(f"matmul {size} {dtype}: not measured, it would take {8 * expected_s:.2f} s")
                break
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

            def run(left: torch.Tensor = left, right: torch.Tensor = right) -> torch.Tensor:
                return torch.mm(left, right)

            timing = _time(run, device, calls=_calls(_time(run, device, calls=1, repeats=1).median_s))
            expected_s = timing.median_s
            name = str(dtype).removeprefix("torch.")
            busy_s = max(expected_s - launch_s, expected_s / 4)  # what the roofline adds to the launch
            samples.append(MatmulSample(size, size, size, name, 2.0 * size**3 / busy_s))
            report(f"matmul {size} {name}: {2e-12 * size**3 / expected_s:.4g} TFLOP/s ({timing})")
    return samples


def _time_copy(device: torch.device, num_bytes: int) -> Timing:
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return _time(lambda: target.copy_(source), device, calls=5)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu, {torch.get_num_threads()} threads"


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def measure_device(
    device: torch.device, *, report: Report = _silent, cubes: Sequence[int] | None = None, copy_bytes: int | None = None
) -> DeviceProfile:
    """Throughput of square matmuls by size and dtype, bandwidth of a large copy, and launch overhead.

    Args:
        device: a CPU or CUDA device.
        report: gets one line per measurement.
        cubes: sides of the matmuls; the default fits the kind of device.
        copy_bytes: size of the copied buffer; the default is far larger than caches.
    """
    if device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"measure_device knows cpu and cuda devices, got {device}; write a DeviceProfile by hand, or load one"
        )
    small = torch.zeros(1, device=device)
    launch = _time(lambda: small.add_(1), device, calls=200, repeats=9)
    report(f"launch: {launch}")
    num_bytes = copy_bytes or (2**30 if device.type == "cuda" else 2**26)
    copy = _time_copy(device, num_bytes)
    bandwidth = 2 * num_bytes / copy.median_s
    report(f"copy: {bandwidth / 1e9:.4g} GB/s read and written ({copy})")
    samples = _matmul_samples(
        device, launch.median_s, cubes or (CUDA_CUBES if device.type == "cuda" else CPU_CUBES), report
    )
    tf32 = f", float32 matmul precision {torch.get_float32_matmul_precision()}" if device.type == "cuda" else ""
    source_text = (
        f"measured on {_device_name(device)}, torch {torch.__version__}, {_today()}, by autopar.cost.measure{tf32}"
    )
    return DeviceProfile(
        _device_name(device), _memory_bytes(device), tuple(samples), bandwidth, launch.median_s, source_text
    )


def _collective(kind: str, part_words: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """One call of a collective whose whole buffer is ``part_words`` float32 words per rank, by the ops that the runtime emits."""
    size, name = dist.get_world_size(group), group.group_name
    part = torch.rand(part_words, device=device)
    whole = torch.rand(part_words * size, device=device)
    splits = [part_words] * size
    start: Callable[[], torch.Tensor] = {
        "all_reduce": lambda: _c10d.all_reduce(whole, "sum", name),
        "all_gather": lambda: _c10d.all_gather_into_tensor(part, size, name),
        "reduce_scatter": lambda: _c10d.reduce_scatter_tensor(whole, "sum", size, name),
        "all_to_all": lambda: _c10d.all_to_all_single(whole, splits, splits, name),
        "broadcast": lambda: _c10d.broadcast(whole, 0, name),
    }[kind]
    return lambda: _c10d.wait_tensor(start())


def fit_link(measured: Mapping[str, Sequence[tuple[float, float]]], size: int) -> tuple[float, float]:
    """Seconds per step and bytes/s: medians over all kinds, the bytes/s from the two largest messages, the seconds from the smallest.

    Large messages alone tell what a link carries on and on: what lies between rides on the bursts that switches and shapers let pass.
    """
    slopes, starts = [], []
    for kind, pairs in measured.items():
        (_, passing), (small, small_s), (large, large_s) = ring_terms(kind, size), *pairs[-2:]
        slopes.append((large_s - small_s) / (passing * (large - small)) if large_s > small_s else large_s / (passing * large))
    byte_s = statistics.median(slopes)
    for kind, pairs in measured.items():
        (steps, passing), (num_bytes, time_s) = ring_terms(kind, size), pairs[0]
        starts.append((time_s - passing * num_bytes * byte_s) / steps)
    return max(0.0, statistics.median(starts)), 1 / byte_s


def _mesh_device(device_mesh: DeviceMesh) -> torch.device:
    if device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_mesh.device_type)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    return str(group._get_backend(device).name())


def _measure_axis(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int], report: Report) -> LinkProfile:
    size = dist.get_world_size(group)
    if size == 1:
        return LinkProfile(0.0, 1e12, source="one rank: nothing to measure")
    measured: dict[str, tuple[tuple[float, float], ...]] = {}
    for kind in KINDS:
        pairs = []
        for num_bytes in sizes:
            part_words = max(1, num_bytes // 4 // size)
            run = _collective(kind, part_words, group, device)
            timing = _time(run, device, calls=5 if num_bytes < 2**20 else 2, repeats=5 if num_bytes < 2**20 else 3)
            pairs.append((4.0 * part_words * size, timing.median_s))
            report(f"{kind} {num_bytes} B on {size} ranks: {timing}")
        measured[kind] = _rising(pairs)
    alpha_s, bandwidth = fit_link(measured, size)
    report(f"{size} ranks: {alpha_s * 1e6:.1f} us per step, {bandwidth / 1e9:.3g} GB/s")
    source = f"measured on {size} {_backend(group, device)} ranks, torch {torch.__version__}, {_today()}, by autopar.cost.measure"
    overlap = _measure_overlap(group, device, report)
    return LinkProfile(alpha_s, bandwidth, overlap=overlap, measured=measured, group_size=size, source=source)


def _rising(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Times by size without those that are longer than of a larger message: what disturbs a measurement only makes it longer."""
    least = list(accumulate((time_s for _, time_s in reversed(pairs)), min))
    return tuple((num_bytes, time_s) for (num_bytes, _), time_s in zip(pairs, reversed(least), strict=True))


def measure_links(
    device_mesh: DeviceMesh, *, report: Report = _silent, sizes: Sequence[int] = MESSAGE_BYTES
) -> tuple[LinkProfile, ...]:
    """One link per axis. All groups of an axis talk at once, so that what they share is priced in; every rank must call this."""
    device = _mesh_device(device_mesh)
    links = []
    for axis in range(device_mesh.ndim):
        dist.barrier()
        links.append(_measure_axis(device_mesh.get_group(axis), device, sizes, report))
    return _from_first_rank(tuple(links))


def _measure_overlap(group: dist.ProcessGroup, device: torch.device, report: Report) -> float:
    """Part of an all-reduce's time that is gained by running it beside matmuls that take about as long, from 0 to 1."""
    whole, factor = torch.rand(OVERLAP_BYTES // 4, device=device), torch.rand(256, 256, device=device)

    def communicate() -> torch.Tensor:
        reduced: torch.Tensor = _c10d.all_reduce(whole, "sum", group.group_name)
        return reduced

    def compute() -> None:
        for _ in range(rounds):
            torch.mm(factor, factor)

    def both() -> None:
        started = communicate()
        compute()
        _c10d.wait_tensor(started)

    rounds = 1
    dist.barrier()
    alone_s = _time(lambda: _c10d.wait_tensor(communicate()), device, calls=1).median_s
    rounds = _from_first_rank(max(1, round(alone_s / _time(compute, device, calls=20).median_s)))
    compute_s = _time(compute, device, calls=1, repeats=3).median_s
    dist.barrier()
    both_s = _time(both, device, calls=1).median_s
    overlap = min(1.0, max(0.0, (alone_s + compute_s - both_s) / min(alone_s, compute_s)))
    report(f"overlap {overlap:.2f}: all-reduce {alone_s * 1e3:.2f} ms, matmuls {compute_s * 1e3:.2f} ms, at once {both_s * 1e3:.2f} ms")
    return overlap


def measure_sharing(device: torch.device, *, report: Report = _silent) -> float:
    """How many times as fast a rank computes while all others wait, 1 where it is about as fast; every rank must call this."""
    factor = torch.rand(512, 512, device=device)

    def compute() -> torch.Tensor:
        return torch.mm(factor, factor)

    dist.barrier()
    alone = _from_first_rank(_time(compute, device, calls=20) if dist.get_rank() == 0 else None)
    assert alone is not None
    calls = max(1, round(SHARED_TURN_S / alone.median_s))
    dist.barrier()
    together = _time(compute, device, calls=calls)
    sharing = together.median_s / alone.median_s
    report(f"sharing {sharing:.2f}: a matmul takes {together} on all ranks at once, {alone} on one alone")
    return _from_first_rank(sharing if sharing > NOT_SHARED else 1.0)


def _shared(device: DeviceProfile, sharing: float) -> DeviceProfile:
    """What a rank has of a device that was measured alone, while all compute."""
    samples = tuple(sample._replace(flops_per_s=sample.flops_per_s / sharing) for sample in device.matmul)
    bandwidth, launch_s = device.memory_bandwidth / sharing, device.launch_overhead_s * sharing
    return replace(device, matmul=samples, memory_bandwidth=bandwidth, launch_overhead_s=launch_s, sharing=sharing)


def _from_first_rank(value: T) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def cache_path(device_mesh: DeviceMesh) -> Path:
    """Where the profile of this machine and mesh is kept: the name holds host, device, torch, backend and mesh shape."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"
    shape = "x".join(map(str, device_mesh.mesh.shape))
    device = _mesh_device(device_mesh)
    backend = _backend(device_mesh.get_group(0), device)
    text = "_".join((socket.gethostname(), platform.machine(), _device_name(device), torch.__version__, backend, shape, METHOD))
    return folder / (re.sub(r"[^A-Za-z0-9_.+-]+", "-", text) + ".json")


def _write_atomically(profile: MachineProfile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(descriptor)
    profile.save(name)
    os.replace(name, path)


def _ranks_here() -> int:
    """How many ranks run on this rank's host."""
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts.count(socket.gethostname())


def measure(device_mesh: DeviceMesh, *, report: Report = _silent, refresh: bool = False) -> MachineProfile:
    """The profile of this machine and mesh, measured once and then read from the cache; every rank must call this.

    Args:
        device_mesh: the mesh; its ranks are all of the default process group.
        report: gets one line per measurement, on rank 0 only.
        refresh: measure again even if there is a cached profile.
    """
    first = dist.get_rank() == 0
    report = report if first else _silent
    path = cache_path(device_mesh)
    cached = MachineProfile.load(path) if first and not refresh and path.is_file() else None
    cached = _from_first_rank(cached)
    if cached is not None:
        report(f"read {path}")
        return cached
    torch_device = _mesh_device(device_mesh)
    device = _from_first_rank(measure_device(torch_device, report=report) if first else None)
    assert device is not None
    if torch_device.type == "cpu":  # ranks of one host share its memory
        device = replace(device, memory_bytes=device.memory_bytes // _ranks_here())
    device = _shared(device, measure_sharing(torch_device, report=report))
    links = measure_links(device_mesh, report=report)
    shape = "x".join(map(str, device_mesh.mesh.shape))
    origin = f"{socket.gethostname()}, {device.name}, mesh {shape}, {_today()}"
    profile = _from_first_rank(MachineProfile(device, links, origin))
    if first:
        _write_atomically(profile, path)
        report(f"wrote {path}")
    return profile
