"""Hand-written configurations: the plan that a Megatron-style user would write, made of the same rules and run by the same runtime.

On axis ``dp`` every op is split on the batch and every parameter is whole or a ZeRO shard; on axis ``replica``, outside of it, parameters
are whole. On axis ``tp`` nothing is split on the batch, every weight of a product that can be is split by columns or rows, in pairs as
Megatron's (`solve.pairs`; as is cheaper where a model has none), and the vocabulary is split where it divides. Axis ``ep`` is a part of
data parallelism on which parameters of experts are split by experts, and the ops that read them; the all-to-alls follow.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.callers import user_level
from autopar.errors import MeshError, PlanError
from autopar.graph import Value, operands_of, outputs_of, source_name, specs_of
from autopar.mesh import Mesh
from autopar.offload import AUTO, Offload
from autopar.passes.microbatch import batch_size
from autopar.plan import Pipeline
from autopar.precision import Precision
from autopar.rules.strategies import Choice
from autopar.schedule.tables import SCHEDULES
from autopar.solve.experts import Experts, find_experts, no_experts_text, op_text, unclear_stacks
from autopar.solve.follow import Positions, batch_inputs, follow_inputs, sequence_inputs, splits, wide_inputs
from autopar.solve.pairs import COLUMN, EITHER, ROW, sides_of
from autopar.solve.pins import Allowed, consumers_of, is_parameter, parameter_roles, products_of
from autopar.solve.problem import Edge, Problem
from autopar.solve.recompute import LEVELS, share_of
from autopar.solve.shapes import Shape
from autopar.solve.ways import has_way
from autopar.storage import Held
from autopar.units import is_whole, number_text

aten = torch.ops.aten

REPLICA = "replica"
"""Axis whose ranks have data of their own and hold the same ZeRO shards."""


class UnusedSettingWarning(UserWarning):
    """A setting of a configuration could not be honoured for part of the model."""


@dataclass(frozen=True, slots=True)
class Manual:
    """Degrees of a hand-written configuration; missing ones are 1.

    Args:
        dp: data-parallel ranks (outer mesh axis).
        tp: tensor-parallel ranks (inner mesh axis).
        zero: ZeRO level on the data-parallel ranks, 0 to 3.
        sequence_parallel: let the activations between tensor-parallel regions be split on the sequence.
        pp: pipeline ranks (outermost mesh axis).
        schedule: ``gpipe``, ``1f1b``, ``zb-h1``, or ``interleaved:2`` for two stages per rank.
        microbatches: parts of the batch; by default as many as there are pipeline ranks.
        micro_batch: samples of one micro-batch on one data-parallel rank, in place of ``microbatches``.
        stages: names of the modules at which the second and later stages begin; by default the cut is found.
        recompute: what the backward computes again: ``none``, ``pointwise`` (all but products of matrices and fused attention, as the
            partitioner of ``torch.compile`` does), ``selective`` (all but products of matrices) or ``full`` (whole blocks). What is
            computed again is also gathered again: with ``sequence_parallel`` no gathered activations are kept then, as in Megatron.
            ``full:3/8`` is ``full`` in three of eight blocks of each rank and ``pointwise`` in the others.
        cp: context-parallel ranks (mesh axis between the other two), which share the sequence, dim 1 of the inputs; keys and values of an
            attention are gathered on them, and ZeRO shards over them too.
        ep: how many of the data-parallel ranks, next to each other, share the experts of a layer (a mesh axis inside of ``dp``, of which
            ``dp / ep`` ranks are left). All other parameters are data parallel on them too.
        experts: names of the parameters that stack experts on dim 0, with ``*``; by default those that the products tell (`find_experts`).
        replicas: in how many parts of the data-parallel ranks all hold the same ZeRO shards (a mesh axis outside of ``dp``, of which
            ``dp / replicas`` ranks are left), as FSDP's hybrid shards (HSDP): with as many as nodes, only gradients go between nodes.
        precision: what the model computes in (`autopar.Precision` as text): ``bf16``, ``bf16/bf16``, ``fp16``, ``fp32``; empty for what is
            asked for beside the configuration, or what its parameters are in.
        offload: what lies in the memory of the host (`autopar.offload.Offload` as text): ``optimizer``, ``parameters``, ``activations``, or
            several joined by ``+``; empty for what is asked for beside the configuration.
    """

    dp: int = 1
    tp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    micro_batch: int | None = None
    stages: tuple[str, ...] = ()
    recompute: str = "none"
    cp: int = 1
    precision: str = ""
    offload: str = ""
    ep: int = 1
    experts: tuple[str, ...] = ()
    replicas: int = 1

    def __post_init__(self) -> None:
        degrees = {name: getattr(self, name) for name in ("dp", "tp", "pp", "cp", "ep", "replicas")}
        if not all(is_whole(value) and value >= 1 for value in degrees.values()):
            given = ", ".join(f"{name}={value!r}" for name, value in degrees.items())
            raise PlanError(f"degrees of a Manual are whole numbers, at least 1, got {given}")
        if self.dp % self.replicas:
            raise PlanError(f"replicas are parts of the data-parallel ranks, so they divide dp; got dp={self.dp}, replicas={self.replicas}")
        if self.dp // self.replicas % self.ep:
            given = f"dp={self.dp}, replicas={self.replicas}, ep={self.ep}"
            raise PlanError(f"data-parallel ranks of a replica share the experts, so ep divides dp / replicas; got {given}")
        if not is_whole(self.zero) or self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero is a ZeRO level from 0 to 3, got {self.zero!r}")
        if self.microbatches is not None and self.micro_batch is not None:
            raise PlanError(f"give microbatches={self.microbatches} or micro_batch={self.micro_batch}, not both")
        for name, value in (("microbatches", self.microbatches), ("micro_batch", self.micro_batch)):
            if value is not None and not (is_whole(value) and value >= 1):
                raise PlanError(f"{name} is a whole number, at least 1, got {value!r}")
        if not isinstance(self.sequence_parallel, bool):
            raise PlanError(f"sequence_parallel is True or False, got {self.sequence_parallel!r}")
        try:
            share_of(self.recompute)
        except ValueError:
            raise PlanError(f"recompute is one of {', '.join(LEVELS)} or a share as full:3/8, got {self.recompute!r}") from None
        Precision.of(self.precision or None)
        if self.offload == AUTO:
            raise PlanError("a Manual says itself what it offloads; give offload='auto' beside it for the planner to choose")
        Offload.of(self.offload)
        _, per_rank = self._schedule()
        for name in ("stages", "experts"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if self.stages and len(self.stages) != self.pp * per_rank - 1:
            raise PlanError(
                f"stages names the beginnings of all stages but the first: {number_text(self.pp * per_rank - 1, 'module')} "
                f"for pp={self.pp} with {per_rank} per rank, got {len(self.stages)}"
            )

    def __str__(self) -> str:
        parts = [f"dp={self.dp}", f"tp={self.tp}", f"zero={self.zero}"]
        parts += [f"replicas={self.replicas}"] if self.replicas > 1 else []
        parts += [f"cp={self.cp}"] if self.cp > 1 else []
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        parts += ["sequence_parallel"] if self.sequence_parallel else []
        parts += [f"pp={self.pp}", self.schedule] if self.pp > 1 else []
        parts += [f"microbatches={self.microbatches}"] if self.microbatches is not None else []
        parts += [f"micro_batch={self.micro_batch}"] if self.micro_batch is not None else []
        parts += [f"stages={'+'.join(self.stages)}"] if self.stages else []
        parts += [f"experts={'+'.join(self.experts)}"] if self.experts else []
        parts += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        parts += [f"precision={self.precision}"] if self.precision else []
        parts += [f"offload={self.offload}"] if self.offload else []
        return f"Manual({', '.join(parts)})"

    def _schedule(self) -> tuple[str, int]:
        """Name of the schedule, and stages per rank."""
        name, _, count = self.schedule.partition(":") if isinstance(self.schedule, str) else ("", "", "?")
        if count and not count.isdecimal():
            raise PlanError(f"a schedule reads like '1f1b' or 'interleaved:2', got {self.schedule!r}")
        if name not in SCHEDULES:
            raise PlanError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
        return name, int(count or (2 if name == "interleaved" else 1))

    def grid(self, num_ranks: int) -> Mesh:
        """The mesh of all ranks that the degrees describe.

        Raises:
            MeshError: their product is not the number of ranks.
        """
        product = self.dp * self.cp * self.tp * self.pp
        if product != num_ranks:
            degrees = "dp * cp * tp * pp" if self.cp > 1 else "dp * tp * pp"
            ranks = number_text(product, "rank")
            raise MeshError(f"{self} needs {degrees} = {ranks}, but there are {num_ranks}; change a degree or the number of ranks")
        return Pipeline(degree=self.pp).grid(self.mesh)

    @property
    def mesh(self) -> Mesh:
        """The axes inside of a stage."""
        own = self.dp // (self.replicas * self.ep)
        axes = ((REPLICA, self.replicas), ("dp", own), ("ep", self.ep), ("cp", self.cp), ("tp", self.tp))
        names, sizes = zip(*((name, size) for name, size in axes if size > 1 or name in ("dp", "tp")), strict=True)
        return Mesh(names, sizes)

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards lie over."""
        return self.dp // self.replicas * self.cp

    def shape(self, batch_size: int) -> Shape:
        """How it cuts the grid, the batch and the model.

        Raises:
            PlanError: the micro-batch does not divide the batch.
        """
        name, per_rank = self._schedule()
        microbatches = self.microbatches or self.pp
        if self.micro_batch is not None:
            if batch_size % (self.dp * self.micro_batch):
                raise PlanError(
                    f"{self}: a batch of {batch_size} is not a multiple of dp * micro_batch = {self.dp * self.micro_batch}; change one"
                )
            microbatches = batch_size // (self.dp * self.micro_batch)
        pipeline = Pipeline(degree=self.pp, stages=self.pp * per_rank, microbatches=microbatches, schedule=name)
        return Shape(self.mesh, pipeline, self.stages, recompute=self.recompute)

    def __call__(self, problem: Problem, allowed: Allowed) -> Allowed:
        """Leave only the variants that the configuration means.

        Raises:
            PlanError: the batch cannot be split over ``dp``.
        """
        if self.zero and self.zero_ranks == 1:
            self._warn_unused(f"zero={self.zero} shards over {self._zero_text}; every parameter stays whole")
        if self.replicas > 1 and not self.zero:
            self._warn_unused(f"replicas={self.replicas} hold the same ZeRO shards, and with zero=0 there are none")
        self._check_batch(problem)
        self._check_sequence(problem)
        followed = _Followed(
            batch=follow_inputs(problem, batch_inputs(problem), dim=0),
            sequence=follow_inputs(problem, wide_inputs(problem) if self.cp > 1 else sequence_inputs(problem), dim=1),
            experts=self._find_experts(problem),
            sides=sides_of(problem),
            readers=_readers(problem),
        )
        unsharded: list[str] = []
        result = []
        for index, cluster in enumerate(problem.clusters):
            node = cluster.leader
            if is_parameter(cluster):
                rows = self._parameter_rows(problem, index, allowed[index], unsharded, followed)
            elif node.op == "placeholder":
                rows = allowed[index]
            else:
                rows = self._op_rows(problem, index, allowed[index], followed)
            result.append(rows)
        if self.zero and unsharded:
            some = f"{', '.join(unsharded[:4])}{' ...' if len(unsharded) > 4 else ''}"
            where = "" if len(self._of_data) == 1 else f", on {self._of_data[-1]} at least"
            self._warn_unused(f"no factor of {some} is divisible by {self._zero_text}; these parameters stay replicated{where}")
        return result

    def _find_experts(self, problem: Problem) -> Experts:
        """What is split on ``ep``.

        Raises:
            PlanError: there are no experts, or ``ep`` does not divide them.
        """
        if self.ep == 1:
            return Experts({}, {}, frozenset())
        found = find_experts(problem, self.experts)
        if not found.shards:
            raise PlanError(f"{self}: {no_experts_text(problem)}; or use ep=1, with tp to split each expert")
        for node, place in found.shards.items():
            count = problem.factors.of(node)[place.dim][place.atom]
            if count % self.ep:
                raise PlanError(
                    f"{self}: {source_name(Value(node))} has {count} experts (dim {place.dim} of {tuple(specs_of(node)[0].shape)}), which "
                    f"ep={self.ep} does not divide; use an ep that does"
                )
        others = list(unclear_stacks(problem, found))
        if others:
            some = f"{', '.join(others[:4])}{' ...' if len(others) > 4 else ''}"
            self._warn_unused(
                f"{some} may hold experts too, but no product tells so, and they are not split on ep; name all that do: experts=(...)"
            )
        return found

    def _warn_unused(self, what: str) -> None:
        warnings.warn(f"{self}: {what}", UnusedSettingWarning, stacklevel=user_level())

    def _check_batch(self, problem: Problem) -> None:
        rows = batch_size(problem.module)
        for node in batch_inputs(problem):
            size = specs_of(node)[0].shape[0]
            is_parted = size == rows and not (problem.split is not None and problem.split.is_average)
            parts = problem.microbatches if is_parted else 1
            if size >= rows and size % (self.dp * parts):
                split = f" in {parts} micro-batches of {size // parts}" if parts > 1 else ""
                raise PlanError(
                    f"{self}: input {node.meta['placeholder'].name} has a batch of {size}{split}, which dp={self.dp} does not divide; "
                    f"use a batch that is a multiple of {self.dp * parts}, or a smaller dp"
                )

    def _check_sequence(self, problem: Problem) -> None:
        sizes = {n.meta["placeholder"].name: specs_of(n)[0].shape[1] for n in wide_inputs(problem)}
        for name, size in sizes.items():
            if size % self.cp:
                raise PlanError(
                    f"{self}: input {name} has a sequence of {size} (dim 1), which cp={self.cp} does not divide; use a sequence that is a "
                    f"multiple of {self.cp}, or a smaller cp"
                )
        if self.cp > 1 and not sizes:
            raise PlanError(f"{self}: no input has a sequence (dim 1) for cp={self.cp} to share; use cp=1")

    @property
    def _zero_text(self) -> str:
        """The degrees that make up `zero_ranks`, and it."""
        product = "dp" + (" / replicas" if self.replicas > 1 else "") + (" * cp" if self.cp > 1 else "")
        return f"{product} = {self.zero_ranks}"

    @property
    def _tp_axis(self) -> int:
        return self.mesh.names.index("tp")

    @property
    def _of_data(self) -> tuple[str, ...]:
        """Axes whose ranks have data of their own; they stand before ``tp``."""
        return self.mesh.names[: self._tp_axis]

    def _parameter_rows(self, problem: Problem, index: int, rows: list[int], unsharded: list[str], followed: _Followed) -> list[int]:
        cluster, experts = problem.clusters[index], followed.experts
        stored, count = f"Z{self.zero}" if self.zero else "R", self._tp_axis
        fixed = {"ep": str(experts.shards[cluster.leader])} if cluster.leader in experts.shards else {}
        tp_names = self._weight_names(problem, index, fixed.get("ep"), followed) if self.tp > 1 else {"R"}
        of_data = [stored if size > 1 and name != REPLICA else "R" for name, size in zip(self._of_data, self.mesh.sizes, strict=False)]
        wishes = [(*of_data[:some], *("R",) * (count - some)) for some in range(count, -1, -1)]
        wishes = [tuple(fixed.get(axis, held) for axis, held in zip(self._of_data, wish, strict=True)) for wish in wishes]
        for wanted in dict.fromkeys(wishes):
            names = {v: cluster.choice_names(v) for v in rows}
            kept = [v for v in rows if names[v][:count] == wanted and names[v][count] in tp_names]
            if kept:
                unsharded += [cluster.leader.meta["placeholder"].name] if wanted != wishes[0] else []
                return kept
        return []

    def _weight_names(self, problem: Problem, index: int, experts: str | None, followed: _Followed) -> set[str]:
        """How a parameter may be held on ``tp``: as is meant, but whole where an op that reads it has no way with a shard."""
        wished, choices = self._wished_names(problem, index, experts, followed), problem.clusters[index].choices[self._tp_axis]
        readers = followed.readers.get(index, ())
        given = {choice.name: choice.gives for choice in choices if choice.name in wished}
        without = {name: [e for e in readers if not _takes(problem, e, self._tp_axis, gives[e.value])] for name, gives in given.items()}
        if any(not edges for edges in without.values()):
            return {name for name, edges in without.items() if not edges}
        if without:
            edge, *_ = next(iter(without.values()))
            assert edge.operand is not None
            name = source_name(Value(problem.clusters[index].leader))
            self._warn_unused(f"{name} stays whole on tp, since {op_text(edge.operand[0])} reads it and has no way with a shard of it")
        return {"R"}

    def _wished_names(self, problem: Problem, index: int, experts: str | None, followed: _Followed) -> set[str]:
        """How a parameter should be held on ``tp``: product weights by column or row, as they stand in pairs, vectors and what is added
        along with what they are added to; not by ``experts``."""
        cluster, tp = problem.clusters[index], self._tp_axis
        roles = {name: role for name, role in parameter_roles(problem, cluster).items() if name != experts}
        legal = {cluster.choices[tp][variant[tp]].name for variant in cluster.variants}
        columns, rows = ({name for name, role in roles.items() if role == kind and name in legal} for kind in ("column", "row"))
        targets = {node.target for node in consumers_of(problem, cluster)}
        if aten.embedding.default in targets:
            return rows or {"R"}
        long = [size for size in specs_of(cluster.leader)[0].shape if size > 1]
        products = products_of(problem, cluster.leader)
        if len(long) - (experts is not None) < 2 or not products:  # a vector, also of [1, n], or what is added
            return columns | {"R"}
        vocabulary = _feeds_loss(problem, consumers_of(problem, cluster))
        if columns and rows and not vocabulary:
            wanted = {followed.sides.get(product, EITHER) for product in products}
            return columns if wanted == {COLUMN} else rows if wanted == {ROW} else columns | rows
        return columns or {"R"}

    def _op_rows(self, problem: Problem, index: int, rows: list[int], followed: _Followed) -> list[int]:
        cluster, node = problem.clusters[index], problem.clusters[index].leader
        is_between = self.sequence_parallel and node.target is not aten.scaled_dot_product_attention.default  # that goes by heads
        banned = [followed.batch] if is_between else [followed.batch, followed.sequence]
        kept: list[tuple[int, int]] = []
        for v in rows:
            choices = [cluster.choices[axis][pick].members[node] for axis, pick in enumerate(cluster.variants[v])]
            if self.tp > 1 and any(splits(node, choices[self._tp_axis], positions) for positions in banned):
                continue
            of_data = list(zip(self._of_data, choices, strict=False))
            is_split = [followed.is_split(node, *pair) for pair in of_data]
            if all(split or followed.may_be_whole(node, *pair) for split, pair in zip(is_split, of_data, strict=True)):
                kept.append((sum(is_split), v))
        if not kept and followed.experts.reads(node):
            rule = problem.factors.rules.get(node, "none")
            raise PlanError(
                f"{self}: {op_text(node)} reads parameters of experts, and no way to split it by them is left (its rule: {rule}); compute "
                "all experts in one product (torch.einsum, torch.bmm), or use ep=1, with tp to split each expert"
            )
        most = max((count for count, _ in kept), default=0)
        return [v for count, v in kept if count == most]


def _names(argument: str, given: object) -> tuple[str, ...]:
    """The names that an argument has.

    Raises:
        PlanError: it is one text, whose letters would be names, or no texts.
    """
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise PlanError(f"{argument} is several names, as ('h.4', 'h.8') or ('h.4',), got {given!r}")
    return names


@dataclass(frozen=True, slots=True)
class _Followed:
    """Where the batch and the sequence of the inputs and the experts of the model are, which products make pairs (`sides_of`), and by
    cluster what goes from it to others."""

    batch: Positions
    sequence: Positions
    experts: Experts
    sides: Mapping[fx.Node, str]
    readers: Mapping[int, list[Edge]]

    def is_split(self, node: fx.Node, axis: str, choice: Choice) -> bool:
        """Whether an op is shared out on an axis of data as it is meant there.

        What experts read is split by them on ``ep``, and what else has a dim of experts may be. Tokens of an expert have no sequence: on
        ``cp`` they are shared by any of their dims.
        """
        if axis == "ep":
            by_experts = splits(node, choice, self.experts.positions)
            return by_experts or (not self.experts.reads(node) and splits(node, choice, self.batch))
        if axis == "cp" and self.experts.has(node) and _shares_tokens(node, choice, self.experts):
            return True
        return splits(node, choice, self.sequence if axis == "cp" else self.batch)

    def may_be_whole(self, node: fx.Node, axis: str, choice: Choice) -> bool:
        """Whether all ranks of an axis may do the same."""
        return not (axis == "ep" and self.experts.reads(node)) and _is_whole_or_partial(choice)


def _readers(problem: Problem) -> dict[int, list[Edge]]:
    found = defaultdict[int, list[Edge]](list)
    for edge in problem.edges:
        if edge.target is not None:
            found[edge.source].append(edge)
    return found


def _takes(problem: Problem, edge: Edge, axis: int, held: Held) -> bool:
    """Whether the reader of a parameter has a choice on an axis that takes it as it is held there."""
    assert edge.target is not None and edge.operand is not None
    wants = {choice.wants[edge.operand] for choice in problem.clusters[edge.target].choices[axis]}
    return any(has_way(held, want, is_parameter=True, needs_grad=True) for want in wants)


def _shares_tokens(node: fx.Node, choice: Choice, experts: Experts) -> bool:
    """Whether an op of experts is split by something that their parameters have not."""
    held = [place for value, place in zip(operands_of(node), choice.operands, strict=True) if value in experts.weights]
    is_split = any(place.is_sharded for place in (*choice.operands, *choice.results))
    return is_split and all(place.holds_whole for place in held) and not splits(node, choice, experts.positions)


def _is_whole_or_partial(choice: Choice) -> bool:
    return not any(placement.is_sharded for placement in (*choice.operands, *choice.results))


def _feeds_loss(problem: Problem, nodes: list[fx.Node]) -> bool:
    """Whether products end in a cross-entropy or in the model's outputs, through ops of one operand."""
    seen = set(nodes)
    stack = list(nodes)
    outputs = {value.node for value in outputs_of(problem.module.graph)}
    while stack:
        node = stack.pop()
        if node in outputs or node.target is aten.cross_entropy_loss.default:
            return True
        for user in node.users:
            if (user not in seen and len(user.all_input_nodes) == 1) or user.target is aten.cross_entropy_loss.default:
                seen.add(user)
                stack.append(user)
    return False
