"""A plan and what was captured of a call -> what a rank runs for it: one forward and one backward, or the stages of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from autopar.capture.trace import Source
from autopar.compile import Normal, compile_plan, compile_stage, plan_held, plan_parts, plan_rows
from autopar.errors import PlanError
from autopar.garbage import no_collection
from autopar.graph import outputs_of, source_name, value_spec
from autopar.offload import Offload
from autopar.passes.rows import RowSplit
from autopar.plan import Plan as PlanRecord
from autopar.planner.document import Plan
from autopar.planner.session import Session
from autopar.precision import computes_in_half
from autopar.runtime.execute import Program
from autopar.runtime.groups import peer_group
from autopar.runtime.module import Built
from autopar.runtime.pipeline import Output, PipelineProgram
from autopar.runtime.place import shared_positions
from autopar.schedule.actions import Schedule
from autopar.schedule.lower import lower
from autopar.solve.shapes import plan_schedule
from autopar.stage import StageProgram
from autopar.storage import storage_layout


@no_collection()
def build_program(
    session: Session,
    made: PlanRecord,
    device_type: str,
    split: RowSplit | None,
    dealt: Sequence[int],
    *,
    gradients: bool,
    is_exact: bool,
) -> Built:
    """The program of a plan; ``is_exact``: of calls whose gradients are not compressed yet. Of tensors that are dealt out it takes those as
    they lie which the plan wants so."""
    normal = session.normal_for(made.pipeline)
    trained = trained_outputs(normal)
    gradients = gradients and bool(trained)
    held = plan_held(normal, made)
    nodes = normal.module.graph.find_nodes(op="placeholder")
    layouts = {}
    for node, entry in zip(nodes, session.captured.placeholders, strict=True):
        if node in held:
            layouts[(entry.name, *entry.aliases)] = storage_layout(made.mesh, normal.factors.of(node), held[node])
    is_whole = made.pipeline.stages == made.pipeline.microbatches == 1
    compiled = replace(made, compression="") if is_exact else made
    captured, rows = session.captured, plan_rows(normal, made)
    inputs = [entry.name for entry in captured.placeholders if entry.source is Source.INPUT]
    fitting = rows.names if rows.split == split else frozenset()
    is_split = tuple(i in dealt and name in fitting for i, name in enumerate(inputs))
    taken = [name for name, own in zip(inputs, is_split, strict=True) if own]
    program = (_whole_program if is_whole else _pipeline_program)(session, compiled, torch.device(device_type), gradients, taken)
    scales_losses = gradients and computes_in_half(normal.module.graph)
    return Built(
        Plan.of(made, normal),
        program,
        layouts,
        captured.out_spec,
        session.returned,
        trained,
        captured.updates,
        scales_losses=scales_losses,
        split=rows.split,
        split_inputs=is_split,
        reads=captured.reads,
    )


def trained_outputs(normal: Normal) -> frozenset[int]:
    """Positions of the outputs that have a gradient; a model without any only runs forward."""
    return frozenset(i for i, value in enumerate(outputs_of(normal.module.graph)) if value_spec(value).requires_grad)


def _whole_program(
    session: Session, made: PlanRecord, device: torch.device, gradients: bool, split_inputs: Collection[str]
) -> Program:
    compiled = compile_plan(session.normal, made, device=device, training=gradients, split_inputs=split_inputs)
    names = [None if entry.source is Source.INPUT else entry.name for entry in session.captured.placeholders]
    kept = compiled.halves.kept_inputs()
    changed = frozenset(i for i in kept if i < len(names) and names[i] in session.captured.updates)
    return Program(compiled.halves, tuple(names), session.output_names(), kept - changed, changed)


def _pipeline_program(
    session: Session, made: PlanRecord, device: torch.device, gradients: bool, split_inputs: Collection[str]
) -> PipelineProgram:
    """The programs of this rank's stages; errors are those of `pipeline_program`."""
    schedule, normal = lower(plan_schedule(made.pipeline, training=gradients)), session.normal_for(made.pipeline)
    position = made.grid.coordinate(dist.get_rank())[made.pipeline.position] if made.pipeline.degree > 1 else 0
    compiled = partial(compile_stage, normal, made, device=device, training=gradients, split_inputs=split_inputs)
    of_line = partial(_of_line, made)
    return pipeline_program(session, made, schedule, schedule.stages_of(position), compiled, of_line, gradients=gradients)


def _of_line(made: PlanRecord, names: frozenset[str]) -> frozenset[str]:
    """The names of all ranks that run one pipeline together; others run the same stages."""
    line = next(ranks for ranks in made.grid.groups(made.pipeline.position) if dist.get_rank() in ranks)
    found: list[frozenset[str]] = [names] * len(line)
    dist.all_gather_object(found, names, group=peer_group(line))
    return frozenset().union(*found)


def pipeline_program(
    session: Session,
    made: PlanRecord,
    schedule: Schedule,
    stages: Iterable[int],
    compiled: Callable[[int], StageProgram],
    of_all: Callable[[frozenset[str]], frozenset[str]],
    *,
    gradients: bool,
) -> PipelineProgram:
    """What ranks that run some stages do in a step.

    Args:
        session: the captured call.
        made: its plan.
        schedule: of the plan, with communication.
        stages: their numbers.
        compiled: gives the program of one of them.
        of_all: gives names that some stage has of those that these stages have.
        gradients: whether the call is differentiated.

    Raises:
        PlanError: the model does not give one scalar loss, which is what backwards inside of the call need.
    """
    normal, names = session.normal_for(made.pipeline), session.output_names()
    values = outputs_of(normal.module.graph)
    losses = [i for i, value in enumerate(values) if value_spec(value).requires_grad and value_spec(value).shape == ()]
    if gradients and len(losses) != 1:
        found = ", ".join(names[i] for i in losses) or "none"
        raise PlanError(
            f"stages and micro-batches need a model that gives one scalar loss, for the backward runs inside of the call; found {found}. "
            "Give autopar.parallelize a loss_fn that computes it from the outputs"
        )
    split = normal.split(made.pipeline.microbatches)
    makers = {i: stage for stage, part in enumerate(plan_parts(normal, made)) for i in part.outputs}
    outputs = tuple(
        Output(makers[i], split.atoms[i], value_spec(value).dtype, split.outputs[i], split.scale, source_name(value))
        for i, value in enumerate(values)
    )
    inputs = tuple(entry.name for entry in session.captured.placeholders if entry.source is Source.INPUT)
    programs = {stage: compiled(stage) for stage in stages}
    shared = shared_positions(made) if gradients else {}
    trained = of_all(frozenset().union(*(program.trained for program in programs.values()))) if shared else frozenset()
    in_common = tuple((name, positions) for name, positions in shared.items() if name in trained)
    to_host = Offload.of(made.offload).optimizer
    loss = losses[0] if gradients else None
    return PipelineProgram(schedule, programs, inputs, outputs, names, loss, in_common, made.pipeline.axis, to_host)
