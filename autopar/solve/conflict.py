"""Which pins cannot hold together: of a set that leaves no plan, a part that leaves none either and of which no member can be spared.

Members are taken away one by one; one without which there is still no plan stays away (the deletion filter of Chinneck & Dravnieks 1991,
"Locating minimal infeasible constraint sets in linear programs", ORSA Journal on Computing 3(2)). What is left is irreducible; it is not
always the smallest, so that single members and pairs are tried first where that is cheap.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

from autopar.errors import ConflictError, PlanError
from autopar.graph import source_name
from autopar.solve.experts import op_text
from autopar.solve.intra import goes_together
from autopar.solve.manual import Manual
from autopar.solve.pins import Allowed, Pin, Restriction
from autopar.solve.prices import EdgeTable, Prices
from autopar.solve.problem import Edge, Problem

MAX_TRIALS = 16
"""How often the solver is asked whether a set of pins can hold, at most."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Conflict(Generic[T]):
    """Members that cannot hold together; ``is_proved`` if it is known of each that it cannot be spared."""

    members: tuple[T, ...]
    is_proved: bool = True


def find_conflict(members: Sequence[T], can_hold: Callable[[Sequence[T]], bool | None]) -> Conflict[T]:
    """An irreducible part of members that cannot hold together, by the deletion filter; of several, the one of the last members.

    Args:
        members: which cannot hold together.
        can_hold: whether some of them can, with less wherever more can; None if that was not found out, and the member in question stays.
    """
    kept, is_proved = list(members), True
    for member in members:
        rest = [other for other in kept if other is not member]
        possible = can_hold(rest)
        if possible is False:
            kept = rest
        is_proved &= possible is not None
    return Conflict(tuple(kept), is_proved)


def is_in_words(restriction: Restriction) -> bool:
    """Whether the user wrote it."""
    return isinstance(restriction, Pin | Manual)


def words(restriction: Restriction) -> str:
    return f"pin {restriction}" if isinstance(restriction, Pin) else str(restriction)


def left_by(problem: Problem, restrictions: Sequence[Restriction]) -> Allowed:
    """For each cluster the variants that restrictions leave.

    Raises:
        PlanError: there is a cluster for which they leave none.
    """
    allowed: Allowed = [list(range(len(cluster.variants))) for cluster in problem.clusters]
    for restriction in restrictions:
        allowed = restriction(problem, allowed)
    for cluster, rows in zip(problem.clusters, allowed, strict=True):
        if not rows:
            placeholder = cluster.leader.meta.get("placeholder")
            name = placeholder.name if placeholder else cluster.leader.name
            raise PlanError(
                f"the pins and the configuration together leave no way for {name} on mesh ({problem.mesh}); fix less of it"
            )
    return allowed


def explain_conflict(error: PlanError, prices: Prices, restrictions: Sequence[Restriction]) -> PlanError:
    """What to raise where restrictions leave nothing, whatever the memory: the smallest set of pins that is to blame, and why.

    Args:
        error: what was found, which is returned if a single pin is to blame, or what the user has not written.
        prices: of the problem that they were found on.
        restrictions: all of them.
    """
    fixed = [restriction for restriction in restrictions if not is_in_words(restriction)]
    pins = tuple(dict.fromkeys(restriction for restriction in restrictions if is_in_words(restriction)))
    trials = 0

    def leaves(chosen: Sequence[Restriction]) -> Allowed | PlanError:
        kept = [restriction for restriction in restrictions if restriction in fixed or restriction in chosen]
        try:
            return left_by(prices.problem, kept)
        except PlanError as found:
            return found

    def can_hold(chosen: Sequence[Restriction]) -> bool | None:
        nonlocal trials
        allowed = leaves(chosen)
        if isinstance(allowed, PlanError):
            return False
        if trials == MAX_TRIALS:
            return None
        trials += 1
        return goes_together(prices, allowed)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not pins or isinstance(leaves(()), PlanError):
            return error
        small = (some for size in (1, 2) for some in combinations(pins, size) if isinstance(leaves(some), PlanError))
        members = next(small, pins)
        found = find_conflict(members, can_hold) if len(members) > 1 else Conflict(members)
        why = leaves(found.members)
    if len(found.members) == 1 and isinstance(why, PlanError):
        return why
    names = tuple(map(words, found.members))
    because = str(why) if isinstance(why, PlanError) else _no_way(prices, why, is_one=len(names) == 1)
    return ConflictError(
        f"{_together(names, prices.problem)}; {because}. {'Take one of them away' if len(names) > 1 else 'Change it'}"
        + ("" if found.is_proved else f" (stopped after {MAX_TRIALS} trials: not all of them may be needed for it)"),
        members=names,
    )


def _no_way(prices: Prices, allowed: Allowed, *, is_one: bool) -> str:
    """What to say where each cluster has variants left, and they do not go together."""
    said = "what it fixes for one op does not go with what it fixes for another"
    text = said if is_one else "there is no way from what is fixed by one to what another wants"
    stuck = (_stuck(prices.problem, edge, axis, table, allowed) for (edge, axis), table in prices.tables.items())
    return next((f"{text}: {told}" for told in stuck if told), text)


def _stuck(problem: Problem, edge: Edge, axis: int, table: EdgeTable, allowed: Allowed) -> str:
    """What an edge cannot do on an axis, if it has no way between any variants that are left; else empty."""
    network, left = table.ways.network, set(allowed[edge.source])
    ways = {way for ways, sharded in zip(network.from_sources, table.sources.values(), strict=True) if left & {*sharded} for way in ways}
    if edge.target is not None:
        left = set(allowed[edge.target])
        ends = zip(network.to_targets, table.targets.values(), strict=True)
        ways &= {way for ways, sharded in ends if left & {*sharded} for way in ways}
    if ways:
        return ""
    to = op_text(edge.operand[0]) if edge.operand is not None else "the user"
    return f"{source_name(edge.value)} has no way to {to} on axis {problem.mesh.names[axis]}"


def _together(names: Sequence[str], problem: Problem) -> str:
    subject = "these cannot hold together" if len(names) > 1 else "this cannot hold"
    return f"{subject} on mesh ({problem.mesh}): {', '.join(names)}"
