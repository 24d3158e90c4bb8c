"""Run a plan on virtual ranks in this process and hold it against the unmodified model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.loss import LossFn, WithLoss
from autopar.capture.outputs import opened
from autopar.capture.trace import Captured, Source, flatten_call
from autopar.compile import Normal, compile_plan, compile_stage, plan_held
from autopar.copying import copied_module
from autopar.errors import InputError
from autopar.graph import outputs_of, value_spec
from autopar.layout import Layout, assemble, replicated, take_shard
from autopar.mesh import Mesh
from autopar.ops.host import fetch
from autopar.ops.wide import InFloat64
from autopar.passes.average import part_of_call
from autopar.passes.microbatch import Split, batch_size
from autopar.passes.randomness import DRAWN
from autopar.plan import Plan
from autopar.precision import Precision, computing
from autopar.rules.registry import has_gradients
from autopar.schedule.actions import Action, Kind
from autopar.schedule.check import play_order
from autopar.schedule.tables import make_schedule
from autopar.step import Arithmetic, StageRun, join_parts
from autopar.storage import storage_layout
from autopar.virtual import run_lockstep


@dataclass(frozen=True, slots=True)
class Verification:
    """Largest absolute differences between the plan and the model itself, each over the largest value of the kind.

    Args:
        loss_error: of the differentiated outputs.
        output_error: of all outputs, over all ranks, and of buffers that change, over the largest of these.
        grad_error: of all gradients; ``worst_parameter`` has it.
        reference_error: the same gradients of the model in its own precision against the model in float64: what rounding alone does. NaN if
            the model does not run in float64, as where it makes tensors of float32 in its forward.
    """

    loss_error: float
    output_error: float
    grad_error: float
    worst_parameter: str
    reference_error: float

    def __str__(self) -> str:
        rounding = "the model does not run in it" if math.isnan(self.reference_error) else f"{self.reference_error:.1e}"
        return (
            f"loss {self.loss_error:.1e}, outputs {self.output_error:.1e}, gradients {self.grad_error:.1e} ({self.worst_parameter}); "
            f"plain torch against float64: {rounding}"
        )


def verify_plan(
    model: nn.Module,
    captured: Captured,
    normal: Normal,
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    loss_fn: LossFn | None = None,
    precision: Precision | None = None,
) -> Verification:
    """Run the plan's forward and backward on all its ranks in lockstep, and the model (with its loss function) on one device.

    Compression of gradients is left out: its error is meant, and no fault of the plan.

    Raises:
        InputError: the model draws random numbers, or its tensors are on meta.
    """
    if any(p.is_meta for p in model.parameters()):
        raise InputError("verify needs real weights, but the model is on meta; build it on a device")
    drawn = next((node for node in normal.module.graph.nodes if node.target in DRAWN), None)
    if drawn is not None:
        raise InputError(
            f"verify needs a model without random numbers, which are others than in plain torch ({drawn.meta.get('line', '')}); "
            "set dropout to 0, or call .eval()"
        )
    plan = replace(plan, compression="")
    tensors = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    batch = [x for x in flatten_call(tuple(args), kwargs)[0] if isinstance(x, torch.Tensor)]
    pipeline, call = plan.pipeline, (tuple(args), dict(kwargs))
    split = normal.split(pipeline.microbatches)
    inputs = dict(zip((p.name for p in captured.placeholders if p.source is Source.INPUT), batch, strict=True))
    is_whole = pipeline.stages == pipeline.microbatches == 1
    virtual = (_run_whole if is_whole else _run_staged)(normal, plan, tensors | inputs)
    calls = [call]
    if split.is_average:
        count, size = split.microbatches, batch_size(normal.module) * split.microbatches
        calls = [part_of_call(call, size, count, position) for position in range(count)]
    floats = {x.dtype for x in (*tensors.values(), *batch) if has_gradients(x.dtype)}
    wide = torch.float64
    plain = wide if floats and floats <= {wide, wide.to_complex()} else torch.get_default_dtype()
    expected, grads = _reference(model, loss_fn, calls, split, captured.updates, virtual.losses, plain, precision)
    is_own = floats <= {plain, plain.to_complex()}
    is_wide = plain is wide and precision is None
    try:
        _, exact = (expected, grads) if is_wide else _reference(model, loss_fn, calls, split, captured.updates, virtual.losses, wide, None)
        own = grads if is_own else _reference(model, loss_fn, calls, split, captured.updates, virtual.losses, None, precision)[1]
        reference_error = _worst_gradient(own, exact)[1]
    except RuntimeError:  # of dtypes that do not go together
        reference_error = math.nan
    worst, grad_error = _worst_gradient(virtual.grads, grads)
    count = len(captured.updates)
    return Verification(
        loss_error=_largest(_difference(o[i], expected[i], any_width=not is_own) for o in virtual.outputs for i in virtual.losses),
        output_error=_largest(_output_error(outputs, expected, count, any_width=not is_own) for outputs in virtual.outputs),
        grad_error=grad_error,
        worst_parameter=worst,
        reference_error=reference_error,
    )


@dataclass(frozen=True, slots=True)
class _Virtual:
    """What virtual ranks gave.

    Args:
        outputs: of the model, for every rank of a stage.
        losses: positions of those that are differentiated.
        grads: whole, by parameter.
    """

    outputs: list[list[torch.Tensor]]
    losses: tuple[int, ...]
    grads: dict[str, torch.Tensor]


def _layouts(normal: Normal, plan: Plan, wholes: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
    """How every placeholder is stored, by name."""
    held = plan_held(normal, plan)
    nodes = normal.module.graph.find_nodes(op="placeholder")
    return {
        node.meta["placeholder"].name: storage_layout(plan.mesh, normal.factors.of(node), held[node])
        if node in held
        else replicated(plan.mesh, wholes[node.meta["placeholder"].name].shape)
        for node in nodes
    }


def _shards(whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    mesh = layout.mesh
    return [take_shard(whole, layout, mesh.coordinate(rank)).contiguous() for rank in range(mesh.num_ranks)]


def _run_whole(normal: Normal, plan: Plan, wholes: Mapping[str, torch.Tensor]) -> _Virtual:
    """One forward and one backward graph."""
    halves = compile_plan(normal, plan, device=torch.device("cpu"), training=True).halves
    mesh, layouts = plan.mesh, _layouts(normal, plan, wholes)
    names = list(layouts)
    shards = [_shards(wholes[name], layout) for name, layout in layouts.items()]
    inputs = [
        [*(own[rank] for own in shards), *map(_number, mesh.coordinate(rank)), _number(0)]
        for rank in range(mesh.num_ranks)
    ]
    results = run_lockstep(halves.forward, inputs, mesh)
    outputs = [result[: halves.num_outputs] for result in results]
    grads = {}
    if halves.backward is not None:
        tangents = [torch.ones_like(outputs[0][i]) for i in halves.differentiable]
        ours = run_lockstep(halves.backward, [[*result[halves.num_outputs :], *tangents] for result in results], mesh)
        for k, position in enumerate(halves.with_grad):
            grads[names[position]] = assemble([own[k] for own in ours], layouts[names[position]])
    return _Virtual(outputs, halves.differentiable, grads)


def _number(number: int) -> torch.Tensor:
    """As an input of a graph: int64 [1]."""
    return torch.tensor([number], device="cpu")


_Values = list[torch.Tensor]
"""A value on all ranks of a stage."""
_Call = tuple[tuple[object, ...], dict[str, object]]


def _run_staged(normal: Normal, plan: Plan, wholes: Mapping[str, torch.Tensor]) -> _Virtual:
    """The actions of the schedule, in an order that each can be played."""
    pipeline, mesh, layouts = plan.pipeline, plan.mesh, _layouts(normal, plan, wholes)
    programs = [compile_stage(normal, plan, stage, device=torch.device("cpu"), training=True) for stage in range(pipeline.stages)]
    arithmetic = _arithmetic(mesh)
    coordinates = [[_number(mesh.coordinate(rank)[axis]) for rank in range(mesh.num_ranks)] for axis in range(len(mesh.sizes))]
    runs = [
        StageRun(
            program,
            arithmetic,
            [_shards(wholes[name], layouts[name]) for name in program.names],
            coordinates,
            [_number(0)] * mesh.num_ranks,
            pipeline.microbatches,
        )
        for program in programs
    ]
    schedule = make_schedule(pipeline.schedule, degree=pipeline.degree, stages=pipeline.stages, microbatches=pipeline.microbatches)
    _play(play_order(schedule), runs)
    values, split = outputs_of(normal.module.graph), normal.split(pipeline.microbatches)
    outputs: list[list[torch.Tensor]] = [[] for _ in range(mesh.num_ranks)]
    grads: dict[str, torch.Tensor] = {}
    for position in range(len(values)):
        stage = next(stage for stage, program in enumerate(programs) if position in program.outputs)
        place = programs[stage].outputs.index(position)
        parts = runs[stage].outputs[place]
        for rank, given in enumerate(outputs):
            given.append(join_parts([parts[k][rank] for k in sorted(parts)], split.atoms[position], split.outputs[position], split.scale))
    for program, run in zip(programs, runs, strict=True):
        for place, grad in run.grads.items():
            name = program.names[place]
            summed = assemble(grad, layouts[name])
            grads[name] = grads[name] + summed if name in grads else summed
    losses = tuple(i for i, value in enumerate(values) if value_spec(value).requires_grad and value_spec(value).shape == ())
    return _Virtual(outputs, losses, grads)


def _play(actions: Iterable[Action], runs: Sequence[StageRun[_Values]]) -> None:
    forward: dict[tuple[int, int], Sequence[_Values]] = {}
    backward: dict[tuple[int, int], list[_Values]] = {}
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        if action.kind is Kind.FORWARD:
            forward[stage + 1, microbatch] = runs[stage].forward(microbatch, forward.pop(key, []))
        elif action.kind is Kind.BACKWARD:
            backward[stage - 1, microbatch] = runs[stage].backward(microbatch, backward.pop(key, []))
        elif action.kind is Kind.INPUT:
            backward[stage - 1, microbatch] = runs[stage].input_backward(microbatch, backward.pop(key, []))
        else:
            assert action.kind is Kind.WEIGHT
            runs[stage].weight_backward(microbatch)
    for run in runs:
        run.finish()


def _arithmetic(mesh: Mesh) -> Arithmetic[_Values]:
    def run(graph: fx.GraphModule, inputs: Sequence[_Values]) -> list[_Values]:
        results = run_lockstep(graph, [[value[rank] for value in inputs] for rank in range(mesh.num_ranks)], mesh)
        return [list(value) for value in zip(*results, strict=True)]

    return Arithmetic(
        run=run,
        add=lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        full_like=lambda value, number: [torch.full_like(x, number) for x in value],
        zeros_like=lambda value: [torch.zeros_like(x) for x in value],
        number=lambda number: [_number(number)] * mesh.num_ranks,
        contiguous=lambda value: [x.contiguous() for x in value],
        part=lambda value, position, count: [x.chunk(count)[position] for x in value],
        fetch=lambda values: [[fetch(x, x.device) for x in value] for value in values],
    )


def _output_error(ours: _Values, theirs: _Values, num_buffers: int, *, any_width: bool = False) -> float:
    """The largest error of outputs, of which the last are buffers. These are small together: a mean may be rounding and nothing else."""
    count = len(theirs) - num_buffers
    scale = _largest(_peak(buffer) for buffer in theirs[count:] if buffer.is_floating_point())
    scales = [0.0] * count + [scale] * num_buffers
    return _largest(_difference(*each, any_width=any_width) for each in zip(ours, theirs, scales, strict=True))


def _difference(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 0.0, *, any_width: bool = False) -> float:
    """Over the largest element of theirs, or ``scale`` if that is larger; infinite where shapes or dtypes differ.

    Args:
        any_width: whether numbers may be wider or narrower, as where the reference is not computed in the dtype of the model.
    """
    kinds = {ours.dtype, theirs.dtype} if not any_width else {(has_gradients(x.dtype) or x.dtype, x.is_complex()) for x in (ours, theirs)}
    if ours.shape != theirs.shape or len(kinds) > 1:
        return math.inf
    wide = theirs.to(torch.complex128)
    scale = max(scale, _peak(wide)) or 1.0
    return _peak(ours.to(torch.complex128) - wide) / scale


def _peak(x: torch.Tensor) -> float:
    """The largest absolute value; 0 where there is none."""
    return float(x.abs().max()) if x.numel() else 0.0


def _worst_gradient(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter whose gradients differ most, and by how much over the largest gradient; one that has none on a side has zeros there."""
    scale = _largest(map(_peak, theirs.values())) or 1.0
    errors = {}
    for name in {**theirs, **ours}:
        difference = ours[name] - theirs[name] if name in ours and name in theirs else (ours if name in ours else theirs)[name]
        errors[name] = _peak(difference) / scale
    worst = max(errors, key=lambda name: _nan_last(errors[name]), default="")
    return worst, errors.get(worst, 0.0)


def _largest(errors: Iterable[float]) -> float:
    """NaN if one of them is, which the order of a plain ``max`` may hide."""
    return max(errors, key=_nan_last, default=0.0)


def _nan_last(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def _reference(
    model: nn.Module,
    loss_fn: LossFn | None,
    calls: Sequence[_Call],
    split: Split,
    updates: Sequence[str],
    differentiable: Sequence[int],
    dtype: torch.dtype | None,
    precision: Precision | None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of a copy of the model in ``dtype``, or in its own dtypes, last its changed buffers, and gradients of the sum of its losses.

    Args:
        calls: one of the whole batch, or of the parts whose losses are averaged.
    """
    own = copied_module(model)
    own.zero_grad()

    def convert(x: object) -> object:
        if dtype is None or not isinstance(x, torch.Tensor) or not has_gradients(x.dtype):
            return x
        return x.to(dtype.to_complex() if x.is_complex() else dtype)  # `nn.Module.to` would leave the real part of complex numbers alone

    for tensor in (*own.parameters(), *own.buffers()):
        tensor.data = convert(tensor.data)  # type: ignore[assignment]
    given, called = [], own if loss_fn is None else WithLoss(own, loss_fn)
    for call in calls:
        args, kwargs = pytree.tree_map(convert, call)
        with torch.enable_grad(), InFloat64(), computing(own, precision):
            outputs = [x for x in pytree.tree_leaves(opened(called(*args, **kwargs))) if isinstance(x, torch.Tensor)]
            if differentiable:
                tangents = [torch.full_like(outputs[i], 1 / len(calls)) for i in differentiable]
                torch.autograd.backward([outputs[i] for i in differentiable], tangents)
        given.append([out.detach() for out in outputs])
    parts = [list(own) for own in zip(*given, strict=True)]
    joined = [join_parts(own, split.atoms[i], split.outputs[i], split.scale) for i, own in enumerate(parts)]
    grads = {name: p.grad.to_dense() for name, p in own.named_parameters() if p.grad is not None}
    return [*joined, *(own.get_buffer(name) for name in updates)], grads
