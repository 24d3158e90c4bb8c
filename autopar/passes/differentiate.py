"""Local graph -> explicit forward and backward graphs.

Both are traced into one joint graph (`passes.joint`), which is cut in two here. What the backward needs of the forward is saved, but views
are made again from what they view, gathered copies of ZeRO-3 parameters are gathered again instead of kept, and so is what the plan says
(nodes with ``meta["custom"]["again"]``, a key that tracing carries on), each just before the backward first needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.graph import specs_of
from autopar.passes.aliases import base_of, may_write, readers
from autopar.passes.joint import trace_forward, trace_joint
from autopar.passes.narrow import narrow_early, narrow_results
from autopar.rules.registry import TensorSpec

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.detach.default,
        aten.alias.default,
    }
)


@dataclass(frozen=True, slots=True)
class Halves:
    """The graphs of one step.

    Args:
        forward: inputs of the local graph -> its outputs, then the saved values.
        backward: saved values, then one tangent per differentiable output -> one gradient per input that needs one, in order. None if
            nothing is differentiated.
        num_outputs: outputs of the local graph.
        differentiable: positions of the outputs that a gradient may come in for.
        with_grad: positions of the inputs that get a gradient.
        made_of: for each of them the outputs, by position, whose gradients it is made of.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    differentiable: tuple[int, ...]
    with_grad: tuple[int, ...]
    made_of: tuple[frozenset[int], ...] = ()

    def graphs(self) -> Iterator[tuple[fx.GraphModule, str]]:
        """Both graphs, with their names."""
        yield self.forward, "forward"
        if self.backward is not None:
            yield self.backward, "backward"

    def kept_inputs(self) -> frozenset[int]:
        """Positions of the inputs whose memory the backward reads."""
        (output,) = self.forward.graph.find_nodes(op="output")
        bases = {base_of(node) for node in output.args[0][self.num_outputs :]}
        return frozenset(i for i, node in enumerate(self.forward.graph.find_nodes(op="placeholder")) if node in bases)


def differentiate(
    local: fx.GraphModule,
    *,
    gather_again: Sequence[int],
    device: torch.device,
    training: bool,
    num_inner: int | None = None,
    narrowed: Sequence[torch.dtype | None] = (),
) -> Halves:
    """Trace and cut.

    Args:
        local: local graph; its specs give shapes, dtypes and which inputs need gradients.
        gather_again: positions of the inputs that are ZeRO-3 parameters.
        device: where it will run.
        training: make a backward too.
        num_inner: of a part of the model, how many of its first outputs stay inside of the step, as what a stage sends on. Each gets a
            gradient if it needs one, and may share storage with an input; of the others only scalar losses get one. None: the graph is
            the whole model, of which the scalar losses get a gradient, or if there are none all that depends on parameters.
        narrowed: dtypes in which the first outputs are given, though their gradients come in that of the local graph (`passes.prepare`).
    """
    placeholders = local.graph.find_nodes(op="placeholder")
    (output,) = local.graph.find_nodes(op="output")
    specs = [specs_of(node)[0] for node in placeholders]
    out_specs = [specs_of(node)[-1] for node in output.args[0]]
    differentiable = _differentiable(out_specs, num_inner) if training else ()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad and bool(differentiable))
            for spec in specs
        ]
        tangents = [torch.empty(out_specs[i].shape, dtype=out_specs[i].dtype, device=device) for i in differentiable]
    if not differentiable:
        forward = _unowned(trace_forward(local, fakes), len(out_specs), num_inner or 0)
        return Halves(narrow_early(narrow_results(forward, narrowed)), None, len(out_specs), (), ())
    joint = trace_joint(local, fakes, tangents, differentiable)
    halves = _cut(narrow_early(joint), len(out_specs), differentiable, frozenset(gather_again))
    forward = _unowned(halves.forward, len(out_specs), num_inner or 0)
    return replace(halves, forward=narrow_early(narrow_results(forward, narrowed)))


def _differentiable(specs: Sequence[TensorSpec], num_inner: int | None) -> tuple[int, ...]:
    needing = [i for i, spec in enumerate(specs) if spec.requires_grad]
    if num_inner is None:
        return tuple([i for i in needing if specs[i].shape == ()] or needing)
    return tuple(i for i in needing if i < num_inner or specs[i].shape == ())


def _unowned(forward: fx.GraphModule, num_outputs: int, num_inner: int) -> fx.GraphModule:
    """Take away the copies that only made outputs the caller's own: of the inner ones, the first, and of those of what nobody else has."""
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    for i, node in enumerate(results[:num_outputs]):
        copy = node.args[0] if node.target is aten.detach.default else node
        if copy.target is aten.clone.default and (i < num_inner or _is_for(copy, output)):
            results[i] = copy.args[0]
    output.args = (tuple(results),)
    for target in (aten.detach.default, aten.clone.default):
        for node in [node for node in forward.graph.find_nodes(op="call_function", target=target) if not node.users]:
            forward.graph.erase_node(node)
    forward.recompile()
    return forward


def _is_for(copy: fx.Node, output: fx.Node) -> bool:
    """Whether what is copied was made for that alone, and lies as the copy does, which is only given."""
    copied = copy.all_input_nodes[0]
    return copied.meta["val"].is_contiguous() and may_write(copied, copy) and readers(copy) == {output}


def _cut(joint: fx.GraphModule, num_outputs: int, differentiable: tuple[int, ...], gather_again: frozenset[int]) -> Halves:
    nodes = list(joint.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    primals = placeholders[: len(placeholders) - len(differentiable)]
    tangents = placeholders[len(primals) :]
    (output,) = joint.graph.find_nodes(op="output")
    results = list(output.args[0])
    outputs, grads = results[:num_outputs], results[num_outputs:]
    with_grad = tuple(i for i, grad in enumerate(grads) if isinstance(grad, fx.Node))

    in_forward = _ancestors(outputs) | set(primals)
    in_forward |= {node for node in nodes if node.target is operator.getitem and node.all_input_nodes[0] in in_forward}
    cheap = _made_again(nodes, {primals[i] for i in gather_again})
    saved: list[fx.Node] = []
    backward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    body = fx.Graph()

    def save(node: fx.Node) -> fx.Node:
        saved.append(node)
        env[node] = backward.placeholder(f"saved_{node.name}")
        env[node].meta = dict(node.meta)
        return env[node]

    def load(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        if node.op == "get_attr" or (node in in_forward and node in cheap) or node not in in_forward:
            for used in node.all_input_nodes:
                load(used)
            env[node] = body.node_copy(node, env.__getitem__)
            return env[node]
        return save(node)

    for tangent in tangents:
        env[tangent] = backward.placeholder(tangent.name)
        env[tangent].meta = dict(tangent.meta)
    needed, of_tangents = _ancestors([grads[i] for i in with_grad]), set(tangents)
    for node in nodes:
        if not of_tangents.isdisjoint(node.all_input_nodes):
            of_tangents.add(node)
            if node in needed and node.op == "call_function":
                load(node)  # with what it is made of: what is made again comes no earlier than its first use
    returned = tuple(load(grads[i]) for i in with_grad)
    merged = _merge(backward, body, returned, [env[t] for t in tangents])
    forward = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in in_forward and node.op != "output":
            copies[node] = forward.node_copy(node, copies.__getitem__)
    forward.output(tuple(copies[node] for node in (*outputs, *saved)))
    of_grads = (_ancestors([grads[i]]) for i in with_grad)
    made_of = tuple(frozenset(i for i, tangent in zip(differentiable, tangents, strict=True) if tangent in nodes) for nodes in of_grads)
    return Halves(fx.GraphModule(joint, forward), fx.GraphModule(joint, merged), num_outputs, differentiable, with_grad, made_of)


def _merge(head: fx.Graph, body: fx.Graph, returned: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> fx.Graph:
    """One graph: placeholders (saved values first, then tangents), then the body."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in head.nodes if node not in tangents]
    for node in (*inputs, *tangents, *body.nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in returned))
    return graph


def _ancestors(roots: Sequence[object]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [root for root in roots if isinstance(root, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen


def _made_again(nodes: Sequence[fx.Node], gathered: set[fx.Node]) -> set[fx.Node]:
    """Nodes that the backward makes again: views, what is marked so, packed copies of that (which products make for themselves), and all
    that comes of ZeRO-3 parameters alone."""
    alone = set(gathered)
    again = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.all_input_nodes and all(used in alone for used in node.all_input_nodes):
            alone.add(node)
            again.add(node)
        elif node.target in _VIEWS or _is_marked(node) or _packs_what_is_marked(node):
            again.add(node)
    return again


def _is_marked(node: fx.Node) -> bool:
    return bool(node.meta.get("custom", {}).get("again"))


def _packs_what_is_marked(node: fx.Node) -> bool:
    return node.target is aten.clone.default and _is_marked(_viewed(node.all_input_nodes[0]))


def _viewed(node: fx.Node) -> fx.Node:
    """What a view looks at."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


