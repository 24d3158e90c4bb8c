"""One step on this rank: the forward graph, and the backward graph when autograd asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.codec import States, use_states
from autopar.errors import InputError
from autopar.host import settle
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
    """

    halves: Halves
    parameters: tuple[str | None, ...]
    output_names: tuple[str, ...]

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
        results = runner(mesh, recorder)(halves.forward, local)
        outputs, saved = results[: halves.num_outputs], results[halves.num_outputs :]
        ctx.program, ctx.mesh, ctx.states, ctx.shares_overflow = program, mesh, states, shares_overflow
        ctx.saved, ctx.recorder = saved, recorder
        ctx.inputs = tuple(x if isinstance(x, nn.Parameter | DTensor) else None for x in inputs)
        ctx.versions = tuple(0 if x.is_inference() else x._version for x in inputs)
        ctx.mark_non_differentiable(*(out for i, out in enumerate(outputs) if i not in halves.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        halves = ctx.program.halves
        if ctx.saved is None:
            raise RuntimeError(
                "backward was called a second time on the same forward; the saved values are freed after the first. Call the model again"
            )
        for name, tensor, version in zip(
            ctx.program.parameters, ctx.inputs, ctx.versions[: len(ctx.program.parameters)], strict=False
        ):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(f"parameter {name} was changed in place between forward and backward; step the optimizer after backward")
        recorder: Recorder | None = ctx.recorder
        coming = [local_tangent(tangents[i], ctx.program.output_names[i]) for i in halves.differentiable]
        use_states(ctx.states, float(coming[0]) if ctx.shares_overflow else 1.0)
        given, ctx.saved = [*ctx.saved, *(tangent.contiguous() for tangent in coming)], None
        grads = runner(ctx.mesh, recorder)(halves.backward, given)
        settle()
        if ctx.shares_overflow:
            share_overflow(grads, coming[0].device, recorder)
        if recorder is not None:
            recorder.end_part()
        by_input: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for position, grad in zip(halves.with_grad, grads, strict=True):
            owner = ctx.inputs[position]
            by_input[position] = like(grad, owner) if isinstance(owner, DTensor) else grad
        return (None, None, None, None, None, *by_input)


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
