"""Four real processes that serve a whole test session: gloo is set up once, every test that needs ranks reuses them.

In: a top-level function ``fn(rank, *args)``. Out: the list of what it returned, by rank. An exception on a rank, a rank
that dies and a rank that does not answer in time are ``RankError``s that name the rank; after one, the processes are
replaced on next use, because a collective that some ranks entered and others did not leaves the group useless.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from tests import captures

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

GROUP_TIMEOUT_S = 60.0
"""A collective that waits longer than this fails in gloo, with gloo's words."""
DIED = "died, exit code"
GRACE_S = 2.0
"""How long the other ranks may go on after the first failure, before they are ended."""
IMPORTED = (
    "autopar.parallel",
    "autopar.show",
    "autopar.verify",
    "numpy.f2py",
    "ortools.math_opt.python.mathopt",
    "pytest",
    "sympy.tensor.tensor",
    "tests.models",
    "torch._inductor.compiler_bisector",
    "torch.distributed.checkpoint",
    "torch.export._trace",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
"""What each process of a test would otherwise import for itself, which takes it seconds."""


class RankError(RuntimeError):
    """A rank of the pool failed; ``rank`` is the first that did, the text is its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank = rank


def _serve(rank: int, size: int, store: str, jobs: Connection) -> None:
    """The life of a worker: join the group, then one job after the other until the session closes the pipe."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.enable()
    gc.freeze()
    torch.set_num_threads(1)
    captures.share()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    while True:
        try:
            job = jobs.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = pickle.loads(job)
            torch.manual_seed(0)
            answer = pickle.dumps((True, fn(rank, *args)))
        except BaseException:
            answer = pickle.dumps((False, "failed:\n" + traceback.format_exc()))
        jobs.send_bytes(answer)


def clean_context() -> ForkServerContext:
    """Starts processes that have imported what tests need, and run nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


class RankPool:
    """``size`` processes in one gloo group, started at first use."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._context = clean_context()
        self._workers: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(self, fn: Callable[[int, *Ts], T], *args: *Ts, timeout: float = 120.0) -> list[T]:
        """Call ``fn(rank, *args)`` on every rank, each with the same seed; return the results by rank.

        ``fn`` is a top-level function of an importable module; arguments and results travel by value, pickled.
        """
        job = pickle.dumps((fn, args))
        if not self._workers:
            self._start()
        try:
            for pipe in self._pipes:
                with suppress(BrokenPipeError):  # a dead rank is named below
                    pipe.send_bytes(job)
            return self._collect(timeout)
        except BaseException:  # an interrupt too: answers of this job must not be taken for those of the next
            self.close()
            raise

    def close(self) -> None:
        """End the processes. The next ``run`` starts new ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="autopar-ranks-")
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            store = str(Path(self._folder, "store"))
            worker = self._context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            worker.start()
            theirs.close()  # so that a worker that dies closes its pipe
            self._workers.append(worker)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> list[T]:
        results: dict[int, T] = {}
        failures: dict[int, str] = {}  # in order of arrival: the first is the cause, the others mostly its echoes
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in self._pipes:
                if pipe not in ready:
                    continue
                rank = waiting.pop(pipe)
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._workers[rank].join(GRACE_S)
                    good, answer = False, f"{DIED} {self._workers[rank].exitcode}"
                if good:
                    results[rank] = answer
                else:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            died = [rank for rank, text in failures.items() if text.startswith(DIED)]  # others may notice it before we do
            first = next(iter(died or failures))
            others = sorted({*failures, *waiting.values()} - {first})
            echo = f"\n(failed as well, or unfinished: ranks {others})" if others else ""
            raise RankError(first, failures[first] + echo)
        if waiting:
            silent = sorted(waiting.values())
            raise RankError(silent[0], f"did not answer in {timeout:g} s; silent ranks: {silent}")
        return [results[rank] for rank in range(self.size)]
