"""Losses of one small GPT on four ranks with gradients that travel compressed, and the bytes that then travel.

    python benchmarks/compression.py [--steps 200] [--plot docs/figures/compression.png] [--record]

The task is that of `benchmarks/curves.py`: bytes of LICENSE, dropout 0.1, AdamW with a cosine, clipped gradients, float32; every run begins
with the same weights and has the same batches and masks. Bytes are what one step hands to collectives (``torch.ops._c10d_functional``),
seen by a dispatch mode on rank 0, counted as what a rank sends by a ring (all-to-all: pairwise); beside them stand those of the plan.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from curves import ROOT, batch_of, build
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Manual
from autopar.compression import Compression, Message

RANKS = 4
KINDS = (
    "",
    "bf16",
    "fp16",
    "int8",
    "topk:0.15",
    "topk:0.05",
    "topk:0.15 after 50",
    "topk:0.05 after 50",
    "powersgd:16",
    "powersgd:4",
    "powersgd:4 after 50",
)
LAST = 10
"""Steps whose mean loss is shown."""


@dataclass(frozen=True)
class Run:
    """Losses by step, and bytes that a rank sends in one that compresses: measured, and in the plan. ``counts`` are collectives by kind."""

    losses: list[float]
    measured_bytes: float
    planned_bytes: float
    counts: dict[str, int]


class Watch(TorchDispatchMode):
    """Notes what is handed to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in func._opname:
            given = args[0] if isinstance(args[0], list) else [args[0]]
            num_bytes = sum(x.numel() * x.element_size() for x in given)
            kind = next(kind for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") if func._opname.startswith(kind))
            self.messages.append(Message(kind, num_bytes * (RANKS if kind == "all_gather" else 1)))
        return result


def work(compress: str, steps: int, out: str) -> None:
    """One run, on all ranks of ``torchrun``."""
    torch.set_num_threads(1)
    plan = Manual(dp=RANKS)
    profile = autopar.Cluster(1, RANKS, "cpu").with_mesh(plan.grid(RANKS)).profile
    model: Any = autopar.parallelize(
        build(), RANKS, plan=plan, profile=profile, example_batch=batch_of(0), compress=compress, outputs="loss"
    )
    model._autopar.seed = 0  # of dropout: else each run draws its own
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    losses, watch = [], Watch()
    for step in range(steps):
        if step == steps - 1:
            with watch:
                loss = model(**batch_of(step)).loss
                loss.backward()
        else:
            loss = model(**batch_of(step)).loss
            loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        planned = sum(c.count * Message(c.kind, c.num_bytes).sent_bytes(RANKS) for c in model.plan.collectives)
        counts = {kind: sum(m.kind == kind for m in watch.messages) for kind in sorted({m.kind for m in watch.messages})}
        run = Run(losses, sum(message.sent_bytes(RANKS) for message in watch.messages), planned, counts)
        Path(out).write_text(json.dumps(asdict(run)))
    dist.destroy_process_group()


def start(compress: str, steps: int) -> Run:
    """A run in processes of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        arguments = ["--work", compress, str(steps), out.name]
        done = subprocess.run([*torchrun, __file__, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{compress or 'none'} failed:\n{done.stderr}")
        return Run(**json.loads(Path(out.name).read_text()))


def row(compress: str, run: Run, exact: Run) -> str:
    last, far = (sum(r.losses[-LAST:]) / LAST for r in (run, exact))
    counts = ", ".join(f"{count} {kind}" for kind, count in run.counts.items())
    kib = f"{run.measured_bytes / 2**10:.1f} KiB | {run.planned_bytes / 2**10:.1f} KiB"
    return f"| {compress or 'none'} | {last:.4f} | {last - far:+.4f} | {kib} | {exact.measured_bytes / run.measured_bytes:.1f} | {counts} |"


def plot(path: str, runs: dict[str, Run]) -> None:
    """Losses by step, and by bytes sent."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for compress, run in runs.items():
        left.plot(run.losses, label=compress or "none", linewidth=1.2)
        how = Compression.of(compress)
        late = how.after if how is not None else 0
        sent = accumulate(runs[""].measured_bytes if step < late else run.measured_bytes for step in range(len(run.losses)))
        right.plot([num_bytes / 2**20 for num_bytes in sent], run.losses, linewidth=1.2)
    left.set_xlabel("step")
    left.set_ylabel("loss, nats a byte")
    left.legend(fontsize=8)
    right.set_xlabel("MiB that a rank has sent")
    right.set_xscale("log")
    figure.savefig(path, dpi=130)


def coding() -> None:
    """What coding and decoding take, in bytes an element that ``x + 1`` moves in the time (`autopar.compression.TOUCHED`)."""
    torch.set_num_threads(1)
    ops, x, count = torch.ops.autopar, torch.randn(2048, 2048), 2**20

    def topk() -> None:
        sent, whole = ops.take_largest(x, count // 25, "topk")
        ops.put_largest(torch.cat([sent] * RANKS), sent, whole, x.shape, x.dtype, "topk")

    def powersgd() -> None:
        matrix, projected = ops.project(x, 4, "powersgd")
        basis, back = ops.project_back(matrix, projected, x.shape, "powersgd")
        ops.expand(basis, back, x.shape, x.dtype, "powersgd")

    def scattered() -> torch.Tensor:
        return ops.sum_quantized(ops.quantize(x, RANKS), RANKS, count, x.dtype)

    timed = {
        "bf16": lambda: ops.widen(ops.narrow(x, torch.bfloat16, 1.0), x.dtype, 1.0),
        "fp16": lambda: ops.widen(ops.narrow(x, torch.float16, 1 / RANKS), x.dtype, RANKS),
        "int8, scattered": scattered,
        "int8": lambda: ops.dequantize(torch.cat([ops.quantize(scattered(), 1)] * RANKS), RANKS, x.shape, x.dtype),
        "topk:0.01": topk,
        "powersgd:4": powersgd,
    }

    def least_s(run: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return min(times)

    stream_s = least_s(lambda: x + 1) / 8
    for name, run in timed.items():
        print(f"{name}: {least_s(run) / stream_s:.0f} bytes an element")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", default="", metavar="PATH", help="picture of the curves; needs matplotlib")
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/records")
    parser.add_argument("--coding", action="store_true", help="time coding and decoding on this machine instead")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.coding:
        coding()
        return
    if given.work:
        compress, steps, out = given.work
        work(compress, int(steps), out)
        return
    runs: dict[str, Run] = {}
    for compress in KINDS:
        print(f"{compress or 'none'}: {given.steps} steps", file=sys.stderr)
        runs[compress] = start(compress, given.steps)
    head = f"| compress | loss, last {LAST} steps | from exact | a rank sends in a step | in the plan | times less | collectives |"
    lines = [head, "|---|--:|--:|--:|--:|--:|---|", *(row(compress, run, runs[""]) for compress, run in runs.items())]
    print("\n".join(lines))
    if given.plot:
        plot(given.plot, runs)
    if given.record:
        today = datetime.date.today()
        text = f"# Compressed gradients, {today}\n\n`benchmarks/compression.py --steps {given.steps}`\n\n" + "\n".join(lines) + "\n"
        (ROOT / "benchmarks" / "records" / f"{today}-compression.md").write_text(text)


if __name__ == "__main__":
    main()
