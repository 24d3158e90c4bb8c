"""The public face for plans: `plan`, `verify`, `compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from autopar.cost.machine import Cluster, MachineProfile
from autopar.document import Plan
from autopar.errors import AutoparError, InfeasibleError
from autopar.loss import LossFn
from autopar.mesh import Mesh
from autopar.passes.average import part_of_call
from autopar.plan import Plan as PlanRecord
from autopar.relief import Relief, Reliefs, Request
from autopar.report import Report, silent
from autopar.request import (
    Batch,
    Grid,
    Wanted,
    check_optimizer,
    check_plan,
    grids_of,
    load_plan,
    positional_and_keyword,
    shapes_of,
)
from autopar.runtime.module import make_skeleton
from autopar.session import Session, make_plan, memory_bytes, open_session
from autopar.show.compare import Row
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, Restriction, keep_parameters
from autopar.verify import Verification, verify_plan


def plan(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] = (),
    profile: MachineProfile | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    report: Report = silent,
) -> Plan:
    """Plan for a cluster that need not be here; the model and the batch may be on meta, and no processes are started.

    Args:
        model: the module.
        cluster: a `Cluster`, or a grid of its default devices (``8``, ``(4, 8)``, ``"4x8"``, ``"dp=2,tp=4"``).
        batch: what the model will be called with, a dict of keywords or a tuple.
        plan: a saved plan to bind to the model, or a `Manual`.
        profile: prices in place of the cluster's own, one link per axis.
        pipeline: whether the planner may cut the model into pipeline stages.

    The other arguments and the errors are those of `parallelize`.
    """
    check_optimizer(optimizer)
    session = open_session(
        make_skeleton(model), *positional_and_keyword(batch), loss_fn=loss_fn, outputs=outputs, symbolic=False, report=report
    )
    return _plan_session(
        session,
        cluster,
        wanted=load_plan(plan),
        optimizer=optimizer,
        limit=memory_bytes(memory_limit),
        constraints=constraints,
        profile=profile,
        pipeline=pipeline,
        average=average_microbatches,
        report=report,
    )


def relieve(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] = (),
    profile: MachineProfile | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    report: Report = silent,
) -> list[Relief]:
    """What would make a request fit, each change with its predicted price; of a request that fits, what its pins and configuration cost.

    The arguments are those of `plan`. Each row has ``what`` is changed, whether it ``fits``, ``step_time_s`` and ``peak_memory_bytes`` as
    predicted, and ``change``: the arguments to give to `plan` in place of those given here. The first row is the request as it is. Every
    row is planned, which takes as long as it takes; a smaller batch, more ranks and more micro-batches are doubled until they fit.

    Raises:
        AutoparError: the request cannot be met, and neither memory nor pins that go against each other are the reason.
    """
    check_optimizer(optimizer)
    session = open_session(
        make_skeleton(model), *positional_and_keyword(batch), loss_fn=loss_fn, outputs=outputs, symbolic=False, report=report
    )
    asked = Request(cluster, load_plan(plan), optimizer, memory_bytes(memory_limit), tuple(constraints))

    def plan_for(request: Request) -> Plan:
        return _plan_session(
            session.open_part(request.parts) if request.parts > 1 else session,
            request.cluster,
            wanted=request.wanted,
            optimizer=request.optimizer,
            limit=request.limit,
            constraints=request.constraints,
            profile=profile,
            pipeline=pipeline,
            average=average_microbatches,
            blame=request is asked,
            report=report,
        )

    size = session.batch_size
    return Reliefs(asked, plan_for, size, lambda parts: part_of_call(batch, size, parts), report).find()


def verify(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    plan: Wanted = None,
    *,
    loss_fn: LossFn | None = None,
    average_microbatches: bool = False,
    report: Report = silent,
) -> Verification:
    """Run a plan on virtual ranks in this one process and compare with the unmodified model.

    Args:
        model: the module with real weights on the CPU.
        cluster: as for `plan`.
        batch: real inputs.
        plan: the plan or configuration to verify; by default the one that the solver chooses.
        average_microbatches: as for `parallelize`; a plan that averages is held against the average of the model on the parts of the batch.

    Raises:
        InputError: the model has dropout, or is on meta.
    """
    args, kwargs = positional_and_keyword(batch)
    session = open_session(make_skeleton(model), args, kwargs, loss_fn=loss_fn, symbolic=False, report=report)
    made = _plan_session(
        session,
        cluster,
        wanted=load_plan(plan),
        optimizer="adamw",
        limit=None,
        constraints=(),
        profile=None,
        average=average_microbatches,
        report=report,
    )
    return verify_plan(model, session.captured, session.normal_for(made.pipeline), made, args, kwargs, loss_fn=loss_fn)


def compare(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    configs: Mapping[str, Manual | PlanRecord],
    *,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    profile: MachineProfile | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    report: Report = silent,
) -> list[Row]:
    """The automatic plan against hand-written configurations, by predicted figures; a row that does not fit says why.

    Args:
        configs: by name; the row of the automatic plan is called ``auto``.
    """
    session = open_session(
        make_skeleton(model), *positional_and_keyword(batch), loss_fn=loss_fn, outputs=outputs, symbolic=False, report=report
    )
    rows = []
    for name, wanted in {"auto": None, **configs}.items():
        report(f"planning {name}")
        try:
            made = _plan_session(
                session,
                cluster,
                wanted=wanted,
                optimizer=optimizer,
                limit=memory_bytes(memory_limit),
                constraints=(),
                profile=profile,
                pipeline=pipeline,
                average=average_microbatches,
                blame=False,
                report=report,
            )
            rows.append(compare_row(name, made))
        except AutoparError as error:
            rows.append(Row(name, False, str(error), None, None, 0, isinstance(error, InfeasibleError)))
    return rows


def compare_row(name: str, made: PlanRecord, measured_step_time_s: float | None = None) -> Row:
    """One row of a comparison."""
    moved = sum(c.num_bytes * c.count for c in made.collectives)
    return Row(name, True, "", made.prediction, measured_step_time_s, moved)


def _plan_session(
    session: Session,
    cluster: Grid,
    *,
    wanted: PlanRecord | Manual | None,
    optimizer: str,
    limit: float | None,
    constraints: Sequence[Pin],
    profile: MachineProfile | None,
    pipeline: bool = True,
    average: bool,
    blame: bool = True,
    report: Report,
) -> Plan:
    grids = grids_of(cluster, wanted)
    described = cluster if isinstance(cluster, Cluster) else Cluster(1, grids[0].num_ranks)

    def machine_of(mesh: Mesh) -> MachineProfile:
        return profile.for_mesh(mesh) if profile is not None else described.with_mesh(mesh).profile

    restrictions: list[Restriction] = list(constraints)
    if isinstance(wanted, Manual):
        restrictions.append(wanted)
    elif wanted is not None:
        check_plan(wanted, session)
        restrictions.append(keep_parameters(wanted))
    made, decision = make_plan(
        session,
        shapes_of(grids, wanted, session),
        machine_of,
        memory_limit_bytes=limit,
        restrictions=restrictions,
        optimizer=optimizer,
        training=True,
        config=str(wanted) if isinstance(wanted, Manual) else "",
        widen=wanted is None and pipeline,
        average=wanted.pipeline.is_average if isinstance(wanted, PlanRecord) else average,
        blame=blame,
        pipeline=pipeline,
        report=report,
    )
    chosen = wanted if isinstance(wanted, PlanRecord) else made
    return Plan.of(chosen, session.normal_for(chosen.pipeline), decision)
