"""Where this rank stands under a plan: its position on the mesh of its stages, in its pipeline, and whom it talks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar.plan import Plan
from autopar.runtime.groups import axis_groups, connect, coordinates, local_device
from autopar.runtime.transfer import Transfers, open_circle, open_transfers


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands.

    Args:
        mesh: of its stages.
        ranks: of its pipeline, by position; without one only itself.
        position: among them.
        line: process group of the pipeline; None without one.
        transfers: messages to its neighbours.
        circles: process groups of the positions that share parameters.
        rank_inputs: coordinates on the axes of ``mesh``.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    position: int
    line: dist.ProcessGroup | None
    transfers: Transfers
    circles: Mapping[tuple[int, ...], dist.ProcessGroup]
    rank_inputs: tuple[torch.Tensor, ...]

    def is_home(self, stages: Sequence[int]) -> bool:
        """Whether this rank runs one of these stages."""
        return any(stage % len(self.ranks) == self.position for stage in stages)


def shared_positions(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameters that stages of several ranks use, with the positions of those ranks."""
    found = {p.name: tuple(sorted({stage % plan.pipeline.degree for stage in p.stages})) for p in plan.parameters}
    return {name: positions for name, positions in found.items() if len(positions) > 1}


def take_place(plan: Plan, grid: DeviceMesh) -> Place:
    """Find this rank's place under a plan; makes the process groups that it needs and that are not there, with all other ranks.

    Args:
        plan: the plan.
        grid: the DeviceMesh of all ranks, ``plan.grid``.
    """
    pipeline, device = plan.pipeline, local_device(grid.device_type)
    if pipeline.degree == 1:
        return Place(grid, (dist.get_rank(),), 0, None, Transfers((dist.get_rank(),), 0, device, {}), {}, tuple(coordinates(grid)))
    inside = grid[plan.mesh.names]
    line = grid.get_group(pipeline.axis)
    ranks = tuple(dist.get_process_group_ranks(line))
    position = ranks.index(dist.get_rank())
    for group in (line, *axis_groups(inside).values()):
        connect(group, device)
    shared = dict.fromkeys(shared_positions(plan).values())
    found = {positions: open_circle(ranks, positions, position, device) for positions in shared}
    circles = {positions: group for positions, group in found.items() if group is not None}
    return Place(
        inside, ranks, position, line, open_transfers(ranks, position, device), circles, tuple(coordinates(inside))
    )


def norm_over_line(
    grads: Sequence[torch.Tensor], norm_type: float, place: Place, *, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all gradients of a pipeline, of which this rank counts ``grads``; in float32 or wider. The norms of all ranks travel in
    float64: a rank that counts none has one in float32, whatever the others have. All of them see the same, also what is not finite.

    Raises:
        RuntimeError: that of torch, on all ranks, if the norm is not finite and ``error_if_nonfinite``.
    """
    device = place.transfers.device
    norm = get_total_norm(grads, norm_type, foreach=foreach) if grads else torch.zeros((), dtype=torch.float32, device=device)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    norms = torch.zeros(len(place.ranks), dtype=torch.float64, device=device)
    norms[place.position] = whole
    dist.all_reduce(norms, group=place.line)
    dtype = torch.promote_types(whole.dtype, torch.float32)
    return get_total_norm([norms], norm_type, error_if_nonfinite).to(dtype)
