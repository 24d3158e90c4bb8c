"""Measures the present machine: its device (`cost.measure_device`), and what each mesh axis carries.

Latency and bandwidth of a link are fitted to all its collectives; the measurements themselves are kept beside.
All ranks take part and all get what rank 0 got: its device, which it measures alone, and what is left of it while all compute.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.callers import user_level
from autopar.cost.collectives import ring_terms
from autopar.cost.device import AttentionSample, DeviceProfile, Stream
from autopar.cost.machine import KINDS, LinkProfile, MachineProfile
from autopar.cost.measure_device import device_name, measure_device, today
from autopar.cost.measure_dispatch import measure_dispatch, measure_update
from autopar.cost.timing import time_calls
from autopar.errors import PlanError
from autopar.gloo import in_order, open_in_order
from autopar.mesh import Mesh
from autopar.report import Report, silent

_c10d = torch.ops._c10d_functional

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

METHOD = "12"
"""Of measuring; profiles that were cached by another are not read."""
OVERLAP_BYTES = 2**23
"""Size of the all-reduce by which overlap is measured."""
ALONE_BYTES, ALONE_CALLS = 2**22, 3
"""Size and number of the messages by which is measured what groups take of each other."""
OVERLAP_TURNS, QUICK_S = (3, 15), 0.05
"""How often, and if that all-reduce is quick: what is gained is little beside what gloo differs by from one moment to the next."""
SHARED_TURN_S = 0.1
"""Computation that is timed on all ranks at once lasts so long, many times what a scheduler gives each process in turn."""
SHARING_TURNS, SHARED_COPY_BYTES = 3, 2**26
CROWD_BYTES, CROWD_ROUNDS, CROWD_MATMULS = 2**16, 10, 3
"""Size of the all-reduces that are waited for amid computation, how many follow each other, and the matmuls between, which take longer than
what a scheduler gives a process in turn."""
NOT_SHARED, MEMORY_NOT_SHARED = 1.2, 1.05
"""A rank that is no more than this many times as fast alone has its device for itself, and its memory."""
MESSAGE_BYTES = (2**10, 2**13, 2**16, 2**19, 2**22, 2**24)

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


def _shift(words: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """A message of ``words`` float32 from every rank to the next, as stages of a pipeline send them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent, received = torch.rand(words, device=device), torch.empty(words, device=device)
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))

    def run() -> None:
        messages = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
        for message in dist.batch_isend_irecv(messages):
            message.wait()

    return run


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


def _measure_axis(
    group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int], report: Report, *, is_shared: bool
) -> LinkProfile:
    size = dist.get_world_size(group)
    if size == 1:
        return LinkProfile(0.0, 1e12, group_size=1, source="one rank: nothing to measure")
    measured: dict[str, tuple[tuple[float, float], ...]] = {}
    for kind in KINDS:
        pairs = []
        for num_bytes in sizes:
            part_words = max(1, num_bytes // 4 // size)
            run = _shift(part_words * size, group, device) if kind == "send" else _collective(kind, part_words, group, device)
            dist.barrier()  # of all groups: none is still at larger messages
            timing = time_calls(run, device, calls=5 if num_bytes < 2**20 else 2, repeats=5 if num_bytes < 2**20 else 3)
            pairs.append((4.0 * part_words * size, timing.median_s))
            report(f"{kind} {num_bytes} B on {size} ranks: {timing}")
        measured[kind] = _rising(pairs)
    alpha_s, bandwidth = fit_link(measured, size)
    report(f"{size} ranks: {alpha_s * 1e6:.1f} us per step, {bandwidth / 1e9:.3g} GB/s")
    source = f"measured on {size} {_backend(group, device)} ranks, torch {torch.__version__}, {today()}, by autopar.cost.measure"
    alone = _measure_alone(group, device, report) if dist.get_world_size() > size else 1.0
    overlap = _measure_overlap(group, device, report)
    crowded_s = _measure_crowd(group, device, report) if is_shared else 0.0
    return LinkProfile(
        alpha_s, bandwidth, overlap=overlap, crowded_s=crowded_s, measured=measured, group_size=size, source=source, alone=alone
    )


def _measure_alone(group: dist.ProcessGroup, device: torch.device, report: Report) -> float:
    """How many times as fast messages of one group are while those of all others wait, which at best leave it all that they had."""
    size, world = dist.get_world_size(group), dist.get_world_size()
    run = _shift(ALONE_BYTES // 4, group, device)
    is_first = 0 in dist.get_process_group_ranks(group)

    def messages(*, sends: bool) -> None:
        for _ in range(ALONE_CALLS if sends else 0):
            run()
        dist.barrier()  # until all have sent: a link is not shared evenly at all times

    gained = []
    for _ in range(SHARING_TURNS):
        together, alone = (
            time_calls(partial(messages, sends=sends), device, calls=1, repeats=1) for sends in (True, is_first)
        )
        gained.append(together.median_s / alone.median_s)
        times = f"{together.median_s * 1e3:.2f} ms in all groups at once, {alone.median_s * 1e3:.2f} ms in one alone"
        report(f"alone {gained[-1]:.2f}: {ALONE_CALLS} messages of {ALONE_BYTES} B take {times}")
    return min(world / size, max(1.0, statistics.median(gained)))


def _rising(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Times by size without those that are longer than of a larger message: what disturbs a measurement only makes it longer."""
    least = list(accumulate((time_s for _, time_s in reversed(pairs)), min))
    return tuple((num_bytes, time_s) for (num_bytes, _), time_s in zip(pairs, reversed(least), strict=True))


def measure_links(
    device_mesh: DeviceMesh, *, report: Report = silent, sizes: Sequence[int] = MESSAGE_BYTES, is_shared: bool = False
) -> tuple[LinkProfile, ...]:
    """One link per axis. All groups of an axis talk at once, so that what they share is priced in; every rank must call this.

    Args:
        device_mesh: the mesh.
        report: gets a line for each measurement.
        sizes: of messages, in bytes.
        is_shared: whether ranks share cores.
    """
    device = _mesh_device(device_mesh)
    open_in_order(device_mesh)
    links = []
    for axis in range(device_mesh.ndim):
        dist.barrier()
        links.append(_measure_axis(in_order(device_mesh.get_group(axis)), device, sizes, report, is_shared=is_shared))
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

    gained: list[float] = []
    turns = OVERLAP_TURNS[0]
    while len(gained) < turns:
        rounds = 1
        dist.barrier()
        alone_s = time_calls(lambda: _c10d.wait_tensor(communicate()), device, calls=1, repeats=3).median_s
        turns = OVERLAP_TURNS[_from_first_rank(alone_s < QUICK_S)]
        rounds = _from_first_rank(max(1, round(alone_s / time_calls(compute, device, calls=20).median_s)))
        compute_s = time_calls(compute, device, calls=1, repeats=3).median_s
        dist.barrier()
        both_s = time_calls(both, device, calls=1, repeats=3).median_s
        gained.append((alone_s + compute_s - both_s) / min(alone_s, compute_s))
        times = f"all-reduce {alone_s * 1e3:.2f} ms, matmuls {compute_s * 1e3:.2f} ms, at once {both_s * 1e3:.2f} ms"
        report(f"overlap {gained[-1]:.2f}: {times}")
    return min(1.0, max(0.0, statistics.median(gained)))


def _measure_crowd(group: dist.ProcessGroup, device: torch.device, report: Report) -> float:
    """Seconds that a small all-reduce takes longer where all ranks compute before and after it, and a core is to be had in turns."""
    small, factor = torch.rand(CROWD_BYTES // 4, device=device), torch.rand(512, 512, device=device)

    def reduce() -> None:
        _c10d.wait_tensor(_c10d.all_reduce(small, "sum", group.group_name))

    def compute(then: Callable[[], object] = lambda: None) -> None:
        for _ in range(CROWD_ROUNDS):
            for _ in range(CROWD_MATMULS):
                torch.mm(factor, factor)
            then()

    found = []
    for _ in range(SHARING_TURNS):
        dist.barrier()
        alone_s = time_calls(reduce, device, calls=CROWD_ROUNDS, repeats=3).median_s
        dist.barrier()
        compute_s = time_calls(compute, device, calls=1, repeats=3).median_s
        dist.barrier()
        both_s = time_calls(lambda: compute(reduce), device, calls=1, repeats=3).median_s
        found.append(max(0.0, (both_s - compute_s) / CROWD_ROUNDS - alone_s))
        times = f"alone {alone_s * 1e6:.0f} us, matmuls {compute_s * 1e3:.1f} ms, with {CROWD_ROUNDS} between {both_s * 1e3:.1f} ms"
        report(f"crowded {found[-1] * 1e6:.0f} us more for an all-reduce of {CROWD_BYTES} B: {times}")
    return statistics.median(found)


class Sharing(NamedTuple):
    """How many times as fast a rank computes, and goes through memory, while all others wait; 1 where it is about as fast."""

    compute: float = 1.0
    memory: float = 1.0


def measure_sharing(device: torch.device, *, report: Report = silent) -> Sharing:
    """What ranks have of each other's devices; every rank must call this."""
    if dist.get_world_size() == 1:
        return Sharing()
    factor, source = torch.rand(512, 512, device=device), torch.rand(SHARED_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    compute = _sharing_of("matmul", lambda: torch.mm(factor, factor), device, report)
    memory = _sharing_of("copy", lambda: target.copy_(source), device, report)
    compute, memory = compute if compute > NOT_SHARED else 1.0, memory if memory > MEMORY_NOT_SHARED else 1.0
    return _from_first_rank(Sharing(compute, max(compute, memory)))


def _sharing_of(name: str, run: Callable[[], object], device: torch.device, report: Report) -> float:
    ratios = []
    for _ in range(SHARING_TURNS):  # in turns: a machine is not as fast at all times
        dist.barrier()
        alone = _from_first_rank(time_calls(run, device, calls=20) if dist.get_rank() == 0 else None)
        assert alone is not None
        calls = max(1, round(SHARED_TURN_S / alone.median_s))
        dist.barrier()
        together = time_calls(run, device, calls=calls)
        ratios.append(together.median_s / alone.median_s)
        report(f"sharing {ratios[-1]:.2f}: a {name} takes {together} on all ranks at once, {alone} on one alone")
    return statistics.median(ratios)


def _shared(device: DeviceProfile, sharing: Sharing) -> DeviceProfile:
    """What a rank has of a device that was measured alone, while all compute.

    Of what an op takes, as much is memory's as a copy of as many bytes takes: that is shared as memory is, and goes on beside the rest,
    which is shared as computation is.
    """
    compute, memory = sharing

    def shared_rate(rate: float) -> float:
        return 1 / max(compute / rate, memory / max(rate, device.memory_bandwidth))

    return replace(
        device,
        matmul=tuple(s.times(1 / compute) for s in device.matmul),
        batched=tuple(s.times(1 / compute) for s in device.batched),
        attention=tuple(
            AttentionSample(s.length, s.dtype, s.forward_flops_per_s / compute, s.backward_flops_per_s / compute) for s in device.attention
        ),
        streams={name: Stream(*map(shared_rate, rates)) for name, rates in device.streams.items()},
        memory_bandwidth=device.memory_bandwidth / memory,
        launch_overhead_s=device.launch_overhead_s * compute,
        update_dispatch_s=device.update_dispatch_s * compute,
        sharing=compute,
    )


def _from_first_rank(value: T) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def cache_path(mesh_sizes: Sequence[int], device: str, backend: str) -> Path:
    """Where the profile of this machine and mesh is kept: the name holds host, device (`device_name`), torch, backend and mesh shape."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"
    shape = "x".join(map(str, mesh_sizes))
    text = "_".join((socket.gethostname(), platform.machine(), device, torch.__version__, backend, shape, METHOD))
    return folder / (re.sub(r"[^A-Za-z0-9_.+-]+", "-", text) + ".json")


def read_cached(mesh: Mesh, device: torch.device, num_threads: int) -> MachineProfile | None:
    """What `measure` keeps of ranks with so many threads on this machine, without starting them; None if it was not measured."""
    path = cache_path(mesh.sizes, device_name(device, num_threads), "nccl" if device.type == "cuda" else "gloo")
    return _kept(path, silent)


def _kept(path: Path, report: Report) -> MachineProfile | None:
    """What a file of the cache holds; one that cannot be read is measured anew."""
    try:
        return MachineProfile.load(path) if path.is_file() else None
    except (OSError, PlanError) as error:
        report(f"measuring anew: {error}")
        return None


def _keep(profile: MachineProfile, path: Path, report: Report) -> None:
    """Write a file of the cache, at once or not at all; a run does not end where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(descriptor)
        profile.save(name)
        os.replace(name, path)
    except OSError as error:
        warnings.warn(
            f"this machine is measured again next time: the profile cannot be kept ({error}); give XDG_CACHE_HOME a folder that can be "
            "written, or parallelize a profile that `autopar profile --out` wrote",
            stacklevel=user_level(),
        )
    else:
        report(f"wrote {path}")


def _ranks_here() -> int:
    """How many ranks run on this rank's host."""
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts.count(socket.gethostname())


@contextmanager
def _as_ever(device: torch.device) -> Iterator[None]:
    """What the caller has set for tensors and gradients does not count, and the random numbers that it draws next are those without this:
    ranks go on to draw the same batches."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_default_dtype(dtype)


def measure(device_mesh: DeviceMesh, *, report: Report = silent, refresh: bool = False) -> MachineProfile:
    """The profile of this machine and mesh, measured once and then read from the cache; every rank must call this.

    Random numbers that the caller draws afterwards are those without it.

    Args:
        device_mesh: the mesh; its ranks are all of the default process group.
        report: gets one line per measurement, on rank 0 only; where it is silent, one line of the log says that this is measured.
        refresh: measure again even if there is a cached profile.
    """
    first = dist.get_rank() == 0
    report = report if first else silent
    torch_device = _mesh_device(device_mesh)
    backend = _backend(device_mesh.get_group(0), torch_device)
    path = cache_path(device_mesh.mesh.shape, device_name(torch_device), backend)
    cached = _from_first_rank(_kept(path, report) if first and not refresh else None)
    if cached is not None:
        report(f"read {path}")
        return cached
    if first and report is silent:
        _LOG.warning("measuring this machine for a minute or two; the profile is kept in %s, and read from there next time", path)
    with _as_ever(torch_device):
        device = _from_first_rank(measure_device(torch_device, report=report) if first else None)
        assert device is not None
        if torch_device.type == "cpu":  # ranks of one host share its memory; the launch of an update is a part of it
            update_s = _from_first_rank(measure_update(device_mesh, torch_device, report) if first else 0.0)
            device = replace(device, memory_bytes=device.memory_bytes // _ranks_here(), update_dispatch_s=update_s)
        before = measure_sharing(torch_device, report=report)
        if torch_device.type == "cuda":  # each rank has a host's thread of its own, which all need at once
            dispatch_s, update_s = measure_dispatch(torch_device, report), measure_update(device_mesh, torch_device, report)
            device = replace(device, dispatch_s=_from_first_rank(dispatch_s), update_dispatch_s=_from_first_rank(update_s))
        links = measure_links(device_mesh, report=report, is_shared=before.compute > 1)
        after = measure_sharing(torch_device, report=report)  # what ranks have of memory may change by the second
        device = _shared(device, Sharing(*map(statistics.mean, zip(before, after, strict=True))))
    shape = "x".join(map(str, device_mesh.mesh.shape))
    origin = f"{socket.gethostname()}, {device.name}, mesh {shape}, {today()}"
    profile = _from_first_rank(MachineProfile(device, links, origin))
    if first:
        _keep(profile, path, report)
    return profile
