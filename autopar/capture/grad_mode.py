"""What a captured graph says of ``torch.no_grad``: what is computed where no gradients are recorded takes detached values.

``torch.export`` makes a region of what is recorded in another mode. Where the graph is made functional the regions are gone, and one inside
of an ``autocast`` is lost at once (seen: torch 2.13). A ``detach`` stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as regions
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from autopar.capture.exporting import user_line
from autopar.capture.writes import mutates, shows
from autopar.errors import CaptureError

aten = torch.ops.aten
_MARK = "autopar.no_grad"
"""Among ``meta["custom"]`` of a node, which torch keeps: no gradients are recorded there."""


@contextmanager
def detached_without_grad(trained: Collection[str]) -> Iterator[None]:
    """Let ``torch.export`` detach what is computed where no gradients are recorded, in place of making regions.

    Args:
        trained: names of the parameters that gradients are made for.

    Raises:
        CaptureError: a value that has a gradient is changed in place there: autograd would leave that out of the gradient.
    """

    def detach(module: fx.GraphModule, signature: ExportGraphSignature) -> tuple[fx.GraphModule, ExportGraphSignature]:
        records = True
        for node in list(module.graph.nodes):
            if node.target is torch._C._set_grad_enabled:
                records = bool(node.args[0])
                module.graph.erase_node(node)
            elif not records:
                node.meta["custom"] = node.meta.get("custom", {}) | {_MARK: True}
        _detach_marked(module.graph, signature, trained)
        return module, signature

    with torch.enable_grad(), patch.object(regions, "replace_set_grad_with_hop_pass", detach):
        yield


def detach_again(program: ExportedProgram, trained: Collection[str]) -> None:
    """Detach anew what `detached_without_grad` did in a program that has since been made functional, where all readers of a value may have
    got what had been detached for some."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if _is_marked(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _detach_marked(graph, program.graph_signature, trained)
    program.graph_module.recompile()


def _detach_marked(graph: fx.Graph, signature: ExportGraphSignature, trained: Collection[str]) -> None:
    """Detach what marked nodes take of values that have gradients."""
    specs = zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True)
    flowing, detached = {node for node, spec in specs if spec.target in trained}, dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not _is_marked(node):
            if node.target is not aten.detach.default and not flowing.isdisjoint(node.all_input_nodes):
                flowing.add(node)
            continue
        if mutates(node) and _viewed(node.args[0]) in flowing:
            raise CaptureError(
                f"{node.target} ({user_line(node)}) changes a value that has a gradient where none are recorded, so that the gradient "
                "would not be that of what it becomes; change a copy of it (x = x.clone()), or let gradients be recorded"
            )
        for value in flowing.intersection(node.all_input_nodes):
            if value not in detached:
                detached[value] = _detach(graph, value, node)
            node.replace_input_with(value, detached[value])


def _is_marked(node: fx.Node) -> bool:
    return _MARK in node.meta.get("custom", {})


def _detach(graph: fx.Graph, value: fx.Node, reader: fx.Node) -> fx.Node:
    with graph.inserting_after(value):
        made = graph.call_function(aten.detach.default, (value,))
    made.meta = reader.meta | {"val": value.meta["val"]}
    return made


def _viewed(value: object) -> object:
    """What a view, or a view of it, shows."""
    while isinstance(value, fx.Node) and value.op == "call_function" and value.args and shows(value):
        value = value.args[0]
    return value
