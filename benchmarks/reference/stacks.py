"""Stack profiles: what the software of a time and place makes of a machine: a kernel, six numbers and seventeen facts with a meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fields import RecordError
from records import Record

from autopar.cost.device import AttentionSample, DeviceProfile, Stream
from autopar.cost.machine import LinkProfile

TENSORS_PER_COLLECTIVE = 8
"""Of data parallelism: all stacks flatten the parameters of a layer, or so many bytes, into one; autopar prices them one by one."""
FILE = Path(__file__).with_name("stacks.json")


@dataclass(frozen=True, slots=True)
class Stack:
    """One software stack.

    Args:
        name: of the stack.
        attention: kernel, a key of ``attention_kernels`` in the file, or ``unfused``.
        gemm_efficiency: what matrix products reach of the rate that a search over shapes found on a cool device.
        pointwise_kept: share of the bytes of pointwise ops that are left when chains of them are fused, which then move bytes as a copy
            does; 1: none are, and they run at the rates of torch's own kernels where the device has these.
        data_overlap: part of the communication of data parallelism that may hide under computation, on devices whose overlap is not known
            (`clusters.stack_on`).
        model_overlap: part of that of tensor and pipeline parallelism that hides, less than 1.
        scatters_sends: whether ranks of tensor parallelism send a part of what goes to the next stage each, which those there gather.
        layer_overhead_s: seconds that every layer takes beside its kernels, forward and backward each.
        step_overhead_s: seconds that every step takes beside its micro-batches, collectives and update: norms, metrics, logs.
        recomputes_whole: whether recomputation of a layer runs all of its forward, or stops when the backward has what it needs.
        interleaves: whether its pipelines are interleaved where nobody says so.
        keeps: of activations, where nothing is said to be computed again: ``all``; ``heavy``: what products and attention give and what is
            not made of that alone, since fused kernels of the backward make the rest anew; ``inputs``: that, and what products take.
        adds_wide: whether gradients of runs in bfloat16 add up in float32.
        keeps_both_gradients: whether all gradients of a micro-batch in bfloat16 are there beside their sums in float32.
        reduces: what data parallelism passes around in runs in bfloat16: ``shards`` of gradients; ``whole`` gradients, by all-reduces
            whatever is sharded; or so their ``sums`` in float32.
        fuses_sums: whether the products that make gradients add them to their sums, or an op of its own does, for each micro-batch.
        broadcasts: whether all ranks reduce all gradients, each updates whole parameters, and they send these to the others in turn.
        widens_gradients: whether its step makes copies of gradients: in float16 of the shard flat and in float32, of one in float64; else
            of those that are reduced together.
        optimizer: as autopar calls it: ``adamw_master`` updates copies in float32, ``adamw`` parameters in 16 bits.
        op_by_op: whether RMS norms and rotary positions are ops of torch, one after the other.
        copies: what of a layer it copies beside the collectives of its shards, a key of `depth.COPIED`.
        recomputes_some: whether it may recompute some layers only, where nobody says how many.
        recipes: what its recipes in 16 bits recompute where nobody says, of models with ``experts`` and of ``dense`` ones; else the least
            that fits.
        local_batch: micro-batches after which a pipeline is drained; None: all of a step.
        biases_experts: what of the biases of experts it computes op by op, keys of `experts.OPS`.
    """

    name: str
    attention: str
    gemm_efficiency: float
    pointwise_kept: float
    data_overlap: float
    model_overlap: float
    scatters_sends: bool
    layer_overhead_s: float
    step_overhead_s: float
    recomputes_whole: bool
    interleaves: bool
    keeps: str
    adds_wide: bool
    keeps_both_gradients: bool
    reduces: str
    fuses_sums: bool
    broadcasts: bool
    widens_gradients: bool
    optimizer: str = "adamw_master"
    op_by_op: bool = False
    copies: str = ""
    recomputes_some: bool = True
    recipes: tuple[tuple[str, str], ...] = ()
    local_batch: int | None = None
    biases_experts: tuple[str, ...] = ()

    def device(self, device: DeviceProfile, chip: str) -> DeviceProfile:
        """The device as this software uses it; ``chip`` as ``attention_kernels`` calls it."""
        products = tuple(sample.times(self.gemm_efficiency) for sample in device.matmul)
        streams = device.streams if self.pointwise_kept == 1 else {}
        used = replace(device, matmul=products, memory_bandwidth=device.memory_bandwidth / self.pointwise_kept, streams=streams)
        if self.attention == "unfused":  # softmax, with scale and mask, and norms are kernels already: no bytes are left to save
            whole = Stream(device.memory_bandwidth, device.memory_bandwidth)
            return replace(used, streams={**streams, "softmax": whole, "layer_norm": device.streams.get("layer_norm", whole)})
        kernels = json.loads(FILE.read_text())["attention_kernels"][self.attention]
        if chip not in kernels:
            raise RecordError(f"stack {self.name}: no rate of attention {self.attention!r} on {chip}; there are {', '.join(kernels)}")
        samples = tuple(AttentionSample(length, "bfloat16", forward, backward) for length, forward, backward in kernels[chip]["samples"])
        return replace(used, attention=samples)

    def data_link(self, link: LinkProfile) -> LinkProfile:
        return replace(
            link,
            overlap=self.data_overlap,
            alpha_s=link.alpha_s / TENSORS_PER_COLLECTIVE,
            base_s=link.base_s / TENSORS_PER_COLLECTIVE,
            protocols=tuple((a / TENSORS_PER_COLLECTIVE, b / TENSORS_PER_COLLECTIVE, share) for a, b, share in link.protocols),
            inside=self.data_link(link.inside) if link.inside is not None else None,
        )

    def tensor_link(self, link: LinkProfile) -> LinkProfile:
        """Of which only what does not hide counts."""
        left = 1 - self.model_overlap
        measured = {kind: tuple((num_bytes, time_s * left) for num_bytes, time_s in rows) for kind, rows in link.measured.items()}
        return replace(
            link,
            alpha_s=link.alpha_s * left,
            base_s=link.base_s * left,
            protocols=tuple((alpha_s * left, base_s * left, share) for alpha_s, base_s, share in link.protocols),
            bandwidth=link.bandwidth / left,
            measured=measured,
            inside=self.tensor_link(link.inside) if link.inside is not None else None,
        )


def stack_of(record: Record) -> Stack:
    """The stack of a record, by `_named`."""
    name, _ = _named(record)
    row = _written(json.loads(FILE.read_text())["stacks"], name)
    row |= {"biases_experts": tuple(row.get("biases_experts", ())), "recipes": tuple(row.get("recipes", {}).items())}
    return Stack(name, **row)


def why_assumed(record: Record) -> str:
    """Why the stack of a record is not that of its source; empty if it is."""
    return _named(record)[1]


def _named(record: Record) -> tuple[str, str]:
    """The stack that the source of a record is said to have used. Where that is not known, or has no attention for the GPU, the one that
    most trained with there in that precision; and why."""
    data = json.loads(FILE.read_text())
    other, name = _by_rule(data["others"], record), _by_rule(data["sources"], record)
    assert other is not None
    if name is None:
        return other, "the source is not known"
    kernel = _written(data["stacks"], name)["attention"]
    if kernel != "unfused" and record.chip not in data["attention_kernels"][kernel]:
        return other, f"{name} has no attention for {record.chip}"
    return name, ""


def _by_rule(rules: Sequence[Mapping[str, Any]], record: Record) -> str | None:
    """The stack of the first rule that holds: each says what is in the source, how the id ends, which chips and which precisions."""
    return next(
        (
            str(rule["stack"])
            for rule in rules
            if rule.get("in_source", "").lower() in record.source.lower()
            and record.id.endswith(rule.get("id_ends", ""))
            and record.chip in rule.get("chips", (record.chip,))
            and record.precision in rule.get("precisions", (record.precision,))
        ),
        None,
    )


def _written(stacks: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """What the file says of a stack, which may be ``like`` another but for what it says itself."""
    own = dict(stacks[name])
    base = own.pop("like", None)
    del own["why"]
    return _written(stacks, base) | own if base else own
