"""Pipelines over devices of several kinds: what runs where, and how much memory it has there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch

import autopar
from autopar.cost.cluster import Cluster, named_device
from autopar.cost.device import MatmulSample, slowest
from autopar.cost.machine import MachineProfile
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.solve.places import USABLE_MEMORY, MemoryLimit, places_of
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from autopar.solve.state import Least, StateBytes
from tests import models
from tests.solve.problems import machine, session

pytestmark = pytest.mark.slow

MIXED = Cluster(4, 8, "a100-80gb") + Cluster(2, 8, "h100")


def test_the_slowest_of_two_is_no_faster_than_either() -> None:
    devices = [named_device("a100-40gb"), named_device("h100")]
    both = slowest(devices)
    assert both.memory_bytes == devices[0].memory_bytes
    for side in (64, 512, 4096):
        flops, num_bytes = 2.0 * side**3, 6.0 * side**2
        times = [float(device.matmul_time_s(flops, num_bytes, torch.bfloat16, (side, side, side))) for device in (both, *devices)]
        assert times[0] == pytest.approx(max(times[1:]), rel=0.05)
        times = [float(device.attention_time_s(flops, num_bytes, torch.bfloat16, side, backward=True)) for device in (both, *devices)]
        assert times[0] == pytest.approx(max(times[1:]), rel=0.05)
        by_hand = max(device.launch_overhead_s for device in devices) + num_bytes / min(device.memory_bandwidth for device in devices)
        assert float(both.stream_time_s(num_bytes)) == pytest.approx(by_hand)
    assert slowest(devices[:1] * 2) == devices[0]


def test_the_slowest_of_two_has_the_slower_rate_of_each_product() -> None:
    """Forward and backward, and of many in one op, where both were sampled with that."""
    cpu, sample = named_device("cpu"), MatmulSample(8, 8, 8, "float32", 1.0)
    rates = ((4.0, 3.0), (7.0, 5.0)), ((5.0, 2.0), (6.0, 8.0))
    devices = [replace(cpu, matmul=(sample.at_rates(*one),), batched=(sample.at_rates(*many),)) for one, many in rates]
    both = slowest(devices)
    assert both.matmul[0].rates == pytest.approx((4.0, 2.0))
    assert both.batched[0].rates == pytest.approx((6.0, 5.0))
    assert slowest([devices[0], replace(devices[1], batched=())]).batched == ()


@pytest.mark.parametrize(
    "mesh, axis, kinds",
    [
        ("node=6,gpu=8", 0, [(0,)] * 4 + [(1,)] * 2),
        ("node=6,gpu=8", 1, [(0, 1)] * 8),
        ("pp=3,dp=2,tp=8", 0, [(0,), (0,), (1,)]),
        ("pp=2,dp=3,tp=8", 0, [(0,), (0, 1)]),
        ("dp=2,pp=3,tp=8", 1, [(0,), (0, 1), (0, 1)]),
    ],
)
def test_which_devices_are_at_a_position(mesh: str, axis: int, kinds: Sequence[tuple[int, ...]]) -> None:
    grid = Mesh.parse(mesh)
    profile = MIXED.with_mesh(grid).profile
    assert list(profile.kinds_along(grid, axis)) == list(kinds)
    assert profile.device == slowest([named_device("a100-80gb"), named_device("h100")])
    assert profile.of_kinds((0,)).device == named_device("a100-80gb")
    assert profile.of_kinds((1,)).device == named_device("h100")
    assert profile.of_kinds((1,)).links == Cluster(6, 8, "h100").with_mesh(grid).profile.links
    assert profile.links == Cluster(6, 8).with_mesh(grid).profile.links


def test_each_stage_has_its_own_device_links_and_memory() -> None:
    shape = Shape(Mesh(("dp", "tp"), (2, 8)), Pipeline(3, 3, 6))
    profile = (Cluster(4, 8, "a100-40gb") + Cluster(2, 8, "h100")).with_mesh(shape.grid).profile
    places = places_of(profile, shape)
    inside = dict(places.machines)
    devices = [named_device(name) for name in ("a100-40gb", "a100-40gb", "h100")]
    assert [inside[places.kinds_of(stage)].device for stage in range(3)] == devices
    assert [len(prices.links) for prices in (places.inside, *inside.values())] == [2, 2, 2]
    gib = 2**30
    sizes = (40 * gib, 40 * gib, named_device("h100").memory_bytes)
    assert MemoryLimit.of(profile, shape, None).positions == pytest.approx([USABLE_MEMORY * size for size in sizes])
    assert MemoryLimit.of(profile, shape, 7.0).positions == (7.0,) * 3
    assert MemoryLimit.of(profile, Shape(shape.grid), None).positions == pytest.approx([USABLE_MEMORY * 40 * gib])


def test_a_plan_says_what_is_where() -> None:
    example = models.gpt2(layers=2)
    cluster = Cluster(1, 2, "a100-40gb") + Cluster(1, 2, "h100")
    staged = autopar.plan(example.model, cluster, example.batch, plan=autopar.Manual(pp=2, tp=2, microbatches=2))
    assert "NVIDIA A100-SXM4-40GB: stages 0; NVIDIA H100-SXM5-80GB: stages 1" in "".join(staged.notes)
    assert "the memory limit is 36.8 GiB or 72.8 GiB, by the devices of a stage" in "".join(staged.notes)
    flat = autopar.plan(example.model, cluster, example.batch, plan=autopar.Manual(dp=4))
    assert "all ranks share all ops, and wait for the slowest of NVIDIA A100" in "".join(flat.notes)
    assert not any("memory limit" in note for note in flat.notes)


def test_a_sum_of_equal_nodes_is_one_cluster() -> None:
    example = models.gpt2(layers=2)
    whole, halves = Cluster(2, 2, "h100"), Cluster(1, 2, "h100") + Cluster(1, 2, "h100")
    for config in (autopar.Manual(pp=2, tp=2, microbatches=2), autopar.Manual(dp=2, tp=2)):
        plans = [autopar.plan(example.model, cluster, example.batch, plan=config) for cluster in (whole, halves)]
        assert plans[0].ops == plans[1].ops
        assert plans[0].stages == plans[1].stages
        one, other = (asdict(plan.prediction) for plan in plans)  # seconds are sums in another order
        assert {name: value if isinstance(value, str) else pytest.approx(value) for name, value in one.items()} == other


def halves(grid: Mesh, num_bytes: tuple[int, int]) -> MachineProfile:
    """Ranks that differ only in their memory."""
    alike = machine(len(grid.sizes))
    kinds = [replace(alike, device=replace(alike.device, memory_bytes=size)) for size in num_bytes]
    return MachineProfile.mixed([(grid.num_ranks // 2, kind) for kind in kinds])


def test_a_stage_may_take_what_its_own_device_has() -> None:
    """The first stage, which keeps more micro-batches, needs more than the last. With the larger device first all fits; with the smaller
    first it computes more again or is sharded otherwise."""
    normal = session("gpt2", 4).normal
    shape = Shape(Mesh(("a",), (2,)), Pipeline(2, 2, 4))
    free = Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), float("inf")).decide(shape)
    first, last = free.rank_bytes
    assert first > 1.1 * last
    large, small = (int(1.02 * size / USABLE_MEMORY) for size in (first, last))
    fitting = Search(lambda _: normal, lambda grid: halves(grid, (large, small)), None).decide(shape)
    assert fitting.step_time_s == pytest.approx(free.step_time_s)
    turned = Search(lambda _: normal, lambda grid: halves(grid, (small, large)), None)
    other = turned.decide(shape)
    assert other.fits(turned.limit(shape))
    assert other.rank_bytes[0] <= last * 1.03
    assert other.step_time_s > free.step_time_s


def test_the_program_holds_every_stage_to_its_own_limit() -> None:
    """Where the last stage has less than it takes, it is sharded otherwise; the first may still take more than the last has."""
    normal = session("gpt2", 4).normal
    shape = Shape(Mesh(("a",), (2,)), Pipeline(2, 2, 4), recompute="none")
    search = Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), float("inf"))
    free = search.decide(shape)
    limit = MemoryLimit((free.rank_bytes[0], 0.97 * free.rank_bytes[1]))
    staging = replace(free.staging(), shares=limit.shares(2))
    decision = search.solve(shape, staging, limit.most)
    uses = decision.prices.footprint.uses(decision.solution.variants)
    assert limit.holds([use.total for use in uses])
    assert uses[0].total > limit.positions[1]
    assert decision.solution.variants != free.decision.solution.variants


@pytest.mark.parametrize("first", [False, True])
def test_a_small_device_gets_few_layers(first: bool) -> None:
    """Ranks that are as fast, of which one kind has a quarter of the memory: the cut that is even in time fits neither as it is nor with
    all computed again nor sharded otherwise."""
    normal = session("gpt2", 4).normal
    shape = Shape(Mesh(("a",), (2,)), Pipeline(2, 2, 4))
    free = Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), float("inf")).decide(shape)
    small, large = (int(part * max(free.rank_bytes) / USABLE_MEMORY) for part in (0.4, 1.6))
    search = Search(lambda _: normal, lambda grid: halves(grid, (small, large) if first else (large, small)), None)
    found = search.decide(shape)
    assert found.fits(search.limit(shape))
    ops = [list(found.stage_of.values()).count(stage) for stage in range(2)]
    assert (ops[0] < ops[1]) is first


def test_too_little_everywhere_says_what_each_kind_has() -> None:
    normal = session("gpt2", 4).normal
    search = Search(lambda _: normal, lambda grid: halves(grid, (2**16, 2**17)), None)
    with pytest.raises(InfeasibleError, match=r"the memory limit is 58\.9 KiB or 118 KiB"):
        search.check_least(Shape(Mesh(("a",), (2,)), Pipeline(2, 2, 4)))


def test_a_rank_holds_its_part_of_the_state_and_all_outputs_when_there_are_no_gradients_yet() -> None:
    state = StateBytes(100.0, 150.0, 200.0)
    assert Least(4, state, 0.0, has_loss=True, training=True).num_bytes == 450.0
    assert Least(4, state, 100.0, has_loss=True, training=True).num_bytes == 450.0
    assert Least(4, state, 1000.0, has_loss=True, training=True).num_bytes == 1300.0
