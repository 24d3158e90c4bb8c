"""Plans on ranks of NCCL that share one GPU: losses of three AdamW steps against those of one device.

    python benchmarks/one_gpu.py [--ranks 4] [--only 'PP*;auto']

NCCL refuses two ranks on one device, unless each says that it is a host of its own (``NCCL_HOSTID``): then they talk over loopback, by the
code of a real network. They take turns on the device, some ms each, so that times mean nothing; prices are those of a described H100. Since
kernels of one rank wait there beside those of another, NCCL connects all at once (``NCCL_RUNTIME_CONNECT=0``). Without CUDA ranks are of
gloo. Exits 1 if losses differ by more than rounding, and where a plan takes longer than a minute, with what every rank is at.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from equality import train
from toys import batches, build

import autopar
from autopar.planner.request import grids_of

STEPS, LIMIT_S = 3, 60
EXACT, ROUNDED = 1e-5, 1e-3
"""The largest relative difference of a loss, where all is in float32 and where something is rounded."""
NOT_CLIPPED = 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration, None for the automatic plan, and what else `parallelize` is told; whether gradients are clipped."""

    config: autopar.Manual | None
    settings: Mapping[str, str] = field(default_factory=dict)
    clips: bool = False

    @property
    def tolerance(self) -> float:
        return ROUNDED if {"precision", "compress"} & set(self.settings) else EXACT


def cases(ranks: int) -> dict[str, Case]:
    """By name."""
    half = ranks // 2
    lines = {schedule: autopar.Manual(pp=2, dp=half, schedule=schedule, microbatches=4) for schedule in ("1f1b", "interleaved:2", "zb-h1")}
    deep, zero3 = autopar.Manual(pp=ranks, schedule="1f1b", microbatches=4), autopar.Manual(dp=ranks, zero=3)
    found = {
        "auto": Case(None),
        "DP": Case(autopar.Manual(dp=ranks)),
        "TP": Case(autopar.Manual(tp=ranks)),
        "CP": Case(autopar.Manual(cp=ranks)),
        "ZeRO-1": Case(autopar.Manual(dp=ranks, zero=1)),
        "ZeRO-2": Case(autopar.Manual(dp=ranks, zero=2)),
        "ZeRO-3": Case(zero3),
        "ZeRO-3, clipped": Case(zero3, clips=True),
        "ZeRO-3, recomputed": Case(autopar.Manual(dp=ranks, zero=3, recompute="full")),
        "PP, GPipe": Case(autopar.Manual(pp=ranks, schedule="gpipe", microbatches=4)),
        "PP, 1F1B": Case(deep),
        "PP, 1F1B, clipped": Case(deep, clips=True),
        "PP, 1F1B, bf16": Case(deep, {"precision": "bf16"}),
        **{f"PP 2, {schedule}": Case(config) for schedule, config in lines.items()},
        "ZeRO-1, offloaded": Case(autopar.Manual(dp=ranks, zero=1), {"offload": "optimizer"}),
        "DP, bf16": Case(autopar.Manual(dp=ranks), {"precision": "bf16"}),
        "DP, int8": Case(autopar.Manual(dp=ranks), {"compress": "int8"}),
    }
    if half > 1:
        found |= {
            "DP 2 x TP, ZeRO-1": Case(autopar.Manual(dp=2, tp=half, zero=1)),
            "PP 2 x TP": Case(autopar.Manual(pp=2, tp=half, schedule="1f1b", microbatches=4)),
        }
    return found


def run_case(case: Case, ranks: int, device: str) -> list[float]:
    """Losses by a plan."""
    grid = grids_of(ranks, case.config, num_ranks=ranks)[0]
    profile = autopar.Cluster(1, ranks, "h100").with_mesh(grid).profile
    model = autopar.parallelize(
        build("gpt2", torch.float32).to(device), ranks, plan=case.config, profile=profile, **dict(case.settings)
    )
    return losses_of(model, device, clips=case.clips)


def losses_of(model: torch.nn.Module, device: str, *, clips: bool = False) -> list[float]:
    given = [{name: x.to(device) for name, x in batch.items()} for batch in batches("gpt2", torch.float32, size=8)]
    return train(model, given[:STEPS], clip_norm=NOT_CLIPPED if clips else None)


def run_rank(rank: int, ranks: int, store: str, names: list[str]) -> None:
    """All cases, on a rank that has a host of its own."""
    warnings.simplefilter("ignore")
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_RUNTIME_CONNECT": "0"}
    device, backend = ("cuda", "cpu:gloo,cuda:nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    torch.set_num_threads(1)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S))
    reference, agree = losses_of(build("gpt2", torch.float32).to(device), device), True
    for name in names:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        case = cases(ranks)[name]
        difference = max(abs(a - b) / b for a, b in zip(run_case(case, ranks, device), reference, strict=True))
        faulthandler.cancel_dump_traceback_later()
        agree &= difference <= case.tolerance
        if rank == 0:
            print(f"{name:<20} {difference:.1e}{'' if difference <= case.tolerance else '  DIFFERS'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if not agree:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--only", default="*", metavar="NAME;...", help="cases to run; * and ? stand for any characters")
    arguments = parser.parse_args()
    names = [name for name in cases(arguments.ranks) if any(fnmatch(name, pattern) for pattern in arguments.only.split(";"))]
    if not names:
        sys.exit(f"--only: no case is called {arguments.only}; cases are {'; '.join(cases(arguments.ranks))}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (arguments.ranks, f"{folder}/store", names), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
