"""Products in pairs, as hand-written tensor parallelism has them (Shoeybi et al. 2019): one by column, whose result stays split, and what
reads that by row. What stands between them, attention or a gated activation, makes no difference; what a row gives begins the next pair.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.graph import is_call, operands_of, value_spec
from autopar.solve.pins import is_parameter, products_of
from autopar.solve.problem import Problem

COLUMN, ROW, EITHER = "column", "row", "either"


def sides_of(problem: Problem) -> Mapping[fx.Node, str]:
    """For each product with a parameter which side it is, `EITHER` where some of what it reads is of columns and some is not."""
    parameters = [cluster.leader for cluster in problem.clusters if is_parameter(cluster)]
    products = {problem.shared[product] for parameter in parameters for product in products_of(problem, parameter)}
    sides: dict[fx.Node, str] = {}
    last: dict[fx.Node, frozenset[str]] = {}  # of the products before an op, the next to it
    for node in filter(is_call, problem.module.graph.nodes):
        read = [value.node for value in operands_of(node) if value_spec(value).dtype.is_floating_point]
        found = frozenset[str]().union(*(last.get(other, frozenset()) for other in read))
        if problem.shared.get(node) in products:
            sides[node] = COLUMN if found <= {ROW} else ROW if found == {COLUMN} else EITHER
            found = frozenset({sides[node]})
        last[node] = found
    return sides
