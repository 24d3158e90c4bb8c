"""A parameter or an op of a problem by its name."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from torch import fx

from autopar.errors import PlanError
from autopar.solve.problem import Problem

MOST = 12
"""Names in an error."""


def find_by_name(problem: Problem, name: str) -> tuple[fx.Node, fx.Node]:
    """The node of a parameter, by any of its names, or of an op, by that of its node; and the node that it is decided with.

    Raises:
        PlanError: there is none of this name; it says what there is under a module of this name, or what is spelled alike.
    """
    if not isinstance(name, str) or not name:
        raise PlanError(f"an op or a parameter is called by a name, as 'h.0.mlp.c_fc.weight', got {name!r}; print(plan) lists parameters")
    for node, shared in problem.shared.items():
        if name in _names(node):
            return node, shared
    known = [known for node in problem.shared for known in _names(node)]
    under = [_names(node)[0] for node in problem.shared if any(_is_under(path, name) for path in _paths(node))]
    alike = under or get_close_matches(name, known, n=3)
    what = f"of module {name} there are" if under else "alike are" if alike else "print(plan) lists parameters, its page shows ops"
    few = [*alike[:MOST], *([f"{len(alike) - MOST} more"] if len(alike) > MOST else [])]
    raise PlanError(f"there is no parameter or op {name!r} in the plan; {what} {', '.join(few)}".rstrip())


def _names(node: fx.Node) -> tuple[str, ...]:
    entry = node.meta.get("placeholder")
    return (entry.name, *entry.aliases) if entry else (node.name,)


def _paths(node: fx.Node) -> Iterator[str]:
    """Where it is in the model."""
    if node.op == "placeholder":
        yield from _names(node)
    else:
        yield node.meta.get("module", "")


def _is_under(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
