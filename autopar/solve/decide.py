"""Problem -> decision: solve under pins."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from torch import fx

from autopar.compression import Compression
from autopar.cost.machine import MachineProfile
from autopar.cost.pricing import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.offload import NOTHING, Offload
from autopar.solve.conflict import explain_conflict, left_by
from autopar.solve.intra import Solution, Solving, Starts
from autopar.solve.liveness import Staging
from autopar.solve.pins import Restriction
from autopar.solve.prices import Prices
from autopar.solve.problem import Problem
from autopar.units import number_text

PLAN_GAP = 5e-3
"""A plan within this part of the optimum is good enough: prices are less certain than that."""
PLAN_TIME_LIMIT_S = 20.0
"""Limit of one call of the solver; the gap that was reached then stands in the plan."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A solved problem; ``allowed`` are the variants that pins left to each cluster."""

    problem: Problem
    prices: Prices
    solution: Solution
    allowed: tuple[tuple[int, ...], ...]

    @property
    def unsharded_s(self) -> float:
        """Seconds of all ops, forward and backward, on one rank that has them whole."""
        total = 0.0
        for cluster, times in zip(self.problem.clusters, self.prices.times, strict=True):
            whole = [v for v in range(len(cluster.variants)) if set(cluster.choice_names(v)) == {"R"}]
            if whole:
                total += cluster.multiplicity * float((times.forward_s + times.backward_s)[whole[0]])
        return total


class Settings(TypedDict, total=False):
    """Of `Deciding`, what differs between calls for one search."""

    explain: bool
    worth_s: float
    like: Decision | None


class Deciding:
    """A variant is being chosen for every cluster, beside what else its caller does until it wants the `result`.

    Args:
        problem: clusters that have the tags of the pins (`pin_tags`).
        machine: prices, one link per axis in space.
        memory_limit_bytes: per rank, as for `Solving`.
        restrictions: pins; each takes variants away.
        optimizer: for the bytes of its state.
        training: price a backward and an optimizer step too.
        offload: what lies on the host.
        compression: how gradients travel.
        staging: pipeline stages, each of which has the memory limit for itself; one stage if None.
        explain, worth_s, starts: as for `Solving`.
        like: of the same program in another graph (`fold`): what it decided is taken, and decided again only if the clusters differ.

    Raises:
        ConflictError: a pin leaves nothing.
    """

    def __init__(
        self,
        problem: Problem,
        machine: MachineProfile,
        *,
        memory_limit_bytes: float,
        restrictions: Sequence[Restriction] = (),
        optimizer: str = "adamw",
        training: bool = True,
        offload: Offload = NOTHING,
        compression: Compression | None = None,
        staging: Staging | None = None,
        explain: bool = True,
        worth_s: float = math.inf,
        like: Decision | None = None,
        starts: Starts | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        mesh = problem.mesh.in_space
        pricer = Pricer(machine.for_mesh(mesh), problem.mesh, optimizer, training, offload, compression)
        self._prices, self._restrictions = Prices(problem, pricer, staging), restrictions
        try:
            self._allowed = tuple(map(tuple, left_by(problem, restrictions)))
        except PlanError as error:
            raise self._explained(error) from error
        self._alike = _solution_like(self._prices, like) if like is not None else None
        if self._alike is not None:
            return
        clusters, variants = number_text(len(problem.clusters), "cluster"), number_text(sum(map(len, self._allowed)), "variant")
        report(f"solving for mesh ({mesh}): {clusters}, {variants}")
        self._solving = Solving(
            self._prices,
            memory_limit_bytes=memory_limit_bytes,
            allowed=self._allowed,
            report=report,
            gap=PLAN_GAP,
            time_limit_s=PLAN_TIME_LIMIT_S,
            explain=explain,
            worth_s=worth_s,
            starts=starts,
        )

    def leave(self) -> None:
        """End it without a result."""
        if self._alike is None:
            self._solving.leave()

    def result(self) -> Decision:
        """The decision.

        Raises:
            InfeasibleError: nothing fits.
            ConflictError: pins leave nothing together.
        """
        try:
            solution = self._alike or self._solving.result()
        except InfeasibleError:
            raise
        except PlanError as error:
            raise self._explained(error) from error
        return Decision(self._prices.problem, self._prices, solution, self._allowed)

    def _explained(self, error: PlanError) -> PlanError:
        return explain_conflict(error, self._prices, self._restrictions)


def _solution_like(prices: Prices, like: Decision) -> Solution | None:
    """What was decided for clusters that are called alike, with what it costs here; None if they are not the same clusters."""
    variants = _variants_like(prices.problem, like)
    if variants is None:
        return None
    return replace(like.solution, variants=variants, objective=prices.objective(variants))


def _variants_like(problem: Problem, like: Decision) -> tuple[int, ...] | None:
    """The variants of clusters that are called alike; None if they are not the same clusters."""
    known = {cluster.leader.name: (cluster, v) for cluster, v in zip(like.problem.clusters, like.solution.variants, strict=True)}
    if len(known) != len(problem.clusters):
        return None
    variants = []
    for cluster in problem.clusters:
        other, v = known.get(cluster.leader.name, (None, 0))
        if other is None or other.variants != cluster.variants or other.multiplicity != cluster.multiplicity:
            return None
        variants.append(v)
    return tuple(variants)


def graph_hash(module: fx.GraphModule) -> str:
    """Hash of a normal graph: ops, arguments, shapes and parameter names."""
    digest = hashlib.sha256()
    for node in module.graph.nodes:
        placeholder = node.meta.get("placeholder")
        line = f"{node.name} {node.op} {node.target} {_without_device(node)} {node.meta.get('specs')} {placeholder}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def _without_device(node: fx.Node) -> str:
    kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
    return f"{node.args} {kwargs}"
