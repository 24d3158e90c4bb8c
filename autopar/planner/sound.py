"""Whether a plan hangs together and fits the graph that it says it is of: a file may be damaged, or changed by hand.

What would give a wrong result, or an error deep inside, is refused. Collectives and figures follow from the rest, and nothing runs by them:
they are not worked out again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import fx

from autopar.capture.trace import Source
from autopar.compile import Normal, plan_choices, plan_parts
from autopar.errors import PlanError
from autopar.graph import operands_of
from autopar.passes.stages import staged_ops
from autopar.plan import ParameterPlan, Plan
from autopar.schedule.tables import check_numbers
from autopar.solve.recompute import LEVELS
from autopar.storage import parse_held, storage_layout, ways_to_hold
from autopar.units import number_text

AGAIN = "plan again for this model and batch"


def check_cut(plan: Plan) -> None:
    """Whether the stages and micro-batches of a plan can be played on its grid.

    Raises:
        PlanError: they cannot.
    """
    pipeline, mesh = plan.pipeline, plan.mesh
    check_numbers(pipeline.schedule, degree=pipeline.degree, stages=pipeline.stages, microbatches=pipeline.microbatches)
    if mesh.time_axis is not None:
        raise PlanError(f"mesh ({mesh}) of the plan has the axis in time, which no ranks are on; {AGAIN}")
    if not 0 <= pipeline.position <= len(mesh.names):
        most = len(mesh.names)
        raise PlanError(f"the pipeline axis stands at position {pipeline.position} of mesh ({mesh}), which has 0 to {most}; {AGAIN}")
    if pipeline.degree > 1 and pipeline.axis in mesh.names:
        raise PlanError(f"the pipeline axis is called {pipeline.axis!r}, as is one of mesh ({mesh}); {AGAIN}")
    found = len(plan.stages), len(plan.prediction.peak_memory_bytes)
    if found != (pipeline.stages, pipeline.degree):
        raise PlanError(
            f"the plan has figures of {number_text(found[0], 'stage')} and {number_text(found[1], 'position')} of a pipeline with "
            f"{number_text(pipeline.stages, 'stage')} and {number_text(pipeline.degree, 'position')}; {AGAIN}"
        )


def check_parts(plan: Plan, normal: Normal) -> None:
    """Whether what a plan says of ops and parameters can be done in its graph.

    Raises:
        MicrobatchError: the batch cannot be split so.
        PlanError: it cannot.
    """
    _check_distinct("op", (op.name for op in plan.ops))
    _check_distinct("parameter", (name for entry in plan.parameters for name in (entry.name, *entry.aliases)))
    _check_ops(plan, normal)
    plan_choices(normal, plan)
    plan_parts(normal, plan)
    normal.split(plan.pipeline.microbatches)
    _check_parameters(plan, normal)


def _check_distinct(kind: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(f"the plan has {kind} {twice[0]} twice; {AGAIN}")


def _check_ops(plan: Plan, normal: Normal) -> None:
    known, stages = {node.name for node in normal.module.graph.nodes}, plan.pipeline.stages
    for op in plan.ops:
        if op.name not in known:
            raise PlanError(f"the plan has op {op.name}, which its graph lacks; {AGAIN}")
        if not 0 <= op.stage < stages:
            raise PlanError(f"op {op.name} is of stage {op.stage}, and the plan has {number_text(stages, 'stage')}, from 0; {AGAIN}")
        if op.recompute not in ("", *LEVELS[1:]):
            raise PlanError(f"op {op.name} is computed again as {op.recompute!r}, and there are {', '.join(LEVELS[1:])}; {AGAIN}")


def _check_parameters(plan: Plan, normal: Normal) -> None:
    homes = defaultdict[fx.Node, set[int]](set)
    stage_of = {op.name: op.stage for op in plan.ops}
    for node in staged_ops(normal.module):
        for value in operands_of(node):
            homes[value.node].add(stage_of[node.name])
    named = {name: entry for entry in plan.parameters for name in (entry.name, *entry.aliases)}
    for node in normal.module.graph.find_nodes(op="placeholder"):
        placeholder = node.meta["placeholder"]
        if placeholder.source is not Source.PARAMETER:
            continue
        entry = named.get(placeholder.name)
        if entry is None:
            raise PlanError(f"the plan has no parameter {placeholder.name!r}; {AGAIN}")
        _check_held(plan, normal, node, entry)
        wanted = tuple(sorted(homes[node])) or (0,)
        if entry.stages != wanted:
            raise PlanError(f"parameter {entry.name} is on stages {entry.stages}, and read by ops of stages {wanted}; {AGAIN}")


def _check_held(plan: Plan, normal: Normal, node: fx.Node, entry: ParameterPlan) -> None:
    mesh, atoms = plan.mesh, normal.factors.of(node)
    if len(entry.held) != len(mesh.sizes):
        raise PlanError(f"parameter {entry.name} is held as {entry.held}, one for each axis, but mesh ({mesh}) has others; {AGAIN}")
    for text, name, size in zip(entry.held, mesh.names, mesh.sizes, strict=True):
        legal = list(map(str, ways_to_hold(atoms, size)))
        if text not in legal:
            raise PlanError(
                f"parameter {entry.name} (factors {atoms}) cannot be held as {text!r} on axis {name!r} of size {size}; legal there: "
                f"{', '.join(legal)}; {AGAIN}"
            )
    storage_layout(mesh, atoms, tuple(map(parse_held, entry.held)))
