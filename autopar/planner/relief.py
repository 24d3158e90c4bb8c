"""What would make a request fit, and what each of its pins costs: the request with one thing changed, planned again, with its figures.

    configuration   recomputation, ZeRO level, sequence parallelism, more micro-batches, and all of these; or the solver in its place
    pins            without each of them, and without all
    outputs         the loss alone, where others come back whole to every rank
    offload         optimizer state, parameters or activations in the memory of the host, if the devices have one beside theirs
    the rest        a leaner optimizer, a smaller batch, more ranks, a larger limit

The automatic plan has the settings of a configuration among its own choices, so that only pins and the rest are left for it. Where a change
has a size (ranks, micro-batches, parts of the batch) it is doubled until something fits. What the state of the model alone rules out is not
planned: parameters, gradients and optimizer state, evenly over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autopar.cost.cluster import Cluster
from autopar.cost.updates import OPTIMIZER_STATE_BYTES
from autopar.errors import AutoparError, ConflictError, InfeasibleError
from autopar.mesh import Mesh
from autopar.offload import CHOICES
from autopar.plan import Plan as PlanRecord
from autopar.planner.document import Plan
from autopar.planner.question import Question
from autopar.planner.request import Grid, grids_of, offload_of
from autopar.show.table import table_text
from autopar.solve.manual import Manual
from autopar.solve.recompute import LEVELS, share_of
from autopar.units import bytes_text, count_text, seconds_text

MAX_TIMES = 64
"""Ranks are multiplied, and batches divided, by this at most."""
MORE = 1.02
"""The first limit that is tried is so much above the least that was found, and each next above the last: less is hard for the solver."""
MAX_LIMITS = 4
"""Limits that are tried."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A request with one thing changed.

    Args:
        what: the change in words; the first row is "as asked".
        change: the arguments of `autopar.plan` that are other than asked, by name.
        plan: its plan; None if there is none.
        error: why there is none.
    """

    what: str
    change: dict[str, object]
    plan: Plan | None = field(default=None, repr=False)
    error: AutoparError | None = None

    @property
    def reason(self) -> str:
        """Why it has no plan, in words; empty if it has one."""
        return str(self.error or "")

    @property
    def least_bytes(self) -> float | None:
        """Where memory is what it lacks, bytes per rank of the plan that is closest to fitting, if one was worked out."""
        return self.error.least_bytes if isinstance(self.error, InfeasibleError) else None

    @property
    def fits(self) -> bool:
        """Whether it has a plan."""
        return self.plan is not None

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step; nan without a plan."""
        return self.plan.prediction.step_time_s if self.plan else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Predicted, over all ranks; nan without a plan."""
        return self.plan.prediction.tokens_per_s if self.plan else math.nan

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Of every rank of the pipeline; empty without a plan."""
        return self.plan.prediction.peak_memory_bytes if self.plan else ()


@dataclass(frozen=True, slots=True)
class Change:
    """A request with one thing changed, in words, and the arguments of `autopar.plan` that are other than asked."""

    what: str
    question: Question
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class Reliefs:
    """Finds the reliefs of a request.

    Args:
        asked: the request.
        part_of_batch: one of so many equal parts of the batch.
    """

    asked: Question
    part_of_batch: Callable[[int], object]

    def find(self) -> list[Relief]:
        """The request as asked, then with changes; where it fits, without its pins and its configuration, which tells what they cost.

        Raises:
            AutoparError: the request cannot be met, and neither memory nor pins that go against each other are the reason.
        """
        first = self._tried(Change("as asked", self.asked, {}))
        error = first.error
        if error is not None and not isinstance(error, InfeasibleError | ConflictError):
            raise error
        pins = [self._tried(change) for change in _without_pins(self.asked)]
        if not isinstance(error, InfeasibleError):
            return [first, *pins]
        settings = self._firsts(_settings(self.asked, self.asked.session.batch_size))
        if not any(row.fits for row in settings):
            settings += self._firsts([_all_settings(self.asked, self.asked.session.batch_size)])
        leaner = [*_outputs(self.asked), *_offloads(self.asked), *_leaner(self.asked)]
        others = self._firsts([*leaner, self._parts(error), *_more_ranks(self.asked, error)])
        return [first, *settings, *pins, *others, *self._limits(error)]

    def _tried(self, change: Change) -> Relief:
        self.asked.report(f"planning {change.what}")
        try:
            return Relief(change.what, change.arguments, Plan.answer(change.question))
        except AutoparError as error:
            return Relief(change.what, change.arguments, error=error)

    def _firsts(self, series: Iterable[Iterable[Change]]) -> list[Relief]:
        """Of each series the first change that fits; if none does, the last that is possible but for the memory, or else the first."""
        rows = []
        for changes in series:
            row = None
            for change in changes:
                found = self._tried(change)
                is_short = isinstance(found.error, InfeasibleError)
                if row is None or found.fits or is_short:
                    row = found
                if not is_short:
                    break
            rows += [row] if row is not None else []
        return rows

    def _parts(self, error: InfeasibleError) -> Iterator[Change]:
        """Smaller batches, which do not make the state of the model smaller."""
        if _is_short_of_state(error):
            return
        for parts in _doublings(MAX_TIMES):
            if self.asked.session.batch_size % parts:
                return
            yield Change(
                f"a batch of {self.asked.session.batch_size // parts} in place of {self.asked.session.batch_size}",
                _changed(self.asked, session=self.asked.session.open_part(parts)),
                {"batch": self.part_of_batch(parts)},
            )

    def _limits(self, error: InfeasibleError) -> list[Relief]:
        """The limit that is just above the least that any plan needs."""
        least = error.least_bytes
        if _is_short_of_state(error):  # of most shapes that is all that is known yet
            assert error.state_bytes is not None
            other = self._tried(_limit(self.asked, error.state_bytes))
            if other.least_bytes is not None:
                least = min(other.least_bytes, least or math.inf)
        if least is None:
            return []
        return self._firsts([[_limit(self.asked, least * MORE**times) for times in range(1, MAX_LIMITS + 1)]])


def _changed(asked: Question, **changes: Any) -> Question:
    """The request with something else in place of what it says; what was found for it is not that of another."""
    return replace(asked, blame=False, known={}, **changes)


def _is_short_of_state(error: InfeasibleError) -> bool:
    return error.state_bytes is not None and error.limit_bytes is not None and error.state_bytes > error.limit_bytes


def _limit(asked: Question, num_bytes: float) -> Change:
    limit = math.ceil(num_bytes)
    what = "memory_limit" if asked.limit is not None else "a device that can spare"
    return Change(f"{what} {bytes_text(limit)}", replace(asked, limit=limit, blame=False), {"memory_limit": limit})


def _doublings(most: int) -> list[int]:
    return [2**i for i in range(1, most.bit_length())]


def _configured(asked: Question, manual: Manual) -> Change:
    """With another configuration, told by what is different."""
    assert isinstance(asked.wanted, Manual)
    different = [f.name for f in fields(Manual) if getattr(asked.wanted, f.name) != getattr(manual, f.name)]
    what = ", ".join(f"{name}={getattr(manual, name)}" for name in different if getattr(manual, name) is not None)
    return Change(what, _changed(asked, wanted=manual), {"plan": manual})


def _split_more(manual: Manual, batch_size: int) -> list[Manual]:
    """With twice as many micro-batches, and again, as far as they divide the batch."""
    made = []
    if manual.micro_batch is not None:
        while manual.micro_batch is not None and manual.micro_batch % 2 == 0:
            manual = replace(manual, micro_batch=manual.micro_batch // 2)
            made.append(manual)
        return made
    count = 2 * manual.shape(batch_size).pipeline.microbatches
    while batch_size % (count * manual.dp) == 0:
        made.append(replace(manual, microbatches=count))
        count *= 2
    return made


def _settings(asked: Question, batch_size: int) -> list[list[Change]]:
    """Settings of a configuration that take less memory, one at a time, the weakest of each first."""
    manual = asked.wanted
    if not isinstance(manual, Manual):
        return []
    name, share = share_of(manual.recompute)
    levels = [replace(manual, recompute=level) for level in LEVELS[LEVELS.index(name) + (share == 1) :]]
    zeros = [replace(manual, zero=zero) for zero in range(manual.zero + 1, 4) if manual.zero_ranks > 1]
    zeros += [replace(manual, replicas=1)] if manual.zero and manual.replicas > 1 else []
    sequence = [replace(manual, sequence_parallel=True)] if manual.tp > 1 and not manual.sequence_parallel else []
    alone = [[_configured(asked, other)] for other in (*levels, *zeros, *sequence)]
    return [*alone, [_configured(asked, other) for other in _split_more(manual, batch_size)]]


def _all_settings(asked: Question, batch_size: int) -> list[Change]:
    """All settings of a configuration that take less memory."""
    manual = asked.wanted
    if not isinstance(manual, Manual):
        return []
    most = replace(manual, replicas=1)
    most = replace(
        most,
        recompute=LEVELS[-1],
        zero=3 if most.zero_ranks > 1 else most.zero,
        sequence_parallel=manual.tp > 1 or manual.sequence_parallel,
    )
    most = [most, *_split_more(most, batch_size)][-1]
    return [_configured(asked, most)] if most != manual else []


def _without_pins(asked: Question) -> list[Change]:
    """Without each pin, without all of them, and without the configuration or the plan that is given."""
    changes = []
    for i, pin in enumerate(asked.constraints):
        others = (*asked.constraints[:i], *asked.constraints[i + 1 :])
        changes.append(Change(f"without pin {pin}", _changed(asked, constraints=others), {"constraints": others}))
    if len(asked.constraints) > 1:
        changes.append(Change("without pins", _changed(asked, constraints=()), {"constraints": ()}))
    if isinstance(asked.wanted, Manual):
        inside = asked.wanted.mesh  # the axes that pins may name
        mesh = Mesh(inside.names, (asked.wanted.pp * inside.sizes[0], *inside.sizes[1:]))
        cluster = asked.cluster.with_mesh(mesh) if isinstance(asked.cluster, Cluster) else mesh
        question = _changed(asked, wanted=None, cluster=cluster)
        changes.append(Change(f"without {asked.wanted}", question, {"plan": None, "cluster": cluster}))
    elif asked.wanted is not None:
        changes.append(Change("without the plan", _changed(asked, wanted=None), {"plan": None}))
    return changes


def _outputs(asked: Question) -> list[list[Change]]:
    """With the loss alone, where other outputs come back whole."""
    open_losses = asked.session.open_losses
    if open_losses is None or isinstance(asked.wanted, PlanRecord):
        return []
    return [[Change("outputs='loss'", _changed(asked, session=open_losses()), {"outputs": "loss"})]]


def _offloads(asked: Question) -> list[list[Change]]:
    """With something on the host, where nothing is."""
    to_host = offload_of(asked.offload, asked.wanted)
    mesh = grids_of(asked.cluster, asked.wanted)[0]
    if to_host is None or to_host or isinstance(asked.wanted, PlanRecord) or not asked.machine_of(mesh).device.has_host:
        return []
    kinds = [str(choice) for tier in CHOICES for choice in tier]
    return [[Change(f"offload={kind}", _changed(asked, offload=kind), {"offload": kind})] for kind in kinds]


def _leaner(asked: Question) -> list[list[Change]]:
    """Optimizers with less state, one of each size."""
    sizes = {size: name for name, size in reversed(OPTIMIZER_STATE_BYTES.items()) if size < OPTIMIZER_STATE_BYTES[asked.optimizer]}
    names = [name for _, name in sorted(sizes.items(), reverse=True)]
    return [[Change(f"optimizer {name}", _changed(asked, optimizer=name), {"optimizer": name})] for name in names]


def _more_ranks(asked: Question, error: InfeasibleError) -> list[list[Change]]:
    """Twice as many ranks, and again: of a configuration on each of its axes."""
    times = _doublings(MAX_TIMES)
    if error.state_bytes is not None and error.limit_bytes is not None:
        times = [count for count in times if error.state_bytes / count <= error.limit_bytes]
    if asked.wanted is None:
        return [[_scaled(asked, count) for count in times]]
    if not isinstance(asked.wanted, Manual):
        return []
    axes = ["dp", "tp", "pp"] if not asked.wanted.stages else ["dp", "tp"]
    return [[_scaled(asked, count, axis) for count in times] for axis in axes]


def _scaled(asked: Question, times: int, axis: str = "") -> Change:
    cluster = _more(asked.cluster, times)
    what, question = f"{times} x the ranks: {grids_of(cluster, None)[0].num_ranks}", _changed(asked, cluster=cluster)
    if not axis:
        return Change(what, question, {"cluster": cluster})
    assert isinstance(asked.wanted, Manual)
    manual = replace(asked.wanted, **{axis: times * getattr(asked.wanted, axis)})
    return Change(f"{what}, {axis}={getattr(manual, axis)}", replace(question, wanted=manual), {"cluster": cluster, "plan": manual})


def _more(grid: Grid, times: int) -> Grid:
    """So many times the ranks: nodes of a described cluster, or of the first axis."""
    if isinstance(grid, int):
        return times * grid
    if not isinstance(grid, Cluster):
        return _longer(grids_of(grid, None)[0], times)
    mesh = _longer(grid.grid, times) if grid.grid is not None else None
    if grid.measured_mesh is None:
        others = tuple(replace(other, nodes=times * other.nodes) for other in grid.others)
        return replace(grid, nodes=times * grid.nodes, others=others, grid=mesh)
    return replace(grid, gpus_per_node=times * grid.gpus_per_node, measured_mesh=_longer(grid.measured_mesh, times), grid=mesh)


def _longer(mesh: Mesh, times: int) -> Mesh:
    return Mesh(mesh.names, (times * mesh.sizes[0], *mesh.sizes[1:]))


def relief_text(rows: Sequence[Relief], width: int = 100) -> str:
    """The table; what does not fit has the least that it needs in brackets, and without that its reason below."""
    cells, reasons = [], []
    for row in rows:
        if row.plan is not None:
            peak = bytes_text(max(row.peak_memory_bytes))
            cells.append([row.what, "yes", seconds_text(row.step_time_s), count_text(row.tokens_per_s), peak])
            continue
        least = f"({bytes_text(row.least_bytes)})" if row.least_bytes is not None else "-"
        cells.append([row.what, "no", "-", "-", least])
        reasons += [f"{row.what}: {row.reason}"] if row.least_bytes is None else []
    unit = next((row.plan.prediction.unit for row in rows if row.plan is not None), "tokens")
    columns = ("change", "fits", ">step", f">{unit}/s", ">peak (least)")
    return "\n".join([table_text(columns, cells, width=width, wide=("change",)), *reasons])
