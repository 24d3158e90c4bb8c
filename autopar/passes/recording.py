"""What torch runs for one call and for its backward, recorded op by op on fake tensors.

A graph makes the same calls again and again, once a layer, and torch runs the same ops for all that are alike: of equal functions, numbers
and kinds of tensors. `Recordings` records each kind of call once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.writes import mutates
from autopar.errors import CaptureError

aten = torch.ops.aten
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What is raised where torch looks at values."""
_LAID_OUT_OTHERWISE = frozenset(
    {
        aten._log_softmax_backward_data.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten.angle.default,
        aten.copysign.Tensor,
        aten.div.Tensor_mode,
        aten.elu_backward.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.huber_loss_backward.default,
        aten.index.Tensor,
        aten.log_sigmoid_forward.default,
        aten.logit_backward.default,
        aten.mse_loss_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.native_dropout_backward.default,
        aten.native_layer_norm_backward.default,
        aten.pow.Scalar,
        aten.smooth_l1_loss_backward.default,
        aten.softplus_backward.default,
        aten.upsample_bicubic2d_backward.default,
        aten.upsample_bilinear2d_backward.default,
        aten.upsample_linear1d_backward.default,
        aten.upsample_nearest1d_backward.default,
        aten.upsample_nearest2d_backward.default,
        aten.upsample_nearest3d_backward.default,
        aten.upsample_trilinear3d_backward.default,
        aten.xlogy.Tensor,
    }
)
"""Ops whose results, of operands that are not contiguous, have other strides than those of fake tensors (seen: torch 2.13, on CPUs)."""


class Kind(NamedTuple):
    """All that a recording may depend on of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> Kind:
        offset = int(x.storage_offset())
        return cls(tuple(x.shape), x.stride(), offset, x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg())

    def tensor(self) -> torch.Tensor:
        """A new one, which nothing was computed for."""
        with torch.no_grad():
            x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            if self.offset:
                end = self.offset + x.untyped_storage().nbytes() // x.itemsize
                x = torch.empty(end, dtype=self.dtype, device=self.device).as_strided(self.shape, self.strides, self.offset)
            x = x.conj() if self.conjugate else x
            x = torch._neg_view(x) if self.negative else x
        return x.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of a graph."""

    node: fx.Node
    kind: Kind


class Place(NamedTuple):
    """Stands in the arguments of a call for one of its tensors."""

    position: int


class Call(NamedTuple):
    """A function and what it is given.

    Args:
        leaves: of the arguments, in which a `Place` stands for each tensor; ``spec`` tells how they lie.
        kinds: of the tensors.
    """

    function: Callable[..., Any]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    kinds: tuple[Kind, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        leaves = [tensors[leaf.position] if isinstance(leaf, Place) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Recording:
    """What runs, by functions alone.

    Args:
        inputs: the tensors of the call, then the gradients that come in.
        nodes: in order.
        constants: tensors that nodes get by name.
        result: with a `Value` for each tensor.
    """

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    constants: dict[str, torch.Tensor]
    result: Any


class Recordings:
    """Those made so far, with fake tensors of one mode."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls: dict[Hashable, _Recorded] = {}

    def tensor(self, kind: Kind) -> torch.Tensor:
        """A fake tensor of a kind."""
        with self._faking():
            return kind.tensor()

    def of(self, call: Call) -> Recording:
        """What runs for a call; the result is what it returns."""
        return self._recorded(call).forward

    def with_backward(self, call: Call, tangents: tuple[Kind | None, ...]) -> Recording:
        """What runs for a call and then for its backward.

        Args:
            tangents: kinds of the gradients that come in for the tensors that the call returns.

        Returns:
            the nodes of the call come first, as in `of`; the result has for each tensor of the call its gradient or None.

        Raises:
            CaptureError: the backward looks at values.
        """
        recorded = self._recorded(call)
        if tangents not in recorded.backwards:
            try:
                with self._faking():
                    recorded.backwards[tangents] = recorded.backward(tangents)
            except UNKNOWN as error:
                raise CaptureError(
                    f"the backward of {call.function} looks at values of tensors ({error}), so that it is no graph: make what it "
                    "does an op of its own, by torch.library.custom_op and register_fake"
                ) from error
        return recorded.backwards[tangents]

    def _recorded(self, call: Call) -> _Recorded:
        key = (call.function, call.spec, tuple(map(_typed, call.leaves)), call.kinds)
        if key not in self._calls:
            try:
                with self._faking():
                    self._calls[key] = _Recorded(call)
            except UNKNOWN as error:
                raise CaptureError(
                    f"{call.function} looks at values of tensors ({error}), so that it is no graph: what it gives must have a shape that "
                    "its inputs tell; or make it an op of its own, by torch.library.custom_op and register_fake"
                ) from error
        return self._calls[key]

    @contextmanager
    def _faking(self) -> Iterator[None]:
        """With gradients, which ``inference_mode(False)`` turns on too."""
        with torch.inference_mode(False), self._mode:
            yield


def _typed(leaf: Any) -> tuple[type, object]:
    """Equal for leaves that no call tells apart: 1, 1.0 and True are told apart, and 0.0 and -0.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


class _Recorded:
    """A call that has run once, of which autograd remembers what its backwards need."""

    def __init__(self, call: Call) -> None:
        self.recorder = _Recorder()
        self.inputs = [kind.tensor() for kind in call.kinds]
        self.placeholders = tuple(map(self.recorder.given, self.inputs))
        with self.recorder.on():
            self.result = call.run(self.inputs)
        self.outputs = [x for x in pytree.tree_leaves(self.result) if isinstance(x, torch.Tensor)]
        self.nodes, values = self.recorder.taken(), list(map(self.recorder.value, self.outputs))
        self.writes = any(map(mutates, self.nodes))
        nodes, values = _functional(self.recorder, self.placeholders, self.nodes, values) if self.writes else (self.nodes, values)
        value_of = dict(zip(map(id, self.outputs), values, strict=True))
        result = pytree.tree_map_only(torch.Tensor, lambda x: value_of[id(x)], self.result)
        self.forward = Recording(self.placeholders, tuple(nodes), self.recorder.constants, result)
        self.backwards: dict[tuple[Kind | None, ...], Recording] = {}

    def backward(self, tangents: Sequence[Kind | None]) -> Recording:
        recorder, given = self.recorder, [kind.tensor() for kind in tangents if kind is not None]
        inputs = (*self.placeholders, *map(recorder.given, given))
        of = [x for x, kind in zip(self.outputs, tangents, strict=True) if kind is not None]
        with recorder.on():
            wanted = [x for x in self.inputs if x.requires_grad]
            made = torch.autograd.grad(of, wanted, given, retain_graph=True, allow_unused=True) if wanted else ()
        values = [recorder.value(x) for x in made if x is not None]
        first, new = list(self.forward.nodes), recorder.taken()
        if self.writes:  # functions of both at once, of which the first are those of the forward
            nodes, values = _functional(recorder, inputs, [*self.nodes, *new], values)
            assert list(map(_what, nodes[: len(first)])) == list(map(_what, first))
        elif any(map(mutates, new)):
            new, values = _functional(recorder, [*inputs, *first], new, values)
            nodes = first + new
        else:
            nodes = first + new
        found = iter(values)
        gradients = iter(None if x is None else next(found) for x in made)
        result = tuple(next(gradients) if x.requires_grad else None for x in self.inputs)
        return Recording(inputs, tuple(nodes), recorder.constants, result)


def _what(node: fx.Node) -> object:
    """What a node does; a constant has a name of its own in each recording."""
    return node.op if node.op == "get_attr" else node.target


def _functional(
    recorder: _Recorder, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], values: Sequence[Value]
) -> tuple[list[fx.Node], list[Value]]:
    """Functions that make ``values`` of what is in ``inputs``, as ``nodes`` do, some of which write into what they are given."""
    graph = fx.Graph()
    used = [node for node in inputs if any(user in nodes for user in node.users) or any(value.node is node for value in values)]
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in used}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[value.node] for value in values))
    again = _Recorder(recorder.graph, recorder.constants)
    given = [again.standing_for(node) for node in used]
    run = torch.func.functionalize(fx.Interpreter(fx.GraphModule(recorder.constants, graph)).run, remove="mutations")
    with again.on():
        made = run(*given)
    found = zip(map(again.value, made), values, strict=True)
    return again.taken(), [Value(new.node, new.kind._replace(requires_grad=old.kind.requires_grad)) for new, old in found]


class _Recorder(TorchDispatchMode):
    """Writes down which ops run below autograd."""

    def __init__(self, graph: fx.Graph | None = None, constants: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.graph = fx.Graph() if graph is None else graph
        self.constants: dict[str, torch.Tensor] = {} if constants is None else constants
        self._new: list[fx.Node] = []
        self._nodes = WeakTensorKeyDictionary()  # torch runs another op if somebody holds what an op returns
        self._num_given = 0

    def given(self, x: torch.Tensor) -> fx.Node:
        """The node of a tensor that is there before any op runs."""
        self._num_given += 1
        return self._made(self.graph.placeholder(f"given_{self._num_given}"), x)

    def standing_for(self, node: fx.Node) -> torch.Tensor:
        """A tensor that is given in place of what a node made."""
        x = Kind.of(node.meta["val"]).tensor()
        self._nodes[x] = node
        return x

    def taken(self) -> list[fx.Node]:
        """The nodes that are new since this was last called."""
        nodes, self._new = self._new, []
        return nodes

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node that made a tensor; a constant of a formula has one too."""
        if x not in self._nodes:
            assert not isinstance(x, FakeTensor), f"no op made {x}"
            name = f"_tensor_constant{len(self.constants)}"
            self.constants[name] = x
            self._new.append(self._made(self.graph.get_attr(name), x))
        node: fx.Node = self._nodes[x]
        return node

    def value(self, x: torch.Tensor) -> Value:
        return Value(self.node(x), Kind.of(x))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record. Autograd stays in this thread, on GPUs too, and looks for no NaN; an autocast adds no casts: a graph has its own
        (`autopar.precision`)."""
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.promote_types.default:  # no op: it tells a dtype
            return func(*args)
        if func is torch.ops.prim.device.default:  # no op: it asks where a tensor is
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        result = func(*args, **(kwargs or {}))
        known = fx.node.map_aggregate((args, kwargs or {}), lambda x: self.node(x) if isinstance(x, torch.Tensor) else x)
        self._record(self.graph.create_node("call_function", func, *known, name=func.overloadpacket.__name__), result)
        if func in _LAID_OUT_OTHERWISE and not all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor)):
            return pytree.tree_map_only(torch.Tensor, self._contiguous, result)
        return result

    def _contiguous(self, x: torch.Tensor) -> torch.Tensor:
        """What an op has made, laid out so that there is no doubt."""
        made = self.graph.call_function(aten.contiguous.default, (self.node(x),))
        x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._record(made, x)
        return x

    def _record(self, node: fx.Node, result: Any) -> None:
        self._new.append(node)
        if isinstance(result, torch.Tensor):
            self._made(node, result)
        elif isinstance(result, tuple | list):
            for i, x in enumerate(result):
                self._record(self.graph.call_function(operator.getitem, (node, i)), x)
            node.meta["val"] = type(result)(part.meta["val"] for part in node.users)
        else:
            node.meta["val"] = result

    def _made(self, node: fx.Node, x: torch.Tensor) -> fx.Node:
        node.meta["val"] = snapshot_fake(x)
        self._nodes[x] = node
        return node
