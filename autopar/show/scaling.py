"""One model on clusters of several sizes: a row for each, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from autopar.cost.batch_size import BatchSize
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.show.files import check_figure
from autopar.show.table import table_text
from autopar.units import bytes_text, count_text, number_text, seconds_text, share_text

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One size of the cluster. Figures are predicted, and nan where there is no plan; tokens are counted as in `Prediction.tokens_per_s`.

    Args:
        nodes: hosts.
        ranks: devices of all of them.
        batch_rows: rows of the global batch.
        plan: the plan; None if there is none.
        reason: why there is none; else empty.
        efficiency: tokens/s of a device over that of the smallest size that has a plan.
        budget_tokens: tokens to train on; None: not given.
        price_per_gpu_hour: of one device, in any currency; None: not given.
        batch: the global batch against the noise scale of the gradient; None: not given, or no plan.
        learning_rate_factor: best learning rate of SGD over that of the smallest size that has a plan; nan without a noise scale.
    """

    nodes: int
    ranks: int
    batch_rows: int
    plan: Plan | None = field(repr=False)
    reason: str = ""
    efficiency: float = NAN
    budget_tokens: float | None = None
    price_per_gpu_hour: float | None = None
    batch: BatchSize | None = None
    learning_rate_factor: float = NAN

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step; nan without a plan, as are the others."""
        return self.plan.prediction.step_time_s if self.plan else NAN

    @property
    def tokens_per_s(self) -> float:
        """Predicted, over all ranks."""
        return self.plan.prediction.tokens_per_s if self.plan else NAN

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Predicted, of one rank."""
        return self.tokens_per_s / self.ranks

    @property
    def tokens_per_step(self) -> float:
        """Of the global batch."""
        return round(self.tokens_per_s * self.step_time_s) if self.plan else NAN

    @property
    def mfu(self) -> float:
        """Model flops over peak flops of all devices."""
        return self.plan.prediction.mfu if self.plan else NAN

    @property
    def peak_memory_bytes(self) -> int:
        """Of the rank that takes most; 0 where there is no plan."""
        return max(self.plan.prediction.peak_memory_bytes) if self.plan else 0

    @property
    def gpu_hours(self) -> float:
        """Hours of one device, times devices, for the tokens of the budget; nan without one."""
        return self.gpu_hours_of(self.budget_tokens) if self.budget_tokens is not None else NAN

    @property
    def days(self) -> float:
        """For the tokens of the budget; nan without one."""
        return self.gpu_hours / self.ranks / 24

    @property
    def cost(self) -> float:
        """GPU-hours times the price of one; nan where one of them is not given."""
        return self.gpu_hours * self.price_per_gpu_hour if self.price_per_gpu_hour is not None else NAN

    def gpu_hours_of(self, tokens: float) -> float:
        """The same for any number of tokens."""
        return tokens / self.tokens_per_s * self.ranks / 3600


@dataclass(frozen=True, slots=True)
class Scaling:
    """What `autopar.scale` found; it prints as a table.

    Args:
        model: name of the model's class.
        device: what a node has, ``8 h100``.
        rows: in the order of their size.
        weak: whether the batch grows with the cluster.
    """

    model: str
    device: str
    rows: tuple[ScalingRow, ...]
    weak: bool = False

    def __str__(self) -> str:
        return scaling_text(self)

    @property
    def base(self) -> ScalingRow | None:
        """The row that efficiency is relative to: the smallest size that has a plan; None if none has."""
        return next((row for row in self.rows if row.fits), None)

    def to_json(self) -> str:
        """A list of rows with their figures, without the plans; null where there is no figure."""
        return json.dumps([_figures(row) for row in self.rows], indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw time, GPU-hours and efficiency against the number of devices, as PNG, SVG or PDF by the name of the file.

        Raises:
            PlanError: matplotlib is not installed, the name has another ending, or no size has a plan.
        """
        check_figure(path)
        if self.base is None:
            raise PlanError("there is nothing to draw: no size of the cluster has a plan; print the scaling for the reasons")
        _draw(self, Path(path))


def _figures(row: ScalingRow) -> dict[str, object]:
    numbers = {
        name: getattr(row, name)
        for name in (
            "nodes",
            "ranks",
            "batch_rows",
            "step_time_s",
            "tokens_per_s",
            "tokens_per_s_per_gpu",
            "tokens_per_step",
            "mfu",
            "efficiency",
            "peak_memory_bytes",
            "gpu_hours",
            "days",
            "cost",
            "learning_rate_factor",
        )
    }
    batch = row.batch
    noise = {name: getattr(batch, name) if batch else NAN for name in ("critical_batches", "data_factor", "step_factor")}
    known = {name: None if math.isnan(value) else value for name, value in (numbers | noise).items()}
    return known | {"grid": str(row.plan.grid) if row.plan else None, "fits": row.fits, "reason": row.reason}


COLUMNS: dict[str, Callable[[ScalingRow], str]] = {
    ">nodes": lambda row: str(row.nodes),
    ">ranks": lambda row: str(row.ranks),
    ">rows": lambda row: str(row.batch_rows),
    ">step": lambda row: seconds_text(row.step_time_s),
    ">tokens/s": lambda row: count_text(row.tokens_per_s),
    ">per GPU": lambda row: count_text(row.tokens_per_s_per_gpu),
    ">MFU": lambda row: share_text(row.mfu) if row.mfu else "-",
    ">efficiency": lambda row: share_text(row.efficiency),
    ">peak": lambda row: bytes_text(row.peak_memory_bytes),
}
BUDGET_COLUMNS: dict[str, Callable[[ScalingRow], str]] = {
    ">GPU-hours": lambda row: count_text(row.gpu_hours),
    ">days": lambda row: f"{row.days:.3g}",
}


def scaling_text(scaling: Scaling, width: int = 100) -> str:
    """The table; below it why sizes have no plan, and what the batches mean for steps, data and learning rate."""
    base = scaling.base
    columns = dict(COLUMNS)
    if base is not None and base.budget_tokens is not None:
        columns |= BUDGET_COLUMNS
        if base.price_per_gpu_hour is not None:
            columns[">cost"] = lambda row: count_text(row.cost)
    always = len((">nodes", ">ranks", ">rows"))
    cells = [
        [cell(row) if row.fits or i < always else "-" for i, cell in enumerate(columns.values())] for row in scaling.rows
    ]
    title = f"{scaling.model} on nodes of {scaling.device}, the batch {'grows with the cluster' if scaling.weak else 'stays'}"
    headings = [heading.replace("tokens", _unit(scaling)) for heading in columns]
    return "\n".join([title, "", table_text(headings, cells, width=width), *_notes(scaling)])


def _unit(scaling: Scaling) -> str:
    """What the batch is counted in."""
    base = scaling.base
    return base.plan.prediction.unit if base is not None and base.plan is not None else "tokens"


def _notes(scaling: Scaling) -> Iterator[str]:
    yield from (f"no plan for {number_text(row.nodes, 'node')}: {row.reason.splitlines()[0]}" for row in scaling.rows if not row.fits)
    base = scaling.base
    if base is None or base.batch is None:
        return
    for batch in dict.fromkeys(row.batch for row in scaling.rows if row.batch is not None):
        yield batch.advice(base.batch)
    if base.budget_tokens is not None:
        yield (
            f"GPU-hours and days are of {count_text(base.budget_tokens)} {_unit(scaling)} whatever the batch; equal progress takes them in "
            "proportion to the times of the least data"
        )


def _draw(scaling: Scaling, path: Path) -> None:
    """Three axes over the number of devices; a size without a plan is a dotted line."""
    from matplotlib.figure import Figure

    rows = [row for row in scaling.rows if row.fits]
    base, ranks = rows[0], [row.ranks for row in rows]
    tokens = base.budget_tokens
    hours_of = f"{count_text(1e9 if tokens is None else tokens)} {_unit(scaling)}"
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(f"{scaling.model} on nodes of {scaling.device}, {'weak' if scaling.weak else 'strong'} scaling")
    time, hours, efficiency = figure.subplots(1, 3)
    times = [row.step_time_s if tokens is None else row.days for row in rows]
    is_flat = scaling.weak and tokens is None
    time.plot(ranks, times, marker="o", label="predicted")
    time.plot(ranks, [times[0] * (1 if is_flat else base.ranks / n) for n in ranks], color="grey", linestyle="--", label="ideal")
    hours.plot(ranks, [row.gpu_hours_of(1e9 if tokens is None else tokens) for row in rows], marker="o")
    efficiency.plot(ranks, [100 * row.efficiency for row in rows], marker="o")
    time.set(yscale="log", ylabel="step [s]" if tokens is None else f"days for {hours_of}")
    time.yaxis.set_major_formatter("{x:g}")
    time.yaxis.set_minor_formatter("{x:g}")
    hours.set(ylim=(0, 1.1 * hours.dataLim.ymax), ylabel=f"GPU-hours for {hours_of}")
    efficiency.set(ylim=(0, 1.1 * efficiency.dataLim.ymax), ylabel=f"{_unit(scaling)}/s of a device, % of that of {base.ranks}")
    ticks = [row.ranks for row in scaling.rows]
    missing = [row.ranks for row in scaling.rows if not row.fits]
    for axes in (time, hours, efficiency):
        axes.set(xscale="log", xlim=(0.9 * ticks[0], 1.1 * ticks[-1]), xlabel="devices")
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xticks([], minor=True)
        axes.grid(visible=True, alpha=0.3)
        for n in missing:
            axes.axvline(n, color="tab:red", linestyle=":", label="no plan" if n == missing[0] else None)
    time.legend()
    figure.savefig(path)
