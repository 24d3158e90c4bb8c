"""Memory of four ranks while a large model starts: constructed on every rank, or on meta and filled shard by shard.

    python benchmarks/start_big.py [--only zero3] [--plot docs/figures/start_big.png] [--record]

A GPT-2 of about 400 MB in float32 gets its plan and its values on 4 local ranks (gloo), under two plans, each in processes of its own, in
which it starts in four ways, one after the other:

    modules     on meta; each module initialises itself
    deferred    on meta; the construction is recorded, and run again for this rank's shards
    weights     on meta; each rank reads its slices of safetensors
    real        the model is constructed on every rank, and sharded by the plan

*Resident* is the most that a rank had of the machine's memory (VmHWM) from before the construction until it could train, beside what it had
before: with the imports, and after a start with `initialize=False`, for what planning takes. Pages of the files that are mapped count too.
*Kept* is what of it is there at the end, of which *stored* are the shards. The rank with the most counts. Times are those of whatever else
the machine had to do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
sys.path.insert(0, str(Path(__file__).parent / "cluster"))

import argparse
import datetime
import gc
import json
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from memory import forget_peak, status_bytes
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual

ROOT = Path(__file__).parent.parent
RANKS, MIB = 4, 2**20
LAYERS, HIDDEN, HEADS, VOCAB = 7, 1024, 16, 12288
PLANS = {"zero3": Manual(dp=4, zero=3), "pp2-tp2": Manual(pp=2, tp=2, microbatches=2)}
WAYS = ("modules", "deferred", "weights", "real")


@dataclass(frozen=True, slots=True)
class Row:
    """One start, in bytes and seconds, of each rank.

    Args:
        resident: the most of the machine's memory; ``kept`` at the end.
        stored: of the parameters at the end.
        time_s: of the construction, the plan and the values.
        model_bytes: all parameters.
    """

    resident: list[int]
    kept: list[int]
    stored: list[int]
    time_s: list[float]
    model_bytes: int

    @property
    def worst(self) -> int:
        return max(range(RANKS), key=lambda rank: self.resident[rank])


def construct() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCAB, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def on_meta() -> Any:
    with torch.device("meta"):
        return construct()


def recorded() -> Any:
    torch.manual_seed(0)
    with autopar.deferred():
        return construct()


def start(plan: Manual, make: Callable[[], Any], **options: Any) -> Any:
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    profile = autopar.Cluster(1, RANKS, "cpu").with_mesh(plan.grid(RANKS)).profile
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return autopar.parallelize(make(), RANKS, plan=plan, profile=profile, example_batch=batch, outputs="loss", **options)


def work(name: str, out: str, folder: str) -> None:
    """All ways under one plan, on all ranks of ``torchrun``."""
    torch.set_num_threads(1)
    plan, makes = PLANS[name], {"real": construct, "deferred": recorded}
    start(plan, on_meta, initialize=False)
    rows = {}
    for way in WAYS:
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, measure(plan, makes.get(way, on_meta), **({"weights": folder} if way == "weights" else {})))
        *figures, num_bytes = [list(each) for each in zip(*everyone, strict=True)]
        rows[way] = asdict(Row(*figures, num_bytes[0]))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(plan: Manual, make: Callable[[], Any], **options: Any) -> tuple[int, int, int, float, int]:
    """One start on this rank: the figures of a `Row`."""
    gc.collect()
    forget_peak()
    before, began = status_bytes("VmRSS"), time.perf_counter()
    model = start(plan, make, **options)
    time_s, resident = time.perf_counter() - began, status_bytes("VmHWM") - before
    gc.collect()
    forget_peak()
    kept = status_bytes("VmRSS") - before
    stored = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return resident, kept, stored, time_s, sum(torch.Size(p.shape).numel() * 4 for p in model.plan.parameters)


def run(name: str, folder: str) -> dict[str, Row]:
    """The rows of a plan, in processes of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*torchrun, __file__, "--work", name, out.name, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        return {f"{name}/{way}": Row(**row) for way, row in json.loads(Path(out.name).read_text()).items()}


def table(rows: Mapping[str, Row]) -> str:
    """In MiB and seconds, of the rank with the most."""
    lines = ["| start | resident | kept | stored | model | time, s |", "|---|--:|--:|--:|--:|--:|"]
    for name, row in rows.items():
        at = row.worst
        figures = (row.resident[at], row.kept[at], row.stored[at], row.model_bytes)
        lines.append(f"| {name} | {' | '.join(f'{figure / MIB:.0f}' for figure in figures)} | {row.time_s[at]:.1f} |")
    return "\n".join(lines)


def plot(path: str, rows: Mapping[str, Row]) -> None:
    """The peaks beside what is stored and the whole model."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    kinds = (("resident", "#0072B2"), ("kept", "#E69F00"), ("stored", "#009E73"))  # Okabe and Ito
    for i, (kind, color) in enumerate(kinds):
        heights = [getattr(row, kind)[row.worst] / MIB for row in rows.values()]
        axes.bar([x + (i - 1) * 0.27 for x in range(len(rows))], heights, 0.25, color=color, label=kind)
    axes.axhline(next(iter(rows.values())).model_bytes / MIB, color="black", linestyle="--", linewidth=1, label="the whole model")
    axes.set_xticks(range(len(rows)), [name.replace("/", "\n") for name in rows])
    axes.set_ylabel("most of a rank, MiB")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def record(rows: Mapping[str, Row]) -> None:
    """The table, and all figures of all ranks, in benchmarks/records."""
    today, command = datetime.date.today().isoformat(), f"python {shlex.join(sys.argv)}"
    path = ROOT / "benchmarks" / "records" / f"{today}-start-big"
    path.with_suffix(".md").write_text(f"# Starting big, {today}\n\n`{command}`\n\n{table(rows)}\n")
    figures = {name: asdict(row) for name, row in rows.items()}
    path.with_suffix(".json").write_text(json.dumps({"command": command, "date": today, "rows": figures}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", metavar="NAME,...", default="*", help="plans to run; * and ? stand for any characters")
    parser.add_argument("--plot", default="", metavar="PATH", help="picture of the rows; needs matplotlib")
    parser.add_argument("--record", action="store_true", help="write table and figures to benchmarks/records")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        construct().save_pretrained(folder, max_shard_size="100MB")
        for name in PLANS:
            if any(fnmatch(name, pattern) for pattern in given.only.split(",")):
                print(name, file=sys.stderr)
                rows |= run(name, folder)
    print(table(rows))
    if given.record:
        record(rows)
    if given.plot:
        plot(given.plot, rows)


if __name__ == "__main__":
    main()
