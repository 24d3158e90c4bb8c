"""Published runs: what was trained, on what, how, and how long a step took."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fields import SHOWN, Part, RecordError, T
from names import Family, family_of, gpu_of, precision_of, spelled

STATED = {
    "model": ("family", "layers", "hidden", "vocab", "seq"),
    "hardware": ("gpu", "n_gpus", "gpus_per_node"),
    "config": ("tp", "pp", "micro_batch", "global_batch", "precision"),
}
"""What must be there, by the part of a record; so must ``ffn_hidden``, unless experts say how wide they are."""

_IN_NODE = re.compile(r"ZeRO-1 .*?(?:inside an? (\d+)-GPU node|over (\d+) GPUs \(intra-node\))")
"""How a note says that fewer ranks share the optimizer than there are in data parallelism."""

LATENT = (1536, 512, 128, 64, 128)
"""Of multi-head latent attention, by the public configuration of DeepSeek-V3, which Kimi K2 has too: `Latent`."""

MOST_ACTIONS = 10**6
"""Micro-batches times stages of a pipeline whose schedule is played; published ones have some 50,000."""

SAID_BELOW = {"chronicles-prequel.md": 64}
"""Heads of models whose tables leave them out, by the page: "all NHEADS=64 (above too)" stands further down in it."""


class Latent(NamedTuple):
    """Widths of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): of what queries, and keys with values, are made
    from, and of a head: what has no position, what has one, and values."""

    q: int
    kv: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Dims:
    """Of a decoder-only transformer.

    Args:
        family: as the record calls it, `spelled` as tables have it.
        layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq: as usual.
        head: width of a head.
        rotary: whether positions are rotary and norms RMSNorm, without biases.
        gated: whether the MLP has a gate; experts have.
        experts: of which ``topk`` of width ``expert_ffn`` and all ``shared`` ones take each token; 0 without a mixture of experts.
        biased: whether experts of the family have biases, and clamp what they multiply.
        window: tokens that every second layer looks at; 0: all.
        latent: of multi-head latent attention; None: of another.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq: int
    head: int
    rotary: bool = False
    gated: bool = False
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared: int = 0
    biased: bool = False
    window: int = 0
    latent: Latent | None = None

    @property
    def scored(self) -> int:
        """Width of the queries of all heads; with latent attention that of keys and values is another."""
        return self.heads * (self.head if self.latent is None else self.latent.nope + self.latent.rope)

    @property
    def attended(self) -> int:
        """Width of what all heads give."""
        return self.heads * (self.head if self.latent is None else self.latent.value)

    @property
    def projected(self) -> int:
        """Width of queries, keys and values."""
        others = 2 * self.kv_heads * self.head if self.latent is None else self.scored + self.attended
        return self.scored + others

    @property
    def attention_params(self) -> int:
        """Parameters of the attention of a layer."""
        if self.latent is None:
            return 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        q, kv, nope, rope, value = self.latent
        made = q * self.heads * (nope + rope) + kv * self.heads * (nope + value)
        return self.hidden * (q + kv + rope + self.heads * value) + made


@dataclass(frozen=True, slots=True)
class Record:
    """One run.

    Args:
        id, source, note: of the record.
        dims: of the model.
        gpu: as tables have it, or as the record calls it where they do not.
        num_gpus, gpus_per_node: of the cluster.
        inter_gbps: Gb/s of each GPU to other nodes; None: not stated.
        dp, tp, pp, cp, ep, vpp: degrees; ep and vpp None: not stated.
        zero: level; None: not stated.
        zero_ranks: that share the optimizer; None: all of data parallelism.
        sequence_parallel: None: not stated.
        micro_batch, global_batch: sequences.
        recompute: as the record calls it; None: not stated.
        precision: as tables have it, or as the record calls it where they do not.
        step_time_s: measured; None: not stated.
        peak_memory_bytes: measured; None: not stated.
        schedule: of the pipeline, as the record calls it; None: not stated.
        assumed: what the record does not say, or says wrongly, in words.
    """

    id: str
    source: str
    note: str
    dims: Dims
    gpu: str
    num_gpus: int
    gpus_per_node: int
    inter_gbps: float | None
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int | None
    vpp: int | None
    zero: int | None
    zero_ranks: int | None
    sequence_parallel: bool | None
    micro_batch: int
    global_batch: int
    recompute: str | None
    precision: str
    step_time_s: float | None
    peak_memory_bytes: float | None
    schedule: str | None = None
    assumed: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def chip(self) -> str:
        """The GPU without its memory."""
        return self.gpu.split("-", maxsplit=1)[0]

    @property
    def is_interleaved(self) -> bool:
        """Whether its schedule is said to be."""
        return "interleaved" in (self.schedule or "")

    @property
    def sends_once(self) -> bool:
        """Whether tokens go once to each node, or to each rank of one, by what the note says of their dispatcher."""
        return "DeepEP" in self.note

    @property
    def balances(self) -> bool:
        """Whether tokens go to experts in turn, each to as many that follow one another, by what the note says of the gate
        (``FakeBalancedGate`` of nemo_automodel/components/moe/layers.py)."""
        return "fake balanced gate" in self.note

    @property
    def usual_ep(self) -> int:
        """Ranks that share the experts where nobody says so: all of data parallelism if tokens are sent by a library that is there for that
        alone, as the recipes of Automodel have it; else none."""
        return math.gcd(self.dims.experts, self.dp * self.cp) if self.dims.experts and self.sends_once else 1

    @property
    def publisher(self) -> str:
        """What stands for a source in tables: records of one page in several versions are one source."""
        page = self.source.split(" (", 1)[0].split(" @", 1)[0]
        repository = page.split(" ", 1)[0].rstrip(",")
        return (" ".join(page.split(" ")[:2]).rstrip(",") if repository == "arXiv" else repository) or "source not stated"


class Unread(NamedTuple):
    """A record that cannot be read: why, and what was measured."""

    id: str
    source: str
    why: str
    step_time_s: float | None
    peak_memory_bytes: float | None


def load_records(path: Path) -> tuple[list[Record], list[Unread]]:
    """The records of a file, and those that cannot be read.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise RecordError(f"{path} holds a {type(rows).__name__}; it should be a list of records")
    records, unread = [], []
    for i, row in enumerate(rows):
        try:
            records.append(read_record(row, i))
        except RecordError as error:
            unread.append(_unread(row, i, str(error)))
    return records, unread


def _unread(row: object, place: int, why: str) -> Unread:
    whole = Part("", row if isinstance(row, dict) else {})

    def readable(take: Callable[[], T], otherwise: T) -> T:
        try:
            return take()
        except RecordError:
            return otherwise

    return Unread(
        readable(lambda: _id(whole, place), str(place)),
        readable(lambda: whole.optional(whole.text, "source") or "", ""),
        why,
        readable(lambda: _measured(whole, "iter_time_s"), None),
        readable(lambda: _peak_bytes(whole), None),
    )


def read_record(row: object, place: int = 0) -> Record:
    """A record from its JSON, the one at ``place`` of its file. What the published ones have as null may be missing; data parallelism is by
    what other GPUs there are.

    Raises:
        RecordError: it lacks something else, or makes no sense.
    """
    if not isinstance(row, dict):
        what = json.dumps(row)[:SHOWN]
        raise RecordError(f"record {place} of the file is {what}; it should be an object with the fields of published_runs.json")
    whole = Part("", row)
    model, hardware, config = map(whole.part, STATED)
    moe = model.part("moe")
    parts = zip((model, hardware, config), STATED.values(), strict=True)
    unstated = [path for part, names in parts for path in part.missing(*names)]
    if not moe.values.get("experts") or moe.missing("moe_ffn"):
        unstated += model.missing("ffn_hidden")
    if unstated:
        raise RecordError(f"{', '.join(unstated)} not stated")
    note, source = (whole.optional(whole.text, name) or "" for name in ("note", "source"))
    num_gpus, gpu = hardware.whole("n_gpus"), hardware.text("gpu")
    record = Record(
        id=_id(whole, place),
        source=source,
        note=note,
        dims=_dims(model, moe, config.whole("tp"), source),
        gpu=gpu_of(gpu)[0],
        num_gpus=num_gpus,
        gpus_per_node=hardware.whole("gpus_per_node"),
        inter_gbps=hardware.optional(hardware.number, "inter_gbps"),
        dp=config.optional(config.whole, "dp") or _data(config, num_gpus),
        tp=config.whole("tp"),
        pp=config.whole("pp"),
        cp=config.optional(config.whole, "cp") or 1,
        ep=config.optional(config.whole, "ep"),
        vpp=config.optional(config.whole, "vpp"),
        zero=config.optional(lambda name: config.whole(name, 0, 3), "zero"),
        zero_ranks=_zero_ranks(note),
        sequence_parallel=config.optional(config.truth, "sp"),
        micro_batch=config.whole("micro_batch"),
        global_batch=config.whole("global_batch"),
        recompute=_recompute(config),
        precision=precision_of(config.text("precision")),
        step_time_s=_measured(whole, "iter_time_s"),
        peak_memory_bytes=_peak_bytes(whole),
        schedule=config.optional(lambda name: spelled(config.text(name)), "schedule"),
        assumed=tuple(_assumed(whole, model, moe, hardware)),
    )
    _check(record)
    return record


def _id(whole: Part, place: int) -> str:
    """Numbers are names too; without one, the place in the file."""
    if whole.missing("id"):
        return str(place)
    return str(whole.values["id"]) if isinstance(whole.values["id"], int) else whole.text("id")


def _recompute(config: Part) -> str | None:
    """As tables have it; ``false`` is none."""
    if config.values.get("recompute") is False:
        return "none"
    return config.optional(lambda name: spelled(config.text(name)), "recompute") or None


def _measured(part: Part, name: str) -> float | None:
    return part.optional(part.measured, name)


def _peak_bytes(whole: Part) -> float | None:
    peak_gb = _measured(whole.part("measured"), "peak_mem_gb")
    return None if peak_gb is None else peak_gb * 2**30


def _assumed(whole: Part, model: Part, moe: Part, hardware: Part) -> Iterator[str]:
    """What the record does not say, or says wrongly, in words."""
    gpu, is_open = gpu_of(hardware.text("gpu"))
    family, has_experts = spelled(model.text("family")), bool(moe.values.get("experts"))
    if family_of(family) is None:
        yield f"family {family!r} assumed like GPT" + (", with experts that have gates" if has_experts else "")
    if has_experts and moe.missing("moe_ffn"):
        yield f"moe_ffn not stated: ffn_hidden, {model.values['ffn_hidden']}"
    if is_open:
        yield f"memory of {hardware.text('gpu')} not stated: {gpu}"
    for part, name in ((whole, "iter_time_s"), (whole.part("measured"), "peak_mem_gb")):
        if not part.missing(name) and part.measured(name) is None:
            yield f"{part.shown(name)}, and so not measured"


def _check(record: Record) -> None:
    """Refuse what no run can be."""
    dims, replicas, chunks = record.dims, record.dp * record.micro_batch, record.vpp or 1
    if record.global_batch % replicas:
        raise RecordError(f"a global batch of {record.global_batch} is no multiple of dp * micro_batch = {replicas}")
    if record.num_gpus > record.gpus_per_node and record.num_gpus % record.gpus_per_node:
        raise RecordError(f"{record.num_gpus} GPUs are no multiple of hardware.gpus_per_node = {record.gpus_per_node}")
    if dims.heads > dims.hidden or dims.heads % dims.kv_heads:
        raise RecordError(
            f"model.heads is {dims.heads}; it should be a multiple of kv_heads = {dims.kv_heads}, and no more than hidden = {dims.hidden}"
        )
    if record.pp > 1:
        _check_pipeline(record, chunks)
    stages = record.pp * (record.vpp or dims.layers // record.pp if record.pp > 1 else chunks)
    if record.microbatches * stages > MOST_ACTIONS:
        raise RecordError(f"{record.microbatches:,} micro-batches of {stages:,} stages; no more than {MOST_ACTIONS:,} in all are played")


def _check_pipeline(record: Record, chunks: int) -> None:
    layers = record.dims.layers
    if layers < record.pp or record.pp * chunks > layers + 2:
        raise RecordError(
            f"pp * vpp = {record.pp} * {chunks} stages of {layers} layers; ranks should have a layer or more, and stages one, the "
            "embedding or the head"
        )
    if chunks > 1 and record.microbatches % record.pp:
        raise RecordError(
            f"{record.microbatches} micro-batches are no multiple of pp = {record.pp}, which interleaving (vpp = {chunks}) takes together"
        )


def _data(config: Part, num_gpus: int) -> int:
    """Replicas, where they are not stated."""
    others = config.whole("tp") * config.whole("pp") * (config.optional(config.whole, "cp") or 1)
    if num_gpus % others:
        raise RecordError(f"dp is not stated, and {num_gpus} GPUs are no multiple of pp * cp * tp = {others}")
    return num_gpus // others


def _zero_ranks(note: str) -> int | None:
    found = _IN_NODE.search(note)
    return int(found[1] or found[2]) if found else None


def _dims(model: Part, moe: Part, tensor: int, source: str) -> Dims:
    name, hidden = spelled(model.text("family")), model.whole("hidden")
    family = family_of(name) or Family()
    said = next((heads for page, heads in SAID_BELOW.items() if page in source), None)
    heads = model.optional(model.whole, "heads") or said or _usual_heads(hidden, tensor)
    experts, topk, shared = (moe.optional(lambda name: moe.whole(name, 0), name) or 0 for name in ("experts", "topk", "shared_experts"))
    widths = (moe.optional(moe.whole, "moe_ffn"), model.optional(model.whole, "ffn_hidden"))
    expert_ffn, ffn_hidden = (first or second or 0 for first, second in (widths, widths[::-1]))
    return Dims(
        family=name,
        layers=model.whole("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=model.optional(model.whole, "kv_heads") or heads,
        ffn_hidden=ffn_hidden,
        vocab=model.whole("vocab"),
        seq=model.whole("seq"),
        head=family.head or hidden // heads,
        rotary=family.rotary,
        gated=family.gated or experts > 0,
        experts=experts,
        topk=topk,
        expert_ffn=expert_ffn if experts else 0,
        shared=shared,
        biased=family.biased_experts,
        window=family.window,
        latent=Latent(*LATENT) if spelled(moe.optional(moe.text, "attention") or "") == "mla" else None,
    )


def _usual_heads(hidden: int, tensor: int) -> int:
    """Where heads are not stated: as near to 128 wide as can be, of whole multiples of 8, and shared evenly by the ranks of a layer."""
    possible = [heads for heads in range(tensor, hidden // 8 + 1, tensor) if hidden % (8 * heads) == 0]
    if not possible:
        raise RecordError(f"heads are not stated, and none of a multiple of 8 share a hidden size of {hidden} over {tensor} ranks")
    return min(possible, key=lambda heads: abs(math.log(hidden / heads / 128)))
