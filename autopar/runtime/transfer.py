"""Messages between the stages of a pipeline: sent and received in the background, first in, first out.

Every ordered pair of neighbours has a process group of its own, so that what goes forward never waits for what comes back (NCCL runs the
messages of one group in order and has no tags). Who sends what when is in the schedule, on both sides.

NCCL makes the communicator of a group at its first use, for which its ranks wait for each other and for their devices. Where a device waits
for a message whose sender waits for that communicator, they wait for ever (seen: NCCL 2.28, the second message of 1F1B). So every group has
its first message, and every other group of a pipeline its first collectives (`runtime.groups.connect`), before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopar.errors import RankError
from autopar.ops.collectives import as_real
from autopar.runtime.groups import connect, job_timeout
from autopar.stage import Wire

What = Callable[[], str]
"""Says what waits, and where, once that is asked: few messages fail."""
Pairs = dict[tuple[int, int], dist.ProcessGroup]
_pairs: dict[tuple[dist.ProcessGroup, tuple[int, ...]], Pairs] = {}
_circles: dict[tuple[dist.ProcessGroup, tuple[int, ...], tuple[int, ...]], dist.ProcessGroup | None] = {}


@dataclass(slots=True)
class Message:
    """One message on its way: its tensors, and what must be waited for before they may be used or freed."""

    peer: int
    tensors: list[torch.Tensor]
    works: list[dist.Work]

    def wait(self, what: What) -> list[torch.Tensor]:
        """The tensors, once they are there.

        Raises:
            RankError: the peer is gone, or did not answer within the timeout of the process group.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RankError(f"{what()}: rank {self.peer} did not answer ({_first_line(error)})") from error
        return self.tensors


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@dataclass(slots=True)
class Transfers:
    """The messages of one rank.

    Args:
        ranks: global ranks of the pipeline that this rank belongs to, by position.
        position: of this rank among them.
        device: where tensors lie.
        groups: one for each ordered pair of neighbours of this pipeline that this rank is in.
        abandoned: a step ended in its middle.
    """

    ranks: Sequence[int]
    position: int
    device: torch.device
    groups: Pairs
    abandoned: bool = False
    _sent: list[Message] = field(default_factory=list)

    def send(self, to: int, tensors: Sequence[torch.Tensor], what: What) -> Message:
        """Start to send tensors to the rank at position ``to``."""
        self._sent = [message for message in self._sent if not all(work.is_completed() for work in message.works)]
        owned = [tensor.contiguous() for tensor in tensors]
        self._sent.append(self._start(dist.isend, owned, self.groups[self.position, to], self.ranks[to], what))
        return self._sent[-1]

    def receive(self, source: int, wires: Sequence[Wire], what: What) -> Message:
        """Start to receive values from the rank at position ``source``."""
        empty = [torch.empty(wire.shape, dtype=wire.dtype, device=self.device) for wire in wires]
        return self._start(dist.irecv, empty, self.groups[source, self.position], self.ranks[source], what)

    def finish(self, what: What) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._sent.pop(0).wait(what)

    def abandon(self) -> None:
        """A step has failed: its messages may still be on their way, so that nobody may use these groups again."""
        self.abandoned = True
        _pairs.pop(_key(self.ranks), None)

    def _start(self, op: object, tensors: list[torch.Tensor], group: dist.ProcessGroup, peer: int, what: What) -> Message:
        if not tensors:
            return Message(peer, [], [])
        if self.abandoned:
            raise RankError(f"{what()}: an earlier step failed in its middle, and what it sent may still come; start the processes again")
        try:
            works = dist.batch_isend_irecv([dist.P2POp(op, as_real(tensor), peer, group) for tensor in tensors])  # type: ignore[arg-type]
        except RuntimeError as error:
            raise RankError(f"{what()}: rank {peer} did not answer ({_first_line(error)})") from error
        return Message(peer, tensors, works)


def open_transfers(ranks: Sequence[int], position: int, device: torch.device) -> Transfers:
    """Find the groups of this rank's pipeline; all ranks of the job call this together. The groups are made once per process.

    Args:
        ranks: global ranks of the pipeline, by position. They tell all other pipelines of the mesh, so that a rank makes groups if all do.
        position: of this rank.
        device: where tensors lie.
    """
    key = _key(ranks)
    if key not in _pairs:
        _level_groups()
        groups = {}
        for round_ in _rounds(len(ranks)):
            pair = next((pair for pair in round_ if position in pair), None)
            group = _join_group([ranks[p] for p in pair] if pair is not None else None)
            if pair is not None:
                groups[pair] = group
                _send_first([ranks[p] for p in pair], group, device)
        _pairs[key] = groups
    return Transfers(ranks, position, device, _pairs[key])


def _send_first(pair: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """The first message of an ordered pair; both call this."""
    source, target = pair
    token, is_source = torch.zeros(1, device=device), dist.get_rank() == source
    message = dist.P2POp(dist.isend if is_source else dist.irecv, token, target if is_source else source, group)
    for work in dist.batch_isend_irecv([message]):
        work.wait()
    token.cpu()  # until it is there


def open_circle(ranks: Sequence[int], positions: tuple[int, ...], position: int, device: torch.device) -> dist.ProcessGroup | None:
    """The group of some positions of this rank's pipeline, None if it is not among them; made, and called, as by `open_transfers`."""
    key = *_key(ranks), positions
    if key not in _circles:
        _level_groups()
        inside = position in positions
        group = _join_group([ranks[p] for p in positions] if inside else None)
        if inside:
            connect(group, device)
        _circles[key] = group if inside else None
    return _circles[key]


def _key(ranks: Sequence[int]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    return dist.distributed_c10d._get_default_group(), tuple(ranks)


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Ordered pairs of neighbours on a ring, in rounds in which each position has at most one."""
    if count == 1:
        return []
    steps = [(a, (a + 1) % count) for a in range(count if count > 2 else 1)]
    even, odd = [s for s in steps if s[0] % 2 == 0], [s for s in steps if s[0] % 2]
    last = [even.pop()] if count % 2 else []
    rounds = [round_ for round_ in (even, odd, last) if round_]
    return rounds + [[(b, a) for a, b in round_] for round_ in rounds]


def _join_group(members: Sequence[int] | None) -> dist.ProcessGroup:
    """A process group that only its members wait for; a rank that is in none makes one of itself alone.

    All ranks of the job call this equally often. Torch names such groups by their ranks and by how many groups the process has, so that
    members that have not the same number wait for each other for ever (seen: torch 2.13, `_hash_ranks_to_str`).
    """
    own = [dist.get_rank()] if members is None else sorted(members)
    group: dist.ProcessGroup = dist.new_group(own, timeout=job_timeout(), use_local_synchronization=True)
    return group


def _level_groups() -> None:
    """Let every process have the same number of process groups, as `_join_group` needs; all ranks of the job call this."""
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names))
    for _ in range(max(counts) - counts[dist.get_rank()]):
        _join_group(None)
