"""Memory of four ranks under ZeRO-0 to -3, measured and predicted, with the bytes per parameter of the paper.

    python benchmarks/zero_memory.py [--only 'weights/*'] [--plot docs/figures/zero_memory.png] [--record]

A byte-level GPT-2 of 12 million parameters trains by AdamW on 4 local ranks (gloo); each row is a run in processes of its own,
and what is measured is a step: forward, backward, optimizer. In ``weights`` rows parameters and what belongs to them are most of
the memory, in ``activations`` rows the batch is 8 times as large, and ``bf16`` rows compute in bfloat16 (``precision="bf16"``).

*Measured* is the most that tensors take at one time, as torch's CPU allocator counts it (`cluster/memory.py`), of the rank with the most;
``least`` is the rank with the least.
No activation has as many bytes as a weight or a shard of one, so that the blocks tell what they hold: of the size of a weight, a gathered
copy or a whole gradient; of the size of a shard, a part of a gradient (or what the optimizer works with). *Resident* is the most that the
process had of the machine's memory beside what the imports and the plan took: what the C library keeps for later is in it.

The paper is Rajbhandari et al., "ZeRO", SC 2020, section 5; in float32 there are 4 bytes of a parameter, 4 of its gradient, 8 of Adam's
moments and no copies, of which levels 1, 2 and 3 shard the moments, the gradients too, and all. autopar shards the parameter at every
level and gathers a copy of it, 4 bytes for the whole step, at levels 1 and 2.

In mixed precision the paper has 2 bytes of a parameter, 2 of its gradient and 12 of the optimizer, of which 4 are a float32 copy of the
parameter. autopar has that copy as the parameter (4), a gradient in float32 (4), the moments (8), and copies in 16 bits (2) while the model
computes with them; the third table has these terms. A gradient has 16 bits from the op that makes it until it is cast: beside copies in
16 bits it cannot be told from them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
sys.path.insert(0, str(Path(__file__).parent / "cluster"))

import argparse
import datetime
import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import accumulate

import torch
import torch.distributed as dist
from memory import Change, changes_of, forget_peak, held_bytes, status_bytes
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual

ROOT = Path(__file__).parent.parent
RANKS, WARM_UP_STEPS, MIB = 4, 2, 2**20
LAYERS, HIDDEN, HEADS, INNER, VOCABULARY, UNUSED_POSITIONS = 4, 512, 8, 1920, 272, 4
"""An inner width of 4 * 512 would make a quarter of one weight as large as another, 256 words would make them in 16 bits as large as a
quarter of another in 32, and as many positions as a row has would make them as large as activations of a row."""
BATCHES = {"weights": (16, 44), "activations": (64, 88)}
"""Rows and their length: a rank's part, or that of a micro-batch, times any width of the model is not the size of a weight."""
PLANS = {
    **{f"zero{zero}{name}": Manual(dp=4, zero=zero, microbatches=m) for name, m in (("", None), ("-m4", 4)) for zero in range(4)},
    "dp2-tp2-zero3": Manual(dp=2, tp=2, zero=3),
    "pp2-dp2-zero2-m4": Manual(pp=2, dp=2, zero=2, microbatches=4),
    **{f"bf16-zero{zero}": Manual(dp=4, zero=zero, precision="bf16") for zero in range(4)},
    "bf16-zero2-m4": Manual(dp=4, zero=2, microbatches=4, precision="bf16"),
    **{f"bf16-bf16-zero{zero}": Manual(dp=4, zero=zero, precision="bf16/bf16") for zero in (0, 2)},
}
ROWS = [*(f"weights/{name}" for name in PLANS), "activations/zero0", "activations/zero3"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The step of one rank, in bytes.

    Args:
        parameters: what is stored of them, at all times; ``optimizer`` likewise.
        peak: the most that tensors take at one time.
        whole: of it blocks as large as weights; ``shards``: as large as what is stored of one.
        narrow: of ``whole`` what has 16 bits where parameters have 32.
        most_whole: the most of blocks as large as weights at any time.
        resident: the most resident memory, beside what imports and plan took.
        over_time: (part of the step, bytes of all tensors, of blocks as large as weights).
    """

    parameters: int
    optimizer: int
    peak: int
    whole: int
    shards: int
    narrow: int
    most_whole: int
    resident: int
    over_time: list[tuple[float, int, int]]

    @property
    def rest(self) -> int:
        return self.peak - self.parameters - self.optimizer - self.whole - self.shards


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: predicted bytes, in all and by kind, of each rank with what it measured, and the number of parameters."""

    predicted: list[int]
    by_kind: dict[str, int]
    measured: list[Measured]
    num_parameters: int

    @property
    def worst(self) -> int:
        """The rank with the most."""
        return max(range(RANKS), key=lambda rank: self.measured[rank].peak)


def textbook_bytes(wanted: Manual) -> float:
    """Bytes per parameter of a rank: parameter, gradient and optimizer state (section 5)."""
    terms = (2, 2, 12) if wanted.precision else (4, 4, 8)
    return sum(num_bytes / (wanted.dp if wanted.zero >= level else 1) for num_bytes, level in zip(terms, (3, 2, 1), strict=True))


def sizes_of(weights: Iterable[int], ranks: int, widths: Sequence[int]) -> tuple[set[int], set[int], set[int]]:
    """Bytes of blocks that hold a whole weight, a whole one in 16 bits, and a shard of one.

    Args:
        weights: elements of each; ``ranks`` share one, and ``widths`` are the bytes that an element may have.
    """
    whole, shards = ({each * width // parts for each in weights for width in widths} for parts in (1, ranks))
    narrow = {2 * each for each in weights} if 2 in widths else set()
    shards = shards if ranks > 1 else set()
    if whole & shards or narrow & {4 * each for each in weights}:
        raise SystemExit(f"blocks of {sorted(whole & shards | narrow)} bytes hold more than one kind of thing; give the model other widths")
    return whole, narrow, shards


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    rows, length = BATCHES[kind]
    tokens = torch.tensor(list((ROOT / "LICENSE").read_bytes()[: rows * length])).view(rows, length)
    return {"input_ids": tokens, "labels": tokens}


def work(name: str, out: str) -> None:
    """One row, on all ranks of ``torchrun``."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kind, _, plan_name = name.partition("/")
    wanted, batch = PLANS[plan_name], batch_of(kind)
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    length = batch["input_ids"].shape[1]
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_inner=INNER,
        vocab_size=VOCABULARY,
        n_positions=length + UNUSED_POSITIONS,
        use_cache=False,
        **dropout,
    )
    model = transformers.GPT2LMHeadModel(config)
    profile = autopar.Cluster(1, RANKS, "cpu").with_mesh(wanted.grid(RANKS)).profile
    model = autopar.parallelize(model, RANKS, plan=wanted, profile=profile, example_batch=batch, outputs="loss")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    stored = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    forget_peak()
    before = status_bytes("VmRSS") - sum(local.nbytes for local in stored)
    for _ in range(WARM_UP_STEPS):
        step()
    resident = status_bytes("VmHWM") - before
    state = [v.to_local() if isinstance(v, DTensor) else v for own in optimizer.state.values() for v in own.values()]
    start, changes = held_bytes(), changes_of(step)
    weights = [p for p in model._autopar.plan.parameters if len(p.shape) > 1]
    ranks = wanted.dp if wanted.zero else 1
    sizes = sizes_of({p.num_bytes // 4 * ranks for p in weights}, ranks, (4, 2) if wanted.precision else (4,))
    mine = _measured(start, changes, sizes, sum(x.nbytes for x in stored), sum(x.nbytes for x in state), resident)
    everyone: list[Measured] = [mine] * RANKS
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        plan = model._autopar.plan
        peaks, grid = plan.prediction.peak_memory_bytes, plan.grid
        at = [grid.coordinate(rank)[plan.pipeline.position] if plan.pipeline.degree > 1 else 0 for rank in range(RANKS)]
        count = sum(torch.Size(p.shape).numel() for p in plan.parameters)
        row = Row([peaks[position] for position in at], dict(plan.prediction.memory_bytes), everyone, count)
        Path(out).write_text(json.dumps(asdict(row)))
    dist.destroy_process_group()


def _measured(
    start: int, changes: Sequence[Change], kinds: tuple[set[int], set[int], set[int]], parameters: int, optimizer: int, resident: int
) -> Measured:
    totals = list(accumulate((c.num_bytes for c in changes), initial=start))
    of_whole, of_narrow, of_shards = (
        list(accumulate((c.num_bytes if abs(c.num_bytes) in sizes else 0 for c in changes), initial=0)) for sizes in kinds
    )
    peak = max(range(len(totals)), key=totals.__getitem__)
    first, last = changes[0].time_ns, changes[-1].time_ns
    times = [0.0, *((c.time_ns - first) / (last - first) for c in changes)]
    over_time = [entry for entry, change in zip(zip(times, totals, of_whole, strict=True), [Change(0, MIB), *changes], strict=True)
                 if abs(change.num_bytes) >= MIB // 8]
    at_peak = (of_whole[peak], of_shards[peak], of_narrow[peak])
    return Measured(parameters, optimizer, totals[peak], *at_peak, max(of_whole), resident, over_time)


def run(name: str) -> Row:
    """A row in processes of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        done = subprocess.run([*torchrun, __file__, "--work", name, out.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        read = json.loads(Path(out.name).read_text())
    measured = [Measured(**rank) for rank in read.pop("measured")]
    return Row(**read, measured=measured)


def table(rows: Mapping[str, Row]) -> str:
    """Of the rank with the most, in MiB; then what there is at its peak, and the most of whole weights at any time."""
    totals = ["| row | paper | predicted | measured | error | least | resident |", "|---|--:|--:|--:|--:|--:|--:|"]
    kinds = [
        "| row | parameters | optimizer | copies, whole gradients | predicted | shards, activations | predicted | whole at any time |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        seen, predicted, wanted = row.measured[row.worst], row.predicted[row.worst], PLANS[name.partition("/")[2]]
        paper = textbook_bytes(wanted) * row.num_parameters / (wanted.tp * wanted.pp)
        least = min(rank.peak for rank in row.measured)
        lines = [f"{_mib(x)}" for x in (paper, predicted, seen.peak)]
        totals.append(f"| {name} | {' | '.join(lines)} | {predicted / seen.peak - 1:+.1%} | {_mib(least)} | {_mib(seen.resident)} |")
        whole, rest = (sum(row.by_kind[kind] for kind in own) for own in (("gathered", "gradients", "buffers"), ("activations",)))
        figures = (seen.parameters, seen.optimizer, seen.whole, whole, seen.shards + seen.rest, rest, seen.most_whole)
        kinds.append(f"| {name} | {' | '.join(map(_mib, figures))} |")
    mixed = {name: row for name, row in rows.items() if PLANS[name.partition("/")[2]].precision}
    return "\n".join([*totals, "", *kinds, *(("", *_terms(mixed)) if mixed else ())])


def _terms(rows: Mapping[str, Row]) -> list[str]:
    """What there is at the peak in bytes of a parameter, in mixed precision; in brackets what is predicted."""
    lines = [
        "| row, bytes of a parameter | paper | in all | parameter | moments | copies | gradients | shards, the rest |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        wanted, seen, kinds = PLANS[name.partition("/")[2]], row.measured[row.worst], row.by_kind
        whole = kinds["gradients"] if wanted.zero < 2 else 0  # sharded ones are among the blocks of shards
        rest = sum(kinds.values()) - sum(kinds[kind] for kind in ("parameters", "optimizer", "gathered")) - whole
        both = (
            (seen.peak, row.predicted[row.worst]),
            (seen.parameters, kinds["parameters"]),
            (seen.optimizer, kinds["optimizer"]),
            (seen.narrow, kinds["gathered"]),
            (seen.whole - seen.narrow, whole),
            (seen.shards + seen.rest, rest),
        )
        figures = (f"{found / row.num_parameters:.1f} ({predicted / row.num_parameters:.1f})" for found, predicted in both)
        lines.append(f"| {name} | {textbook_bytes(wanted):.1f} | {' | '.join(figures)} |")
    return lines


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f}"


def plot(path: str, rows: Mapping[str, Row]) -> None:
    """What there is at the peak, predicted beside measured; below, blocks as large as whole weights over a step."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    kinds = ("parameters", "optimizer", "gathered", "gradients", "buffers", "activations")
    shades = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#F0E442")  # Okabe and Ito
    colors = dict(zip((*kinds, "whole"), shades, strict=True))
    figure = plt.figure(figsize=(11, 8), layout="constrained")
    spots = figure.subplot_mosaic([["bars", "bars"], ["one", "four"]], height_ratios=[3, 2])
    axes = spots["bars"]
    for i, row in enumerate(rows.values()):
        seen = row.measured[row.worst]
        whole = "gradients" if seen.parameters == row.num_parameters * 4 else "whole"
        amounts = (seen.parameters, seen.optimizer, seen.whole, seen.shards + seen.rest)
        measured = list(zip(("parameters", "optimizer", whole, "activations"), amounts, strict=True))
        predicted = [(kind, row.by_kind[kind]) for kind in kinds]
        for at, parts, hatch in ((i - 0.2, predicted, "//"), (i + 0.2, measured, "")):
            bottom = 0.0
            for kind, num_bytes in parts:
                axes.bar(at, num_bytes / MIB, 0.36, bottom, color=colors[kind], edgecolor="white", hatch=hatch, linewidth=0.5)
                bottom += num_bytes / MIB
        error = row.predicted[row.worst] / seen.peak - 1
        axes.text(i, max(seen.peak, row.predicted[row.worst]) / MIB + 3, f"{error:+.1%}", ha="center", fontsize=8)
    names = {"whole": "copies and whole gradients (measured)", "activations": "activations and the rest", "gathered": "gathered copies"}
    for kind, color in colors.items():
        axes.bar(0, 0, color=color, label=names.get(kind, kind))
    axes.bar(0, 0, color="white", edgecolor="grey", hatch="//", label="left: predicted")
    axes.bar(0, 0, color="white", edgecolor="grey", label="right: measured")
    axes.set_xticks(range(len(rows)), rows, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("peak of a rank, MiB")
    axes.legend(fontsize=8, ncols=2)
    for spot, suffix, title in (("one", "", "one micro-batch"), ("four", "-m4", "four micro-batches")):
        for zero, (color, style) in enumerate(zip(("#000000", "#0072B2", "#E69F00", "#D55E00"), ("-", "--", "-.", "-"), strict=True)):
            row = rows.get(f"weights/zero{zero}{suffix}")
            if row is not None:
                times, _, whole = zip(*row.measured[row.worst].over_time, strict=True)
                spots[spot].step(times, [x / MIB for x in whole], style, where="post", color=color, label=f"ZeRO-{zero}", linewidth=1.2)
        spots[spot].set_title(f"copies and gradients as large as whole weights, {title}", fontsize=9)
        spots[spot].set_xlabel("part of the step")
        spots[spot].set_ylabel("MiB")
        spots[spot].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def record(rows: Mapping[str, Row]) -> None:
    """The table, and all figures of all ranks, in benchmarks/records."""
    today, command = datetime.date.today().isoformat(), f"python {shlex.join(sys.argv)}"
    path = ROOT / "benchmarks" / "records" / f"{today}-zero-memory"
    path.with_suffix(".md").write_text(f"# Memory under ZeRO, {today}\n\n`{command}`\n\n{table(rows)}\n")
    figures = {name: asdict(row) for name, row in rows.items()}
    for rank in (rank for row in figures.values() for rank in row["measured"]):
        del rank["over_time"]
    path.with_suffix(".json").write_text(json.dumps({"command": command, "date": today, "rows": figures}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", metavar="NAME,...", default="*", help="rows to run; * and ? stand for any characters")
    parser.add_argument("--plot", default="", metavar="PATH", help="picture of the rows; needs matplotlib")
    parser.add_argument("--record", action="store_true", help="write table and figures to benchmarks/records")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    rows: dict[str, Row] = {}
    for name in ROWS:
        if any(fnmatch(name, pattern) for pattern in given.only.split(",")):
            print(name, file=sys.stderr)
            rows[name] = run(name)
    print(table(rows))
    if given.record:
        record(rows)
    if given.plot:
        plot(given.plot, rows)


if __name__ == "__main__":
    main()
