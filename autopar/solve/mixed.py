"""Parts of stages some of whose blocks compute more again than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from autopar.solve.parts import MOST, Amounts, PartBytes, Parts
from autopar.solve.recompute import num_whole


@dataclass(frozen=True, slots=True)
class _Share:
    """So many blocks: ``share`` of those of the stages of a rank together, in a pipeline of ``degree`` ranks."""

    share: Fraction
    degree: int

    def of(self, light: Amounts, heavy: Amounts, amounts: Amounts, stage: int, counts: Sequence[int]) -> Amounts:
        """A stage of ``light`` blocks with as many of them ``heavy``."""
        more = num_whole(self.share, counts[stage], stage // self.degree)
        return {name: value + more * (heavy[name] - light[name]) for name, value in amounts.items()}

    def mean(self, light: Amounts, heavy: Amounts) -> Amounts:
        return {name: value + float(self.share) * (heavy[name] - value) for name, value in light.items()}


@dataclass(frozen=True, slots=True)
class _MixedParts(Parts):
    light: Parts
    heavy: Parts
    some: _Share

    def of(self, stage: int, counts: Sequence[int]) -> Amounts:
        return self.some.of(self.light.block, self.heavy.block, self.light.of(stage, counts), stage, counts)


@dataclass(frozen=True, slots=True)
class _MixedBytes(PartBytes):
    light: PartBytes
    heavy: PartBytes
    some: _Share

    def of(self, stage: int, counts: Sequence[int]) -> Amounts:
        return self.some.of(self.light.block, self.heavy.block, self.light.of(stage, counts), stage, counts)


def mixed(light: Parts, heavy: Parts, share: Fraction, degree: int) -> Parts:
    """A decision whose blocks are ``heavy`` in part, and else ``light``; ``block`` is their mean.

    Args:
        share: of the blocks of a rank, those that are heavy.
        degree: ranks of the pipeline.
    """
    some = _Share(share, degree)

    def held() -> PartBytes:
        own, others = light.held(), heavy.held()
        most = {name: max(getattr(own, name), getattr(others, name)) for name in MOST}
        return _MixedBytes(some.mean(own.block, others.block), own.first, own.last, **most, light=own, heavy=others, some=some)

    block = some.mean(light.block, heavy.block)
    return _MixedParts(light.blocks, block, light.first, light.last, light.sent, cache(held), light=light, heavy=heavy, some=some)
