"""The one visible list of passes, in the order in which they run.

    captured graph  --normalise-->  normal graph  --plan-->  local graph  --fuse, compress, differentiate-->  forward, backward
                    --offload (of what is on the host), lower_products, overlap, reduce_in_place, collect_small-->  the same, reordered

With stages or micro-batches, every stage has its own:

    normal graph  --split_batch, cut_stages, plan-->  local graph  --fuse, compress, split_prepare, differentiate, lower_products, overlap,
                    end_backward-->  `StageProgram`

Every arrow takes a graph and gives a graph; `show.code` prints any of them as Python. When one first runs, `runtime.release` makes of it
what is launched fastest (`passes.launches`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch import fx

from autopar.capture.exporting import code_when_called
from autopar.capture.trace import Captured, Source
from autopar.compression import Compression
from autopar.errors import MicrobatchError, PlanError
from autopar.factors import Factors, find_factors
from autopar.graph import Value, is_call, value_spec
from autopar.layout import REPLICATED
from autopar.mesh import Mesh
from autopar.offload import NOTHING, Offload
from autopar.passes.accumulate import results_of
from autopar.passes.average import Average
from autopar.passes.buckets import collect_small, reduce_in_place
from autopar.passes.compress import compress_gradients
from autopar.passes.differentiate import Halves, differentiate
from autopar.passes.fuse import fuse_biases
from autopar.passes.last_backward import Ending, drop_silent, end_backward
from autopar.passes.microbatch import Split, split_batch
from autopar.passes.normal_form import normal_form
from autopar.passes.offload import fetch_parameters, leave_activations, leave_gradients
from autopar.passes.overlap import overlap
from autopar.passes.prepare import split_prepare
from autopar.passes.products import lower_products
from autopar.passes.rows import InputRows, find_rows
from autopar.passes.shard import result_layout, shard_graph
from autopar.passes.split_backward import SplitBackward, split_halves
from autopar.passes.stages import Part, cut_stages, staged_ops, whole_part
from autopar.passes.vectors import gather_together, reduce_together
from autopar.plan import Plan
from autopar.rules.strategies import Choice
from autopar.stage import StageProgram, Wire
from autopar.storage import Held, Stored, parse_held
from autopar.units import number_text


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal graph with its factors; with ``average`` that of one micro-batch, which is a batch of its own."""

    module: fx.GraphModule
    factors: Factors
    average: Average | None = None

    def split(self, microbatches: int) -> Split:
        """How every op goes on the axis in time.

        Raises:
            MicrobatchError: the batch cannot be split so.
        """
        if self.average is None:
            return split_batch(self.module, self.factors, microbatches)
        assert microbatches == self.average.microbatches, "the graph is of another number of micro-batches"
        return self.average.split(self.module)


def normal_graph(captured: Captured, sizes: Mapping[sympy.Symbol, int]) -> Normal:
    """The captured graph for concrete sizes, in normal form."""
    with code_when_called():
        module = normal_form(captured, sizes)
    return Normal(module, find_factors(module))


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a plan becomes: the local graph, and its forward and backward."""

    local: fx.GraphModule
    halves: Halves


def local_graph(
    normal: Normal, plan: Plan, *, device: torch.device, training: bool, split_inputs: Collection[str] = ()
) -> fx.GraphModule:
    """What every rank runs, before it is differentiated; arguments and errors are those of `compile_plan`."""
    choices, held, again = plan_choices(normal, plan), plan_held(normal, plan), plan_again(normal, plan)
    part, rows = whole_part(normal.module), plan_rows(normal, plan).of(split_inputs) if split_inputs else {}
    local = shard_graph(
        normal.module, part, normal.factors, plan.mesh, choices, held, device=device, training=training, again=again, rows=rows
    )
    return _compressed(fuse_biases(local), plan, plan.mesh, 0)


def _compressed(local: fx.GraphModule, plan: Plan, mesh: Mesh, stage: int) -> fx.GraphModule:
    """A local graph whose gradients travel as the plan says."""
    how = Compression.of(plan.compression)
    nodes = [node for node in local.graph.find_nodes(op="placeholder") if "placeholder" in node.meta]
    parameters = [node for node in nodes if node.meta["placeholder"].source is Source.PARAMETER]
    return local if how is None else compress_gradients(local, parameters, mesh, how, stage)


@code_when_called()
def compile_plan(
    normal: Normal, plan: Plan, *, device: torch.device, training: bool, split_inputs: Collection[str] = ()
) -> Compiled:
    """Rewrite a normal graph as the plan says.

    Args:
        normal: the graph that the plan was made for.
        plan: the plan.
        device: where it will run.
        training: make a backward too.
        split_inputs: those that come as this rank's rows of them, some of `plan_rows`.

    Raises:
        PlanError: the plan asks for what the rules do not allow.
    """
    held = plan_held(normal, plan)
    local = local_graph(normal, plan, device=device, training=training, split_inputs=split_inputs)
    order = normal.module.graph.find_nodes(op="placeholder")
    levels = {i: _levels(held.get(node, ())) for i, node in enumerate(order)}
    parameters = [i for i, node in enumerate(order) if node in held]
    offload = Offload.of(plan.offload)
    again = [i for i in levels if 3 in levels[i] or (offload.parameters and i in parameters and not levels[i])]
    late = [i for i in levels if 1 in levels[i]]
    hosted = parameters if offload.optimizer else ()
    halves = _halves(local, parameters, again, late=late, hosted=hosted, offload=offload, device=device, training=training)
    if halves.backward is not None and hosted:
        of_hosted = [k for k, i in enumerate(halves.with_grad) if i in hosted]
        halves = replace(halves, backward=leave_gradients(halves.backward, of_hosted))
    return Compiled(local, halves)


def plan_parts(normal: Normal, plan: Plan) -> tuple[Part, ...]:
    """What every stage of a plan runs of the normal graph."""
    named = {op.name: op.stage for op in plan.ops}
    stage_of = {node: named[node.name] for node in staged_ops(normal.module)}
    return cut_stages(normal.module, stage_of, plan.pipeline.stages)


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan on its normal graph, to be rewritten stage by stage; the mesh has the axis in time if there are micro-batches. ``rows`` are of
    the inputs that come as this rank's rows, with their axes."""

    normal: Normal
    plan: Plan
    parts: tuple[Part, ...]
    split: Split
    mesh: Mesh
    choices: Mapping[fx.Node, tuple[Choice, ...]]
    held: Mapping[fx.Node, tuple[Held, ...]]
    rows: Mapping[fx.Node, tuple[int, ...]] = field(default_factory=dict)


def stage_plan(normal: Normal, plan: Plan, split_inputs: Collection[str] = ()) -> Staged:
    """Read what a plan says of all stages; ``split_inputs`` are those of `compile_plan`.

    Raises:
        MicrobatchError: the batch cannot be split into the plan's micro-batches.
        PlanError: the plan asks for what the rules do not allow.
    """
    microbatches = plan.pipeline.microbatches
    split = normal.split(microbatches)
    rows = plan_rows(normal, plan).of(split_inputs) if split_inputs else {}
    mesh, choices, held = plan.mesh, plan_choices(normal, plan), plan_held(normal, plan)
    if microbatches > 1:
        mesh = mesh.with_time(microbatches)
        choices = {node: (*row, split.choices[node]) for node, row in choices.items()}
        held = {node: (*row, REPLICATED) for node, row in held.items()}
    return Staged(normal, plan, plan_parts(normal, plan), split, mesh, choices, held, rows)


@code_when_called()
def stage_graph(staged: Staged, stage: int, *, device: torch.device, training: bool) -> fx.GraphModule:
    """What every rank of a stage runs for one micro-batch, before it is differentiated."""
    normal, again = staged.normal, plan_again(staged.normal, staged.plan)
    local = shard_graph(
        normal.module,
        staged.parts[stage],
        normal.factors,
        staged.mesh,
        staged.choices,
        staged.held,
        device=device,
        training=training,
        again=again,
        rows=staged.rows,
    )
    return _compressed(fuse_biases(local), staged.plan, staged.mesh, stage)


@dataclass(frozen=True, slots=True)
class StageKind:
    """What tells the graphs of a stage, beside its local graph.

    Args:
        levels: for each placeholder its ZeRO levels; None if it is no parameter.
        num_received, num_sent: values from the stage before and to the stage after.
        microbatches: of the step.
        num_axes: of the mesh, that in time included.
        in_two: the backward is split in two.
        offload: what lies on the host.
    """

    levels: tuple[frozenset[int] | None, ...]
    num_received: int
    num_sent: int
    microbatches: int
    num_axes: int
    in_two: bool
    offload: Offload


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """The fields of `StageProgram` that are made of a local graph and its `StageKind` alone."""

    prepare: Halves | None
    taken: tuple[int, ...]
    num_copies: int
    body: Halves
    kept: tuple[int, ...]
    split: SplitBackward | None
    ending: Ending | None


def stage_kind(staged: Staged, stage: int) -> StageKind:
    """What tells the graphs of a stage, beside its local graph."""
    part, pipeline = staged.parts[stage], staged.plan.pipeline
    levels = tuple(frozenset(_levels(staged.held[node])) if node in staged.held else None for node in _placeholders(part))
    in_two, offload = pipeline.schedule == "zb-h1", Offload.of(staged.plan.offload)
    return StageKind(levels, len(part.received), len(part.sent), pipeline.microbatches, len(staged.mesh.sizes), in_two, offload)


@code_when_called()
def stage_graphs(local: fx.GraphModule, kind: StageKind, *, device: torch.device, training: bool) -> StageGraphs:
    """Differentiate and reorder the local graph of a stage."""
    num_placeholders = len(kind.levels)
    num_inputs = num_placeholders + kind.num_received
    of_parameters = {i: levels for i, levels in enumerate(kind.levels) if levels is not None and kind.microbatches > 1}
    replicas = [i for i, levels in of_parameters.items() if levels & {2, 3}]
    early, coordinates = [i for i in of_parameters if i not in replicas], range(num_inputs, num_inputs + kind.num_axes)
    prepared = split_prepare(local, early, replicas, coordinates, narrows=not kind.offload.parameters)
    prepare, uncopied = None, list[int]()
    if prepared.prepare is not None:
        prepare = _halves(
            prepared.prepare,
            range(len(prepared.taken)),
            [],
            num_inner=prepared.num_copies,
            narrowed=prepared.narrowed,
            hosted=[k for k, i in enumerate(prepared.taken) if i < num_placeholders] if kind.offload.parameters else (),
            prepares=True,
            device=device,
            training=training,
        )
        copies = results_of(prepare.forward)[: prepared.num_copies]
        uncopied = [k for k, node in enumerate(copies) if node.op == "placeholder"] if kind.offload.parameters else []
    held: dict[int, frozenset[int] | None] = {k: of_parameters[i] for k, i in enumerate(prepared.sources) if i in replicas}
    held |= {k: kind.levels[i] for k, i in enumerate(prepared.kept, prepared.num_copies) if i < num_placeholders}
    stored = [k for k, levels in held.items() if levels is not None]
    regathered = [k for k, levels in held.items() if levels is not None and 3 in levels]
    hosted = list(dict.fromkeys([*uncopied, *stored])) if kind.offload.parameters else []
    regathered += [k for k in hosted if not held.get(k)]
    body = _halves(
        prepared.body,
        [*uncopied, *stored],
        regathered,
        num_inner=kind.num_sent,
        hosted=hosted,
        offload=kind.offload,
        device=device,
        training=training,
    )
    if prepare is not None:
        prepare = drop_silent(prepare, [k for k in body.with_grad if k < prepared.num_copies])
        if prepare.backward is not None:
            prepare = replace(prepare, backward=reduce_together(prepare.backward))  # those that are left
    origin = [-1] * prepared.num_copies + list(prepared.kept)
    grads_back = [k for k, i in enumerate(body.with_grad) if num_placeholders <= origin[i] < num_inputs]
    parted = split_halves(body, grads_back, lasting=[*range(prepared.num_copies), *stored]) if kind.in_two else None
    ending = _ending(body, parted, grads_back, prepare, prepared.summed)
    return StageGraphs(prepare, prepared.taken, prepared.num_copies, body, prepared.kept, parted, ending)


def stage_program(staged: Staged, stage: int, graphs: StageGraphs, *, training: bool) -> StageProgram:
    """The graphs of a stage with what they mean in the model.

    Raises:
        MicrobatchError: a buffer changes in one stage and is read in another.
    """
    part, normal, offload = staged.parts[stage], staged.normal, Offload.of(staged.plan.offload)
    placeholders = _placeholders(part)
    sources = [node.meta["placeholder"] for node in placeholders]
    taken, updates = (frozenset(), ()) if normal.average is None else (normal.average.inputs, normal.average.updates)

    def wire(value: Value) -> Wire:
        spec, layout = value_spec(value), result_layout(value, normal.factors, staged.mesh, staged.choices)
        return Wire(value.node.name, layout.local_shape, spec.dtype, spec.requires_grad and training)

    return StageProgram(
        names=tuple(entry.name for entry in sources),
        is_input=tuple(entry.source is Source.INPUT for entry in sources),
        is_parted=tuple(node.name in taken for node in placeholders),
        updates=_updates(part, placeholders, updates),
        hosted=tuple(i for i, node in enumerate(placeholders) if node in staged.held and offload.optimizer and not offload.parameters),
        scale=staged.split.scale,
        prepare=graphs.prepare,
        taken=graphs.taken,
        num_copies=graphs.num_copies,
        body=graphs.body,
        kept=graphs.kept,
        split=graphs.split,
        ending=graphs.ending,
        received=tuple(map(wire, part.received)),
        sent=tuple(map(wire, part.sent)),
        outputs=part.outputs,
    )


def compile_stage(
    normal: Normal, plan: Plan, stage: int, *, device: torch.device, training: bool, split_inputs: Collection[str] = ()
) -> StageProgram:
    """Rewrite what one stage runs of a normal graph as the plan says; arguments and errors are those of `compile_plan`.

    Raises:
        MicrobatchError: the batch cannot be split into the plan's micro-batches.
    """
    staged = stage_plan(normal, plan, split_inputs)
    local = stage_graph(staged, stage, device=device, training=training)
    graphs = stage_graphs(local, stage_kind(staged, stage), device=device, training=training)
    return stage_program(staged, stage, graphs, training=training)


def _placeholders(part: Part) -> list[fx.Node]:
    return [node for node in part.nodes if node.op == "placeholder"]


def _ending(
    body: Halves,
    parted: SplitBackward | None,
    grads_back: Sequence[int],
    prepare: Halves | None,
    of_copies: Sequence[torch.dtype | None],
) -> Ending | None:
    """What ends the backward of each micro-batch; ``grads_back`` are the results of the backward that the stage before gets, ``of_copies``
    the dtypes in which the gradients of copies add up."""
    if body.backward is None:
        return None
    ending = [k for k in range(len(body.with_grad)) if parted is None or k not in parted.to_inputs]
    summed = [place for place, k in enumerate(ending) if k not in grads_back]
    copy_of = {place: body.with_grad[ending[place]] for place in summed if body.with_grad[ending[place]] < len(of_copies)}
    return end_backward(body.backward if parted is None else parted.weights, summed, prepare, copy_of, of_copies)


def _updates(part: Part, placeholders: Sequence[fx.Node], updates: Iterable[tuple[str, int]]) -> tuple[tuple[int, int], ...]:
    """Those of a stage, as (position of the placeholder, position among the outputs of the stage).

    Raises:
        MicrobatchError: a buffer changes in one stage and is read in another.
    """
    names, found = [node.name for node in placeholders], []
    for name, output in updates:
        if (name in names) != (output in part.outputs):
            raise MicrobatchError(f"buffer {name} changes with every micro-batch, but is read and changed in several stages; cut elsewhere")
        if name in names:
            found.append((names.index(name), part.outputs.index(output)))
    return tuple(found)


def _halves(
    local: fx.GraphModule,
    stored: Sequence[int],
    gather_again: Sequence[int],
    *,
    late: Sequence[int] = (),
    num_inner: int | None = None,
    narrowed: Sequence[torch.dtype | None] = (),
    hosted: Collection[int] = (),
    prepares: bool = False,
    offload: Offload = NOTHING,
    device: torch.device,
    training: bool,
) -> Halves:
    """Differentiate and reorder.

    Args:
        stored: positions of stored parameters among the inputs; ``gather_again`` of those of which all is made again in the backward, as
            of ZeRO-3, ``late`` of those of ZeRO-1, ``hosted`` of those that are on the host.
        prepares: whether it is what is done once a step, whose results stay where they are, and of whose reductions some may be left out.
        offload: whether the backward fetches what is on the host anew, and whether activations go there.
    """
    halves = differentiate(
        local, gather_again=gather_again, device=device, training=training, num_inner=num_inner, narrowed=narrowed
    )
    if hosted:
        halves = fetch_parameters(halves, hosted, device, again=offload.parameters, handed_on=prepares)
    forward = reduce_in_place(overlap(gather_together(lower_products(halves.forward), stored), parameters=stored))
    if halves.backward is None:
        return replace(halves, forward=forward)
    names = [node.name for node in halves.forward.graph.find_nodes(op="placeholder")]
    saved = {f"saved_{names[i]}" for i in stored}
    inputs = halves.backward.graph.find_nodes(op="placeholder")
    last = [k for k, i in enumerate(halves.with_grad) if i in late]
    again = [k for k, node in enumerate(inputs) if node.name in saved]
    backward = gather_together(lower_products(halves.backward), again)
    if prepares:
        return replace(halves, forward=forward, backward=overlap(backward, parameters=again))
    backward = overlap(reduce_together(backward, last), parameters=again, late=last)
    halves = replace(halves, forward=forward, backward=collect_small(reduce_in_place(backward)))
    return leave_activations(halves, stored, device) if offload.activations else halves


def _levels(held: tuple[Held, ...]) -> set[int]:
    return {h.level for h in held if isinstance(h, Stored)}


def plan_choices(normal: Normal, plan: Plan) -> dict[fx.Node, tuple[Choice, ...]]:
    """The choice of every op on every axis, by the names in the plan."""
    named = {op.name: op.choices for op in plan.ops}
    chosen = {}
    for node in normal.module.graph.nodes:
        if is_call(node) and not node.meta["constant"]:
            if node.name not in named:
                raise PlanError(f"the plan says nothing of op {node.name}; it was made for another graph of this model")
            if len(named[node.name]) != len(plan.mesh.sizes):
                raise PlanError(
                    f"op {node.name} has {number_text(len(named[node.name]), 'choice')}, but mesh ({plan.mesh}) has "
                    f"{number_text(len(plan.mesh.sizes), 'axis', 'axes')}"
                )
            chosen[node] = tuple(
                _choice(normal, node, name, size, axis)
                for name, size, axis in zip(named[node.name], plan.mesh.sizes, plan.mesh.names, strict=True)
            )
    return chosen


def _choice(normal: Normal, node: fx.Node, name: str, size: int, axis: str) -> Choice:
    choices = normal.factors.choices(node, size)
    for choice in choices:
        if choice.name == name:
            return choice
    rule = normal.factors.rules.get(node)
    raise PlanError(f"op {node.name} ({rule}) cannot be {name!r} on axis {axis!r}; legal there: {', '.join(c.name for c in choices)}")


def plan_rows(normal: Normal, plan: Plan) -> InputRows:
    """The inputs of which a rank needs its own rows alone.

    Raises:
        MicrobatchError: the batch cannot be split into the plan's micro-batches.
    """
    microbatches, mesh, choices = plan.pipeline.microbatches, plan.mesh, plan_choices(normal, plan)
    if microbatches > 1 and normal.average is None:
        split, mesh = normal.split(microbatches), mesh.with_time(microbatches)
        choices = {node: (*row, split.choices[node]) for node, row in choices.items()}
    return find_rows(normal.module, normal.factors, mesh, choices, microbatches)


def plan_again(normal: Normal, plan: Plan) -> dict[fx.Node, str]:
    """The ops that the backward computes again, with the level."""
    named = {op.name: op.recompute for op in plan.ops if op.recompute}
    return {node: named[node.name] for node in normal.module.graph.nodes if node.name in named}


def plan_held(normal: Normal, plan: Plan) -> dict[fx.Node, tuple[Held, ...]]:
    """How every parameter is held on every axis."""
    nodes = normal.module.graph.find_nodes(op="placeholder")
    parameters = [node for node in nodes if node.meta["placeholder"].source is Source.PARAMETER]
    return {node: tuple(map(parse_held, plan.parameter(node.meta["placeholder"].name).held)) for node in parameters}


