"""Formulas of collectives against figures worked out by hand, and what measurements do to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost.cluster import Cluster, named_link
from autopar.cost.collectives import are_no_slower, collective_time_s, send_time_s
from autopar.cost.machine import KINDS, LinkProfile
from autopar.mesh import Mesh

MIB = 2**20


@pytest.mark.parametrize("gb_per_s, expected_ms", [(50, 2.34881024), (900, 0.13048946)])
def test_ring_all_reduce_of_64_mib_on_8_ranks(gb_per_s: float, expected_ms: float) -> None:
    link = LinkProfile(alpha_s=0.0, bandwidth=gb_per_s * 1e9)
    time_s = collective_time_s("all_reduce", 64 * MIB, 8, link)
    assert float(time_s) * 1e3 == pytest.approx(expected_ms, rel=1e-6)  # 2 * 7/8 * 67108864 / B


def test_gradient_of_2_gb_on_8_ranks() -> None:
    time_s = collective_time_s("all_reduce", 2e9, 8, LinkProfile(alpha_s=0.0, bandwidth=900e9))
    assert float(time_s) * 1e3 == pytest.approx(3.9, abs=0.02)  # 2 * 7/8 * 2e9 / 900e9


@pytest.mark.parametrize(
    "kind, steps, passing",
    [("all_gather", 3, 0.75), ("reduce_scatter", 3, 0.75), ("all_to_all", 3, 0.75), ("broadcast", 3, 1.0)],
)
def test_alpha_and_beta_of_four_ranks(kind: str, steps: float, passing: float) -> None:
    link = LinkProfile(alpha_s=1e-6, bandwidth=1e9, base_s=5e-6)
    expected_s = 5e-6 + steps * 1e-6 + passing * 8e6 / 1e9
    assert float(collective_time_s(kind, 8e6, 4, link)) == pytest.approx(expected_s)


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    link = LinkProfile(alpha_s=1e-6, bandwidth=1e9)
    parts = sum(float(collective_time_s(kind, 1e9, 4, link)) for kind in ("reduce_scatter", "all_gather"))
    assert float(collective_time_s("all_reduce", 1e9, 4, link)) == pytest.approx(parts)


def test_small_all_reduce_on_many_ranks_takes_the_tree() -> None:
    link = LinkProfile(alpha_s=1e-6, bandwidth=1e9)
    assert float(collective_time_s("all_reduce", 4, 1024, link)) == pytest.approx(20e-6, rel=1e-2)


def test_one_rank_takes_no_time() -> None:
    for kind in KINDS:
        assert collective_time_s(kind, np.array([1.0, 1e9]), 1, named_link("nvlink4")).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["nvlink3", "ib-200"])
def test_arrays_give_what_numbers_give(kind: str, name: str) -> None:
    link, sizes = named_link(name), np.logspace(0, 10, 7)
    whole = collective_time_s(kind, sizes, 4, link)
    assert whole.shape == sizes.shape
    assert whole.tolist() == pytest.approx([float(collective_time_s(kind, size, 4, link)) for size in sizes])


def measured_link() -> LinkProfile:
    rows = {"all_gather": ((1e3, 1e-3), (1e5, 4e-3), (1e7, 9e-3))}
    return LinkProfile(alpha_s=1e-5, bandwidth=1e9, measured=rows, group_size=4)


def test_measured_points_are_met_and_joined_in_logarithms() -> None:
    times = collective_time_s("all_gather", np.array([1e3, 1e4, 1e5, 1e7]), 4, measured_link())
    assert times.tolist() == pytest.approx([1e-3, 2e-3, 4e-3, 9e-3])


def test_other_group_sizes_scale_by_the_formula() -> None:
    plain, measured = LinkProfile(alpha_s=1e-5, bandwidth=1e9), measured_link()
    ratio = float(collective_time_s("all_gather", 1e5, 8, plain) / collective_time_s("all_gather", 1e5, 4, plain))
    assert float(collective_time_s("all_gather", 1e5, 8, measured)) == pytest.approx(4e-3 * ratio)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_message_takes_longer_than_a_larger_one(size: int) -> None:
    """A row that was disturbed, and a row of one group size that a smaller group does not have: 1 MiB on nvlink3 took 42 us, 4 MiB 33."""
    disturbed = LinkProfile(1e-6, 1e9, measured={"all_reduce": ((1e3, 4e-5), (1e4, 9e-5), (1e5, 7e-5), (1e6, 3e-3))}, group_size=4)
    num_bytes = np.logspace(2, 9, 200)
    for link in (disturbed, *(named_link(name) for name in ("nvlink3", "nvlink4", "gloo"))):
        for kind in KINDS:
            assert np.all(np.diff(collective_time_s(kind, num_bytes, size, link)) >= -1e-12), (link.source, kind)


def test_outside_the_measured_range_the_formula_goes_on_without_a_jump() -> None:
    link, plain = measured_link(), LinkProfile(alpha_s=1e-5, bandwidth=1e9)
    inside, outside = collective_time_s("all_gather", np.array([1e7, 1.0001e7]), 4, link)
    assert float(outside) == pytest.approx(float(inside), rel=1e-3)
    far = float(collective_time_s("all_gather", 1e9, 4, link))
    model = [float(collective_time_s("all_gather", size, 4, plain)) for size in (1e9, 1e7)]
    assert far == pytest.approx(9e-3 * model[0] / model[1])


def test_a_kind_that_was_not_measured_shares_the_losses_of_all_reduce_but_not_its_gains() -> None:
    slow = LinkProfile(1e-6, 1e9, measured={"all_reduce": ((1e6, 1.0),)}, group_size=4)
    fast = LinkProfile(1e-6, 1e9, measured={"all_reduce": ((1e6, 1e-9),)}, group_size=4)
    plain = LinkProfile(1e-6, 1e9)
    expected = float(collective_time_s("all_gather", 1e6, 4, plain))
    assert float(collective_time_s("all_gather", 1e6, 4, fast)) == pytest.approx(expected)
    losses = 1.0 / float(collective_time_s("all_reduce", 1e6, 4, plain))
    assert float(collective_time_s("all_gather", 1e6, 4, slow)) == pytest.approx(expected * losses)


def test_lanes_speed_up_rings_but_not_pairs() -> None:
    one, eight = LinkProfile(0.0, 24e9), LinkProfile(0.0, 24e9, lanes=8.0)
    ratios = {
        kind: float(collective_time_s(kind, 1e9, 16, one) / collective_time_s(kind, 1e9, 16, eight)) for kind in KINDS
    }
    assert ratios == {kind: pytest.approx(1.0 if kind in ("all_to_all", "send") else 8.0) for kind in KINDS}


@pytest.mark.parametrize(
    "kind, latency_us, sent_us",
    [
        ("all_gather", 3 * 10 + 4 * 1, 7),  # 8 steps a ring less one: 3 between nodes, 4 inside
        ("reduce_scatter", 3 * 10 + 4 * 1, 7),
        ("broadcast", 3 * 10 + 4 * 1, 8),
        ("all_reduce", 2 * (2 * 10 + 1), 16),  # a tree of 4 nodes, of 2 ranks each
        ("all_to_all", 6 * 10 + 1, 6 * 2 + 1 / 8),  # to 6 ranks out of the node by its own port, to 1 inside
    ],
)
def test_nodes_of_several_ranks(kind: str, latency_us: float, sent_us: float) -> None:
    """8 KB on 4 nodes of 2 ranks: ports of 0.5 GB/s, which rings use in pairs; 8 GB/s inside."""
    link = LinkProfile(1e-5, 0.5e9, lanes=2.0, inside=LinkProfile(1e-6, 8e9), ranks_inside=2)
    assert float(collective_time_s(kind, 8e3, 8, link)) * 1e6 == pytest.approx(latency_us + sent_us)


def test_a_message_has_what_the_silent_ranks_of_a_node_leave() -> None:
    """Of two ranks next to each other one sends to the next node; no more than both had, and no more than was gained by being alone. Where
    each rank is in a group of its own, all send."""
    link = LinkProfile(1e-5, 0.5e9, measured={"send": ((1e6, 4e-3), (1e8, 4e-1))}, group_size=2)
    times = [
        float(send_time_s(1e8, replace(link, alone=alone, inside=LinkProfile(1e-6, 8e9), ranks_inside=ranks)))
        for alone, ranks in ((1.0, 2), (1.5, 2), (4.0, 2), (4.0, 4))
    ]
    assert times == pytest.approx([0.4, 0.4 / 1.5, 0.2, 0.1], rel=1e-3)
    assert float(send_time_s(1e8, replace(link, alone=4.0))) == pytest.approx(0.4)
    shared = Cluster(4, 8, inter="opa-100")
    pairs, all_at_once = (shared.with_mesh(Mesh.parse(mesh)).profile.links[0] for mesh in ("pp=8,tp=4", "pp=4,tp=8"))
    assert pairs.hop(0) == pairs.inside
    assert float(send_time_s(1e9, all_at_once) / send_time_s(1e9, pairs.hop(1))) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    "num_bytes, expected_us",
    [
        (1e3, 1 + 3 * 1 + 3 / 4 * 2),  # quick to begin, half the bandwidth
        (5e5, 10 + 3 * 2 + 3 / 4 * 5e2 / 0.9),
        (1e8, 8 + 3 * 30 + 3 / 4 * 1e5),  # slow to begin, all of it
    ],
)
def test_the_best_protocol_for_a_message(num_bytes: float, expected_us: float) -> None:
    link = LinkProfile(3e-5, 1e9, 8e-6, protocols=((2e-6, 1e-5, 0.9), (1e-6, 1e-6, 0.5)))
    assert float(collective_time_s("all_gather", num_bytes, 4, link)) * 1e6 == pytest.approx(expected_us)


def test_protocols_hold_inside_of_nodes_too() -> None:
    inside = LinkProfile(3e-6, 8e9, protocols=((1e-6, 0.0, 0.5),))
    link = LinkProfile(3e-5, 1e9, inside=inside, ranks_inside=2, protocols=((1e-5, 0.0, 0.5),))
    assert float(collective_time_s("all_gather", 8.0, 8, link)) == pytest.approx(3e-5 + 4e-6, rel=1e-3)


def test_a_port_of_jean_zay_passes_what_was_measured() -> None:
    """40.5 Gb/s of an all-reduce of 4 GB on 4 nodes (bigscience-workshop/bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt),
    whose rings take one port of each, as those of groups with a rank on each node do; prices of larger groups have all ports busy."""
    link = Cluster(4, 1, inter="opa-100").with_mesh(Mesh.of(4)).profile.links[0]
    assert 8e-9 * 2 * 3 / 4 * 4e9 / float(collective_time_s("all_reduce", 4e9, 4, link)) == pytest.approx(40.5, rel=0.01)


def test_published_bus_bandwidth_of_an_a100_node_is_met() -> None:
    """The shipped nccl-tests run on 8 A100 has 234.6 GB/s for 8 GiB (stas00/ml-engineering, network)."""
    num_bytes = 8 * 2**30
    time_s = float(collective_time_s("all_reduce", num_bytes, 8, named_link("nvlink3")))
    assert 2 * 7 / 8 * num_bytes / time_s / 1e9 == pytest.approx(234.6, rel=2e-3)


def test_links_that_are_no_slower() -> None:
    """At messages that take time; a faster link that begins later is no faster."""
    fast, slow = LinkProfile(alpha_s=1e-6, bandwidth=2e9), LinkProfile(alpha_s=1e-6, bandwidth=1e9)
    assert are_no_slower((fast, slow), (slow, slow), (4, 2))
    assert not are_no_slower((slow, slow), (fast, slow), (4, 2))
    assert are_no_slower((replace(fast, alpha_s=2e-6),), (slow,), (2,))
    assert not are_no_slower((replace(fast, alpha_s=2e-3),), (slow,), (2,))
    assert not are_no_slower((replace(fast, overlap=slow.overlap / 2),), (slow,), (2,))
    assert not are_no_slower((replace(fast, crowded_s=1e-3),), (slow,), (2,))


@pytest.mark.parametrize("device", ["v100", "a100-80gb", "h100", "h200", "b200", "l4"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "send"])
def test_more_ranks_of_whole_nodes_are_never_faster(kind: str, device: str) -> None:
    """Also where small messages inside of a node were measured to take longer than the formula says."""
    each = np.logspace(3, 10, 15)
    times = []
    for nodes in (1, 2, 4):
        link = Cluster(nodes, 8, device).with_mesh(Mesh.of(8 * nodes)).profile.links[0]
        num_bytes = each * nodes if kind == "all_to_all" else each
        times.append(collective_time_s(kind, num_bytes, 8 * nodes, link))
    assert np.all(times[1] >= times[0] * (1 - 1e-12))
    assert np.all(times[2] >= times[1] * (1 - 1e-12))


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("device", ["v100", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "l4"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "send"])
def test_ranks_of_several_nodes_are_never_faster_than_of_one(kind: str, device: str, nodes: int) -> None:
    """Nor do small messages that were measured inside of a node get faster because a network is between."""
    links = [Cluster(count, 8 // count, device).with_mesh(Mesh.of(8)).profile.links[0] for count in (1, nodes)]
    of_one, of_more = (collective_time_s(kind, np.logspace(0, 10, 21), 8, link) for link in links)
    assert np.all(of_more >= of_one * (1 - 1e-12))


@pytest.mark.parametrize(
    "device, ranks, gb_per_s", [("h200", 4, 363), ("h200", 6, 436), ("h200", 8, 473), ("b200", 4, 673), ("b200", 6, 778), ("b200", 8, 838)]
)
def test_switches_reduce_for_as_many_ranks_as_were_measured(device: str, ranks: int, gb_per_s: float) -> None:
    """8 GiB: stas00/ml-engineering, network/README.md, SHARP."""
    (link,) = Cluster(1, ranks, device).profile.links
    time_s = float(collective_time_s("all_reduce", 2**33, ranks, link))
    assert 2 * (ranks - 1) / ranks * 2**33 / time_s / 1e9 == pytest.approx(gb_per_s, rel=0.06)


@pytest.mark.parametrize("num_bytes, time_us", [(2**20, 378), (2**22, 430), (2**24, 505), (2**28, 2270), (2**30, 5747)])
def test_all_reduce_over_efa(num_bytes: int, time_us: float) -> None:
    """On 4 nodes of 8 B200: stas00/ml-engineering, network/README.md."""
    (link,) = Cluster(4, 8, "b200", inter="efa-400").with_mesh(Mesh.of(32)).profile.links
    assert float(collective_time_s("all_reduce", num_bytes, 32, link)) * 1e6 == pytest.approx(time_us, rel=0.21)
