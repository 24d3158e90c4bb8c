"""Local graph -> one graph of all that it and its backward compute, op by op.

What autograd does with a whole graph is done call by call: forward, each call gives way to what torch runs for it; then, from the last to
the first, to what autograd runs once gradients of its results have come in, and gradients of the same value are added. That is the order of
autograd's engine. What runs is recorded once for all calls alike (`passes.recording`): for a model of twelve layers that takes less than a
third of the time that recording all of it takes (`benchmarks/differentiate.py`).

``meta["val"]`` of a node has the shape, strides and dtype of what it makes. Nodes of equal calls share it; which values share memory is
told by `passes.aliases`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.passes.recording import Call, Kind, Place, Recording, Recordings, Value

aten = torch.ops.aten
BACKWARD = "is_backward"
"""``meta["partitioner_tag"]`` of what autograd adds."""
_NUMBER = re.compile(r"_\d+$")
"""What a name ends in that tells nodes of one graph apart."""


def trace_forward(local: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """What a graph computes of ``inputs``, by functions alone.

    Args:
        inputs: fake tensors; no gradient is made for any.
    """
    joint = _Joint()
    outputs = joint.forward(local, [joint.given(f"primals_{i}", Kind.of(x.detach())) for i, x in enumerate(inputs, 1)])
    return joint.module(outputs)


def trace_joint(
    local: fx.GraphModule, inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], differentiable: Sequence[int]
) -> fx.GraphModule:
    """What a graph computes, and then its backward, by functions alone.

    Args:
        local: its outputs are tensors; ``meta["custom"]`` of its nodes is that of what runs for them and for their backwards.
        inputs: fake tensors; a gradient is made for each that requires one.
        tangents: gradients of outputs.
        differentiable: of each of ``tangents``, the position of the output.

    Returns:
        a graph of the inputs and tangents -> the outputs, then for each input its gradient or None.
    """
    joint = _Joint()
    given = [joint.given(f"primals_{i}", Kind.of(x)) for i, x in enumerate(inputs, 1)]
    incoming = [joint.given(f"tangents_{i}", Kind.of(x)) for i, x in enumerate(tangents, 1)]
    outputs = joint.forward(local, given)
    gradients = joint.backward([(outputs[i], tangent) for i, tangent in zip(differentiable, incoming, strict=True)])
    return joint.module([*outputs, *(gradients.get(value) for value in given)])


class _Done(NamedTuple):
    """A call whose ops are in the graph.

    Args:
        operands: its tensors; ``results`` are those that it returns.
        copies: node of its recording -> node of the graph.
        custom: what is known of the node that makes the call.
    """

    call: Call
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    recording: Recording
    copies: dict[fx.Node, fx.Node]
    custom: object


class _Joint:
    """A graph that grows: forward call by call, then backward."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.recordings = Recordings()
        self.done: list[_Done] = []

    def given(self, name: str, kind: Kind) -> Value:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.recordings.tensor(kind._replace(requires_grad=False))
        return Value(node, kind)

    def forward(self, local: fx.GraphModule, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of ``local``."""
        env: dict[fx.Node, Any] = dict(zip(local.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in local.graph.nodes:
            if node.op == "get_attr":
                env[node] = self._constant(operator.attrgetter(str(node.target))(local))
            elif node.op == "call_function" and node.target is operator.getitem:
                env[node] = env[node.args[0]][node.args[1]]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                done, env[node] = self._call(node.target, args, kwargs, custom=node.meta.get("custom"))
                self.done.append(done)
            else:
                assert node.op in ("placeholder", "output"), node.format_node()
        (output,) = local.graph.find_nodes(op="output")
        return [env[node] for node in output.args[0]]

    def backward(self, tangents: Sequence[tuple[Value, Value]]) -> dict[Value, Value]:
        """Gradients of values, given some."""
        gradients: dict[Value, Value] = {}

        def add(value: Value, gradient: Value) -> None:
            if value in gradients:
                _, gradient = self._call(aten.add.Tensor, (gradients[value], gradient), {}, tag=BACKWARD)
            gradients[value] = gradient

        for value, tangent in tangents:
            add(value, tangent)
        for done in reversed(self.done):
            incoming = [gradients.pop(value, None) for value in done.results]
            if any(incoming):
                for operand, gradient in self._backward(done, incoming):
                    add(operand, gradient)
        return gradients

    def _call(
        self, function: Callable[..., Any], args: object, kwargs: object, *, custom: object = None, tag: str | None = None
    ) -> tuple[_Done, Any]:
        """Put what runs for a call in the graph.

        Returns:
            the call as it is done, and what it returns, with a `Value` for each tensor.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        operands = tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Value)))
        places = {value: Place(i) for i, value in enumerate(operands)}
        leaves = [places[leaf] if isinstance(leaf, Value) else leaf for leaf in leaves]
        call = Call(function, spec, tuple(leaves), tuple(value.kind for value in operands))
        recording = self.recordings.of(call)
        copies = dict(zip(recording.inputs, [value.node for value in operands], strict=True))
        self._put(recording.nodes, recording, copies, custom, tag)
        result = pytree.tree_map_only(Value, lambda x: Value(copies[x.node], x.kind), recording.result)
        results = tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Value))
        return _Done(call, operands, results, recording, copies, custom), result

    def _backward(self, done: _Done, incoming: Sequence[Value | None]) -> Iterator[tuple[Value, Value]]:
        """Put what runs for the backward of a call in the graph; gives each operand that gets a gradient, with that."""
        recording = self.recordings.with_backward(done.call, tuple(None if x is None else x.kind for x in incoming))
        forward = done.recording.nodes  # with which the other begins
        copies = dict(zip(recording.inputs, [x.node for x in (*done.operands, *incoming) if x is not None], strict=True))
        copies.update((node, done.copies[same]) for node, same in zip(recording.nodes, forward, strict=False))
        self._put(recording.nodes[len(forward) :], recording, copies, done.custom, BACKWARD)
        for operand, gradient in zip(done.operands, recording.result, strict=True):
            if gradient is not None:
                yield operand, Value(copies[gradient.node], gradient.kind)

    def _put(
        self, nodes: Iterable[fx.Node], recording: Recording, copies: dict[fx.Node, fx.Node], custom: object, tag: str | None
    ) -> None:
        """Copy nodes of a recording into the graph."""
        for node in nodes:
            if node.op == "get_attr":
                copies[node] = self._constant(recording.constants[str(node.target)]).node
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            name = _NUMBER.sub("", node.name)
            copies[node] = copy = self.graph.create_node(node.op, node.target, args, kwargs, name=name)
            copy.meta = {"val": node.meta["val"]}
            if custom is not None:
                copy.meta["custom"] = custom
            if tag is not None:
                copy.meta["partitioner_tag"] = tag

    def _constant(self, x: torch.Tensor) -> Value:
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = x
        node = self.graph.get_attr(name)
        node.meta["val"] = x
        return Value(node, Kind.of(x))

    def module(self, results: Sequence[Value | None]) -> fx.GraphModule:
        """The graph that gives ``results``, without what none of them needs."""
        self.graph.output(tuple(None if value is None else value.node for value in results))
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.constants, self.graph)
