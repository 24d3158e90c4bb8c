"""Plan and train a small GPT-2 on four processes of this machine, and hold the result against one device and hand-written plans.

    autopar demo

1. This machine is measured (once; the result is cached), so that plans have prices.
2. `train` below is the whole loop; it knows nothing of autopar. It trains on one device, and, after `autopar.parallelize`, on four
   processes by the automatic plan and by each hand-written configuration.
3. Losses side by side (exit code 1 if they differ by more than rounding), then predicted beside measured figures.

The report, the plan as JSON and the page that it is looked at on go to out/demo/, or where --out says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel, logging

import autopar
from autopar.cost.measure import measure
from autopar.demo.local import RANKS, Progress, mebibytes, stored_bytes

BATCH, SEQUENCE, VOCABULARY = 8, 64, 1000
COMPARED_STEPS, WARM_UP_STEPS, TIMED_STEPS = 5, 2, 9
TOLERANCE = 1e-5
"""Relative difference of losses that passes for rounding: sums are taken in another order."""

CONFIGS = {
    "automatic": None,
    "dp=4": autopar.Manual(dp=4),
    "tp=4": autopar.Manual(tp=4),
    "dp=2 tp=2 zero=1": autopar.Manual(dp=2, tp=2, zero=1),
}


# The single-device script


def build_model() -> GPT2LMHeadModel:
    """The same weights at every call; no dropout, so that losses can be compared."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=192, n_head=6, vocab_size=VOCABULARY, n_positions=SEQUENCE,
        bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Global batches without end, the same on every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator, device="cpu")
        yield {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """The training loop; yields the loss of each step."""
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


# What the demo does with it


@dataclass
class Run:
    """One model in training, with what was seen of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: Iterator[float]
    plan: autopar.Plan | None = None
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, plan: autopar.Plan | None = None) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return Run(model, optimizer, train(model, optimizer), plan)

    def step(self) -> None:
        started = time.perf_counter()
        self.losses.append(next(self.steps))
        self.times_s.append(time.perf_counter() - started)

    def step_time_s(self) -> float:
        return statistics.median(self.times_s[-TIMED_STEPS:])


def losses_table(reference: Run, runs: dict[str, Run]) -> Table:
    table = Table("step", title=f"Losses: one device, and the same loop on {RANKS} processes", title_justify="left")
    for name in ("one device", *runs):
        table.add_column(name, justify="right")
    for step in range(COMPARED_STEPS):
        table.add_row(str(step), *(f"{run.losses[step]:.7f}" for run in (reference, *runs.values())))
    errors = (f"{loss_error(reference, run):.0e}" for run in runs.values())
    table.add_section()
    table.add_row("", "relative error", *errors)
    return table


def loss_error(reference: Run, run: Run) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(reference.losses[:COMPARED_STEPS], run.losses[:COMPARED_STEPS], strict=True)
    return max(abs(loss - right) / abs(right) for right, loss in pairs)


def figures_data(reference: Run, runs: dict[str, Run]) -> dict[str, object]:
    """What the tables show, in bytes and seconds."""
    rows = []
    for name, run in runs.items():
        plan = run.plan
        assert plan is not None
        rows.append(
            {
                "plan": name,
                "grid": str(plan.grid),
                "predicted_step_time_s": plan.prediction.step_time_s,
                "measured_step_time_s": run.step_time_s(),
                "predicted_stored_bytes": plan.prediction.memory_bytes["parameters"] + plan.prediction.memory_bytes["optimizer"],
                "stored_bytes": stored_bytes(run.model, run.optimizer),
                "predicted_peak_memory_bytes": max(plan.prediction.peak_memory_bytes),
                "moved_bytes": sum(collective.num_bytes * collective.count for collective in plan.collectives),
                "losses": run.losses[:COMPARED_STEPS],
                "loss_error": loss_error(reference, run),
            }
        )
    alone = {"measured_step_time_s": reference.step_time_s(), "stored_bytes": stored_bytes(reference.model, reference.optimizer)}
    return {"ranks": RANKS, "one_device": {**alone, "losses": reference.losses[:COMPARED_STEPS]}, "plans": rows, "tolerance": TOLERANCE}


def figures_table(reference: Run, runs: dict[str, Run]) -> Table:
    title = "Step time in ms; MiB of a process: stored, at the peak, and moved by collectives in a step"
    table = Table("plan", "mesh", title=title, title_justify="left")
    for name in ("step\npredicted", "\nmeasured", "stored\npredicted", "\nmeasured", "peak\npredicted", "moved\npredicted"):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        plan = run.plan
        assert plan is not None
        memory = plan.prediction.memory_bytes
        moved = sum(collective.num_bytes * collective.count for collective in plan.collectives)
        table.add_row(
            name,
            str(plan.grid),
            _milliseconds(plan.prediction.step_time_s),
            _milliseconds(run.step_time_s()),
            mebibytes(memory["parameters"] + memory["optimizer"]),
            mebibytes(stored_bytes(run.model, run.optimizer)),
            mebibytes(max(plan.prediction.peak_memory_bytes)),
            mebibytes(moved),
        )
    table.add_section()
    stored = mebibytes(stored_bytes(reference.model, reference.optimizer))
    table.add_row("one device", "-", "-", _milliseconds(reference.step_time_s()), "-", stored, "-", "-")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def main(arguments: Sequence[str]) -> int:
    """On each of the processes; the exit code."""
    parser = argparse.ArgumentParser(prog="autopar demo")
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # transformers' own
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)  # it warns that the gradient norm is summed axis by axis
    progress = Progress()

    progress.phase("measuring this machine, or reading what was measured before")
    whole = autopar.Mesh.of(RANKS)
    measured = measure(init_device_mesh("cpu", whole.sizes, mesh_dim_names=whole.names), report=progress.detail)
    machine = autopar.Cluster.from_mesh(whole, measured)

    reference = Run.of(build_model())
    runs = {}
    for name, config in CONFIGS.items():
        progress.phase(f"planning {name}")
        model = autopar.parallelize(
            build_model(),
            RANKS,  # the planner may make a grid of them
            example_batch=next(batches()),  # without it, the plan would be made at the first call
            plan=config,  # None: the solver decides
            profile=machine.with_mesh(config.grid(RANKS) if config else whole).profile,  # same prices for all; by default measured
            report=progress.detail,
        )
        runs[name] = Run.of(model, model.plan)

    progress.phase(f"training on one device and by {len(runs)} plans in turns, {WARM_UP_STEPS} + {TIMED_STEPS} steps each")
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        if first:
            reference.step()
        for run in runs.values():
            dist.barrier()
            run.step()

    code = 0
    if first:
        code = int(not report(reference, runs, asked.out, as_json=asked.json))
        progress.phase(f"done; wrote report.txt, plan.json (autopar show reads it) and plan.html (look at it) in {asked.out}")
    verdict = [code]
    dist.broadcast_object_list(verdict)
    dist.barrier()
    dist.destroy_process_group()
    return verdict[0]


def report(reference: Run, runs: dict[str, Run], out: Path, *, as_json: bool) -> bool:
    """Print what was found, and write it with the plan; whether all losses are those of one device."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=120, highlight=False, file=nowhere if as_json else None)
        plan = runs["automatic"].plan
        assert plan is not None
        console.print(str(plan), markup=False)
        console.print()
        console.print(losses_table(reference, runs))
        console.print(figures_table(reference, runs))
        wrong = [name for name, run in runs.items() if not loss_error(reference, run) <= TOLERANCE]
        if wrong:
            console.print(f"FAILED: losses of {', '.join(wrong)} differ from one device by more than {TOLERANCE:g} relative")
        else:
            console.print(f"Losses of all plans equal those of one device within {TOLERANCE:g} relative.")
        cores = os.cpu_count() or 1
        if cores < RANKS:
            console.print(f"{RANKS} processes share {cores} cores here: no plan can be {RANKS} times as fast as one device.")
    out.mkdir(parents=True, exist_ok=True)
    plan.save(out / "plan.json")
    plan.to_html(out / "plan.html")
    (out / "report.txt").write_text(console.export_text())
    if as_json:
        print(json.dumps(figures_data(reference, runs), indent=1))
    return not wrong
