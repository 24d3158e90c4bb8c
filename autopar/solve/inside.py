"""Staged decision -> what the actions of every stage are made of (`piece.Piece`): the sums of `inter.Costs`, term by term.

A forward goes through the ops in order: what an op has moved, then the op. A backward goes back: what is computed again of a block, the
op, what its gradient has moved. Neighbours of one module are one piece of computation, small collectives that travel together are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from torch import fx

from autopar.graph import Value, outputs_of, source_name, value_spec
from autopar.passes.buckets import BUCKET_NUM_BYTES, SMALL_NUM_BYTES
from autopar.passes.stages import cut_stages
from autopar.piece import COMPUTE, HOST, NO_AXIS, Piece
from autopar.resident import Resident
from autopar.solve.inter import Costs, Move
from autopar.solve.staged import Staged


def inside_of(staged: Staged) -> list[tuple[Piece, ...]]:
    """For every stage its pieces, phase by phase; those of a phase take what the price of its action says (`cost.simulate.StagePrice`)."""
    stages = staged.shape.pipeline.stages
    parts = cut_stages(staged.decision.problem.module, staged.stage_of, stages)
    in_two = staged.shape.schedule(training=any(staged.live)).is_in_two
    moves = {id(costs): _by_owner(costs, staged) for costs in staged.costs}
    residents = staged.decision.prices.footprint.residents(staged.decision.solution.variants)
    found = []
    for stage, part in enumerate(parts):
        costs = staged.costs_of(stage)
        nodes = [node for node in part.nodes if node in costs.ops]
        inside = _Stage(costs, stage, nodes, staged, moves[id(costs)], residents, in_two=in_two)
        pieces = [*inside.forward(), *inside.backward(), *inside.weights(), *inside.once()]
        parameters = {source_name(Value(node)): value_spec(Value(node)).is_vector for node in part.parameters}
        found.append((*_joined(pieces, parameters), *_shared(staged, stage), *_given(staged, stage, part.outputs)))
    return found


def _shared(staged: Staged, stage: int) -> Iterator[Piece]:
    """What a stage adds to the gradients of others, each with its part of the time of all."""
    price, pipeline = staged.prices[stage], staged.shape.pipeline
    for grad in staged.costs_of(stage).shared_grads(staged.stage_of, pipeline.degree) if price.shared_s else ():
        if stage in grad.stages:
            time_s = _rounded(price.shared_s * grad.num_bytes / price.shared_num_bytes)
            yield Piece("reduce", "all_reduce", pipeline.axis, time_s, 0.0, round(grad.num_bytes), 1, source_name(Value(grad.node)))


def _given(staged: Staged, stage: int, outputs: Sequence[int]) -> Iterator[Piece]:
    """What a stage broadcasts of its outputs, each with its part of the time of all."""
    costs, price, axis = staged.costs_of(stage), staged.prices[stage], staged.shape.pipeline.axis
    values = outputs_of(staged.decision.problem.module.graph)
    for position in outputs if price.output_s else ():
        num_bytes = costs.output_bytes(position)
        time_s = _rounded(price.output_s * num_bytes / price.output_num_bytes)
        yield Piece("output", "broadcast", axis, time_s, 0.0, num_bytes, 1, source_name(values[position]))


@dataclass(frozen=True, slots=True)
class _Moves:
    """What is moved, by op or stage and by phase, in order; in the forward of what an op has given; and the bytes of each op that go to
    the host."""

    given: Mapping[fx.Node, Sequence[Move]]
    by_owner: Mapping[tuple[fx.Node | int, str], Sequence[Move]]
    kept_bytes: Mapping[fx.Node, float]

    def of(self, owner: fx.Node | int, phase: str) -> Sequence[Move]:
        return self.by_owner.get((owner, phase), ())


def _by_owner(costs: Costs, staged: Staged) -> _Moves:
    given: dict[fx.Node, list[Move]] = defaultdict(list)
    by_owner: dict[tuple[fx.Node | int, str], list[Move]] = defaultdict(list)
    for move in (*costs.moves, *costs.once_moves(staged.stage_of)):
        by_owner[move.owner, move.phase].append(move)
        if move.value is not None and move.phase == "forward":
            given[move.value.node].append(move)
    return _Moves(given, by_owner, costs.prices.footprint.moved_by_op(costs.variants))


@dataclass(slots=True)
class _Stage:
    costs: Costs
    stage: int
    nodes: Sequence[fx.Node]
    staged: Staged
    moves: _Moves
    residents: Mapping[fx.Node, Mapping[str, Resident]]
    in_two: bool

    def forward(self) -> Iterator[Piece]:
        for node in self.nodes:
            before = [move for move in self.moves.of(node, "forward") if not _is_after(move)]
            yield from (self.moved(move) for move in before)
            yield self.computed("forward", node, self.costs.ops[node].forward_s)
            yield from (self.moved(move) for move in self.moves.of(node, "forward") if _is_after(move))

    def backward(self) -> Iterator[Piece]:
        again, blocks = self.staged.again, self.staged.blocks
        for _, together in groupby(reversed(self.nodes), key=lambda node: blocks.get(node, -1)):
            block = list(together)
            for node in reversed(block):
                if node in again:
                    yield self.computed("backward", node, self.costs.ops[node].forward_s, again=True)
                    waited = [move for move in self.moves.given.get(node, ()) if move.waited_s]
                    yield from (replace(self.moved(move), phase="backward", hidden_s=0.0) for move in waited)
            for node in block:
                yield from (self.moved(move) for move in self.moves.of(node, "backward") if _is_before(move))
                cost = self.costs.ops[node]
                yield self.computed("backward", node, cost.backward_s - (cost.weight_s if self.in_two else 0.0))
                yield from (self.moved(move) for move in self.moves.of(node, "backward") if not _is_before(move))

    def weights(self) -> Iterator[Piece]:
        if self.in_two:
            yield from (self.computed("weights", node, self.costs.ops[node].weight_s) for node in reversed(self.nodes))

    def once(self) -> Iterator[Piece]:
        """What is gathered and reduced once a step."""
        gathers, reduces = self.moves.of(self.stage, "gather"), self.moves.of(self.stage, "reduce")
        yield from (_as_action(self.moved(move)) for move in (*gathers, *reversed(reduces)))

    def computed(self, phase: str, node: fx.Node, time_s: float, *, again: bool = False) -> Piece:
        module = _short(node.meta.get("module", ""))
        resident = self.residents[node][phase]
        return Piece(phase, COMPUTE, NO_AXIS, time_s, 0.0, 0, 1, f"{module} again" if again else module, resident)

    def moved(self, move: Move) -> Piece:
        axis, value = HOST if move.axis < 0 else self.costs.prices.pricer.mesh.names[move.axis], move.value
        if value is None:
            assert isinstance(move.owner, fx.Node)
            num_bytes, name = round(self.moves.kept_bytes[move.owner]), move.owner.name
        else:
            spec, is_grad = value_spec(value), move.phase in ("backward", "reduce") and move.kind != "all_gather"
            width = spec.reduced_width if is_grad else spec.dtype.itemsize
            num_bytes, name = spec.numel * width // move.parts, source_name(value)
        return Piece(move.phase, move.kind, axis, move.waited_s, move.hidden_s, num_bytes, 1, name)


def _is_after(move: Move) -> bool:
    """Whether an op has this moved when it is done: its own result, or what is kept of it."""
    return move.value is None or move.value.node is move.owner


def _is_before(move: Move) -> bool:
    """Whether the backward of an op wants this first."""
    is_result = move.value is not None and move.value.node is move.owner
    return is_result or move.value is None or (move.value.node.op == "placeholder" and move.kind in ("all_gather", "copy"))


def _as_action(piece: Piece) -> Piece:
    """Of an action of its own, in which nothing lies beside computation."""
    return replace(piece, waited_s=piece.time_s, hidden_s=0.0)


def _short(module: str) -> str:
    """Up to the name after its first number: ``transformer.h.3.attn`` of ``transformer.h.3.attn.c_attn``."""
    parts = module.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: end + 2])


def _joined(pieces: Sequence[Piece], parameters: Mapping[str, bool]) -> Iterator[Piece]:
    """Neighbours of one module as one; small all-reduces, and collectives of vectors, in buckets, as `passes.buckets` and `passes.vectors`
    make them: gathers where the first of them is, what reduces where the last is; other small collectives of parameters of one module where
    the first is. ``parameters`` are names of parameters, and whether they are vectors."""
    slots: list[Piece | None] = []
    buckets: dict[tuple[str, ...], int] = {}
    timeless: dict[str, Resident] = {}
    for piece in pieces:
        if piece.is_compute:
            resident = max(timeless.pop(piece.phase, piece.resident), piece.resident, key=attrgetter("total"))
            if piece.waited_s:
                slots.append(replace(piece, resident=resident))
            else:
                timeless[piece.phase] = resident  # counts with what is computed next
            continue
        is_vector, place = parameters.get(piece.of, False), len(slots)
        is_bucket = piece.kind == "all_reduce" or (is_vector and piece.kind in ("all_gather", "reduce_scatter"))
        key = piece.phase, piece.kind, piece.axis, "" if is_bucket else _short(piece.of)
        is_small = piece.num_bytes < SMALL_NUM_BYTES and piece.of in parameters
        known = slots[buckets[key]] if is_small and key in buckets else None
        if known is not None:
            if is_bucket and piece.kind != "all_gather":
                slots[buckets[key]] = None
            else:
                place = buckets[key]
            together = known.count + piece.count
            sums = {name: getattr(known, name) + getattr(piece, name) for name in ("waited_s", "hidden_s", "num_bytes")}
            piece = replace(known, count=together, **sums)
        if place < len(slots):
            slots[place] = piece
        else:
            slots.append(piece)
        if is_small:
            buckets[key] = place
            if piece.num_bytes >= BUCKET_NUM_BYTES:
                del buckets[key]
    for (*_, is_compute), same in groupby(filter(None, slots), key=lambda p: (p.of, p.phase, p.is_compute)):
        group = list(same)
        found = group
        if is_compute:
            fullest = max((p.resident for p in group), key=attrgetter("total"))
            found = [replace(group[0], waited_s=sum(p.waited_s for p in group), resident=fullest)]
        yield from (replace(p, waited_s=_rounded(p.waited_s), hidden_s=_rounded(p.hidden_s)) for p in found)


def _rounded(time_s: float) -> float:
    """As many digits as a piece has as text."""
    return float(f"{time_s:.12g}")
