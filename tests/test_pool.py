from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, RankPool

pytestmark = pytest.mark.slow


def add_up(rank: int, value: torch.Tensor) -> torch.Tensor:
    total = value * (rank + 1)
    dist.all_reduce(total)
    return total


def pid(rank: int) -> int:
    return os.getpid()


def fail_beside_a_collective(rank: int) -> None:
    if rank == 2:
        raise ValueError("a shape of 7 does not divide by 4")
    dist.barrier()


def return_what_cannot_travel(rank: int) -> object:
    return lambda: rank


def sleep_on_odd_ranks(rank: int) -> None:
    if rank % 2:
        time.sleep(60)


def die(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_ranks_share_a_group(ranks: RankPool) -> None:
    for total in ranks.run(add_up, torch.tensor([1.0, 2.0])):
        torch.testing.assert_close(total, torch.tensor([10.0, 20.0]))


def test_processes_are_reused(ranks: RankPool) -> None:
    first = ranks.run(pid)
    assert len({*first, os.getpid()}) == 5
    assert ranks.run(pid) == first


def test_the_first_failure_is_reported_and_the_pool_recovers(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 2 failed:(.|\n)*ValueError: a shape of 7 does not divide by 4") as error:
        ranks.run(fail_beside_a_collective)
    assert error.value.rank == 2
    assert len(ranks.run(pid)) == 4


def test_a_result_that_cannot_travel_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="return_what_cannot_travel"):
        ranks.run(return_what_cannot_travel)


def test_silent_ranks_are_named(ranks: RankPool) -> None:
    ranks.run(pid)  # the start of the processes does not count
    with pytest.raises(RankError, match=r"did not answer in 1 s; silent ranks: \[1, 3\]"):
        ranks.run(sleep_on_odd_ranks, timeout=1)


def test_a_dead_rank_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 died, exit code 3"):
        ranks.run(die)
