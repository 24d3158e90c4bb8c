"""Biases and norms travel together: their gathers as one, and the reductions of their gradients.

A collective of a vector takes its latency and little else, and on a ring that grows with the ranks. Shards of vectors are put in a row and
gathered as one where the first is wanted, and each is taken out of it where it is used; their gradients are put in a row when the last of
them is there, and reduced as one. FSDP does so with all that a block has, at the price of copies, which matrices are spared here; DeepSpeed
keeps small parameters whole for the same reason (``stage3_param_persistence_threshold``).

What travels over one axis after the other is a *chain* of collectives; chains that are alike travel together all the way, as a *bucket*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.passes.accumulate import results_of
from autopar.passes.aliases import SAME_ELEMENTS, WAIT
from autopar.passes.buckets import BUCKET_NUM_BYTES, SMALL_NUM_BYTES
from autopar.passes.overlap import ALL_GATHER, REDUCE_SCATTER, STARTS, parameter_gathers

aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE = _c10d.all_reduce.default
TOGETHER = "together"
"""In ``meta`` of a collective of several values, and of its wait: ``meta["custom"]`` of those that it stands for."""

Chain = tuple[fx.Node, ...]


def gather_together(module: fx.GraphModule, parameters: Sequence[int]) -> fx.GraphModule:
    """The same graph, with gathers of vectors done several at a time; ``parameters`` are positions of the placeholders that hold them."""
    placeholders = module.graph.find_nodes(op="placeholder")
    vectors = [placeholders[i] for i in parameters if placeholders[i].meta["val"].dim() <= 1]
    chains = [chain for chain in _gather_chains(module, vectors) if _num_bytes(chain[-1]) < SMALL_NUM_BYTES]
    return _Joiner(module, _buckets(chains, lambda chain: _num_bytes(chain[-1]))).run(waits_for_all=False)


def reduce_together(module: fx.GraphModule, late: Collection[int] = ()) -> fx.GraphModule:
    """The same graph, with gradients of vectors scattered several at a time.

    Args:
        module: the graph, whose results are gradients.
        late: positions of those whose reduction starts last (ZeRO-1), which do not travel with others.
    """
    def size(chain: Chain) -> int:
        return _num_bytes(chain[0].args[0])

    at = {node: i for i, node in enumerate(module.graph.nodes)}
    found: dict[bool, list[Chain]] = {False: [], True: []}
    for i, result in enumerate(results_of(module)):
        chain = _reduction_chain(result) if result is not None and result.meta["val"].dim() <= 1 else ()
        if chain and size(chain) < SMALL_NUM_BYTES:
            found[i in late].append(chain)
    buckets = [bucket for chains in found.values() for bucket in _buckets(sorted(chains, key=lambda chain: at[chain[0]]), size)]
    return _Joiner(module, buckets).run(waits_for_all=True)


def _gather_chains(module: fx.GraphModule, vectors: Sequence[fx.Node]) -> list[Chain]:
    """The gathers of each vector, where it has one way."""
    gathers = dict.fromkeys(node for node in parameter_gathers(list(module.graph.nodes), vectors) if node.target is ALL_GATHER)
    before: dict[fx.Node, fx.Node] = {}
    for gather in gathers:
        source = gather.all_input_nodes[0]
        while source.op == "call_function" and source not in gathers:
            source = source.all_input_nodes[0]
        before[gather] = source
    sources = list(before.values())
    chains = []
    for gather in gathers:
        if gather not in sources:
            chain = [gather]
            while before[chain[0]] in gathers:
                chain.insert(0, before[chain[0]])
            if all(sources.count(node) == 1 for node in chain[:-1]):
                chains.append(tuple(chain))
    return chains


def _reduction_chain(result: fx.Node) -> Chain:
    """The collectives that reduce a gradient on its way to a result, where one of them scatters it and nothing else reads it on its way."""
    chain: list[fx.Node] = []
    node = result
    while node.op == "call_function" and len(node.users) == 1 and (node.target in STARTS or _only_moves(node)):
        if node.target in STARTS:
            chain.insert(0, node)
        node = node.all_input_nodes[0]
    is_plain = all(node.target in (REDUCE_SCATTER, ALL_REDUCE) and node.args[0].meta["val"].is_contiguous() for node in chain)  # type: ignore[union-attr]
    return tuple(chain) if is_plain and any(node.target is REDUCE_SCATTER for node in chain) else ()


def _only_moves(node: fx.Node) -> bool:
    """Whether a node gives every element of its operand, in another shape, place or dtype."""
    return node.target in SAME_ELEMENTS or node.target in (aten.clone.default, aten._to_copy.default)


def _buckets(chains: Iterable[Chain], size: Callable[[Chain], int]) -> list[list[Chain]]:
    """Chains that are alike, in order, as many as fill a bucket; not those that are left alone."""
    done: list[list[Chain]] = []
    coming: dict[object, list[Chain]] = {}
    for chain in chains:
        key = chain[0].meta["val"].dtype, tuple((node.target, *node.args[1:]) for node in chain)
        bucket = coming.setdefault(key, [])
        bucket.append(chain)
        if sum(map(size, bucket)) >= BUCKET_NUM_BYTES:
            done.append(coming.pop(key))
    return [bucket for bucket in (*done, *coming.values()) if len(bucket) > 1]


@dataclass(slots=True)
class _Together:
    """The collectives of a bucket that are one, in order; when it has started, what it gives, of which each has a ``part``."""

    members: list[fx.Node]
    result: fx.Node | None = None
    part: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)


class _Joiner:
    """Copies a graph node by node, with one collective for the members of each bucket at each step of their chains."""

    def __init__(self, module: fx.GraphModule, buckets: Sequence[Sequence[Chain]]) -> None:
        self._module = module
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._of: dict[fx.Node, _Together] = {}
        for bucket in buckets:
            for members in zip(*bucket, strict=True):
                self._of |= dict.fromkeys(members, _Together(list(members)))

    def run(self, *, waits_for_all: bool) -> fx.GraphModule:
        """The new graph: a collective starts where the first of its members did, or where the last did if it waits for all, and then what
        comes of it is left for where it is read."""
        if not self._of:
            return self._module
        last = {id(together): node for node in self._module.graph.nodes if (together := self._of.get(node)) is not None}
        behind: set[fx.Node] = set()
        for node in self._module.graph.nodes:
            together = self._of.get(node)
            if waits_for_all and node.op == "call_function" and (together or not behind.isdisjoint(node.all_input_nodes)):
                behind.add(node)
                if together is None or last[id(together)] is not node:
                    continue
            self._put(node)
        self._graph.lint()
        return fx.GraphModule(self._module, self._graph)

    def _put(self, node: fx.Node) -> None:
        if node in self._env:
            return
        if node in self._of:
            self._start(self._of[node])
            return
        for used in node.all_input_nodes:
            self._put(used)
        is_piece = node.target is WAIT and node.args[0] in self._of
        self._env[node] = self._piece(node) if is_piece else self._graph.node_copy(node, self._env.__getitem__)

    def _start(self, together: _Together) -> None:
        if together.result is not None:
            return
        members, (first, *_) = together.members, together.members
        for member in members:
            self._put(member.args[0])  # type: ignore[arg-type]
        operands, end = [self._env[member.args[0]] for member in members], 0  # type: ignore[index]
        for member, operand in zip(members, operands, strict=True):
            begin, end = end, end + operand.meta["val"].numel() // (_size(member) if member.target is REDUCE_SCATTER else 1)
            together.part[member] = begin, end
        if first.target is REDUCE_SCATTER:
            rows = [self._call(aten.view.default, operand, [_size(first), -1]) for operand in operands]
            packed = self._call(aten.view.default, self._call(aten.cat.default, rows, 1), [-1])
        else:
            packed = self._call(aten.cat.default, [self._call(aten.view.default, operand, [-1]) for operand in operands])
        started = self._call(first.target, packed, *first.args[1:])
        waited = self._call(WAIT, started)
        for made in (started, waited):
            made.meta[TOGETHER] = tuple(member.meta.get("custom", {}) for member in members)
        together.result = self._call(aten.view.default, waited, [_size(first), -1]) if first.target is ALL_GATHER else waited

    def _piece(self, wait: fx.Node) -> fx.Node:
        """What a wait for one member gave."""
        member = wait.all_input_nodes[0]
        together = self._of[member]
        if member.target is not ALL_GATHER:
            part = self._call(aten.slice.Tensor, together.result, 0, *together.part[member])
            return self._call(aten.view.default, part, list(wait.meta["val"].shape))
        part = self._call(aten.slice.Tensor, together.result, 1, *together.part[member])
        return self._call(aten.view.default, self._call(aten.clone.default, part, memory_format=torch.contiguous_format), [-1])

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that stands for the first of what it works on."""
        made = self._graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        made.meta = {key: value for key, value in made.all_input_nodes[0].meta.items() if key != TOGETHER}
        made.meta["val"] = target(*values[0], **values[1])
        return made


def _size(node: fx.Node) -> int:
    """Ranks of the group of a collective that gathers or scatters."""
    size = node.args[-2]
    assert isinstance(size, int)
    return size


def _num_bytes(node: Any) -> int:
    num_bytes: int = node.meta["val"].nbytes
    return num_bytes
