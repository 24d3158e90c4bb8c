"""What a mixture of experts takes in predictions of published runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.test_reference import ROW, load

MOE = {"experts": 8, "topk": 2, "moe_ffn": 512, "shared_experts": 0}


@pytest.mark.slow
def test_tokens_are_sorted_and_sent_to_their_experts(reference: Any, experts: Any, tmp_path: Path) -> None:
    """By hand: 2 x 512 tokens of 256 in bfloat16 to 2 experts each, of 8 over 2 ranks."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": 2, "sp": False, "recompute": "none", "global_batch": 32}
    record = load(tmp_path, ROW | {"model": ROW["model"] | {"moe": MOE}, "config": config})
    stack = reference.stack_of(record)
    staged = reference._staged(reference._Key.of(record, stack, "none"))
    found = experts.Experts.of(record, stack, staged)
    machine = staged.decision.prices.pricer.machine
    num_bytes = 2 * 512 * 2 * 256 * 2
    sort_s = experts.TRAVERSALS * num_bytes / (machine.device.memory_bandwidth * stack.pointwise_kept)
    exchange_s = found.routing_s - sort_s - experts.HOST_WAIT_S
    assert exchange_s == pytest.approx(2 * float(experts.collective_time_s("all_to_all", num_bytes, 2, machine.links[0])))
    attention, expert = 256 * (2 * 256 + 2 * 256 * 2 // 4), 3 * 256 * 512
    assert found.held == pytest.approx((attention + 4 * expert) / (attention + 2 * expert))
    among = (3 / 4) / (7 / 8)  # four of the eight ranks hold the same four experts, by the links of one node
    assert found.reduced == pytest.approx((attention + 4 * expert * among) / (attention + 2 * expert))


def test_experts_are_reduced_among_fewer_ranks_by_fewer_ports(reference: Any, experts: Any, tmp_path: Path) -> None:
    """64 ranks on 8 nodes of 8 with experts shared by 8: 8 ranks hold the same, one on each node. They pass 7/8 of the bytes by one port,
    where all 64 pass 63/64 by eight. Two ranks of a node with the same: 1/2 over 7/8, by what connects it."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 64, "ep": 8, "global_batch": 1024}
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64}, "config": config})
    link = experts.links_of(record)[1]
    assert link.lanes == 8
    assert experts._among_alike(record, link) == pytest.approx(8 * (7 / 8) / (63 / 64))
    small = load(tmp_path, ROW | {"config": config | {"dp": 8, "ep": 4}})
    assert experts._among_alike(small, experts.links_of(small)[1]) == pytest.approx((1 / 2) / (7 / 8))


def test_tokens_go_to_a_node_once(experts: Any) -> None:
    """By counting: of all ways to choose two of three experts' nodes, how many different ones."""
    assert experts._to_nodes(2, 3) == pytest.approx(sum(len({a, b}) for a in range(3) for b in range(3)) / 9)
    assert experts._to_nodes(8, 1) == 1


def test_only_deepep_sends_tokens_once(reference: Any, experts: Any, tmp_path: Path) -> None:
    """64 ranks on 8 nodes share 64 experts, of which a token has 8 on 5.3 nodes."""
    model = ROW["model"] | {"moe": MOE | {"experts": 64, "topk": 8}}
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 64, "ep": 64, "sp": False, "recompute": "none", "global_batch": 1024}
    row = ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64}, "model": model, "config": config}
    plain, once = (load(tmp_path, row | {"note": note}) for note in ("", "TE + DeepEP"))
    stack = reference.stack_of(plain)
    staged = reference._staged(reference._Key.of(plain, stack, "none"))
    link, num_bytes = staged.decision.prices.pricer.machine.links[0], 2 * 512 * 8 * 256 * 2
    shares = 1.0, experts._to_nodes(8, 8) / 8
    exchange_s = [2 * float(experts.collective_time_s("all_to_all", share * num_bytes, 64, link)) for share in shares]
    found = [experts.Experts.of(record, stack, staged).routing_s for record in (plain, once)]
    assert found[0] - found[1] == pytest.approx(exchange_s[0] - exchange_s[1])
    assert found[0] > found[1]


def test_ranks_of_a_node_that_share_experts(experts: Any, tmp_path: Path) -> None:
    """Tensor parallelism over 2 of 8: four of a node, unless there are more shares than data-parallel ranks."""
    config = ROW["config"] | {"pp": 1, "dp": 32, "global_batch": 1024}
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64}, "config": config})
    link = experts.links_of(record)[1]
    assert experts._in_node(replace(record, ep=32), link) == 4
    assert experts._in_node(replace(record, ep=64), link) == 8


def test_products_of_experts_apart_are_slower(reference: Any, experts: Any, tmp_path: Path) -> None:
    """By hand: 2 x 512 tokens to 2 experts each, of 8 over 2 ranks: products of 512 tokens for each of four experts, two of which (gate and
    up) are one."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": 2, "sp": False, "recompute": "none", "global_batch": 32}
    record = load(tmp_path, ROW | {"model": ROW["model"] | {"moe": MOE}, "config": config})
    device = reference.device_of(record, reference.stack_of(record))
    each = 2.0 * 512 * 256 * 512
    rate = {flops: float(device.matmul_flops_per_s(flops, torch.bfloat16)) for flops in (each, 2 * each, 4 * each)}
    by_hand = 4 * 2 * each / rate[2 * each] + 4 * each / rate[each] - 3 * 4 * each / rate[4 * each]
    assert experts._apart_s(record, device) == pytest.approx(by_hand)
    assert by_hand > 0
