"""What `autopar.plan` is asked, as a record: it can be answered, and asked again with something changed.

    question --answer--> plan;    question.changed(cluster=...) --answer--> another plan, from the same capture
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from autopar.capture.loss import LossFn
from autopar.compile import Normal
from autopar.compression import Compression
from autopar.cost.cluster import Cluster
from autopar.cost.machine import MachineProfile, profile_of
from autopar.errors import AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.offload import Offload
from autopar.plan import Plan as PlanRecord
from autopar.planner.choose import make_plan, memory_bytes
from autopar.planner.request import (
    Batch,
    Grid,
    Wanted,
    check_flags,
    check_functions,
    check_optimizer,
    check_plan,
    compression_of,
    grids_of,
    load_plan,
    offload_of,
    positional_and_keyword,
    precision_of,
    refuse_other_optimizer,
    regrouped,
    shapes_of,
)
from autopar.planner.session import Session, open_session
from autopar.precision import Precision
from autopar.report import Report, silent
from autopar.runtime.module import make_skeleton
from autopar.solve.decide import Decision
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, Restriction, keep_parameters, pins_of
from autopar.solve.shapes import Shape


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a plan, read and captured.

    Args:
        session: the captured call.
        cluster: the ranks.
        wanted: a saved plan to bind, or a configuration; None: the solver chooses.
        optimizer: name, for the bytes of its state.
        limit: bytes of memory per rank; None: what the device can spare.
        constraints: pins.
        profile: prices in place of the cluster's own.
        pipeline: whether there may be stages.
        average: whether a batch that must be whole may be micro-batches that are averaged.
        compression: how gradients travel; None: as they are.
        blame: where nothing fits, search for the pins that are to blame.
        offload: what lies on the host, as it was asked for.
        keeps_best: give the best plan so far where the search is interrupted.
        is_complete: leave out only what is proved to be no faster.
        shapes: to try in place of those of the cluster.
        report: called with a line of text at every phase.
        known: what was found for it, whatever its limit; filled by answers.
    """

    session: Session
    cluster: Grid
    wanted: PlanRecord | Manual | None = None
    optimizer: str = "adamw"
    limit: float | None = None
    constraints: tuple[Pin, ...] = ()
    profile: MachineProfile | None = None
    pipeline: bool = True
    average: bool = False
    compression: Compression | None = None
    blame: bool = True
    offload: Offload | str | None = None
    keeps_best: bool = False
    is_complete: bool = False
    shapes: tuple[Shape, ...] = ()
    report: Report = silent
    known: dict[object, Decision] = field(default_factory=dict, compare=False, repr=False)

    def machine_of(self, mesh: Mesh) -> MachineProfile:
        """Prices of the ranks as a mesh: the profile that was given, or that of the cluster."""
        if self.profile is not None:
            asked = grids_of(self.cluster, self.wanted)[0], grids_of(self.cluster, None)[0]
            alike = (grid for grid in asked if len(grid.sizes) == len(self.profile.links))
            described = Cluster.from_mesh(next(alike, asked[0]), self.profile)
        else:
            described = self.cluster if isinstance(self.cluster, Cluster) else Cluster(1, mesh.num_ranks)
        return described.with_mesh(mesh).profile

    def changed(
        self,
        *,
        cluster: Grid | None = None,
        batch: Batch | None = None,
        constraints: Sequence[Pin] | Pin | None = None,
        memory_limit: float | str | None = None,
        optimizer: str | None = None,
        precision: Precision | torch.dtype | str | None = None,
        offload: Offload | str | None = None,
        compress: Compression | str | None = None,
        plan: Wanted = None,
        pipeline: bool | None = None,
    ) -> Question:
        """This question with what is given in place of what was; arguments and errors are those of `autopar.Plan.with_`."""
        pipeline = self.pipeline if pipeline is None else pipeline
        check_flags(pipeline=pipeline)
        session = self.session if batch is None else self.session.for_call(*positional_and_keyword(batch))
        if precision is not None:
            session = session.in_precision(Precision.of(precision))
        check_optimizer(optimizer or self.optimizer, session.precision)
        kept, given = self.wanted if isinstance(self.wanted, Manual) else None, load_plan(plan)
        before = None if isinstance(given, PlanRecord) else self.compression
        is_same = all(change is None for change in (cluster, constraints, optimizer, offload, compress, plan)) and kept is self.wanted
        offload = self.offload if offload is None else offload
        offload_of(offload, None)
        return replace(
            self,
            session=replace(session, capture_time_s=0.0) if session is self.session else session,
            cluster=self.cluster if cluster is None else cluster,
            wanted=kept if given is None else given,
            optimizer=self.optimizer if optimizer is None else optimizer,
            limit=self.limit if memory_limit is None else memory_bytes(memory_limit),
            constraints=self.constraints if constraints is None else pins_of(constraints),
            pipeline=pipeline,
            offload=offload,
            compression=compression_of(before if compress is None else compress, given),
            known=self.known if is_same and session is self.session else {},
        )


def ask(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    outputs: str = "whole",
    symbolic: bool = False,
    plan: Wanted = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    compress: Compression | str | None = None,
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] | Pin = (),
    profile: MachineProfile | str | Path | None = None,
    pipeline: bool = True,
    average_microbatches: bool = False,
    on_interrupt: str = "raise",
    complete: bool = False,
    report: Report = silent,
) -> Question:
    """Read and capture a request; the arguments and the errors are those of `autopar.plan`, ``symbolic`` that of `open_session`."""
    wanted = load_plan(plan)
    check_functions(loss_fn, report)
    check_flags(pipeline=pipeline, average_microbatches=average_microbatches, complete=complete)
    wished = precision_of(precision, wanted)
    offload_of(offload, wanted)
    if on_interrupt not in ("raise", "best"):
        raise PlanError(f"on_interrupt is 'raise' or 'best', got {on_interrupt!r}")
    check_optimizer(optimizer, wished)
    refuse_other_optimizer(optimizer, wanted)
    args, kwargs = positional_and_keyword(batch)
    session = open_session(
        make_skeleton(model), args, kwargs, loss_fn=loss_fn, outputs=outputs, precision=wished, symbolic=symbolic, report=report
    )
    return Question(
        session,
        cluster,
        wanted=wanted,
        optimizer=optimizer,
        limit=memory_bytes(memory_limit),
        constraints=pins_of(constraints),
        profile=profile_of(profile),
        pipeline=pipeline,
        average=average_microbatches,
        offload=offload,
        compression=compression_of(compress, wanted),
        keeps_best=on_interrupt == "best",
        is_complete=complete,
        report=report,
    )


class Answer(NamedTuple):
    """A plan, the graph that it shards, and how it was decided."""

    plan: PlanRecord
    normal: Normal
    decision: Decision


def answer(question: Question) -> Answer:
    """Plan.

    Raises:
        MeshError: the cluster does not fit the plan, the configuration or the profile.
        PlanError: a pin, a plan or a configuration does not fit the model.
        InfeasibleError: nothing fits the memory limit.
    """
    wanted, session = question.wanted, question.session
    if isinstance(wanted, PlanRecord) or (wanted is not None and wanted.precision):
        session = session.in_precision(precision_of(None, wanted))
    grids = grids_of(question.cluster, wanted)
    restrictions: list[Restriction] = list(question.constraints)
    if isinstance(wanted, Manual):
        restrictions.append(wanted)
    elif wanted is not None:
        check_plan(wanted, session)
        restrictions.append(keep_parameters(wanted))
    made, decision = make_plan(
        session,
        question.shapes or shapes_of(grids, wanted, session),
        question.machine_of,
        memory_limit_bytes=question.limit,
        restrictions=restrictions,
        optimizer=question.optimizer,
        training=True,
        config=str(wanted) if isinstance(wanted, Manual) else "",
        widen=wanted is None and question.pipeline and not question.shapes,
        others=() if restrictions or question.shapes else regrouped(question.cluster),
        average=wanted.pipeline.is_average if isinstance(wanted, PlanRecord) else question.average,
        offload=offload_of(question.offload, wanted),
        compression=compression_of(question.compression, wanted),
        known=question.known,
        blame=question.blame,
        pipeline=question.pipeline,
        keeps_best=question.keeps_best,
        is_complete=question.is_complete,
        report=question.report,
    )
    chosen = wanted if isinstance(wanted, PlanRecord) else made
    return Answer(chosen, session.normal_for(chosen.pipeline), decision)


def faster_by_hand(question: Question, step_time_s: float, known: Iterable[tuple[Manual, float]]) -> Answer | None:
    """A faster automatic plan than one that is known, if configurations show that there is one outside of what was searched.

    In the shape of the fastest of them everything is free, so its own plan is one of many; where the solver stops short of it, it is taken.

    Args:
        question: that the automatic plan answers.
        step_time_s: of that plan; infinite if there is none.
        known: configurations that fit, with their predicted seconds per step.
    """
    same = {"", str(question.session.precision or "")}
    faster = [(time_s, i, config) for i, (config, time_s) in enumerate(known) if time_s < step_time_s and config.precision in same]
    faster = [entry for entry in faster if not entry[2].offload]
    if not faster:
        return None
    _, _, config = min(faster)
    question.report(f"searching in the shape of {config}")
    shape = replace(config.shape(question.session.batch_size), cuts=(), recompute=None)
    found = []
    for asked in (replace(question, shapes=(shape,)), replace(question, wanted=config)):
        try:
            found.append(answer(replace(asked, blame=False, known={})))
        except AutoparError:
            continue
    best = min(found, key=lambda other: other.plan.prediction.step_time_s, default=None)
    if best is None or best.plan.prediction.step_time_s >= step_time_s:
        return None
    note = f"in the shape of {config}, which was faster than what was found without it"
    return best._replace(plan=replace(best.plan, config="", notes=(*best.plan.notes, note)))
