"""Ops of a captured graph that write into what they are given, and the functions that they become."""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten


def mutates(node: fx.Node) -> bool:
    """Whether the node's op writes into what it is given."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def shows(node: fx.Node) -> bool:
    """Whether what a node makes may be memory of what it is given, as of a view."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


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
        later = [user for user in value.users if position[user] > place]
        node.target = function
        for user in later:
            user.replace_input_with(value, node)


def _function_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op that makes what the node's op writes into its first operand, of tensors of the same dtype; None if there is none."""
    if not mutates(node) or not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    function = getattr(packet, overload, None)
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in node.target._schema.arguments]
    tensors = [used.meta.get("val") for used in node.all_input_nodes]
    dtypes = {x.dtype for x in tensors if isinstance(x, torch.Tensor) and x.dtype.is_floating_point}
    if not isinstance(function, torch._ops.OpOverload) or written != [True, *(False for _ in written[1:])] or len(dtypes) > 1:
        return None
    return function if len(function._schema.arguments) == len(written) else None


def _is_alone(value: fx.Node, writer: fx.Node) -> bool:
    """Whether a value was computed, and no other is memory of it."""
    source = value.args[0] if value.target is operator.getitem else value
    is_computed = isinstance(source, fx.Node) and source.op == "call_function" and not shows(source)
    return is_computed and not any(user is not writer and user.op == "call_function" and shows(user) for user in value.users)
