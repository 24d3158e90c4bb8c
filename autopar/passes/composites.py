"""Ops that torch makes of others: those without a rule become what torch runs for them."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import operands_of, specs_of, value_spec
from autopar.passes.emitter import Emitter
from autopar.passes.recording import UNKNOWN, Call, Kind, Place, Recording, Recordings
from autopar.rules.registry import TensorSpec, has_rule

aten = torch.ops.aten
_REWRITTEN = frozenset(
    {
        aten.tensordot.default,
        aten.bilinear.default,
        aten.embedding_bag.default,
        aten.embedding_bag.padding_idx,
    }
)
"""What other passes make of these is more than torch does."""


def expand_composites(module: fx.GraphModule) -> fx.GraphModule:
    """``multiply``, ``triplet_margin_loss``, ``cdist`` and whatever else torch makes of other ops, and has no rule, become these ops.

    An op for which torch looks at values, or draws random numbers, stays.
    """
    recordings = Recordings()
    for node in list(module.graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or has_rule(target) or target in _REWRITTEN or not target._can_decompose():
            continue
        if torch.Tag.nondeterministic_seeded in target.tags or not operands_of(node):
            continue
        try:
            recording = recordings.of(_call(node))
        except UNKNOWN:
            continue
        if not recording.constants and all(made.target is not target for made in recording.nodes):
            _splice(module, node, recording)
    return module


def _call(node: fx.Node) -> Call:
    """The call of a node, on contiguous tensors: a graph of functions says nothing of strides."""
    nodes = list(dict.fromkeys(node.all_input_nodes))
    places = {used: Place(i) for i, used in enumerate(nodes)}
    given = fx.map_arg((tuple(node.args), dict(node.kwargs)), places.__getitem__)
    leaves, spec = pytree.tree_flatten(given, is_leaf=lambda x: isinstance(x, Place))
    specs = [value_spec(value) for value in dict.fromkeys(operands_of(node))]
    assert node.target is not None and len(specs) == len(nodes)
    return Call(node.target, spec, tuple(leaves), tuple(map(_kind, specs)))  # type: ignore[arg-type]


def _kind(spec: TensorSpec) -> Kind:
    return Kind.of(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))._replace(device=torch.device("cpu"))


def _splice(module: fx.GraphModule, node: fx.Node, recording: Recording) -> None:
    """Put what was recorded in the place of a node."""
    emitter = Emitter(module, node)
    env: dict[fx.Node, Any] = dict(zip(recording.inputs, dict.fromkeys(node.all_input_nodes), strict=True))
    for made in recording.nodes:
        if made.meta["val"] is None:  # it raises an error or does nothing
            continue
        args, kwargs = cast(Any, fx.map_arg((made.args, made.kwargs), env.__getitem__))
        if made.target is operator.getitem:
            whole, index = args
            env[made] = emitter.result(whole, index)
        else:
            env[made] = emitter(made.target, *args, **kwargs)
    leaves = pytree.tree_leaves(recording.result)
    results = [env[value.node] for value in leaves]
    if len(specs_of(node)) == 1 and not any(used.target is operator.getitem for used in node.users):
        emitter.replace_by(results[0])
        return
    for used in list(node.users):
        used.replace_all_uses_with(results[used.args[1]])  # type: ignore[index]
        module.graph.erase_node(used)
    module.graph.erase_node(node)
