"""What the demo and examples share that start their own processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError

RANKS = 4
"""Processes of the demo."""


def check_installed() -> None:
    """Raise `InputError` if the demo lacks a package."""
    if find_spec("transformers") is None:
        raise InputError("the demo needs transformers, which is not installed: pip install 'autopar[examples]'")


def start(file: str, ranks: int, arguments: Sequence[str] = ()) -> int:
    """Run an example on so many processes, as a user would by hand: torchrun --nproc-per-node 2 examples/sst2_lab.py"""
    return _torchrun(ranks, [file, *arguments])


def start_module(module: str, ranks: int, arguments: Sequence[str] = ()) -> int:
    """Run a module of the package on so many processes: torchrun --nproc-per-node 4 -m autopar.demo"""
    return _torchrun(ranks, ["-m", module, *arguments])


def _torchrun(ranks: int, arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode


def is_started() -> bool:
    """Whether this process is one of those."""
    return "RANK" in os.environ


class Progress:
    """Phases with the time since the start, on stderr of the first process; between them what autopar reports, at most one line in 5 s."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, quiet=dist.get_rank() != 0, highlight=False, markup=False)
        self.started = self.said = time.perf_counter()

    def phase(self, text: str) -> None:
        self.said = time.perf_counter()
        self.console.print(f"[{self.said - self.started:5.1f} s] {text}", style="bold", soft_wrap=True)

    def detail(self, text: str) -> None:
        if time.perf_counter() - self.said > 5:
            self.said = time.perf_counter()
            self.console.print(f"[{self.said - self.started:5.1f} s]   {text}", style="dim", soft_wrap=True)


def stored_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters and optimizer state, as this process holds them between steps."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(_local(value).nbytes for value in (*model.parameters(), *states) if isinstance(value, torch.Tensor))


def gradient_bytes(model: nn.Module) -> int:
    """Gradients, as this process holds them between the backward and the optimizer's step."""
    return sum(_local(p.grad).nbytes for p in model.parameters() if p.grad is not None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f}"
