"""What software does that autopar does otherwise, in predictions of published runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from tests.benchmarks.test_reference import ROW, depth, load, step_s

pytestmark = pytest.mark.slow

ALONE = ROW["config"] | {"dp": 8, "tp": 1, "pp": 1, "sp": False, "zero": 3, "global_batch": 16}
DEEPSEEK = {"family": "deepseek-v3", "hidden": 7168, "heads": 128, "kv_heads": 128, "ffn_hidden": 18432}


def test_a_stack_is_like_another_but_for_what_it_says(reference: Any) -> None:
    """Also where that one is like a third."""
    import stacks  # type: ignore[import-not-found]

    stated = json.loads(stacks.FILE.read_text())["stacks"]
    base, middle, last = (stacks._written(stated, name) for name in ("compiled-2024", "fsdp2-2024", "automodel-2025"))
    assert middle == base | {"copies": "shards"}
    assert {name: last[name] for name in ("copies", "gemm_efficiency", "attention")} == {
        "copies": "shards", "gemm_efficiency": base["gemm_efficiency"], "attention": "cudnn"
    }


def test_every_source_has_a_stack_and_every_stack_a_reason(reference: Any) -> None:
    import stacks

    data = json.loads(stacks.FILE.read_text())
    assert {rule["stack"] for rule in data["sources"]} <= data["stacks"].keys()
    assert {rule["stack"] for rule in data["others"]} <= data["stacks"].keys()
    assert data["others"][-1].keys() == {"stack"}, "the last holds for all"
    assert all(row["why"] for row in data["stacks"].values())
    levels = {level for row in data["stacks"].values() for level in row.get("recipes", {}).values()}
    assert levels <= reference.RECOMPUTE.keys()


def test_latent_attention_has_the_parameters_of_deepseek(few_layers: Any, tmp_path: Path) -> None:
    """As transformers builds it, and as they are counted; its queries and keys are as wide as what has a position and what has none."""
    model = ROW["model"] | DEEPSEEK | {"moe": {"experts": 256, "topk": 8, "moe_ffn": 2048, "shared_experts": 1, "attention": "MLA"}}
    dims = load(tmp_path, ROW | {"model": model, "config": ALONE}).dims
    with torch.device("meta"):
        own = few_layers.Decoder(dims).layers[0].attention
        theirs = DeepseekV3Attention(DeepseekV3Config(), 0)
    sizes = [sorted(p.numel() for p in module.parameters()) for module in (own, theirs)]
    assert sizes[0] == sizes[1]
    assert dims.attention_params == sum(sizes[0]) - 1536 - 512, "but for norms"
    plain = load(tmp_path, ROW | {"model": model | {"moe": model["moe"] | {"attention": None}}, "config": ALONE}).dims
    assert plain.attention_params == 4 * 7168 * 7168


def test_latent_attention_looks_back(few_layers: Any, tmp_path: Path) -> None:
    """What a token gives depends on it and on those before; and is what heads of keys give that are written out."""
    from decoder import LatentAttention  # type: ignore[import-not-found]
    from records import Latent  # type: ignore[import-not-found]

    torch.manual_seed(0)
    dims = replace(load(tmp_path, ROW).dims, hidden=32, heads=2)
    attention = LatentAttention(dims, Latent(q=12, kv=10, nope=6, rope=4, value=5)).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 7, 32, dtype=torch.double)
    found = attention(x)
    q = attention.q_up(attention.q_norm(attention.q_down(x))).view(1, 7, 2, 10)
    latent = attention.kv_down(x)
    kv = attention.kv_up(attention.kv_norm(latent[..., :10])).view(1, 7, 2, 11)
    heads = []
    for head in range(2):
        k = torch.cat((kv[:, :, head, :6], latent[..., 10:]), -1)
        scores = (q[:, :, head] @ k.mT / 10**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ kv[:, :, head, 6:])
    torch.testing.assert_close(found, attention.out(torch.cat(heads, -1)))


def test_norms_and_positions_op_by_op_give_the_same_and_move_more(
    reference: Any, depths: Any, few_layers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from decoder import Norm, rotated

    x = torch.randn(3, 16, dtype=torch.bfloat16)
    norm = Norm(16, centred=False, op_by_op=True).bfloat16()
    torch.nn.init.ones_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-6))
    torch.testing.assert_close(rotated(x), x)
    ops = [node.name for node in make_fx(rotated)(x).graph.nodes]
    assert [name for name in ops if name.startswith(("_to_copy", "mul"))] == ["_to_copy", "mul", "_to_copy_1"], "cast, turned and cast back"
    row = ROW | {"config": ALONE | {"recompute": "none"}, "hardware": ROW["hardware"] | {"gpu": "H100-80GB"}}
    record = load(tmp_path, row | {"source": "mosaicml"})
    stack = reference.stack_of(record)
    assert stack.op_by_op
    one, several = (depth(depths, few_layers, record, replace(stack, op_by_op=has)).prices[1] for has in (False, True))
    device = reference.device_of(record, stack)
    tokens = 2 * 2 * 512  # two layers
    square = tokens * 256 * 2
    least_s = (2 * 6 + 2 * 4) * square / device.memory_bandwidth  # two norms in float32: read and written; rotary positions: queries
    assert several["forward_s"] - one["forward_s"] > least_s
    rotations = []

    def seen(x: torch.Tensor) -> torch.Tensor:
        rotations.append(tuple(x.shape))
        return x

    monkeypatch.setattr("decoder.rotated", seen)
    few_layers.Decoder(replace(record.dims, layers=1, vocab=8), op_by_op=True)(*torch.zeros(2, 1, 3, dtype=torch.long))
    assert rotations == [(1, 4, 3, 64), (1, 2, 3, 64)], "queries of four heads and keys of two"
    mpt = load(tmp_path, row | {"source": "mosaicml", "model": ROW["model"] | {"family": "mpt"}})
    one, several = (depth(depths, few_layers, mpt, replace(stack, op_by_op=has)).prices[1] for has in (False, True))
    assert one == several, "no rotary positions, and LayerNorm"


@pytest.mark.parametrize(
    "source, copies", [("mosaicml", "gradients"), ("fms-fsdp", "gradients"), ("torchtitan", "shards"), ("maxtext", ""), ("InternEvo", "")]
)
def test_what_software_copies(source: str, copies: str, reference: Any, tmp_path: Path) -> None:
    """FSDP gradients, FSDP2 what it gathers and what it reduces."""
    assert reference.stack_of(load(tmp_path, ROW | {"source": source})).copies == copies


def test_fsdp2_copies_what_it_gathers_and_reduces(reference: Any, depths: Any, few_layers: Any, tmp_path: Path) -> None:
    """By hand, of a layer: 4 bytes of a parameter in a forward, and 4 + 2 + 4 in a backward; the embedding and the head likewise. Ranks of
    a sequence have all parameters each. Not where a step gathers once, nor of experts that are on one rank alone."""
    record = load(tmp_path, ROW | {"config": ALONE})
    stack = replace(reference.stack_of(record), copies="shards")
    layer, table = 256 * (2 * 256 + 2 * 128 + 3 * 512), 1024 * 256
    copied = reference.device_of(record, replace(stack, pointwise_kept=1.0)).memory_bandwidth

    def more_s(record: Any, stack: Any = stack) -> list[tuple[float, float]]:
        found = depth(depths, few_layers, record, stack)
        before = [dict(row) for row in found.prices]
        found.copy_layers()
        names = ("forward_s", "backward_s")
        rows = zip(found.prices, before, strict=True)
        return [tuple((row[name] - was[name]) * copied for name in names) for row, was in rows]

    by_hand = [(4 * params, 10 * params) for params in (layer + table, 2 * layer, layer + table)]
    assert more_s(record) == [pytest.approx(row) for row in by_hand]
    shared = load(tmp_path, ROW | {"config": ALONE | {"dp": 4, "cp": 2}})
    assert more_s(shared) == [pytest.approx((2 * a, 2 * b)) for a, b in by_hand]
    nothing = [(0.0, 0.0)] * 3
    assert more_s(record, replace(stack, copies="")) == nothing
    assert more_s(record, replace(stack, copies="gradients")) == [pytest.approx((0, 0.8 * b)) for _, b in by_hand]
    assert more_s(replace(record, zero=1)) == nothing
    assert more_s(load(tmp_path, ROW | {"config": ALONE | {"dp": 4, "pp": 2}})) == nothing, "a pipeline keeps what was gathered"
    plain = load(tmp_path, ROW | {"config": ALONE, "model": ROW["model"] | {"family": "gpt"}})
    assert more_s(plain)[1] == pytest.approx((4 * 2 * (layer - 256 * 512), 10 * 2 * (layer - 256 * 512))), "without a gate"
    step_times = [reference._predict(record, each, "none").step_time_s for each in (replace(stack, copies=""), stack)]
    assert step_times[0] < step_times[1]
    moe = {"experts": 8, "topk": 2, "moe_ffn": 512, "shared_experts": 1}
    experts = load(tmp_path, ROW | {"config": ALONE | {"ep": 8}, "model": ROW["model"] | {"moe": moe, "ffn_hidden": 2048}})
    assert more_s(experts)[1] == pytest.approx(by_hand[1]), "the shared one"
    config = ALONE | {"ep": 4}
    twice = load(tmp_path, ROW | {"config": config, "model": ROW["model"] | {"moe": moe, "ffn_hidden": 2048}})
    assert more_s(twice)[1] == pytest.approx(tuple(n * (layer + 2 * 3 * 256 * 512) for n in (8, 20))), "and two that two ranks have"


def test_gradients_of_experts_are_added_up_where_others_are_reduced(
    reference: Any, depths: Any, few_layers: Any, experts: Any, tmp_path: Path
) -> None:
    """6 bytes of each parameter of a rank's experts, for each micro-batch but the first. Ranks of tensor parallelism have a part of each,
    and those that hold the same ones a shard."""
    moe = {"experts": 8, "topk": 2, "moe_ffn": 512}
    expert = 3 * 256 * 512

    def params(**config: int) -> Any:
        row = ROW | {"config": ALONE | {"ep": 8, "global_batch": 64} | config, "model": ROW["model"] | {"moe": moe}}
        record = load(tmp_path, row)
        stack = replace(reference.stack_of(record), fuses_sums=False)
        found, again = (depth(depths, few_layers, record, replace(stack, fuses_sums=fuses)).experts.sums_s for fuses in (False, True))
        assert again == 0
        return found * experts.bare_device(record).memory_bandwidth / (1 - 1 / record.microbatches) / 6

    assert params() == pytest.approx(expert)
    assert params(tp=2, dp=4, ep=4) == pytest.approx(2 * expert / 2)
    assert params(tp=2, dp=4, ep=8) == pytest.approx(expert), "those of tensor parallelism have experts of their own"
    assert params(ep=4) == pytest.approx(2 * expert / 2)
    assert params(zero=1) == params(pp=2, dp=4, ep=4) == 0


@pytest.mark.parametrize("level", ["all-but-qkv", "selective-op"])
def test_what_is_kept_of_layers_that_are_computed_again(
    reference: Any, depths: Any, few_layers: Any, tmp_path: Path, level: str
) -> None:
    """By hand: products to queries, keys and values, 256 x (256 + 2 x 128) by 2 x 512 tokens; or fused attention, half of 512 x 512."""
    record = load(tmp_path, ROW | {"config": ALONE | {"recompute": level}})
    stack = reference.stack_of(record)
    found = depths.Depth(record, stack, few_layers.staged(few_layers.Key.of(record, stack, "full")))
    before, kept = dict(found.prices[1]), found.memory[1]["kept"]
    if level == "all-but-qkv":
        found.keep_projections()
        flops = 2.0 * 2 * 512 * 256 * (256 + 2 * 128)
        saved_s, width = flops / float(found.device.matmul_flops_per_s(flops, torch.bfloat16)), 256 + 2 * 128
    else:
        found.keep_attention()
        flops = 4.0 * 2 * 512 * 512 / 2 * 256
        saved_s, width = float(found.device.attention_time_s(flops, 0, torch.bfloat16, 512, backward=False)), 256
    assert before["backward_s"] - found.prices[1]["backward_s"] == pytest.approx(2 * saved_s)
    assert found.prices[1]["forward_s"] == before["forward_s"]
    assert found.memory[1]["kept"] - kept == pytest.approx(2 * 2 * 512 * width * 2)


def test_what_is_kept_of_latent_attention(reference: Any, depths: Any, few_layers: Any, tmp_path: Path) -> None:
    """By hand, for two heads whose queries and keys are 128 + 64 wide, and whose values are 128."""
    moe = {"experts": 8, "topk": 2, "moe_ffn": 512, "attention": "MLA"}
    model = ROW["model"] | {"family": "deepseek-v3", "heads": 2, "kv_heads": 2, "moe": moe}
    record = load(tmp_path, ROW | {"config": ALONE | {"ep": 8, "recompute": "full"}, "model": model})
    stack = reference.stack_of(record)
    found = depth(depths, few_layers, record, stack)
    before, kept = dict(found.prices[1]), found.memory[1]["kept"]
    found.keep_projections()
    made_by = 256 * (1536 + 512 + 64) + 1536 * 2 * (128 + 64) + 512 * 2 * (128 + 128)
    flops = 2.0 * 2 * 512 * made_by
    saved_s = flops / float(found.device.matmul_flops_per_s(flops, torch.bfloat16))
    assert before["backward_s"] - found.prices[1]["backward_s"] == pytest.approx(2 * saved_s)
    assert found.memory[1]["kept"] - kept == pytest.approx(2 * 2 * 512 * 2 * (192 + 192 + 128) * 2)
    before, kept = dict(found.prices[1]), found.memory[1]["kept"]
    found.keep_attention()
    flops = 2 * 512 * 512 / 2 * 2.0 * 2 * (192 + 128)
    saved_s = float(found.device.attention_time_s(flops, 0, torch.bfloat16, 512, backward=False))
    assert before["backward_s"] - found.prices[1]["backward_s"] == pytest.approx(2 * saved_s)
    assert found.memory[1]["kept"] - kept == pytest.approx(2 * 2 * 512 * 2 * 128 * 2)

    stacks = (replace(stack, op_by_op=has) for has in (False, True))
    with torch.device("meta"):
        layers = [few_layers.Decoder(record.dims, op_by_op=has).layers[0] for has in (False, True)]
    assert [layer.attention.q_norm.op_by_op for layer in layers] == [layer.attention.kv_norm.op_by_op for layer in layers] == [False, True]
    fused_s, apart_s = (depth(depths, few_layers, replace(record, zero=1), each).prices[1]["forward_s"] for each in stacks)
    assert fused_s < apart_s
    with pytest.raises(ValueError, match="stack mcore-2024 computes no latent attention"):
        reference._refuse_odd_models(record, replace(stack, attention="unfused"))


def test_levels_of_recomputation_in_order(reference: Any, tmp_path: Path) -> None:
    """Of a stack that runs no product again that nobody needs. Torchtitan keeps every second product, and attention."""
    config = ALONE | {"dp": 1, "zero": 1, "micro_batch": 8, "global_batch": 8}
    record = load(tmp_path, ROW | {"source": "torchtitan", "config": config, "hardware": ROW["hardware"] | {"n_gpus": 1}})
    stack = reference.stack_of(record)
    found = {level: reference._predict(record, stack, level) for level in reference.RECOMPUTE}
    times, sizes = ({level: getattr(one, name) for level, one in found.items()} for name in ("step_time_s", "peak_memory_bytes"))
    assert times["none"] < times["norm-act"] < times["selective-op"] < times["all-but-qkv"] < times["full"]
    assert sizes["full"] < sizes["all-but-qkv"] < sizes["selective-op"] < sizes["norm-act"]
    assert times["none"] < times["selective-block"] < times["full"]
    assert times["selective-op"] < (times["norm-act"] + times["full"]) / 2, "attention is not computed again"
    whole = replace(stack, recomputes_whole=True)
    found = {level: reference._predict(record, whole, level).step_time_s for level in reference.RECOMPUTE}
    assert found["all-but-qkv"] < found["full"]
    assert found["selective-op"] < (found["norm-act"] + found["full"]) / 2


def test_a_pipeline_that_is_drained(reference: Any, depths: Any, few_layers: Any, tmp_path: Path) -> None:
    """After every eight of 16 micro-batches: twice the time of eight, less what comes once a step."""
    config = ROW["config"] | {"dp": 2, "tp": 1, "pp": 4, "zero": 1, "sp": False}
    record, half = (load(tmp_path, ROW | {"config": config | {"global_batch": batch}}) for batch in (64, 32))
    stack = replace(reference.stack_of(record), data_overlap=0.0)
    assert (record.microbatches, half.microbatches) == (16, 8)
    drained = replace(stack, local_batch=8)
    whole_s, drained_s = (step_s(depths, few_layers, record, each) for each in (stack, drained))
    assert drained_s > whole_s
    first = depth(depths, few_layers, half, stack)
    for row in first.prices:
        row |= dict.fromkeys(("gather_s", "reduce_s", "covered_s", "update_s"), 0.0)
    assert drained_s == pytest.approx(first.played().step_time_s + step_s(depths, few_layers, half, stack))
    assert step_s(depths, few_layers, record, replace(stack, local_batch=16)) == pytest.approx(whole_s)
    alone = load(tmp_path, ROW | {"config": config | {"pp": 1, "dp": 8, "global_batch": 256}})
    assert step_s(depths, few_layers, alone, drained) == step_s(depths, few_layers, alone, stack), "there is nothing to drain"


def test_recipes_say_what_records_do_not(reference: Any, tmp_path: Path) -> None:
    moe = {"experts": 8, "topk": 2, "moe_ffn": 512}
    config = ROW["config"] | {"tp": 1, "dp": 4, "recompute": None, "sp": False}
    row = ROW | {"source": "NVIDIA-NeMo/Megatron-Bridge docs", "config": config}
    experts, dense = (load(tmp_path, row | {"model": ROW["model"] | more}) for more in ({"moe": moe}, {}))
    found = reference.predict(experts)
    assert "recompute not stated: norm-act by the recipes of its stack; " in found.note
    ways = [reference._predict(experts, reference.stack_of(experts), level).step_time_s for level in ("none", "full")]
    assert found.note.endswith(f"; {ways[0]:.2f} to {ways[1]:.2f} s")
    stated = load(tmp_path, row | {"model": ROW["model"] | {"moe": moe}, "config": config | {"recompute": "norm-act"}})
    assert found.step_time_s == reference.predict(stated).step_time_s
    assert "recompute not stated: none is the least that fits" in reference.predict(dense).note
    eight = load(tmp_path, row | {"model": ROW["model"] | {"moe": moe}, "config": config | {"precision": "fp8"}})
    assert "by the recipes" not in reference.predict(eight).note, "those are of 16 bits"
    maxtext = load(tmp_path, ROW | {"source": "dgxc-benchmarking maxtext/README_70b.md", "config": config})
    assert "recompute not stated: all-but-qkv by the recipes of its stack" in reference.predict(maxtext).note


def test_a_stack_that_updates_what_is_narrow(reference: Any, tmp_path: Path) -> None:
    """Moments in bfloat16 are 4 bytes of a parameter; with a copy in float32 they are 12."""
    config = ALONE | {"zero": 1, "dp": 1, "global_batch": 2}
    record = load(tmp_path, ROW | {"config": config, "hardware": ROW["hardware"] | {"n_gpus": 1}})
    stack = replace(reference.stack_of(record), adds_wide=False)
    sizes = [reference._predict(record, replace(stack, optimizer=name), "full").peak_memory_bytes for name in ("adamw_master", "adamw")]
    params = 8 * 256 * (2 * 256 + 2 * 128 + 3 * 512 + 2) + 256 * (2 * 1024 + 1)
    assert sizes[0] - sizes[1] == pytest.approx(reference.FRAGMENTATION * 8 * params)


def test_experts_have_fewer_ranks_to_share_their_state(reference: Any, depths: Any, few_layers: Any, tmp_path: Path) -> None:
    """Of 8 experts on 8 ranks each has its own alone: what data parallelism shards of others it holds whole."""
    moe = {"experts": 8, "topk": 2, "moe_ffn": 512}
    record = load(tmp_path, ROW | {"config": ALONE | {"ep": 8}, "model": ROW["model"] | {"moe": moe}})
    stack = reference.stack_of(record)
    attention, expert = record.dims.attention_params, 3 * 256 * 512
    taken = attention + 2 * expert
    peaks = {}
    for zero in (1, 3):
        found = depth(depths, few_layers, replace(record, zero=zero), stack)
        by_hand = (attention + expert) / taken, (attention + 8 * expert) / taken
        assert (found.experts.held, found.experts.sharded) == pytest.approx(by_hand)
        for row in found.memory:
            row |= {"static": 0.0, "optimizer": 0.0, "kept": 0.0, "transient": 0.0}
        for name in ("static", "optimizer"):
            found.memory[1][name] = 2.0 * 1e9  # two layers
            peaks[zero, name] = (found.played().peak_memory_bytes - depths.CONTEXT_BYTES) / depths.FRAGMENTATION / (6 * 1e9)
            found.memory[1][name] = 0.0
    held, sharded = found.experts.held, found.experts.sharded
    updates_s = []
    for ratio in (sharded, 2 * sharded):
        found = depth(depths, few_layers, record, stack)
        found.experts = replace(found.experts, sharded=ratio)
        updates_s.append(found.played().step_time_s)
    assert updates_s[1] - updates_s[0] == pytest.approx(sharded * found._of(found.prices, [8], 0)["update_s"])
    assert peaks == pytest.approx({(1, "static"): held, (1, "optimizer"): sharded, (3, "static"): sharded, (3, "optimizer"): sharded})


def test_software_that_recomputes_all_layers_or_none(reference: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where selective recomputation would fit, and be faster, Automodel has none."""
    sizes = {"none": (10.0, 1e15), "selective": (11.0, 1e9), "full": (12.0, 1e9)}
    monkeypatch.setattr(reference, "_predict", lambda record, stack, level: reference.Predicted(*sizes[level], ""))
    config = ROW["config"] | {"recompute": None}
    rows = (ROW | {"source": f"NVIDIA-NeMo/{name}", "config": config} for name in ("Automodel", ""))
    notes = [reference.predict(load(tmp_path, row)).note for row in rows]
    assert "recompute not stated: full is the least that fits" in notes[0]
    assert "else selective, is the least that fits" in notes[1]


@pytest.mark.parametrize("gpu, less", [("A100-80GB", 0.0), ("H100-80GB", 0.06), ("H200", 0.06)])
def test_less_hides_where_devices_lose_more(reference: Any, tmp_path: Path, gpu: str, less: float) -> None:
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": gpu}})
    stack = replace(reference.stack_of(record), data_overlap=0.76)
    assert reference.stack_on(record, stack).data_overlap == pytest.approx(0.76 - less)
    alone = replace(stack, data_overlap=0.0)
    assert reference.stack_on(record, alone) == alone, "nothing hid there"
