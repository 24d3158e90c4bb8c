"""Record -> step time and peak memory, by the rules, prices and schedules of autopar.

A model of a few layers is planned by the record's `Manual` (`few`). What its stages take differs by the embedding and the head alone, so
any depth and any pipeline is a sum of them, which the simulator plays with the record's schedule (`depth`). Of a mixture of experts those
that take a token are one MLP; the exchange of tokens and the parameters of all experts come on top (`experts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from clusters import PRECISIONS, assumed_link, device_of, stack_on
from depth import CONTEXT_BYTES, FRAGMENTATION, Depth, Predicted, schedule_name
from few import Key, staged, zero_level
from fields import RecordError
from records import Record
from stacks import Stack, stack_of, why_assumed

RECOMPUTE = {
    "none": ("none",),
    "full": ("full",),
    "selective": ("selective",),
    "selective-op": ("pointwise", "full"),
    "selective-block": ("none", "full"),
    "norm-act": ("pointwise",),
    "all-but-qkv": ("full",),
}
"""Of the records to autopar's; of two, each holds for half: torchtitan recomputes every second product and no fused attention
(``_save_list`` of torchtitan/models/llama/parallelize_llama.py), or all of every second layer."""


def predict(record: Record) -> Predicted:
    """Predict one record.

    What it does not state is predicted each way: recomputation, of which that of the stack's recipes is taken, or the least that fits
    (`_least_that_fits`), and chunks of a pipeline, of which stacks that interleave have one for each layer.

    Raises:
        RecordError: it cannot be.
    """
    _known("precision", record.precision, PRECISIONS)
    _known("recompute", record.recompute or "none", RECOMPUTE)
    stack, stated = stack_on(record, stack_of(record)), record
    record = replace(record, ep=record.ep or record.usual_ep)
    _refuse_odd_models(record, stack)
    chunks = _chunks(record)
    levels, usual = _levels(record, stack)
    tried = {(vpp, level): _predict(replace(record, vpp=vpp), stack, level) for vpp in chunks for level in levels}
    limit = device_of(record, stack).memory_bytes
    vpp = chunks[-1 if stack.interleaves or record.is_interleaved else 0]
    own = {level: tried[vpp, level] for level in levels}
    most = CONTEXT_BYTES + FRAGMENTATION * (limit - CONTEXT_BYTES)
    likely, found = (usual, own[usual]) if usual else _least_that_fits(own, most, mixed=stack.recomputes_some)
    if not math.isfinite(found.step_time_s + found.peak_memory_bytes):
        raise RecordError(f"the prediction is {found.step_time_s} s and {found.peak_memory_bytes} bytes, which no run takes")
    fits = found.peak_memory_bytes <= most
    why = why_assumed(record)
    notes = [f"stack {stack.name}" + (f" assumed, as {why}" if why else ""), *_priced_as(stated, vpp)]
    if len(levels) > 1:
        chosen = " by the recipes of its stack" if usual else " is the least that fits" if fits else ", as none fits"
        notes.append(f"recompute not stated: {likely}{chosen}")
    if record.dims.experts and stated.ep is None:
        notes.append(f"ep not stated: {record.ep}")
    if len(chunks) > 1:
        notes.append(f"chunks not stated: {vpp} for each rank")
    if len(tried) > 1:
        times = sorted(found.step_time_s for found in tried.values())
        notes.append(f"{times[0]:.2f} to {times[-1]:.2f} s")
    notes += [] if fits else [f"does not fit {limit / 2**30:.0f} GiB"]
    return replace(found, note="; ".join(notes), fits=fits)


def _chunks(record: Record) -> Sequence[int]:
    """Of each rank's layers; where the record does not say, one, and one for each layer if a step has whole rounds of micro-batches."""
    most = record.dims.layers // record.pp
    if record.vpp or record.pp == 1 or record.schedule == "gpipe" or most == 1 or record.microbatches % record.pp:
        return (record.vpp or 1,)
    return (1, most)


def _priced_as(record: Record, vpp: int) -> Iterator[str]:
    """What a record does not say, or says and is not predicted, in words."""
    yield from record.assumed
    if link := assumed_link(record):
        yield link
    name = schedule_name(record.pp, vpp, record.schedule)
    if record.pp > 1 and record.schedule and record.schedule not in (name, *(["interleaved-1f1b"] if name == "interleaved" else [])):
        yield f"schedule {record.schedule} priced as {name}"
    if record.zero == 3 and zero_level(record) < 3:
        yield f"zero 3 priced as zero {zero_level(record)}, as a pipeline keeps what it has gathered"


def _levels(record: Record, stack: Stack) -> tuple[Sequence[str], str | None]:
    """How much a record may compute again, and what recipes of its stack do where it does not say."""
    if record.recompute:
        return (record.recompute,), None
    recipes = dict(stack.recipes) if record.precision != "fp8" else {}
    usual = recipes.get("experts" if record.dims.experts else "dense")
    if usual:
        return ("none", usual, "full"), usual
    return ("none", "selective", "full") if stack.recomputes_some else ("none", "full"), None


def _least_that_fits(found: Mapping[str, Predicted], most: float, *, mixed: bool) -> tuple[str, Predicted]:
    """The fastest way to compute as much again as ``most`` bytes ask for, and its name: a level that fits, or, ``mixed``, of one that does
    not as many layers as leave room for one that does, as recipes have it that count the layers they recompute. If none fits, the last.
    """
    fitting = {name: one for name, one in found.items() if one.peak_memory_bytes <= most}
    ways = list(fitting.items())
    for name, light in found.items():
        for other, heavy in fitting.items() if mixed else ():
            if light.step_time_s < heavy.step_time_s and light.peak_memory_bytes > most:
                share = (most - heavy.peak_memory_bytes) / (light.peak_memory_bytes - heavy.peak_memory_bytes)
                time_s = share * light.step_time_s + (1 - share) * heavy.step_time_s
                ways.append((f"{name} of {share:.0%} of the layers, else {other},", Predicted(time_s, most, "")))
    return min(ways, key=lambda way: way[1].step_time_s, default=list(found.items())[-1])


def _known(field: str, value: str, values: Iterable[str]) -> None:
    if value not in values:
        raise RecordError(f"{field} {value!r} is not known; there are {', '.join(values)}")


def _refuse_odd_models(record: Record, stack: Stack) -> None:
    """Of which no run of its stack can be: by their experts, or their attention."""
    dims, ep, ranks = record.dims, record.ep or 1, record.dp * record.cp * record.tp
    if dims.experts and not (1 <= dims.topk <= dims.experts and 1 <= ep <= dims.experts):
        each = f"1 to {dims.experts}"
        raise RecordError(f"of {dims.experts} experts {dims.topk} take a token (it should be {each}), and {ep} ranks share them (likewise)")
    if dims.experts and (dims.experts % ep or ranks % ep):
        raise RecordError(f"ep = {ep} ranks share {dims.experts} experts; it should divide them, and dp * cp * tp = {ranks}")
    if dims.latent and stack.attention == "unfused":
        raise RecordError(f"stack {stack.name} computes no latent attention")


def _predict(record: Record, stack: Stack, level: str) -> Predicted:
    def depth(recompute: str) -> Depth:
        found = Depth(record, stack, staged(Key.of(record, stack, recompute)))
        found.slow_heads(again=recompute != "none")
        found.look_through_windows(again=recompute in ("selective", "full"))
        found.part_experts(recompute)
        found.copy_layers()
        if recompute == "none" and stack.keeps != "all":
            found.keep(Depth(record, stack, staged(Key.of(record, stack, "pointwise"))))
        if recompute != "full":
            found.keep_rows(recompute)
            return found
        if stack.recomputes_whole:
            found.recompute_whole(depth("none"))
        if level == "all-but-qkv":
            found.keep_projections()
        if level == "selective-op":
            found.keep_attention()
        return found

    first, *others = map(depth, RECOMPUTE[level])
    for other in others:
        first.mean(other)
    return first.played()
