"""Graphs that launch their ops as fast as Python can, and no more of them than it needs.

Python launches every op of a step, which takes it longer than many ops take a GPU. So, without a bit of the results being different:

- What gives the memory that it got is left out: a detach, a view of the same shape, a transpose of a transpose, all but the last of several
  views.
- Vectors (biases, norms) are cast together, those that are there when one is wanted.
- Ops are called by functions of torch where these come to the same op: ``torch.mm`` has C++ of its own that parses its arguments, where
  ``torch.ops.aten.mm.default`` packs them by the schema of the op.

So the graphs of small models take 0.58 to 0.70 times as long as before (`benchmarks/launches.py`). It is the last that is done to a graph:
nothing else has to know these functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from autopar.passes.aliases import base_of
from autopar.passes.buckets import BUCKET_NUM_BYTES, SMALL_NUM_BYTES

aten = torch.ops.aten

DIRECT: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: torch._softmax,
    aten._unsafe_view.default: torch.Tensor.reshape,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.expand.default: torch.Tensor.expand,
    aten.gelu.default: F.gelu,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.reshape,
    aten.where.self: torch.where,
}
"""Functions of torch by the ops to which they come, with the same arguments. Not all that a CPU makes lies as it did on meta: a sum of an
expanded and of a transposed tensor is transposed. Of that no view can be had, and ``reshape`` makes a copy."""
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_TURNS = frozenset({aten.t.default, aten.transpose.int})
"""Which undo themselves."""
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def launch_fast(graph: fx.Graph) -> None:
    """Change a graph in place. Where a node has no ``meta["val"]``, what depends on it stays as it is."""
    _leave_out_looks(graph)
    _cast_together(graph)
    for node in graph.nodes:
        if _only_casts(node):
            node.target, node.args, node.kwargs = torch.Tensor.to, (*node.args, node.kwargs["dtype"]), {}
        elif node.op == "call_function":
            node.target = DIRECT.get(node.target, node.target)


def _leave_out_looks(graph: fx.Graph) -> None:
    """But for what a caller gets, which may be no operand, and nothing that it gets twice."""
    for node in list(graph.nodes):
        same = None if any(user.op == "output" for user in node.users) else _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same)
        elif node.target in _VIEWS:
            node.replace_input_with(node.args[0], _viewed(node.args[0]))
    for node in reversed(graph.nodes):
        if not node.users and (node.target in _VIEWS or node.target in _TURNS or node.target is aten.detach.default):
            graph.erase_node(node)


def _same_as(node: fx.Node) -> fx.Node | None:
    """The node that a look at memory gives again, if it does."""
    if node.target is aten.detach.default or (node.target in _VIEWS and _shape(node) == _shape(node.args[0]) is not None):
        return node.all_input_nodes[0]
    if node.target in _TURNS:
        (turned,) = node.all_input_nodes
        if turned.target is node.target and turned.args[1:] == node.args[1:]:
            return turned.all_input_nodes[0]
    return None


def _viewed(node: Any) -> fx.Node:
    """What a view looks at, where any view of it can be had: its elements lie one after the other."""
    seen: fx.Node = node
    while seen.target in _VIEWS and (value := _value(seen.args[0])) is not None and value.is_contiguous():
        seen = seen.args[0]  # type: ignore[assignment]
    return seen


def _value(node: Any) -> torch.Tensor | None:
    value: torch.Tensor | None = node.meta.get("val")
    return value


def _shape(node: Any) -> torch.Size | None:
    value = _value(node)
    return None if value is None else value.shape


def _only_casts(node: fx.Node) -> bool:
    """Whether a node does nothing but give its operand in another dtype."""
    if node.target is not aten._to_copy.default or not node.kwargs.keys() <= {"dtype", "layout", "device"}:
        return False
    made, given = _value(node), _value(node.args[0])
    if made is None or given is None or made.dtype == given.dtype:
        return False
    return (made.device, made.layout) == (given.device, given.layout)


def _cast_together(graph: fx.Graph) -> None:
    """A cast of a vector waits until one that is like it is wanted, or its operand is written to, and comes as soon as another is wanted
    if its operand is there. What waits, and what is cast together, is no more than a bucket."""
    alike: dict[fx.Node, _Waiting] = {}
    kinds: dict[object, _Waiting] = {}
    for node in graph.nodes:
        if _only_casts(node) and _is_small(node) and node.args[0] not in alike:
            kind = node.meta["val"].dtype, node.args[0].meta["val"].dtype, node.meta["val"].device
            alike[node] = kinds.setdefault(kind, _Waiting())
    for node in list(graph.nodes):
        if node not in alike:
            wanted = {used for used in node.all_input_nodes if used in alike}
            if _may_write(node):
                written = {base_of(used) for used in node.all_input_nodes}
                casts = (cast for waiting in kinds.values() for cast in waiting.casts)
                wanted |= {cast for cast in casts if base_of(cast.all_input_nodes[0]) in written}
            for waiting in kinds.values():
                _cast(graph, waiting.take(wanted), node)
        for user in node.users:
            if user in alike:
                alike[user].put(user)


def _is_small(cast: fx.Node) -> bool:
    """Whether it is of a vector that travels with others, in dtypes that `torch._foreach_copy_` takes on every device."""
    made, given = cast.meta["val"], cast.all_input_nodes[0].meta["val"]
    return made.dim() <= 1 and max(made.nbytes, given.nbytes) < SMALL_NUM_BYTES and {made.dtype, given.dtype} <= _FLOATS


@dataclass(slots=True)
class _Waiting:
    """Casts of one kind that wait; ``held`` are bytes of memory that is there as long as they do, but for that of placeholders."""

    casts: list[fx.Node] = field(default_factory=list)
    held: int = 0

    def put(self, cast: fx.Node) -> None:
        self.casts.append(cast)
        self.held += _held_bytes(cast)

    def take(self, wanted: Collection[fx.Node]) -> list[fx.Node]:
        """Those that are wanted, or if too much is held all, and as many others as fit into a bucket with them."""
        first = self.casts if self.held >= BUCKET_NUM_BYTES else [cast for cast in self.casts if cast in wanted]
        if not first:
            return []
        taken, num_bytes = dict.fromkeys(first), sum(cast.meta["val"].nbytes for cast in first)
        for cast in self.casts:
            if cast not in taken and num_bytes + cast.meta["val"].nbytes <= BUCKET_NUM_BYTES:
                taken[cast] = None
                num_bytes += cast.meta["val"].nbytes
        self.casts = [cast for cast in self.casts if cast not in taken]
        self.held -= sum(map(_held_bytes, taken))
        return list(taken)


def _held_bytes(cast: fx.Node) -> int:
    base = base_of(cast.all_input_nodes[0])
    is_given = base.op == "placeholder" or (base.target is operator.getitem and base.all_input_nodes[0].op == "placeholder")
    value = _value(base)
    return 0 if is_given or value is None else value.nbytes


def _may_write(node: fx.Node) -> bool:
    """Whether a node may write to what it takes."""
    schema = getattr(node.target, "_schema", None)
    return schema.is_mutable if schema is not None else node.op == "call_function"


def _cast(graph: fx.Graph, casts: Sequence[fx.Node], before: fx.Node) -> None:
    if len(casts) < 2:
        return
    with graph.inserting_before(before):
        together = graph.call_function(cast_all, ([node.args[0] for node in casts], casts[0].kwargs["dtype"]))
        together.meta = {key: value for key, value in casts[0].meta.items() if key != "val"}
        for i, node in enumerate(casts):
            made = graph.call_function(operator.getitem, (together, i))
            made.meta = node.meta
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def cast_all(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies in another dtype, by as few kernels as torch has for it."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(made, tensors)
    return made
