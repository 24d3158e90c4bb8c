"""The public face for plans: `plan`, `verify`, `compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from autopar.capture.loss import LossFn
from autopar.compression import Compression
from autopar.cost.machine import MachineProfile
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.offload import Offload
from autopar.passes.average import part_of_call
from autopar.plan import Plan as PlanRecord
from autopar.planner.document import Plan
from autopar.planner.question import Question, answer, ask, faster_by_hand
from autopar.planner.relief import Relief, Reliefs
from autopar.planner.request import Batch, Grid, Wanted, positional_and_keyword
from autopar.precision import Precision
from autopar.report import Report, silent
from autopar.show.compare import Row, plan_row
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin
from autopar.verify import Verification, verify_plan


def plan(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    compress: Compression | str | None = None,
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] | Pin = (),
    profile: MachineProfile | str | Path | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    on_interrupt: str = "raise",
    complete: bool = False,
    report: Report = silent,
) -> Plan:
    """Plan for a cluster that need not be here; the model and the batch may be on meta, and no processes are started.

    Args:
        model: the module.
        cluster: a `Cluster`, or a grid of its default devices (``8``, ``(4, 8)``, ``"4x8"``, ``"dp=2,tp=4"``).
        batch: what the model will be called with, a dict of keywords or a tuple.
        plan: a saved plan to bind to the model, or a `Manual`.
        profile: prices in place of the cluster's own: measured on a mesh of as many ranks, or one link per axis; or its file.
        pipeline: whether the planner may cut the model into pipeline stages.
        on_interrupt: what Ctrl-C does while the planner searches: ``"raise"`` KeyboardInterrupt as everywhere, or give the ``"best"`` plan
            that was found until then, whose ``stats.is_interrupted`` is True; KeyboardInterrupt is raised if there is none, and by another
            Ctrl-C. Python hears of it when the solver returns, after 20 seconds at most. `Plan.with_` keeps to it.
        complete: whether shapes of a deep model are left out only where they are proved to be no faster. Else so are those that are likely
            not to be: more micro-batches where more were no faster, stages that cannot share the equal blocks of the model evenly, and
            stages that lie on slower links than when they were too slow.

    The other arguments and the errors are those of `parallelize`. Offload of a described cluster is priced by the link of its devices to
    the memory of their host.
    """
    return Plan.answer(
        ask(
            model,
            cluster,
            batch,
            loss_fn=loss_fn,
            outputs=outputs,
            plan=plan,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            compress=compress,
            memory_limit=memory_limit,
            constraints=constraints,
            profile=profile,
            pipeline=pipeline,
            average_microbatches=average_microbatches,
            on_interrupt=on_interrupt,
            complete=complete,
            report=report,
        )
    )


def relieve(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    compress: Compression | str | None = None,
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] | Pin = (),
    profile: MachineProfile | str | Path | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    complete: bool = False,
    report: Report = silent,
) -> list[Relief]:
    """What would make a request fit, each change with its predicted price; of a request that fits, what its pins and configuration cost.

    The arguments are those of `plan`. Each row has ``what`` is changed, whether it ``fits``, ``step_time_s`` and ``peak_memory_bytes`` as
    predicted, and ``change``: the arguments to give to `plan` in place of those given here. The first row is the request as it is. Every
    row is planned, which takes as long as it takes; a smaller batch, more ranks and more micro-batches are doubled until they fit.

    Raises:
        AutoparError: the request cannot be met, and neither memory nor pins that go against each other are the reason.
    """
    asked = ask(
        model,
        cluster,
        batch,
        loss_fn=loss_fn,
        outputs=outputs,
        plan=plan,
        optimizer=optimizer,
        precision=precision,
        offload=offload,
        compress=compress,
        memory_limit=memory_limit,
        constraints=constraints,
        profile=profile,
        pipeline=pipeline,
        average_microbatches=average_microbatches,
        complete=complete,
        report=report,
    )
    return Reliefs(asked, lambda parts: part_of_call(batch, asked.session.batch_size, parts)).find()


def verify(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    plan: Wanted = None,
    *,
    loss_fn: LossFn | None = None,
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    average_microbatches: bool = False,
    report: Report = silent,
) -> Verification:
    """Run a plan on virtual ranks in this one process and compare with the unmodified model.

    Args:
        model: the module with real weights on the CPU.
        cluster: as for `plan`.
        batch: real inputs.
        plan: the plan or configuration to verify; by default the one that the solver chooses. Its gradients travel as they are: what
            compression loses is meant.
        precision: as for `parallelize`; the model that the plan is held against computes in it too.
        offload: as for `parallelize`; what goes to the host is copied here.
        average_microbatches: as for `parallelize`; a plan that averages is held against the average of the model on the parts of the batch.

    Raises:
        InputError: the model has dropout, or is on meta.
    """
    asked = ask(
        model,
        cluster,
        batch,
        loss_fn=loss_fn,
        plan=plan,
        precision=precision,
        offload=offload,
        average_microbatches=average_microbatches,
        report=report,
    )
    made, session, (args, kwargs) = answer(asked).plan, asked.session, positional_and_keyword(batch)
    normal = session.normal_for(made.pipeline)
    return verify_plan(model, session.captured, normal, made, args, kwargs, loss_fn=loss_fn, precision=session.precision)


def compare(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    configs: Mapping[str, Manual | PlanRecord],
    *,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    compress: Compression | str | None = None,
    memory_limit: float | str | None = None,
    profile: MachineProfile | str | Path | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    report: Report = silent,
) -> list[Row]:
    """The automatic plan against hand-written configurations, by predicted figures; a row that does not fit says why.

    Where a configuration is faster than the automatic plan, the planner also searches in its shape, so that ``auto`` is no slower.

    Args:
        configs: by name; the row of the automatic plan is called ``auto``.
        precision: of ``auto``, and of configurations that state none; by default ``auto`` has that of the configurations, if it is one.
    """
    _check_configs(configs)
    stated = {config.precision for config in configs.values()}
    asked = ask(
        model,
        cluster,
        batch,
        loss_fn=loss_fn,
        outputs=outputs,
        optimizer=optimizer,
        precision=precision or (next(iter(stated)) or None if len(stated) == 1 else None),
        offload=offload,
        compress=compress,
        memory_limit=memory_limit,
        profile=profile,
        pipeline=pipeline,
        average_microbatches=average_microbatches,
        report=report,
    )
    rows = []
    for name, wanted in {"auto": None, **configs}.items():
        report(f"planning {name}")
        rows.append(_row_of(name, replace(asked, wanted=wanted, blame=False, known={})))
    auto, *others = rows
    by_hand = [(configs[row.name], row.step_time_s) for row in others if row.fits]
    manual = [(config, time_s) for config, time_s in by_hand if isinstance(config, Manual)]
    allowed = [(config, time_s) for config, time_s in manual if pipeline or config.pp == 1]
    better = faster_by_hand(asked, auto.step_time_s if auto.fits else math.inf, allowed)
    return [plan_row("auto", better.plan) if better is not None else auto, *others]


def _check_configs(configs: Mapping[str, Manual | PlanRecord]) -> None:
    known = "configs are Manuals or plans by name, such as {'ddp': Manual(dp=8)}"
    if not isinstance(configs, Mapping):
        raise PlanError(f"{known}; got {configs!r}")
    for name, config in configs.items():
        if not (isinstance(name, str) and isinstance(config, Manual | PlanRecord)):
            raise PlanError(f"{known}; got {name!r}: {config!r}")
    if "auto" in configs:
        raise PlanError("the row of the automatic plan is called 'auto'; give the configuration another name")


def _row_of(name: str, question: Question) -> Row:
    """The row of a plan; a configuration that lacks memory has the figures that it would have with enough."""
    try:
        return plan_row(name, answer(question).plan)
    except InfeasibleError as error:
        short = Row(name, False, str(error), None, None, 0, is_short_of_memory=True)
    except AutoparError as error:
        return Row(name, False, str(error), None, None, 0)
    if not isinstance(question.wanted, Manual):
        return short
    try:
        enough = plan_row(name, answer(replace(question, limit=math.inf)).plan)
    except AutoparError:
        return short
    return replace(enough, fits=False, reason=short.reason, is_short_of_memory=True)
