"""Reductions of gradients as data parallelism does them: in the memory of the gradient, and small ones together.

A collective of a small tensor takes its latency and little else. All-reduces whose results leave the graph are collected, group by group,
until they are worth a collective of their own (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.1). So are those of compressed
gradients, which are decoded when the rest is done (`passes.overlap`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from autopar.ops import codec
from autopar.passes.aliases import may_write, readers

_c10d = torch.ops._c10d_functional

SMALL_NUM_BYTES = 2**20
"""What is smaller travels with others: on links from gloo to NVLink, alpha times bandwidth is 0.2 to 2 MB."""
BUCKET_NUM_BYTES = 4 * 2**20
"""What is collected travels when it is as much as this."""


def reduce_in_place(module: fx.GraphModule, given: Collection[fx.Node] = ()) -> fx.GraphModule:
    """All-reduces write to their operand where nothing else reads it; ``given`` are placeholders that may be written to."""
    for node in module.graph.find_nodes(op="call_function", target=_c10d.all_reduce.default):
        if may_write(node.args[0], node, given):
            node.target = _c10d.all_reduce_.default
    module.recompile()
    return module


def collect_small(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, with small all-reduces in place that only leave it done several at a time."""
    buckets = _Buckets(module)
    for node in module.graph.nodes:
        buckets.put(node)
    buckets.graph.lint()
    return fx.GraphModule(module, buckets.graph)


class _Buckets:
    """Copies a graph node by node; holds small all-reduces back until their bucket is full or one of them is needed."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._open: dict[tuple[object, ...], list[fx.Node]] = {}
        (self._output,) = module.graph.find_nodes(op="output")

    def put(self, node: fx.Node) -> None:
        for key in [key for key, bucket in self._open.items() if not set(bucket).isdisjoint(node.all_input_nodes)]:
            self._close(key)
        if node.target is not _c10d.all_reduce_.default or _num_bytes(node) >= SMALL_NUM_BYTES or not self._is_late(node):
            self._env[node] = self.graph.node_copy(node, self._env.__getitem__)
            return
        key = (*node.args[1:], node.meta["val"].dtype)
        bucket = self._open.setdefault(key, [])
        bucket.append(node)
        if sum(map(_num_bytes, bucket)) >= BUCKET_NUM_BYTES:
            self._close(key)

    def _is_late(self, node: fx.Node) -> bool:
        """Whether nothing before the end of the graph reads the result."""
        return all(reader is self._output or reader.target in codec.OPS for reader in readers(node))

    def _close(self, key: tuple[object, ...]) -> None:
        bucket = self._open.pop(key)
        if len(bucket) == 1:
            self._env[bucket[0]] = self.graph.node_copy(bucket[0], self._env.__getitem__)
            return
        operands = [self._env[node.args[0]] for node in bucket]  # type: ignore[index]
        together = self.graph.call_function(_c10d.all_reduce_coalesced_.default, (operands, *bucket[0].args[1:]))
        for i, node in enumerate(bucket):
            self._env[node] = self.graph.call_function(operator.getitem, (together, i))
            self._env[node].meta = dict(node.meta)


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    num_bytes: int = value.numel() * value.element_size()
    return num_bytes
