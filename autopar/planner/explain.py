"""Why this layout: the chosen variant of one parameter or op against the alternatives, each solved again with the alternative fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.errors import InfeasibleError, PlanError
from autopar.plan import Plan
from autopar.solve.decide import Decision
from autopar.solve.intra import Solution, solve
from autopar.solve.names import find_by_name
from autopar.solve.prices import Prices
from autopar.solve.problem import Cluster
from autopar.units import number_text, seconds_text

MAX_ALTERNATIVES = 16
ROUNDING = 1e-3
"""How far the step of the program and that of the plan may be apart and not be told, as a part of it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout of what is explained, with the rest of the plan solved again around it.

    Args:
        layout: of the parameter, or the factor and the result of the op, per axis.
        is_in_force: whether the plan has it.
        step_time_s: of the program in which it is decided; None where there is no such plan.
        memory_bytes: of a rank; None where there is no such plan.
        reason: why there is none; else empty.
    """

    layout: str
    is_in_force: bool
    step_time_s: float | None
    memory_bytes: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a parameter or op lies as it does: ``about`` it in words, and its choices, the best first."""

    name: str
    about: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        base = next(choice.step_time_s for choice in self.choices if choice.is_in_force)
        assert base is not None
        lines = [self.about, f"{'layout':<34}{'step':>12}{'against':>10}{'memory':>12}"]
        return "\n".join([*lines, *(_row(choice, base) for choice in self.choices)])


def explain(decision: Decision, name: str, *, plan: Plan) -> Explanation:
    """Solve again around each alternative.

    Args:
        decision: the solved problem.
        name: a parameter (by any of its names) or an op (by the name of its node).
        plan: that of the decision, under whose memory limit the alternatives are solved.

    Raises:
        PlanError: there is none of this name.
    """
    node = find_by_name(decision.problem, name)[1]
    index = decision.problem.cluster_of[node]
    cluster = decision.problem.clusters[index]
    chosen = decision.solution.variants[index]
    prices = decision.prices
    found = [_choice(variant_text(cluster, chosen, node), prices, decision.solution, is_in_force=True)]
    for variant in alternatives_of(cluster, chosen):
        label = variant_text(cluster, variant, node)
        allowed = [*decision.allowed[:index], (variant,), *decision.allowed[index + 1 :]]
        try:
            found.append(_choice(label, prices, solve(prices, memory_limit_bytes=plan.memory_limit_bytes, allowed=allowed)))
        except PlanError as error:
            found.append(Choice(label, False, None, None, "does not fit" if isinstance(error, InfeasibleError) else "no way"))
    found.sort(key=lambda choice: math.inf if choice.step_time_s is None else choice.step_time_s)
    return Explanation(name, _title(decision, cluster, node, name) + _played_text(decision, plan), tuple(found))


def _played_text(decision: Decision, plan: Plan) -> str:
    """The step of the plan where that of its program is another."""
    step_s, stages = plan.prediction.step_time_s, plan.pipeline.stages
    if math.isclose(decision.solution.objective.total_s, step_s, rel_tol=ROUNDING):
        return ""
    played = f"played in {number_text(stages, 'stage')} " if stages > 1 else ""
    return f"; step is of all ops one after the other, as the solver counts them, and {played}the plan takes {seconds_text(step_s)}"


def _title(decision: Decision, cluster: Cluster, node: fx.Node, name: str) -> str:
    factors = decision.problem.factors
    if node.op == "placeholder":
        told = "factors " + " x ".join("".join(f"({a})" for a in dim) if len(dim) > 1 else str(dim[0]) for dim in factors.of(node))
    else:
        told = f"rule {rule}" if (rule := factors.rules.get(node)) else "no rule: replicated"
    times = f", {cluster.multiplicity} times in the model" if cluster.multiplicity > 1 else ""
    along = f", decided with {cluster.leader.name}" if node is not cluster.leader else ""
    axes = ", ".join(decision.problem.mesh.names)
    return f"{name}: {told}{times}{along}; layouts on axes ({axes}), * is in force, the rest of the plan is solved again around each"


def alternatives_of(cluster: Cluster, chosen: int) -> Iterator[int]:
    """Variants that differ from the chosen one on one axis, then the others, up to a limit."""
    mine = cluster.variants[chosen]

    def distance(v: int) -> int:
        return sum(a != b for a, b in zip(mine, cluster.variants[v], strict=True))

    others = sorted((v for v in range(len(cluster.variants)) if v != chosen), key=distance)
    yield from others[:MAX_ALTERNATIVES]


def variant_text(cluster: Cluster, variant: int, node: fx.Node) -> str:
    """``S0 R`` for how a parameter is held, ``b:S0 n:S1`` for what an op of a cluster is split on and how its result lies; with the same of
    the op that it is decided with where that alone tells variants apart."""
    if node.op == "placeholder":
        return " ".join(cluster.choice_names(variant))
    own = _split_text(cluster, variant, node)
    if sum(_split_text(cluster, other, node) == own for other in range(len(cluster.variants))) == 1:
        return own
    return f"{own} with {_split_text(cluster, variant, cluster.leader)}"


def _split_text(cluster: Cluster, variant: int, node: fx.Node) -> str:
    picked = [choices[pick].members[node] for choices, pick in zip(cluster.choices, cluster.variants[variant], strict=True)]
    return " ".join(f"{choice.name}:{choice.results[0]}" for choice in picked)


def _choice(layout: str, prices: Prices, solution: Solution, *, is_in_force: bool = False) -> Choice:
    return Choice(layout, is_in_force, solution.objective.total_s, prices.memory(solution.variants).total)


def _row(choice: Choice, base: float) -> str:
    label = f"{'* ' if choice.is_in_force else '  '}{choice.layout}"
    if choice.step_time_s is None or choice.memory_bytes is None:
        return f"{label:<34}{choice.reason:>12}"
    step = choice.step_time_s
    return f"{label:<34}{step * 1e3:>9.3f} ms{step / base:>9.3f}x{choice.memory_bytes / 2**20:>9.1f} MiB"
