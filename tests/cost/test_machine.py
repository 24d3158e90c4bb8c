"""Rooflines, shipped data, clusters and their files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopar.cost.cluster import BETWEEN_NODES, INSIDE_NODE, Cluster, named_device, named_link
from autopar.cost.collectives import collective_time_s
from autopar.cost.device import AttentionSample, DeviceProfile, MatmulSample, Stream
from autopar.cost.families import STREAMS
from autopar.cost.machine import KINDS, LinkProfile, MachineProfile
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.mesh import Mesh

DEVICES = ["a100-40gb", "a100-80gb", "b200", "cpu", "h100", "h200", "l4", "v100"]
DEVICE = DeviceProfile(
    "toy",
    1024,
    (MatmulSample(80, 80, 80, "bfloat16", 1e10), MatmulSample(800, 800, 800, "bfloat16", 1e12)),
    memory_bandwidth=1e9,
    launch_overhead_s=1e-6,
    source="made up",
)
NEAR = replace(named_link("nvlink3"), level=INSIDE_NODE)
LINKS = replace(named_link("ib-200"), level=BETWEEN_NODES, is_network=True, inside=NEAR), NEAR


def seconds(flops: float, num_bytes: float, *, is_matmul: bool = True) -> float:
    return float(DEVICE.matmul_time_s(flops, num_bytes, torch.bfloat16) if is_matmul else DEVICE.stream_time_s(num_bytes))


def test_roofline_is_the_longer_of_computing_and_moving() -> None:
    assert seconds(2e9, 0) == pytest.approx(1e-6 + 2e9 / 1e12)
    assert seconds(2e9, 1e9) == pytest.approx(1e-6 + 1.0)
    assert seconds(2e9, 1e3, is_matmul=False) == pytest.approx(1e-6 + 1e-6)


def test_what_does_nothing_is_not_launched() -> None:
    assert seconds(0, 0) == 0.0


def test_throughput_is_interpolated_in_logarithms_and_held_outside() -> None:
    rates = DEVICE.matmul_flops_per_s(np.array([1.0, 1.024e6, np.sqrt(1.024e6 * 1.024e9), 1.024e9, 1e15]), torch.bfloat16)
    assert rates.tolist() == pytest.approx([1e10, 1e10, 1e11, 1e12, 1e12])


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    device = replace(DEVICE, matmul=tuple(sample._replace(dtype="float32") for sample in DEVICE.matmul))
    for flops in (1.024e6, 1e8, 1.024e9):
        assert device.matmul_time_s(flops, 0.0, torch.complex64) == pytest.approx(device.matmul_time_s(4 * flops, 0.0, torch.float32))
    sampled = replace(device, matmul=(*device.matmul, MatmulSample(800, 800, 800, "complex64", 7e10)))
    assert float(sampled.matmul_flops_per_s(1.024e9, torch.complex64)) == pytest.approx(7e10)


def test_skinny_matmuls_reach_less() -> None:
    """At a fraction of the side, what was sampled there; between, by how skinny; for cubes, nothing is lost."""
    samples = (*DEVICE.matmul, MatmulSample(800, 800, 8, "bfloat16", 5e10), MatmulSample(8, 800, 800, "bfloat16", 1e11 / 5))
    device = replace(DEVICE, matmul=samples)
    flops = 1.024e7  # of the skinny ones; cubes of so many have 10 ** (10 + 2 / 3)
    cube = float(device.matmul_flops_per_s(flops, torch.bfloat16))
    assert cube == pytest.approx(10 ** (10 + 2 / 3))
    assert float(device.matmul_flops_per_s(flops, torch.bfloat16, (172.4, 172.4, 172.4))) == pytest.approx(cube)
    assert float(device.matmul_flops_per_s(flops, torch.bfloat16, (800, 8, 800))) == pytest.approx((5e10 * 2e10) ** 0.5, rel=1e-2)
    assert float(device.matmul_flops_per_s(flops, torch.bfloat16, (1, 8000, 800))) == pytest.approx((5e10 * 2e10) ** 0.5, rel=1e-2)
    between = float(device.matmul_flops_per_s(flops, torch.bfloat16, (8000, 80, 800)))
    assert between == pytest.approx(cube * ((5e10 * 2e10) ** 0.5 / cube) ** (np.log(80 / 800) / np.log(8 / 800)), rel=1e-2)


def test_what_is_long_in_one_side_alone_is_not_skinny() -> None:
    device = replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(800, 800, 8, "bfloat16", 1e10)))
    rate = partial(device.matmul_flops_per_s, 1e12, torch.bfloat16)
    assert rate((8000, 800, 800)) == rate((800, 8000, 800)) == rate((800, 800, 80000)) == rate() > rate((8000, 800, 400))


def test_what_is_longer_than_was_sampled_in_two_sides_is_not_more_skinny() -> None:
    """Its rows take no longer together than in parts, each of which is as long as the samples."""
    device = replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(800, 800, 8, "bfloat16", 1e10)))

    def seconds(rows: int, short: int) -> float:
        flops = 2.0 * rows * 64000 * short
        return float(device.matmul_time_s(flops, 0, torch.bfloat16, (rows, 64000, short)) - device.launch_overhead_s)

    for short in (80, 400, 800):
        assert seconds(64000, short) == pytest.approx(8 * seconds(8000, short))
    assert seconds(64000, 80) > 1.5 * seconds(64000, 800) / 10


def test_unaligned_rows_take_slower_kernels() -> None:
    """Rows are of n and k: in the forward those of the factors and the product, in the backward the same."""
    device = replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(800, 801, 800, "bfloat16", 2e11)))
    rate = partial(device.matmul_flops_per_s, 2e9, torch.bfloat16)
    assert rate() == rate((800, 800, 800)) == rate((801, 800, 800)) == pytest.approx(1e12)
    assert rate((800, 801, 800)) == rate((800, 800, 801)) == rate((800, 804, 800)) == pytest.approx(2e11)
    many = device.matmul_flops_per_s(np.full(2, 2e9), torch.float16, (800, np.array([800, 801]), 800))
    assert many.tolist() == pytest.approx([1e12, 2e11])


def test_unaligned_rows_take_no_faster_kernels() -> None:
    device = replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(800, 801, 800, "bfloat16", 2e12)))
    assert device.matmul_flops_per_s(2e9, torch.bfloat16, (800, 801, 800)) == device.matmul_flops_per_s(2e9, torch.bfloat16)


def test_without_unaligned_samples_all_are_alike() -> None:
    assert DEVICE.matmul_flops_per_s(2e9, torch.bfloat16, (800, 801, 800)) == DEVICE.matmul_flops_per_s(2e9, torch.bfloat16)


def test_a_backward_has_rates_of_its_own() -> None:
    """Its two products run one after the other, each at the rate of its own size; None is the rate of the forward."""
    small, large = (MatmulSample(n, n, n, "bfloat16", 1e12, rate) for n, rate in ((80, None), (800, 5e11)))
    skinny, unaligned = MatmulSample(800, 800, 8, "bfloat16", 1e11, 1e10), MatmulSample(800, 801, 800, "bfloat16", 4e11, 3e11)
    device = replace(DEVICE, matmul=(small, large, skinny, unaligned), launch_overhead_s=0.0)
    one, two = (float(device.matmul_time_s(n * small.flops, 0, torch.bfloat16, gradients=n)) for n in (1, 2))
    assert (one, two) == pytest.approx((small.flops / 1e12, 2 * small.flops / 1e12))
    assert float(device.matmul_time_s(large.flops, 0, torch.bfloat16)) == pytest.approx(large.flops / 1e12)
    assert float(device.matmul_time_s(2 * large.flops, 0, torch.bfloat16, gradients=2)) == pytest.approx(2 * large.flops / 5e11)
    rate = partial(device.matmul_flops_per_s, dtype=torch.bfloat16)
    rates = [float(rate(sample.flops, sides=sample[:3], backward=b)) for sample in (skinny, unaligned) for b in (False, True)]
    assert rates == pytest.approx([1e11, 1e10, 4e11, 3e11], rel=1e-2)
    halved = large.times(0.5)
    assert (halved.rates, small.times(0.5)) == ((5e11, 2.5e11), MatmulSample(80, 80, 80, "bfloat16", 5e11))


def test_several_matmuls_in_one_op_have_rates_of_their_own() -> None:
    """By the size of each; an op of one has that of one, and so has one whose sides are not known."""
    device = replace(DEVICE, batched=(MatmulSample(80, 80, 80, "bfloat16", 3e10, 2e10),))
    rate, each = partial(device.matmul_flops_per_s, dtype=torch.bfloat16), (80, 80, 80)
    one = 2.0 * 80**3
    assert (float(rate(one, sides=each)), float(rate(2 * one, sides=each))) == pytest.approx((1e10, 3e10))
    assert float(rate(2 * one, sides=each, backward=True)) == pytest.approx(2e10)
    assert rate(1e3 * one) == pytest.approx(1e12)
    counts = rate(np.array([one, 1e3 * one]), sides=(np.array([80, 80]), 80, 80))
    assert counts.tolist() == pytest.approx([1e10, 3e10])
    matmul, batched = (tuple(s._replace(dtype="float32") for s in samples) for samples in (device.matmul, device.batched))
    real = replace(device, matmul=matmul, batched=batched)
    alone = float(replace(real, batched=()).matmul_flops_per_s(one, torch.complex64, each))
    rates = [float(real.matmul_flops_per_s(count * one, torch.complex64, each)) for count in (1, 2)]
    assert rates == pytest.approx([alone, 3e10 / 4])


def test_profiles_keep_the_rates_of_products(tmp_path: Path) -> None:
    """Those of the backward and of several in one op, and what links gain; a file may leave the backward out where it is as fast."""
    matmul = MatmulSample(8, 8, 8, "float32", 2.0, 1.0), MatmulSample(9, 9, 9, "float32", 3.0)
    device = replace(DEVICE, matmul=matmul, batched=(MatmulSample(4, 4, 4, "float32", 1.5),))
    profile = MachineProfile(device, (replace(LINKS[0], alone=2.0),))
    profile.save(tmp_path / "machine.json")
    assert MachineProfile.load(tmp_path / "machine.json") == profile
    data = json.loads((tmp_path / "machine.json").read_text())
    data["device"]["matmul"][1] = data["device"]["matmul"][1][:5]
    assert MachineProfile.from_json(data) == profile
    data["device"]["matmul"][1] = [9, 9, 9, "float32", 3.0, -1.0]
    with pytest.raises(PlanError, match=r"rate of 9 x 9 x 9 in float32 is -1\.0; give a positive number"):
        MachineProfile.from_json(data)


def test_attention_and_streams_have_rates_of_their_own() -> None:
    device = replace(
        DEVICE,
        attention=(AttentionSample(100, "bfloat16", 1e9, 2e9), AttentionSample(400, "bfloat16", 4e9, 2e9)),
        streams={"gelu": Stream(1e8, 5e8)},
    )
    ways = (False, True)
    took = [float(device.attention_time_s(1e9, 0, torch.bfloat16, n, backward=b)) for n in (50, 200, 800) for b in ways]
    assert took == pytest.approx([1 + 1e-6, 0.5 + 1e-6, 0.5 + 1e-6, 0.5 + 1e-6, 0.25 + 1e-6, 0.5 + 1e-6])
    assert float(DEVICE.attention_time_s(2e9, 0, torch.bfloat16, 100, backward=False)) == seconds(2e9, 0)
    assert [float(device.stream_time_s(1e8, "gelu", backward=b)) for b in ways] == pytest.approx([1 + 1e-6, 0.2 + 1e-6])
    assert float(device.stream_time_s(1e8, "softmax")) == pytest.approx(0.1 + 1e-6)


def test_half_precisions_stand_for_each_other() -> None:
    assert DEVICE.matmul_time_s(2e9, 0, torch.float16) == DEVICE.matmul_time_s(2e9, 0, torch.bfloat16)


def test_a_dtype_without_samples_names_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"'toy' has no matmul throughput for float32; sampled are: bfloat16\. Measure"):
        DEVICE.matmul_time_s(1.0, 1.0, torch.float32)


@pytest.mark.parametrize("name", DEVICES)
def test_arrays_give_what_numbers_give(name: str) -> None:
    device = named_device(name)
    flops, num_bytes = np.logspace(5, 14, 9), np.logspace(3, 9, 9)
    times = device.matmul_time_s(flops, num_bytes, torch.float16)
    each = [float(device.matmul_time_s(f, b, torch.float16)) for f, b in zip(flops, num_bytes, strict=True)]
    assert times.tolist() == pytest.approx(each)
    assert all(np.diff(times) > 0)


@pytest.mark.parametrize("name", DEVICES)
def test_shipped_devices_know_the_usual_dtypes(name: str) -> None:
    device = named_device(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert float(device.matmul_flops_per_s(1e12, dtype)) > 0
    assert device.source
    assert Cluster(1, 8, name).profile.links[0].bandwidth > 0
    assert (1e10 < device.host_bytes_per_s < device.memory_bandwidth / 5) == (name != "cpu")


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "cpu"])
def test_attention_on_gpus_is_slower_than_their_matmuls(name: str) -> None:
    """And its backward slower than its forward, in both halves of precision."""
    device, best = named_device(name), Cluster(1, 8, name).profile.best_flops_per_s
    for dtype in (torch.bfloat16, torch.float16):
        forward_s, backward_s = (float(device.attention_time_s(1e12, 0, dtype, 4096, backward=b)) for b in (False, True))
        assert float(device.matmul_time_s(1e12, 0, dtype)) < forward_s < backward_s
        assert 1e12 / forward_s > best / 100


PROCESSORS = {
    "v100": (80, 1.53), "a100-40gb": (108, 1.41), "a100-80gb": (108, 1.41), "h100": (132, 1.98), "b200": (148, 1.965), "l4": (58, 2.04)
}  # fmt: skip
"""And their clock in GHz; of an H200 as of an H100."""


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "h100"])
def test_other_ops_are_as_on_an_h200_and_an_h100_by_processors_and_memory(name: str) -> None:
    """Seconds of a byte are some of the processors, of which both have the same, and some of the memory. No op is faster than a copy, or
    than writing alone where a cache holds the rows that are read."""
    device, fast, slow = map(named_device, (name, "h200", "h100"))
    slower = np.prod(PROCESSORS["h100"]) / np.prod(PROCESSORS[name])
    assert tuple(device.streams) == STREAMS
    for stream, rates in device.streams.items():
        for backward, rate in enumerate(rates):
            both = np.array([1 / known.streams[stream][backward] for known in (fast, slow)])
            _, of_memory = np.linalg.solve([[1, 1 / known.memory_bandwidth] for known in (fast, slow)], both)
            of_memory = np.clip(of_memory, 0, both[0] * fast.memory_bandwidth)  # what noise makes of all and of nothing
            of_processors = both[0] - of_memory / fast.memory_bandwidth
            most = device.memory_bandwidth * (2 if stream == "embedding" and not backward else 1)
            by_hand = min(1 / (of_processors * slower + of_memory / device.memory_bandwidth), most)
            assert rate == pytest.approx(by_hand, rel=1e-3), stream


def test_an_a100_layer_takes_what_is_published() -> None:
    """Large bfloat16 matmuls reach 271 of 312 TFLOP/s (stas00/ml-engineering, compute/accelerator)."""
    assert float(named_device("a100-80gb").matmul_flops_per_s(1e12, torch.bfloat16)) == pytest.approx(271e12, rel=0.01)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(PlanError, match=r"no device called 'a1000'; there are a100-40gb, a100-80gb, b200"):
        named_device("a1000")
    with pytest.raises(PlanError, match=r"no link called 'ib-7'; there are .*ib-200"):
        Cluster(2, 8, inter="ib-7")


@pytest.mark.parametrize(
    "parts, text",
    [
        ({"nodes": "4"}, "at least one node and one device, got nodes='4'"),
        ({"nodes": True}, "at least one node and one device, got nodes=True"),
        ({"device": ["h100"]}, r"device of a Cluster is the name of a part, .* got \['h100'\]"),
        ({"inter": 400}, "inter of a Cluster is the name of a part, .* got 400"),
        ({"grid": "dp=8"}, "grid of a Cluster is a Mesh, .* got 'dp=8'"),
        ({"others": (8,)}, r"others of a Cluster is a tuple, .* got \(8,\)"),
        ({"measured_mesh": Mesh.of(8)}, "measured of a Cluster is a MachineProfile, with its measured_mesh"),
    ],
    ids=str,
)
def test_parts_of_another_kind(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(MeshError, match=text):
        Cluster(**parts)


def test_a_list_of_other_nodes_is_a_tuple_of_them() -> None:
    assert hash(Cluster(1, 8, others=[Cluster(1, 8)])) == hash(Cluster(1, 8) + Cluster(1, 8))  # type: ignore[arg-type]


def test_profile_round_trip(tmp_path: Path) -> None:
    links = (
        LinkProfile(1e-6, 1e9),
        LinkProfile(2e-6, 2e9, measured={"all_gather": ((1.0, 2.0), (3.0, 4.0))}, group_size=2),
    )
    profile = MachineProfile(DEVICE, links, "here, today")
    profile.save(tmp_path / "profile.json")
    assert MachineProfile.load(tmp_path / "profile.json") == profile


def test_profile_must_have_one_link_per_axis() -> None:
    profile = MachineProfile(DEVICE, (LinkProfile(1e-6, 1e9),), "here")
    assert profile.for_mesh(Mesh.of(4)) is profile
    with pytest.raises(MeshError, match=r"profile of 'here' has 1 link, but mesh \(d0=2,d1=2\) has 2 axes"):
        profile.for_mesh(Mesh.of((2, 2)))


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "is not there"),
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "profile.json: not a machine profile: it lacks 'links'"),
        ('{"links": [NaN]}', "profile.json has NaN; all numbers"),
    ],
)
def test_bad_profile_files_say_what_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message):
        MachineProfile.load(path)


def _bad_device(**changes: object) -> dict[str, object]:
    return {"device": changes}


def _bad_link(**changes: object) -> dict[str, object]:
    return {"links": [changes]}


@pytest.mark.parametrize(
    "bad, message",
    [
        (_bad_device(memory_bandwidth=0), "device 'toy': memory_bandwidth is 0.0; give a positive number"),
        (_bad_device(memory_bytes=0), "memory_bytes is 0; give a positive"),
        (_bad_device(launch_overhead_s=-1e-6), "launch_overhead_s is -1e-06; give 0 or more"),
        (_bad_device(matmul=[[8, 8, 8, "float32", 0]]), "rate of 8 x 8 x 8 in float32 is 0.0; give a positive"),
        (_bad_device(attention=[[64, "float32", 1e9, -1]]), "rate of attention over 64 in float32 is -1.0"),
        (_bad_device(streams={"gelu": [1e9, 0]}), "rate of gelu is 0.0"),
        (_bad_device(memory_bandwith=1e12), "a DeviceProfile has no memory_bandwith; it has name, memory_bytes"),
        (_bad_device(matmul=[[8, 8, 8, "float32", 1], [8, 8, 8, "float32", 1, 2, 3]]), r"row 1 of matmul is \[8, .*, 3\]; a row has m, n"),
        (_bad_device(matmul=[[8, 8, 8, "float32"]]), "row 0 of matmul is .*; a row has m, n, k, dtype, flops_per_s, backward_flops_per_s"),
        (_bad_device(batched=[["many", 8, 8, "float32", 1]]), "row 0 of batched is "),
        (_bad_device(attention=[64]), "row 0 of attention is 64; a row has length, dtype, forward_flops_per_s, backward_flops_per_s"),
        (_bad_device(streams={"gelu": [1e9]}), "row 0 of streams, gelu, is .*; a row has forward_bytes_per_s, backward_bytes_per_s"),
        (_bad_link(measured={"send": [[1, 1, 1]]}), "row 0 of measured send is .*; a row has num_bytes, time_s"),
        (_bad_link(protocols=[[1, None, 1]]), "row 0 of protocols is .*; a row has alpha_s, base_s, share"),
        (_bad_link(bandwidth=float("nan")), "link 'here': bandwidth is nan; give a positive"),
        (_bad_link(alpha_s=-1), "link 'here': alpha_s is -1.0; give 0 or more"),
        (_bad_link(overlap=1.5), "1 - overlap is -0.5; give 0 or more"),
        (_bad_link(measured={"allreduce": [[1, 1]]}), "'allreduce' was measured on 2 ranks .*; give one of all_reduce, all_gather"),
        (_bad_link(measured={"all_reduce": [[2, 1], [1, 1]]}), "pairs of bytes and seconds in ascending order"),
        (_bad_link(measured={"all_reduce": [[1, 1]]}, group_size=0), "measured on 0 ranks .* a group of 2 or more ranks"),
        (_bad_link(measured={"all_reduce": [[1, 0]]}), "bytes and seconds of all_reduce is 0.0"),
        (_bad_device(matmul=[[8, 8, 8, "float32", 1, float("nan")]]), "rate of 8 x 8 x 8 in float32 is nan"),
        (_bad_device(memory_bytes=float("inf")), "memory_bytes of a DeviceProfile is inf; give a whole number"),
        (_bad_device(memory_bandwidth=float("inf")), "memory_bandwidth is inf; give a positive number"),
        (_bad_device(matmul=[[8.5, 8, 8, "float32", 1]]), "row 0 of matmul is "),
        (_bad_device(matmul=[[8, 8, 8, "bf16", 1]]), "there is no dtype 'bf16'; give a name of torch"),
        (_bad_link(protocols=[[1, 1, 1.5]]), "1 - share of a protocol is -0.5"),
        (_bad_link(protocols=[[1, -1, 1]]), "start of a protocol is -1.0"),
        (_bad_link(measured={"all_reduce": [[1, 1], [1, 2]]}), "pairs of bytes and seconds in ascending order"),
        (_bad_link(is_network="false"), "is_network of a LinkProfile is 'false'; give true or false"),
        (_bad_link(is_network=1), "is_network of a LinkProfile is 1; give true or false"),
        (_bad_link(level=-1), "level of a LinkProfile is -1; give text"),
        (_bad_link(source={}), "source of a LinkProfile is {}; give text"),
        (_bad_link(bandwidth="1e9"), "bandwidth of a LinkProfile is '1e9'; give a number"),
        (_bad_link(group_size=2.5), "group_size of a LinkProfile is 2.5; give a whole number"),
        (_bad_link(inside=[]), "not a machine profile: 'list' object has no attribute 'keys'"),
        (_bad_link(protocols={}), "protocols of a LinkProfile is {}; give a list"),
        (_bad_link(measured={"all_reduce": [[True, 1]]}), r"measured of a LinkProfile has true or false in \[\[True, 1\]\]; give numbers"),
        (_bad_device(name=None), "name of a DeviceProfile is None; give text"),
        (_bad_device(name=[]), r"name of a DeviceProfile is \[\]; give text"),
        (_bad_device(source=None), "source of a DeviceProfile is None; give text"),
        (_bad_device(memory_bandwidth=True), "memory_bandwidth of a DeviceProfile is True; give a number"),
        (_bad_device(memory_bytes=True), "memory_bytes of a DeviceProfile is True; give a whole number"),
        (_bad_device(matmul=[[8, True, 8, "float32", 1]]), "matmul of a DeviceProfile has true or false in"),
        (_bad_device(streams=[]), r"streams of a DeviceProfile is \[\]; give an object with names"),
        ({"origin": 3}, "origin of a MachineProfile is 3; give text"),
        ({"kinds": {}}, "kinds of a MachineProfile is {}; give a list"),
        ({"kinds": [[True, {}]]}, "kinds of a MachineProfile has true or false in"),
        (_bad_link(latency_s=1), "a LinkProfile has no latency_s; it has alpha_s, bandwidth"),
    ],
)
def test_numbers_that_no_machine_has(bad: dict[str, Any], message: str) -> None:
    """A profile that was written by hand does not go on to prices that are negative or no numbers."""
    good = asdict(MachineProfile(DEVICE, (LinkProfile(1e-6, 1e9, group_size=2, source="here"),), "here"))
    data = good | bad | {"device": good["device"] | bad.get("device", {}), "links": [good["links"][0] | bad.get("links", [{}])[0]]}
    with pytest.raises(PlanError, match=message):
        MachineProfile.from_json(data)


@pytest.mark.parametrize(
    "nodes, gpus, mesh", [(1, 8, "gpu=8"), (4, 8, "node=4,gpu=8"), (4, 1, "node=4"), (1, 1, "gpu=1")]
)
def test_cluster_mesh(nodes: int, gpus: int, mesh: str) -> None:
    cluster = Cluster(nodes, gpus)
    assert str(cluster.mesh) == mesh
    assert cluster.profile.for_mesh(cluster.mesh).device == named_device("a100-80gb")
    assert cluster.memory_bytes == 80 * 2**30


@pytest.mark.parametrize("sides", [(8192, 50257, 768), (8192, 50304, 768), (16384, 16384, 4096), (4096, 4097, 4096)])
def test_newer_devices_multiply_no_slower(sides: tuple[int, int, int]) -> None:
    flops = 2.0 * sides[0] * sides[1] * sides[2]
    times = [float(named_device(name).matmul_time_s(flops, 0.0, torch.bfloat16, sides)) for name in ("h100", "h200", "b200")]
    assert times[1] <= 1.03 * times[0], "of one kind, measured on two hosts"
    assert times[2] <= 1.03 * times[1]


@pytest.mark.parametrize(
    "device, link", [("a100-40gb", "ib-200"), ("h100", "ib-400"), ("v100", "ib-50"), ("l4", "eth-100"), ("cpu", "gloo")]
)
def test_nodes_have_the_network_that_they_usually_have(device: str, link: str) -> None:
    assert Cluster(2, 8, device).profile == Cluster(2, 8, device, link).profile
    assert Cluster(2, 8, device).profile.origin.endswith(link)


@pytest.mark.parametrize("nodes, sizes", [(3, (8, 3)), (6, (16, 3)), (3, (2, 12)), (5, (4, 10))])
def test_groups_that_do_not_fill_nodes_cross_them_alone(nodes: int, sizes: tuple[int, int]) -> None:
    links = Cluster(nodes, 8).with_mesh(Mesh(("dp", "tp"), sizes)).profile.links
    assert [link.level for link in links] == [BETWEEN_NODES, BETWEEN_NODES]
    assert links[0].lanes == 1


def test_cluster_links_are_the_network_across_and_nvlink_inside() -> None:
    assert Cluster(4, 8).profile.links == LINKS
    assert Cluster(4, 1).profile.links == LINKS[:1]
    assert [Cluster(nodes, 8).profile.origin for nodes in (1, 4)] == [f"{text} x 8 a100-80gb, ib-200" for text in ("1 node", "4 nodes")]
    assert Cluster(1, 8, intra="pcie4").profile.links == (replace(named_link("pcie4"), level=INSIDE_NODE),)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "send"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_in_nodes_of_their_own_are_no_faster_than_those_of_one(kind: str, size: int) -> None:
    """Small messages too, for which links inside of a node were measured to take longer than protocols between them do."""
    num_bytes = np.logspace(3, 9, 13)
    apart, together = (Cluster(*sizes, inter="eth-100").profile.links[0] for sizes in ((size, 1), (1, size)))
    assert np.all(collective_time_s(kind, num_bytes, size, apart) >= collective_time_s(kind, num_bytes, size, together))


def test_a_sum_of_clusters(tmp_path: Path) -> None:
    cluster = Cluster(4, 8, "a100-80gb") + Cluster(2, 8, "h100", inter="ib-400") + Cluster(1, 8, "h200")
    assert str(cluster.mesh) == "node=7,gpu=8"
    assert [(count, machine.device.name) for count, machine in cluster.profile.kinds] == [
        (count, named_device(name).name) for count, name in ((32, "a100-80gb"), (16, "h100"), (8, "h200"))
    ]
    assert cluster.profile.links == LINKS
    assert cluster.memory_bytes == named_device("h100").memory_bytes
    cluster.with_mesh(Mesh.parse("pp=7,tp=8")).save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster.with_mesh(Mesh.parse("pp=7,tp=8"))
    cluster.profile.save(tmp_path / "profile.json")
    assert MachineProfile.load(tmp_path / "profile.json") == cluster.profile


def test_what_makes_no_sum() -> None:
    with pytest.raises(MeshError, match="nodes of 8 and of 4 devices make no grid"):
        Cluster(4, 8) + Cluster(2, 4)
    with pytest.raises(MeshError, match="is regrouped or measured; add first, then with_mesh"):
        Cluster(4, 8).with_mesh(Mesh.of(32)) + Cluster(2, 8)
    with pytest.raises(PlanError, match="it has rack"):
        Cluster._from_json({"nodes": 1, "gpus_per_node": 8, "device": "h100", "rack": 2}, "it")


def test_devices_share_a_single_port() -> None:
    assert Cluster(2, 8, inter="eth-100").profile.links[0].bandwidth == pytest.approx(10e9 / 8)


@pytest.mark.parametrize(
    "mesh, crossed, lanes",
    [
        ("pp=4,tp=8", ["ib-200", "nvlink3"], [1, 1]),
        ("pp=2,dp=2,tp=8", ["ib-200", "ib-200", "nvlink3"], [1, 1, 1]),
        ("pp=4,dp=2,tp=4", ["ib-200", "nvlink3", "nvlink3"], [1, 1, 1]),
        ("dp=8,tp=4", ["ib-200", "nvlink3"], [2, 1]),
        ("dp=32", ["ib-200"], [8]),
        ("dp=2,tp=16", ["ib-200", "ib-200"], [1, 8]),
    ],
)
def test_regrouped_axes_take_the_link_that_they_cross(mesh: str, crossed: list[str], lanes: list[int]) -> None:
    links = Cluster(4, 8).with_mesh(Mesh.parse(mesh)).profile.links
    assert [link.bandwidth for link in links] == [named_link(name).bandwidth for name in crossed]
    assert [link.lanes for link in links] == lanes


@pytest.mark.parametrize(
    "mesh, crossed",
    [
        ("pp=4,tp=8", ["ib-200"] * 4),
        ("pp=8,tp=4", ["nvlink3", "ib-200"] * 4),
        ("pp=16,tp=2", ["nvlink3", "nvlink3", "nvlink3", "ib-200"] * 4),
        ("pp=2,dp=2,tp=8", ["ib-200"] * 2),
    ],
)
def test_messages_along_an_axis_take_the_link_between_their_ranks(mesh: str, crossed: list[str]) -> None:
    """The last is from the last position back to the first."""
    link = Cluster(4, 8).with_mesh(Mesh.parse(mesh)).profile.links[0]
    assert [link.hop(position).bandwidth for position in range(len(crossed))] == [named_link(name).bandwidth for name in crossed]


def test_lanes_are_no_faster_than_the_inside_of_a_node() -> None:
    cluster = Cluster(2, 8, "l4", inter="ib-200").with_mesh(Mesh.parse("dp=16"))
    assert cluster.profile.links[0].lanes == 1.0  # PCIe carries no more than one port


def test_regrouping_keeps_the_number_of_ranks() -> None:
    with pytest.raises(MeshError, match=r"mesh \(dp=5\) has 5 ranks, but the cluster \(node=4,gpu=8\) has 32"):
        Cluster(4, 8).with_mesh(Mesh.parse("dp=5"))


def test_cluster_round_trip(tmp_path: Path) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    links = LinkProfile(1e-5, 1e9, inside=LinkProfile(1e-6, 1e10), ranks_inside=2), LinkProfile(1e-6, 1e10)
    device = replace(DEVICE, attention=(AttentionSample(64, "float32", 1e9, 2e9),), streams={"gelu": Stream(1e9, 2e9)})
    measured = MachineProfile(device, links, "here")
    for cluster in (
        Cluster(4, 8, "h100", inter="ib-400"),
        Cluster(2, 2).with_mesh(Mesh.of(4)),
        Cluster.from_mesh(mesh, measured),
    ):
        cluster.save(tmp_path / "cluster.json")
        assert Cluster.load(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nodes": "4"}, "got nodes='4'"),
        ({"nodes": 2.5}, "got nodes=2.5"),
        ({"device": {}}, r"cluster.json is not a cluster: device of a Cluster is the name of a part, .* got \{\}"),
        ({"grid": 5}, "cluster.json is not a cluster: a mesh reads like 'dp=2,tp=4', got 5"),
        ({"others": 3}, "cluster.json is not a cluster: 'int' object is not iterable"),
        ({"measured_mesh": "gpu=8"}, "measured and measured_mesh go together"),
    ],
)
def test_bad_cluster_files_say_what_is_wrong(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "cluster.json"
    Cluster(1, 8).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(AutoparError, match=message):
        Cluster.load(path)


def test_measured_cluster() -> None:
    measured = MachineProfile(DEVICE, (LinkProfile(1e-5, 1e9), LinkProfile(1e-6, 1e10)), "here")
    cluster = Cluster.from_mesh(Mesh.parse("dp=2,tp=2"), measured)
    assert cluster.profile is measured
    assert cluster.memory_bytes == 1024
    (link,) = cluster.with_mesh(Mesh.of(4)).profile.links
    assert (link.alpha_s, link.lanes) == (1e-5, 2)


def test_a_profile_of_as_many_ranks_is_regrouped(tmp_path: Path) -> None:
    """Its links tell how many ranks were measured; a file is read."""
    links = LinkProfile(1e-5, 1e9, group_size=2), LinkProfile(1e-6, 1e10, group_size=4)
    MachineProfile(DEVICE, links, "here").save(tmp_path / "profile.json")
    cluster = Cluster.from_mesh(Mesh.parse("dp=8"), tmp_path / "profile.json")
    assert cluster.profile.links == Cluster.from_mesh(Mesh.of((2, 4)), MachineProfile(DEVICE, links)).with_mesh(Mesh.of(8)).profile.links
    assert Cluster.from_mesh(Mesh.parse("tp=4"), MachineProfile(DEVICE, links[:1])).profile.links == links[:1], "of more ranks"
    with pytest.raises(MeshError, match=r"has 2 links, but mesh \(dp=16\) has 1 axis; .* measure this mesh with `autopar profile --mesh`"):
        Cluster.from_mesh(Mesh.parse("dp=16"), tmp_path / "profile.json")


def test_one_rank_tells_nothing_of_links() -> None:
    alone = MachineProfile(DEVICE, (LinkProfile(0.0, 1e12, group_size=1),), "here")
    assert Cluster.from_mesh(Mesh.of(1), alone).profile is alone
    with pytest.raises(MeshError, match=r"axis d0 has 2 ranks, but profile of 'here' was measured on one.*autopar profile --mesh 2"):
        Cluster.from_mesh(Mesh.of(2), alone)


@pytest.mark.parametrize("name, overlap", [("h100", 0.81), ("h200", 0.81), ("a100-80gb", 0.87), ("b200", 0.87)])
def test_links_hide_what_their_device_lets_them(name: str, overlap: float) -> None:
    """Inside a node and between nodes."""
    links = Cluster(2, 8, name).with_mesh(Mesh(("node", "gpu"), (2, 8))).profile.links
    assert [link.overlap for link in links] == [overlap, overlap]
