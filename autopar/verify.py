"""Run a plan on virtual ranks in this process and hold it against the unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.compile import Normal, compile_plan, plan_held
from autopar.errors import InputError
from autopar.layout import Layout, assemble, replicated, take_shard
from autopar.loss import LossFn, WithLoss
from autopar.plan import Plan
from autopar.storage import storage_layout
from autopar.trace import Captured, Source, flatten_call
from autopar.virtual import run_lockstep


@dataclass(frozen=True, slots=True)
class Verification:
    """Largest absolute differences between the plan and the model itself, each over the largest value of the kind.

    Args:
        loss_error: of the differentiated outputs.
        output_error: of all outputs, over all ranks.
        grad_error: of all gradients; ``worst_parameter`` has it.
        reference_error: the same gradients of the model in its own precision against the model in float64: what rounding alone does.
    """

    loss_error: float
    output_error: float
    grad_error: float
    worst_parameter: str
    reference_error: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss_error:.1e}, outputs {self.output_error:.1e}, gradients {self.grad_error:.1e} ({self.worst_parameter}); "
            f"plain torch against float64: {self.reference_error:.1e}"
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
) -> Verification:
    """Run the plan's forward and backward on all its ranks in lockstep, and the model (with its loss function) on one device.

    Raises:
        InputError: the model draws random numbers, or its tensors are on meta.
    """
    if any(p.is_meta for p in model.parameters()):
        raise InputError("verify needs real weights, but the model is on meta; build it on a device")
    if any(node.target is torch.ops.aten.dropout.default for node in normal.module.graph.nodes):
        raise InputError("verify needs a model without dropout, since masks are drawn otherwise than in plain torch; set it to 0")
    compiled = compile_plan(normal, plan, device=torch.device("cpu"), training=True)
    halves, mesh = compiled.halves, plan.mesh
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    batch = iter([x for x in flatten_call(tuple(args), kwargs)[0] if isinstance(x, torch.Tensor)])
    held = plan_held(normal, plan)
    nodes = normal.module.graph.find_nodes(op="placeholder")
    layouts: list[Layout] = []
    inputs: list[list[torch.Tensor]] = [[] for _ in range(mesh.num_ranks)]
    for node, entry in zip(nodes, captured.placeholders, strict=True):
        whole = next(batch) if entry.source is Source.INPUT else tensors[entry.name].detach()
        layout = storage_layout(mesh, normal.factors.of(node), held[node]) if node in held else replicated(mesh, whole.shape)
        layouts.append(layout)
        for rank in range(mesh.num_ranks):
            inputs[rank].append(take_shard(whole, layout, mesh.coordinate(rank)).contiguous())
    for rank, given in enumerate(inputs):
        given += [torch.tensor([position]) for position in mesh.coordinate(rank)] + [torch.zeros(1, dtype=torch.int64)]
    results = run_lockstep(halves.forward, inputs, mesh)
    outputs = [result[: halves.num_outputs] for result in results]
    expected, tangents, grads = _reference(model, loss_fn, args, kwargs, halves.differentiable, torch.get_default_dtype())
    _, _, exact = _reference(model, loss_fn, args, kwargs, halves.differentiable, torch.float64)
    grad_error, worst = 0.0, ""
    if halves.backward is not None:
        given_back = [[*result[halves.num_outputs :], *tangents] for result in results]
        ours = run_lockstep(halves.backward, given_back, mesh)
        scale = max(float(grad.abs().max()) for grad in grads.values())
        for k, position in enumerate(halves.with_grad):
            name = captured.placeholders[position].name
            error = float((assemble([r[k] for r in ours], layouts[position]) - grads[name]).abs().max()) / scale
            if error >= grad_error:
                grad_error, worst = error, name
    return Verification(
        loss_error=max((_difference(o[i], expected[i]) for o in outputs for i in halves.differentiable), default=0.0),
        output_error=max(_difference(a, b) for o in outputs for a, b in zip(o, expected, strict=True)),
        grad_error=grad_error,
        worst_parameter=worst,
        reference_error=_largest_difference(grads, exact),
    )


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = float(theirs.abs().max()) or 1.0
    return float((ours.to(torch.float64) - theirs.to(torch.float64)).abs().max()) / scale


def _largest_difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    scale = max((float(grad.abs().max()) for grad in theirs.values()), default=1.0) or 1.0
    return max((float((ours[name] - grad).abs().max()) / scale for name, grad in theirs.items()), default=0.0)


def _reference(
    model: nn.Module,
    loss_fn: LossFn | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    differentiable: Sequence[int],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, tangents (ones) and gradients of a copy of the model in ``dtype``."""
    own = copy.deepcopy(model).to(dtype)
    own.zero_grad()

    def convert(x: object) -> object:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    cast_args, cast_kwargs = pytree.tree_map(convert, (tuple(args), dict(kwargs)))
    call = own if loss_fn is None else WithLoss(own, loss_fn)
    returned = call(*cast_args, **cast_kwargs)
    outputs = [x for x in pytree.tree_leaves(returned) if isinstance(x, torch.Tensor)]
    tangents = [torch.ones_like(outputs[i]) for i in differentiable]
    if differentiable:
        torch.autograd.backward([outputs[i] for i in differentiable], tangents)
    grads = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return [out.detach() for out in outputs], [t.to(torch.get_default_dtype()) for t in tangents], grads
