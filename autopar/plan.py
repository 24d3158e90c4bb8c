"""The plan as a document: what was decided for every parameter and op, at what predicted price. It holds no tensors and no graphs.

A plan prints as a table, travels as JSON, and is enough, with the model, to run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from autopar.errors import MeshError, PlanError
from autopar.garbage import no_collection
from autopar.mesh import Mesh
from autopar.piece import Piece
from autopar.resident import StageBytes
from autopar.typed import read

FORMAT = 14
"""Version of the JSON; a plan of another version is refused."""
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers")
"""Of what lies in memory; buffers are the batch, whole gradients that are being reduced, outputs, and what the optimizer takes itself."""
_SIGNED = ("memory_bytes", "held")
"""Fields of bytes of which some are differences: what is above the sum of other kinds, or beside what is there already."""


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """How one parameter is held.

    Args:
        name: its name in the model; ``aliases`` are other names of the same tensor.
        shape: global shape; ``factors`` are its dims as products, major first.
        held: per mesh axis a placement (``R``, ``S0.1``) or a ZeRO level (``Z1``, ``Z2``, ``Z3``).
        local_shape: shape of the shard that each rank stores.
        num_bytes: of the stored shard.
        stages: pipeline stages that use it. Each stores it; the first counts where it must count once, as in a norm.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]
    held: tuple[str, ...]
    local_shape: tuple[int, ...]
    num_bytes: int
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class OpPlan:
    """What one op does.

    Args:
        name: of its node in ``plan.graph``.
        op: what it computes, for example ``aten.linear``.
        module: path of the module that it belongs to; ``line`` is the user's source line.
        shape: global shape of its first result.
        rule: its rule in factor notation; empty if it has none.
        choices: per mesh axis the factor that it is sharded on, ``R``, ``R*`` or ``+i`` (a partial sum passed through).
        layout: placements of its first result.
        time_s: predicted seconds, forward and backward, without communication; that of a whole cluster stands with its first op.
        inputs: names of the ops, parameters and inputs that it reads.
        stage: pipeline stage that runs it; what is made of inputs alone is run by every stage that reads it.
        recompute: the level of recomputation if the backward computes it again instead of keeping its result; else empty.
    """

    name: str
    op: str
    module: str
    line: str
    shape: tuple[int, ...]
    rule: str
    choices: tuple[str, ...]
    layout: tuple[str, ...]
    time_s: float
    inputs: tuple[str, ...] = ()
    stage: int = 0
    recompute: str = ""


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """Communication of one kind of one value: ``count`` times in a step.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``; ``broadcast`` of an output to the ranks of all stages.
        axis: name of the axis, of the pipeline for a broadcast, and for an all-reduce of a gradient that several stages add up.
        phase: ``forward`` or ``backward``.
        value: the parameter or op whose value moves; ``module`` is where.
        num_bytes: of the whole buffer, once.
        time_s: once, as the price of the step has it: of a small gradient, or a vector, its part of a bucket.
        count: how often in a step.
    """

    kind: str
    axis: str
    phase: str
    value: str
    module: str
    num_bytes: int
    time_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of one training step, per rank.

    Args:
        step_time_s: forward, backward, optimizer and all communication that is not hidden.
        compute_s: forward and backward without communication, with what the backward computes again; ``update_s`` is the optimizer step.
        blocking_comm_s: collectives on the critical path.
        exposed_comm_s: all communication that is not hidden under compute, blocking included, in the mean of the ranks of a pipeline.
        tokens_per_s: of the batch, over all ranks: elements of the first integer input where it has several a row, else rows; ``unit`` is
            ``tokens`` or ``samples`` accordingly.
        mfu: model flops over peak flops of all devices (peak: the best sampled matmul throughput); 0 if unknown.
        bubble_fraction: idle part of the pipeline; 0 without stages.
        peak_memory_bytes: of every rank of the pipeline, with all its stages.
        memory_bytes: the peak of the first of them by kind (`MEMORY_KINDS`).
        host_memory_bytes: of every rank of the pipeline in the memory of the host, at most; empty if nothing is there, or if host and
            device have one memory, in which all counts.
        host_s: copies between both on the critical path of the first rank, in ``step_time_s`` as is ``update_s``.
        dispatch_s: in which the busiest host launches all ops of a step; if that is ``step_time_s``, devices wait for their hosts.
    """

    step_time_s: float
    compute_s: float
    update_s: float
    blocking_comm_s: float
    exposed_comm_s: float
    tokens_per_s: float
    mfu: float
    bubble_fraction: float
    peak_memory_bytes: tuple[int, ...]
    memory_bytes: Mapping[str, int]
    host_memory_bytes: tuple[int, ...] = ()
    host_s: float = 0.0
    unit: str = "tokens"
    dispatch_s: float = 0.0

    @property
    def is_host_bound(self) -> bool:
        """Whether the step is as long as it takes to launch it."""
        return 0 < self.step_time_s <= self.dispatch_s


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a step is cut over stages and in time.

    Args:
        degree: ranks on the pipeline axis of the grid; 1 means that there is none.
        stages: number of stages, a multiple of the degree; stage s runs at position s % degree.
        microbatches: parts that the batch is cut into.
        schedule: name of the table of actions (`autopar.schedule`).
        axis: name of the pipeline axis.
        position: where that axis stands among the axes of the grid, 0 outermost.
        is_average: whether micro-batches are batches of their own, whose losses are averaged (`passes.average`).
    """

    degree: int = 1
    stages: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    axis: str = "pp"
    position: int = 0
    is_average: bool = False

    def grid(self, mesh: Mesh) -> Mesh:
        """The mesh of all ranks, around the ``mesh`` of a stage."""
        if self.degree == 1:
            return mesh
        names, sizes, at = list(mesh.names), list(mesh.sizes), self.position
        return Mesh((*names[:at], self.axis, *names[at:]), (*sizes[:at], self.degree, *sizes[at:]))


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Predicted figures of one pipeline stage, per rank.

    Args:
        begins: module of its first op.
        num_ops: how many it runs.
        forward_s: of one micro-batch, with communication inside of the stage, of which ``forward_comm_s`` is waited for.
        backward_s: likewise, with ``backward_comm_s``.
        input_s: the first part of the backward, where it runs in two; ``weight_s`` is the second.
        gather_s: of parameters, once a step.
        reduce_s: of gradients, once a step; ``covered_s`` of it may lie beside the last backward.
        update_s: of the optimizer, once a step.
        send_forward_s: of one message to the next stage; ``send_backward_s`` to the one before.
        send_forward_bytes: of that message, of each rank; ``send_backward_bytes`` likewise.
        output_s: of its outputs to the ranks of all other stages, once a step.
        core_s: of a core, in a step, that all communication takes from what is computed beside it where ranks share cores.
        dispatch_s: of the host, in a step, to launch all that the stage does.
        live: micro-batches in flight, at most.
        recompute: ``none``, ``pointwise``, ``selective``, ``full``, or ``full:3/8`` for three of eight blocks.
        memory_bytes: at its peak, by kind (`MEMORY_KINDS`); ``held`` is what it holds when.
        inside: what its actions are made of, in order: computation by module, and all communication.
    """

    begins: str
    num_ops: int
    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    input_s: float
    weight_s: float
    gather_s: float
    reduce_s: float
    covered_s: float
    update_s: float
    send_forward_s: float
    send_backward_s: float
    send_forward_bytes: int
    send_backward_bytes: int
    core_s: float
    live: int
    recompute: str
    memory_bytes: Mapping[str, int]
    held: StageBytes
    inside: tuple[Piece, ...] = ()
    dispatch_s: float = 0.0
    output_s: float = 0.0

    @property
    def once_s(self) -> float:
        """Once a step: gathers and reductions of parameters, and the optimizer."""
        return self.gather_s + self.reduce_s + self.update_s


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """What the ranks of one axis of the grid reach each other by.

    Args:
        axis: its name.
        levels: of the links that its groups cross, the outermost first: ``between nodes``, ``inside a node``; of a machine that was
            measured ``links of`` and the axis.
        ranks: how many ranks of a group, next to each other, the links of each level join: all of them, then those that share a node.
    """

    axis: str
    levels: tuple[str, ...]
    ranks: tuple[int, ...]

    def hop(self, position: int) -> str:
        """The level that a message crosses from a position of the axis to the next."""
        ends = zip(self.levels, (*self.ranks[1:], 1), strict=True)
        return next(level for level, within in ends if (position + 1) % within == 0)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One shape (grid, stages, micro-batches, schedule) that was tried; ``reason`` says why it is no plan, and its figures are 0 then."""

    shape: str
    step_time_s: float
    bubble_fraction: float
    peak_memory_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """How the plan was made.

    Args:
        capture_time_s: of the model.
        solve_time_s: of the program that was chosen.
        gap: between it and what is proved to be the least, relative to it.
        num_variables: of this program.
        num_clusters: of this program.
        is_interrupted: whether the search was interrupted, and others than those that were tried may be better.
    """

    capture_time_s: float
    solve_time_s: float
    gap: float
    num_variables: int
    num_clusters: int
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the command line built the model and batch of a plan, to build them again.

    Args:
        model: the text that named it.
        batch: rows of the batch, and ``sequence`` tokens per row.
        is_real: with weights instead of on meta.
        outputs: as for `autopar.plan`.
    """

    model: str
    batch: int
    sequence: int
    is_real: bool = False
    outputs: str = "whole"


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for one model, batch and mesh.

    Args:
        model: name of the model's class.
        mesh: axes inside of a stage; `grid` has the pipeline axis too.
        machine: where the prices come from.
        batch: the inputs that it was made for, as text by name.
        memory_limit_bytes: that it was made under.
        parameters: how each is held, in graph order.
        ops: what each does, likewise.
        collectives: what follows from both.
        prediction: what it should cost.
        stats: how it was made.
        graph_hash: of the captured graph; a plan runs only on the graph that it was made for.
        config: text of the hand-written configuration that it stands for; empty for the automatic plan.
        pipeline: cut into stages and micro-batches.
        stages: predicted figures of every stage.
        links: what each axis of the grid communicates over; empty for a plan that was not made for a machine.
        alternatives: the shapes that were tried, best first.
        optimizer: whose state is counted in the memory.
        precision: what the model was asked to compute in (`autopar.Precision` as text); empty for what it computes in by itself.
        dtypes: what its products are priced in, ``float32``, that of most flops first; of a model without products what its ops give.
        sharing: how many times as fast a rank of the machine computes alone (`DeviceProfile.sharing`).
        offload: what lies in the memory of the host (`autopar.offload.Offload` as text); empty for nothing.
        compression: how gradients travel while they are reduced (`autopar.Compression` as text); empty: as they are.
        source: how the command line built the model; None for plans made in Python.
    """

    model: str
    mesh: Mesh
    machine: str
    batch: Mapping[str, str]
    memory_limit_bytes: int
    parameters: tuple[ParameterPlan, ...]
    ops: tuple[OpPlan, ...]
    collectives: tuple[CollectivePlan, ...]
    prediction: Prediction
    stats: Stats
    graph_hash: str
    config: str = ""
    pipeline: Pipeline = field(default=Pipeline())
    stages: tuple[StagePlan, ...] = field(default=())
    links: tuple[LinkPlan, ...] = field(default=())
    alternatives: tuple[Alternative, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    optimizer: str = "adamw"
    precision: str = ""
    dtypes: tuple[str, ...] = ()
    sharing: float = 1.0
    offload: str = ""
    compression: str = ""
    source: Recipe | None = field(default=None)

    @property
    def grid(self) -> Mesh:
        """The mesh of all ranks."""
        return self.pipeline.grid(self.mesh)

    def parameter(self, name: str) -> ParameterPlan:
        """The plan of a parameter, by any of its names; PlanError if there is none."""
        for entry in self.parameters:
            if name == entry.name or name in entry.aliases:
                return entry
        raise PlanError(f"the plan has no parameter {name!r}")

    @no_collection()
    def to_json(self) -> str:
        """The plan as text, which `from_json` reads."""
        data = {f.name: getattr(self, f.name) for f in fields(Plan)}
        return json.dumps(data | {"format": FORMAT, "mesh": str(self.mesh)}, indent=1, default=_plain)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`; PlanError if the text is not a plan of this version."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"not a plan: the text is not JSON ({error})") from error
        found = data.pop("format", None) if isinstance(data, dict) else None
        if found != FORMAT:
            raise PlanError(f"not a plan of format {FORMAT} (found {found}); make it again with autopar.plan")
        try:
            plan: Plan = read(Plan, data, {Mesh: Mesh.parse, Piece: Piece.parse}, _SIGNED)
        except MeshError as error:
            raise PlanError(f"not a plan: {error}; make it again with autopar.plan") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file holds something else.
        """
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except (PlanError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: {error}") from error


def _plain(value: Any) -> dict[str, Any]:
    """The fields of what JSON does not know; `dataclasses.asdict` would copy all that is in them, which takes ten times as long."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"a plan holds a {type(value).__name__}, which JSON cannot")
    data = {f.name: getattr(value, f.name) for f in fields(value)}
    return data | {"inside": [str(piece) for piece in value.inside]} if isinstance(value, StagePlan) else data
