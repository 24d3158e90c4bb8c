"""Normal graph + plan -> local graph: what every rank of a stage runs, for one micro-batch.

Operands are resharded to what their op wants, shapes in arguments become local ones, and every parameter comes in as its stored shard. The
local graph takes the placeholders of its part of the normal graph, the values received from the stage before, one coordinate per mesh axis
(int64 [1]), and the seed (int64 [1]); it gives the values for the stage after, then the outputs of the model that are made here. Its text
is the same on all ranks. A value that several ops want alike is resharded once. In ``meta["custom"]``, which tracing carries on to
forward and backward graphs, a node says what op it is ``of`` or whose value it ``moved``, by the names of the plan, and whether it is made
``again``.

An input comes whole, or as this rank's rows of it (`passes.rows`). Where the mesh has an axis in time, inputs are sliced, outputs stay
parts or summands, and gradients of parameters are those of one micro-batch: nothing is communicated over time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.factors import Factors
from autopar.graph import Value, call_of, makes_on_device, operands_of, outputs_of, source_name, specs_of, value_spec
from autopar.layout import REPLICATED, REPLICATED_PARTIAL_GRAD, Layout, Placement, replicated, shard
from autopar.mesh import Mesh
from autopar.ops import collectives, random
from autopar.ops.collectives import Spot
from autopar.passes.narrow import narrow
from autopar.passes.randomness import DRAWN
from autopar.passes.reshard import Step, plan_parameter_steps, plan_steps
from autopar.passes.stages import Part
from autopar.rules.registry import Coordinate, Local, TensorSpec, local_form
from autopar.rules.strategies import Choice
from autopar.storage import Held, storage_layout

aten = torch.ops.aten


def shard_graph(
    module: fx.GraphModule,
    part: Part,
    factors: Factors,
    mesh: Mesh,
    choices: Mapping[fx.Node, tuple[Choice, ...]],
    held: Mapping[fx.Node, tuple[Held, ...]],
    *,
    device: torch.device,
    training: bool,
    again: Mapping[fx.Node, str] = MappingProxyType({}),
    rows: Mapping[fx.Node, tuple[int, ...]] = MappingProxyType({}),
) -> fx.GraphModule:
    """Make the local graph.

    Args:
        module: normal graph.
        part: what of it runs here.
        factors: its factors.
        mesh: the mesh, with the axis in time if there is one.
        choices: for each op its choice on every axis.
        held: for each parameter how it is held on every axis.
        device: where the graph will run.
        training: a backward will follow; without one R and R* are the same.
        again: ops that the backward computes again, with the level (`plan.OpPlan`), and moves again where they are wanted.
        rows: inputs that come as this rank's rows, with the axes that split them, major first.
    """
    return _Rewriter(module, part, factors, mesh, choices, held, device, training, again, rows).run()


def result_layout(value: Value, factors: Factors, mesh: Mesh, choices: Mapping[fx.Node, tuple[Choice, ...]]) -> Layout:
    """How an op gives a value."""
    return Layout(mesh, factors.values[value], tuple(choice.results[value.index] for choice in choices[value.node]))


@dataclass(slots=True)
class _Rewriter:
    module: fx.GraphModule
    part: Part
    factors: Factors
    mesh: Mesh
    choices: Mapping[fx.Node, tuple[Choice, ...]]
    held: Mapping[fx.Node, tuple[Held, ...]]
    device: torch.device
    training: bool
    again: Mapping[fx.Node, str]
    rows: Mapping[fx.Node, tuple[int, ...]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    local: dict[Value, fx.Node] = field(default_factory=dict)
    layouts: dict[Value, Layout] = field(default_factory=dict)
    resharded: dict[tuple[fx.Node, Step], fx.Node] = field(default_factory=dict)
    narrowed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    coordinates: list[fx.Node] = field(default_factory=list)
    seed: fx.Node | None = None
    salts: dict[fx.Node, int] = field(default_factory=dict)

    def run(self) -> fx.GraphModule:
        for node in self.part.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for value in self.part.received:
            self._received(value)
        for name in self.mesh.names:
            self.coordinates.append(self._scalar_placeholder(f"coordinate_{name}"))
        for node in self.part.nodes:
            if self.mesh.time_axis in self.rows.get(node, ()):
                self._take_microbatch(Value(node))
        self.seed = self._scalar_placeholder("seed")
        self.salts = {node: i for i, node in enumerate(node for node in self.module.graph.nodes if node.target in DRAWN)}
        for node in self.part.nodes:
            if node.op == "get_attr" or (node.op == "call_function" and node.meta["constant"]):
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
        self._results()
        local = fx.GraphModule(self.module, self.graph)
        self.graph.lint()
        return local

    def _scalar_placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["specs"] = (TensorSpec((1,), torch.int64),)
        return node

    def _record(self, value: Value, node: fx.Node, layout: Layout, spec: TensorSpec) -> None:
        self.local[value], self.layouts[value] = node, layout
        node.meta["specs"] = (replace(spec, shape=layout.local_shape),)
        node.meta["layout"] = str(layout)

    def _placeholder(self, node: fx.Node) -> None:
        value, spec = Value(node), value_spec(Value(node))
        atoms = self.factors.values[value]
        layout = storage_layout(self.mesh, atoms, self.held[node]) if node in self.held else self._whole(atoms)
        for axis in self.rows.get(node, ()):
            layout = layout if axis == self.mesh.time_axis else layout.with_placement(axis, shard(0))
        copied = self.graph.placeholder(str(node.target))
        copied.meta = {"placeholder": node.meta["placeholder"], "line": "", "module": ""}
        self._record(value, copied, layout, spec.stored)
        if not spec.is_reduced_as_stored:
            self._record(value, self._narrowed(copied, spec.dtype), layout, replace(spec, master=None))

    def _take_microbatch(self, value: Value) -> None:
        """Of a rank's rows those of a micro-batch: they lie one micro-batch after the other."""
        time = self.mesh.time_axis
        assert time is not None
        layout = self.layouts[value].with_placement(time, shard(0))
        arguments = (("axis", self.mesh.names[time]), ("size", self.mesh.sizes[time]), ("spot", Spot(0, 1)), ("partial_grad", False))
        step = Step(collectives.shard_slice, time, arguments, layout.local_shape)
        self._record(value, self._apply(self.local[value], step, value_spec(value), source_name(value)), layout, value_spec(value))

    def _received(self, value: Value) -> None:
        name = f"{value.node.name}_{value.index}" if len(specs_of(value.node)) > 1 else value.node.name
        made = self.graph.placeholder(f"received_{name}")
        made.meta = {key: value.node.meta[key] for key in ("line", "module")}
        self._record(value, made, result_layout(value, self.factors, self.mesh, self.choices), value_spec(value))

    def _whole(self, atoms: tuple[tuple[int, ...], ...]) -> Layout:
        return Layout(self.mesh, atoms, (REPLICATED,) * len(self.mesh.sizes))

    def _constant(self, node: fx.Node) -> None:
        copied = self.graph.node_copy(node, lambda used: self.local[Value(used)])
        copied.args, copied.kwargs = pytree.tree_map_only(torch.device, lambda _: self.device, (copied.args, copied.kwargs))
        if makes_on_device(node.target):
            copied.kwargs = {**copied.kwargs, "device": self.device}
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
        layouts = [result_layout(Value(node, i), self.factors, self.mesh, self.choices) for i in range(len(call.results))]
        target, args, kwargs = local_form(call, self._local_view(node, choices, layouts))
        args, kwargs = pytree.tree_map(lambda x: self._argument(x, inputs), (args, kwargs))
        if node in self.salts:
            made = self._drawn(node, args, layouts[0])
        else:
            made = self.graph.call_function(target, args, kwargs)
        custom = {"again": self.again.get(node, ""), "of": node.name}
        made.meta.update({key: node.meta[key] for key in ("line", "module")}, origin=node.name, custom=custom)
        if len(call.results) == 1:
            self._record(Value(node), made, layouts[0], call.results[0])
            return
        for i, (layout, spec) in enumerate(zip(layouts, call.results, strict=True)):
            item = self.graph.call_function(getitem, (made, i))
            item.meta.update({key: node.meta[key] for key in ("line", "module")}, custom=dict(custom))
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

    def _drawn(self, node: fx.Node, args: tuple[object, ...], layout: Layout) -> fx.Node:
        assert self.seed is not None
        arguments: dict[str, Any] = {"salt": self.salts[node], "pieces": random.layout_pieces(layout)}
        if node.target is aten.rand_like.default:
            return self.graph.call_function(
                random.uniform, (self.seed, list(self.coordinates)), {"dtype": value_spec(Value(node)).dtype, **arguments}
            )
        x, probability, *_ = args
        assert isinstance(x, fx.Node) and isinstance(probability, float)
        return self.graph.call_function(
            random.dropout, (x, self.seed, list(self.coordinates)), {"probability": probability, **arguments}
        )

    def _reshard(self, value: Value, wanted: Sequence[Placement]) -> fx.Node:
        layout, node, dtype = self.layouts[value], self.local[value], value_spec(value).dtype
        target, specs = Layout(self.mesh, layout.atoms, tuple(wanted)), specs_of(node)
        spec = specs[value.index if len(specs) > 1 else 0]
        needs_grad, held = spec.requires_grad and self.training, self.held.get(value.node)
        if held is None:
            steps = plan_steps(layout, target, needs_grad=needs_grad)
        else:
            time = self.mesh.time_axis
            if time is not None and not target.placements[time].holds_whole:  # the gradient of a part is a summand, like that of the whole
                layout = layout.with_placement(time, REPLICATED_PARTIAL_GRAD)
                held = (*held[:time], REPLICATED_PARTIAL_GRAD)
            steps = plan_parameter_steps(layout, held, wanted, needs_grad=needs_grad)
        for step in steps:
            node = self._apply(node, step, spec, source_name(value))
        return node if spec.dtype == dtype else self._narrowed(node, dtype)

    def _narrowed(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A copy of what comes of a parameter in the dtype that the model computes in; its gradient comes back in that of the parameter.

        Where gradients are summed over ranks in the wider dtype, it stands behind the reshards of the parameter, for the sake of their
        backwards; forward it is moved before them (`passes.narrow`).
        """
        if node not in self.narrowed:
            made = self.graph.call_function(narrow, (node,), {"dtype": dtype})
            made.meta = {"line": "", "module": "", "custom": {"again": ""}, "specs": (replace(specs_of(node)[0], dtype=dtype),)}
            self.narrowed[node] = made
        return self.narrowed[node]

    def _apply(self, node: fx.Node, step: Step, spec: TensorSpec, moved: str) -> fx.Node:
        if step.axis == self.mesh.time_axis and step.op is collectives.replicate:
            return node  # gradients add up over the micro-batches outside of the graph
        key = (node, step)
        if key not in self.resharded:
            made = self.graph.call_function(step.op, (node, self.coordinates[step.axis]), dict(step.arguments))  # type: ignore[arg-type]
            made.meta["specs"] = (replace(spec, shape=step.local_shape),)
            made.meta.update(line=node.meta.get("line", ""), module=node.meta.get("module", ""))
            made.meta["custom"] = {"again": node.meta.get("custom", {}).get("again", ""), "moved": moved}
            self.resharded[key] = made
        return self.resharded[key]

    def _results(self) -> None:
        """Values for the next stage as they lie; outputs of the model whole, but for the axis in time."""
        results = [self.local[value] for value in self.part.sent]
        values = outputs_of(self.module.graph)
        for value in (values[position] for position in self.part.outputs):
            whole = [REPLICATED] * len(self.mesh.sizes)
            if self.mesh.time_axis is not None:
                whole[self.mesh.time_axis] = self.layouts[value].placements[self.mesh.time_axis]
            results.append(self._reshard(value, whole))
        self.graph.output(tuple(self._owned(node) for node in results))

    def _owned(self, node: fx.Node) -> fx.Node:
        """The caller owns what it gets: an output must not share storage with an input or another output. Its gradient comes contiguous."""
        copy = self.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copy.meta.update(specs=node.meta["specs"][-1:], line="", module="")
        return copy
