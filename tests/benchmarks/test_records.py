"""What is read of published runs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.test_reference import ROW

STAGES = "ranks should have a layer or more, and stages one, the embedding or the head"
MOE = {"experts": 8, "topk": 2, "moe_ffn": 384}


def changed(path: str, value: object) -> dict[str, Any]:
    """`ROW` with another value at a path."""
    part, _, name = path.rpartition(".")
    return ROW | ({part: ROW[part] | {name: value}} if part else {name: value})


@pytest.mark.parametrize(
    "path, value, why",
    [
        ("id", ["a"], 'id is ["a"]; it should be text'),
        ("note", [1], "note is [1]; it should be text"),
        ("iter_time_s", "1.38", 'iter_time_s is "1.38"; it should be a number'),
        ("iter_time_s", True, "iter_time_s is true; it should be a number"),
        ("measured", [], "measured is []; it should be an object"),
        ("measured.peak_mem_gb", "38", 'measured.peak_mem_gb is "38"; it should be a number'),
        ("model.seq", [1024], "model.seq is [1024]; it should be a whole number from 1 to 1,000,000,000"),
        ("model.moe", [], "model.moe is []; it should be an object"),
        ("model.heads", 5, "model.heads is 5; it should be a multiple of kv_heads = 2, and no more than hidden = 256"),
        (
            "model.family",
            "flan-t5-xl",
            "model.family 'flan-t5-xl' is no decoder-only transformer, and nothing else is predicted",
        ),
        ("model.family", "BERT", "model.family 'bert' is no decoder-only transformer, and nothing else is predicted"),
        (
            "hardware.gpus_per_node",
            0,
            "hardware.gpus_per_node is 0; it should be a whole number from 1 to 1,000,000,000",
        ),
        ("hardware.gpus_per_node", 3, "8 GPUs are no multiple of hardware.gpus_per_node = 3"),
        ("hardware.inter_gbps", float("nan"), "hardware.inter_gbps is NaN; it should be a number above 0"),
        ("config.tp", "8", 'config.tp is "8"; it should be a whole number from 1 to 1,000,000,000'),
        ("config.tp", 1.5, "config.tp is 1.5; it should be a whole number from 1 to 1,000,000,000"),
        ("config.dp", 10**400, f"config.dp is 1{'0' * 59}...; it should be a whole number from 1 to 1,000,000,000"),
        ("config.zero", 4, "config.zero is 4; it should be a whole number from 0 to 3"),
        ("config.sp", 1, "config.sp is 1; it should be true or false"),
        ("config.recompute", True, "config.recompute is true; it should be text"),
        ("config.vpp", 6, f"pp * vpp = 2 * 6 stages of 8 layers; {STAGES}"),
        ("model.layers", 1, f"pp * vpp = 2 * 1 stages of 1 layers; {STAGES}"),
        (
            "config.global_batch",
            4 * 10**6,
            "1,000,000 micro-batches of 2 stages; no more than 1,000,000 in all are played",
        ),
    ],
)
def test_what_makes_no_sense_is_said_by_its_field(records: ModuleType, tmp_path: Path, path: str, value: object, why: str) -> None:
    """And takes nothing from others, nor from what was measured."""
    (tmp_path / "runs.json").write_text(json.dumps([changed(path, value), ROW]))
    (good,), (bad,) = records.load_records(tmp_path / "runs.json")
    assert (good.id, bad.why) == ("small", why)
    assert bad.id == ("0" if path == "id" else "small")
    assert bad.step_time_s == (None if path == "iter_time_s" else 1.0)


def test_interleaved_stages_want_whole_rounds_of_micro_batches(records: ModuleType) -> None:
    row = ROW | {"config": ROW["config"] | {"vpp": 2, "global_batch": 12}}
    with pytest.raises(ValueError, match=r"3 micro-batches are no multiple of pp = 2, which interleaving \(vpp = 2\) takes together"):
        records.read_record(row)


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf")])
def test_what_nobody_can_have_measured_is_not_measured(records: ModuleType, value: float) -> None:
    record = records.read_record(changed("iter_time_s", value))
    assert record.step_time_s is None
    assert record.assumed == (f"iter_time_s is {json.dumps(value)}, and so not measured",)
    assert records.read_record(changed("measured.peak_mem_gb", value)).peak_memory_bytes is None


def test_numbers_are_names_and_whole_numbers_may_have_a_point(records: ModuleType) -> None:
    assert records.read_record(changed("id", 7)).id == "7"
    assert records.read_record(changed("id", None), 3).id == "3"
    assert records.read_record(changed("config.tp", 2.0)) == records.read_record(ROW)
    assert records.read_record(changed("config.recompute", False)).recompute == "none"


def test_a_family_by_any_spelling(records: ModuleType) -> None:
    """Which is that of the longest name that is known."""
    spellings = {
        "Llama3.1": "llama3.1",
        "GPT_OSS": "gpt-oss",
        "Qwen3-MoE": "qwen3-moe",
        "mistralai/Mixtral 8x7B": "mixtral",
    }
    for name, other in spellings.items():
        one, two = (records.read_record(changed("model.family", family)) for family in (name, other))
        assert replace(one.dims, family=other) == two.dims
        assert one.assumed == two.assumed == ()


@pytest.mark.parametrize(
    "family, rotary, gated",
    [
        ("gpt3", False, False),
        ("bloom-like", False, False),
        ("nemotron4", True, False),
        ("grok-1", True, True),
        ("yi", True, True),
    ]
    + [("Gemma-2", True, True), ("phi-3", True, True), ("gpt-oss", True, True)],
)
def test_what_a_family_has(records: ModuleType, family: str, rotary: bool, gated: bool) -> None:
    record = records.read_record(changed("model.family", family))
    assert (record.dims.rotary, record.dims.gated, record.assumed) == (rotary, gated, ())


def test_a_family_that_is_not_known_is_like_gpt(records: ModuleType) -> None:
    record = records.read_record(changed("model.family", "Falcon"))
    assert (record.dims.rotary, record.dims.gated) == (False, False)
    assert record.assumed == ("family 'falcon' assumed like GPT",)
    model = ROW["model"] | {"family": "Falcon", "moe": MOE}
    experts = records.read_record(ROW | {"model": model})
    assert experts.dims.gated
    assert experts.assumed == ("family 'falcon' assumed like GPT, with experts that have gates",)


def test_widths_of_experts(records: ModuleType) -> None:
    def dims(ffn: int | None, moe: Mapping[str, object]) -> Any:
        return records.read_record(ROW | {"model": ROW["model"] | {"ffn_hidden": ffn, "moe": moe}})

    assert dims(512, MOE).dims.expert_ffn == dims(None, MOE).dims.expert_ffn == 384
    for moe in (MOE | {"moe_ffn": None}, {"experts": 8, "topk": 2}):
        record = dims(512, moe)
        assert (record.dims.expert_ffn, record.assumed) == (512, ("moe_ffn not stated: ffn_hidden, 512",))
    assert dims(512, MOE | {"shared_experts": None}).dims.shared == 0
    with pytest.raises(ValueError, match=r"model\.ffn_hidden not stated"):
        dims(None, {"experts": 0})


@pytest.mark.parametrize(
    "name, gpu",
    [
        ("H100", "H100-80GB"),
        ("H100-SXM5-80GB", "H100-80GB"),
        ("NVIDIA H100 80 GB HBM3", "H100-80GB"),
        ("h100-80gb", "H100-80GB"),
    ]
    + [
        ("V100-32GB", "V100-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("H200-141GB", "H200"),
    ]
    + [
        ("b200", "B200"),
        ("h100-96gb-hbm2e-500w", "H100-96GB-HBM2e-500W"),
        ("GB200", "GB200"),
        ("H100-PCIe", "H100-PCIe"),
        ("T4", "T4"),
    ],
)
def test_a_gpu_by_any_spelling(records: ModuleType, name: str, gpu: str) -> None:
    record = records.read_record(changed("hardware.gpu", name))
    assert (record.gpu, record.assumed) == (gpu, ())


def test_a_gpu_with_memory_of_several_sizes(records: ModuleType) -> None:
    record = records.read_record(changed("hardware.gpu", "A100"))
    assert (record.gpu, record.assumed) == ("A100-80GB", ("memory of A100 not stated: A100-80GB",))


@pytest.mark.parametrize(
    "name, precision",
    [("BF16", "bf16"), ("bfloat16", "bf16"), ("bf16_pure", "bf16-pure"), ("FP8-CS", "fp8"), ("mxfp8", "mxfp8")],
)
def test_a_precision_by_any_spelling(records: ModuleType, name: str, precision: str) -> None:
    assert records.read_record(changed("config.precision", name)).precision == precision
