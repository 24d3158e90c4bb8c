"""A rank that dies or stands still in the middle of a step: the others end with an error that names it and the action, and do not hang.

Processes of their own: the pool's would be of no more use.
"""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.step import StageRun
from tests.marks import few
from tests.pool import clean_context

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(rank: int, store: str, answers: Connection, plan: Manual, victim: int, sign: int, timeout_s: float) -> None:
    """One good step, and one in which the victim goes at its second forward; what the others see, and after how long."""
    torch.set_num_threads(1)
    size = plan.pp * plan.dp * plan.tp
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    torch.manual_seed(0)
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(plan.grid(size).sizes)
    model, x = autopar.parallelize(Chain(), size, plan=plan, profile=MachineProfile(DEVICE, links)), torch.randn(8, 16)
    model(x).backward()
    forward = StageRun.forward

    def last_forward(self: StageRun[torch.Tensor], microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        if microbatch == 1:
            os.kill(os.getpid(), sign)
        return forward(self, microbatch, received)

    if rank == victim:
        StageRun.forward = last_forward  # type: ignore[method-assign, assignment]
    started_s = time.monotonic()
    try:
        model(x).backward()
        answers.send(("nothing", "", 0.0))
    except Exception as error:
        answers.send((type(error).__name__, str(error), time.monotonic() - started_s))
    os._exit(1)


CASES = {
    "killed in a pipeline": (Manual(pp=3, microbatches=4), 1, signal.SIGKILL, 30.0),
    "killed inside of a stage": (Manual(dp=2, zero=3, microbatches=4), 1, signal.SIGKILL, 30.0),
    "stopped in a pipeline": (Manual(pp=2, microbatches=4), 1, signal.SIGSTOP, 4.0),
}


@pytest.mark.parametrize("case", few(2, CASES))
def test_the_others_end_with_an_error(case: str, tmp_path: Path) -> None:
    plan, victim, sign, timeout_s = CASES[case]
    context = clean_context()
    workers, pipes = [], {}
    for rank in range(plan.pp * plan.dp * plan.tp):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, str(tmp_path / "store"), theirs, plan, victim, int(sign), timeout_s)
        workers.append(context.Process(target=train, args=arguments, daemon=True))
        workers[-1].start()
        theirs.close()
        pipes[ours] = rank
    found: dict[int, tuple[str, str, float]] = {}
    deadline = time.monotonic() + 120
    try:
        while len(found) < len(workers) - 1 and time.monotonic() < deadline:
            for pipe in wait([p for p, rank in pipes.items() if rank not in found and rank != victim], timeout=1):
                assert isinstance(pipe, Connection)
                found[pipes[pipe]] = pipe.recv()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    assert sorted(found) == [rank for rank in range(len(workers)) if rank != victim]
    for rank, (kind, text, seconds) in found.items():
        assert kind == "RankError", text
        assert re.match(rf"rank {rank}, action \d\w+ of the schedule \(stage \d, on ranks \[[\d, ]+\]\): ", text), text
        if plan.pp > 1:
            assert f"rank {victim} did not answer" in text
        else:
            assert "on ranks [0, 1]): one of them did not answer" in text
        assert seconds < timeout_s + 5
