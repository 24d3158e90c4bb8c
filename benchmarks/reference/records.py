"""Published runs: what was trained, on what, how, and how long a step took."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

CONFIG = ("tp", "pp", "micro_batch", "global_batch", "precision")
"""Fields of a configuration that are called alike here, and must be there."""
UNSTATED = ("vpp", "zero", "recompute")
"""The same that may be missing, or null."""
STATED = {
    "model": ("family", "layers", "hidden", "ffn_hidden", "vocab", "seq"),
    "hardware": ("gpu", "n_gpus", "gpus_per_node"),
    "config": CONFIG,
}
"""What must be there, by the part of a record."""

_IN_NODE = re.compile(r"ZeRO-1 .*?(?:inside an? (\d+)-GPU node|over (\d+) GPUs \(intra-node\))")
"""How a note says that fewer ranks share the optimizer than there are in data parallelism."""


HEADS = {"gpt-oss": 64, "qwen3": 128}
"""Width of heads of families where it is not that of the model over their number, by their public configurations (``head_dim``)."""

LATENT = (1536, 512, 128, 64, 128)
"""Of multi-head latent attention, by the public configuration of DeepSeek-V3, which Kimi K2 has too: `Latent`."""
ROTARY = ("llama", "internlm", "qwen", "nemotron", "grok", "gpt-oss", "deepseek", "kimi")
"""Families with rotary positions and RMSNorm."""
GATED = ("llama", "internlm", "qwen", "grok", "gpt-oss", "deepseek", "kimi")
"""Families whose MLP has a gate."""
BIASED_EXPERTS = ("gpt-oss",)
"""Families whose experts have biases and clamp what they multiply, likewise (``swiglu_limit``)."""
WINDOWS = {"gpt-oss": 128}
"""Tokens that the attention of every second layer of a family looks at, likewise (``sliding_window``, ``layer_types``)."""

SAID_BELOW = {"chronicles-prequel.md": 64}
"""Heads of models whose tables leave them out, by the page: "all NHEADS=64 (above too)" stands further down in it."""


class RecordError(ValueError):
    """A record cannot be read, or not be predicted."""


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
        family: as the record calls it.
        layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq: as usual.
        head: width of a head.
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
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.family.startswith(GATED)

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
        gpu: name in the records.
        num_gpus, gpus_per_node: of the cluster.
        inter_gbps: Gb/s of each GPU to other nodes; None: not stated.
        dp, tp, pp, cp, ep, vpp: degrees; ep and vpp None: not stated.
        zero: level; None: not stated.
        zero_ranks: that share the optimizer; None: all of data parallelism.
        sequence_parallel: None: not stated.
        micro_batch, global_batch: sequences.
        recompute: as the record calls it; None: not stated.
        precision: likewise.
        step_time_s: measured; None: not stated.
        peak_memory_bytes: measured; None: not stated.
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

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

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
        return " ".join(page.split(" ")[:2]).rstrip(",") if repository == "arXiv" else repository


def load_records(path: Path) -> tuple[list[Record], list[tuple[str, str]]]:
    """The records of a file; and of those that cannot be read the id, and why.

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
            records.append(read_record(row))
        except RecordError as error:
            unread.append((str(row.get("id", i)) if isinstance(row, dict) else str(i), str(error)))
    return records, unread


def read_record(row: Mapping[str, Any]) -> Record:
    """A record from its JSON. What the published ones have as null may be missing; data parallelism is by what other GPUs there are.

    Raises:
        RecordError: it lacks something else, or makes no sense.
    """
    try:
        if unstated := [f"{part}.{name}" for part, names in STATED.items() for name in names if row[part].get(name) is None]:
            raise RecordError(f"{', '.join(unstated)} not stated")
        model, hardware, config = row["model"], row["hardware"], row["config"]
        note, peak_gb = row.get("note") or "", (row.get("measured") or {}).get("peak_mem_gb")
        record = Record(
            id=row["id"],
            source=row["source"],
            note=note,
            dims=_dims(model, config["tp"], row["source"]),
            gpu=hardware["gpu"],
            num_gpus=hardware["n_gpus"],
            gpus_per_node=hardware["gpus_per_node"],
            inter_gbps=hardware.get("inter_gbps"),
            dp=config.get("dp") or _data(config, hardware["n_gpus"]),
            cp=config.get("cp") or 1,
            ep=config.get("ep"),
            sequence_parallel=config.get("sp"),
            zero_ranks=_zero_ranks(note),
            **{name: config[name] for name in CONFIG},
            **{name: config.get(name) for name in UNSTATED},
            step_time_s=row.get("iter_time_s"),
            peak_memory_bytes=peak_gb * 2**30 if peak_gb is not None else None,
        )
        if record.microbatches < 1 or record.global_batch % (record.dp * record.micro_batch):
            raise RecordError(
                f"a global batch of {record.global_batch} is no multiple of dp * micro_batch = {record.dp * record.micro_batch}"
            )
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise RecordError(f"{type(error).__name__} {error}; it should have the fields of published_runs.json") from error
    return record


def _data(config: Mapping[str, Any], num_gpus: int) -> int:
    """Replicas, where they are not stated."""
    others = config["tp"] * config["pp"] * (config.get("cp") or 1)
    if num_gpus % others:
        raise RecordError(f"dp is not stated, and {num_gpus} GPUs are no multiple of pp * cp * tp = {others}")
    return int(num_gpus // others)


def _zero_ranks(note: str) -> int | None:
    found = _IN_NODE.search(note)
    return int(found[1] or found[2]) if found else None


def _dims(model: Mapping[str, Any], tensor: int, source: str) -> Dims:
    moe = model.get("moe") or {}
    said = next((heads for page, heads in SAID_BELOW.items() if page in source), None)
    heads = model.get("heads") or said or _usual_heads(model["hidden"], tensor)
    return Dims(
        family=model["family"],
        layers=model["layers"],
        hidden=model["hidden"],
        heads=heads,
        kv_heads=model.get("kv_heads") or heads,
        ffn_hidden=model["ffn_hidden"],
        vocab=model["vocab"],
        seq=model["seq"],
        head=next((width for family, width in HEADS.items() if model["family"].startswith(family)), model["hidden"] // heads),
        experts=moe.get("experts", 0),
        topk=moe.get("topk", 0),
        expert_ffn=moe.get("moe_ffn", 0),
        shared=moe.get("shared_experts", 0),
        biased=model["family"].startswith(BIASED_EXPERTS),
        window=next((tokens for family, tokens in WINDOWS.items() if model["family"].startswith(family)), 0),
        latent=Latent(*LATENT) if moe.get("attention") == "MLA" else None,
    )


def _usual_heads(hidden: int, tensor: int) -> int:
    """Where heads are not stated: as near to 128 wide as can be, of whole multiples of 8, and shared evenly by the ranks of a layer."""
    possible = [heads for heads in range(tensor, hidden // 8 + 1, tensor) if hidden % (8 * heads) == 0]
    if not possible:
        raise RecordError(f"heads are not stated, and none of a multiple of 8 share a hidden size of {hidden} over {tensor} ranks")
    return min(possible, key=lambda heads: abs(math.log(hidden / heads / 128)))
