"""What a mixture of experts takes beside a model whose experts are one MLP."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from clusters import bare_device, links_of
from few import zero_level
from records import Record
from stacks import Stack

from autopar.cost.collectives import collective_time_s
from autopar.cost.device import DeviceProfile
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.solve.staged import Staged

HOST_WAIT_S = 1e-3
"""Of a layer of experts, forward: the host waits for how many tokens go where, after which the device waits for what it launches; modelled.
Kernels of the router, which come before, hide in it (0.3 to 0.6 ms on an H100: benchmarks/records/2026-11-27-h100-products.md)."""


@dataclass(frozen=True, slots=True)
class OpByOp:
    """What is computed on the rows that experts give by ops of torch, one after the other.

    Args:
        width: of the rows, a field of `Dims`.
        forward, backward: how often rows in 16 bits are read or written, by what the ops are like (`autopar.cost.families.STREAMS`;
            ``copy``: like none). What kernels compute element by element, since operands lie apart or have several dtypes
            (aten/src/ATen/native/cuda/CUDALoops.cuh), is like a broadcast, which they do so too.
        launches: for each expert, forward and backward.
        kept: how many times rows in 16 bits lie there for the backward.
    """

    width: str
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    launches: tuple[int, int] = (0, 0)
    kept: int = 0

    def times_s(self, record: Record, rows: float, held: float) -> tuple[float, float]:
        """Forward and backward, of so many rows that go to ``held`` experts."""
        device, num_bytes = bare_device(record), self.row_bytes(record, rows)

        def time_s(often: Mapping[str, float], launches: int, *, backward: bool) -> float:
            moving_s = (device.stream_time_s(n * num_bytes, like, backward=backward, is_launched=False) for like, n in often.items())
            return float(sum(moving_s)) + launches * held * device.launch_overhead_s

        return time_s(self.forward, self.launches[0], backward=False), time_s(self.backward, self.launches[1], backward=True)

    def row_bytes(self, record: Record, rows: float) -> float:
        """Of so many rows, in 16 bits."""
        return float(rows * getattr(record.dims, self.width) * torch.bfloat16.itemsize)


OPS = {
    "adds": OpByOp("expert_ffn", {"broadcast": 4, "copy": 4}, {"copy": 6}, (1, 1)),
    "clamps": OpByOp("expert_ffn", {"broadcast": 4, "copy": 4}, {"broadcast": 9.5, "copy": 5.5}, kept=2),
    "weighs": OpByOp("hidden", {"broadcast": 7, "cast": 3, "copy": 4}, {"broadcast": 8, "cast": 6, "copy": 6}, (2, 6)),
}
"""Of experts with biases:

- ``adds`` that of gate and up, expert by expert, and puts all rows together (``_apply_bias`` of nemo_automodel/components/moe/layers.py);
- ``clamps`` gate and up, whose rows lie apart, and puts them together (``weighted_bias_quick_geglu_impl`` of
  megatron/core/fusions/fused_bias_geglu.py);
- ``weighs`` that of down by the router's probability, expert by expert, in float32, puts all rows together and casts them
  (``_apply_bias`` of both, in Megatron-LM that of megatron/core/transformer/moe/experts.py).
"""


@dataclass(frozen=True, slots=True)
class Experts:
    """What routing adds to a model whose experts are one MLP.

    Args:
        held: parameters of a rank over those of the MLP that takes each token.
        sharded: the same of what data parallelism shards: experts among the ranks that hold the same ones.
        reduced: seconds of data parallelism over those of that MLP's parameters, where it is once a step.
        own: parameters of a rank's experts of a layer.
        alike: ranks of data parallelism that hold the same ones.
        routing_s: of a layer in one direction: the tokens are sorted and go to the ranks of their experts; and they come back.
        apart_s: what the products of a layer take more, for each expert apart, forward and backward.
        biased_s: what biases of experts take of a layer, forward and backward.
        acts_s: what of that their activation takes, forward.
        sums_s: what it takes to add the gradients of a micro-batch of a layer's experts to their sums, where shards of the others are
            reduced for each.
        sorted_bytes: of a layer's rows of tokens, which lie sorted until the backward.
        biased_bytes: what biases keep of a layer for the backward.
    """

    held: float = 1.0
    sharded: float = 1.0
    reduced: float = 1.0
    own: float = 0.0
    alike: int = 1
    routing_s: tuple[float, float] = (0.0, 0.0)
    apart_s: tuple[float, float] = (0.0, 0.0)
    biased_s: tuple[float, float] = (0.0, 0.0)
    acts_s: float = 0.0
    sums_s: float = 0.0
    sorted_bytes: float = 0.0
    biased_bytes: float = 0.0

    @staticmethod
    def of(record: Record, stack: Stack, staged: Staged) -> Experts:
        dims = record.dims
        if not dims.experts:
            return Experts()
        assert record.ep is not None
        attention = dims.attention_params
        expert = 3 * dims.hidden * dims.expert_ffn
        routed = expert * dims.experts / record.ep
        held = attention + expert * dims.shared + routed
        machine = staged.decision.prices.pricer.machine
        taken = attention + expert * (dims.topk + dims.shared)
        ranks = record.dp * record.cp
        alike = _alike(record)
        sharded = held + routed * (ranks / alike - 1)
        own = routed / (record.tp if record.ep <= ranks else 1)
        reduced = held + routed * (_among_alike(record, links_of(record)[1]) - 1)
        names = stack.biases_experts if dims.biased else ()
        rows = record.micro_batch * dims.seq / record.cp * dims.topk / record.tp
        times_s = {name: OPS[name].times_s(record, rows, dims.experts / record.ep) for name in names}
        return Experts(
            held=held / taken,
            sharded=sharded / taken,
            reduced=reduced / taken,
            own=own,
            alike=alike,
            routing_s=_routing_s(record, stack, machine),
            apart_s=_apart_s(record, machine.device),
            biased_s=(sum(forward for forward, _ in times_s.values()), sum(backward for _, backward in times_s.values())),
            sums_s=_sums_s(record, stack, own / alike, machine.device),
            acts_s=times_s.get("clamps", (0.0, 0.0))[0],
            sorted_bytes=rows * dims.hidden * torch.bfloat16.itemsize,
            biased_bytes=sum(OPS[name].kept * OPS[name].row_bytes(record, rows) for name in names),
        )


def _routing_s(record: Record, stack: Stack, machine: MachineProfile) -> tuple[float, float]:
    """Of a layer in one direction, there and back.

    All-to-alls take a row of a token for each of its experts: it is copied, sorted by rank, and sorted by expert where it arrives. DeepEP
    sends it once to each rank of a node that has one of them, or once to each node; what a node sends on hides under that (DeepSeek-AI
    2024, DeepSeek-V3, section 3.2.2). There it is copied and sorted at once.
    """
    dims, link = record.dims, machine.links[0]
    assert record.ep is not None
    nodes = 1 if link.ranks_inside == 1 else max(1, record.ep // _in_node(record, link))
    link = link.inside if link.inside is not None and link.ranks_inside > 1 and nodes == 1 else link
    tokens = record.micro_batch * dims.seq / record.cp / (record.tp if record.sequence_parallel else 1)
    num_bytes = tokens * dims.hidden * torch.bfloat16.itemsize
    copies, traversals = float(dims.topk), 1 + 3 * dims.topk
    if record.sends_once:
        ranks = _reached(record, record.ep)
        copies, traversals = ranks if nodes == 1 else _reached(record, nodes), ranks + dims.topk
    exchange_s = float(collective_time_s("all_to_all", copies * num_bytes, record.ep, link))
    sort_s = traversals * num_bytes / (machine.device.memory_bandwidth * stack.pointwise_kept)
    return exchange_s + sort_s + HOST_WAIT_S, exchange_s + sort_s


def _apart_s(record: Record, device: DeviceProfile) -> tuple[float, float]:
    """What the products of a layer take more, forward and backward, where each expert has its own, as in Transformer Engine
    (``GroupedLinear``: a matmul for each, gate and up in one), than those of one MLP as wide as the experts of a token: smaller ones are
    slower, and each is launched. Tokens are balanced."""
    assert record.ep is not None
    dims, tokens = record.dims, record.micro_batch * record.dims.seq / record.cp
    splits_experts = record.ep <= record.dp * record.cp  # among the ranks of tensor parallelism, which else split the tokens
    width = dims.expert_ffn / (record.tp if splits_experts else 1)
    rows = tokens * dims.topk * record.ep / dims.experts / (1 if splits_experts else record.tp)
    of_each = ((rows, 2 * width, dims.hidden), (rows, dims.hidden, width))
    wide = dims.topk * dims.expert_ffn / record.tp
    of_one = ((tokens, wide, dims.hidden), (tokens, wide, dims.hidden), (tokens, dims.hidden, wide))
    held = dims.experts / record.ep
    forward, backward = (
        held * sum(_product_s(device, *sides, gradients=gradients) for sides in of_each)
        - sum(_product_s(device, *sides, gradients=gradients) for sides in of_one)
        for gradients in (0, 2)
    )
    return forward, backward


def _product_s(device: DeviceProfile, m: float, n: float, k: float, *, gradients: int) -> float:
    """Seconds of a product in bfloat16, or of the two that make the gradients of its factors, each of which is launched."""
    products = max(1, gradients)
    num_bytes = products * (m * n + n * k + m * k) * torch.bfloat16.itemsize
    launched_s = float(device.matmul_time_s(products * 2 * m * n * k, num_bytes, torch.bfloat16, (m, n, k), gradients=gradients))
    return launched_s + (products - 1) * device.launch_overhead_s


def _sums_s(record: Record, stack: Stack, params: float, device: DeviceProfile) -> float:
    """Of so many parameters of a rank's experts, where it has shards of the gradients of others for each micro-batch: those of a
    micro-batch are read, and added to what is read and written."""
    if zero_level(record) != 3 or stack.fuses_sums:
        return 0.0
    num_bytes = 3 * params * torch.bfloat16.itemsize
    return (1 - 1 / record.microbatches) * num_bytes / (device.memory_bandwidth * stack.pointwise_kept)


def _among_alike(record: Record, link: LinkProfile) -> float:
    """Seconds of a collective of data parallelism among the ranks that hold the same experts, over those among all: there are fewer of
    them, and since the experts of a node differ, fewer of its ports serve them at a time."""
    ranks, alike = record.dp * record.cp, _alike(record)
    ports = 1.0 if link.ranks_inside == 1 else min(record.ep, link.lanes)
    return ports * (1 - 1 / alike) / (1 - 1 / ranks) if ranks > 1 else 1.0


def _alike(record: Record) -> int:
    """Ranks of data parallelism that hold the same experts."""
    assert record.ep is not None
    return max(1, record.dp * record.cp // record.ep)


def _in_node(record: Record, link: LinkProfile) -> int:
    """Ranks of a node that share the experts of a layer: those of data parallelism, and of tensor parallelism too where these are too few
    (Megatron-Core's expert-tensor parallelism of 1)."""
    return record.gpus_per_node if record.ep > record.dp * record.cp else link.ranks_inside


def _reached(record: Record, holders: int) -> float:
    """How many of those that hold as many experts each a token goes to, in the mean over tokens."""
    experts, topk = record.dims.experts, record.dims.topk
    if record.balances:
        firsts = range(0, math.lcm(experts, topk), topk)
        return statistics.mean(len({(first + i) % experts * holders // experts for i in range(topk)}) for first in firsts)
    none = math.prod(max(0.0, 1 - experts / holders / (experts - i)) for i in range(topk))
    return holders * (1 - none)
