"""The processes that save or load together: what one cannot do, all say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from autopar.errors import CheckpointError
from autopar.runtime.groups import job_timeout
from autopar.runtime.module import ParallelModule

T = TypeVar("T")
_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that save or load together.

    Args:
        group: of their own, of gloo: what is saved is on the host, and a save in the background must not meet the collectives of a step.
            None where a model is in one process alone.
    """

    group: dist.ProcessGroup | None

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        if not isinstance(model, ParallelModule):
            return Ranks(None)
        assert model.plan is not None  # a PlanError if there is none yet
        if dist.get_world_size() == 1:
            return Ranks(None)
        world = dist.distributed_c10d._get_default_group()
        if world not in _groups:
            _groups[world] = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=job_timeout()))
        return Ranks(_groups[world])

    @property
    def is_first(self) -> bool:
        return self.group is None or dist.get_rank() == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks."""
        if self.group is None:
            return make()
        made: list[Any] = [make() if self.is_first else None]
        dist.broadcast_object_list(made, 0, group=self.group)
        return cast(T, made[0])

    def gather(self, value: T) -> list[T]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, make: Callable[[], T]) -> T:
        """What each rank makes for itself, if all can.

        Raises:
            CheckpointError: a rank cannot; on all ranks.
        """
        made, own = None, None
        try:
            made = make()
        except Exception as error:  # of any kind: the others would wait for this rank
            own = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
            own.__cause__ = None if own is error else error
        problems = self.gather(None if own is None else str(own))
        rank = next((rank for rank, text in enumerate(problems) if text is not None), None)
        if rank is None:
            return cast(T, made)
        is_common = len(set(problems)) == 1
        raise CheckpointError(str(problems[rank]) if is_common else f"rank {rank}: {problems[rank]}") from own
