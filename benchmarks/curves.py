"""Losses of one small GPT under many plans, and of runs that stop and go on under another: one curve.

    python benchmarks/curves.py [--steps 200] [--plot docs/figures/curves.png] [--record]

Bytes of LICENSE, dropout 0.1, AdamW with a cosine, clipped gradients; float32, bfloat16, and float16 with a GradScaler. Every plan trains
from the same weights in processes of its own; then the run of `BROKEN` is saved at step `SAVED` and goes on under each plan of `RESUMED`.
The table tells how far the losses of each run are from those of one rank in the same precision, in the mean and at most, relative to them:
sums in another order round otherwise, and that grows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar import Manual

ROOT = Path(__file__).parent.parent
PLANS = {
    "one rank": Manual(),
    "dp4": Manual(dp=4),
    "tp4": Manual(tp=4),
    "pp2-tp2": Manual(pp=2, tp=2, microbatches=4),
    "dp4-zero3": Manual(dp=4, zero=3),
    "dp2-zero2": Manual(dp=2, zero=2),
}
SHOWN = ("one rank", "dp4", "tp4", "pp2-tp2", "dp4-zero3")
IN_PRECISION = {"bf16": ("one rank", "dp4-zero3", "pp2-tp2"), "fp16": ("one rank", "pp2-tp2")}
PLANS |= {f"{name} {kind}": replace(PLANS[name], precision=kind) for kind, names in IN_PRECISION.items() for name in names}
BROKEN, SAVED = "pp2-tp2", 20
RESUMED = ("dp4-zero3", "dp2-zero2", "one rank")
ROWS, LENGTH = 16, 64


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Rows that begin anywhere in the text, the same on every rank."""
    text = torch.tensor(list((ROOT / "LICENSE").read_bytes()))
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
    return {"input_ids": rows, "labels": rows}


def build() -> torch.nn.Module:
    """The small GPT, the same on every rank."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=LENGTH, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def work(name: str, first: int, last: int, load: str, save: str, out: str) -> None:
    """One run, on all ranks of ``torchrun``: its losses from step to step."""
    torch.set_num_threads(1)
    plan = PLANS[name]
    ranks = plan.pp * plan.dp * plan.tp
    profile = autopar.Cluster(1, ranks, "cpu").with_mesh(plan.grid(ranks)).profile
    model = autopar.parallelize(build(), ranks, plan=plan, profile=profile, example_batch=batch_of(0))
    model._autopar.seed = 0  # of dropout: else each run draws its own
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=plan.precision == "fp16")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    if load:
        first = autopar.load(load, model, optimizer, extra={"scheduler": scheduler})["step"]
    losses = []
    for step in range(first, last):
        loss = model(**batch_of(step)).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    if save:
        autopar.save(save, model, optimizer, extra={"scheduler": scheduler, "step": last})
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))
    dist.destroy_process_group()


def run(name: str, last: int, *, load: str = "", save: str = "") -> list[float]:
    """The losses of a run in processes of its own."""
    plan = PLANS[name]
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.pp * plan.dp * plan.tp)]
        arguments = ["--work", name, "0", str(last), load, save, out.name]
        done = subprocess.run([*torchrun, __file__, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        losses: list[float] = json.loads(Path(out.name).read_text())
    return losses


def row(name: str, losses: list[float], reference: list[float]) -> str:
    errors = [abs(a / b - 1) for a, b in zip(losses, reference, strict=True)]
    return f"| {name} | {losses[-1]:.4f} | {sum(errors) / len(errors):.1e} | {max(errors):.1e} |"


def plot(path: str, curves: dict[str, list[float]], resumed: dict[str, list[float]]) -> None:
    """All curves over one another; those that go on are drawn as dots from where they begin."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, losses) in enumerate(curves.items()):
        axes.plot(losses, label=name, linewidth=max(1.0, 5 - i), alpha=0.6)
    for name, losses in resumed.items():
        axes.plot(range(SAVED, SAVED + len(losses), 6), losses[::6], ".", markersize=3, label=f"{BROKEN} to {SAVED}, then {name}")
    axes.axvline(SAVED, color="grey", linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", default="", metavar="PATH", help="picture of the curves; needs matplotlib")
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/records")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        name, first, last, load, save, out = given.work
        work(name, int(first), int(last), load, save, out)
        return
    curves: dict[str, list[float]] = {}
    for name in (*SHOWN, *(f"{name} {kind}" for kind, names in IN_PRECISION.items() for name in names)):
        print(f"{name}: {given.steps} steps", file=sys.stderr)
        curves[name] = run(name, given.steps)
    reference = curves["one rank"]
    lines = ["| run | last loss | mean difference | largest |", "|---|--:|--:|--:|"]
    for name, losses in curves.items():
        kind = PLANS[name].precision
        lines.append(row(name, losses, curves[f"one rank {kind}".strip()]))
        if kind and name.startswith("one rank"):
            lines.append(row(f"{name}, from float32", losses, reference))
    resumed: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run(BROKEN, SAVED, save=folder)
        for name in RESUMED:
            print(f"{BROKEN} to step {SAVED}, then {name}", file=sys.stderr)
            resumed[name] = run(name, given.steps, load=folder)
            lines.append(row(f"{BROKEN} to {SAVED}, then {name}", resumed[name], reference[SAVED:]))
    print("\n".join(lines))
    if given.plot:
        plot(given.plot, curves, resumed)
    if given.record:
        text = f"# Loss curves, {datetime.date.today()}\n\n`benchmarks/curves.py --steps {given.steps}`\n\n" + "\n".join(lines) + "\n"
        (ROOT / "benchmarks" / "records" / f"{datetime.date.today()}-curves.md").write_text(text)


if __name__ == "__main__":
    main()
