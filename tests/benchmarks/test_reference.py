"""Published runs are predicted from a few layers; the sum is what planning the whole model gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import Manual
from autopar.cost.cluster import named_device, named_link
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.search import Search
from tests.marks import few

pytestmark = pytest.mark.slow

ROW: dict[str, Any] = {
    "id": "small",
    "source": "nobody",
    "model": {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn_hidden": 512, "vocab": 1024, "seq": 512},
    "hardware": {"gpu": "A100-80GB", "n_gpus": 8, "gpus_per_node": 8, "inter_gbps": None},
    "config": {
        "dp": 2, "tp": 2, "pp": 2, "cp": 1, "ep": 1, "vpp": 1, "zero": 1, "sp": True,
        "micro_batch": 2, "global_batch": 16, "recompute": "full", "precision": "bf16",
    },
    "measured": {"peak_mem_gb": None},
    "iter_time_s": 1.0,
}


def load(tmp_path: Path, row: dict[str, Any]) -> Any:
    from records import load_records  # type: ignore[import-not-found]

    path = tmp_path / "runs.json"
    path.write_text(json.dumps([row]))
    (record,), unread = load_records(path)
    assert not unread
    return record


@pytest.mark.slow
@pytest.mark.parametrize("recompute", few(1, ["full", "none"]))
def test_a_few_layers_stand_for_all(reference: Any, few_layers: Any, depths: Any, tmp_path: Path, recompute: str) -> None:
    record = load(tmp_path, ROW)
    stack = replace(reference.stack_of(record), adds_wide=True, layer_overhead_s=0.0, data_overlap=0.0, model_overlap=0.9)
    key = few_layers.Key.of(record, stack, recompute)
    found = depths.Depth(record, stack, few_layers.staged(key))

    with torch.device("meta"):
        model = few_layers.Decoder(record.dims).to(torch.bfloat16)
        tokens = torch.empty(16, record.dims.seq, dtype=torch.long)
    session = open_session(make_skeleton(model), (tokens, tokens.clone()), {}, outputs="loss")
    manual = Manual(dp=2, tp=2, pp=2, zero=1, sequence_parallel=True, microbatches=4, stages=("layers.4",), recompute=recompute)
    whole = Search(session.normal_for, lambda grid: key.machine, float("inf"), [manual], "adamw_master").decide(manual.shape(16))
    for stage, price in enumerate(whole.prices):
        made = found._of(found.prices, [4, 4], stage)
        # between blocks partial sums or whole values take the same time, and not the same memory; all of it is kept there with "full"
        for name in ("forward_s", "backward_s", "reduce_s", "update_s", *(["live_num_bytes"] if recompute == "none" else [])):
            assert made[name] == pytest.approx(getattr(price, name), rel=0.05), (stage, name)
        held = depths._memory(whole.memory[stage], 1.0, 2)
        assert found._of(found.memory, [4, 4], stage)["static"] == pytest.approx(held["static"], rel=0.05)
    assert whole.timeline is not None
    assert found.played().step_time_s == pytest.approx(whole.step_time_s, rel=0.05)


def test_what_is_wrong_with_a_record(reference: Any, tmp_path: Path) -> None:
    from records import RecordError, read_record

    def why(**changes: object) -> str:
        with pytest.raises(RecordError) as caught:
            read_record(ROW | changes)
        return str(caught.value)

    assert why(config=7) == "config is 7; it should be an object"
    assert why(config=ROW["config"] | {"tp": None, "precision": None}) == "config.tp, config.precision not stated"
    assert why(config=ROW["config"] | {"dp": None, "cp": 3}) == "dp is not stated, and 8 GPUs are no multiple of pp * cp * tp = 12"
    assert why(config=ROW["config"] | {"global_batch": 15}) == "a global batch of 15 is no multiple of dp * micro_batch = 4"
    assert "none of a multiple of 8 share a hidden size of 100 over 2 ranks" in why(model=ROW["model"] | {"heads": None, "hidden": 100})
    with pytest.raises(RecordError, match=r"pp \* dp \* cp \* tp = 8, but the run had 16 GPUs"):
        reference.predict(load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"n_gpus": 16}}))
    with pytest.raises(RecordError, match=r"precision 'int4' is not known; there are fp16, bf16, bf16-pure, fp8"):
        reference.predict(load(tmp_path, ROW | {"config": ROW["config"] | {"precision": "int4"}}))
    with pytest.raises(RecordError, match=r"recompute 'some' is not known; there are none, full, selective"):
        reference.predict(load(tmp_path, ROW | {"config": ROW["config"] | {"recompute": "some"}}))
    with pytest.raises(RecordError, match=r"no profile for GPU 'T4'"):
        reference.predict(load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": "T4"}}))


@pytest.mark.parametrize("family, head", [("llama", 64), ("gpt-oss", 64), ("qwen3-moe", 128)])
def test_heads_are_as_wide_as_the_configuration_says(few_layers: Any, tmp_path: Path, family: str, head: int) -> None:
    """Four heads of a hidden size of 256 are 64 wide, but for families that say otherwise, whose queries are wider than the model."""
    dims = load(tmp_path, ROW | {"model": ROW["model"] | {"family": family}}).dims
    assert dims.head == head
    with torch.device("meta"):
        layer = few_layers.Decoder(dims).layers[0]
    assert layer.attention.q.weight.shape == (4 * head, 256)
    assert layer.attention.out.weight.shape == (256, 4 * head)
    assert sum(p.numel() for p in layer.attention.parameters()) == dims.attention_params


def test_a_source_that_is_not_known_is_said_to_be(reference: Any, tmp_path: Path) -> None:
    notes = [reference.predict(load(tmp_path, ROW | {"source": source})).note for source in ("nobody", "mosaicml/llm-foundry")]
    assert notes == ["stack mcore-2024 assumed, as the source is not known", "stack fsdp-2023"]


def test_every_kernel_has_a_rate_on_the_devices_of_its_time(reference: Any, tmp_path: Path) -> None:
    for source in ("nobody", "mosaicml", "torchtitan"):
        for gpu in ("A100-80GB", "H100-80GB", "H200", *(["B200"] if source != "mosaicml" else [])):
            record = load(tmp_path, ROW | {"source": source, "hardware": ROW["hardware"] | {"gpu": gpu}})
            assert reference.predict(record).step_time_s > 0


def test_what_may_be_null_may_be_missing(reference: Any, tmp_path: Path) -> None:
    from records import read_record

    missing = {"heads", "kv_heads", "inter_gbps", "dp", "cp", "ep", "vpp", "zero", "sp", "recompute"}
    bare, nulls = (
        {"id": "small", "source": "nobody"}
        | {
            part: {key: null(value) if key in missing else value for key, value in ROW[part].items() if keeps(key)}
            for part in ("model", "hardware", "config")
        }
        for keeps, null in ((lambda key: key not in missing, lambda value: value), (lambda key: True, lambda value: None))
    )
    assert read_record(bare) == read_record(nulls)
    assert (read_record(bare).step_time_s, read_record(bare).dp) == (None, 2)
    assert reference.predict(read_record(bare)).step_time_s > 0


def test_a_record_that_cannot_be_read_is_not_in_the_way_of_others(reference: Any, tmp_path: Path) -> None:
    from records import load_records

    (tmp_path / "runs.json").write_text(json.dumps([ROW, {"id": "odd"}, 7]))
    records, unread = load_records(tmp_path / "runs.json")
    assert [record.id for record in records] == ["small"]
    assert [record.id for record in unread] == ["odd", "2"]
    assert unread[0].why.startswith("model.family, model.layers, ")
    assert unread[1].why == "record 2 of the file is 7; it should be an object with the fields of published_runs.json"


def test_heads_are_shared_evenly_where_they_are_not_stated(reference: Any, tmp_path: Path) -> None:
    model, config = ROW["model"] | {"heads": None, "kv_heads": None}, ROW["config"] | {"dp": 1}

    def heads(hidden: int, tp: int) -> int:
        row = ROW | {"model": model | {"hidden": hidden}, "config": config | {"tp": tp, "pp": 1}}
        found: int = load(tmp_path, row).dims.heads
        return found

    assert heads(12288, 8) == 96
    assert heads(13824, 8) == 96, "108 heads of 128 are not shared evenly by 8 ranks"
    assert heads(13824, 4) == 108
    page = "bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md (02-25)"
    said = {"source": page, "model": model | {"hidden": 14336}, "config": config | {"tp": 8, "pp": 1}}
    assert load(tmp_path, ROW | said).dims.heads == 64, "the page says so"


@pytest.mark.slow
def test_recomputing_the_whole_takes_more_than_what_is_needed(reference: Any, tmp_path: Path) -> None:
    """By no more than the last product of every layer, a third of its MLP."""
    record = load(tmp_path, ROW)
    stack = reference.stack_of(record)
    needed, whole = (reference._predict(record, replace(stack, recomputes_whole=whole), "full") for whole in (False, True))
    assert 1.0 < whole.step_time_s / needed.step_time_s < 4 / 3


def test_shards_of_any_number_of_ranks(reference: Any, tmp_path: Path) -> None:
    """24 ranks hold less of the optimizer than 16, though they divide no dim."""
    config = ROW["config"] | {"tp": 1, "pp": 1, "global_batch": 96, "recompute": "none"}
    sizes = {}
    for dp in (16, 24, 32):
        hardware = ROW["hardware"] | {"n_gpus": dp}
        batch = {"dp": dp, "global_batch": 2 * dp}
        sizes[dp] = reference.predict(load(tmp_path, ROW | {"hardware": hardware, "config": config | batch})).peak_memory_bytes
    assert sizes[32] < sizes[24] < sizes[16]


@pytest.mark.slow
def test_what_is_not_stated_is_predicted_each_way(reference: Any, tmp_path: Path) -> None:
    """Recomputation: the least that fits, here none. Chunks: of Megatron-Core, one for each layer."""
    row = ROW | {"source": "dgxc-benchmarking", "config": ROW["config"] | {"recompute": None, "vpp": None}}
    found = reference.predict(load(tmp_path, row))
    assert "recompute not stated: none is the least that fits; chunks not stated: 4 for each rank; " in found.note
    stated = {"recompute": "none", "vpp": 4}
    assert found.step_time_s == reference.predict(load(tmp_path, row | {"config": ROW["config"] | stated})).step_time_s


def test_the_least_recomputation_that_fits(reference: Any) -> None:
    """A level that fits, or as many layers of one that does not as leave room, by whichever other is faster then."""

    def likely(most: float, mixed: bool = True, /, **levels: tuple[float, float]) -> tuple[str, float]:
        found = {name: reference.Predicted(time_s, num_bytes, "") for name, (time_s, num_bytes) in levels.items()}
        name, one = reference._least_that_fits(found, most, mixed=mixed)
        return name, one.step_time_s

    levels = {"none": (10.0, 100.0), "selective": (11.0, 90.0), "full": (12.0, 20.0)}
    assert likely(100, **levels) == ("none", 10.0)
    name, time_s = likely(95, **levels)
    assert name == "none of 94% of the layers, else full,"
    assert time_s == pytest.approx(10 + 2 * 5 / 80), "less than with selective, half of all layers at one second more"
    name, time_s = likely(95, **levels | {"selective": (10.1, 60.0)})
    assert name == "none of 88% of the layers, else selective,"
    assert time_s == pytest.approx(10 + 0.1 * 5 / 40)
    assert likely(19, **levels) == ("full", 12.0), "nothing fits"
    assert likely(95, False, **levels) == ("selective", 11.0), "all layers or none"


def test_ends_of_a_model_count_as_layers_where_that_makes_stages_even(depths: Any) -> None:
    assert depths._layers(126, 64) == [1, *[2] * 62, 1]
    assert depths._layers(70, 12) == [5, *[6] * 10, 5]
    assert depths._layers(72, 12) == [6] * 12
    assert depths._layers(78, 12) == [*[7] * 6, *[6] * 6]
    assert depths._layers(7, 1) == [7]


def test_fused_kernels_make_anew_what_the_backward_wants(reference: Any, tmp_path: Path) -> None:
    """Nothing but memory changes. Beside what products and attention give, Megatron-Core keeps what products take: 2 x 512 tokens of two
    norms of 256, and of 512, in bfloat16, by two ranks; `compiled-2024` keeps none of it, `megatron-2022` all."""
    record = load(tmp_path, ROW | {"config": ROW["config"] | {"recompute": "none"}})
    stack = reference.stack_of(record)
    found = {keeps: reference._predict(record, replace(stack, keeps=keeps), "none") for keeps in ("all", "inputs", "heavy")}
    assert len({one.step_time_s for one in found.values()}) == 1
    assert found["all"].peak_memory_bytes > found["inputs"].peak_memory_bytes
    inputs = 2 * 512 * 2 * (2 * 256 + 512) / 2
    live = 2 * 4  # micro-batches in flight on the first rank, and its layers
    more = found["inputs"].peak_memory_bytes - found["heavy"].peak_memory_bytes
    assert more == pytest.approx(reference.FRAGMENTATION * live * inputs)


def test_jean_zay_before_its_repair(reference: Any, tmp_path: Path) -> None:
    page = "bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md"
    before, after = (load(tmp_path, ROW | {"source": f"{page} ({day})"}) for day in ("02-24", "02-25"))
    rates = [reference.device_of(record, reference.stack_of(record)).matmul[0].flops_per_s for record in (before, after)]
    assert rates[0] == pytest.approx(0.95 * rates[1])


def test_the_other_runs_can_be_read(reference: Any) -> None:
    from records import load_records

    records, unread = load_records(Path(reference.__file__).with_name("more_runs.json"))
    assert not unread
    assert len({record.id for record in records}) == len(records) == 234
    assert all(record.step_time_s for record in records)


@pytest.mark.slow
def test_fragments_are_not_held_against_a_run_that_has_fit(reference: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = load(tmp_path, ROW | {"config": ROW["config"] | {"recompute": None}})
    device, of_device = reference.device_of(record, reference.stack_of(record)), reference.device_of
    peak = reference.predict(load(tmp_path, ROW | {"config": ROW["config"] | {"recompute": "none"}})).peak_memory_bytes
    values = (peak - reference.CONTEXT_BYTES) / reference.FRAGMENTATION + reference.CONTEXT_BYTES
    assert values < peak < device.memory_bytes
    likely = {}
    for name, limit in (("between", (values + peak) / 2), ("below", values - 1)):
        monkeypatch.setattr(reference, "device_of", lambda *of, limit=limit: replace(of_device(*of), memory_bytes=limit))
        likely[name] = reference.predict(record).note.split("recompute not stated: ")[1].split(" is")[0]
    assert likely["between"] == "none" != likely["below"]


@pytest.mark.slow
def test_products_in_eight_bits_are_faster_and_nothing_else_is(reference: Any, tmp_path: Path) -> None:
    """Under data parallelism: what lies between tensor-parallel blocks may lie in ways that take as long, and not the same memory."""
    config = ROW["config"] | {"dp": 4, "tp": 1, "sp": False}
    eight, sixteen = (reference.predict(load(tmp_path, ROW | {"config": config | {"precision": p}})) for p in ("fp8", "bf16"))
    assert 1 / 1.6 < eight.step_time_s / sixteen.step_time_s < 1
    assert eight.peak_memory_bytes == sixteen.peak_memory_bytes


def depth(depths: Any, few_layers: Any, record: Any, stack: Any) -> Any:
    return depths.Depth(record, stack, few_layers.staged(few_layers.Key.of(record, stack, "none")))


def test_sums_of_gradients_are_read_and_written_for_each_micro_batch(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    """Of 1000 bytes of gradients in bfloat16, with sums in float32: 1000 + 2 x 2000 bytes for seven of eight micro-batches; by copies as
    wide as the sums 1000 + 4 x 2000 for all; none where the products do it. In float16 3 x 1000 for seven of eight."""
    record = load(tmp_path, ROW | {"config": ROW["config"] | {"global_batch": 32}})
    stack = replace(reference.stack_of(record), fuses_sums=False, adds_wide=True)
    assert record.microbatches == 8
    found = depth(depths, few_layers, record, stack)
    assert found._sum_bytes(1000.0) == pytest.approx(5000 * 7 / 8)
    assert found.prices[1]["sum_s"] == pytest.approx(found._sum_bytes(found.prices[1]["gradients"]) / 1.8e12)
    narrow = depth(depths, few_layers, record, replace(stack, adds_wide=False))
    assert narrow._sum_bytes(1000.0) == pytest.approx(3000 * 7 / 8)
    found.record = replace(record, precision="fp16")
    assert found._sum_bytes(1000.0) == pytest.approx(3000 * 7 / 8)
    found.record, found.stack = record, replace(stack, keeps_both_gradients=True)
    assert found._sum_bytes(1000.0) == 9000
    found.stack = replace(stack, fuses_sums=True)
    assert found._sum_bytes(1000.0) == 0
    found.record, found.stack = replace(record, global_batch=4), stack
    assert found._sum_bytes(1000.0) == 0, "of one micro-batch there is no sum"


def test_heads_that_matrix_units_refuse(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    """Heads of 100 in 16 bits have rows of 200 bytes, no multiple of 16; those of 104 have 208. Two products of 2 x 512^2 x 400 / 2 x 2
    flops for each layer, three times for a forward and a backward."""
    model = ROW["model"] | {"hidden": 400, "kv_heads": 4}
    record = load(tmp_path, ROW | {"model": model, "config": ROW["config"] | {"precision": "fp16", "sp": False}})
    stack = replace(reference.stack_of(record), attention="unfused")
    found = depth(depths, few_layers, record, stack)
    before = dict(found.prices[1])
    found.slow_heads(again=False)
    flops = 2 * (2 * 2 * 512**2 * 400 / 2)
    slow, fast = (float(found.device.matmul_flops_per_s(flops / 2, dtype)) for dtype in (torch.float32, torch.float16))
    assert slow < fast
    extra_s = flops / slow - flops / fast
    assert found.prices[1]["forward_s"] - before["forward_s"] == pytest.approx(2 * extra_s)
    assert found.prices[1]["backward_s"] - before["backward_s"] == pytest.approx(2 * 2 * extra_s)

    found.record = replace(record, dims=replace(record.dims, hidden=416, head=104))
    before = dict(found.prices[1])
    found.slow_heads(again=False)
    assert found.prices[1] == before


def test_windows_hide_most_keys_of_every_second_layer(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    """Of 512 tokens, by hand: two tiles of 128 in place of half of the square, in the mean over a layer that does so and one that does
    not; five products in the backward for two in the forward."""
    record = load(tmp_path, ROW | {"model": ROW["model"] | {"family": "gpt-oss"}})
    assert record.dims.window == 128
    found = depth(depths, few_layers, record, reference.stack_of(record))

    def attention_s(times: float, keys_in_all: float, keys: int, *, backward: bool) -> float:
        flops = times * 4 * 2 * 512 * keys_in_all * 4 * 64 / 2
        return float(found.device.attention_time_s(flops, 0, torch.bfloat16, keys, backward=backward))

    for window in (128, 256):
        found.record, before = replace(record, dims=replace(record.dims, window=window)), dict(found.prices[1])
        found.look_through_windows(again=True)
        assert found.prices[1] == before, "two tiles are half of all, or more"
    found.record = replace(record, dims=replace(record.dims, window=64))
    before = dict(found.prices[1])
    found.look_through_windows(again=True)
    narrow_s = [attention_s(times, 128, 128, backward=backward) for times, backward in ((1, False), (2.5, True))]
    whole_s = [attention_s(times, 256, 512, backward=backward) for times, backward in ((1, False), (2.5, True))]
    forward_s, backward_s = ((whole - narrow) / 2 for whole, narrow in zip(whole_s, narrow_s, strict=True))
    assert min(forward_s, backward_s) > 0
    assert before["forward_s"] - found.prices[1]["forward_s"] == pytest.approx(2 * forward_s)
    assert before["backward_s"] - found.prices[1]["backward_s"] == pytest.approx(2 * (backward_s + forward_s))

    found.record = replace(record, dims=replace(record.dims, window=0))
    before = dict(found.prices[1])
    found.look_through_windows(again=True)
    assert found.prices[1] == before


def test_kernels_that_are_not_fused_run_as_those_of_torch(reference: Any, tmp_path: Path) -> None:
    """At rates of their own; fused ones move less, as a copy does."""
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": "H100-80GB"}})
    stack = replace(reference.stack_of(record), attention="cudnn")
    eager, fused = (reference.device_of(record, replace(stack, pointwise_kept=kept)) for kept in (1.0, 0.5))
    assert eager.streams == named_device("h100").streams
    assert (dict(fused.streams), fused.memory_bandwidth) == ({}, 2 * eager.memory_bandwidth)
    limited = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": "H100-96GB-HBM2e-500W"}})
    slower = reference.device_of(limited, replace(stack, pointwise_kept=1.0))
    assert slower.streams["tanh"] == (slower.memory_bandwidth,) * 2, "no faster than its copy"
    assert slower.streams["layer_norm"] == eager.streams["layer_norm"]
    rates = [device.matmul[0].flops_per_s for device in (slower, eager)]
    assert rates[0] / rates[1] == pytest.approx((400 / 600) ** (1 / 3)), "of 500 and 700 W 100 are for what has no clock"


def test_softmax_and_norms_without_a_fused_kernel_are_kernels_already(reference: Any, tmp_path: Path) -> None:
    """Fusion of what is around them saves none of their bytes; of a device without rates of its own they move these as a copy does."""
    record = load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": "H100-80GB"}})
    stack, bare = replace(reference.stack_of(record), attention="unfused", pointwise_kept=0.5), named_device("h100")
    used = stack.device(bare, "H100")
    assert used.memory_bandwidth == 2 * bare.memory_bandwidth
    assert used.streams == {"softmax": (bare.memory_bandwidth,) * 2, "layer_norm": bare.streams["layer_norm"]}
    assert stack.device(replace(bare, streams={}), "H100").streams["layer_norm"] == (bare.memory_bandwidth,) * 2
    assert replace(stack, pointwise_kept=1.0).device(bare, "H100").streams["tanh"] == bare.streams["tanh"]


def test_sums_that_are_reduced(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    """Those of runs in bfloat16 are twice as wide as gradients, and an all-reduce passes all of them twice, with shards or without."""
    record = load(tmp_path, ROW)
    stack = replace(reference.stack_of(record), adds_wide=True, reduces="sums", data_overlap=0.5)
    plain = depth(depths, few_layers, record, replace(stack, reduces="shards")).prices[1]
    wide = depth(depths, few_layers, record, stack).prices[1]
    assert plain["covered_s"] > 0
    assert [wide[name] for name in ("reduce_s", "covered_s", "gather_s")] == pytest.approx(
        [4 * plain["reduce_s"], 4 * plain["covered_s"], plain["gather_s"]]
    )
    found = depth(depths, few_layers, record, stack)
    found.record = replace(record, zero=0)
    assert found._reduced() == 2
    found.record = replace(record, precision="fp16")
    assert found._reduced() == 1
    found.stack, found.record = replace(stack, adds_wide=False), record
    assert found._reduced() == 1
    found.stack = replace(stack, reduces="whole")
    assert found._reduced() == 2
    found.record = replace(record, zero=0)
    assert found._reduced() == 1


def test_ranks_of_a_layer_send_a_part_each(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    """Of 2 x 512 x 256 values in bfloat16, half by each of two, which gather them where they arrive; with sequence parallelism they have
    parts anyway."""
    record = load(tmp_path, ROW | {"config": ROW["config"] | {"sp": False}})
    stack = replace(reference.stack_of(record), scatters_sends=True)
    found = depth(depths, few_layers, record, stack)
    gathered_s = float(depths.collective_time_s("all_gather", 2 * 512 * 256 * 2, 2, depths.links_of(record)[2]))
    assert found._sent_s(1e-3) == pytest.approx(0.5e-3 + gathered_s)
    assert gathered_s > 0
    found.record = replace(record, sequence_parallel=True)
    assert found._sent_s(1e-3) == 1e-3
    found.record, found.stack = record, replace(stack, scatters_sends=False)
    assert found._sent_s(1e-3) == 1e-3
    whole_s, parts_s = (step_s(depths, few_layers, record, replace(stack, scatters_sends=scatters)) for scatters in (False, True))
    assert whole_s < parts_s, "inside of a node a small message takes less than two"


def step_s(depths: Any, few_layers: Any, record: Any, stack: Any) -> float:
    return float(depth(depths, few_layers, record, stack).played().step_time_s)


def test_seconds_of_every_step_come_once(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    record = load(tmp_path, ROW)
    stack = reference.stack_of(record)
    plain_s, more_s = (step_s(depths, few_layers, record, replace(stack, step_overhead_s=each)) for each in (0.0, 3.0))
    assert more_s == pytest.approx(plain_s + 3)


def test_jean_zay_has_a_fabric_of_its_own(depths: Any, tmp_path: Path) -> None:
    """Of as many Gb/s as InfiniBand that two GPUs share, of which NCCL makes less."""
    row = ROW | {"hardware": ROW["hardware"] | {"n_gpus": 64, "inter_gbps": 50}, "config": ROW["config"] | {"dp": 16, "global_batch": 64}}
    sources = "InternLM/InternEvo", "bigscience-workshop/bigscience"
    shared, own = (depths.links_of(load(tmp_path, row | {"source": source}))[0] for source in sources)
    assert (shared.bandwidth, own.bandwidth) == (named_link("ib-50").bandwidth / 2, named_link("opa-100").bandwidth / 2)


def test_copies_of_gradients_of_a_step(reference: Any, few_layers: Any, depths: Any, tmp_path: Path) -> None:
    """Of a shard of a half: 6 bytes of each of its elements, and 8 of the embedding's, which fits the shard. In bfloat16, of a bucket of
    5e8 elements in float32, or of an embedding that is larger."""
    record = load(tmp_path, ROW | {"config": ROW["config"] | {"precision": "fp16"}})
    found = depth(depths, few_layers, record, replace(reference.stack_of(record), widens_gradients=True))
    layer, embedding = 256 * (2 * 256 + 2 * 128 + 2 * 512), 1024 * 256 / 2
    shard = (4 * layer / 2 + embedding) / 2
    assert embedding < shard
    assert found._copied(4) == pytest.approx(6 * shard + 8 * embedding)
    found.record = replace(record, precision="bf16")
    found.stack = replace(found.stack, adds_wide=True)
    assert found._copied(4) == 4 * 5e8
    found.record = replace(found.record, dims=replace(record.dims, vocab=2**23))
    assert found._copied(4) == 4 * 2**23 * 256 / 2


def test_parameters_are_broadcast_in_turn(depths: Any, tmp_path: Path) -> None:
    """64 ranks on 8 nodes: all of them send a share in turn to all; or the 8 of a node to each other, by its link."""
    config = ROW["config"] | {"dp": 64, "tp": 1, "pp": 1, "global_batch": 1024}
    hardware = ROW["hardware"] | {"n_gpus": 64, "inter_gbps": 200}
    far = load(tmp_path, ROW | {"hardware": hardware, "config": config})
    note = 'ZeRO-1 sharded inside an 8-GPU node only ("Hybrid Zero", zero1=8).'
    near = load(tmp_path, ROW | {"hardware": hardware, "config": config, "note": note})
    assert (far.zero_ranks, near.zero_ranks) == (None, 8)
    link = depths.links_of(far)[1]
    inside_s = 7 * link.inside.alpha_s + link.inside.base_s + 1e9 / 8 / link.inside.bandwidth
    assert depths._broadcast_s(1e9, 32, near) == pytest.approx(8 * inside_s, rel=0.3), "corrected by measured all-reduces"
    around_s = 7 * link.alpha_s + 8 * 7 * link.inside.alpha_s + link.base_s + 1e9 / 64 / (link.bandwidth * link.lanes)
    assert depths._broadcast_s(1e9, 32, far) <= 64 * around_s * (1 + 1e-9), "or by a quicker protocol"
    assert depths._broadcast_s(1e9, 1, far) < depths._broadcast_s(1e9, 32, far), "seven parameters are sent by seven ranks"
