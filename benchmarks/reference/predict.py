"""Record -> step time and peak memory, by the rules, prices and schedules of autopar.

A model of `LAYERS` layers is planned by the record's `Manual`, a stage for the first layer with the embedding, one for those in
the middle, one for the last with the head. What the stages take differs by the embedding and the head alone, so any depth and any pipeline
is a sum of them, which the simulator plays with the record's schedule. Of a mixture of experts those that take a token are one MLP; the
exchange of tokens and the parameters of all experts come on top:

    stage of n layers = n * middle / (LAYERS - 2), the first with (first - layer) more, the last with (last - layer)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from clusters import PRECISIONS, device_of, links_of, machine_of
from decoder import Decoder
from experts import Experts
from records import Dims, Record, RecordError
from stacks import Stack, known_stack, stack_of

import autopar
from autopar.cost.collectives import collective_time_s
from autopar.cost.machine import MachineProfile
from autopar.cost.simulate import StagePrice, simulate
from autopar.runtime.module import make_skeleton
from autopar.schedule.check import peak_live
from autopar.schedule.lower import lower
from autopar.schedule.tables import make_schedule
from autopar.session import Session, open_session
from autopar.solve.footprint import MemoryUse
from autopar.solve.manual import UnusedSettingWarning
from autopar.solve.search import Search
from autopar.solve.staged import Staged
from autopar.trace import Captured

LAYERS = 4
"""Of the model that is planned: a first, two that stand for all between, a last."""
CONTEXT_BYTES = 2 * 2**30
"""What CUDA, its libraries and the buffers of NCCL take of a GPU, from memory."""
FRAGMENTATION = 1.05
"""What an allocator holds over what is alive, from memory."""
TENSORS = 7
"""Parameters of a layer that are more than a row."""
RECOMPUTE = {
    "none": ("none",),
    "full": ("full",),
    "selective": ("selective",),
    "selective-op": ("selective", "full"),
    "selective-block": ("none", "full"),
}
"""Of the records to autopar's; of two, each holds for half: torchtitan recomputes every second product, or all of every second layer."""
MAIN_GRADIENT = 2
"""In bfloat16 gradients add up in float32: times their own bytes."""
BUCKET = 5e8
"""Elements that DeepSpeed flattens to reduce them together (``MEMORY_OPT_ALLREDUCE_SIZE`` of deepspeed/runtime/engine.py)."""
ROW_BYTES = 16
"""What rows of matrices in 16 bits are multiples of, if the matrix units are to take them: their kernels want accesses of 128 bits
(NVIDIA/cutlass issue 75)."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a record would measure."""

    step_time_s: float
    peak_memory_bytes: float
    note: str


def predict(record: Record) -> Predicted:
    """Predict one record.

    What it does not state is predicted each way: recomputation, of which the least that fits is taken (`_least_that_fits`), and chunks of a
    pipeline, of which stacks that interleave have one for each layer.

    Raises:
        RecordError: it cannot be.
    """
    stack, states_ep = stack_of(record), record.ep is not None
    record = replace(record, ep=record.ep or record.usual_ep)
    _known("precision", record.precision, PRECISIONS)
    _known("recompute", record.recompute or "none", RECOMPUTE)
    chunks = (record.vpp,) if record.vpp else (1, record.dims.layers // record.pp) if record.pp > 1 else (1,)
    levels = (record.recompute,) if record.recompute else ("none", "selective", "full")
    tried = {(vpp, level): _predict(replace(record, vpp=vpp), stack, level) for vpp in chunks for level in levels}
    limit = device_of(record, stack).memory_bytes
    own = {level: tried[chunks[-1 if stack.interleaves else 0], level] for level in levels}
    most = CONTEXT_BYTES + FRAGMENTATION * (limit - CONTEXT_BYTES)
    likely, found = _least_that_fits(own, most)
    notes = [f"stack {stack.name}" + ("" if known_stack(record) else " assumed, as the source is not known")]
    if len(levels) > 1:
        notes.append(f"recompute not stated: {likely} is the least that fits")
    if record.dims.experts and not states_ep:
        notes.append(f"ep not stated: {record.ep}")
    if len(chunks) > 1:
        notes.append(f"chunks not stated: {chunks[-1 if stack.interleaves else 0]} for each rank")
    if len(tried) > 1:
        times = sorted(found.step_time_s for found in tried.values())
        notes.append(f"{times[0]:.2f} to {times[-1]:.2f} s")
    return replace(found, note="; ".join(notes))


def _least_that_fits(found: Mapping[str, Predicted], most: float) -> tuple[str, Predicted]:
    """The fastest way to compute as much again as ``most`` bytes ask for, and its name: a level that fits, or of one that does not as many
    layers as leave room for one that does, as recipes have it that count the layers they recompute. If none fits, the last.
    """
    fitting = {name: one for name, one in found.items() if one.peak_memory_bytes <= most}
    ways = list(fitting.items())
    for name, light in found.items():
        for other, heavy in fitting.items():
            if light.step_time_s < heavy.step_time_s and light.peak_memory_bytes > most:
                share = (most - heavy.peak_memory_bytes) / (light.peak_memory_bytes - heavy.peak_memory_bytes)
                time_s = share * light.step_time_s + (1 - share) * heavy.step_time_s
                ways.append((f"{name} of {share:.0%} of the layers, else {other},", Predicted(time_s, most, "")))
    return min(ways, key=lambda way: way[1].step_time_s, default=list(found.items())[-1])


def _known(field: str, value: str, values: Iterable[str]) -> None:
    if value not in values:
        raise RecordError(f"{field} {value!r} is not known; there are {', '.join(values)}")


def _predict(record: Record, stack: Stack, level: str) -> Predicted:
    def depth(recompute: str) -> _Depth:
        found = _Depth(record, stack, _staged(_Key.of(record, stack, recompute)))
        found.slow_heads(again=recompute != "none")
        found.look_through_windows(again=recompute in ("selective", "full"))
        found.part_experts(again=recompute == "full")
        if recompute == "none" and stack.keeps != "all":
            found.keep(_Depth(record, stack, _staged(_Key.of(record, stack, "pointwise"))))
        if recompute != "full":
            found.keep_rows()
        if recompute == "full" and stack.recomputes_whole:
            found.recompute_whole(depth("none"))
        return found

    first, *others = map(depth, RECOMPUTE[level])
    for other in others:
        first.mean(other)
    return first.played()


@dataclass(frozen=True, slots=True)
class _Key:
    """What a plan of the few layers depends on."""

    dims: Dims
    stack: Stack
    machine: MachineProfile
    data: int
    tensor: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    microbatches: int
    recompute: str
    dtype: torch.dtype

    @staticmethod
    def of(record: Record, stack: Stack, recompute: str) -> _Key:
        return _Key(
            dims=_active(record.dims),
            stack=stack,
            machine=machine_of(record, stack),
            data=_data(record),
            tensor=record.tp,
            zero=_zero(record),
            sequence_parallel=bool(record.sequence_parallel),
            micro_batch=record.micro_batch,
            microbatches=2 if _zero(record) < 2 else min(2, record.microbatches),  # of one, autopar reduces after the backward
            recompute=recompute,
            dtype=PRECISIONS[record.precision][0],
        )


def _data(record: Record) -> int:
    """Ranks that the shards are planned for: a power of two, which divides the dims of all models. The stacks flatten what they shard."""
    return 1 << (record.dp * record.cp).bit_length() - 1


def _zero(record: Record) -> int:
    """The level as autopar has it, whose ZeRO-2 reduces for every micro-batch: what is known of these stacks reduces once a step."""
    level = 1 if record.zero is None else record.zero
    return 1 if level == 2 and record.microbatches > 1 else level


def _active(dims: Dims) -> Dims:
    """The few layers, with the experts that take a token as one MLP."""
    ffn = (dims.topk + dims.shared) * dims.expert_ffn if dims.experts else dims.ffn_hidden
    return replace(dims, layers=LAYERS, ffn_hidden=ffn, experts=0, topk=0, expert_ffn=0, shared=0, biased=False, window=0)


@lru_cache(maxsize=4)
def _captures(dims: Dims, dtype: torch.dtype, unfused: bool) -> tuple[torch.nn.Module, dict[object, Captured]]:
    with torch.device("meta"):
        model = Decoder(dims, unfused=unfused).to(dtype)
    return make_skeleton(model), {}


@lru_cache(maxsize=8)
def _session(dims: Dims, dtype: torch.dtype, unfused: bool, batch: int) -> Session:
    model, known = _captures(dims, dtype, unfused)
    tokens = torch.empty(batch, dims.seq, dtype=torch.long, device="meta")
    return open_session(model, (tokens, tokens.clone()), {}, outputs="loss", known=known)


@lru_cache(maxsize=4096)
def _staged(key: _Key) -> Staged:
    session = _session(key.dims, key.dtype, key.stack.attention == "unfused", key.data * key.micro_batch * key.microbatches)
    stages = ("layers.1", f"layers.{LAYERS - 1}")
    manual = autopar.Manual(
        dp=key.data,
        tp=key.tensor,
        pp=3,
        zero=key.zero if key.data > 1 else 0,
        sequence_parallel=key.sequence_parallel and key.tensor > 1,
        microbatches=key.microbatches,
        stages=stages,
        recompute=key.recompute,
    )
    search = Search(session.normal_for, lambda grid: key.machine, float("inf"), [manual], "adamw_master")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedSettingWarning)
        return search.decide(manual.shape(session.batch_size))


class _Depth:
    """The stages of a record's depth, as sums of what few layers take."""

    def __init__(self, record: Record, stack: Stack, staged: Staged) -> None:
        self.record, self.stack, self.experts = record, stack, Experts.of(record, stack, staged)
        self.device = staged.decision.prices.pricer.machine.device
        self.prices = [_as_numbers(price) for price in staged.prices]
        for row, use in zip(self.prices, staged.memory, strict=True):
            row["gradients"] = use.held.gradients
            row["sum_s"] = self._sum_bytes(use.held.gradients) / (self.device.memory_bandwidth * stack.pointwise_kept)
            row |= {name: self._reduced() * row[name] for name in ("reduce_s", "covered_s")}
        sharded = _data(record) / (record.dp * record.cp)
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
        whole = 2 if _zero(self.record) else 1  # an all-reduce passes them twice, as it does without shards
        return whole * (MAIN_GRADIENT if self.stack.reduces == "sums" else 1)

    def _sum_bytes(self, gradients: float) -> float:
        """Read and written to add the gradients of a micro-batch to their sums; by a copy of them as wide as these where both are kept."""
        if self.stack.fuses_sums or self.record.microbatches == 1 or _zero(self.record) == 3:
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

    def part_experts(self, *, again: bool) -> None:
        """Let each expert of a layer multiply by itself, and add its biases. ``again``: the backward computes that anew."""
        experts, ranks = self.experts, self.record.cp  # which share the tokens of a row
        apart_s, (forward_s, backward_s) = ranks * experts.apart_s, (ranks * biased_s for biased_s in experts.biased_s)
        self.add(apart_s + forward_s, 2 * apart_s + backward_s + again * (apart_s + forward_s))

    def keep_rows(self) -> None:
        """Keep what the biases of experts leave for the backward."""
        for row, layers in zip(self.memory, (1, LAYERS - 2, 1), strict=True):
            row["kept"] += layers * self.record.cp * self.experts.biased_bytes

    def add(self, forward_s: float, backward_s: float) -> None:
        """Let a layer take so much more."""
        for row, layers in zip(self.prices, (1, LAYERS - 2, 1), strict=True):
            row["forward_s"] += layers * forward_s
            for key in ("backward_s", "input_s"):
                row[key] += layers * backward_s

    def keep(self, pointwise: _Depth) -> None:
        """Let the backward make anew what fused kernels do, which costs nothing then: what is kept is as with ``pointwise``, and where the
        stack keeps what products take, the results of both norms and of the activation too."""
        record, dims = self.record, self.record.dims
        ffn = (dims.topk + dims.shared) * dims.expert_ffn if dims.experts else dims.ffn_hidden
        norms = 2 * dims.hidden / (record.tp if record.sequence_parallel else 1)
        inputs = record.micro_batch * dims.seq * torch.bfloat16.itemsize * (norms + ffn / record.tp)
        for row, other, layers in zip(self.memory, pointwise.memory, (1, LAYERS - 2, 1), strict=True):
            row |= {name: other[name] for name in ("kept", "transient")}
            row["kept"] += layers * inputs * (self.stack.keeps == "inputs")

    def mean(self, other: _Depth) -> None:
        """Let half of the layers be as there."""
        for name in ("prices", "memory"):
            rows = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [{key: (a[key] + b[key]) / 2 for key in a} for a, b in rows])

    def recompute_whole(self, none: _Depth) -> None:
        """Let the backward run the whole forward of its layers again, where autopar leaves out what nobody needs; ``none`` recomputes
        nothing."""
        layer_s = none.prices[1]["forward_s"] / (LAYERS - 2)
        for row, plain, layers in zip(self.prices, none.prices, (1, LAYERS - 2, 1), strict=True):
            row |= {key: plain[key] + layers * layer_s for key in ("backward_s", "input_s")}

    def played(self) -> Predicted:
        record, stack = self.record, self.stack
        assert record.vpp is not None
        stages = record.pp * record.vpp
        counts = _layers(record.dims.layers, stages)
        name = "interleaved" if record.vpp > 1 and record.pp > 1 else "1f1b"
        schedule = lower(make_schedule(name, degree=record.pp, stages=stages if record.pp > 1 else 1, microbatches=record.microbatches))
        if record.pp == 1:
            counts = [record.dims.layers]
        sends = {name: self._sent_s(self.prices[1][name]) if record.pp > 1 else 0.0 for name in ("send_forward_s", "send_backward_s")}
        prices = [_price(self._of(self.prices, counts, i) | sends, record, counts[i], stack, self.experts) for i in range(len(counts))]
        timeline = simulate(schedule, prices)
        live = peak_live(schedule)
        uses = [self._of(self.memory, counts, i) for i in range(len(counts))]
        peaks = [0.0] * record.pp
        for stage, use in enumerate(uses):
            peaks[stage % record.pp] += self.experts.held * use["static"] + live[stage] * use["kept"] / record.cp
        transient = max(use["transient"] for use in self.memory) / record.cp
        held = FRAGMENTATION * (max(peaks) + transient) + CONTEXT_BYTES
        if stack.widens_gradients:
            held = max(held, min(held + self._copied(max(counts)), self.device.memory_bytes))
        return Predicted(timeline.step_time_s + stack.step_overhead_s, held, "")

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
    static = use.held.static + main * use.held.gradients + use.optimizer * (sharded - 1)
    return {"static": static, "kept": use.held.kept, "transient": use.held.later}


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
    each["forward_s"] += layers * (stack.layer_overhead_s + experts.routing_s)
    each["backward_s"] += layers * (stack.layer_overhead_s + experts.routing_s) + experts.held * row["sum_s"]
    once = {name: experts.reduced * max(0.0, row[name]) for name in ("gather_s", "reduce_s", "covered_s")}
    once["update_s"] = experts.held * max(0.0, row["update_s"])
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
