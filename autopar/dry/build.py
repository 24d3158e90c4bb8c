"""The programs of all ranks of a plan, built without processes: as at run time, but that stages whose graphs are equal share them.

Ranks of a stage run the same graph, and that is made of the stage's local graph and its `StageKind` alone. Stages whose local graphs are
the same node for node but for names are therefore rewritten once. (Dropouts are told apart by a number, their salt, which no shape and no
order depends on, so that graphs that differ in it count as the same.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.capture.trace import Source
from autopar.compile import (
    Normal,
    StageGraphs,
    compile_plan,
    plan_choices,
    stage_graph,
    stage_graphs,
    stage_kind,
    stage_plan,
    stage_program,
)
from autopar.cost.updates import state_bytes as state_bytes_of
from autopar.dry.graph import Form, tensors_of
from autopar.dry.play import Programs
from autopar.garbage import no_collection
from autopar.graph import Value, is_getitem, specs_of
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.ops import random
from autopar.ops.collectives import RESHARDS
from autopar.passes.compress import kept_bytes
from autopar.plan import Plan
from autopar.planner.session import Session
from autopar.programs import pipeline_program, trained_outputs
from autopar.report import Report, silent
from autopar.rules.strategies import Choice
from autopar.schedule.lower import lower
from autopar.solve.shapes import plan_schedule
from autopar.stage import StageProgram

DEVICE = torch.device("cpu")
"""Where the programs would run: attention is that of the CPU, which like that of GPUs keeps no scores."""


@no_collection()
def build(session: Session, plan: Plan, *, report: Report = silent) -> tuple[Programs, list[str]]:
    """The programs of all stages, and what in their graphs is not as the plan says.

    Raises:
        PlanError: the plan asks for what the rules do not allow, or the model gives no scalar loss for its stages.
    """
    normal = session.normal_for(plan.pipeline)
    training = bool(trained_outputs(normal))
    names, forms, state_bytes = _held(normal, plan)
    if plan.pipeline.stages == plan.pipeline.microbatches == 1:
        report("rewriting the graph")
        compiled = compile_plan(normal, plan, device=DEVICE, training=training)
        for name, num_bytes in kept_bytes(compiled.local).items():
            state_bytes[name] += num_bytes
        findings = _unlike_specs(compiled.local)
        findings += _unlike_planned(compiled.local, plan, normal, plan.mesh, plan_choices(normal, plan))
        return Programs(plan, compiled.halves, None, names, forms, state_bytes), findings
    staged = stage_plan(normal, plan)
    known: dict[object, tuple[StageGraphs, list[str]]] = {}
    findings, plain_bytes = [], dict(state_bytes)

    def program(stage: int) -> StageProgram:
        report(f"rewriting stage {stage} of {plan.pipeline.stages}")
        local, kind = stage_graph(staged, stage, device=DEVICE, training=training), stage_kind(staged, stage)
        for name, num_bytes in kept_bytes(local).items():  # of what several stages use, each on a rank of its own
            state_bytes[name] = max(state_bytes[name], plain_bytes[name] + num_bytes)
        key = kind, graph_key(local)
        if key not in known:
            known[key] = stage_graphs(local, kind, device=DEVICE, training=training), _unlike_specs(local)
        graphs, found = known[key]
        found = [*found, *_unlike_planned(local, plan, normal, staged.mesh, staged.choices)]
        findings.extend(f"stage {stage}: {text}" for text in found)
        return stage_program(staged, stage, graphs, training=training)

    schedule = lower(plan_schedule(plan.pipeline, training=training))
    pipeline = pipeline_program(session, plan, schedule, range(plan.pipeline.stages), program, frozenset, gradients=training)
    return Programs(plan, None, pipeline, names, forms, state_bytes), findings


def _held(normal: Normal, plan: Plan) -> tuple[tuple[str, ...], dict[str, Form], dict[str, int]]:
    """Names of all placeholders, what of each a rank holds, and bytes of the optimizer state of parameters, by name."""
    forms, state_bytes = {}, {}
    parted = frozenset() if normal.average is None else normal.average.inputs
    for node in normal.module.graph.find_nodes(op="placeholder"):
        entry, spec = node.meta["placeholder"], specs_of(node)[0].stored
        shape = spec.shape
        if entry.source is Source.PARAMETER:
            stored = plan.parameter(entry.name)
            shape = stored.local_shape
            width = spec.dtype.itemsize
            state = state_bytes_of(plan.optimizer, spec.shape, stored.num_bytes // width, width)
            state_bytes[entry.name] = round(state) if spec.requires_grad else 0
        elif node.name in parted:
            shape = (shape[0] * plan.pipeline.microbatches, *shape[1:])
        forms[entry.name] = Form.packed(shape, spec.dtype)
    return tuple(forms), forms, state_bytes


def graph_key(local: fx.GraphModule) -> tuple[object, ...]:
    """Equal for local graphs that become equal programs but for names, those of what compression keeps, and the salts of random numbers."""
    number = {node: i for i, node in enumerate(local.graph.nodes)}
    rows = []
    for node in local.graph.nodes:
        target = node.target
        if node.op == "placeholder":
            target = ""
        elif node.op == "get_attr":
            target = repr(Form.of(getattr(local, str(target))))
        names = {"salt"} if node.target in (random.dropout, random.uniform) else {"state"} if node.target in RESHARDS else set()
        kwargs = {name: value for name, value in node.kwargs.items() if name not in names}
        text = repr(fx.node.map_arg((node.args, kwargs), lambda used: _Number(number[used])))
        rows.append((node.op, target, text, repr(node.meta.get("specs")), node.meta.get("custom", {}).get("again", "")))
    return tuple(rows)


class _Number(int):
    """A node, by its place in the graph."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _unlike_specs(local: fx.GraphModule) -> list[str]:
    """What comes out in another shape or dtype than said, where a local graph runs on inputs of the shapes that they are said to have."""
    found: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        inputs = [torch.empty(s.shape, dtype=s.dtype, device=DEVICE) for n in local.graph.find_nodes(op="placeholder") for s in specs_of(n)]
        run = fx.Interpreter(local)
        run.args_iter = iter(inputs)
        for node in local.graph.nodes:
            if node.op == "output":
                break
            try:
                run.env[node] = run.run_node(node)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                return [*found, f"{node.name} cannot be computed on local shapes: {str(error).strip().splitlines()[0]}"]
            made, said = tensors_of(run.env[node]), node.meta.get("specs", ())
            for x, spec in zip(made, said, strict=True) if len(made) == len(said) else ():
                if Form.of(x).text != Form.packed(spec.shape, spec.dtype).text:
                    found.append(f"{node.name} gives {Form.of(x).text}, where its layout gives {Form.packed(spec.shape, spec.dtype).text}")
    return found


def _unlike_planned(
    local: fx.GraphModule, plan: Plan, normal: Normal, mesh: Mesh, choices: Mapping[fx.Node, tuple[Choice, ...]]
) -> list[str]:
    """Parameters and first results of ops that a local graph has in another shape than the layouts in the plan give."""
    ops, nodes = {op.name: op for op in plan.ops}, {node.name: node for node in normal.module.graph.nodes}
    found = []

    def compare(name: str, node: fx.Node, planned: tuple[int, ...]) -> None:
        shape = specs_of(node)[0].shape
        if shape != planned:
            found.append(f"{name} has local shape {shape}, where the plan says {planned}")

    for node in local.graph.nodes:
        entry = node.meta.get("placeholder")
        made = node.args[0] if is_getitem(node) and node.args[1] == 0 else node
        origin = nodes.get(made.meta.get("origin", ""))
        if entry is not None and entry.source is Source.PARAMETER:
            compare(f"parameter {entry.name}", node, plan.parameter(entry.name).local_shape)
        elif origin is not None and "specs" in node.meta:
            placements = map(Placement.parse, ops[origin.name].layout)
            in_time = [choice.results[0] for choice in choices[origin][len(plan.mesh.sizes) :]]
            layout = Layout(mesh, normal.factors.values[Value(origin)], (*placements, *in_time))
            compare(f"op {origin.name}", node, layout.local_shape)
    return found
