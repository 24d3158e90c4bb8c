"""Published runs: what was trained, on what, how, and how long a step took."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = ("dp", "tp", "pp", "cp", "vpp", "zero", "micro_batch", "global_batch", "recompute", "precision")
"""Fields of a configuration that are called alike here."""


_IN_NODE = re.compile(r"ZeRO-1 .*?(?:inside an? (\d+)-GPU node|over (\d+) GPUs \(intra-node\))")
"""How a note says that fewer ranks share the optimizer than there are in data parallelism."""


class RecordError(ValueError):
    """A record cannot be read, or not be predicted."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Of a decoder-only transformer.

    Args:
        family: as the record calls it.
        layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq: as usual.
        experts: of which ``topk`` of width ``expert_ffn`` and all ``shared`` ones take each token; 0 without a mixture of experts.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq: int
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One run.

    Args:
        id, source, note: of the record.
        dims: of the model.
        gpu: name in the records.
        num_gpus, gpus_per_node: of the cluster.
        inter_gbps: Gb/s of each GPU to other nodes; None: not stated.
        dp, tp, pp, cp, ep, vpp: degrees; vpp None: not stated.
        zero: level; None: not stated.
        zero_ranks: that share the optimizer; None: all of data parallelism.
        sequence_parallel: None: not stated.
        micro_batch, global_batch: sequences.
        recompute: as the record calls it; None: not stated.
        precision: likewise.
        step_time_s: measured.
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
    ep: int
    vpp: int | None
    zero: int | None
    zero_ranks: int | None
    sequence_parallel: bool | None
    micro_batch: int
    global_batch: int
    recompute: str | None
    precision: str
    step_time_s: float
    peak_memory_bytes: float | None

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def publisher(self) -> str:
        """What stands for a source in tables: records of one page in several versions are one source."""
        page = self.source.split(" (", 1)[0].split(" @", 1)[0]
        repository = page.split(" ", 1)[0].rstrip(",")
        return " ".join(page.split(" ")[:2]).rstrip(",") if repository == "arXiv" else repository


def load_records(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        RecordError: the file, or one of them, cannot be read.
    """
    try:
        rows = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise RecordError(f"{path} holds a {type(rows).__name__}; it should be a list of records")
    return [_record(row, i) for i, row in enumerate(rows)]


def _record(row: Mapping[str, Any], index: int) -> Record:
    try:
        model, hardware, config = row["model"], row["hardware"], row["config"]
        peak_gb = row["measured"].get("peak_mem_gb")
        record = Record(
            id=row["id"],
            source=row["source"],
            note=row.get("note") or "",
            dims=_dims(model, config["tp"]),
            gpu=hardware["gpu"],
            num_gpus=hardware["n_gpus"],
            gpus_per_node=hardware["gpus_per_node"],
            inter_gbps=hardware["inter_gbps"],
            ep=config["ep"] or 1,
            sequence_parallel=config["sp"],
            zero_ranks=_zero_ranks(row.get("note") or ""),
            **{name: config[name] for name in CONFIG},
            step_time_s=row["iter_time_s"],
            peak_memory_bytes=peak_gb * 2**30 if peak_gb is not None else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        name = row.get("id", index) if isinstance(row, dict) else index
        raise RecordError(f"record {name}: {type(error).__name__} {error}; it should have the fields of published_runs.json") from error
    if record.microbatches < 1 or record.global_batch % (record.dp * record.micro_batch):
        raise RecordError(
            f"record {record.id}: a global batch of {record.global_batch} is no multiple of dp * micro_batch = "
            f"{record.dp * record.micro_batch}"
        )
    return record


def _zero_ranks(note: str) -> int | None:
    found = _IN_NODE.search(note)
    return int(found[1] or found[2]) if found else None


def _dims(model: Mapping[str, Any], tensor: int) -> Dims:
    moe = model.get("moe") or {}
    heads = model["heads"] or _usual_heads(model["hidden"], tensor)
    return Dims(
        family=model["family"],
        layers=model["layers"],
        hidden=model["hidden"],
        heads=heads,
        kv_heads=model["kv_heads"] or heads,
        ffn_hidden=model["ffn_hidden"],
        vocab=model["vocab"],
        seq=model["seq"],
        experts=moe.get("experts", 0),
        topk=moe.get("topk", 0),
        expert_ffn=moe.get("moe_ffn", 0),
        shared=moe.get("shared_experts", 0),
    )


def _usual_heads(hidden: int, tensor: int) -> int:
    """Where heads are not stated: as near to 128 wide as can be, of whole multiples of 8, and shared evenly by the ranks of a layer."""
    possible = [heads for heads in range(tensor, hidden // 8 + 1, tensor) if hidden % (8 * heads) == 0]
    if not possible:
        raise RecordError(f"heads are not stated, and none of a multiple of 8 share a hidden size of {hidden} over {tensor} ranks")
    return min(possible, key=lambda heads: abs(math.log(hidden / heads / 128)))
