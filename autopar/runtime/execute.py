"""One step on this rank: the forward graph, and the backward graph when autograd asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.ops.codec import States, use_states
from autopar.ops.host import settle
from autopar.passes.differentiate import Halves
from autopar.runtime.parameters import like
from autopar.runtime.recorder import Recorder, runner
from autopar.runtime.scaling import share_overflow


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank runs for one kind of call.

    Args:
        halves: forward and backward graphs; their inputs are parameters and buffers, the batch, coordinates, seed.
        parameters: for each graph input the name of the parameter or buffer, None for the batch.
        output_names: for messages.
        kept: positions of inputs whose memory the backward reads.
        copied: of buffers whose memory it would read, were they not changed at the end of the forward: the graph has copies of them.
    """

    halves: Halves
    parameters: tuple[str | None, ...]
    output_names: tuple[str, ...]
    kept: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()

    @property
    def losses(self) -> tuple[int, ...]:
        """Positions of the outputs that are differentiated."""
        return self.halves.differentiable

    def graphs(self) -> Iterator[tuple[fx.GraphModule, str]]:
        """Every graph, ``forward`` or ``backward``."""
        yield from self.halves.graphs()


def run_program(
    program: Program,
    mesh: DeviceMesh,
    tensors: Sequence[torch.Tensor],
    rank_inputs: Sequence[torch.Tensor],
    *,
    shares_overflow: bool,
    recorder: Recorder | None = None,
    states: States,
) -> list[torch.Tensor]:
    """Run one step.

    Args:
        program: what to run.
        mesh: whose groups it uses.
        tensors: parameters (DTensors), buffers and batch, in the order of the graph's inputs.
        rank_inputs: coordinates and seed.
        states: of compressed gradients.
        shares_overflow: whether gradients overflow on all ranks or on none.
        recorder: of what runs; None if it is not recorded.

    Returns:
        The outputs, whole; those in ``halves.differentiable`` carry the backward of the step.
    """
    return list(_Step.apply(program, mesh, states, shares_overflow, recorder, *tensors, *rank_inputs))


def local_tangent(tangent: torch.Tensor, name: str) -> torch.Tensor:
    """The gradient that comes in for an output, as a plain tensor: it is a DTensor where the loop added what it computed of parameters.

    Raises:
        InputError: ranks hold parts of it.
    """
    if not isinstance(tangent, DTensor):
        return tangent
    if not all(placement.is_replicate() for placement in tangent.placements):
        raise InputError(
            f"the gradient that came in for output {name!r} is a DTensor of {tangent.placements}, and plans take a whole one; take "
            ".full_tensor() of what was computed of parameters before it meets the loss"
        )
    local: torch.Tensor = tangent.to_local()
    return local


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        mesh: DeviceMesh,
        states: States,
        shares_overflow: bool,
        recorder: Recorder | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        halves = program.halves
        local = [x._local_tensor if isinstance(x, DTensor) else x.contiguous() for x in inputs]
        for i in program.copied:
            local[i] = local[i].clone()
        kept = (isinstance(x, nn.Parameter | DTensor) or (i in program.kept and local[i] is x) for i, x in enumerate(inputs))
        ctx.inputs = tuple(x if is_kept else None for x, is_kept in zip(inputs, kept, strict=True))
        results = runner(mesh, recorder)(halves.forward, local)
        outputs, saved = results[: halves.num_outputs], results[halves.num_outputs :]
        ctx.program, ctx.mesh, ctx.states, ctx.shares_overflow = program, mesh, states, shares_overflow
        ctx.saved, ctx.recorder = saved, recorder
        ctx.versions = tuple(0 if x.is_inference() else x._version for x in inputs)
        ctx.mark_non_differentiable(*(out for i, out in enumerate(outputs) if i not in halves.differentiable))
        ctx.set_materialize_grads(False)
        ctx.losses = [(outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in halves.differentiable]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        halves = ctx.program.halves
        refuse_second_derivatives()
        if ctx.saved is None:
            raise RuntimeError(
                "backward was called a second time on the same forward; the saved values are freed after the first. Call the model again, "
                "or add several losses up and call backward once"
            )
        _check_unchanged(ctx)
        recorder: Recorder | None = ctx.recorder
        found = {i: local_tangent(tangents[i], ctx.program.output_names[i]) for i in halves.differentiable if tangents[i] is not None}
        coming = [found[i] if i in found else _zeros(*kind) for i, kind in zip(halves.differentiable, ctx.losses, strict=True)]
        use_states(ctx.states, float(next(iter(found.values()))) if ctx.shares_overflow else 1.0)
        given, ctx.saved = [*ctx.saved, *(tangent.contiguous() for tangent in coming)], None
        grads = runner(ctx.mesh, recorder)(halves.backward, given)
        settle()
        if ctx.shares_overflow:
            share_overflow(grads, coming[0].device, recorder)
        if recorder is not None:
            recorder.end_part()
        by_input: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for position, grad, losses in zip(halves.with_grad, grads, halves.made_of, strict=True):
            if losses.isdisjoint(found):
                continue
            owner = ctx.inputs[position]
            by_input[position] = like(grad, owner) if isinstance(owner, DTensor) else grad
        return (None, None, None, None, None, *by_input)


def _check_unchanged(ctx: Any) -> None:
    """RuntimeError if something that the backward reads was changed in place since the forward, as torch raises it."""
    names = ctx.program.parameters
    for i, (tensor, version) in enumerate(zip(ctx.inputs, ctx.versions, strict=True)):
        if tensor is None or tensor.is_inference() or tensor._version == version:
            continue
        if isinstance(tensor, DTensor):
            raise RuntimeError(f"parameter {names[i]} was changed in place between forward and backward; step the optimizer after backward")
        what = f"buffer {names[i]}" if names[i] is not None else f"an input of shape {tuple(tensor.shape)}"
        raise RuntimeError(f"{what} was changed in place between forward and backward, which reads it; change it after backward")


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def refuse_second_derivatives() -> None:
    """InputError where a backward is to be differentiated itself (``create_graph=True``): what it gives would have no history."""
    if torch.is_grad_enabled():
        raise InputError(
            "plans are differentiated once, and create_graph=True asks for gradients of gradients; compute a penalty on gradients in the "
            "model itself, or without parallelize"
        )


class _Guard(torch.autograd.Function):
    """Lets an output look differentiable, and says clearly that it is not when a gradient comes in."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.output_name = name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        raise InputError(
            f"a gradient came in for output {ctx.output_name!r}, but the plan differentiates the model's scalar loss only; "
            "give autopar.parallelize a loss_fn that computes the whole loss from the model's outputs"
        )


def guard(output: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
    """``output`` with a backward that raises `InputError`; ``anchor`` is any tensor that requires a gradient."""
    guarded: torch.Tensor = _Guard.apply(output, anchor, name)
    return guarded
