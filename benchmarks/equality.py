"""Same numbers: 5 AdamW steps on 4 ranks, by automatic plans and hand-written ones, against one device.

    torchrun --nproc-per-node 4 benchmarks/equality.py [--model gpt2] [--model llama]
    torchrun --nproc-per-node 4 benchmarks/equality.py --pipelines [--model gpt2 ...] [--microbatches 4 ...]

Automatic plans (one that may have stages, one without, one with less memory) and hand-written ones, for each: the largest relative
difference of the losses to plain torch on one device in float32; the largest parameter error after 5 steps against plain torch in float64,
over that of plain torch in float32; the same difference when both run in float64; and the share of all weights that rank 0 stores. The last
lines list what a rank stores under TP4 and ZeRO-3.

Pipelines, on five models with labels that differ in number by row: the first two of these figures for every schedule and number of
micro-batches; a plan of two ranks runs twice, side by side, with half of the batch each. Exits 1 if a loss differs by more than 1e-5, or
if ranks differ.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from toys import STEPS, batches, build

import autopar

MAX_LOSS_DIFFERENCE = 1e-5
Say = Callable[[str], None]


def train(model: nn.Module, given: Iterable[dict[str, torch.Tensor]], clip_norm: float | None = None) -> list[float]:
    """The loop of a single-device script; ``clip_norm`` is that of gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in given:
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        if clip_norm is not None:
            model.clip_grad_norm_(clip_norm)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that this rank has a part of."""
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((tensor.double() - theirs[name].double()).abs().max()) for name, tensor in ours.items())


TIGHT = 0.75
"""Memory limit of the third automatic plan, as a part of the peak of the second."""


def configurations() -> dict[str, object]:
    return {
        "auto": None,
        "auto, grid": None,
        "auto, tight": None,
        "DP4": autopar.Manual(dp=4),
        "TP4": autopar.Manual(tp=4),
        "DP2xTP2": autopar.Manual(dp=2, tp=2),
        "ZeRO-1": autopar.Manual(dp=4, zero=1),
        "ZeRO-2": autopar.Manual(dp=4, zero=2),
        "ZeRO-3": autopar.Manual(dp=4, zero=3),
    }


def run_grids(model_name: str, say: Say) -> bool:
    """All configurations of one model; whether all losses agree."""
    references = {dtype: build(model_name, dtype) for dtype in (torch.float32, torch.float64)}
    losses = {dtype: train(reference, batches(model_name, dtype, size=8)) for dtype, reference in references.items()}
    exact = whole(references[torch.float64])
    plain_error = difference(whole(references[torch.float32]), exact)
    num_weights = sum(p.numel() for p in references[torch.float32].parameters())
    say(f"{model_name}: one device, losses {', '.join(f'{loss:.6f}' for loss in losses[torch.float32])}")
    say(f"  plain torch in float32 after {STEPS} steps: parameter error {plain_error:.1e} against float64")
    say(f"  {'plan':<14}{'mesh':<14}{'loss diff':>11}{'param error':>13}{'x plain':>9}{'in float64':>12}{'stored':>8}{'predicted':>11}")
    agree = True
    peaks: dict[torch.dtype, float] = {}
    for name, config in configurations().items():
        found = {}
        for dtype in (torch.float32, torch.float64):
            limit = TIGHT * peaks[dtype] if name == "auto, tight" else None
            model = autopar.parallelize(build(model_name, dtype), 4, plan=config, memory_limit=limit, pipeline=name == "auto")
            own = train(model, batches(model_name, dtype, size=8))
            peaks[dtype] = max(model.plan.prediction.peak_memory_bytes)
            found[dtype] = (max(abs(a - b) / b for a, b in zip(own, losses[dtype], strict=True)), difference(whole(model), exact))
            if dtype is torch.float32:
                stored = sum(p.to_local().numel() for p in model.parameters())
                plan, shapes = model.plan, {n: (tuple(p.shape), tuple(p.to_local().shape)) for n, p in model.named_parameters()}
        loss, error = found[torch.float32]
        agree &= loss <= MAX_LOSS_DIFFERENCE
        peak = f"{max(plan.prediction.peak_memory_bytes) / 2**20:.1f} MiB"
        ratio, exactly = error / plain_error, found[torch.float64][1]
        say(f"  {name:<14}{plan.grid!s:<14}{loss:>11.1e}{error:>13.1e}{ratio:>9.2f}{exactly:>12.1e}{stored / num_weights:>8.1%}{peak:>11}")
        if name in ("TP4", "ZeRO-3"):
            for parameter, (shape, local) in shapes.items():
                if ".0." in parameter or (name == "ZeRO-3" and "wte" in parameter):
                    say(f"      {parameter:<44}{shape!s:>14} -> {local!s:<14}")
    return agree


TWICE = {"pp": 2, "dp": 2}
PIPELINES = {
    "gpt2": {"PP2 x TP2": {"pp": 2, "tp": 2}, "PP4": {"pp": 4}, "PP2 x DP2, ZeRO-1": {"pp": 2, "dp": 2, "zero": 1}},
    "llama": {"PP2": TWICE},
    "t5": {"PP2": TWICE},
    "nn.Transformer": {"PP2": TWICE},
    "U-Net": {"PP2": TWICE},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1")


def run_pipelines(names: Iterable[str], counts: list[int], say: Say) -> bool:
    """Every schedule with so many micro-batches; whether all losses agree, and all ranks."""
    started_s, agree = time.perf_counter(), True
    heads = "".join(f"{f'loss, {count}':>11}{'x plain':>9}" for count in counts)
    say(f"{'model':<16}{'plan':<19}{'schedule':<15}{'stages':>6}{heads}")
    for name in names:
        references = {dtype: build(name, dtype) for dtype in (torch.float32, torch.float64)}
        losses = {dtype: train(own, batches(name, dtype, size=16, ragged=True)) for dtype, own in references.items()}
        exact = whole(references[torch.float64])
        plain_error = difference(whole(references[torch.float32]), exact)
        for plan, degrees in PIPELINES[name].items():
            for schedule in SCHEDULES:
                cells = []
                for count in counts:
                    config = autopar.Manual(**degrees, schedule=schedule, microbatches=count)
                    model = autopar.parallelize(build(name, torch.float32), 4, plan=config)
                    own = train(model, batches(name, torch.float32, size=16, ragged=True))
                    loss = max(abs(a - b) / b for a, b in zip(own, losses[torch.float32], strict=True))
                    mine = torch.tensor([difference(whole(model), exact), *own, *(-loss for loss in own)], dtype=torch.float64)
                    dist.all_reduce(mine, dist.ReduceOp.MAX)
                    error, ranks_agree = float(mine[0]), torch.equal(mine[1 : STEPS + 1], -mine[STEPS + 1 :])
                    agree &= loss <= MAX_LOSS_DIFFERENCE and ranks_agree
                    cells.append(f"{loss:>11.1e}{error / plain_error:>9.2f}" + ("" if ranks_agree else " RANKS DIFFER"))
                say(f"{name:<16}{plan:<19}{schedule:<15}{model.plan.pipeline.stages:>6}{''.join(cells)}")
    say(f"plain torch in float32 on one device counts 1; {time.perf_counter() - started_s:.0f} s")
    return agree


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PIPELINES, action="append", help="default: all")
    parser.add_argument("--pipelines", action="store_true")
    parser.add_argument("--microbatches", type=int, action="append", help="default: 1, 4 and 8")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    if arguments.pipelines:
        verdicts = [run_pipelines(arguments.model or PIPELINES, arguments.microbatches or [1, 4, 8], say)]
    else:
        verdicts = [run_grids(name, say) for name in arguments.model or ("gpt2", "llama")]
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
