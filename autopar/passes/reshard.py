"""From one layout to another, in single-axis operations, cheap ones first.

Axes that share an atom nest, so an axis can be dropped only while it is the minor one there, and taken only after the axes that are
major to it. Where the nestings of source and target conflict, the conflicting axes are gathered and sliced again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.layout import REPLICATED, REPLICATED_PARTIAL_GRAD, Layout, Placement
from autopar.ops import collectives
from autopar.ops.collectives import Spot
from autopar.storage import Held, Stored
from autopar.transitions import transition

Atom = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of `autopar.ops.collectives` on one axis, with its keyword arguments."""

    op: Callable[..., Any]
    axis: int
    arguments: tuple[tuple[str, object], ...]
    local_shape: tuple[int, ...]

    @property
    def copies(self) -> bool:
        """Whether the parts that it gathers are copied, since they do not lie one after the other in the result."""
        spot = dict(self.arguments).get("spot") if self.op is collectives.all_gather else None
        return isinstance(spot, Spot) and math.prod(self.local_shape[: spot.dim]) * spot.before > 1

    def __str__(self) -> str:
        return f"{self.op.__name__}({', '.join(f'{k}={v}' for k, v in self.arguments)})"


@dataclass(frozen=True, slots=True)
class _State:
    """Placements on the way, with the axes of every atom, major first."""

    layout: Layout
    placements: tuple[Placement, ...]
    nests: tuple[tuple[Atom, tuple[int, ...]], ...]

    @staticmethod
    def of(layout: Layout) -> _State:
        atoms = [(dim, atom) for dim, sizes in enumerate(layout.atoms) for atom in range(len(sizes))]
        nests = tuple((key, tuple(layout.axes(*key))) for key in atoms if layout.axes(*key))
        return _State(layout, layout.placements, nests)

    def axes(self, atom: Atom) -> tuple[int, ...]:
        return dict(self.nests).get(atom, ())

    def local_atom(self, dim: int, atom: int) -> int:
        shards = math.prod(self.layout.mesh.sizes[axis] for axis in self.axes((dim, atom)))
        return self.layout.atoms[dim][atom] // shards

    def local_shape(self) -> tuple[int, ...]:
        return tuple(
            math.prod(self.local_atom(dim, atom) for atom in range(len(sizes))) for dim, sizes in enumerate(self.layout.atoms)
        )

    def spot(self, atom: Atom) -> Spot:
        return Spot(atom[0], math.prod(self.local_atom(atom[0], a) for a in range(atom[1])))

    def moved(self, axis: int, target: Placement) -> _State:
        """The state after ``axis`` has gone to ``target``; it becomes the minor axis of its new atom."""
        nests = {key: tuple(a for a in axes if a != axis) for key, axes in self.nests}
        if target.is_sharded:
            key = (target.dim, target.atom)
            nests[key] = (*nests.get(key, ()), axis)
        placements = (*self.placements[:axis], target, *self.placements[axis + 1 :])
        return replace(self, placements=placements, nests=tuple((k, v) for k, v in nests.items() if v))


def plan_steps(source: Layout, target: Layout, *, needs_grad: bool) -> list[Step]:
    """Operations that carry a tensor from ``source`` to ``target``; both have the same mesh and atoms."""
    assert source.mesh == target.mesh and source.atoms == target.atoms, (source, target)
    state, goal = _State.of(_without_grad(source, needs_grad)), _State.of(_without_grad(target, needs_grad))
    steps: list[Step] = []
    while (state.placements, sorted(state.nests)) != (goal.placements, sorted(goal.nests)):
        axis, to = _next_move(state, goal)
        after = state.moved(axis, to)
        steps.append(_step(state, after, axis, needs_grad=needs_grad))
        state = after
    return steps


def joining_elements(source: Layout, target: Layout) -> int:
    """Elements that carrying a tensor to a layout takes beside what it becomes, at most: of the step before the last what that is made of,
    or where the parts that the last one gathers do not lie one after the other, these, which are copied into their places."""
    steps = plan_steps(source, target, needs_grad=False)
    if not steps:
        return 0
    taken = steps[-2].local_shape if len(steps) > 1 else _State.of(source).local_shape()
    return max(math.prod(taken), math.prod(steps[-1].local_shape) if steps[-1].copies else 0)


def plan_parameter_steps(stored: Layout, held: Sequence[Held], wanted: Sequence[Placement], *, needs_grad: bool) -> list[Step]:
    """Operations that carry a parameter from where it is stored to where an op wants it.

    Its ZeRO axes are gathered before it is sliced or shared out on others: what they move then depends on how it is held alone, and all
    ops that read it have one gathered copy.
    """
    whole = [want if isinstance(h, Stored) or h.is_sharded or want.holds_whole else h for h, want in zip(held, wanted, strict=True)]
    use = Layout(stored.mesh, stored.atoms, tuple(whole if any(isinstance(h, Stored) for h in held) else wanted))
    goal = Layout(stored.mesh, stored.atoms, tuple(wanted))
    return [*plan_steps(stored, use, needs_grad=needs_grad), *plan_steps(use, goal, needs_grad=needs_grad)]


def _without_grad(layout: Layout, needs_grad: bool) -> Layout:
    if needs_grad:
        return layout
    plain = tuple(REPLICATED if p == REPLICATED_PARTIAL_GRAD else p for p in layout.placements)
    return replace(layout, placements=plain)


_ORDER = ("shard_slice", "share", "reduce_scatter", "all_to_all", "replicate", "all_reduce", "all_gather")
"""What shrinks the tensor comes first, what makes it grow comes last."""


def _next_move(state: _State, goal: _State) -> tuple[int, Placement]:
    moves = []
    for axis, (have, want) in enumerate(zip(state.placements, goal.placements, strict=True)):
        if have == want:
            continue
        step = transition(have, want, needs_grad=True, in_time=axis == state.layout.mesh.time_axis)
        if step is None:
            raise AssertionError(f"no way from {have} to {want} on axis {axis}")
        if _can_leave(state, axis) and _can_enter(state, goal, axis, want):
            moves.append((_ORDER.index(step.op), axis, want))
    if moves:
        _, axis, want = min(moves)
        return axis, want
    return _conflicting(state, goal), REPLICATED


def _can_leave(state: _State, axis: int) -> bool:
    placement = state.placements[axis]
    return not placement.is_sharded or state.axes((placement.dim, placement.atom))[-1] == axis


def _can_enter(state: _State, goal: _State, axis: int, want: Placement) -> bool:
    if not want.is_sharded:
        return True
    atom = (want.dim, want.atom)
    final = goal.axes(atom)
    present = tuple(a for a in state.axes(atom) if a != axis)
    return present == final[: final.index(axis)]


def _conflicting(state: _State, goal: _State) -> int:
    """A minor axis that has to be gathered, because an axis that must go or come is blocked by it."""
    for atom, axes in state.nests:
        final = goal.axes(atom)
        if axes != final[: len(axes)]:
            return axes[-1]
    for atom, axes in state.nests:
        blocked = [a for a, want in enumerate(goal.placements) if want.is_sharded and (want.dim, want.atom) == atom]
        if set(blocked) - set(axes):
            return axes[-1]
    raise AssertionError(f"no move from {state.placements} {state.nests} to {goal.placements} {goal.nests}")


def _step(state: _State, after: _State, axis: int, *, needs_grad: bool) -> Step:
    mesh = state.layout.mesh
    have, want = state.placements[axis], after.placements[axis]
    found = transition(have, want, needs_grad=True, in_time=axis == mesh.time_axis)
    assert found is not None
    arguments: dict[str, object] = {"axis": mesh.names[axis]}
    if found.op not in ("replicate", "all_reduce"):
        arguments["size"] = mesh.sizes[axis]
    if found.op == "all_to_all":
        scattered = state.moved(axis, REPLICATED).moved(axis, want)
        arguments["gather"] = scattered.spot((have.dim, have.atom))
        arguments["scatter"] = state.spot((want.dim, want.atom))
    elif found.op == "all_gather":
        arguments["spot"] = state.spot((have.dim, have.atom))
    elif found.op in ("shard_slice", "reduce_scatter"):
        arguments["spot"] = state.spot((want.dim, want.atom))
    if found.op in ("all_gather", "all_reduce"):
        arguments["partial_grad"] = want == REPLICATED_PARTIAL_GRAD
    if found.op in ("shard_slice", "share"):
        arguments["partial_grad"] = have == REPLICATED_PARTIAL_GRAD
    return Step(getattr(collectives, found.op), axis, tuple(arguments.items()), after.local_shape())


