"""What a rewritten graph does, found by running it once on fake tensors, which have shapes and no numbers.

Node by node: is every result what the passes traced, which collectives start in which order, how many flops, which memory is taken and let
go when. A graph depends on its rank by the values of its coordinates alone, so that one run tells for all ranks that have the graph.

Memory is that of values: of each storage the bytes, from the node that makes it until the last node that reads it, or for what a collective
works on until that is waited for. What an op takes for itself while it runs is not counted, nor are constants of the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils import flop_counter

from autopar.ops import onednn
from autopar.ops.collectives import group_name
from autopar.ops.host import leave
from autopar.passes.aliases import WAIT
from autopar.passes.overlap import STARTS

aten = torch.ops.aten

_AXIS = len(group_name(""))
_IN_PLACE = (torch.ops._c10d_functional.all_reduce_.default, torch.ops._c10d_functional.all_reduce_coalesced_.default)
_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its numbers: shape, strides in elements, dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: torch.Tensor) -> Form:
        return Form(tuple(x.shape), tuple(x.stride()), x.dtype)

    @staticmethod
    def packed(shape: tuple[int, ...], dtype: torch.dtype) -> Form:
        """A tensor that lies row by row."""
        return Form(shape, tuple(math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape))), dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    @property
    def text(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Call:
    """One communication call of a rank.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send``, ``receive``, or ``wait`` for
            the first receive that is not waited for.
        over: name of the mesh axis; of the pipeline axis for messages and for what stages share.
        dtype: of what it takes; "" for ``wait``.
        shapes: of the tensors that it takes (of those that arrive, for ``receive``).
        num_bytes: of the whole buffer: what a gather gives, what the others take.
        detail: the reduction, or the lengths of an all-to-all's parts; equal on all ranks of the group.
        peer: position of the other rank of a message, of the source of a broadcast; -1 for other collectives.
        positions: on the pipeline axis, of those who share a parameter; empty for all of the axis.
        name: where, for messages; differs from rank to rank.
    """

    kind: str
    over: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    detail: str = ""
    peer: int = -1
    positions: tuple[int, ...] = ()
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        what = ", ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)
        more = f" ({self.detail})" * bool(self.detail) + f" at {self.name}" * bool(self.name)
        return f"{self.kind} of {what} over {self.over}{more}"


@dataclass(frozen=True, slots=True)
class Observed:
    """What a graph does.

    Args:
        inputs: what it takes.
        takes: for each input its storage.
        steps: what happens to storages, in order: (storage, bytes) takes memory for a new one, (storage, -1) lets go of one.
        outputs: storage and form of what it gives.
        at_work: for what collectives give that another graph waits for, by its storage, the storages that they work on until then.
        num_storages: their number; those of inputs are the first.
        calls: collectives, in the order in which they start.
        flops: of products, convolutions and attention, as torch counts them.
        findings: what is not as it was traced.
    """

    inputs: tuple[Form, ...]
    takes: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, Form], ...]
    at_work: Mapping[int, tuple[int, ...]]
    num_storages: int
    calls: tuple[Call, ...]
    flops: int
    findings: tuple[str, ...]


def observe(module: fx.GraphModule, *, has_host: bool = False) -> Observed:
    """Run a graph on fake tensors of the forms that its placeholders say (``meta["val"]``). What leaves for the host takes no memory if
    that ``has_host``, a memory of its own.

    A result that an op cannot give from its operands, or gives in another shape or dtype than ``meta["val"]`` says, is a finding; the run
    goes on with what was said where it cannot be given.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return _Run(module, has_host).result()


class _Run:
    """One run; all values stay, so that their storages can be told apart."""

    def __init__(self, module: fx.GraphModule, has_host: bool) -> None:
        self.module, self.has_host = module, has_host
        self.nodes = list(module.graph.nodes)
        self.values: dict[fx.Node, Any] = {}
        self.storages: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.made: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        self.calls: list[Call] = []
        self.flops = 0
        self.findings: list[str] = []

    def result(self) -> Observed:
        inputs: list[Form] = []
        takes: list[int] = []
        outputs: tuple[tuple[int, Form], ...] = ()
        for t, node in enumerate(self.nodes):
            if node.op == "placeholder":
                value = _fake(node)
                self.values[node] = value
                inputs.append(Form.of(value))
                takes.append(self._storage(value, t, is_new=False))
            elif node.op == "get_attr":
                self.values[node] = operator.attrgetter(str(node.target))(self.module)
            elif node.op == "output":
                returned = [self.values[result] for result in node.args[0]]
                outputs = tuple((self._storage(value, t, is_new=False), Form.of(value)) for value in returned)
            else:
                self._call(t, node)
        at_work = self._at_work()
        kept = {storage for storage, _ in outputs}.union(*at_work.values())
        ends: list[list[int]] = [[] for _ in self.nodes]
        num_placeholders = len(inputs)
        for storage, last in self.last_use.items():
            if storage not in kept:
                ends[max(last, num_placeholders - 1)].append(storage)
        steps = [step for t in range(len(self.nodes)) for step in (*self.made[t], *((storage, -1) for storage in ends[t]))]
        return Observed(
            tuple(inputs),
            tuple(takes),
            tuple(steps),
            outputs,
            at_work,
            len(self.storages),
            tuple(self.calls),
            self.flops,
            tuple(self.findings),
        )

    def _at_work(self) -> dict[int, tuple[int, ...]]:
        """What collectives work on that start here and are waited for elsewhere, by the storage of what they give."""
        found: dict[int, tuple[int, ...]] = {}
        for node in self.nodes:
            if node.target in STARTS and node.target not in _IN_PLACE and all(user.target is not WAIT for user in node.users):
                operands = [x for used in node.all_input_nodes for x in tensors_of(self.values[used])]
                for result in tensors_of(self.values[node]):
                    found[self._number(result)] = tuple(map(self._number, operands))
        return found

    def _number(self, value: torch.Tensor) -> int:
        return self.storages[value.untyped_storage()._cdata]

    def _storage(self, value: torch.Tensor, t: int, *, is_new: bool, is_here: bool = True) -> int:
        """The number of a value's storage, which is used at ``t``."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = len(self.storages)
            if is_new:
                self.made[t].append((self.storages[key], storage.nbytes() if is_here else 0))
        self.last_use[self.storages[key]] = t
        return self.storages[key]

    def _call(self, t: int, node: fx.Node) -> None:
        target, args, kwargs = node.target, *fx.node.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        assert callable(target)
        operands = tensors_of((args, kwargs))
        if target is WAIT:  # what it waits for has been at work until now
            started = node.args[0]
            assert isinstance(started, fx.Node)
            operands += [x for used in started.all_input_nodes for x in tensors_of(self.values[used])]
        try:
            result = args[0] if target is WAIT or target in _IN_PLACE else target(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.findings.append(f"{node.name} cannot be computed from {', '.join(Form.of(x).text for x in operands)}: {reason}")
            result = _fake(node)
        said = node.meta.get("val")
        for x, wanted in zip(tensors_of(result), tensors_of(said), strict=False) if said is not None else ():
            if Form.of(x).text != Form.of(wanted).text:
                self.findings.append(f"{node.name} gives {Form.of(x).text}, where {Form.of(wanted).text} was traced")
        self.values[node] = result
        for x in operands:
            self._storage(x, t, is_new=False)
        for x in tensors_of(result):
            self._storage(x, t, is_new=True, is_here=not (self.has_host and target is leave))
        if target in STARTS:
            self.calls.append(_collective(target, args, operands, result))
        self.flops += _flops(target, args, kwargs, result)


def _fake(node: fx.Node) -> Any:
    """A value like that of a node as it was traced."""
    return pytree.tree_map_only(
        torch.Tensor, lambda x: torch.empty_strided(tuple(x.shape), tuple(x.stride()), dtype=x.dtype, device=x.device), node.meta["val"]
    )


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in a value, in order."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def _collective(target: object, args: Sequence[Any], operands: Sequence[torch.Tensor], result: object) -> Call:
    name = str(getattr(target, "_opname", target))
    kind, axis = _KINDS[name], str(args[-1])[_AXIS:]
    whole = tensors_of(result) if kind == "all_gather" else operands
    detail = " ".join(str(x) for x in args[1:-1])
    return Call(kind, axis, Form.of(operands[0]).text.partition("[")[0], tuple(tuple(x.shape) for x in operands), _num_bytes(whole), detail)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _linear_flops(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return int(flop_counter.mm_flop(x, (weight[1], weight[0])))


def _attention_backward_flops(grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad, q, k, v))


def _attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object) -> int:
    return int(flop_counter.sdpa_flop_count(q, k, v))


_MORE_FLOPS: dict[object, Callable[..., int]] = {
    onednn.linear: _linear_flops,
    aten.addmm_.default: flop_counter.addmm_flop,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
}
"""Formulas of what torch's own table does not have."""


def _flops(target: object, args: Sequence[Any], kwargs: dict[str, Any], result: object) -> int:
    formula = _MORE_FLOPS.get(target)
    if formula is not None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.shape, (tuple(args), kwargs))
        return int(formula(*args, **kwargs))
    formula = flop_counter.flop_registry.get(getattr(target, "overloadpacket", None))
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
