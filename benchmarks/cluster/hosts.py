"""Hosts on one machine: network namespaces on a bridge, each sending at a limited rate, and processes in them.

The namespaces have no names. They live as long as an open descriptor or a process in them, so the kernel takes them away when this
process ends, however it ends. Linux, root and iproute2 (``ip``, ``tc``) are needed.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch.distributed as dist

Report = Callable[[str], None]

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
PORT = 29555
BURST = "64kb"
"""What a host that has paused sends at once, faster than its rate: one segment of TCP. With ``512kb``, all-gathers of 512 KiB took 11 ms
one after the other and 1.2 ms after a pause of 60 ms, which no link that carries 400 Mbit/s does."""
GRACE_S = 3.0
"""How long the other ranks may go on once one has failed, so that their errors are heard too."""


class RowError(RuntimeError):
    """Processes that failed, or did not end in time."""


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(
            ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}; root is needed for network namespaces"
        )


def _enter(namespace: int) -> None:
    _check(_libc.setns(namespace, _CLONE_NEWNET), "setns")


def _keep_memory() -> None:
    """From now on this process keeps memory that it frees, as the allocator of torch does on CUDA. glibc (mallopt(3)) gives large blocks
    back, and each of their pages costs more than a microsecond when it is taken again: 9 to 11 % of a step of a small GPT or BERT."""
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
        if not _libc.mallopt(parameter, value):
            raise OSError(f"mallopt({parameter}, {value}) failed")


def _shell(lines: str) -> None:
    for line in filter(None, map(str.strip, lines.splitlines())):
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{line}: {done.stderr.strip()}")


class Hosts:
    """Namespaces with the addresses 10.9.0.1, 10.9.0.2, ... on an interface ``e0``.

    Args:
        count: how many.
        rate: what each may send, as ``tc`` reads it (``400mbit``); ``none`` for no limit.
    """

    def __init__(self, count: int, rate: str) -> None:
        self.own = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.switch = self._new()
        with self._inside(self.switch):
            _shell("ip link add br0 type bridge \n ip link set br0 up")
        self.spaces = [self._new() for _ in range(count)]
        for host, space in enumerate(self.spaces):
            with self._inside(space):
                _shell(
                    f"""
                    ip link set lo up
                    ip link add e0 type veth peer name p{host} netns /proc/{os.getpid()}/fd/{self.switch}
                    ip addr add {address(host)}/24 dev e0
                    ip link set e0 up
                    """
                )
                if rate != "none":
                    _shell(f"tc qdisc add dev e0 root tbf rate {rate} burst {BURST} latency 400ms")
            with self._inside(self.switch):
                _shell(f"ip link set p{host} master br0 \n ip link set p{host} up")

    def _new(self) -> int:
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        _enter(self.own)
        return namespace

    @contextmanager
    def _inside(self, namespace: int) -> Iterator[None]:
        _enter(namespace)
        try:
            yield
        finally:
            _enter(self.own)

    def run(
        self, task: Callable[[Report], object], *, per_host: int, timeout_s: float, log: Path, report: Report
    ) -> object:
        """Run ``task`` in ``per_host`` new processes on every host, in one gloo process group; what rank 0 returns.

        Args:
            task: gets a function that reports a line of text; called on every rank.
            per_host: processes on each host.
            timeout_s: after which all of them are ended.
            log: what they print.
            report: gets what rank 0 reports.

        Raises:
            RowError: a rank failed, or the time is up; none is left running.
        """
        fork = multiprocessing.get_context("fork")
        size = per_host * len(self.spaces)
        processes, pipes = [], {}
        try:
            for rank in range(size):
                ours, theirs = fork.Pipe(duplex=False)
                arguments = (self.spaces[rank // per_host], rank, size, per_host, task, timeout_s, log, theirs)
                process = fork.Process(target=_run_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()  # so that the end of the process is the end of the pipe
                processes.append(process)
                pipes[ours] = rank
            return _listen(pipes, timeout_s, report)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def address(host: int) -> str:
    """Of a host."""
    return f"10.9.0.{host + 1}"


def _run_rank(
    namespace: int,
    rank: int,
    size: int,
    per_host: int,
    task: Callable[[Report], object],
    timeout_s: float,
    log: Path,
    pipe: Connection,
) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _keep_memory()
    _enter(namespace)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "e0",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % per_host),
    }
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
        result = task(lambda text: pipe.send(("says", text)))
        dist.barrier()  # gloo of torch 2.13 aborts if a rank leaves while another still talks
        pipe.send(("done", result))
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        pipe.send(("failed", f"rank {rank}: {type(error).__name__}: {text[0]}"))
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # process groups are not destroyed one by one


def _listen(pipes: dict[Connection, int], timeout_s: float, report: Report) -> object:
    """Until all ranks are done; what rank 0 returned."""
    results: dict[int, object] = {}
    errors: list[str] = []
    deadline = time.monotonic() + timeout_s
    open_pipes = dict(pipes)
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                del open_pipes[pipe]
                if rank not in results and not any(text.startswith(f"rank {rank}:") for text in errors):
                    errors.append(f"rank {rank}: ended without a word")
                continue
            if kind == "says" and rank == 0:
                report(value)
            elif kind == "done":
                results[rank] = value
            elif kind == "failed":
                errors.append(value)
        if errors:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if errors:
        raise RowError(errors[0])
    if len(results) < len(pipes):
        raise RowError(f"not done in {timeout_s:.0f} s")
    return results[0]
