"""Captured graph -> a flat graph of concrete sizes, every node with its specs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn

from autopar.capture.trace import Captured
from autopar.errors import CaptureError
from autopar.graph import is_getitem, value_of, value_spec
from autopar.passes.emitter import GRADIENT_ENDS
from autopar.rules.registry import TensorSpec, has_gradients

aten = torch.ops.aten

_STATISTICS = frozenset({aten._native_batch_norm_legit_functional.default})
"""Ops whose first result alone has a gradient."""


def concretize(captured: Captured, sizes: Mapping[sympy.Symbol, int]) -> fx.GraphModule:
    """Put the value of every symbol into the graph, inline regions, and give every node its specs.

    Raises:
        CaptureError: a size that the inputs do not tell, or a region of control flow.
    """
    concrete = _Concrete(sizes)
    concrete.graph.output(tuple(concrete.copy(captured.graph, {})))
    return fx.GraphModule(concrete.owner, concrete.graph)


class _Concrete:
    """A flat graph that grows.

    Args:
        sizes: value of every symbol.
    """

    def __init__(self, sizes: Mapping[sympy.Symbol, int]) -> None:
        self.graph = fx.Graph()
        self.owner = nn.Module()
        self._sizes = sizes
        self._numbers: dict[sympy.Expr, int] = {}
        self._line = ""

    def copy(self, source: fx.GraphModule, env: dict[fx.Node, Any]) -> Sequence[Any]:
        """Copy all but the output of ``source``, of whose nodes ``env`` has some already; what the output names."""
        for node in source.graph.nodes:
            self._line = node.meta.get("line", "")
            if node in env:
                continue
            if node.op == "output":
                outputs: Sequence[Any] = fx.map_arg(node.args[0], env.__getitem__)
                return outputs
            if node.op == "get_attr":
                env[node] = self._attribute(source, node)
                continue
            value = node.meta.get("val")
            if isinstance(value, (torch.SymInt, int)) and node.op != "placeholder":
                env[node] = self._number(value)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                env[node] = self._inline(node, args)
            elif node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                env[node] = args[0][args[1]]
            else:
                env[node] = self._node(node, args, kwargs)
        raise AssertionError("graph has no output")

    def _attribute(self, source: fx.GraphModule, node: fx.Node) -> fx.GraphModule | fx.Node:
        attribute = getattr(source, str(node.target))
        if isinstance(attribute, fx.GraphModule):
            return attribute
        setattr(self.owner, str(node.target), attribute)
        made = self.graph.get_attr(str(node.target))
        made.meta["specs"] = (self._spec(attribute, False),)
        return made

    def _inline(self, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        name = node.target.name()  # type: ignore[union-attr]
        if name != "wrap_with_autocast":  # whose casts stand in the graph already (`autopar.precision`)
            raise CaptureError(
                f"the graph has a {name} region ({node.meta.get('line', '')}), which autopar does not support; "
                "replace the control flow in the model by tensor operations"
            )
        position = next(i for i, arg in enumerate(args) if isinstance(arg, fx.GraphModule))
        region, *inputs = args[position:]
        return self.copy(region, dict(zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True)))

    def _node(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise CaptureError(f"the graph has a torch.vmap ({self._line}), which autopar does not support; write what it does for a batch")
        copied = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        requires_grad = bool(node.meta.get("requires_grad", False))
        if node.op != "placeholder":
            inputs = [value_spec(value_of(n)).requires_grad for n in copied.all_input_nodes if not is_getitem(copied)]
            requires_grad = node.target not in GRADIENT_ENDS and any(inputs)
        results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        with_grad = 1 if node.target in _STATISTICS else len(results)
        copied.meta["specs"] = tuple(
            self._spec(result, requires_grad and i < with_grad) for i, result in enumerate(results) if isinstance(result, torch.Tensor)
        )
        if is_getitem(copied):
            copied.meta["specs"] = (value_spec(value_of(copied)),)
        copied.meta["line"] = node.meta.get("line", "")
        stack = node.meta.get("nn_module_stack")
        copied.meta["module"] = next(reversed(stack.values()))[0] if stack else ""
        return copied

    def _number(self, x: torch.SymInt | int) -> int:
        if not isinstance(x, torch.SymInt):
            return int(x)
        expr = x.node.expr
        if expr not in self._numbers:
            value = expr.subs(self._sizes)
            if not value.is_number:
                raise CaptureError(
                    f"the graph has a number {expr} that depends on values of tensors ({self._line}), as the size of x[mask] or what "
                    "x.item() gives; a plan wants sizes that shapes tell: use torch.where, or a fixed number of elements with a mask"
                )
            self._numbers[expr] = int(value)
        return self._numbers[expr]

    def _spec(self, x: torch.Tensor, requires_grad: bool) -> TensorSpec:
        return TensorSpec(tuple(self._number(size) for size in x.shape), x.dtype, requires_grad and has_gradients(x.dtype))
