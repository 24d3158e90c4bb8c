"""The positions of a pipeline: what the ranks there compute with, what their messages go over, and how much memory they have.

Devices may be of several kinds (`MachineProfile.kinds`). The program shards the ops by the prices of the slowest, since all stages share
its decision; a stage then takes what it takes on the slowest of the devices at its position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.solve.inter import Costs
from autopar.solve.intra import TOLERANCE
from autopar.solve.prices import Prices
from autopar.solve.shapes import Shape
from autopar.units import bytes_text

USABLE_MEMORY = 0.92
"""Part of a device's memory that a plan may use without a limit of its own; the rest is for the allocator and the framework."""


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of a shape's pipeline.

    Args:
        inside: prices inside of a stage, on the slowest devices.
        kinds: of the devices at every position.
        machines: prices inside of a stage, for each of these kinds; only of a machine that has several.
        links: from every position to the next; empty without a pipeline.
    """

    inside: MachineProfile
    kinds: tuple[tuple[int, ...], ...]
    machines: tuple[tuple[tuple[int, ...], MachineProfile], ...]
    links: tuple[LinkProfile, ...]

    def kinds_of(self, stage: int) -> tuple[int, ...]:
        return self.kinds[stage % len(self.kinds)]

    def costs(self, prices: Prices, variants: Sequence[int]) -> tuple[Costs, ...]:
        """What an assignment takes at every position; positions alike share theirs."""
        alike = {kinds: Costs(prices.on(machine), variants) for kinds, machine in self.machines}
        return tuple(alike[kinds] for kinds in self.kinds) if alike else (Costs(prices, variants),)


def places_of(machine: MachineProfile, shape: Shape) -> Places:
    """The positions of a shape on the machine of its grid."""
    pipeline = shape.pipeline
    if pipeline.degree == 1:
        return Places(machine, ((0,),), (), ())
    kinds, link = machine.kinds_along(shape.grid, pipeline.position), machine.links[pipeline.position]
    machines = {found: _inside(machine.of_kinds(found), pipeline.position) for found in kinds} if machine.kinds else {}
    hops = tuple(link.hop(position) for position in range(pipeline.degree))
    return Places(_inside(machine, pipeline.position), kinds, tuple(machines.items()), hops)


def _inside(machine: MachineProfile, position: int) -> MachineProfile:
    """A machine without the link of the pipeline."""
    return replace(machine, links=(*machine.links[:position], *machine.links[position + 1 :]))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that each rank may take at every position of a pipeline."""

    positions: tuple[float, ...]

    @staticmethod
    def of(machine: MachineProfile, shape: Shape, num_bytes: float | None) -> MemoryLimit:
        """As many bytes for every rank; None: what each device can spare."""
        pipeline = shape.pipeline
        if num_bytes is not None:
            return MemoryLimit((num_bytes,) * pipeline.degree)
        if pipeline.degree == 1:
            return MemoryLimit((USABLE_MEMORY * machine.device.memory_bytes,))
        kinds = machine.kinds_along(shape.grid, pipeline.position)
        return MemoryLimit(tuple(USABLE_MEMORY * machine.of_kinds(found).device.memory_bytes for found in kinds))

    @property
    def most(self) -> float:
        return max(self.positions)

    @property
    def mean(self) -> float:
        return sum(self.positions) / len(self.positions)

    def over(self, rank_bytes: Sequence[float]) -> list[bool]:
        """For every position whether its rank takes more."""
        return [taken > limit * (1 + TOLERANCE) for taken, limit in zip(rank_bytes, self.positions, strict=True)]

    def holds(self, rank_bytes: Sequence[float]) -> bool:
        return not any(self.over(rank_bytes))

    def shares(self, stages: int) -> tuple[float, ...]:
        """For every stage its limit, as a part of the largest."""
        if math.isinf(self.most):
            return (1.0,) * stages
        return tuple(self.positions[stage % len(self.positions)] / self.most for stage in range(stages))

    def __str__(self) -> str:
        return " or ".join(map(bytes_text, sorted(set(self.positions))))
