"""Prices far outside of what was measured are said to be."""

from __future__ import annotations

import pytest
import torch

from autopar import Manual, api
from autopar.cost.device import AttentionSample, DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.solve.range import FAR
from tests import models


def notes(side: int, num_bytes: float) -> tuple[str, ...]:
    """Of a plan whose linears multiply 8 x 32 x 64 and whose gradients are reduced, on a machine that was measured up to these sizes."""
    device = DeviceProfile("toy", 2**30, (MatmulSample(side, side, side, "float32", 1e9),), 1e9, 1e-6, "made up")
    link = LinkProfile(1e-6, 1e9, measured={"all_reduce": ((1.0, 1e-6), (num_bytes, 1e-3))}, group_size=2)
    model, batch = models.mlp(layers=1, batch=16)
    return api.plan(model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(device, (link, link))).notes


def test_within_the_range_there_is_nothing_to_say() -> None:
    assert notes(32, 32 * 64 * 4) == ()
    assert notes(64, 1e9) == ()


def test_far_outside_is_said() -> None:
    (matmul,) = notes(8, 1e9)
    assert matmul == "matmuls of 32.8 kflop (torch.float32) are priced at the rate of the largest sample, 1.02 kflop"
    (collective,) = notes(32, 512.0)
    assert collective == "all_reduce on axis dp of 8 KiB is priced by the model alone: measured up to 512 B"


@pytest.mark.parametrize("ranks, said", [(2, []), (4, ["all_reduce on axis dp of 4 ranks is priced by the model: measured on 2"])])
def test_groups_larger_than_those_measured_are_said(ranks: int, said: list[str]) -> None:
    device = DeviceProfile("toy", 2**30, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "made up")
    link = LinkProfile(1e-6, 1e9, measured={"all_reduce": ((1.0, 1e-6), (1e9, 1.0))}, group_size=2)
    model, batch = models.mlp(layers=1, batch=16)
    assert [*api.plan(model, ranks, batch, plan=Manual(dp=ranks), profile=MachineProfile(device, (link,))).notes] == said


def attention_notes(keys: int, dtype: str = "float32") -> list[str]:
    """Of a plan whose attention is over 16 keys in float32, on a device that was sampled up to so many."""
    samples = (MatmulSample(4096, 4096, 4096, "float32", 1e9),)
    device = DeviceProfile("toy", 2**30, samples, 1e9, 1e-6, "made up", attention=(AttentionSample(keys, dtype, 1e9, 1e9),))
    model, batch = models.gpt2(layers=1)
    link = LinkProfile(1e-6, 1e9)
    return [*api.plan(model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(device, (link, link))).notes]


def test_attention_far_outside_is_said() -> None:
    assert attention_notes(1) == ["attention over 16 keys (torch.float32) is priced at the rate of the longest sample, 1 key"]
    assert attention_notes(16) == []
    assert attention_notes(1, "bfloat16") == [], "of another dtype: matmuls stand for it"


def test_dtypes_that_stand_for_each_other_have_one_range() -> None:
    device = DeviceProfile("toy", 2**30, (MatmulSample(8, 8, 8, "bfloat16", 1e9),), 1e9, 1e-6, "made up")
    assert device.sampled_flops(torch.float16) == 2 * 8**3
    assert device.sampled_flops(torch.float32) == 0


@pytest.mark.parametrize("factor, count", [(0.9, 0), (1.1, 1)])
def test_far_is_a_factor(factor: float, count: int) -> None:
    assert len(notes(32, 32 * 64 * 4 / (factor * FAR))) == count
