"""One step of one stage, and of a rank with its stages: what the actions of a schedule do, whoever holds the values.

A value is opaque here: a tensor of this rank, the tensors of all virtual ranks of the stage, or the shadow of a tensor. What can be done
with it is an `Arithmetic`. The order of actions comes from the schedule; these classes keep what lives between them: copies of parameters,
saved activations of the micro-batches in flight, gradients, which add up, and what goes from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import fx

from autopar.layout import PARTIAL, Atoms, Layout, Placement, assemble
from autopar.mesh import Mesh
from autopar.passes.last_backward import Ending
from autopar.schedule.actions import Action, Kind, Schedule
from autopar.stage import StageProgram, Wire

V = TypeVar("V")

SEED_STRIDE = 0x85EBCA6B
"""Between the seeds of averaged micro-batches: odd, so that they differ in the low 32 bits, which count; steps are 1 apart."""


@dataclass(frozen=True, slots=True)
class Arithmetic(Generic[V]):
    """What a step does with values.

    Args:
        run: a graph on its inputs; it may take them out of the list, to free each after its last use.
        add: two gradients, as a new one.
        full_like: a number as the gradient of a loss.
        zeros_like: the gradient of what has none.
        number: an int64 [1] on every rank.
        part: that of a position among so many equal ones of dim 0.
        fetch: copies on the device of values that are on the host.
        contiguous: the same values, laid out as graphs expect what comes from outside of them.
    """

    run: Callable[[fx.GraphModule, list[V]], list[V]]
    add: Callable[[V, V], V]
    full_like: Callable[[V, float], V]
    zeros_like: Callable[[V], V]
    number: Callable[[int], V]
    contiguous: Callable[[V], V]
    part: Callable[[V, int, int], V]
    fetch: Callable[[Sequence[V]], list[V]]


@dataclass(slots=True)
class StageRun(Generic[V]):
    """One step of one stage.

    Args:
        program: its graphs.
        arithmetic: of its values.
        placeholders: the values of ``program.names``.
        rank_inputs: coordinates on the axes of the mesh; `microbatches` > 1 adds that of the axis in time.
        seed: of the step.
        microbatches: of the step.
        loss_scale: gradient of the loss of the step.
        grads: by position in ``program.names``, once the step is over.
        outputs: by position in ``program.outputs``, one per micro-batch.
    """

    program: StageProgram
    arithmetic: Arithmetic[V]
    placeholders: list[V]
    rank_inputs: Sequence[V]
    seed: V
    microbatches: int
    loss_scale: float = 1.0
    grads: dict[int, V] = field(default_factory=dict)
    outputs: dict[int, dict[int, V]] = field(default_factory=dict)
    copies: list[V] | None = None
    _prepared: list[V] = field(default_factory=list)
    _saved: dict[int, list[V]] = field(default_factory=dict)
    _losses: dict[int, list[V]] = field(default_factory=dict)
    _received: dict[int, Sequence[V]] = field(default_factory=dict)
    _left: dict[int, list[V]] = field(default_factory=dict)
    _copy_grads: dict[int, V] = field(default_factory=dict)
    _num_ended: int = 0
    _coming: list[V] = field(default_factory=list)
    _on_host: dict[int, V] = field(default_factory=dict)

    def gather(self) -> None:
        """Make the parameters ready, once a step."""
        self.copies = []
        self._on_host = {i: self.placeholders[i] for i in self.program.hosted}
        for i, fetched in zip(self._on_host, self.arithmetic.fetch([*self._on_host.values()]), strict=True):
            self.placeholders[i] = fetched
        if self.program.prepare is not None:
            halves = self.program.prepare
            inputs = self._inputs(0, self._no_values())
            results = self.arithmetic.run(halves.forward, [inputs[i] for i in self.program.taken])
            self.copies = [self.arithmetic.contiguous(copy) for copy in results[: halves.num_outputs]]
            self._prepared = results[halves.num_outputs :]
        self._return([i for i in self._on_host if i not in self.program.kept])  # what only the preparation has needed

    def _return(self, positions: Sequence[int]) -> None:
        """Let go of copies of what is on the host."""
        for i in positions:
            self.placeholders[i] = self._on_host.pop(i)

    def forward(self, microbatch: int, received: Sequence[V]) -> list[V]:
        """Run the forward of a micro-batch; gives what goes to the next stage."""
        received = [self.arithmetic.contiguous(value) for value in received]
        if self.copies is None:
            self.gather()
        assert self.copies is not None
        halves = self.program.body
        inputs = self._inputs(microbatch, received)
        results = self.arithmetic.run(halves.forward, [*self.copies, *(inputs[i] for i in self.program.kept)])
        num_sent = len(self.program.sent)
        for i, output in enumerate(results[num_sent : halves.num_outputs]):
            self.outputs.setdefault(i, {})[microbatch] = output
        for place, i in self.program.updates:
            self.placeholders[place] = results[num_sent + i]
        if halves.backward is not None:
            self._saved[microbatch] = results[halves.num_outputs :]
            self._losses[microbatch] = [results[i] for i in halves.differentiable if i >= num_sent]
        if any(wire.needs_grad for wire in self.program.received):  # the stage before waits for gradients, be they zeros
            self._received[microbatch] = received
        return results[:num_sent]

    def backward(self, microbatch: int, tangents: list[V]) -> list[V]:
        """Run the whole backward of a micro-batch on the gradients of what was sent; gives those of what was received. It takes the
        gradients out of the list, so that each is freed after its last use."""
        if self.program.ending is None:
            return self._deposit(microbatch, [], ())
        return self._end(microbatch, self.program.ending, self._given(microbatch, tangents), range(len(self.program.body.with_grad)))

    def input_backward(self, microbatch: int, tangents: list[V]) -> list[V]:
        """The part of the backward that the stage before waits for; it takes the gradients as `backward` does."""
        split = self.program.split
        if split is None:
            return self._deposit(microbatch, [], ())
        given = self._given(microbatch, tangents)
        saved = [given[i] for i in split.saved]
        results = self.arithmetic.run(split.inputs, given)
        count = len(split.to_inputs)
        self._left[microbatch] = [*results[count:], *saved]
        return self._deposit(microbatch, results[:count], split.to_inputs)

    def weight_backward(self, microbatch: int) -> None:
        """The rest of the backward: gradients of parameters."""
        split = self.program.split
        if split is not None:
            assert self.program.ending is not None
            places = [i for i in range(len(self.program.body.with_grad)) if i not in split.to_inputs]
            self._end(microbatch, self.program.ending, self._left.pop(microbatch), places)

    def finish(self) -> None:
        """Wait for the reductions that the last backward has started."""
        last = self.program.ending.last if self.program.ending is not None else None
        if last is not None:
            assert self.program.prepare is not None
            grads = self.arithmetic.run(last.finish, self._coming)
            for position, grad in zip(self.program.prepare.with_grad, grads, strict=True):
                source = self.program.taken[position]
                self.grads[source] = self.arithmetic.add(self.grads[source], grad) if source in self.grads else grad
        self.copies, self._coming = None, []
        self._return([*self._on_host])

    def _end(self, microbatch: int, ending: Ending, given: list[V], places: Sequence[int]) -> list[V]:
        """Run what ends the backward of a micro-batch; ``places`` says what its results are."""
        self._num_ended += 1
        if self._num_ended == 1:
            return self._deposit(microbatch, self.arithmetic.run(ending.first, given), places)
        given += [self._sum(places[i]) for i in ending.summed]
        others = [place for i, place in enumerate(places) if i not in ending.summed]
        if self._num_ended < self.microbatches or ending.last is None:
            return self._deposit(microbatch, self.arithmetic.run(ending.next, given), others)
        assert self.copies is not None
        zeros = [self.arithmetic.zeros_like(self.copies[i]) for i in ending.last.silent]
        given += [*zeros, *self._prepared]
        self._prepared, self._copy_grads = [], {}
        results = self.arithmetic.run(ending.last.start, given)
        self._coming = results[ending.last.num_results :]
        return self._deposit(microbatch, results[: ending.last.num_results], others)

    def _sum(self, place: int) -> V:
        """The gradient so far of what the backward differentiates at ``place``."""
        position = self.program.body.with_grad[place]
        if position < self.program.num_copies:
            return self._copy_grads[position]
        return self.grads[self.program.kept[position - self.program.num_copies]]

    def _no_values(self) -> list[V]:
        return [self.seed] * len(self.program.received)  # never read

    def _inputs(self, microbatch: int, received: Sequence[V]) -> list[V]:
        """The inputs of the stage (`StageProgram`)."""
        time = [self.arithmetic.number(microbatch)] if self.microbatches > 1 else []
        if not any(self.program.is_parted):
            return [*self.placeholders, *received, *self.rank_inputs, *time, self.seed]
        placeholders = [
            self.arithmetic.part(value, microbatch, self.microbatches) if is_parted else value
            for value, is_parted in zip(self.placeholders, self.program.is_parted, strict=True)
        ]
        return [*placeholders, *received, *self.rank_inputs, *time, self._own_seed(microbatch)]

    def _own_seed(self, microbatch: int) -> V:
        """A batch of its own draws numbers of its own: nothing in its graph knows which it is."""
        return self.arithmetic.add(self.seed, self.arithmetic.number(microbatch * SEED_STRIDE))

    def _given(self, microbatch: int, tangents: list[V]) -> list[V]:
        losses = [self.arithmetic.full_like(loss, self.loss_scale * self.program.scale) for loss in self._losses.pop(microbatch)]
        taken = [self.arithmetic.contiguous(tangents.pop(0)) for _ in range(len(tangents))]
        return [*self._saved.pop(microbatch), *taken, *losses]

    def _deposit(self, microbatch: int, grads: Sequence[V], places: Sequence[int]) -> list[V]:
        """Put gradients of the body's inputs where they belong; gives those of received values, zeros where there is none."""
        num_placeholders = len(self.placeholders)
        of_received: dict[int, V] = {}
        for place, grad in zip(places, grads, strict=True):
            position = self.program.body.with_grad[place]
            source = self.program.kept[position - self.program.num_copies] if position >= self.program.num_copies else None
            if source is None:
                self._copy_grads[position] = grad
            elif source < num_placeholders:
                self.grads[source] = grad
            else:
                of_received[source - num_placeholders] = grad
        received = self._received.pop(microbatch, ())
        wanted = [i for i, wire in enumerate(self.program.received) if wire.needs_grad and received]
        return [of_received[i] if i in of_received else self.arithmetic.zeros_like(received[i]) for i in wanted]


@dataclass(frozen=True, slots=True)
class Carrier(Generic[V]):
    """What carries values to other ranks of the pipeline.

    Args:
        send: starts to send values to the rank at a position, for a SEND.
        receive: starts to receive such values from the rank at a position, for a RECV; gives what waits for them on behalf of an action.
    """

    send: Callable[[int, list[V], Action], None]
    receive: Callable[[int, Sequence[Wire], Action], Callable[[Action], list[V]]]


@dataclass(slots=True)
class RankRun(Generic[V]):
    """One step of one rank: its stages, and what goes between them and to other ranks.

    Args:
        schedule: the table of all ranks, with communication.
        runs: those of the rank's stages.
        carrier: of messages.
    """

    schedule: Schedule
    runs: Mapping[int, StageRun[V]]
    carrier: Carrier[V]
    _incoming: dict[tuple[int, Kind, int], Callable[[Action], list[V]] | list[V]] = field(default_factory=dict)
    _outgoing: dict[tuple[int, Kind, int], list[V]] = field(default_factory=dict)

    def do(self, action: Action) -> None:
        """Perform one action of the rank's row."""
        run = self.runs[action.stage]
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.GATHER:
            run.gather()
        elif action.kind is Kind.FORWARD:
            sent = run.forward(microbatch, self._take(stage, Kind.RECV_F, microbatch, action))
            self._give(stage, stage + 1, Kind.SEND_F, Kind.RECV_F, microbatch, sent)
        elif action.kind is Kind.BACKWARD:
            grads = run.backward(microbatch, self._take(stage, Kind.RECV_B, microbatch, action))
            self._give(stage, stage - 1, Kind.SEND_B, Kind.RECV_B, microbatch, grads)
        elif action.kind is Kind.INPUT:
            grads = run.input_backward(microbatch, self._take(stage, Kind.RECV_B, microbatch, action))
            self._give(stage, stage - 1, Kind.SEND_B, Kind.RECV_B, microbatch, grads)
        elif action.kind is Kind.WEIGHT:
            run.weight_backward(microbatch)
        elif action.kind is Kind.REDUCE:
            pass  # the last backward has started it, the end of the step waits for it
        elif action.kind in (Kind.SEND_F, Kind.SEND_B):
            to = self.schedule.rank_of(stage + 1 if action.kind is Kind.SEND_F else stage - 1)
            self.carrier.send(to, self._outgoing.pop((stage, action.kind, microbatch)), action)
        else:
            wires = run.program.received if action.kind is Kind.RECV_F else [w for w in run.program.sent if w.needs_grad]
            source = self.schedule.rank_of(stage - 1 if action.kind is Kind.RECV_F else stage + 1)
            self._incoming[stage, action.kind, microbatch] = self.carrier.receive(source, wires, action)

    def _take(self, stage: int, kind: Kind, microbatch: int, action: Action) -> list[V]:
        """What comes from a neighbour; nothing at the ends of the pipeline."""
        at_end = stage == 0 if kind is Kind.RECV_F else stage == self.schedule.stages - 1
        if at_end:
            return []
        coming = self._incoming.pop((stage, kind, microbatch))
        return coming if isinstance(coming, list) else coming(action)

    def _give(self, stage: int, to: int, send: Kind, receive: Kind, microbatch: int, values: list[V]) -> None:
        """Lay out what the stage ``to`` wants: for the SEND that follows, or at its door if it is on this rank."""
        if to in self.runs:
            self._incoming[to, receive, microbatch] = values
        elif 0 <= to < self.schedule.stages:
            self._outgoing[stage, send, microbatch] = values


def join_parts(parts: Sequence[torch.Tensor], atoms: Atoms, joined: Placement, scale: float) -> torch.Tensor:
    """An output of the model, of the factored shape ``atoms``, from what all micro-batches gave; what is alike is that of the last."""
    if len(parts) == 1 or joined.holds_whole:
        return parts[-1]
    whole = assemble(parts, Layout(Mesh.of(len(parts)), atoms, (joined,)))
    return whole * scale if joined == PARTIAL and scale != 1.0 else whole
