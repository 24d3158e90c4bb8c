"""The stages of a record's depth, as sums of what a few layers take, and what its software does that autopar does otherwise.

    stage of n layers = n * middle / (LAYERS - 2), the first with (first - layer) more, the last with (last - layer)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from clusters import bare_device, links_of
from experts import Experts
from few import LAYERS, data_ranks, zero_level
from records import Record
from stacks import Stack

from autopar.cost.collectives import collective_time_s
from autopar.cost.simulate import StagePrice, simulate
from autopar.schedule.check import peak_live
from autopar.schedule.lower import lower
from autopar.schedule.tables import make_schedule
from autopar.solve.footprint import MemoryUse
from autopar.solve.staged import Staged

CONTEXT_BYTES = 2 * 2**30
"""What CUDA, its libraries and the buffers of NCCL take of a GPU, from memory."""
FRAGMENTATION = 1.05
"""What an allocator holds over what is alive, from memory."""
TENSORS = 7
"""Parameters of a layer that are more than a row."""
MAIN_GRADIENT = 2
"""In bfloat16 gradients add up in float32: times their own bytes."""
COPIED = {"": (0, 0), "gradients": (0, 8), "shards": (4, 10)}
"""Bytes that software moves beside collectives for a parameter in 16 bits, forward and backward, by what it copies:

- ``gradients``: FSDP puts those of a layer, whose parameters are views of one, together, and divides them before they are reduced (the
  backward of ``torch.split`` and ``_div_if_needed`` of torch/distributed/fsdp/_runtime_utils.py);
- ``shards``: FSDP2 copies parameters out of what was gathered, in the backward once more, and gradients into what is reduced, in float32
  (``split_with_sizes_copy`` and ``chunk_cat`` of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""
BUCKET = 5e8
"""Elements that DeepSpeed flattens to reduce them together (``MEMORY_OPT_ALLREDUCE_SIZE`` of deepspeed/runtime/engine.py)."""
ROW_BYTES = 16
"""What rows of matrices in 16 bits are multiples of, if the matrix units are to take them: their kernels want accesses of 128 bits
(NVIDIA/cutlass issue 75)."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a record would measure; ``fits``: whether its device could hold that."""

    step_time_s: float
    peak_memory_bytes: float
    note: str
    fits: bool = True


class Depth:
    """The stages of a record's depth, as sums of what few layers take."""

    def __init__(self, record: Record, stack: Stack, staged: Staged) -> None:
        self.record, self.stack, self.experts = record, stack, Experts.of(record, stack, staged)
        self.device = staged.decision.prices.pricer.machine.device
        self.prices = [_as_numbers(price) for price in staged.prices]
        for row, use in zip(self.prices, staged.memory, strict=True):
            row["gradients"] = use.held.gradients
            row["sum_s"] = self._sum_bytes(use.held.gradients) / (self.device.memory_bandwidth * stack.pointwise_kept)
            row |= {name: self._reduced() * row[name] for name in ("reduce_s", "covered_s")}
        sharded = data_ranks(record) / (record.dp * record.cp)
        main = MAIN_GRADIENT + stack.keeps_both_gradients if self.adds_wide else 1
        self.memory = [_memory(use, sharded, main) for use in staged.memory]

    @property
    def adds_wide(self) -> bool:
        """Whether gradients add up in float32."""
        return self.stack.adds_wide and self.record.precision in ("bf16", "fp8")

    def _reduced(self) -> int:
        """How many times as many bytes data parallelism passes around as to reduce gradients in 16 bits to where they are updated."""
        if not self.adds_wide or self.stack.reduces == "shards":
            return 1
        whole = 2 if zero_level(self.record) else 1  # an all-reduce passes them twice, as it does without shards
        return whole * (MAIN_GRADIENT if self.stack.reduces == "sums" else 1)

    def _sum_bytes(self, gradients: float) -> float:
        """Read and written to add the gradients of a micro-batch to their sums; by a copy of them as wide as these where both are kept."""
        if self.stack.fuses_sums or self.record.microbatches == 1 or zero_level(self.record) == 3:
            return 0.0
        sums = gradients * (MAIN_GRADIENT if self.adds_wide else 1)
        if self.stack.keeps_both_gradients and self.adds_wide:
            return gradients + 4 * sums
        return (1 - 1 / self.record.microbatches) * (gradients + 2 * sums)

    def slow_heads(self, *, again: bool) -> None:
        """Let attention without a fused kernel take the ordinary units, at the rate of float32, where the rows of its heads do not suit the
        matrix units; ``again``: the backward computes the scores anew."""
        dims, record = self.record.dims, self.record
        if self.stack.attention != "unfused" or dims.head * torch.float16.itemsize % ROW_BYTES == 0:
            return
        flops = 4.0 * record.micro_batch * dims.seq**2 * dims.heads * dims.head / record.tp
        slow, fast = (float(self.device.matmul_flops_per_s(flops / 2, dtype)) for dtype in (torch.float32, torch.float16))
        more_s = flops / slow - flops / fast
        self.add(more_s, (2 + again) * more_s)

    def look_through_windows(self, *, again: bool) -> None:
        """Let attention that looks at the nearest tokens alone take no more: every query two tiles of keys, its own and the one before.
        ``again``: the backward computes it anew."""
        dims, record = self.record.dims, self.record
        if dims.seq <= 4 * dims.window or not dims.window:  # those are half of all, or more
            return
        of_a_key = 4.0 * record.micro_batch * dims.seq * dims.heads * dims.head / record.tp

        def time_s(keys: float, length: int, *, backward: bool) -> float:
            flops = of_a_key * keys * (2.5 if backward else 1.0)  # five products for two
            return float(self.device.attention_time_s(flops, 0.0, torch.bfloat16, length, backward=backward))

        tiles = 2 * dims.window
        forward_s, backward_s = (
            time_s(dims.seq / 2, dims.seq, backward=backward) - time_s(tiles, tiles, backward=backward) for backward in (False, True)
        )
        self.add(-forward_s / 2, -(backward_s + again * forward_s) / 2)  # in the mean of two layers, one of which does so

    def part_experts(self, recompute: str) -> None:
        """Let each expert of a layer multiply by itself, and add its biases. To compute that anew, as with ``full``, tokens go to their
        experts once more; ``pointwise`` does their activation anew."""
        experts, ranks = self.experts, self.record.cp  # which share the tokens of a row
        forward_s, backward_s = experts.apart_s[0] + experts.biased_s[0], experts.apart_s[1] + experts.biased_s[1] + experts.sums_s
        again_s = {"full": forward_s + experts.routing_s[0], "pointwise": experts.acts_s}
        self.add(ranks * forward_s, ranks * (backward_s + again_s.get(recompute, 0.0)))

    def keep_rows(self, recompute: str) -> None:
        """Keep what experts leave for the backward; ``pointwise`` does that of their activation anew."""
        num_bytes = self.experts.sorted_bytes + (self.experts.biased_bytes if recompute != "pointwise" else 0.0)
        for row, layers in zip(self.memory, (1, LAYERS - 2, 1), strict=True):
            row["kept"] += layers * self.record.cp * num_bytes

    def keep_attention(self) -> None:
        """Keep what fused attention gives where all else is computed again."""
        dims, record = self.record.dims, self.record
        flops = 1.0 * record.micro_batch * dims.seq**2 * (dims.scored + dims.attended) / record.tp
        self.add(0.0, -float(self.device.attention_time_s(flops, 0.0, torch.bfloat16, dims.seq, backward=False)))
        kept = record.micro_batch * dims.seq * dims.attended / record.tp * torch.bfloat16.itemsize
        for row, layers in zip(self.memory, (1, LAYERS - 2, 1), strict=True):
            row["kept"] += layers * kept

    def copy_layers(self) -> None:
        """Copy what the stack does of parameters and gradients beside the collectives of every micro-batch."""
        record, dims = self.record, self.record.dims
        copied = COPIED[self.stack.copies]
        if not any(copied) or zero_level(record) != 3:
            return
        mlp = (2 + dims.gated) * dims.hidden * (dims.expert_ffn * dims.shared if dims.experts else dims.ffn_hidden)
        layer = (dims.attention_params + mlp) / record.tp + (self.experts.own if self.experts.alike > 1 else 0.0)
        table = dims.vocab * dims.hidden / record.tp
        for row, layers, more in zip(self.prices, (1, LAYERS - 2, 1), (table, 0, table), strict=True):
            params = (layers * layer + more) * record.cp
            for key, num_bytes in zip(("forward_s", "backward_s"), copied, strict=True):
                row[key] += num_bytes * params / bare_device(record).memory_bandwidth

    def keep_projections(self) -> None:
        """Keep queries, keys and values where all else is computed again."""
        dims, record = self.record.dims, self.record
        made_by = dims.attention_params - dims.hidden * dims.attended  # parameters, but for those behind attention
        flops = 2.0 * record.micro_batch * dims.seq * made_by / record.tp
        self.add(0.0, -flops / float(self.device.matmul_flops_per_s(flops, torch.bfloat16)))
        for row, layers in zip(self.memory, (1, LAYERS - 2, 1), strict=True):
            row["kept"] += layers * record.micro_batch * dims.seq * dims.projected / record.tp * torch.bfloat16.itemsize

    def add(self, forward_s: float, backward_s: float) -> None:
        """Let a layer take so much more."""
        for row, layers in zip(self.prices, (1, LAYERS - 2, 1), strict=True):
            row["forward_s"] += layers * forward_s
            for key in ("backward_s", "input_s"):
                row[key] += layers * backward_s

    def keep(self, pointwise: Depth) -> None:
        """Let the backward make anew what fused kernels do, which costs nothing then: what is kept is as with ``pointwise``, and where the
        stack keeps what products take, the results of both norms and of the activation too."""
        record, dims = self.record, self.record.dims
        ffn = (dims.topk + dims.shared) * dims.expert_ffn if dims.experts else dims.ffn_hidden
        norms = 2 * dims.hidden / (record.tp if record.sequence_parallel else 1)
        inputs = record.micro_batch * dims.seq * torch.bfloat16.itemsize * (norms + ffn / record.tp)
        for row, other, layers in zip(self.memory, pointwise.memory, (1, LAYERS - 2, 1), strict=True):
            row |= {name: other[name] for name in ("kept", "transient")}
            row["kept"] += layers * inputs * (self.stack.keeps == "inputs")

    def mean(self, other: Depth) -> None:
        """Let half of the layers be as there."""
        for name in ("prices", "memory"):
            rows = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [{key: (a[key] + b[key]) / 2 for key in a} for a, b in rows])

    def recompute_whole(self, none: Depth) -> None:
        """Let the backward run the whole forward of its layers again, where autopar leaves out what nobody needs; ``none`` recomputes
        nothing."""
        layer_s = none.prices[1]["forward_s"] / (LAYERS - 2) + self.record.cp * sum(self.experts.routing_s)
        for row, plain, layers in zip(self.prices, none.prices, (1, LAYERS - 2, 1), strict=True):
            row |= {key: plain[key] + layers * layer_s for key in ("backward_s", "input_s")}

    def played(self) -> Predicted:
        record, stack = self.record, self.stack
        assert record.vpp is not None
        stages = record.pp * record.vpp
        counts = _layers(record.dims.layers, stages)
        name = schedule_name(record.pp, record.vpp, record.schedule)
        local = min(record.microbatches, stack.local_batch or record.microbatches) if record.pp > 1 else record.microbatches
        schedule = lower(make_schedule(name, degree=record.pp, stages=stages if record.pp > 1 else 1, microbatches=local))
        if record.pp == 1:
            counts = [record.dims.layers]
        sends = {name: self._sent_s(self.prices[1][name]) if record.pp > 1 else 0.0 for name in ("send_forward_s", "send_backward_s")}
        prices = [_price(self._of(self.prices, counts, i) | sends, record, counts[i], stack, self.experts) for i in range(len(counts))]
        step_s = simulate(schedule, prices).step_time_s + stack.step_overhead_s
        if local < record.microbatches:
            beside = [replace(price, gather_s=0.0, reduce_s=0.0, covered_s=0.0, update_s=0.0) for price in prices]
            step_s += (record.microbatches / local - 1) * simulate(schedule, beside).step_time_s
        live = peak_live(schedule)
        uses = [self._of(self.memory, counts, i) for i in range(len(counts))]
        peaks, zero = [0.0] * record.pp, zero_level(record)
        stored, updated = (self.experts.sharded if zero >= level else self.experts.held for level in (3, 1))
        for stage, use in enumerate(uses):
            peaks[stage % record.pp] += stored * use["static"] + updated * use["optimizer"] + live[stage] * use["kept"] / record.cp
        transient = max(use["transient"] for use in self.memory) / record.cp
        held = FRAGMENTATION * (max(peaks) + transient) + CONTEXT_BYTES
        if stack.widens_gradients:
            held = max(held, min(held + self._copied(max(counts)), self.device.memory_bytes))
        return Predicted(step_s, held, "")

    def _sent_s(self, whole_s: float) -> float:
        """Seconds of what goes to the next stage, which takes ``whole_s`` if each rank sends all it has. Parts are gathered where they
        arrive (Narayanan et al. 2021, section 4.1)."""
        record, dims = self.record, self.record.dims
        if not self.stack.scatters_sends or record.sequence_parallel:
            return whole_s
        num_bytes = record.micro_batch * dims.seq * dims.hidden * torch.bfloat16.itemsize
        return whole_s / record.tp + float(collective_time_s("all_gather", num_bytes, record.tp, links_of(record)[2]))

    def _copied(self, layers: int) -> float:
        """Bytes that a step makes of gradients. They come on top of activations: blocks that those have left are too small, and go back to
        the device only when it has nothing else.

        In float16 these are copies of the shard that is updated, and of the largest gradient for the norm; where sums are in float32, of
        those that are reduced together: as many as one of `BUCKET` elements takes, or the largest if it is larger.
        """
        dims, record = self.record.dims, self.record
        layer = 2 * dims.hidden * (dims.head * (dims.heads + dims.kv_heads) + dims.ffn_hidden)
        embedding = dims.vocab * dims.hidden / record.tp
        shard = (layers * layer / record.tp + embedding) / record.dp
        narrow, wide, norm = torch.float16.itemsize, torch.float32.itemsize, torch.float64.itemsize
        if self.adds_wide:
            return wide * max(BUCKET, embedding)
        return (narrow + wide) * shard + norm * min(shard, embedding)

    def _of(self, rows: Sequence[dict[str, float]], counts: Sequence[int], stage: int) -> dict[str, float]:
        first, middle, last = rows
        layer = {key: value / (LAYERS - 2) for key, value in middle.items()}
        return {
            key: counts[stage] * layer[key]
            + (first[key] - layer[key] if stage == 0 else 0.0)
            + (last[key] - layer[key] if stage == len(counts) - 1 else 0.0)
            for key in layer
        }


def schedule_name(pp: int, vpp: int, stated: str | None) -> str:
    """What a pipeline is played as: GPipe where that is stated, else as many chunks of layers as it has want."""
    if pp > 1 and stated == "gpipe":
        return "gpipe"
    return "interleaved" if vpp > 1 and pp > 1 else "1f1b"


def _layers(layers: int, stages: int) -> list[int]:
    """Of each stage: as even as can be, the first ones with one more. Where they are not even, but would be with one for the embedding and
    one for the head, depths were chosen for that (Megatron-DeepSpeed's ``type:transformer|embedding``; the 126 of Llama 3.1 405B)."""
    if stages > 1 and layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    return [layers // stages + (i < layers % stages) for i in range(stages)]


def _as_numbers(price: StagePrice) -> dict[str, float]:
    return {field.name: getattr(price, field.name) for field in fields(price)}


def _memory(use: MemoryUse, sharded: float, main: int) -> dict[str, float]:
    """Bytes of a stage; ``sharded`` are the ranks that the plan shards the optimizer over, over those of the record, ``main`` the bytes of
    the gradients that add up over their own."""
    static = use.held.static - use.optimizer + main * use.held.gradients
    return {"static": static, "optimizer": use.optimizer * sharded, "kept": use.held.kept, "transient": use.held.later}


def _broadcast_s(num_bytes: float, layers: int, record: Record) -> float:
    """Of the parameters of a stage, by the ranks that have updated them in turn; those of a parameter are sent at once."""
    ranks, link = record.dp * record.cp, links_of(record)[1]
    if record.zero_ranks is not None and record.zero_ranks < ranks:
        ranks = record.zero_ranks
        link = link.inside if link.inside is not None and ranks <= link.ranks_inside else link
    messages = min(ranks, layers * TENSORS)
    return messages * float(collective_time_s("broadcast", num_bytes / messages, ranks, link))


def _price(row: dict[str, float], record: Record, layers: int, stack: Stack, experts: Experts) -> StagePrice:
    """What a rank takes for a micro-batch; ranks of context parallelism share its tokens."""
    each = {name: max(0.0, row[name]) / record.cp for name in ("forward_s", "backward_s", "input_s", "weight_s")}
    each["forward_s"] += layers * (stack.layer_overhead_s + sum(experts.routing_s))
    each["backward_s"] += layers * (stack.layer_overhead_s + sum(experts.routing_s)) + experts.held * row["sum_s"]
    once = {name: experts.reduced * max(0.0, row[name]) for name in ("gather_s", "reduce_s", "covered_s")}
    once["update_s"] = (experts.sharded if zero_level(record) else experts.held) * max(0.0, row["update_s"])
    once["covered_s"] = min(once["covered_s"], each["backward_s"])
    if stack.broadcasts:
        once |= {"reduce_s": 2 * once["reduce_s"], "covered_s": min(2 * stack.data_overlap * once["reduce_s"], each["backward_s"])}
        once["update_s"] += _broadcast_s(experts.held * row["gradients"], layers, record)
        once["gather_s"] = 0.0
    once["gather_s"] -= min(stack.data_overlap * once["gather_s"], each["forward_s"])  # beside the first forward, layer by layer
    for name, computed in (("send_forward_s", ("forward_s",)), ("send_backward_s", ("backward_s", "input_s"))):
        send_s = row[name] / record.cp
        once[name] = stack.model_overlap * send_s
        for compute in computed:  # the sender waits for the rest
            each[compute] += (1 - stack.model_overlap) * send_s
    return StagePrice(**each, **once)
