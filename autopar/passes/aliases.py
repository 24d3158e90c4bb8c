"""Which values of a graph share memory: an operation may write to an operand if nothing else reads what it writes to."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from autopar.ops.host import arrive

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default

SAME_ELEMENTS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.detach.default,
        aten.alias.default,
        aten.contiguous.default,
        WAIT,
        arrive,
    }
)
"""What gives every element of its operand once, be it in the same memory or in a copy."""


def only_looks(node: fx.Node) -> bool:
    """Whether a node may give memory of its first operand, which it does not write to."""
    if node.target is operator.getitem:
        return only_looks(node.all_input_nodes[0])
    if node.target in (WAIT, arrive):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(arg.alias_info is not None and not arg.alias_info.is_write for arg in schema.arguments)


def base_of(node: fx.Node) -> fx.Node:
    """The node that made the memory that a value may lie in, or was the last to write to it."""
    while node.op == "call_function" and only_looks(node):
        node = node.all_input_nodes[0]
    return node


def readers(base: fx.Node) -> set[fx.Node]:
    """The nodes that read memory of ``base``, itself or through others that only look at it; the output is one."""
    found: set[fx.Node] = set()
    for user in base.users:
        found |= readers(user) if user.op == "call_function" and only_looks(user) else {user}
    return found


def may_write(node: fx.Node, reader: fx.Node, given: Collection[fx.Node] = ()) -> bool:
    """Whether ``reader`` may write to the memory of its operand ``node``.

    Args:
        node: the operand.
        reader: the only node that may read that memory.
        given: placeholders whose memory the graph may write to; other placeholders belong to others.
    """
    base = base_of(node)
    if base.op != "call_function" and base not in given:
        return False
    return is_all_of(node, base) and readers(base) == {reader}


def owned(graph: fx.Graph, results: Sequence[fx.Node], positions: Collection[int]) -> list[fx.Node]:
    """The results of a graph whose output is not there yet; those at ``positions`` with memory that no other result has.

    Where a result shares memory, or has the same element in two places, it is copied.
    """
    bases = [base_of(result) for result in results]
    made = list(results)
    for i in positions:
        base = bases[i]
        if base.op != "call_function" or bases.count(base) > 1 or not is_all_of(results[i], base):
            made[i] = graph.call_function(aten.clone.default, (results[i],), {"memory_format": torch.contiguous_format})
            made[i].meta = dict(results[i].meta)
    return made


def is_all_of(node: fx.Node, base: fx.Node) -> bool:
    """Whether a value has every element of ``base`` once."""
    while node is not base:
        if node.target not in SAME_ELEMENTS:
            return False
        node = node.all_input_nodes[0]
    return True
