"""How far the clocks of ranks are from that of rank 0."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

NUM_TRIES = 8
"""Of which the one with the shortest way counts."""


def clock_offset_s(group: dist.ProcessGroup) -> float:
    """What this rank's ``time.perf_counter`` shows more than that of rank 0; all ranks call this together.

    Rank 0 asks each for its time, which lies in the middle between question and answer but for half of what they take (Cristian, "A
    probabilistic approach to distributed clock synchronization", 1989). Processes of one machine share a clock, and find a difference of
    some microseconds.

    Args:
        group: of gloo, of all ranks.
    """
    rank, told = dist.get_rank(), torch.zeros(1, dtype=torch.float64, device="cpu")
    offset_s = 0.0
    for other in range(1, dist.get_world_size()):
        shortest_s = float("inf")
        for _ in range(NUM_TRIES):
            if rank == 0:
                asked_s = time.perf_counter()
                dist.send(told, other, group=group)
                dist.recv(told, other, group=group)
                answered_s = time.perf_counter()
                if answered_s - asked_s < shortest_s:
                    shortest_s = answered_s - asked_s
                    found = torch.tensor([float(told) - (asked_s + answered_s) / 2], dtype=torch.float64, device="cpu")
            elif rank == other:
                dist.recv(told, 0, group=group)
                told[0] = time.perf_counter()
                dist.send(told, 0, group=group)
        if rank == 0:
            dist.send(found, other, group=group)
        elif rank == other:
            dist.recv(told, 0, group=group)
            offset_s = float(told)
    return offset_s
