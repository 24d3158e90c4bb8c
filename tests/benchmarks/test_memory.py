"""Memory of a step is what the allocator has out at one time, beside what was there."""

from __future__ import annotations

from types import ModuleType

import torch

MIB = 2**20


def test_what_a_step_allocates(memory: ModuleType) -> None:
    held = torch.empty(8 * MIB, dtype=torch.uint8)
    base = memory.allocated_bytes(lambda: None)
    assert base >= held.nbytes

    def one_by_one() -> None:
        for _ in range(3):
            torch.empty(4 * MIB, dtype=torch.uint8)

    def together() -> None:
        _ = [torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(3)]

    assert memory.allocated_bytes(one_by_one) - base == 4 * MIB
    assert memory.allocated_bytes(together) - base == 12 * MIB
    del held
    assert base - memory.allocated_bytes(lambda: None) == 8 * MIB
