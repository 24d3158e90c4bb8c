"""`autopar.sweep`: the automatic plan among all configurations that could be written by hand, as a table and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autopar.capture.loss import LossFn
from autopar.cost.cluster import Cluster
from autopar.cost.machine import MachineProfile
from autopar.offload import Offload
from autopar.planner.choose import why_whole
from autopar.planner.document import Plan
from autopar.planner.question import ask, faster_by_hand
from autopar.planner.request import Batch, Grid, grids_of
from autopar.precision import Precision
from autopar.report import Report, silent
from autopar.show.files import check_figure
from autopar.show.table import table_text
from autopar.solve.experts import find_experts
from autopar.solve.follow import sequence_size
from autopar.solve.search import Search
from autopar.solve.sweep import Left, Point, Space, configurations, price_all
from autopar.units import bytes_text, number_text, seconds_text, share_text

SHOWN = 10
"""Configurations in the table."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What `autopar.sweep` found. It prints as a table.

    Args:
        auto: the automatic plan.
        points: the configurations; those that fit first, the fastest of them first.
        left: why choices of degrees and micro-batch were not priced, with their numbers.
    """

    auto: Plan
    points: tuple[Point, ...]
    left: tuple[tuple[str, int], ...] = ()

    @property
    def fitting(self) -> tuple[Point, ...]:
        """The configurations that fit, the fastest first."""
        return tuple(point for point in self.points if point.fits)

    @property
    def best(self) -> Point | None:
        """The fastest configuration that fits."""
        return next(iter(self.fitting), None)

    @property
    def pareto(self) -> tuple[Point, ...]:
        """Those that fit of which no faster one takes less memory, the fastest first."""
        found: list[Point] = []
        for point in self.fitting:
            if not found or point.peak_memory_bytes < found[-1].peak_memory_bytes:
                found.append(point)
        return tuple(found)

    def __str__(self) -> str:
        return sweep_text(self)

    def plot(self, path: str | Path) -> None:
        """Draw time against memory, as SVG, PNG or PDF by the ending of ``path``.

        Raises:
            PlanError: matplotlib is not installed, or the ending is another.
        """
        check_figure(path)
        _draw(self, Path(path))


def sweep_text(sweep: Sweep, width: int = 100) -> str:
    """The automatic plan, the fastest configurations, and how many there are."""
    prediction = sweep.auto.prediction
    base = prediction.step_time_s
    rows = [("automatic", base, prediction.bubble_fraction, max(prediction.peak_memory_bytes))]
    rows += [(_name(point), point.step_time_s, point.bubble_fraction, point.peak_memory_bytes) for point in sweep.fitting[:SHOWN]]
    cells = [
        [name, seconds_text(time_s), f"{time_s / base:.3f}", share_text(bubble), bytes_text(peak)] for name, time_s, bubble, peak in rows
    ]
    table = table_text(("plan", ">step", ">to automatic", ">bubble", ">peak"), cells, width=width, wide=("plan",))
    count = f"{number_text(len(sweep.points), 'configuration')}, of which {len(sweep.fitting)} fit"
    left = "".join(f"\nleft out: {number_text(number, 'choice')} of degrees and micro-batch {why}" for why, number in sweep.left)
    return f"{table}\n{count}; {_rank(sweep)}{left}"


def _rank(sweep: Sweep) -> str:
    faster = sum(point.step_time_s < sweep.auto.prediction.step_time_s for point in sweep.fitting)
    return f"{faster} of them are predicted to be faster than the automatic plan" if faster else "none is faster than the automatic plan"


def _name(point: Point) -> str:
    return str(point.config).removeprefix("Manual(").removesuffix(")")


def _draw(sweep: Sweep, path: Path) -> None:
    """Dots for the configurations, by degree of tensor parallelism; a line for the Pareto front; a star for the automatic plan."""
    from matplotlib.figure import Figure

    gib = 2**30
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for tp in sorted({point.config.tp for point in sweep.fitting}):
        own = [point for point in sweep.fitting if point.config.tp == tp]
        axes.scatter([p.peak_memory_bytes / gib for p in own], [p.step_time_s for p in own], s=14, alpha=0.7, label=f"tp={tp}")
    front: Sequence[Point] = sweep.pareto
    axes.plot([p.peak_memory_bytes / gib for p in front], [p.step_time_s for p in front], color="grey", linewidth=1, label="Pareto front")
    auto = sweep.auto.prediction
    axes.scatter([max(auto.peak_memory_bytes) / gib], [auto.step_time_s], marker="*", s=180, color="tab:red", label="automatic")
    axes.axvline(sweep.auto.memory_limit_bytes / gib, color="grey", linestyle=":", label="memory limit")
    title = f"{sweep.auto.model} on {sweep.auto.machine}"
    axes.set(xlabel="peak memory of a rank [GiB]", ylabel="predicted step [s]", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def sweep(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    memory_limit: float | str | None = None,
    profile: MachineProfile | str | Path | None = None,
    outputs: str = "whole",
    report: Report = silent,
) -> Sweep:
    """The automatic plan, and every configuration (`solve.sweep.configurations`) of the same ranks and batch, by predicted time and memory.

    Tensor parallelism stays within a node of a described cluster, or within the last axis of a mesh, and so does context parallelism of
    sequences that are not long, which models on tokens have. Expert parallelism is there for models whose products tell the experts. Deep
    models are priced by a few of their blocks.

    The arguments and the errors are those of `autopar.plan`.
    """
    question = ask(
        model,
        cluster,
        batch,
        loss_fn=loss_fn,
        outputs=outputs,
        optimizer=optimizer,
        precision=precision,
        offload=offload,
        memory_limit=memory_limit,
        profile=profile,
        report=report,
    )
    session = question.session
    auto = Plan.answer(question)
    mesh, folded = grids_of(cluster, None)[0], session.folded()
    most_tp = cluster.gpus_per_node if isinstance(cluster, Cluster) else mesh.sizes[-1]
    most_stages = folded.most_stages if folded is not None else mesh.num_ranks
    sequence, experts = sequence_size(session.normal), math.gcd(*find_experts(session.normal).counts) or 1
    left = Counter[Left]()
    space = Space(mesh.num_ranks, session.batch_size, most_tp, most_stages, sequence, experts, is_split=not why_whole(session))
    configs = configurations(space, left)
    to_host = Offload.of(auto.offload)  # what the planner has chosen, if it was to choose
    search = Search(session.normal_for, question.machine_of, question.limit, (), optimizer, True, report, offload=to_host)
    points = price_all(configs, search, folded, session.batch_size)
    fitting = [(point.config, point.step_time_s) for point in points if point.fits]
    better = faster_by_hand(question, auto.prediction.step_time_s, fitting)
    auto = Plan.of(*better, question) if better is not None else auto
    return Sweep(auto, tuple(points), tuple((why.value, number) for why, number in left.items()))
