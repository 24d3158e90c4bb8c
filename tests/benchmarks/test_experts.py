"""What a mixture of experts takes in predictions of published runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.benchmarks.test_reference import ROW, depth, load

MOE = {"experts": 8, "topk": 2, "moe_ffn": 512, "shared_experts": 0}


@pytest.mark.slow
def test_tokens_are_sorted_and_sent_to_their_experts(reference: Any, few_layers: Any, experts: Any, tmp_path: Path) -> None:
    """By hand: 2 x 512 tokens of 256 in bfloat16 to 2 experts each, of 8 over 2 ranks. Each is read, and two rows of it are written, sorted
    by rank; these are read and written where they arrive; likewise back. By the rates of a copy, whatever is fused."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": 2, "sp": False, "recompute": "none", "global_batch": 32}
    record = load(tmp_path, ROW | {"model": ROW["model"] | {"moe": MOE}, "config": config})
    stack = reference.stack_of(record)
    staged = few_layers.staged(few_layers.Key.of(record, stack, "none"))
    found = experts.Experts.of(record, stack, staged)
    machine = staged.decision.prices.pricer.machine
    num_bytes = 2 * 512 * 256 * 2
    exchange_s = float(experts.collective_time_s("all_to_all", 2 * num_bytes, 2, machine.links[0]))
    back_s = exchange_s + 7 * num_bytes / experts.bare_device(record).memory_bandwidth
    assert found.routing_s == pytest.approx((back_s + experts.HOST_WAIT_S, back_s))
    attention, expert = 256 * (2 * 256 + 2 * 256 * 2 // 4), 3 * 256 * 512
    assert found.held == pytest.approx((attention + 4 * expert) / (attention + 2 * expert))
    among = (3 / 4) / (7 / 8)  # four of the eight ranks hold the same four experts, by the links of one node
    assert found.reduced == pytest.approx((attention + 4 * expert * among) / (attention + 2 * expert))
    assert found.sharded == pytest.approx((attention + 4 * expert * 8 / 4) / (attention + 2 * expert))


def test_experts_are_reduced_among_fewer_ranks_by_fewer_ports(experts: Any, tmp_path: Path) -> None:
    """64 ranks on 8 nodes of 8 with experts shared by 8: 8 ranks hold the same, one on each node. They pass 7/8 of the bytes by one port,
    where all 64 pass 63/64 by eight. Two ranks of a node with the same: 1/2 over 7/8, by what connects it."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 64, "ep": 8, "global_batch": 1024}
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64}, "config": config})
    link = experts.links_of(record)[1]
    assert link.lanes == 8
    assert experts._among_alike(record, link) == pytest.approx(8 * (7 / 8) / (63 / 64))
    small = load(tmp_path, ROW | {"config": config | {"dp": 8, "ep": 4}})
    assert experts._among_alike(small, experts.links_of(small)[1]) == pytest.approx((1 / 2) / (7 / 8))


def reached(experts: Any, tmp_path: Path, of: int, topk: int, holders: int, note: str = "") -> float:
    model = ROW["model"] | {"moe": MOE | {"experts": of, "topk": topk}}
    return float(experts._reached(load(tmp_path, ROW | {"model": model, "note": note}), holders))


def test_where_tokens_go_at_random(experts: Any, tmp_path: Path) -> None:
    """By counting: of all ways to have 3 of 6 experts, how many of 3, of 2 and of 6 holders are among them."""
    for holders in (3, 2, 6):
        ways = [{i // (6 // holders) for i in way} for way in combinations(range(6), 3)]
        assert reached(experts, tmp_path, 6, 3, holders) == pytest.approx(sum(map(len, ways)) / len(ways))
    assert reached(experts, tmp_path, 6, 3, 1) == 1
    assert reached(experts, tmp_path, 6, 6, 3) == 3
    assert 2 < reached(experts, tmp_path, 12, 3, 8) < 3, "a holder may have one more than others"


@pytest.mark.parametrize("of, topk, holders", [(12, 2, 4), (12, 5, 4), (256, 8, 8), (256, 8, 64), (8, 3, 4), (6, 5, 2), (10, 4, 2)])
def test_where_tokens_go_in_turn(experts: Any, tmp_path: Path, of: int, topk: int, holders: int) -> None:
    """By going through tokens: the first has experts 0 to topk - 1, the next one those behind them, and so on, round and round."""
    given = iter(i % of for i in range(of * topk))
    tokens = [{next(given) // (of // holders) for _ in range(topk)} for _ in range(of)]
    found = reached(experts, tmp_path, of, topk, holders, "TE + DeepEP, fake balanced gate")
    assert found == pytest.approx(sum(map(len, tokens)) / of)


@pytest.mark.parametrize("ep, copies, ranks", [(64, 2.0, 12.0), (8, 2.0, 2.0)], ids=["to each node", "to each rank of a node"])
def test_deepep_sends_a_token_once(
    reference: Any, few_layers: Any, experts: Any, tmp_path: Path, ep: int, copies: float, ranks: float
) -> None:
    """64 ranks on 8 nodes: of 64 experts in turn a token has 12, which are on two nodes if each rank has one, and on two ranks if those of
    a node share them. Where it arrives it is copied, and sorted by expert."""
    model = ROW["model"] | {"moe": MOE | {"experts": 64, "topk": 12}}
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 64, "ep": ep, "sp": False, "recompute": "none", "global_batch": 1024}
    row = ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64}, "model": model, "config": config}
    plain, once = (load(tmp_path, row | {"note": note}) for note in ("fake balanced gate", "DeepEP, fake balanced gate"))
    stack = reference.stack_of(plain)
    staged = few_layers.staged(few_layers.Key.of(plain, stack, "none"))
    link, num_bytes = staged.decision.prices.pricer.machine.links[0], 2 * 512 * 256 * 2
    link = link if ep == 64 else link.inside
    copied = experts.bare_device(plain).memory_bandwidth

    def back_s(rows: float, traversals: float) -> Any:
        return float(experts.collective_time_s("all_to_all", rows * num_bytes, ep, link)) + traversals * num_bytes / copied

    assert experts.Experts.of(plain, stack, staged).routing_s[1] == pytest.approx(back_s(12, 1 + 3 * 12))
    assert experts.Experts.of(once, stack, staged).routing_s[1] == pytest.approx(back_s(copies, ranks + 12))


def test_experts_that_no_run_can_have(reference: Any, tmp_path: Path) -> None:
    def why(topk: int, ep: int, note: str = "") -> str:
        model = ROW["model"] | {"moe": MOE | {"topk": topk}}
        with pytest.raises(ValueError, match="of 8 experts") as caught:
            reference.predict(load(tmp_path, ROW | {"model": model, "config": ROW["config"] | {"ep": ep}, "note": note}))
        return str(caught.value)

    assert why(0, 1) == "of 8 experts 0 take a token (it should be 1 to 8), and 1 ranks share them (likewise)"
    assert why(9, 1).startswith("of 8 experts 9 take")
    assert why(2, 16, "DeepEP, fake balanced gate").endswith("and 16 ranks share them (likewise)")


def test_ranks_of_a_node_that_share_experts(experts: Any, tmp_path: Path) -> None:
    """Tensor parallelism over 2 of 8: four of a node, unless there are more shares than data-parallel ranks."""
    config = ROW["config"] | {"pp": 1, "dp": 32, "global_batch": 1024}
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64}, "config": config})
    link = experts.links_of(record)[1]
    assert experts._in_node(replace(record, ep=32), link) == 4
    assert experts._in_node(replace(record, ep=64), link) == 8


@pytest.mark.parametrize(
    "tp, ep, each, one",
    [(1, 2, (512, 512), 1024), (2, 2, (512, 256), 512), (2, 8, (1024, 512), 512)],
    ids=["whole", "split as the rest", "on more ranks than share data"],
)
def test_products_of_experts_apart(
    tp: int, ep: int, each: tuple[int, int], one: int, reference: Any, experts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By hand: 2 x 512 tokens to 2 experts of 512 each, of 8, beside an MLP of 1024: rows and width of each, width of the one."""
    config = ROW["config"] | {"tp": tp, "pp": 1, "dp": 8 // tp, "ep": ep, "sp": False, "recompute": "none", "global_batch": 32}
    record = load(tmp_path, ROW | {"model": ROW["model"] | {"moe": MOE}, "config": config})
    device = reference.device_of(record, reference.stack_of(record))

    def product_s(m: int, n: int, k: int, times: int) -> float:
        rate = float(device.matmul_flops_per_s(2.0 * m * n * k, torch.bfloat16, (m, n, k), backward=times > 1))
        moving_s = 2 * (m * n + n * k + m * k) / device.memory_bandwidth
        taken_s: float = times * (device.launch_overhead_s + max(2.0 * m * n * k / rate, moving_s))
        return taken_s

    rows, width = each
    priced, sides = experts._product_s, set[tuple[float, ...]]()

    def seen_s(device: Any, *of: float, gradients: int) -> float:
        sides.add(of)
        return float(priced(device, *of, gradients=gradients))

    monkeypatch.setattr(experts, "_product_s", seen_s)
    for times, found_s in zip((1, 2), experts._apart_s(record, device), strict=True):
        assert sides == {(rows, 2 * width, 256), (rows, 256, width), (1024, one, 256), (1024, 256, one)}
        apart_s = product_s(rows, 2 * width, 256, times) + product_s(rows, 256, width, times)
        whole_s = 2 * product_s(1024, one, 256, times) + product_s(1024, 256, one, times)
        assert found_s == pytest.approx(8 / ep * apart_s - whole_s)
        assert (found_s > 0) == (ep == 2), "a rank that has one has products as large, gate and up in one"


ROWS, WIDTH, APART = 64, 48, 4
"""Of experts, and how many there are."""


LIKE = dict.fromkeys(("mul", "add", "clamp", "ge", "le", "where"), "broadcast")
LIKE |= {"_to_copy": "cast", "cat": "copy", "sum": "copy", "logical_and_": "copy"}


class Moved(TorchDispatchMode):
    """Bytes that ops read and write, views apart, over those of ``ROWS`` of ``WIDTH`` in 16 bits; by what they are like."""

    def __init__(self) -> None:
        super().__init__()
        self.often: dict[str, float] = {}
        self.launches = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not op.is_view and out.numel() > 1:
            self.launches += 1
            like = LIKE[op.overloadpacket.__name__]
            num_bytes = sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
            self.often[like] = self.often.get(like, 0.0) + num_bytes / (2 * ROWS * WIDTH)
        return out


def rand(*sizes: int) -> torch.Tensor:
    return torch.rand(sizes, dtype=torch.bfloat16, requires_grad=True)


def adds(x: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows + bias for rows, bias in zip(x.split(ROWS // APART), biases, strict=True)])


def clamps(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.cat((gate.clamp(max=7.0), up.clamp(-7.0, 7.0)), -1)


def weighs(x: torch.Tensor, by: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
    parts = zip(x.split(ROWS // APART), biases, by.split(ROWS // APART), strict=True)
    return torch.cat([rows + bias * share for rows, bias, share in parts]).to(x.dtype)


@pytest.mark.parametrize("wide, computes", [(2, adds), (2, clamps), (1, weighs)], ids=["adds", "clamps", "weighs"])
def test_ops_on_the_rows_of_experts_move_what_torch_moves(experts: Any, wide: int, computes: Callable[..., torch.Tensor]) -> None:
    """Up to what biases and probabilities have themselves, which is little where rows are many and wide."""
    biases = [rand(wide * WIDTH) for _ in range(APART)]
    by = [torch.rand(ROWS, 1, requires_grad=True)] if computes is weighs else []
    given = (rand(ROWS, wide * WIDTH), *by, *(biases if computes is not clamps else []))
    with Moved() as forward:
        out = computes(*given)
    gradient = torch.ones_like(out)
    with Moved() as backward:
        out.backward(gradient)
    table = experts.OPS[computes.__name__]
    for moved, often in ((forward, table.forward), (backward, table.backward)):
        assert moved.often == pytest.approx(often, abs=0.3)
        assert moved.often.keys() == often.keys()
    for moved, launches in ((forward, table.launches[0]), (backward, table.launches[1])):
        assert 0 <= moved.launches - APART * launches < 2 * APART, "and a few for all of them together"


def test_rows_of_experts_by_the_rates_of_their_ops(experts: Any, tmp_path: Path) -> None:
    """By hand: 1000 rows of 512 in bfloat16 of 4 experts, as fast as an H100 does each, and launches of each expert."""
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": "H100-80GB"}, "model": ROW["model"] | {"moe": MOE}})
    device = experts.bare_device(record)
    op = experts.OpByOp("expert_ffn", {"broadcast": 3, "copy": 2}, {"cast": 5}, (1, 2))
    forward_s = 1000 * 512 * 2 * (3 / device.streams["broadcast"][0] + 2 / device.memory_bandwidth) + 4 * device.launch_overhead_s
    backward_s = 1000 * 512 * 2 * 5 / device.streams["cast"][1] + 8 * device.launch_overhead_s
    assert op.times_s(record, 1000, 4) == pytest.approx((forward_s, backward_s))


def test_only_experts_with_biases_add_them(reference: Any, few_layers: Any, depths: Any, experts: Any, tmp_path: Path) -> None:
    """Those of GPT-OSS; full recomputation computes them once more."""
    model = ROW["model"] | {"moe": MOE}
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": 2, "sp": False, "recompute": "none", "global_batch": 32}
    plain, biased = (load(tmp_path, ROW | {"config": config, "model": model | {"family": name}}) for name in ("qwen3-moe", "gpt-oss"))
    stack = reference.stack_of(biased)
    assert stack.biases_experts == ("clamps", "weighs")
    staged = few_layers.staged(few_layers.Key.of(plain, stack, "none"))
    assert experts.Experts.of(plain, stack, staged).biased_s == (0, 0)
    found = depths.Depth(biased, stack, staged)
    rows = 2 * 512 * 2
    times = [experts.OPS[name].times_s(biased, rows, 4) for name in stack.biases_experts]
    assert found.experts.biased_s == pytest.approx(tuple(map(sum, zip(*times, strict=True))))
    assert experts.Experts.of(biased, replace(stack, biases_experts=()), staged).biased_s == (0, 0)

    (forward_s, backward_s), apart_s = found.experts.biased_s, found.experts.apart_s
    assert apart_s[1] > apart_s[0] > 0
    halves = [experts.Experts.of(replace(biased, dp=4, **{name: 2}), stack, staged).biased_s for name in ("cp", "tp")]
    launched_s = 4 * 2 * experts.bare_device(biased).launch_overhead_s
    assert [half[0] - launched_s for half in halves] == pytest.approx([(forward_s - launched_s) / 2] * 2), "of half the rows"
    (acts_s, _), (there_s, back_s) = times[0], found.experts.routing_s
    found.experts = replace(found.experts, sums_s=1e-3)
    again_s = {"none": 0.0, "selective": 0.0, "pointwise": acts_s, "full": apart_s[0] + forward_s + there_s}
    for recompute, more_s in again_s.items():
        before = [dict(row) for row in found.prices]
        found.part_experts(recompute)
        for row, was, layers in zip(found.prices, before, (1, 2, 1), strict=True):
            assert row["forward_s"] - was["forward_s"] == pytest.approx(layers * (apart_s[0] + forward_s))
            assert row["backward_s"] - was["backward_s"] == pytest.approx(layers * (apart_s[1] + backward_s + 1e-3 + more_s))

    none = depths.Depth(biased, stack, staged)
    found.recompute_whole(none)
    again_s = none.prices[1]["forward_s"] + 2 * (there_s + back_s)
    assert found.prices[1]["backward_s"] == pytest.approx(none.prices[1]["backward_s"] + again_s), "tokens go and come back"


def test_ranks_of_a_sequence_share_what_experts_take(reference: Any, few_layers: Any, depths: Any, experts: Any, tmp_path: Path) -> None:
    """Rows of stages are of all their tokens."""
    model = ROW["model"] | {"moe": MOE, "family": "gpt-oss"}
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 4, "cp": 2, "ep": 2, "sp": False, "recompute": "none", "global_batch": 32}
    record = load(tmp_path, ROW | {"config": config, "model": model})
    found = depth(depths, few_layers, record, reference.stack_of(record))
    before = dict(found.prices[1])
    found.part_experts("none")
    own_s = found.experts.apart_s[0] + found.experts.biased_s[0]
    assert found.prices[1]["forward_s"] - before["forward_s"] == pytest.approx(2 * 2 * own_s), "two layers, two ranks"
    kept = found.memory[1]["kept"]
    found.keep_rows("none")
    rows = 2 * 512 * 2
    assert found.memory[1]["kept"] - kept == pytest.approx(2 * rows * 2 * (256 + 2 * 512)), "what experts take, and twice what they clamp"
    kept = found.memory[1]["kept"]
    found.keep_rows("pointwise")
    assert found.memory[1]["kept"] - kept == pytest.approx(2 * rows * 2 * 256), "they clamp anew"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_clamps_leave_for_the_backward(reference: Any, experts: Any, tmp_path: Path, recompute: str) -> None:
    """Gate and up once more, unless layers are computed again. Full recomputation does so once more, and looks through windows again."""
    model = ROW["model"] | {"moe": MOE, "seq": 1024}
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": 2, "sp": False, "recompute": recompute, "global_batch": 32}
    peaks = []
    for family in ("qwen3-moe", "gpt-oss"):
        record = replace(load(tmp_path, ROW | {"config": config, "model": model | {"family": family}}), precision="bf16")
        dims = replace(record.dims, head=64)  # those of Qwen3 are wider
        stack = replace(reference.stack_of(record), keeps="all", recomputes_whole=False)
        peaks.append(reference._predict(replace(record, dims=dims), stack, recompute).peak_memory_bytes)
    kept = 8 * (2 * 1024 * 2) * (2 * 512) * 2 if recompute != "full" else 0
    assert peaks[1] - peaks[0] == pytest.approx(reference.FRAGMENTATION * kept, abs=1)


def test_what_is_computed_again_has_windows_and_biases_too(
    reference: Any, depths: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ROW["model"] | {"moe": MOE, "family": "gpt-oss", "seq": 1024}
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": 2, "sp": False, "global_batch": 32}
    record = load(tmp_path, ROW | {"config": config, "model": model})
    stack, seen = replace(reference.stack_of(record), recomputes_whole=False), list[tuple[str, object]]()
    for name in ("look_through_windows", "part_experts"):
        monkeypatch.setattr(depths.Depth, name, lambda self, how="", again=False, name=name: seen.append((name, how or again)))
    for level in ("none", "selective", "full"):
        reference._predict(record, stack, level)
    of_level = [dict(seen[i : i + 2]) for i in range(0, len(seen), 2)]
    assert [each["look_through_windows"] for each in of_level] == [False, True, True]
    assert [each["part_experts"] for each in of_level] == ["none", "selective", "full"]


def test_experts_that_deepep_serves_are_on_all_ranks(reference: Any, tmp_path: Path) -> None:
    """Where nobody says on how many; without it on one."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 8, "ep": None, "sp": False, "global_batch": 32}
    row = ROW | {"model": ROW["model"] | {"moe": MOE | {"experts": 12}}, "config": config}
    served, plain, dense = (load(tmp_path, row | more) for more in ({"note": "TE + DeepEP"}, {}, {"model": ROW["model"], "note": "DeepEP"}))
    assert (served.usual_ep, plain.usual_ep, dense.usual_ep) == (4, 1, 1), "eight ranks cannot share 12 experts evenly"
    assert "; ep not stated: 4" in reference.predict(served).note
    stated = load(tmp_path, row | {"config": config | {"ep": 4}, "note": "TE + DeepEP"})
    assert reference.predict(stated).step_time_s == reference.predict(served).step_time_s
    assert "ep not stated" not in reference.predict(stated).note + reference.predict(dense).note
