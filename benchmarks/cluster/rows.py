"""What the ranks do for one row: make the model parallel, train some steps, and measure them."""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from gpt import BATCH, LEARNING_RATE
from hosts import Report
from memory import allocated_bytes, forget_peak, status_bytes
from native import Step as NativeStep
from native import rows as native_rows
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from workloads import GPT, Batch, Workload

import autopar
from autopar.cost.machine import MachineProfile
from autopar.cost.measure import measure

WARM_UP_STEPS = 2
CALM = 0.1
"""Share of the machine's processor time that other processes may take while something is measured."""
MOST_TRIES = 3
"""How often a measurement is made until it is a calm one."""


class Made(NamedTuple):
    """A training step, and its plan if it has one."""

    step: Callable[[Batch], float | None]
    plan: Any


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the table.

    Args:
        step_s: median over the steps; a step is as long as that of its slowest rank; over several runs the median of their medians.
        spread: (longest - shortest) / median; of several runs between their medians.
        others: share of the machine's processor time that other processes took meanwhile.
        busy: share of it that the ranks took.
        predicted_s: by the plan; None for hand-written PyTorch.
        loss: of the last step.
        resident_bytes: the most memory of a rank while it trained, beyond what the imports took.
        allocated_bytes: the most that tensors of a rank took at one time in a step, as torch's allocator counts them.
        predicted_bytes: the same by the plan; None for hand-written PyTorch.
        across_bytes: sent between the hosts in one step, by all of them together.
        inside_bytes: sent inside the hosts in one step.
        plan: the plan, as JSON and in short; empty for hand-written PyTorch.
        runs: how often it was run, by fresh processes each time.
    """

    step_s: float
    spread: float
    others: float
    busy: float
    predicted_s: float | None
    loss: float
    resident_bytes: int
    allocated_bytes: int
    predicted_bytes: int | None
    across_bytes: float
    inside_bytes: float
    plan: tuple[str, str] = ("", "")
    runs: int = 1


def together(runs: Sequence[Measured]) -> Measured:
    """Several runs of one row as one."""
    times = [run.step_s for run in runs]
    median_s = statistics.median(times)
    spread, others = (max(times) - min(times)) / median_s, max(run.others for run in runs)
    return replace(runs[-1], step_s=median_s, spread=spread, others=others, runs=len(runs)) if len(runs) > 1 else runs[0]


def host_mesh(per_host: int) -> DeviceMesh:
    """All ranks, by host and place in it."""
    sizes = (dist.get_world_size() // per_host, per_host)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("host", "local"))


def measure_machine(per_host: int, report: Report) -> tuple[MachineProfile, float]:
    """What autopar finds here, and the share of others meanwhile; autopar keeps the profile where ``parallelize`` looks for it."""
    mesh, watch = host_mesh(per_host), Watch()
    profile = measure(mesh, refresh=True, report=report)
    own: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(own, watch.own_s())
    return profile, max(0.0, (watch.all_s() - sum(own)) / watch.passed_s())


def manual_configs(num_ranks: int, per_host: int, microbatches: tuple[int, ...]) -> dict[str, autopar.Manual]:
    """Every factorization of the ranks with every ZeRO level, also with the same shards on each host, and for pipelines and these every
    number of micro-batches that the batch has rows for."""
    found, hosts = {}, num_ranks // per_host
    degrees = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    for pp, dp, tp in product(degrees, repeat=3):
        if pp * dp * tp != num_ranks:
            continue
        for zero, replicas in product(range(4 if dp > 1 else 1), {1, hosts}):
            if replicas > 1 and (not zero or dp % replicas or dp == replicas):
                continue
            for count in microbatches if pp > 1 or replicas > 1 else (None,):
                if BATCH % (dp * (count or 1)):
                    continue
                parts = [f"{axis}{n}" for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1]
                parts += [f"zero{zero}"] if zero else []
                parts += [f"replicas{replicas}"] if replicas > 1 else []
                parts += [f"m{count}"] if count else []
                config = autopar.Manual(dp=dp, tp=tp, pp=pp, zero=zero, replicas=replicas, microbatches=count)
                found["-".join(parts)] = config
    return found


def all_rows(
    num_ranks: int, per_host: int, microbatches: tuple[int, ...], steps: int
) -> dict[str, Callable[[Report], Measured]]:
    """What to run, by name of the row."""

    def ours(config: autopar.Manual | None) -> Callable[[Report], Measured]:
        return lambda report: measure_steps(lambda: parallelized(GPT, config, per_host, report), GPT.batches(), steps, per_host)

    def theirs(make: Callable[[DeviceMesh], NativeStep]) -> Callable[[Report], Measured]:
        return lambda report: measure_steps(lambda: native(make(host_mesh(per_host))), GPT.batches(), steps, per_host)

    configs: dict[str, autopar.Manual | None] = {"auto": None, **manual_configs(num_ranks, per_host, microbatches)}
    return {name: ours(config) for name, config in configs.items()} | {
        name: theirs(make) for name, make in native_rows(num_ranks, microbatches).items()
    }


def native(step: NativeStep) -> Made:
    """A step of hand-written PyTorch, which knows the tokens alone."""
    return Made(lambda batch: step(batch["input_ids"]), None)


def parallelized(workload: Workload, config: autopar.Manual | None, per_host: int, report: Report) -> Made:
    """The training step by a plan, as a user of autopar would write it; and the plan."""
    mesh, model = host_mesh(per_host), workload.model()
    where: dict[str, Any] = {"mesh": mesh}
    if config is not None:  # its grid has other axes: the same prices for them
        hosts = autopar.Mesh(("host", "local"), tuple(mesh.mesh.shape))
        grid = config.grid(dist.get_world_size())
        where = {
            "mesh": grid,
            "profile": autopar.Cluster.from_mesh(hosts, measure(mesh)).with_mesh(grid).profile,
            "plan": config,
        }
    parallel = autopar.parallelize(
        model,
        **where,
        example_batch=next(workload.batches()),
        outputs="loss",  # hand-written PyTorch does not gather the logits either
        report=report if dist.get_rank() == 0 else lambda text: None,
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), LEARNING_RATE)

    def step(batch: Batch) -> float:
        loss = workload.loss(parallel(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return Made(step, parallel.plan)


def measure_steps(make: Callable[[], Made], data: Iterator[Batch], steps: int, per_host: int) -> Measured:
    """Make a training step, with its plan if it has one, and train; every rank calls this and gets the same.

    Where other processes of the machine disturb steps, more are done, and those that were disturbed least count.
    """
    imported = status_bytes("VmRSS")
    step, plan = make()
    for batch in islice(data, WARM_UP_STEPS):
        step(batch)
    forget_peak()
    everyone: list[Any] = [None] * dist.get_world_size()
    timed: list[tuple[float, float, float]] = []  # share of others, seconds, share of the ranks
    loss = None
    dist.barrier()
    sent = _sent_bytes()
    for batch in islice(data, MOST_TRIES * steps):
        watch = Watch()
        dist.barrier()
        started = time.perf_counter()
        seen = step(batch)
        elapsed_s = time.perf_counter() - started
        dist.all_gather_object(everyone, (elapsed_s, watch.own_s(), seen, watch.all_s(), watch.passed_s()))
        times, own, losses, busy, passed = zip(*everyone, strict=True)
        timed.append(((busy[0] - sum(own)) / passed[0], max(times), sum(own) / passed[0]))
        if len(timed) == steps:
            loss = _mean([each for each in losses if each is not None])
        if sum(others <= CALM for others, *_ in timed) == steps:
            break
    dist.barrier()
    sent_bytes = [after - before for after, before in zip(_sent_bytes(), sent, strict=True)]
    dist.all_gather_object(everyone, (status_bytes("VmHWM"), sent_bytes))
    peaks, all_sent = zip(*everyone, strict=True)
    dist.all_gather_object(everyone, allocated_bytes(lambda: step(next(data))))
    across, inside = (sum(host[i] for host in all_sent[::per_host]) / len(timed) for i in (0, 1))
    calmest = sorted(timed)[:steps]
    slowest = [seconds for _, seconds, _ in calmest]
    median = statistics.median(slowest)
    assert loss is not None
    return Measured(
        median,
        (max(slowest) - min(slowest)) / median,
        max(0.0, _mean([others for others, *_ in calmest])),
        _mean([share for *_, share in calmest]),
        plan.prediction.step_time_s if plan is not None else None,
        loss,
        max(peaks) - imported,
        max(everyone),
        max(plan.prediction.peak_memory_bytes) if plan is not None else None,
        across,
        inside,
        (plan.to_json(), _in_short(plan)) if plan is not None else ("", ""),
    )


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


class Watch:
    """Processor time since it was made, in seconds."""

    def __init__(self) -> None:
        self._all, self._own, self._started = _busy_s(), time.process_time(), time.perf_counter()

    def own_s(self) -> float:
        """Of this process."""
        return time.process_time() - self._own

    def all_s(self) -> float:
        """Of all processes of the machine."""
        return _busy_s() - self._all

    def passed_s(self) -> float:
        """What all cores could have given."""
        return (time.perf_counter() - self._started) * (os.cpu_count() or 1)


def _busy_s() -> float:
    """Processor time that processes took since the machine started, without interrupts."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _in_short(plan: Any) -> str:
    shape = str(plan.mesh)
    pipeline = plan.pipeline
    if pipeline.microbatches > 1:
        shape = f"{plan.grid}, {pipeline.schedule}, {pipeline.stages} stages, {pipeline.microbatches} micro-batches"
    kinds = sorted({"/".join(parameter.held) for parameter in plan.parameters})
    return f"{shape}; parameters held as {', '.join(kinds)}"


def _sent_bytes() -> tuple[int, int]:
    """By this host so far: to other hosts, and to itself."""
    rows = (line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    sent = {name.strip(): int(numbers.split()[8]) for name, numbers in rows}
    return sent["e0"], sent["lo"]


def quiet() -> None:
    """Before processes are started: one thread each, no warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
