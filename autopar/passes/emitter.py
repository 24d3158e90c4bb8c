"""How passes put new nodes into a normal graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.graph import emit, specs_of, value_of, value_spec
from autopar.rules.registry import TensorSpec, has_gradients

aten = torch.ops.aten

GRADIENT_ENDS = frozenset(
    {
        aten.detach.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.bernoulli.default,
        aten.bernoulli.p,
        aten.bernoulli.Tensor,
    }
)
"""Ops whose results have no gradient, whatever they are given."""


class Emitter:
    """Emits the nodes that replace ``node``, in front of it, with gradients marked as they flow."""

    def __init__(self, module: fx.GraphModule, node: fx.Node) -> None:
        self._module = module
        self._node = node

    def __call__(self, target: Any, *args: object, **kwargs: object) -> fx.Node:
        with self._module.graph.inserting_before(self._node):
            made = emit(self._module.graph, target, *args, origin=self._node, **kwargs)
        flows = target not in GRADIENT_ENDS and any(value_spec(value_of(used)).requires_grad for used in made.all_input_nodes)
        made.meta["specs"] = tuple(TensorSpec(s.shape, s.dtype, flows and has_gradients(s.dtype)) for s in specs_of(made))
        return made

    def result(self, made: fx.Node, index: int) -> fx.Node:
        """One of several results of a node that was emitted."""
        with self._module.graph.inserting_before(self._node):
            named = self._module.graph.call_function(operator.getitem, (made, index))
        named.meta = made.meta | {"specs": (specs_of(made)[index],)}
        return named

    def replace_by(self, new: fx.Node) -> None:
        self._node.replace_all_uses_with(new)
        self._module.graph.erase_node(self._node)


def argument(node: fx.Node, position: int, name: str, default: object) -> Any:
    """An argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
