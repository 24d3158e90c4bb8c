"""Pins: what the user fixes before the solver chooses.

``pin("transformer.h.*.mlp.c_fc.weight", tp="column")`` fixes parameters (or ops, by node name) on the axes named. A parameter may be
``column`` (sharded on a factor of its consumer's result), ``row`` (on a summed factor), ``replicated``, ``zero1``, ``zero2``, ``zero3``,
or a placement such as ``S0.1``; an op takes the name of a choice: a factor of its rule, ``R`` or ``R*``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from autopar.capture.trace import Placeholder, Source
from autopar.errors import PlanError
from autopar.graph import Value, operands_of, value_of
from autopar.layout import Placement
from autopar.plan import Plan
from autopar.solve.problem import Cluster, Problem

Allowed = list[list[int]]
Restriction = Callable[[Problem, Allowed], Allowed]
"""Takes variants away: for each cluster the numbers of those that stay."""

_WORDS = {"replicated": "R", "zero1": "Z1", "zero2": "Z2", "zero3": "Z3"}


@dataclass(frozen=True, slots=True)
class Pin:
    """A pattern of names and, per mesh axis, what is fixed. Prints as on the command line: ``h.*.c_attn.weight:tp=S1.1``."""

    pattern: str
    axes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(f'{axis}={wanted}' for axis, wanted in self.axes)}"

    def __call__(self, problem: Problem, allowed: Allowed) -> Allowed:
        """Restrict the clusters that the pattern names.

        Raises:
            PlanError: it names nothing, an axis is not there, or nothing is left to choose.
        """
        named = set(_named(problem, self.pattern))
        if not named:
            some = [entry.name for entry in _parameters(problem)][:6]
            raise PlanError(
                f"pin {self.pattern!r} matches no parameter and no op; parameters are named like {', '.join(some)}, ops as in plan.graph"
            )
        allowed = [list(rows) for rows in allowed]
        for index in sorted(named):
            for axis_name, wanted in self.axes:
                axis = problem.mesh.index(axis_name)
                allowed[index] = self._restrict(problem, index, axis, wanted, allowed[index])
        return allowed

    def _restrict(self, problem: Problem, index: int, axis: int, wanted: str, rows: list[int]) -> list[int]:
        cluster = problem.clusters[index]
        fitting = _fitting(problem, cluster, axis, wanted)
        kept = [v for v in rows if cluster.choices[axis][cluster.variants[v][axis]].name in fitting]
        if not kept:
            legal = sorted({cluster.choices[axis][cluster.variants[v][axis]].name for v in rows})
            name = _display_name(cluster.leader)
            atoms = " x ".join("".join(f"({a})" for a in dim) for dim in problem.factors.of(cluster.leader))
            raise PlanError(
                f"pin {self.pattern!r}: {name} (factors {atoms}) cannot be {wanted!r} on axis "
                f"{problem.mesh.names[axis]!r} of size {problem.mesh.sizes[axis]}; what it can be there: {', '.join(legal)}"
            )
        return kept


def pin(pattern: str, **axes: str) -> Pin:
    """Fix how parameters or ops whose names match ``pattern`` (with ``*``) lie on the named mesh axes."""
    if not axes:
        raise PlanError(f"pin({pattern!r}) fixes nothing; name a mesh axis, for example tp='column'")
    if not (isinstance(pattern, str) and pattern and all(isinstance(wanted, str) for wanted in axes.values())):
        given = ", ".join((repr(pattern), *(f"{axis}={wanted!r}" for axis, wanted in axes.items())))
        raise PlanError(f"pin({given}) takes text: a pattern, and what is fixed on each axis, as pin('*.c_fc.weight', tp='column')")
    return Pin(pattern, tuple(axes.items()))


def pins_of(constraints: Sequence[Pin] | Pin) -> tuple[Pin, ...]:
    """Pins as a call gives them, several or one.

    Raises:
        PlanError: one of them is no pin.
    """
    pins = (constraints,) if isinstance(constraints, Pin) or not isinstance(constraints, Iterable) else tuple(constraints)
    for other in pins:
        if not isinstance(other, Pin):
            raise PlanError(
                f"constraints are pins, such as autopar.pin('*.c_fc.weight', tp='column'), got {other!r}; a Manual, or a plan that was "
                "saved, is given as plan="
            )
    return pins


def pin_tags(module: fx.GraphModule, restrictions: Sequence[Restriction]) -> dict[fx.Node, tuple[str, ...]]:
    """For each node the pins that name it, so that a pin of one block does not fix the others."""
    pins = [restriction for restriction in restrictions if isinstance(restriction, Pin)]
    tags = {}
    for node in module.graph.nodes:
        matched = tuple(p.pattern for p in pins if any(fnmatchcase(name, p.pattern) for name in _names(node)))
        if matched:
            tags[node] = matched
    return tags


def keep_parameters(plan: Plan) -> Restriction:
    """Parameters stay as another plan of the same model holds them (evaluation, other batch sizes)."""

    def restrict(problem: Problem, allowed: Allowed) -> Allowed:
        allowed = [list(rows) for rows in allowed]
        held = {entry.name: entry.held for entry in plan.parameters}
        for index, cluster in enumerate(problem.clusters):
            node = cluster.leader
            if node.op == "placeholder" and node.meta["placeholder"].source is Source.PARAMETER:
                wanted = held[node.meta["placeholder"].name]
                allowed[index] = [v for v in allowed[index] if cluster.choice_names(v)[: len(wanted)] == wanted]
        return allowed

    return restrict


def _parameters(problem: Problem) -> list[Placeholder]:
    entries = [node.meta["placeholder"] for node in problem.module.graph.find_nodes(op="placeholder")]
    return [entry for entry in entries if entry.source is Source.PARAMETER]


def _display_name(node: fx.Node) -> str:
    return node.meta["placeholder"].name if node.op == "placeholder" else node.name


def _names(node: fx.Node) -> tuple[str, ...]:
    """Names by which a pin may mean a node: those of a parameter, or the op's own."""
    if node.op != "placeholder":
        return (node.name,)
    entry = node.meta["placeholder"]
    return (entry.name, *entry.aliases) if entry.source is Source.PARAMETER else ()


def _named(problem: Problem, pattern: str) -> Iterable[int]:
    for node, shared in problem.shared.items():
        if any(fnmatchcase(name, pattern) for name in _names(node)):
            yield problem.cluster_of[shared]


def _fitting(problem: Problem, cluster: Cluster, axis: int, wanted: str) -> set[str]:
    """Names of the choices on an axis that a word of a pin means."""
    if wanted not in ("column", "row"):
        return {_WORDS.get(wanted, wanted)}
    roles = parameter_roles(problem, cluster)
    return {name for name, role in roles.items() if role == wanted}


def parameter_roles(problem: Problem, cluster: Cluster) -> Mapping[str, str]:
    """For each shard of a parameter by name (``S0.1``): ``column`` if its consumer's result is sharded by it, ``row`` if summed; none if it
    must be whole there.

    Of several consumers the first counts: a tied embedding is an embedding.
    """
    value = Value(cluster.leader)
    roles: dict[str, str] = {}
    for edge in problem.edges:
        if edge.value != value or edge.operand is None:
            continue
        node, position = edge.operand
        rule = problem.factors.rules.get(node)
        if rule is None:
            continue
        for dim, letters in enumerate(rule.operands[position]):
            atom = 0
            for letter in letters:
                for _ in problem.factors.letters[node][letter]:
                    name = str(Placement.parse(f"S{dim}.{atom}"))
                    if letter not in rule.whole:
                        roles.setdefault(name, "row" if letter in rule.summed else "column")
                    atom += 1
    return roles


def products_of(problem: Problem, parameter: fx.Node) -> list[fx.Node]:
    """Ops that sum over part of a parameter, or of a view of it, with something else, as products and convolutions do."""
    seen, found = [parameter], []
    for read in seen:
        for node in read.users:
            operands, rule = operands_of(node), problem.factors.rules.get(node)
            if len(operands) == 1:
                seen += [] if node in seen else [node]
            elif rule is not None and len(rule.linear) > 1:  # a product
                kept = {letter for term in rule.results for dim in term for letter in dim}
                terms = [term for value, term in zip(operands, rule.operands, strict=True) if value == value_of(read)]
                if not kept.issuperset(letter for term in terms for dim in term for letter in dim):
                    found.append(node)
    return found


def is_parameter(cluster: Cluster) -> bool:
    node = cluster.leader
    return node.op == "placeholder" and node.meta["placeholder"].source is Source.PARAMETER


def consumers_of(problem: Problem, cluster: Cluster) -> list[fx.Node]:
    """Ops that read a parameter."""
    value = Value(cluster.leader)
    return [edge.operand[0] for edge in problem.edges if edge.value == value and edge.operand is not None]


