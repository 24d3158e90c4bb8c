"""Normal graph + plan -> local graph: what every rank runs.

Operands are resharded to what their op wants, shapes in arguments become local ones, and every parameter comes in as its stored shard. The
local graph has the placeholders of the normal graph, then one coordinate per mesh axis (int64 [1]), then the seed (int64 [1]). Its text is
the same on all ranks. A value that several ops want alike is resharded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar import random
from autopar.factors import Factors
from autopar.graph import Value, call_of, is_getitem, operands_of, value_of, value_spec
from autopar.layout import REPLICATED, Layout, Placement, replicated
from autopar.mesh import Mesh
from autopar.passes.reshard import Step, plan_steps
from autopar.rules.registry import Coordinate, Local, TensorSpec, local_form
from autopar.rules.strategies import Choice
from autopar.storage import Held, storage_layout

aten = torch.ops.aten


def shard_graph(
    module: fx.GraphModule,
    factors: Factors,
    mesh: Mesh,
    choices: Mapping[fx.Node, tuple[Choice, ...]],
    held: Mapping[fx.Node, tuple[Held, ...]],
    *,
    device: torch.device,
    training: bool,
) -> fx.GraphModule:
    """Make the local graph.

    Args:
        module: normal graph.
        factors: its factors.
        mesh: the mesh.
        choices: for each op its choice on every axis.
        held: for each parameter how it is held on every axis.
        device: where the graph will run.
        training: a backward will follow; without one R and R* are the same.
    """
    return _Rewriter(module, factors, mesh, choices, held, device, training).run()


@dataclass(slots=True)
class _Rewriter:
    module: fx.GraphModule
    factors: Factors
    mesh: Mesh
    choices: Mapping[fx.Node, tuple[Choice, ...]]
    held: Mapping[fx.Node, tuple[Held, ...]]
    device: torch.device
    training: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    local: dict[Value, fx.Node] = field(default_factory=dict)
    layouts: dict[Value, Layout] = field(default_factory=dict)
    resharded: dict[tuple[fx.Node, Step], fx.Node] = field(default_factory=dict)
    coordinates: list[fx.Node] = field(default_factory=list)
    seed: fx.Node | None = None

    def run(self) -> fx.GraphModule:
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for name in self.mesh.names:
            self.coordinates.append(self._scalar_placeholder(f"coordinate_{name}"))
        self.seed = self._scalar_placeholder("seed")
        for node in nodes:
            if node.op == "output":
                self._output(node)
            elif node.op == "get_attr" or (node.op == "call_function" and node.meta["constant"]):
                self._constant(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._call(node)
        local = fx.GraphModule(self.module, self.graph)
        self.graph.lint()
        return local

    def _scalar_placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["specs"] = (TensorSpec((1,), torch.int64),)
        return node

    def _record(self, value: Value, node: fx.Node, layout: Layout, spec: TensorSpec) -> None:
        self.local[value], self.layouts[value] = node, layout
        node.meta["specs"] = (TensorSpec(layout.local_shape, spec.dtype, spec.requires_grad),)
        node.meta["layout"] = str(layout)

    def _placeholder(self, node: fx.Node) -> None:
        value, spec = Value(node), value_spec(Value(node))
        atoms = self.factors.values[value]
        layout = storage_layout(self.mesh, atoms, self.held[node]) if node in self.held else self._whole(atoms)
        copied = self.graph.placeholder(str(node.target))
        copied.meta = {"placeholder": node.meta["placeholder"], "line": "", "module": ""}
        self._record(value, copied, layout, spec)

    def _whole(self, atoms: tuple[tuple[int, ...], ...]) -> Layout:
        return Layout(self.mesh, atoms, (REPLICATED,) * len(self.mesh.sizes))

    def _constant(self, node: fx.Node) -> None:
        copied = self.graph.node_copy(node, lambda used: self.local[Value(used)])
        copied.args, copied.kwargs = pytree.tree_map_only(torch.device, lambda _: self.device, (copied.args, copied.kwargs))
        copied.meta = {key: node.meta[key] for key in ("line", "module") if key in node.meta}
        for index, spec in enumerate(node.meta["specs"]):
            value = Value(node, index)
            self.local[value], self.layouts[value] = copied, replicated(self.mesh, spec.shape)
            if value in self.factors.values:
                self.layouts[value] = self._whole(self.factors.values[value])
        copied.meta["specs"] = node.meta["specs"]

    def _call(self, node: fx.Node) -> None:
        choices = self.choices[node]
        operands = operands_of(node)
        call = call_of(node)
        inputs = {}
        for i, (value, spec) in enumerate(zip(operands, call.operands, strict=True)):
            wanted = tuple(choice.operands[i] for choice in choices)
            inputs[id(spec)] = self._reshard(value, wanted)
        layouts = [
            Layout(self.mesh, self.factors.values[Value(node, i)], tuple(choice.results[i] for choice in choices))
            for i in range(len(call.results))
        ]
        target, args, kwargs = local_form(call, self._local_view(node, choices, layouts))
        args, kwargs = pytree.tree_map(lambda x: self._argument(x, inputs), (args, kwargs))
        if target is aten.dropout.default:
            made = self._dropout(args, layouts[0])
        else:
            made = self.graph.call_function(target, args, kwargs)
        made.meta.update({key: node.meta[key] for key in ("line", "module")}, origin=node.name)
        if len(call.results) == 1:
            self._record(Value(node), made, layouts[0], call.results[0])
            return
        for i, (layout, spec) in enumerate(zip(layouts, call.results, strict=True)):
            item = self.graph.call_function(getitem, (made, i))
            item.meta.update({key: node.meta[key] for key in ("line", "module")})
            self._record(Value(node, i), item, layout, spec)

    def _argument(self, x: object, inputs: Mapping[int, fx.Node]) -> object:
        if isinstance(x, TensorSpec):
            return inputs[id(x)]
        if isinstance(x, Coordinate):
            return self.coordinates[x.axis]
        return self.device if isinstance(x, torch.device) else x

    def _local_view(self, node: fx.Node, choices: Sequence[Choice], layouts: Sequence[Layout]) -> Local:
        letters = self.factors.letters.get(node, {})
        axes = {
            letter: tuple(axis for axis, choice in enumerate(choices) if choice.name.partition(".")[0] == letter)
            for letter in letters
        }
        sizes = {
            letter: math.prod(atoms) // math.prod(self.mesh.sizes[axis] for axis in axes[letter])
            for letter, atoms in letters.items()
        }
        return Local(sizes, tuple(layout.local_shape for layout in layouts), axes, self.mesh.sizes, self.mesh.names)

    def _dropout(self, args: tuple[object, ...], layout: Layout) -> fx.Node:
        salt = sum(node.target is random.dropout for node in self.graph.nodes)
        x, probability, *_ = args
        assert isinstance(x, fx.Node) and self.seed is not None and isinstance(probability, float)
        arguments: dict[str, Any] = {"probability": probability, "salt": salt, "pieces": random.layout_pieces(layout)}
        return self.graph.call_function(random.dropout, (x, self.seed, list(self.coordinates)), arguments)

    def _reshard(self, value: Value, wanted: Sequence[Placement]) -> fx.Node:
        layout, spec = self.layouts[value], value_spec(value)
        target = Layout(self.mesh, layout.atoms, tuple(wanted))
        node = self.local[value]
        for step in plan_steps(layout, target, needs_grad=spec.requires_grad and self.training):
            node = self._apply(node, step, spec)
        return node

    def _apply(self, node: fx.Node, step: Step, spec: TensorSpec) -> fx.Node:
        key = (node, step)
        if key not in self.resharded:
            made = self.graph.call_function(step.op, (node, self.coordinates[step.axis]), dict(step.arguments))  # type: ignore[arg-type]
            made.meta["specs"] = (TensorSpec(step.local_shape, spec.dtype, spec.requires_grad),)
            made.meta.update(line=node.meta.get("line", ""), module=node.meta.get("module", ""))
            self.resharded[key] = made
        return self.resharded[key]

    def _output(self, node: fx.Node) -> None:
        results = []
        returned = node.args[0]
        assert isinstance(returned, Sequence)
        for item in returned:
            assert isinstance(item, fx.Node)
            whole = self._reshard(value_of(item), (REPLICATED,) * len(self.mesh.sizes))
            # the caller owns what it gets: an output must not share storage with an input or another output
            copy = self.graph.call_function(aten.clone.default, (whole,))
            copy.meta.update(specs=whole.meta["specs"][-1:], line="", module="")
            results.append(copy)
        self.graph.output(tuple(results))
