"""A step in stages and micro-batches on this rank: plays the rank's row of the schedule.

The call of the model runs forwards and backwards; what autograd later asks for are the gradients that lie ready, times the gradient
that comes in for the loss. So the training loop, loss scaling and accumulation stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, RankError
from autopar.layout import Atoms, Placement
from autopar.ops.codec import States, use_states
from autopar.ops.host import arrive, fetch, leave, settle
from autopar.runtime.execute import local_tangent, refuse_second_derivatives
from autopar.runtime.groups import number_on
from autopar.runtime.parameters import like
from autopar.runtime.place import Place
from autopar.runtime.recorder import Recorder, Runner, runner
from autopar.runtime.scaling import LossScale, share_overflow
from autopar.schedule.actions import Action, Kind, Schedule
from autopar.stage import StageProgram, Wire
from autopar.step import Arithmetic, Carrier, RankRun, StageRun, join_parts


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the model.

    Args:
        stage: where it is made.
        atoms: its global shape, factored.
        dtype: its dtype.
        joined: how the micro-batches' parts go together.
        scale: what a summand counts.
        value: what the plan calls it.
    """

    stage: int
    atoms: Atoms
    dtype: torch.dtype
    joined: Placement
    scale: float
    value: str


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """What a rank runs for one kind of call.

    Args:
        schedule: the table of all ranks, with communication.
        stages: the programs of this rank's stages.
        inputs: names of the tensors of the batch, in order.
        outputs: of the model, in order, with ``output_names`` for messages.
        loss: position of the one output that is differentiated; None in a call without gradients.
        shared: names of parameters that stages of several ranks have and one of them gives a gradient, with the positions of those ranks.
        axis: of the grid, along which stages lie.
        to_host: whether parameters, and so their gradients, are on the host.
    """

    schedule: Schedule
    stages: Mapping[int, StageProgram]
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    output_names: tuple[str, ...]
    loss: int | None
    shared: tuple[tuple[str, tuple[int, ...]], ...]
    axis: str
    to_host: bool = False

    @property
    def losses(self) -> tuple[int, ...]:
        """Positions of the outputs that are differentiated."""
        return () if self.loss is None else (self.loss,)

    def graphs(self) -> Iterator[tuple[fx.GraphModule, str]]:
        """Every graph of this rank's stages, ``forward`` or ``backward``."""
        for stage in self.stages.values():
            yield from stage.graphs()


def run_pipeline(
    program: PipelineProgram,
    place: Place,
    state: Mapping[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
    seed: torch.Tensor,
    scale: LossScale | None,
    states: States,
    recorder: Recorder | None = None,
) -> list[torch.Tensor]:
    """Run one step.

    Args:
        program: what to run.
        place: where.
        state: parameters (DTensors) and buffers of this rank's stages, by name.
        batch: its tensors, whole, in order.
        seed: of the step.
        scale: of the loss; None if it needs none.
        states: of compressed gradients.
        recorder: of what runs; None if it is not recorded.

    Returns:
        The outputs, whole, on every rank; the loss carries the gradients of the step.

    Raises:
        RankError: another rank did not answer.
    """
    names = [name for name, value in state.items() if isinstance(value, DTensor)]
    anchor = torch.zeros((), requires_grad=program.loss is not None, device="cpu")
    play = _Play(program, place, state, batch, seed, scale, states, recorder)
    return list(_Step.apply(play, names, anchor, *(state[name] for name in names)))


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, play: _Play, names: Sequence[str], anchor: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, grads = play.run()
        ctx.grads, ctx.loss = [grads.get(name) for name in names], play.program.loss
        ctx.owners, ctx.scale, ctx.device, ctx.recorder = parameters, play.scale, play.place.transfers.device, play.recorder
        ctx.loss_name = "" if ctx.loss is None else play.program.output_names[ctx.loss]
        ctx.mark_non_differentiable(*(out for i, out in enumerate(outputs) if i != ctx.loss))
        return tuple(out.clone() if i == ctx.loss else out for i, out in enumerate(outputs))  # no view: `loss /= 2` changes it in place

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives()
        if ctx.grads is None:
            raise RuntimeError(
                "backward was called a second time on the same forward; the gradients are handed out at the first. Call the model again"
            )
        factor = local_tangent(tangents[ctx.loss], ctx.loss_name)
        if ctx.scale is not None:
            overflowed = share_overflow([grad for grad in ctx.grads if grad is not None], ctx.device, ctx.recorder)
            factor = torch.full_like(factor, ctx.scale.settle(float(factor), overflowed=overflowed))
        scaled: list[torch.Tensor | None] = []
        for grad, owner in zip(ctx.grads, ctx.owners, strict=True):
            if grad is None:
                scaled.append(None)
                continue
            grad.mul_(factor.to(grad))  # its memory is this step's own
            scaled.append(like(grad, owner) if isinstance(owner, DTensor) else grad)
        ctx.grads = None
        if ctx.recorder is not None:
            ctx.recorder.end_part()
        return (None, None, None, *scaled)


class _Play:
    """One step: the rank's actions, one after the other."""

    def __init__(
        self,
        program: PipelineProgram,
        place: Place,
        state: Mapping[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
        seed: torch.Tensor,
        scale: LossScale | None,
        states: States,
        recorder: Recorder | None,
    ) -> None:
        self.program, self.place, self.scale, self.states, self.recorder = program, place, scale, states, recorder
        self.state = state
        self.rank = place.ranks[place.position]
        given = dict(zip(program.inputs, batch, strict=True))
        arithmetic: Arithmetic[torch.Tensor] = _arithmetic(place.transfers.device, runner(place.mesh, recorder))
        self.runs = {
            stage: StageRun(
                own,
                arithmetic,
                [_local(given[n] if is_input else state[n]) for n, is_input in zip(own.names, own.is_input, strict=True)],
                place.rank_inputs,
                seed,
                program.schedule.microbatches,
                1.0 if scale is None else scale.expected,
            )
            for stage, own in program.stages.items()
        }

    def run(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The outputs of the model, and the gradients by name."""
        use_states(self.states, 1.0 if self.scale is None else self.scale.expected)
        try:
            self._play()
        except BaseException:
            self.place.transfers.abandon()
            raise
        grads = self._grads()
        if self.program.to_host:
            grads = {name: leave(grad) for name, grad in grads.items()}
            settle()
        return [self._output(i, output) for i, output in enumerate(self.program.outputs)], grads

    def _play(self) -> None:
        steps = RankRun(self.program.schedule, self.runs, Carrier(self._send, self._receive))
        for action in self.program.schedule.ranks[self.place.position]:
            self._guarded(action, partial(steps.do, action))
        self.place.transfers.finish(lambda: f"rank {self.rank}, end of the step")
        for stage, run in self.runs.items():
            self._guarded(Action(stage, Kind.REDUCE), run.finish)

    def _guarded(self, action: Action, do: Callable[[], None]) -> None:
        """Call ``do``; what goes wrong says where."""
        if self.recorder is not None:
            self.recorder.at(action.stage, action.microbatch)
        try:
            do()
        except AutoparError:
            raise
        except RuntimeError as error:
            if self.place.mesh.size() == 1 or isinstance(error, torch.OutOfMemoryError):  # nobody else's fault
                error.add_note(self._where(action))
                raise
            raise RankError(f"{self._where(action)}: one of them did not answer, or the computation failed ({error})") from error

    def _where(self, action: Action) -> str:
        together = self.place.mesh.mesh.flatten().tolist()
        return f"rank {self.rank}, action {action} of the schedule (stage {action.stage}, on ranks {together})"

    def _send(self, to: int, tensors: list[torch.Tensor], action: Action) -> None:
        start = partial(self.place.transfers.send, to, tensors, partial(self._where, action))
        if self.recorder is None:
            start()
            return
        own = self.program.stages[action.stage]
        is_forward = action.kind is Kind.SEND_F
        names = [wire.name for wire in (own.sent if is_forward else own.received) if is_forward or wire.needs_grad]
        self.recorder.message("send", "forward" if is_forward else "backward", names, start)

    def _receive(self, source: int, wires: Sequence[Wire], posted: Action) -> Callable[[Action], list[torch.Tensor]]:
        start = partial(self.place.transfers.receive, source, wires, partial(self._where, posted))
        if self.recorder is None:
            message = start()
            return lambda action: message.wait(partial(self._where, action))
        phase = "forward" if posted.kind is Kind.RECV_F else "backward"
        wait = self.recorder.message("receive", phase, [wire.name for wire in wires], start)
        return lambda action: wait(partial(self._where, action))

    def _grads(self) -> dict[str, torch.Tensor]:
        """Gradients by name, summed over all stages that store a parameter; those that do not use it have copies to update too."""
        grads: dict[str, torch.Tensor] = {}
        for run in self.runs.values():
            for position, grad in run.grads.items():
                name = run.program.names[position]
                grads[name] = grads[name] + grad if name in grads else grad
        if self.program.loss is None:
            return grads
        for name, positions in self.program.shared:
            if self.place.position in positions:
                own = grads[name] if name in grads else self._no_gradient(name)
                grads[name] = own.contiguous()
                group = self.place.circles[positions]
                with self._seen("all_reduce", "reduce", grads[name], name):
                    self._collective(f"gradient of {name}, shared by stages", dist.all_reduce, grads[name], group=group)
        return grads

    def _no_gradient(self, name: str) -> torch.Tensor:
        parameter = _local(self.state[name])
        return torch.zeros_like(parameter, device=self.place.transfers.device)

    def _output(self, index: int, output: Output) -> torch.Tensor:
        """One output, whole, on every rank of the pipeline."""
        device = self.place.transfers.device
        if output.stage in self.runs:
            run = self.runs[output.stage]
            parts = run.outputs.pop(run.program.outputs.index(index))
            whole = join_parts([parts[k] for k in sorted(parts)], output.atoms, output.joined, output.scale)
        else:
            shape = [math.prod(sizes) for sizes in output.atoms]
            whole = torch.empty(shape, dtype=output.dtype, device=device)
        if self.place.line is not None:
            source = self.place.ranks[self.program.schedule.rank_of(output.stage)]
            whole = whole.contiguous()
            with self._seen("broadcast", "forward", whole, output.value):
                self._collective(f"output {index}, from rank {source}", dist.broadcast, whole, source, group=self.place.line)
        return whole

    def _seen(self, kind: str, phase: str, tensor: torch.Tensor, of: str) -> AbstractContextManager[None]:
        """Record a collective over stages that is done inside."""
        return nullcontext() if self.recorder is None else self.recorder.blocking(kind, self.program.axis, phase, tensor, of)

    def _collective(self, what: str, op: Any, *args: Any, **kwargs: Any) -> None:
        try:
            op(*args, **kwargs)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank}, {what}: a rank of {list(self.place.ranks)} did not answer ({error})") from error


def _local(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value.detach().contiguous()


def _part(value: torch.Tensor, position: int, count: int) -> torch.Tensor:
    return value.chunk(count)[position]


def _arithmetic(device: torch.device, run: Runner) -> Arithmetic[torch.Tensor]:
    return Arithmetic(
        run=run,
        add=torch.add,
        full_like=torch.full_like,
        zeros_like=partial(torch.zeros_like, device=device),
        number=partial(number_on, device),
        contiguous=torch.Tensor.contiguous,
        part=_part,
        fetch=lambda values: [arrive(x) for x in [fetch(value, device) for value in values]],
    )
