from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.importers import Imported, read_deepspeed
from autopar.solve.manual import Manual

ZERO3 = """
{
  "train_batch_size": 128,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "steps_per_print": 10,
  "gradient_clipping": 1.0,
  "wall_clock_breakdown": false,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 100}},
  "bf16": {"enabled": true},
  "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "none"},
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  }
}
"""


def read(path: Path, settings: object, num_ranks: int = 8) -> Imported:
    (path / "ds.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return read_deepspeed(path / "ds.json", num_ranks)


def test_zero3(tmp_path: Path) -> None:
    found = read(tmp_path, ZERO3, 16)
    assert found.config == Manual(dp=16, zero=3, micro_batch=4, precision="bf16/bf16", offload="optimizer")
    assert (found.batch_size, found.sequence) == (128, None)
    assert [text.partition(":")[0] for text in found.left_out] == [
        "zero_optimization.overlap_comm=True",
        "zero_optimization.stage3_max_live_parameters=1000000000.0",
    ]
    assert found.unknown == ()


def test_experts(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 8}
    for settings in ({"expert_parallel": {"autoep_size": 2}}, {"moe": {"ep_size": 2}}, {"ep_size": 2}):
        found = read(tmp_path, sizes | settings)
        assert (found.config.dp, found.config.ep, found.unknown) == (8, 2, ())


@pytest.mark.parametrize(
    "sizes, batch, micro_batch",
    [
        ((32, 2, 2), 32, 2),
        ((32, 2, None), 32, 2),
        ((32, None, 2), 32, 2),
        ((None, 2, 3), 48, 2),
        ((32, None, None), 32, 4),
        ((None, 2, None), 16, 2),
        ((32, 2, "auto"), 32, 2),
        (("auto", 2, 4), None, 2),
        ((32, "auto", "auto"), 32, None),
        (("auto", "auto", "auto"), None, None),
        (("auto", "auto", 1), None, None),
    ],
)
def test_two_sizes_give_the_third(tmp_path: Path, sizes: tuple[object, ...], batch: int | None, micro_batch: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = read(tmp_path, {name: size for name, size in zip(names, sizes, strict=True) if size is not None})
    assert (found.batch_size, found.config.micro_batch) == (batch, micro_batch)
    assert len(found.left_out) == ("auto" in sizes)


@pytest.mark.parametrize("section, level", [({"stage": 2}, 2), ({}, 0), (True, 1), (False, 0)])
def test_stages(tmp_path: Path, section: object, level: int) -> None:
    assert read(tmp_path, {"train_batch_size": 8, "zero_optimization": section}).config.zero == level


def test_shards_of_some_ranks(tmp_path: Path) -> None:
    """MiCS, which is a form of stage 3."""
    found = read(tmp_path, {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 4}})
    assert (found.config.dp, found.config.zero, found.config.replicas, found.left_out) == (8, 3, 2, ())
    found = read(tmp_path, {"train_batch_size": 8, "zero_optimization": {"stage": 2, "mics_shard_size": 4}})
    assert (found.config.zero, found.config.replicas) == (2, 1)
    assert found.left_out == ("zero_optimization.mics_shard_size=4: it has no effect without ZeRO stage 3",)


def test_tensor_parallelism(tmp_path: Path) -> None:
    found = read(tmp_path, {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4}})
    assert (found.config, found.batch_size) == (Manual(dp=2, tp=4, micro_batch=1), 2)


def test_what_stands_in_code_is_said(tmp_path: Path) -> None:
    sections = {"pipeline": {"stages": "auto"}, "activation_checkpointing": {"partition_activations": True}}
    found = read(tmp_path, {"train_batch_size": 8, **sections})
    assert all("in the code of a program" in text for text in found.left_out)
    assert len(found.left_out) == 2


def test_what_is_unknown_is_reported(tmp_path: Path) -> None:
    found = read(tmp_path, {"train_batch_size": 8, "new": {"deep": [1]}, "zero_optimization": {"stage4": None}})
    assert found.unknown == ("new.deep=[1]", "zero_optimization.stage4=None")


@pytest.mark.parametrize(
    "settings, error",
    [
        ({}, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 12}, "a global batch of 12 is not a multiple of dp 8"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 3}, "not a multiple of dp 8 [*] micro-batch 3"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "32 is not train_micro_batch_size_per_gpu 2 [*] gradient_accumulation_steps 4 [*] 8 data-parallel ranks = 64",
        ),
        ({"train_batch_size": "32"}, "ds.json: train_batch_size is '32'; write a whole number"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, "write 0, 1, 2 or 3"),
        ({"train_batch_size": 8, "zero_optimization": 2}, "zero_optimization is 2; write true or false"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "mics_shard_size is 3 of 8 data-parallel"),
        (
            {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "ratio is 0.3 at stage 2, and DeepSpeed offloads a part at stage 3 alone",
        ),
        ({"train_batch_size": 8, "zero_optimization": {"offload_optimizer": {"ratio": 2}}}, "ratio is 2; write a number from 0 to 1"),
        ({"train_batch_size": 8, "sequence_parallel_size": 2}, "cannot be expressed"),
        ({"train_batch_size": 8, "expert_parallel": {"autoep_size": 3}}, "expert_parallel.autoep_size is 3 of 8 data-parallel ranks"),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 3}}, "does not divide the 8 ranks"),
        ('{"train_batch_size": 8, "train_batch_size": 16}', "ds.json: train_batch_size is set twice"),
        ('{"train_batch_size": 8,}', "ds.json is not JSON"),
        ([1], "holds a list"),
    ],
)
def test_errors(tmp_path: Path, settings: object, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, settings)


@pytest.mark.parametrize("section", ["elasticity", "autotuning"])
def test_what_chooses_the_sizes_itself_is_said(tmp_path: Path, section: str) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 1}
    assert read(tmp_path, sizes | {section: {"enabled": False}}).left_out == ()
    (said,) = read(tmp_path, sizes | {section: {"enabled": True}}).left_out
    assert said.startswith(f"{section}.enabled=True")


@pytest.mark.parametrize(
    "offload, wanted, left_out",
    [
        ({"offload_optimizer": {"device": "cpu"}}, "optimizer", []),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "parameters", []),
        ({"offload_param": {"device": "cpu"}}, "", ["offload_param.device=cpu"]),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}, "", ["offload_optimizer.device=nvme"]),
        ({"cpu_offload": True}, "optimizer", []),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "optimizer", []),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "", ["offload_optimizer.device=cpu", "offload_optimizer.ratio=0.3"]),
        ({"offload_optimizer": {"device": "none", "ratio": 0.3}}, "", []),
    ],
)
def test_offload(tmp_path: Path, offload: dict[str, object], wanted: str, left_out: list[str]) -> None:
    found = read(tmp_path, {"train_batch_size": 16, "zero_optimization": {"stage": 3, **offload}})
    assert found.config == Manual(dp=8, zero=3, micro_batch=2, offload=wanted)
    assert [text.partition(":")[0].removeprefix("zero_optimization.") for text in found.left_out] == left_out


@pytest.mark.parametrize(
    "stage, offload, wanted, left_out",
    [
        (2, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "optimizer", "offload_param.device=cpu"),
        (1, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}, "optimizer", ""),
        (0, {"offload_optimizer": {"device": "cpu"}}, "", "offload_optimizer.device=cpu"),
        (0, {"cpu_offload": True}, "", "cpu_offload=True"),
    ],
)
def test_offload_that_a_stage_does_not_have(tmp_path: Path, stage: int, offload: dict[str, object], wanted: str, left_out: str) -> None:
    found = read(tmp_path, {"train_batch_size": 16, "zero_optimization": {"stage": stage, **offload}})
    assert (found.config.zero, found.config.offload) == (stage, wanted)
    assert [text.partition(": it has no effect ")[0] for text in found.left_out] == [f"zero_optimization.{left_out}"] * bool(left_out)


@pytest.mark.parametrize(
    "settings, precision, notes",
    [
        ({}, "", 0),
        ({"bf16": {"enabled": False}}, "", 0),
        ({"bf16": {"enabled": True}}, "bf16/bf16", 0),
        ({"bfloat16": {"enabled": True}, "communication_data_type": "fp32"}, "bf16", 0),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16/fp16", 0),
        ({"fp16": {"enabled": True}, "communication_data_type": "bf16"}, "fp16/fp16", 1),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "bf16/bf16", 0),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "bf16/bf16", 1),
        ({"bf16": {"enabled": "auto"}}, "", 1),
        ({"communication_data_type": "fp16"}, "", 1),
        ({"amp": {"enabled": True}}, "", 1),
    ],
)
def test_precision(tmp_path: Path, settings: dict[str, object], precision: str, notes: int) -> None:
    found = read(tmp_path, {"train_batch_size": 8, **settings})
    assert (found.config.precision, len(found.left_out), found.unknown) == (precision, notes, ())


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "exclude each other in DeepSpeed"),
        ({"bf16": {"enabled": True}, "communication_data_type": "int4"}, "communication_data_type is 'int4'; write a dtype"),
    ],
)
def test_precision_that_contradicts_itself(tmp_path: Path, settings: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, {"train_batch_size": 8, **settings})
