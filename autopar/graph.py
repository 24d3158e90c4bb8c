"""Words for reading and writing graphs between passes.

Every node that gives tensors carries ``meta["specs"]``: one `TensorSpec` per result, with concrete sizes. Passes read specs; they do
not run fakes.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.rules.registry import Call, Op, TensorSpec


class Value(NamedTuple):
    """One tensor of a graph: the node that makes it, and which of its results it is."""

    node: fx.Node
    index: int = 0  # type: ignore[assignment]  # hides the method of tuples


def specs_of(node: fx.Node) -> tuple[TensorSpec, ...]:
    specs: tuple[TensorSpec, ...] = node.meta["specs"]
    return specs


def spec_of(node: fx.Node) -> TensorSpec:
    """The spec of a node that gives one tensor."""
    (spec,) = specs_of(node)
    return spec


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def value_of(node: fx.Node) -> Value:
    """The value that a node stands for: ``getitem`` of a node with several results is that node's result."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return Value(source, index)
    return Value(node)


def value_spec(value: Value) -> TensorSpec:
    return specs_of(value.node)[value.index]


def is_sorted(value: Value) -> bool:
    """Whether it has rows in the order in which each rank has sorted its own (`rules.sorted_rows`), along which nothing can be moved."""
    return bool(value.node.meta.get("is_sorted", False))


def source_name(value: Value) -> str:
    """What a plan calls a value: the name of a parameter or input in the model, else that of the node that makes it."""
    placeholder = value.node.meta.get("placeholder")
    return placeholder.name if placeholder else value.node.name


def is_call(node: fx.Node) -> bool:
    """Whether the node computes something (``getitem`` only names a result)."""
    return node.op == "call_function" and not is_getitem(node)


def operands_of(node: fx.Node) -> list[Value]:
    """The tensors that a node takes, in order of appearance, repeated if used twice."""
    kept = node.meta.get("operands")
    if kept is None or kept[0] is not node.args or kept[1] is not node.kwargs:
        nodes: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), nodes.append)
        kept = node.meta["operands"] = node.args, node.kwargs, tuple(map(value_of, nodes))
    return list(kept[2])


def call_of(node: fx.Node) -> Call:
    """The node as a `Call` on specs, a new object for each operand."""
    args, kwargs = pytree.tree_map(
        lambda x: replace(value_spec(value_of(x)), master=None) if isinstance(x, fx.Node) else x, (tuple(node.args), dict(node.kwargs))
    )
    return Call(node.target, args, kwargs, specs_of(node))  # type: ignore[arg-type]


def form_of(node: fx.Node) -> Hashable:
    """What `call_of` makes its call of: equal for nodes that do the same with operands of equal specs."""
    operands: dict[fx.Node, int] = {}

    def form(operand: fx.Node) -> Any:
        return operands.setdefault(operand, len(operands)), value_spec(value_of(operand))

    return node.target, fx.map_arg((node.args, node.kwargs), form), specs_of(node)


def outputs_of(graph: fx.Graph) -> list[Value]:
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    assert isinstance(returned, Sequence)
    return [value_of(node) for node in returned if isinstance(node, fx.Node)]


def makes_on_device(target: object) -> bool:
    """Whether an op is told where to make its result, as ``arange`` is; without a word it takes torch's default device."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(entry.name == "device" for entry in schema.arguments)


def emit(graph: fx.Graph, target: Op, *args: object, origin: fx.Node, **kwargs: object) -> fx.Node:
    """Insert a call at the graph's insertion point, its specs found by running the op on meta tensors.

    Args:
        origin: the node that the new one helps to replace; gives the user's source line and module.
    """

    def meta(x: object) -> object:
        if not isinstance(x, fx.Node):
            return x
        spec = spec_of(x) if not is_getitem(x) else value_spec(value_of(x))
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    meta_args, meta_kwargs = pytree.tree_map(meta, (args, kwargs))
    if makes_on_device(target):
        meta_kwargs["device"] = "meta"
    with torch.no_grad():
        result = target(*meta_args, **meta_kwargs)
    node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    node.meta = {key: origin.meta[key] for key in ("line", "module") if key in origin.meta}
    results = result if isinstance(result, (tuple, list)) else (result,)
    node.meta["specs"] = tuple(TensorSpec(tuple(r.shape), r.dtype) for r in results)
    return node
