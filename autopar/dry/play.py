"""One step of one rank on shadows: tensors that take memory in a count, and hold nothing.

The stages are played by the classes that play them at run time (`autopar.step`), so that a value lives here as long as it does there: from
the graph that makes it until nobody holds it. What comes out is the *trail* of the rank, its communication calls in order, with flops and
the most memory that was held at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.cost.updates import Taken, taken_bytes
from autopar.dry.graph import Call, Form, Observed, observe
from autopar.offload import Offload
from autopar.passes.differentiate import Halves
from autopar.plan import Plan
from autopar.runtime.pipeline import PipelineProgram
from autopar.schedule.actions import Action
from autopar.stage import Wire
from autopar.step import Arithmetic, Carrier, RankRun, StageRun

STATE = ("parameters", "optimizer", "inputs")
"""Kinds of memory that lie there before and after the step."""
KINDS = (*STATE, "gathered", "gradients", "activations")
_NUMBER = Form((1,), (1,), torch.int64)


@dataclass(slots=True)
class Memory:
    """Bytes that are held, by kind, and at their most."""

    now: Counter[str] = field(default_factory=Counter)
    held: int = 0
    peak: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)

    def take(self, num_bytes: int, kind: str) -> None:
        self.now[kind] += num_bytes
        self.held += num_bytes
        if self.held > self.peak:
            self.peak, self.at_peak = self.held, dict(self.now)


class Block:
    """Memory of one storage; it is given back when nobody holds the block."""

    __slots__ = ("kind", "memory", "num_bytes")

    def __init__(self, memory: Memory, num_bytes: int, kind: str) -> None:
        self.memory, self.num_bytes, self.kind = memory, num_bytes, kind
        memory.take(num_bytes, kind)

    def become(self, kind: str) -> None:
        self.memory.now[self.kind] -= self.num_bytes
        self.memory.now[kind] += self.num_bytes
        self.kind = kind

    def __del__(self) -> None:
        self.memory.held -= self.num_bytes
        self.memory.now[self.kind] -= self.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Shadow:
    """A tensor: where it lies, and its form; ``at_work`` is what is made into it until somebody waits for it."""

    block: Block
    form: Form
    at_work: tuple[Block | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Programs:
    """What the ranks of a plan run.

    Args:
        plan: the plan.
        whole: forward and backward of a plan without stages and micro-batches, whose inputs are ``names``; else None.
        pipeline: with the programs of all stages; None if ``whole`` is not.
        names: of all parameters, buffers and inputs.
        forms: of the tensors that a rank holds of them, by name.
        state_bytes: of the optimizer, with what compression keeps of gradients, for each parameter by name.
        observed: what graphs do, as far as it is known.
    """

    plan: Plan
    whole: Halves | None
    pipeline: PipelineProgram | None
    names: tuple[str, ...]
    forms: Mapping[str, Form]
    state_bytes: Mapping[str, int]
    observed: dict[fx.GraphModule, Observed] = field(default_factory=dict, compare=False, repr=False)

    @property
    def has_host(self) -> bool:
        """Whether the host has memory of its own, which is not counted."""
        return bool(self.plan.prediction.host_memory_bytes)

    @property
    def keeps_state_away(self) -> bool:
        """Whether stored shards and the optimizer are there."""
        return self.has_host and Offload.of(self.plan.offload).optimizer

    def observe(self, graph: fx.GraphModule) -> Observed:
        if graph not in self.observed:
            self.observed[graph] = observe(graph, has_host=self.has_host)
        return self.observed[graph]


@dataclass(frozen=True, slots=True, eq=False)
class Trail:
    """What one rank does in a step.

    Args:
        calls: communication, in order; waits for messages are among them.
        flops: of products, convolutions and attention.
        peak_bytes: the most that is held at a time; ``at_peak`` is the same by kind (`KINDS`).
        findings: what is not as it should be, one text each.
    """

    calls: tuple[Call, ...]
    flops: int
    peak_bytes: int
    at_peak: Mapping[str, int]
    findings: tuple[str, ...]


def play(programs: Programs, position: int) -> Trail:
    """Play the step of a rank at a position of the pipeline; without one the position is 0."""
    return _Player(programs, position).trail()


class _Player:
    def __init__(self, programs: Programs, position: int) -> None:
        self.programs, self.position = programs, position
        self.memory = Memory()
        self.calls: list[Call] = []
        self.findings: dict[str, None] = {}
        self.flops = 0
        self.unsent: list[Shadow] = []
        self.results: dict[fx.GraphModule, str] = {}

    def trail(self) -> Trail:
        if self.programs.whole is not None:
            self._play_whole(self.programs.whole)
        else:
            assert self.programs.pipeline is not None
            self._play_stages(self.programs.pipeline)
        at_peak = {kind: self.memory.at_peak.get(kind, 0) for kind in KINDS}
        return Trail(tuple(self.calls), self.flops, self.memory.peak, at_peak, tuple(self.findings))

    def _new(self, form: Form, kind: str) -> Shadow:
        return Shadow(Block(self.memory, form.num_bytes, kind), form)

    def _state(self, names: Sequence[str]) -> dict[str, Shadow]:
        """What lies there all the step, by name."""
        shadows = {}
        for name in dict.fromkeys(names):
            is_parameter, form = name in self.programs.state_bytes, self.programs.forms[name]
            if is_parameter and self.programs.keeps_state_away:
                shadows[name] = Shadow(Block(self.memory, 0, "parameters"), form)
                continue
            shadows[name] = self._new(form, "parameters" if is_parameter else "inputs")
            self.memory.take(self.programs.state_bytes.get(name, 0), "optimizer")
        return shadows

    def _run(self, graph: fx.GraphModule, given: list[Shadow]) -> list[Shadow]:
        """Run a graph on what is in ``given``, which is empty then (`runtime.release`)."""
        observed = self.programs.observe(graph)
        blocks: list[Block | None] = [None] * observed.num_storages
        for i, (node, form) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), observed.inputs, strict=True)):
            blocks[observed.takes[i]] = given[i].block
            if given[i].form.text != form.text:
                self.findings[f"a graph takes {node.name} as {form.text}, but gets {given[i].form.text}"] = None
        given.clear()
        for storage, num_bytes in observed.steps:
            blocks[storage] = Block(self.memory, num_bytes, "activations") if num_bytes >= 0 else None
        outputs = []
        for storage, form in observed.outputs:
            block = blocks[storage]
            assert block is not None
            if graph in self.results and block.kind == "activations":
                block.become(self.results[graph])
            outputs.append(Shadow(block, form, tuple(blocks[used] for used in observed.at_work.get(storage, ()))))
        self.calls += observed.calls
        self.flops += observed.flops
        self.findings.update(dict.fromkeys(observed.findings))
        return outputs

    def _play_whole(self, halves: Halves) -> None:
        state = self._state(self.programs.names)
        rank_inputs = [self._new(_NUMBER, "inputs") for _ in (*self.programs.plan.mesh.sizes, "seed")]
        results = self._run(halves.forward, [*state.values(), *rank_inputs])
        outputs, saved = results[: halves.num_outputs], results[halves.num_outputs :]
        del results
        if halves.backward is None:
            return
        self.results[halves.backward] = "gradients"
        given = [*saved, *(self._new(outputs[i].form, "activations") for i in halves.differentiable)]
        del saved
        names = list(state)
        grads = {names[i]: grad for i, grad in zip(halves.with_grad, self._run(halves.backward, given), strict=True)}
        self._check_grads(grads)
        self._update(grads)

    def _check_grads(self, grads: Mapping[str, Shadow]) -> None:
        for name, grad in grads.items():
            stored = self.programs.forms[name]
            if grad.form.text != stored.text:
                self.findings[f"the gradient of {name} is {grad.form.text}, but the plan stores {stored.text} of it on a rank"] = None

    def _update(self, names: Iterable[str]) -> None:
        """What the optimizer takes for itself: at the largest parameter, or for all, as the plan has it."""
        if self.programs.keeps_state_away:
            return
        plan = self.programs.plan
        by_foreach = any(stage.held.together for stage in plan.stages)

        def taken(name: str) -> Taken:
            form, parameter = self.programs.forms[name], plan.parameter(name)
            whole = math.prod(parameter.shape) * form.dtype.itemsize
            return taken_bytes(plan.optimizer, whole, form.num_bytes, by_foreach=by_foreach)

        each = [taken(name) for name in names]
        num_bytes = max((taken.alone for taken in each), default=0.0) + sum(taken.together for taken in each)
        Block(self.memory, round(num_bytes), "activations")

    def _play_stages(self, pipeline: PipelineProgram) -> None:
        schedule, plan = pipeline.schedule, self.programs.plan
        own = {stage: pipeline.stages[stage] for stage in schedule.stages_of(self.position)}
        state = self._state([name for program in own.values() for name in program.names])
        rank_inputs = [self._new(_NUMBER, "inputs") for _ in plan.mesh.sizes]
        seed = self._new(_NUMBER, "inputs")
        arithmetic = self._arithmetic()
        for program in own.values():
            ending = program.ending
            if program.prepare is not None:
                self.results[program.prepare.forward] = "gathered"
            if ending is not None:
                self.results |= dict.fromkeys((ending.first, ending.next), "gradients")
                if ending.last is not None:
                    self.results |= dict.fromkeys((ending.last.start, ending.last.finish), "gradients")
        runs = {
            stage: StageRun(program, arithmetic, [state[name] for name in program.names], rank_inputs, seed, schedule.microbatches)
            for stage, program in own.items()
        }
        steps = RankRun(schedule, runs, Carrier(self._send, self._receive))
        for action in schedule.ranks[self.position]:
            steps.do(action)
        self.unsent.clear()
        for run in runs.values():
            run.finish()
        self._end(pipeline, runs)

    def _end(self, pipeline: PipelineProgram, runs: Mapping[int, StageRun[Shadow]]) -> None:
        """Sums over stages that share parameters, and outputs to the whole pipeline (`runtime.pipeline`)."""
        over = self.programs.plan.pipeline.axis
        grads: dict[str, Shadow] = {}
        for run in runs.values():
            for place, grad in run.grads.items():
                name = run.program.names[place]
                grads[name] = self._new(grad.form, "gradients") if name in grads else grad
        for name, positions in pipeline.shared if pipeline.loss is not None else ():
            if self.position in positions:
                if name not in grads:  # a stage that has it and does not differentiate it gives zeros
                    grads[name] = self._new(self.programs.forms[name], "gradients")
                self.calls.append(_call("all_reduce", over, grads[name].form, detail="sum", positions=positions))
        self._check_grads(grads)
        returned = []
        for i, output in enumerate(pipeline.outputs):
            form = Form.packed(tuple(math.prod(sizes) for sizes in output.atoms), output.dtype)
            if output.stage in runs:
                parts = runs[output.stage].outputs.pop(runs[output.stage].program.outputs.index(i))
                is_joined = len(parts) > 1 and not output.joined.holds_whole
                returned.append(self._new(form, "activations") if is_joined else parts[max(parts)])
                del parts
            else:
                returned.append(self._new(form, "activations"))
            if pipeline.schedule.degree > 1:
                self.calls.append(_call("broadcast", over, form, peer=pipeline.schedule.rank_of(output.stage)))
        self._update(grads)

    def _send(self, to: int, values: list[Shadow], action: Action) -> None:
        self.unsent = [self._contiguous(value) for value in values]  # those before have gone by now
        over = self.programs.plan.pipeline.axis
        self.calls += [_call("send", over, value.form, peer=to, name=str(action)) for value in values]

    def _receive(self, source: int, wires: Sequence[Wire], action: Action) -> _Coming:
        over = self.programs.plan.pipeline.axis
        forms = [Form.packed(wire.shape, wire.dtype) for wire in wires]
        self.calls += [_call("receive", over, form, peer=source, name=str(action)) for form in forms]
        return _Coming(self, source, [self._new(form, "activations") for form in forms])

    def _contiguous(self, value: Shadow) -> Shadow:
        if value.form.is_contiguous:
            return value
        return self._new(Form.packed(value.form.shape, value.form.dtype), value.block.kind)

    def _arithmetic(self) -> Arithmetic[Shadow]:
        def part(value: Shadow, position: int, count: int) -> Shadow:
            size = value.form.shape[0] // count
            return Shadow(value.block, replace(value.form, shape=(size, *value.form.shape[1:])))

        return Arithmetic(
            run=self._run,
            add=lambda a, _: self._new(a.form, a.block.kind),
            full_like=lambda value, _: self._new(value.form, "activations"),
            zeros_like=lambda value: self._new(value.form, "activations"),
            number=lambda _: self._new(_NUMBER, "inputs"),
            contiguous=self._contiguous,
            part=part,
            fetch=lambda values: [self._new(value.form, "gathered") for value in values],
        )


@dataclass(slots=True)
class _Coming:
    """Values on their way; a call waits for them."""

    player: _Player
    source: int
    values: list[Shadow]

    def __call__(self, action: Action) -> list[Shadow]:
        waits = [Call("wait", self.player.programs.plan.pipeline.axis, "", (), 0, peer=self.source, name=str(action))] * len(self.values)
        self.player.calls += waits
        return self.values


def _call(kind: str, over: str, form: Form, *, detail: str = "", peer: int = -1, positions: tuple[int, ...] = (), name: str = "") -> Call:
    dtype = str(form.dtype).removeprefix("torch.")
    return Call(kind, over, dtype, (form.shape,), form.num_bytes, detail, peer, positions, name)
