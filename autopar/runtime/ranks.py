"""Processes that do something together on the host: what one cannot do, all say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.groups import host_group
from autopar.runtime.module import ParallelModule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that do something together.

    Args:
        group: of their own (`host_group`); None where a process is alone.
        error: what they raise.
    """

    group: dist.ProcessGroup | None
    error: type[AutoparError] = CheckpointError

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        """Those that save or load a model; a save in the background has the group to itself."""
        if not isinstance(model, ParallelModule):
            return Ranks(None)
        assert model.plan is not None  # a PlanError if there is none yet
        return Ranks.everyone()

    @staticmethod
    def everyone(error: type[AutoparError] = CheckpointError) -> Ranks:
        """All processes."""
        return Ranks(host_group("checkpoint") if dist.get_world_size() > 1 else None, error)

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
            AutoparError: a rank cannot; on all ranks, of their kind of ``error``.
        """
        made, own = None, None
        try:
            made = make()
        except Exception as error:  # of any kind: the others would wait for this rank
            own = error
        self.refuse(self.gather(None if own is None else self.text(own)), own)
        return cast(T, made)

    def text(self, error: Exception) -> str:
        """What the others are told of an error."""
        return str(error) if isinstance(error, self.error) else f"{type(error).__name__}: {error}"

    def refuse(self, problems: Sequence[str | None], own: Exception | None) -> None:
        """Raise the first of the problems of all ranks; ``own`` is the error of this one."""
        rank = next((rank for rank, text in enumerate(problems) if text is not None), None)
        if rank is None:
            return
        is_common = len(set(problems)) == 1
        raise self.error(str(problems[rank]) if is_common else f"rank {rank}: {problems[rank]}") from own
