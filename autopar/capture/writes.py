"""Ops of a captured graph that write into what they are given, and the functions that they become."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_DROPOUTS = frozenset(
    {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default}
)
_GRIDS = frozenset({aten.meshgrid.default, aten.meshgrid.indexing})


def mutates(node: fx.Node) -> bool:
    """Whether the node's op writes into what it is given."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def shows(node: fx.Node) -> bool:
    """Whether what a node makes may be memory of what it is given, as of a view."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def show_views(module: fx.GraphModule) -> None:
    """Let memory that torch hands back be seen, of which schemas of ops say nothing; changes the graph.

    Dropout that drops nothing is its operand, an ``einsum`` of one operand that sums nothing is views of it, and so is what ``meshgrid``
    and the like give. Else a write into one of the two would not show in the other.
    """
    for node in list(module.graph.nodes):
        if node.target in _DROPOUTS and (node.args[1] == 0 or not node.args[2]):
            same = node.args[0]
        elif node.target is aten.einsum.default and len(node.args[1]) == 1:
            same = _viewed(module.graph, node)
        elif node.target is aten.atleast_3d.default:
            same = _of_three_dims(module.graph, node)
        elif node.target is aten.cartesian_prod.default and len(node.all_input_nodes) == 1:
            (same,) = node.all_input_nodes
        elif node.target is operator.getitem and node.all_input_nodes[0].target in _GRIDS:
            same = _of_grid(module.graph, node)
        else:
            continue
        if same is not node:
            node.replace_all_uses_with(same)
            module.graph.erase_node(node)


def _of_three_dims(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An ``atleast_3d`` by views: what has two dims gets another behind, what has one gets one on either side."""
    (x,) = node.all_input_nodes
    with graph.inserting_before(node):
        for dim in {0: (0, 0, 0), 1: (0, 2), 2: (2,)}.get(x.meta["val"].dim(), ()):
            x = _view(graph, node, aten.unsqueeze.default, x, dim)
    return x


def _of_grid(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """One of the tensors of a ``meshgrid`` by views: along one dim it is what was given, along the others it repeats itself."""
    grid, i = node.all_input_nodes[0], node.args[1]
    given: Any = grid.args[0]
    assert isinstance(i, int)
    indexing, shape = grid.kwargs.get("indexing", "ij"), node.meta["val"].shape
    along = {0: 1, 1: 0}.get(i, i) if indexing == "xy" and len(given) > 1 else i
    with graph.inserting_before(node):
        row = _view(graph, node, aten.view.default, given[i], [-1 if dim == along else 1 for dim in range(len(shape))])
        return _view(graph, node, aten.expand.default, row, list(shape))


def _viewed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An ``einsum`` of one operand by diagonals and a permutation; the node itself if it sums over a dim."""
    equation, operands = node.args[:2]
    x: Any = operands[0]  # type: ignore[index]
    left, arrow, right = str(equation).replace(" ", "").partition("->")
    named = left.replace("...", "")
    rest = [f"...{i}" for i in range(x.meta["val"].dim() - len(named))]
    if not arrow:
        right = ("..." if rest else "") + "".join(sorted(letter for letter in named if named.count(letter) == 1))
    dims, wanted = (_letters(side, rest) for side in (left, right))
    if {*dims} != {*wanted}:
        return node
    with graph.inserting_before(node):
        while twice := [dim for dim in dims if dims.count(dim) > 1]:
            i = dims.index(twice[0])
            j = dims.index(twice[0], i + 1)
            x = _view(graph, node, aten.diagonal.default, x, 0, i, j)
            dims = [*dims[:i], *dims[i + 1 : j], *dims[j + 1 :], twice[0]]
        return _view(graph, node, aten.permute.default, x, [dims.index(dim) for dim in wanted])


def _letters(side: str, rest: list[str]) -> list[str]:
    """Of the dims of an operand of an equation; ``rest`` are those that dots stand for."""
    before, dots, after = side.partition("...")
    return [*before, *(rest if dots else []), *after]


def _view(graph: fx.Graph, origin: fx.Node, target: torch._ops.OpOverload, x: fx.Node, *args: object) -> fx.Node:
    made = graph.call_function(target, (x, *args))  # type: ignore[arg-type]
    with torch.no_grad():
        made.meta = {**origin.meta, "val": target(x.meta["val"], *args)}
    return made


def write_anew(module: fx.GraphModule) -> None:
    """Let ops that write into a value, of which no other is memory, make a new one, which all readers after them get; changes the graph.

    It is what ``ExportedProgram.run_decompositions`` does for all writes, by tracing the whole again, which takes twice as long as the
    export. A write into an input, a view, or what has been viewed stays.
    """
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    for node, place in position.items():
        function = _function_of(node)
        if function is None or not isinstance(value := node.args[0], fx.Node) or not _is_alone(value, node):
            continue
        if _dtype_made(function, node) != value.meta["val"].dtype:
            continue
        later = [user for user in value.users if position[user] > place]
        node.target = function
        for user in later:
            user.replace_input_with(value, node)


def _function_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op that takes what the node's op takes, and makes what that writes into its first operand; None if there is none.

    It may be another overload: a number to the power of a tensor, `pow.Scalar`, is not what `pow_.Scalar` writes.
    """
    if not mutates(node) or not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    name = str(node.target.overloadpacket).removeprefix("aten.")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in node.target._schema.arguments]
    if packet is None or written != [True, *(False for _ in written[1:])]:
        return None
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return next((function for function in overloads if _taken(function) == _taken(node.target)), None)


def _taken(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _dtype_made(function: torch._ops.OpOverload, node: fx.Node) -> torch.dtype:
    """Of what a function makes of the operands of a node; a comparison makes booleans where `gt_` writes ones and zeros."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    with torch.no_grad():
        dtype: torch.dtype = function(*args, **kwargs).dtype
    return dtype


def _is_alone(value: fx.Node, writer: fx.Node) -> bool:
    """Whether a value was computed, and no other is memory of it."""
    source = value.args[0] if value.target is operator.getitem else value
    is_computed = isinstance(source, fx.Node) and source.op == "call_function" and not shows(source)
    return is_computed and not any(user is not writer and user.op == "call_function" and shows(user) for user in value.users)
